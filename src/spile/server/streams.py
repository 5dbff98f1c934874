"""Turns a request's events into bytes of an HTTP answer, streamed (server-sent events) or whole.

It does not know what is in an answer. While nothing is sent, a comment goes out every few seconds by the clock, so
that neither client nor proxy takes a long prompt for a dead server; after a failure nothing more goes out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from spile.server.answers import Answers
from spile.server.intake import Charge
from spile.server.tasks import Done, Event, Failed, Said, Task

COMMENT_SECONDS = 4.0  # of silence; clients and proxies are known to give up after 5 to 60
STALL_SECONDS = 60.0  # that a client may take to read what it was sent
# Of an answer that is kept until it is whole: a token, and an alternative to one with its place in the JSON.
_SAID_NBYTES, _LOGPROB_NBYTES = 100, 600
_CHARGED_NBYTES = 64_000  # at once
_PIECE_NBYTES = 32_768  # sent at once, before it is seen whether the client reads
_COMMENT = b": waiting for the model\n\n"
_END = b"data: [DONE]\n\n"


class Mailbox:
    """The events of one task, from the model thread to the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def send(self, event: Event) -> None:
        """Take an event; called on the model thread. A loop that has ended takes nothing."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next(self, seconds: float | None = None) -> Event | None:
        """Return the next event; None where none comes in time."""
        try:
            return await asyncio.wait_for(self._events.get(), seconds)
        except TimeoutError:
            return None


class EventStream(StreamingResponse):
    """A stream of server-sent events. It ends, too, where its client reads nothing any more; `on_end` is called
    however that comes.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], *, on_end: Callable[[], None]) -> None:
        super().__init__(frames, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._frames = frames
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_soon(message: Message) -> None:
            await asyncio.wait_for(send(message), STALL_SECONDS)

        try:
            await super().__call__(scope, receive, send_soon)
        except TimeoutError:
            return  # and the connection is closed, as the answer is not complete
        finally:
            self._on_end()
            await self._frames.aclose()


class WholeReply(Response):
    """An answer that is sent as fast as its client reads it, and not kept for one who does not. `on_end` is called
    however that ends.
    """

    def __init__(self, reply: Response, *, on_end: Callable[[], None]) -> None:
        super().__init__(reply.body, reply.status_code)
        self.raw_headers = reply.raw_headers
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            for start in range(0, len(self.body), _PIECE_NBYTES):
                piece = self.body[start : start + _PIECE_NBYTES]
                more = start + _PIECE_NBYTES < len(self.body)
                message = {"type": "http.response.body", "body": piece, "more_body": more}
                await asyncio.wait_for(send(message), STALL_SECONDS)
        except TimeoutError:
            return  # and the connection is closed, as the answer is not complete
        finally:
            self._on_end()


def frame(value: Any) -> bytes:
    """Return one server-sent event with a JSON value."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def frames(
    mailbox: Mailbox,
    first: Event | None,
    task: Task,
    answers: Answers,
    comment_seconds: float = COMMENT_SECONDS,
) -> AsyncGenerator[bytes, None]:
    """Yield the frames of a streamed answer; `first` is an event that was taken from the mailbox before."""
    event = first
    while True:
        if event is None:
            event = await mailbox.next(comment_seconds)
        if event is None:
            yield _COMMENT
            continue
        if isinstance(event, Said):
            for chunk in answers.push(event):
                yield frame(chunk)
        elif isinstance(event, Failed):
            yield frame(event.failure.body())
            return
        elif isinstance(event, Done):
            if answers.request.include_usage:
                yield frame(answers.usage_chunk())
            yield _END
            return
        task.note_read()
        event = None


async def whole(mailbox: Mailbox, task: Task, answers: Answers, charge: Charge) -> Event:
    """Take all of an answer in, charged for as it grows; return the event that ended it: `Done` or `Failed`.

    Raises: BusyError where there is no memory for more of it.
    """
    owed = 0
    while True:
        event = await mailbox.next()
        if isinstance(event, Said):
            answers.push(event)
            logprob = event.chunk.logprob
            owed += _SAID_NBYTES + (0 if logprob is None else (1 + len(logprob.top)) * _LOGPROB_NBYTES)
            if owed >= _CHARGED_NBYTES:
                charge.grow(owed)
                owed = 0
        elif isinstance(event, (Done, Failed)):
            return event
        task.note_read()


async def until_gone(work: Awaitable[Any], receive: Receive) -> Any | None:
    """Wait for work that ends in something; None where the client leaves first."""
    waiting = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        for task in (waiting, gone):
            task.cancel()
        await asyncio.gather(waiting, gone, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
