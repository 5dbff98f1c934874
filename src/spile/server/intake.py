"""Bounds what requests take before there is an answer: bodies that are coming in, and what they become once read.

It does not know HTTP's details, models or answers. A body of a megabyte may be twenty-five once it is Python objects
(an empty list is two characters and 64 bytes), and many may come at once; so bytes are taken from an allowance before
they are used, and the allowance is a part of the plan that the engine makes of its budget. Three things are taken:
a body's bytes before the first of them is read from the socket, what it will be when read (counted in its characters
by the native core) before it is, and what its answers keep until they end. Who finds too little waits, and is told to
come again where that takes too long; who alone would take too much is refused with both numbers.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from starlette.requests import Request as HttpRequest

from spile import _core
from spile.errors import SpileError
from spile.memory import trim
from spile.server.encoding import BodyDecoder
from spile.server.errors import BusyError, RequestError

T = TypeVar("T")

BODY_SECONDS = 30.0  # that a client may take to send a body
WAIT_SECONDS = 20.0  # that a request may wait for room
RETRY_SECONDS = 5  # after which another try may be worth it
_SLOW_SECONDS = 2.0  # after which a body that others wait for must have come at this rate, or goes
_SLOW_BYTES_PER_SECOND = 50_000
_DRAINED_FACTOR = 4  # of a body that is too large, how much is still read, so that the refusal arrives
_INLINE_NBYTES = 64_000  # bodies up to this are read on the loop: well under a millisecond

_LEAST_BODY_NBYTES, _MOST_BODY_NBYTES = 500_000, 16_000_000
_LEAST_READ_NBYTES, _MOST_READ_NBYTES = 6_000_000, 160_000_000  # a million ids in one request, in 0.2 s
_READ_SHARE = 0.02  # of a budget, for what bodies are when read
_REQUEST_SHARE = 0.6  # of that, for one request
# A connection's objects, its head and what comes before the body is asked for (`listen.py`), measured with 250 uploads
# held open: 60 kB each.
CONNECTION_NBYTES = 64_000
_LEAST_CONNECTIONS, _MOST_CONNECTIONS = 40, 256
_CONNECTION_SHARE = 0.009

# Bytes as Python objects, read by msgspec, checked against their type and made into what a template is given. Measured
# with tracemalloc on CPython 3.11 for 200,000 of each: read and checked alone they are 96 to 206, 192, 151, 59 and 44.
_LIST_NBYTES = 176  # typed ones are made twice
_OBJECT_NBYTES = 240
_KEY_NBYTES = 160
_STRING_NBYTES = 64
_SCALAR_NBYTES = 64
_TEXT_FACTOR = 4  # a text as it came, as the template's, and as what the template makes of it while it does
_TRIMMED_NBYTES, _TRIM_SECONDS = 1_000_000, 0.5
TASK_NBYTES = 100_000  # of any request: a few answers' generators, events on their way


def most_body_nbytes(budget: int | None) -> int:
    """Return the largest body that is taken: more than any context holds, but a small part of a budget."""
    if budget is None:
        return _MOST_BODY_NBYTES
    return min(max(budget // 400, _LEAST_BODY_NBYTES), _MOST_BODY_NBYTES)


@dataclass(frozen=True)
class Limits:
    """What a server takes in. Sizes in bytes: of one body; of bodies that are coming in together; of what one request,
    and all together, are once read.
    """

    body_nbytes: int
    uploads_nbytes: int
    request_nbytes: int
    requests_nbytes: int
    connections: int

    @classmethod
    def of(cls, budget: int | None, *, most_connections: int = _MOST_CONNECTIONS) -> Limits:
        """Derive them from a budget; without one they are those of the largest."""
        body = most_body_nbytes(budget)
        if budget is None:
            read, connections = _MOST_READ_NBYTES, _MOST_CONNECTIONS
        else:
            read = min(max(int(budget * _READ_SHARE), _LEAST_READ_NBYTES), _MOST_READ_NBYTES)
            connections = int(budget * _CONNECTION_SHARE) // CONNECTION_NBYTES
        return cls(
            body_nbytes=body,
            uploads_nbytes=2 * body,
            request_nbytes=int(_REQUEST_SHARE * read),
            requests_nbytes=read,
            connections=min(max(connections, _LEAST_CONNECTIONS), _MOST_CONNECTIONS, most_connections),
        )

    @property
    def reserved_nbytes(self) -> int:
        """All that these allow at once."""
        return self.uploads_nbytes + self.requests_nbytes + self.connections * CONNECTION_NBYTES


class Allowance:
    """Bytes that may be in use at once. Who finds too few waits: the smallest first, as it holds up the fewest. For
    one event loop.
    """

    def __init__(self, nbytes: int) -> None:
        self.free = nbytes
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    def try_take(self, nbytes: int) -> bool:
        """Take bytes if they are free."""
        if nbytes > self.free:
            return False
        self.free -= nbytes
        return True

    async def take(self, nbytes: int) -> None:
        """Take bytes, and wait for them.

        Raises: BusyError where there are none in time.
        """
        if self.try_take(nbytes):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (nbytes, next(self._numbers), future)
        heapq.heappush(self._waiting, place)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                self.give(nbytes)
            else:
                self._waiting.remove(place)
                heapq.heapify(self._waiting)
            if isinstance(error, TimeoutError):
                raise BusyError(
                    "the server has no memory free for one more request of this size; try again later",
                    RETRY_SECONDS,
                ) from None
            raise

    def give(self, nbytes: int) -> None:
        """Give bytes back."""
        self.free += nbytes
        while self._waiting and self._waiting[0][0] <= self.free:
            wanted, _, future = heapq.heappop(self._waiting)
            if not future.done():
                self.free -= wanted
                future.set_result(None)


class Charge:
    """What one request has taken of the allowance, until all who hold it have closed it; from any thread."""

    def __init__(
        self, allowance: Allowance, nbytes: int, on_close: Callable[[int], None], *, body_nbytes: int = 0
    ) -> None:
        self.body_nbytes = body_nbytes
        self._allowance = allowance
        self._on_close = on_close
        self._nbytes = nbytes
        self._loop = asyncio.get_running_loop()
        self._num_holders = 1

    def share(self) -> Charge:
        """Have one more holder; on the loop."""
        self._num_holders += 1
        return self

    def grow(self, nbytes: int) -> None:
        """Take so many more; on the loop.

        Raises: BusyError where they are not free. Nobody waits who holds bytes: two would wait for each other.
        """
        if not self._allowance.try_take(nbytes):
            raise BusyError("the server has no memory free for this answer; try again later", RETRY_SECONDS)
        self._nbytes += nbytes

    def close(self) -> None:
        """Give all back, as the last holder."""
        with suppress(RuntimeError):  # a loop that has ended
            self._loop.call_soon_threadsafe(self._give)

    def _give(self) -> None:
        self._num_holders -= 1
        if self._num_holders:
            return
        nbytes, self._nbytes = self._nbytes, 0
        self._on_close(nbytes)
        self._allowance.give(nbytes)


class Intake:
    """The door that every body comes through."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._uploads = Allowance(limits.uploads_nbytes)
        self._requests = Allowance(limits.requests_nbytes)
        # One at a time, and not on the loop: reading a body of a million ids takes a while.
        self._trimmed = 0.0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="spile-intake")

    async def take(
        self, http: HttpRequest, parse: Callable[[bytearray], T], kept: Callable[[T, int], int]
    ) -> tuple[T, Charge]:
        """Read a request's body; return what `parse` makes of it, and what it has taken, to be released when the
        request is over. `kept` says what answering it takes beside, of that and of the body's bytes.

        Raises: RequestError for a body that is too large or too slow, or that `parse` refuses; BusyError.
        """
        charge = None
        try:
            data, nbytes = await self._body(http)
            try:
                cost = await self._do(len(data), cost_nbytes, data)
                self._check(cost + TASK_NBYTES)
                await self._requests.take(cost + TASK_NBYTES)
                charge = Charge(self._requests, cost + TASK_NBYTES, self._note_closed, body_nbytes=len(data))
                parsed = await self._do(len(data), parse, data)
                more = kept(parsed, len(data))
            finally:
                del data
                self._uploads.give(nbytes)
            self._check(cost + TASK_NBYTES + more)
            charge.grow(more)
        except BaseException:
            if charge is not None:
                charge.close()
            raise
        return parsed, charge

    @property
    def free_nbytes(self) -> tuple[int, int]:
        """What is free for bodies that come in, and for requests."""
        return self._uploads.free, self._requests.free

    def close(self) -> None:
        """End the thread."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _note_closed(self, nbytes: int) -> None:
        """Have the allocator hand back what a large request had, now and then: of what the
        grammars of a large schema took, 26 MB of 36 came back only so.
        """
        now = time.monotonic()
        if nbytes >= _TRIMMED_NBYTES and now - self._trimmed >= _TRIM_SECONDS:
            self._trimmed = now
            with suppress(RuntimeError):  # the thread has ended
                self._reader.submit(trim)

    def _check(self, nbytes: int) -> None:
        most = self.limits.request_nbytes
        if nbytes > most:
            raise RequestError(
                f"this request would take {nbytes:,} bytes of the server's memory, and {most:,} is the most that one "
                f"may take",
                status=413,
                code="request_too_large",
                hint="Send less at once, or give the server a larger --memory.",
            )

    async def _do(self, nbytes: int, function: Callable[..., T], *arguments: object) -> T:
        """Call a function, on the reader's thread where that takes a while. What it raises comes without the frames of
        that thread, which would keep all that it has read.
        """
        if nbytes <= _INLINE_NBYTES:
            return function(*arguments)

        def call() -> tuple[T | None, Exception | None]:
            try:
                return function(*arguments), None
            except Exception as error:
                return None, error.with_traceback(None) if isinstance(error, SpileError) else error

        result, error = await asyncio.get_running_loop().run_in_executor(self._reader, call)
        if error is not None:
            try:
                raise error
            finally:
                del error
        return result  # type: ignore[return-value]

    async def _body(self, http: HttpRequest) -> tuple[bytearray, int]:
        """Read a body, up to the limit, once there is room for it; return it and the bytes taken for it."""
        most, data, size = self.limits.body_nbytes, bytearray(), 0
        said = http.headers.get("content-length", "")
        wanted = int(said) if said.isascii() and said.isdigit() and len(said) < 16 else most
        decoder = BodyDecoder(http.headers.get("content-encoding"))
        nbytes = wanted if wanted <= most else 0  # of what is too large nothing is kept
        if decoder.is_compressed and nbytes:
            nbytes = most  # what it will be, nobody knows
        await self._uploads.take(nbytes)
        try:
            began = time.monotonic()
            async with asyncio.timeout(BODY_SECONDS) as clock:
                pace = asyncio.get_running_loop().create_task(self._keep_pace(clock, lambda: size, began))
                try:
                    async for chunk in http.stream():
                        size += len(chunk)
                        if size <= most and wanted <= most:
                            data += decoder.push(chunk, most + 1 - len(data)) if len(data) <= most else b""
                        elif size > most * _DRAINED_FACTOR:
                            break
                        else:
                            data.clear()
                finally:
                    pace.cancel()
            if size > most or len(data) > most:
                raise RequestError(
                    f"the body has more than {most:,} bytes, the most that this server takes",
                    status=413,
                    code="request_too_large",
                )
            decoder.finish()
        except BaseException as error:
            self._uploads.give(nbytes)
            if isinstance(error, TimeoutError):
                raise RequestError(
                    f"the body did not come in {time.monotonic() - began:.0f} seconds, of which it may take "
                    f"{BODY_SECONDS:.0f}, and {_SLOW_SECONDS:.0f} where others wait",
                    status=408,
                    code="request_timeout",
                ) from None
            raise
        return data, nbytes

    async def _keep_pace(self, clock: asyncio.Timeout, size: Callable[[], int], began: float) -> None:
        """End an upload that is slow while others wait."""
        while True:
            await asyncio.sleep(_SLOW_SECONDS / 4)
            seconds = time.monotonic() - began - _SLOW_SECONDS
            if self._uploads.is_wanted and seconds > 0 and size() < seconds * _SLOW_BYTES_PER_SECOND:
                clock.reschedule(asyncio.get_running_loop().time())
                return


def cost_nbytes(data: bytearray) -> int:
    """Return the most that a JSON text takes once read. Reads it once, without the interpreter's lock."""
    if not data:
        return 0
    lists, objects, keys, strings, scalars, text_nbytes = _core.tally_json(np.frombuffer(data, np.uint8))
    return (
        lists * _LIST_NBYTES
        + objects * _OBJECT_NBYTES
        + keys * _KEY_NBYTES
        + strings * _STRING_NBYTES
        + scalars * _SCALAR_NBYTES
        + text_nbytes * _TEXT_FACTOR
    )
