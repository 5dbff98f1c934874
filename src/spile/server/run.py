"""Turns a model that can be loaded into a server that runs until it is told to stop.

The port opens first, then the model is loaded, so that whoever waits for it can ask /health. What the server and
its requests take in memory is made or set aside before the engine plans what is left of a budget.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spile.errors import SpileError
from spile.server import constrain
from spile.server.app import ServerOptions, Service
from spile.server.intake import Limits
from spile.server.listen import Server
from spile.server.log import Log
from spile.server.worker import Worker

if TYPE_CHECKING:
    from spile.model import Model

_SERVER_NBYTES = (
    3_000_000  # of a budget: threads' stacks, the log, a sampler's scratch (1.8 MB for 151,936 entries)
)
_ANSWER_NBYTES = 500_000  # for each: frames on their way to clients
# For a text that is encoded beside a computation: 18,000 letters of ASCII beside a table of 5 MB, and more where a
# hundredth of the budget is more. A longer one borrows the pool's memory between two steps.
_TEXT_NBYTES = 6_000_000
_TEXT_SHARE = 100
_TABLE_NBYTES = 4_000_000
_STOP_SECONDS = 5.0
_CROWD_SECONDS = 60.0  # between two lines about too many connections


def text_room_nbytes(budget: int) -> int:
    """Return what of a budget a text that is encoded beside a computation may take."""
    return max(_TEXT_NBYTES, budget // _TEXT_SHARE)


def reserved_nbytes(limits: Limits, parallel: int, budget: int | None) -> int:
    """Return what of a budget the server and its requests may take beside the engine."""
    # Of the room for texts, what a table takes is in the process by then: it was used once.
    texts = 0 if budget is None else text_room_nbytes(budget) - _TABLE_NBYTES
    return _SERVER_NBYTES + parallel * _ANSWER_NBYTES + limits.reserved_nbytes + texts


@dataclass(frozen=True)
class Load:
    """How a server's model becomes ready. `open` makes the model."""

    open: Callable[[], Model]

    def __call__(self) -> Model:
        """Return a model that is ready to run."""
        model = self.open()
        try:
            _warm(model)
            if model.budget_bytes is not None:
                model.text_room_nbytes = text_room_nbytes(model.budget_bytes)
            model.open()
        except BaseException:
            model.close()
            raise
        return model


class Serving:
    """One model on one port. `worker` and `server` are its two halves, a thread each."""

    def __init__(
        self,
        listener: socket.socket,
        load: Callable[[], Model],
        options: ServerOptions,
        *,
        parallel: int,
        max_queue: int,
        defaults: Mapping[str, Any],
        log: Log | None = None,
        on_ready: Callable[[Model], None] = lambda model: None,
    ) -> None:
        self._listener = listener
        self.worker = Worker(
            load,
            parallel=parallel,
            max_queue=max_queue,
            budget_bytes=options.budget_bytes,
            defaults=defaults,
            log=log,
            on_ready=on_ready,
            on_end=self._note_end,
        )
        self.service = Service(self.worker, options)
        self.server = Server(
            self.service.app(),
            on_stop=self.worker.stop,
            most_connections=options.limits.connections,
            on_crowd=self._note_crowd,
        )
        self._crowded = -_CROWD_SECONDS

    def run(self) -> None:
        """Serve until a signal, or `stop`, says to end.

        Raises: what loading the model raises.
        """
        self.worker.start()
        try:
            self.server.run(sockets=[self._listener])
        finally:
            self.worker.stop()
            self.worker.join(_STOP_SECONDS)
            self.service.intake.close()
            self.worker.log.close()
        if self.worker.error is not None and self.worker.model is None:
            raise self.worker.error

    def stop(self) -> None:
        """End as a signal would; from any thread."""
        self.server.stop()

    def _note_crowd(self) -> None:
        """Say, now and then, that there are more connections than are kept."""
        now = time.monotonic()
        if now - self._crowded >= _CROWD_SECONDS:
            self._crowded = now
            most = self.server.most_connections
            self.worker.log.write(f"more than {most:,} connections: those that wait for nothing are closed")

    def _note_end(self) -> None:
        """A model that never came ends the server; one that failed later leaves it there to say so."""
        if self.worker.model is None:
            self.server.should_exit = True


def _warm(model: Model) -> None:
    """Encode something, by text and by messages, so that what that imports and reads is in memory before the plan
    is made.
    """
    if model.tokenizer is not None:
        model.encode("warm", raw=True)
        if model.can_reason:
            model.end_of_reasoning()
        if model.chat_template is not None:
            with suppress(SpileError):
                model.encode([{"role": "user", "content": "warm"}])
    preload = getattr(constrain, "preload", None)
    if preload is not None:
        preload(model)
