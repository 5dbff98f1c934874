"""Turns values and failures into HTTP replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spile.server.errors import Failure
from spile.server.visits import visit_of


class _FailureReply(Response):
    """An error as OpenAI's clients expect it; who sees every request is told what it was."""

    media_type = "application/json"

    def __init__(self, failure: Failure, headers: dict[str, str]) -> None:
        super().__init__(msgspec.json.encode(failure.body()), failure.status, headers)
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit_of(scope).refusal = self._failure
        await super().__call__(scope, receive, send)


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a value as JSON."""
    return Response(msgspec.json.encode(value), status, dict(headers or {}), "application/json")


def failure_reply(failure: Failure, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as OpenAI's clients expect it."""
    more = dict(headers or {})
    if failure.retry_seconds is not None:
        more["retry-after"] = str(failure.retry_seconds)
    return _FailureReply(failure, more)
