"""Lets through what may talk to the model: the right host, no foreign web page, whoever has the key.

It does not know what a request wants. A server on this machine alone still has visitors that its user did not
send: any web page that a browser shows can send requests to 127.0.0.1, and by a name that it makes point there
("DNS rebinding") it could read the answers too. So requests must name a loopback address as their host there, and
those of a page from elsewhere are refused unless that page's origin was allowed.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from spile.server.errors import Failure
from spile.server.replies import failure_reply

OPEN_PATHS = ("/", "/health")  # a page without secrets, and whether the server is there


class Guard:
    """The ASGI app before all others."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, is_loopback: bool, origins: Collection[str] = ()
    ) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._is_loopback = is_loopback
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._is_loopback and not is_loopback(_hostname(host)):
            return _forbidden(
                "this server answers only requests to a loopback address, such as 127.0.0.1", "host"
            )
        if origin is not None and not self._is_welcome(origin, host):
            return _forbidden("web pages of this origin are not allowed here; see --cors-origin", "origin")
        if self._api_key is None or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), self._api_key):
            return None
        message = (
            "the API key is wrong" if token else "this server needs an API key (Authorization: Bearer KEY)"
        )
        failure = Failure(401, message, "authentication_error", None, "invalid_api_key")
        return failure_reply(failure, {"www-authenticate": "Bearer"})

    def _is_welcome(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        return origin.partition("://")[2] == host != ""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine itself, whatever a name server says."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hostname(host: str) -> str:
    """Return what a Host header names, without its port; empty for what names nothing."""
    if "@" in host:
        return ""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets that hold no address
        return ""


def _forbidden(message: str, param: str) -> Response:
    return failure_reply(Failure(403, message, "permission_error", param, "forbidden"))
