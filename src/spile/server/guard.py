"""Lets through what may talk to the model: the right host, no foreign web page, whoever has a key.

It does not know what a request wants. A server on this machine alone still has visitors that its user did not
send: any web page that a browser shows can send requests to 127.0.0.1, and by a name that it makes point there
("DNS rebinding") it could read the answers too. So requests must name a loopback address there, or a host that was
allowed, and those of a page from elsewhere are refused unless that page's origin was allowed. A page that is allowed
may send whatever headers it likes and read every reply, errors too.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spile.server.errors import Failure
from spile.server.names import hostname_of, is_loopback
from spile.server.replies import failure_reply

OPEN_PATHS = ("/", "/health")  # a page without secrets, and whether the server is there
_EXPOSED = "x-request-id, retry-after, www-authenticate"  # what a page may read beside the body
_METHODS = "GET, HEAD, POST"
_PREFLIGHT_SECONDS = 600  # that a browser may remember it
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4000}")


class Guard:
    """The ASGI app before all others."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Collection[str] = (),
        is_loopback: bool,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
    ) -> None:
        """`hosts` are allowed beside those of the loopback; where there are any on another address, no others are."""
        self._app = app
        self._api_keys = tuple(key.encode() for key in api_keys)
        self._is_loopback = is_loopback
        self._hosts = frozenset(hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        if origin and (origin in self._origins or "*" in self._origins):
            send = _shared(send, origin)
        await (self._reply(scope, headers) or self._app)(scope, receive, send)

    def _reply(self, scope: Scope, headers: Headers) -> Response | None:
        """Return a refusal, or what a browser is told that asks whether its page may send a request; else None."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_own(hostname_of(host)):
            return _forbidden(
                "this server answers only requests that name a loopback address, such as 127.0.0.1, or a host that "
                "was allowed; see --allowed-host",
                "host",
            )
        if origin is not None and not self._is_welcome(origin, host):
            return _forbidden("web pages of this origin are not allowed here; see --cors-origin", "origin")
        is_asking = "access-control-request-method" in headers and origin is not None
        if scope["method"] == "OPTIONS" and is_asking:
            return _preflight(headers)
        if not self._api_keys or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip()] if scheme.lower() == "bearer" else []
        given += headers.getlist("x-api-key")
        if any(self._is_key(key) for key in given if key):
            return None
        message = (
            "the API key is wrong"
            if any(given) or token
            else "this server needs an API key (Authorization: Bearer KEY, or x-api-key: KEY)"
        )
        failure = Failure(401, message, "authentication_error", None, "invalid_api_key")
        return failure_reply(failure, {"www-authenticate": "Bearer"})

    def _is_own(self, hostname: str) -> bool:
        if not self._is_loopback and not self._hosts:
            return True
        return is_loopback(hostname) or hostname in self._hosts

    def _is_key(self, given: str) -> bool:
        """Compare with all keys, in a time that does not say which came near."""
        return sum(hmac.compare_digest(given.encode("latin-1"), key) for key in self._api_keys) > 0

    def _is_welcome(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        return origin.partition("://")[2] == host != ""


def _shared(send: Send, origin: str) -> Send:
    """Let a page read what is sent."""

    async def send_shared(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = _EXPOSED
            headers.add_vary_header("Origin")
        await send(message)

    return send_shared


def _preflight(asked: Headers) -> Response:
    """Allow whatever the page's request would have. A page of another network (of the open net, to 127.0.0.1) asks for
    that too. Source: https://wicg.github.io/private-network-access/
    """
    headers = {"access-control-allow-methods": _METHODS, "access-control-max-age": str(_PREFLIGHT_SECONDS)}
    wanted = asked.get("access-control-request-headers", "")
    if _HEADER_NAMES.fullmatch(wanted):
        headers["access-control-allow-headers"] = wanted
    if asked.get("access-control-request-private-network") == "true":
        headers["access-control-allow-private-network"] = "true"
    return Response(status_code=200, headers=headers)


def _forbidden(message: str, param: str) -> Response:
    return failure_reply(Failure(403, message, "permission_error", param, "forbidden"))
