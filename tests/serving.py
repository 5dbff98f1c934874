"""A server on a free port, in threads of this process, and the ways to talk to it."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import openai

from fakes import FakeEngine, write_byte_tokenizer
from spile.model import Model
from spile.server.app import ServerOptions
from spile.server.listen import open_socket
from spile.server.log import Log
from spile.server.run import Serving
from spile.text.sidecar import read_sidecar
from spile.text.tokenizer import open_tokenizer

EOS = 256
TIMEOUT = 60.0  # of anything; only what hangs takes as long
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}>"


class Reply(NamedTuple):
    """What a request was answered by."""

    status: int
    headers: dict[str, str]
    body: Any


class Running:
    """A server that runs, and its two halves."""

    def __init__(self, serving: Serving, port: int, log: StringIO, api_key: str | None) -> None:
        self.serving = serving
        self.worker = serving.worker
        self.port = port
        self.log = log
        self.api_key = api_key
        self.url = f"http://127.0.0.1:{port}"
        self.clients: list[openai.OpenAI] = []

    @property
    def client(self) -> openai.OpenAI:
        """OpenAI's own client."""
        if not self.clients:
            key = self.api_key or "none"
            self.clients.append(
                openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT)
            )
        return self.clients[0]

    def send(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """Send a request: a body that is no bytes as JSON. The reply's body is read as JSON where it is that."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                return _reply(reply.status, reply)
        except urllib.error.HTTPError as error:
            with error:
                return _reply(error.code, error)

    def frames(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Send a request for a stream; return its frames, JSON where they are that, comments as they are."""
        request = urllib.request.Request(f"{self.url}{path}", json.dumps({**body, "stream": True}).encode())
        with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            return parse_frames(reply.read())

    def connect(self) -> socket.socket:
        """Open a connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT)


def parse_frames(data: bytes) -> list[Any]:
    """Return the frames of a stream."""
    found: list[Any] = []
    for frame in data.decode().split("\n\n"):
        frame = frame.strip("\n")
        if frame.startswith("data: {"):
            found.append(json.loads(frame.removeprefix("data: ")))
        elif frame:
            found.append(frame.removeprefix("data: "))
    return found


def raw_request(path: str, body: Any, *, headers: Sequence[str] = ()) -> bytes:
    """Return a POST request as it goes over the wire."""
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + data


@contextmanager
def running(
    load: Callable[[], Model],
    *,
    model_ids: Sequence[str] = ("tiny", "folder"),
    parallel: int = 4,
    max_queue: int = 8,
    defaults: dict[str, Any] | None = None,
    wait: bool = True,
    **options: Any,
) -> Iterator[Running]:
    """Run a server for as long as the block."""
    log = StringIO()
    with open_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        serving = Serving(
            listener,
            load,
            ServerOptions(model_ids=tuple(model_ids), **options),
            parallel=parallel,
            max_queue=max_queue,
            defaults={"temperature": 0, **(defaults or {})},
            log=Log(log),
        )
        thread = threading.Thread(target=serving.run)
        thread.start()
        found = Running(serving, port, log, next(iter(options.get("api_keys", ())), None))
        try:
            until(lambda: serving.server.started and (not wait or serving.worker.phase != "loading"))
            yield found
        finally:
            serving.stop()
            for client in found.clients:
                client.close()
            thread.join(TIMEOUT)
            assert not thread.is_alive(), "the server did not end"


class Servers(ExitStack):
    """Servers that run until the block ends; of those that are asked for alike there is one."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, Running] = {}

    def once(self, key: str, load: Callable[[], Model], **options: Any) -> Running:
        """Run a server, or return the one that runs by this key."""
        if key not in self._known:
            self._known[key] = self.enter_context(running(load, **options))
        return self._known[key]


def until(condition: Callable[[], Any], seconds: float = TIMEOUT) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.005)


def fake_model(
    folder: Path,
    text: str = "Hello",
    *,
    template: str | None = TEMPLATE,
    engine: FakeEngine | None = None,
    **options: Any,
) -> Model:
    """A model over a scripted engine that says `text`, a byte a token."""
    config = {"eos_token": "<|endoftext|>"} | ({"chat_template": template} if template else {})
    write_byte_tokenizer(folder, config=config)
    engine = engine or FakeEngine([*text.encode(), EOS], **options)
    return Model(
        open_engine=lambda: engine,
        config={"eos_token_id": EOS},
        sidecar=read_sidecar(folder),
        tokenizer=open_tokenizer(folder, config={}, keep=True),
        plan_context=lambda: engine.context,
        vocab_size=engine.vocab_size,
        folder=folder,
        on_note=lambda note: None,
    )


def _reply(status: int, reply: Any) -> Reply:
    data, kind = reply.read(), reply.headers.get("content-type", "")
    body = json.loads(data) if kind.startswith("application/json") else data
    return Reply(status, {name.lower(): value for name, value in reply.headers.items()}, body)
