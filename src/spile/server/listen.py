"""Opens a port and serves an app on it until a signal says stop.

It does not know the app. It adds to uvicorn what a server on the open net needs: heads of requests that are too
large or too slow are refused, and so are more connections than any use has.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from spile.errors import OptionError, SpileError
from spile.server.errors import Failure
from spile.server.visits import Visits

MOST_HEAD_NBYTES = 65_536
MOST_CONNECTIONS = 256
HEAD_SECONDS = 10.0  # that a request's head may take to come, and an idle connection may stay
GRACE_SECONDS = 4  # between a signal and the end, for what is being sent


# What uvicorn says of a request, `Visits` says better, and within bounds.
_SILENT = logging.Logger("spile.silent", logging.CRITICAL + 1)


class Protocol(H11Protocol):
    """HTTP/1.1 with bounds on heads, time and connections."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _SILENT

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.close()
            return
        self._await_head()

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is h11.IDLE:
            self._await_head()

    def _await_head(self) -> None:
        """Close the connection where a head does not come whole in time. The clock that uvicorn has for idle
        connections stops with the first byte: a head that comes byte by byte would hold one for ever.
        """
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
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
        is_large = len(self.conn.trailing_data[0]) >= MOST_HEAD_NBYTES
        status = 431 if is_large else 400
        message = f"the head of the request has more than {MOST_HEAD_NBYTES:,} bytes" if is_large else msg
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
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server with our signals: `on_stop` is called first, and the process lives to return."""

    def __init__(self, app: Visits, *, on_stop: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=Protocol,
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
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SpileError(f"port {port} of {host} is in use", "Give another one by --port.") from error
        raise SpileError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listener
