"""Turns values and failures into HTTP replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from spile.server.errors import Failure


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a value as JSON."""
    return Response(msgspec.json.encode(value), status, dict(headers or {}), "application/json")


def failure_reply(failure: Failure, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as OpenAI's clients expect it."""
    more = dict(headers or {})
    if failure.retry_seconds is not None:
        more["retry-after"] = str(failure.retry_seconds)
    return json_reply(failure.body(), failure.status, more)
