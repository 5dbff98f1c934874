"""Opens a port and serves an app on it until a signal says stop.

It does not know the app. It adds to uvicorn what a server on the open net needs: heads of requests that are too
large or too slow are refused; of a body no more is read than somebody asks for; and there are only so many
connections, of which those that wait for nothing give way to new ones.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from spile.errors import OptionError, SpileError, quote
from spile.server.errors import Failure
from spile.server.visits import Visits

MOST_HEAD_NBYTES = 65_536
MOST_HEAD_LINES = 128  # each is four objects
MOST_CONNECTIONS = 256
READ_NBYTES = (
    16_384  # at once from one connection, which is what it may hold of a body that nobody asks for yet
)
SOCKET_NBYTES = (
    32_768  # of the kernel's for a connection, each way; it takes twice that, and a group may count it
)
HEAD_SECONDS = 10.0  # that a request's head may take to come, and an idle connection may stay
GRACE_SECONDS = 4  # between a signal and the end, for what is being sent
_OTHER_DESCRIPTORS = 96  # shards, libraries, the log, connections that are about to be closed
_LINGER_SECONDS = 1.0  # that what a refused client still sends is dropped
_FIRST_SECONDS = 1.0  # that a new connection is left to send its request
_LARGE = "the head of the request has more than"
_MOST_REASON = 200  # characters of what h11 says, which quotes the head
_HEAD_END = re.compile(rb"\n\r?\n")
_FRAMING = re.compile(rb"^(content-length|transfer-encoding)[ \t]*:", re.IGNORECASE | re.MULTILINE)


# What uvicorn says of a request, `Visits` says better, and within bounds.
_SILENT = logging.Logger("spile.silent", logging.CRITICAL + 1)


class Protocol(H11Protocol):
    """HTTP/1.1 with bounds on heads, time and connections."""

    most_connections = MOST_CONNECTIONS
    on_crowd: Callable[[], None] = staticmethod(lambda: None)
    _is_refused = False
    _fault: str | None = None  # of a head that is refused, beyond what h11 finds

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _SILENT

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()  # when it last began to wait for a request, or began one
        transport.max_size = READ_NBYTES  # type: ignore[attr-defined]  # asyncio's own: 256 kB at once
        if len(self.connections) > self.most_connections:
            self.on_crowd()
            self._make_room()
            if transport.is_closing():
                return
        self._await_head()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a request, else the one that has sent its body longest: this
        one where all others are being answered. A new one gets a moment to say what it wants, unless new ones are the
        crowd: then those whose request was let in are not closed for them.
        """
        now = self.loop.time()
        others: list[Any] = [one for one in self.connections if one is not self]
        idle = [one for one in others if one.is_idle]
        old = [one for one in idle if now - one.since > _FIRST_SECONDS]
        sending = [one for one in others if not one.is_idle and one.conn.their_state is h11.SEND_BODY]
        crowd = idle if len(idle) > self.most_connections // 2 else sending
        ending = [one for one in others if one.transport.is_closing()]  # whose client reads nothing any more
        least = min(ending or old or crowd or idle or [self], key=lambda one: one.since)
        self.connections.discard(least)
        if least.is_idle and not least.transport.get_write_buffer_size():
            least.transport.close()
        else:  # closing would wait for its client to read
            least.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no request of this connection is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self._fault = _fault_of(self.conn.trailing_data[0])
            if self._fault is not None:
                self.send_400_response(self._fault)
                return
        super().handle_events()
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        elif self.conn.their_state is h11.SEND_BODY and self.cycle.body and not self.is_idle:
            self.flow.pause_reading()  # until the app asks for more

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def _await_head(self) -> None:
        """Close the connection where a head does not come whole in time. The clock that uvicorn has for idle
        connections stops with the first byte: a head that comes byte by byte would hold one for ever.
        """
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self.conn.their_state is not h11.IDLE:
            super().data_received(data)
            return
        clock, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if clock is None:
            return
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = clock  # the head is not whole: the old clock goes on
        else:
            clock.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, in JSON; a head that is too large by the status for that."""
        is_large = self._fault is not None and self._fault.startswith(_LARGE)
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError):
            msg = f"this is no request of HTTP/1.1: {quote(str(error)[:_MOST_REASON])[1:-1]}"
            is_large = error.error_status_hint == 431
            if is_large:
                msg = f"{_LARGE} {MOST_HEAD_NBYTES:,} bytes"
        status, message = 431 if is_large else 400, msg
        failure = Failure(status, message, "invalid_request_error", None, "malformed_request")
        body = msgspec.json.encode(failure.body())
        visits: Any = self.app
        headers = [
            ("x-request-id", visits.refuse(failure, self.client)),
            ("content-type", "application/json"),
            ("connection", "close"),
            ("content-length", str(len(body))),
        ]
        reason = b"Request Header Fields Too Large" if is_large else b"Bad Request"
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self.transport.write(
            self.conn.send(h11.Response(status_code=status, headers=headers, reason=reason)) or b""
        )
        self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
        self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        # What still comes is dropped for a moment: closed at once, the connection is reset and the reply may be lost.
        self._is_refused = True
        self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def _fault_of(data: bytes) -> str | None:
    """Say what is wrong with a head, so far as it has come, beyond what h11 finds; None where nothing is."""
    end = _HEAD_END.search(data)
    head = data[: end.end()] if end else data
    if len(head) > MOST_HEAD_NBYTES:
        return f"{_LARGE} {MOST_HEAD_NBYTES:,} bytes"
    if head.count(b"\n") > MOST_HEAD_LINES:
        return f"{_LARGE} {MOST_HEAD_LINES} lines"
    names = {name.lower() for name in _FRAMING.findall(head)}
    if len(names) > 1:
        return "the head has both Content-Length and Transfer-Encoding: a body has one length"
    return None


def room_for_connections() -> int:
    """Return the connections that this process has descriptors for, beside its files and some more."""
    try:
        import resource
    except ImportError:  # there is no such limit
        return MOST_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, soft - _OTHER_DESCRIPTORS)


class Server(uvicorn.Server):
    """uvicorn's server with our signals: `on_stop` is called first, and the process lives to return."""

    def __init__(
        self,
        app: Visits,
        *,
        on_stop: Callable[[], None],
        most_connections: int = MOST_CONNECTIONS,
        on_crowd: Callable[[], None] = lambda: None,
    ) -> None:
        bounds = {"most_connections": most_connections, "on_crowd": staticmethod(on_crowd)}
        config = uvicorn.Config(
            app,
            http=type("Protocol", (Protocol,), bounds),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(HEAD_SECONDS),
            timeout_graceful_shutdown=GRACE_SECONDS,
            h11_max_incomplete_event_size=MOST_HEAD_NBYTES,
        )
        super().__init__(config)
        self.most_connections = most_connections
        self.stopped_by: int | None = None
        self._on_stop = on_stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop by a signal, and not raise it again at the end."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.stopped_by = sig
        self._on_stop()
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """End as a signal would; from any thread."""
        self._on_stop()
        self.should_exit = True


def open_socket(host: str, port: int) -> socket.socket:
    """Listen on a port; 0 takes a free one.

    Raises: OptionError for a host that is none, SpileError for a port in use.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OptionError(f"--host {host!r} is no address of this machine: {error}") from error
    family, kind, number, _, address = found[0]
    listener = socket.socket(family, kind, number)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        for side in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # connections have the listener's
            listener.setsockopt(socket.SOL_SOCKET, side, SOCKET_NBYTES)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SpileError(f"port {port} of {host} is in use", "Give another one by --port.") from error
        raise SpileError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listener
