"""Turns every error into a status and the body that OpenAI's clients understand: one table.

It does not know where errors come from, nor how answers are sent. What is not in the table is a fault of ours:
500, with no word of what it was, which goes to the log instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from spile.errors import (
    BudgetError,
    ContextError,
    ModelError,
    OptionError,
    ReadError,
    SpileError,
    TextError,
)

_INVALID = "invalid_request_error"
_SERVER = "server_error"
# A message about an option begins with its name: `messages[2].content is ...`.
_NAMED = re.compile(r"([a-z_]+)(?:[\[.][^ ]*)? (?:is|has|names|needs|of)\b")


class RequestError(OptionError):
    """A request that cannot be answered as it is; `param` names what in it."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.param = param
        self.code = code
        self.status = status


class BusyError(SpileError):
    """The queue is full; `retry_seconds` says when it may be worth another try."""

    def __init__(self, message: str, retry_seconds: int) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class UnavailableError(SpileError):
    """The model is not there: it is still loading, or failed, or the server is ending."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Failure:
    """What a client is told."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_seconds: int | None = None

    def body(self) -> dict[str, Any]:
        """Return the body of an answer, or of an error frame in a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


# In order: the first class that fits decides.
_TABLE: tuple[tuple[type[SpileError], int, str, str | None], ...] = (
    (BusyError, 429, "rate_limit_error", "queue_full"),
    (UnavailableError, 503, _SERVER, None),
    (ContextError, 400, _INVALID, "context_length_exceeded"),
    (OptionError, 400, _INVALID, None),
    (TextError, 400, _INVALID, None),
    (ReadError, 500, _SERVER, "read_error"),
    (BudgetError, 503, _SERVER, "out_of_memory"),
    (ModelError, 500, _SERVER, "model_error"),
    (SpileError, 500, _SERVER, None),
)


def failure_of(error: BaseException) -> Failure:
    """Return what a client is told of an error. Paths stay in the log."""
    if isinstance(error, MemoryError):
        return Failure(
            503, "the server has not enough memory for this request", _SERVER, None, "out_of_memory"
        )
    row = next((row for row in _TABLE if isinstance(error, row[0])), None)
    if row is None or not isinstance(error, SpileError):
        return Failure(500, "the server failed; its log says why", _SERVER, None, "internal_error")
    _, status, type_, code = row
    if isinstance(error, (ReadError, ModelError)):
        message = "the model's weights cannot be read" if isinstance(error, ReadError) else "the model failed"
        return Failure(status, f"{message}; the server's log says why", type_, None, code)
    message = f"{error.message}. {error.hint}" if error.hint else error.message
    param = None
    if isinstance(error, RequestError):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, ContextError):
        param = "prompt"
    elif isinstance(error, OptionError):
        named = _NAMED.match(error.message)
        param = named[1] if named else None
    return Failure(
        status=status,
        message=message,
        type=type_,
        param=param,
        code=error.code if isinstance(error, UnavailableError) else code,
        retry_seconds=error.retry_seconds if isinstance(error, BusyError) else None,
    )
