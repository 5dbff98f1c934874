"""Sees every request come and go: gives it an id, and makes of it one line of the log and one count.

The outermost ASGI app; it does not know what a request wants. Whoever refuses or answers one leaves word on its
`Visit`, found by `visit_of`; what never becomes a request (malformed HTTP) is told by `refuse`. The line is written
before the reply's last byte goes out, so whoever has the reply finds the line.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spile.errors import quote
from spile.server.errors import Failure, failure_of
from spile.server.log import Log, finish_reason, summary
from spile.server.metrics import Metrics
from spile.server.tasks import Task

_KEY = "spile.visit"  # in an ASGI scope
_HEADER = b"x-request-id"
_NO_ID_LETTER = re.compile(rb"[^A-Za-z0-9._:/+=@-]")
_LONGEST_ID = 64
CLIENT_LEFT = 499  # in the log and the counts, as other servers have it: nobody is there to be told
_METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")


@dataclass(eq=False)
class Visit:
    """One request, from its head to the end of its reply. `key` is ours, and part of an answer's own id; `id` is what
    the reply's x-request-id says: the client's, where it sent one.
    """

    method: str
    path: str  # as it is counted
    client: str
    shown_path: str  # as it came, made safe to show
    given_id: str = ""
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    created: float = field(default_factory=time.perf_counter)
    status: int = 0
    task: Task | None = None
    refusal: Failure | None = None
    is_sent: bool = False  # all of the reply
    is_told: bool = False

    @property
    def id(self) -> str:
        return self.given_id or self.key

    @property
    def failure(self) -> Failure | None:
        """What the client was told went wrong."""
        return self.refusal or (None if self.task is None else self.task.failure)

    @property
    def outcome(self) -> str:
        """How it ended, in a word."""
        if self.failure is not None:
            return self.failure.code or self.failure.type
        if self.status == CLIENT_LEFT:
            return "cancelled"
        if self.task is not None and self.task.is_answered:
            return finish_reason(self.task)
        return "ok" if self.status < 400 else "refused"


def visit_of(scope: Mapping[str, Any]) -> Visit:
    """Return a request's visit."""
    found: Visit = scope[_KEY]
    return found


class Visits:
    """The ASGI app around all others."""

    def __init__(self, app: ASGIApp, *, paths: frozenset[str], log: Log, metrics: Metrics) -> None:
        """`paths` are those that are counted by name; one that ends in / stands for all below it."""
        self._app = app
        self._paths = paths
        self._log = log
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = self._visit(scope)
        scope[_KEY] = visit

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (_HEADER, visit.id.encode())]}
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                visit.is_sent = True
                self._end(visit)
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as error:
            self._log.failed(visit.key, error)
            if visit.failure is None:
                visit.refusal = failure_of(error)
        finally:
            self._end(visit)

    def refuse(self, failure: Failure, client: object) -> str:
        """Take note of what came and was no request; return the id for its reply."""
        visit = Visit("?", "malformed", _address(client), "malformed")
        visit.status, visit.refusal, visit.is_sent = failure.status, failure, True
        self._end(visit)
        return visit.id

    def _visit(self, scope: Scope) -> Visit:
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        path, method = scope["path"], scope["method"]
        below = f"{path.rpartition('/')[0]}/"
        known = path if path in self._paths else below if below != "/" and below in self._paths else "other"
        return Visit(
            method=method if method in _METHODS else "?",
            path=known,
            client=_address(scope.get("client")),
            shown_path=quote(path)[1:-1],
            given_id=_NO_ID_LETTER.sub(b"", given)[:_LONGEST_ID].decode(),
        )

    def _end(self, visit: Visit) -> None:
        """Tell of a visit, once: of one whose client left when the work for it has ended too."""
        if visit.is_told:
            return
        visit.is_told = True
        if not visit.is_sent and visit.failure is None:
            visit.status = CLIENT_LEFT
        if visit.status == CLIENT_LEFT and visit.task is not None:
            visit.task.when_over(partial(self._tell, visit))
        else:
            self._tell(visit)

    def _tell(self, visit: Visit) -> None:
        """Write the one line of a visit, and count it."""
        task, failure = visit.task, visit.failure
        self._metrics.ended(visit.path, visit.status, visit.outcome)
        what = f"{visit.method} {visit.shown_path} {visit.status} {visit.outcome}"
        parts = [f"{visit.client} {what}", f"{time.perf_counter() - visit.created:.2f} s"]
        if failure is not None:
            parts.append(failure.message)
        if task is not None and task.is_answered:
            parts.append(summary(task))
        elif task is not None and task.choices:
            who = "the client left " if visit.status == CLIENT_LEFT else ""
            parts.append(f"{who}after {sum(choice.completion_tokens for choice in task.choices):,} tokens")
        line = f"request {visit.key}{visit.given_id and f' as {visit.given_id}'}: {'; '.join(parts)}"
        if task is not None and task.choices:
            self._log.write(line)  # work was done for it
        else:
            self._log.note(f"{visit.method} {visit.path} {visit.status} {visit.outcome}", line)


def _address(client: object) -> str:
    with suppress(TypeError, IndexError, KeyError):
        return str(client[0])  # type: ignore[index]
    return "-"
