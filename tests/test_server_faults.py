"""What goes wrong, and what clients are told of it: nobody waits for ever, and the next request is answered."""

from __future__ import annotations

import errno
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

import spile
from fakes import FakeEngine, FakeState
from serving import EOS, fake_model, parse_frames, raw_request, running, until
from spile.errors import BudgetError, ReadError
from spile.server import listen
from spile.server.intake import Limits

USER = [{"role": "user", "content": "Hi"}]


class SlowEngine(FakeEngine):
    """Reads a prompt layer by layer, and each layer and each token waits for `go`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.go = threading.Event()
        self.layers = 0

    def prefill(
        self,
        state: FakeState,
        token_ids: Sequence[int],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> NDArray[np.float32]:
        assert on_progress is not None
        for _ in range(1000):
            if self.go.wait(0.005):
                break
            self.layers += 1
            on_progress(0, len(token_ids))
        return super().prefill(state, token_ids, on_progress)


class Faulty(FakeEngine):
    """Fails as it is told to, in the decode after so many tokens."""

    fault: BaseException | None = None
    after = 2

    def decode(self, state: FakeState, token_id: int) -> NDArray[np.float32]:
        if self.fault is not None and state.position - self._num_prompt >= self.after:
            raise self.fault
        return super().decode(state, token_id)


def read_error() -> ReadError:
    return ReadError.at("/secret/model.safetensors", 4096, 100, 0, "Input/output error")


@pytest.mark.parametrize("error", [read_error(), RuntimeError("secret"), MemoryError()])
def test_failure_reaches_its_client_and_the_next_request_works(tmp_path: Path, error: BaseException) -> None:
    engine = Faulty([*b"Hello", EOS])
    with running(lambda: fake_model(tmp_path, engine=engine)) as server:
        engine.fault = error
        reply = server.send("/v1/chat/completions", {"messages": USER})
        assert reply.status in (500, 503)
        assert "secret" not in json.dumps(reply.body)
        frames = server.frames("/v1/chat/completions", {"messages": USER})
        assert frames[-1]["error"]["message"] == reply.body["error"]["message"]
        assert "[DONE]" not in frames
        with pytest.raises(openai.APIError):
            list(server.client.chat.completions.create(model="tiny", messages=USER, stream=True))
        engine.fault = None
        assert server.send("/v1/chat/completions", {"messages": USER}).status == 200
        assert "secret" in server.log.getvalue() or isinstance(error, MemoryError)
        assert all(state.is_closed for state in engine.states)


def test_read_error_of_one_expert_ends_one_answer(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tokenizer_entries=300)
    load = lambda: spile.load(folder, io="direct", active_experts=3, on_note=lambda note: None)  # noqa: E731
    body = {"prompt": [1, 2, 3], "max_tokens": 6, "logit_bias": {}}
    with running(load) as server:
        wanted = server.send("/v1/completions", body).body["choices"]
        reader = server.worker.model._engine._store._reader  # type: ignore[union-attr]
        reader.set_faults(fail_at=1, fail_with=errno.EIO)
        reply = server.send("/v1/completions", {**body, "prompt": [9, 8, 7]})
        assert (reply.status, reply.body["error"]["code"]) == (500, "read_error")
        assert str(folder) not in json.dumps(reply.body)
        assert str(folder) in server.log.getvalue()
        assert server.send("/health").status == 200
        reader.set_faults()
        assert server.send("/v1/completions", body).body["choices"] == wanted
        assert server.send("/health").status == 200


def test_weights_that_stay_away_are_told_by_health(tmp_path: Path) -> None:
    engine = Faulty([*b"Hello", EOS])
    with running(lambda: fake_model(tmp_path, engine=engine)) as server:
        engine.fault = read_error()
        healths = []
        for _ in range(2):
            assert server.send("/v1/completions", {"prompt": "x"}).status == 500
            healths.append(server.send("/health").status)
        assert healths == [200, 503]
        assert server.send("/health").body == {"status": "failing"}
        engine.fault = None
        assert server.send("/v1/completions", {"prompt": "x"}).status == 200
        assert server.send("/health").status == 200


def test_thread_that_fails_is_told_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlowEngine([*b"Hello", EOS])
    with running(lambda: fake_model(tmp_path, engine=engine)) as server:
        monkeypatch.setattr(server.worker._schedule, "note", None)  # any call of it fails
        results: list[Any] = []
        threads = [
            threading.Thread(target=lambda: results.append(server.send("/v1/completions", {"prompt": "x"})))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        until(lambda: server.worker._num_accepted == 3)
        engine.go.set()
        for thread in threads:
            thread.join(60)
        assert [reply.status for reply in results] == [503] * 3
        assert server.send("/v1/completions", {"prompt": "x"}).body["error"]["code"] == "failed"
        health = server.send("/health")
        assert (health.status, health.body) == (503, {"status": "failed"})


def test_while_the_model_loads_the_port_says_so(tmp_path: Path) -> None:
    go = threading.Event()

    def load() -> Any:
        assert go.wait(10)
        return fake_model(tmp_path)

    with running(load, wait=False) as server:
        health = server.send("/health")
        assert (health.status, health.body) == (503, {"status": "loading"})
        reply = server.send("/v1/chat/completions", {"messages": USER})
        assert (reply.status, reply.body["error"]["code"]) == (503, "loading")
        assert server.send("/v1/models").status == 200
        go.set()
        until(lambda: server.send("/health").status == 200)
        assert server.send("/v1/chat/completions", {"messages": USER}).status == 200


def test_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    def load() -> Any:
        raise BudgetError("too little")

    with listen.open_socket("127.0.0.1", 0) as listener:
        from spile.server.app import ServerOptions
        from spile.server.run import Serving

        serving = Serving(
            listener, load, ServerOptions(model_ids=("x",)), parallel=1, max_queue=1, defaults={}
        )
        with pytest.raises(BudgetError):
            serving.run()


def test_long_prompt_has_headers_at_once_and_comments_by_the_clock(tmp_path: Path) -> None:
    engine = SlowEngine([*b"Hello", EOS])
    with running(lambda: fake_model(tmp_path, engine=engine), comment_seconds=0.05) as server:
        body = json.dumps({"messages": USER, "stream": True}).encode()
        request = urllib.request.Request(f"{server.url}/v1/chat/completions", body)
        with urllib.request.urlopen(request, timeout=60) as reply:  # headers, long before the prompt is read
            lines = [reply.readline() for _ in range(6)]
            assert [line for line in lines if line.startswith(b":")] == lines[::2]
            engine.go.set()
            frames = parse_frames(reply.read())
        tokens = [index for index, frame in enumerate(frames) if isinstance(frame, dict)]
        assert not any(isinstance(f, str) and f.startswith(":") for f in frames[tokens[0] :])
        assert frames[-1] == "[DONE]"


def test_comments_end_where_the_prompt_fails(tmp_path: Path) -> None:
    engine = SlowEngine([EOS])
    with running(lambda: fake_model(tmp_path, engine=engine), comment_seconds=0.05) as server:
        body = json.dumps({"messages": USER, "stream": True}).encode()
        request = urllib.request.Request(f"{server.url}/v1/chat/completions", body)
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.readline().startswith(b":")
            engine._row = None  # type: ignore[assignment, method-assign]
            engine.go.set()
            frames = parse_frames(reply.read())
        assert frames[-1]["error"]["code"] == "internal_error"


def test_client_that_leaves_stops_its_answer(tmp_path: Path) -> None:
    engine = FakeEngine([*b"abc"], context=10**6)  # never ends
    with running(lambda: fake_model(tmp_path, engine=engine)) as server:
        for stream in (True, False):
            with server.connect() as connection:
                connection.sendall(raw_request("/v1/completions", {"prompt": "x", "stream": stream}))
                until(lambda: server.worker._schedule.running)
            until(lambda: not server.worker._tasks)
            num_calls = len(engine.calls)
            time.sleep(0.05)
            assert len(engine.calls) == num_calls
        assert all(state.is_closed for state in engine.states)
        until(lambda: server.log.getvalue().count("the client left") == 2)
        found = re.findall(r"left after ([0-9,]+) tokens", server.log.getvalue())
        num_tokens = sum(int(number.replace(",", "")) for number in found)
        assert f"spile_completion_tokens_total {num_tokens}\n" in server.send("/metrics").body.decode()
        assert server.send("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200


def test_client_that_leaves_stops_its_prompt(tmp_path: Path) -> None:
    engine = SlowEngine([EOS])
    with running(lambda: fake_model(tmp_path, engine=engine)) as server:
        with server.connect() as connection:
            connection.sendall(raw_request("/v1/completions", {"prompt": "x", "stream": True}))
            until(lambda: engine.layers > 2)
        until(lambda: not server.worker._tasks)
        assert engine.layers < 1000
        engine.go.set()
        assert server.send("/v1/completions", {"prompt": "x"}).status == 200


def test_client_that_reads_nothing_holds_its_own_answer_back(tmp_path: Path) -> None:
    engine = FakeEngine([*b"abc"], context=10**6)
    with running(lambda: fake_model(tmp_path, engine=engine)) as server, server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(raw_request("/v1/completions", {"prompt": "x", "stream": True}))
        until(lambda: any(task.is_held_back for task in server.worker._tasks))
        other = server.send("/v1/completions", {"prompt": "y", "max_tokens": 3})
        assert other.body["usage"]["completion_tokens"] == 3


def test_full_queue_is_told_with_a_time_to_try_again(tmp_path: Path) -> None:
    engine = SlowEngine([EOS])
    with running(lambda: fake_model(tmp_path, engine=engine), parallel=1, max_queue=1) as server:
        threads = [
            threading.Thread(target=server.send, args=("/v1/completions", {"prompt": "x"})) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: server.worker._num_accepted == 2 and engine.layers)
        for stream in (False, True):
            reply = server.send("/v1/completions", {"prompt": "x", "stream": stream})
            assert (reply.status, reply.body["error"]["code"]) == (429, "queue_full")
            assert int(reply.headers["retry-after"]) >= 1
        status = server.send("/status").body
        assert (status["running"], status["waiting"]) == (1, 1)
        assert status["requests"][0]["phase"] == "prompt"
        engine.go.set()
        for thread in threads:
            thread.join(60)
        assert server.send("/v1/completions", {"prompt": "x"}).status == 200


def test_stopping_tells_those_who_wait(tmp_path: Path) -> None:
    engine = SlowEngine([EOS])
    with running(lambda: fake_model(tmp_path, engine=engine)) as server:
        with server.connect() as connection:
            connection.sendall(raw_request("/v1/completions", {"prompt": "x", "stream": True}))
            until(lambda: engine.layers > 2)
            server.serving.stop()
            data = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b'"code":"shutting_down"' in data


def test_signal_ends_open_streams_and_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spile", "serve", "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        port = int(process.stderr.readline().split(",")[0].rsplit(":", 1)[1])
        started_with = []
        for line in process.stderr:
            started_with.append(line)
            if line.startswith("ready"):
                break
        growth = re.search(r"no --memory: .* grow by \S+ [MG]B: (\S+ [MG]B) for prompts", started_with[-3])
        assert growth is not None
        body = {"prompt": "Once", "stream": True, "logit_bias": {"0": -100}, "max_tokens": 1000, "n": 16}
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(raw_request("/v1/completions", body))
            assert connection.recv(10)
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            data = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b"shutting_down" in data or b"[DONE]" in data
        assert process.wait(6) == 0
        assert time.monotonic() - started < 6
        told = process.stderr.read()
        assert "Traceback" not in told
        assert re.search(r"request \w+: 127.0.0.1 POST /v1/completions 200 (shutting_down|length|stop)", told)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_port_in_use_is_told_before_the_model_is_looked_for(capfd: pytest.CaptureFixture[str]) -> None:
    from spile.cli import run

    with listen.open_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert run(["serve", "/no/such/model", "--port", str(port)]) == 1
    _, err = capfd.readouterr()
    assert err.splitlines()[0] == f"error: port {port} of 127.0.0.1 is in use"
    assert "model" not in err


def test_missing_model_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    from spile.cli import run

    assert run(["serve", "/no/such/model", "--port", "0"]) == 1
    _, err = capfd.readouterr()
    assert "error: there is no model" in err
    assert "Traceback" not in err


def test_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path), limits=replace(Limits.of(None), body_nbytes=1000)) as server:
        reply = server.send("/v1/completions", {"prompt": "x" * 200_000})
        assert (reply.status, reply.body["error"]["code"]) == (413, "request_too_large")
        assert server.send("/v1/completions", {"prompt": "x"}).status == 200


def test_head_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path)) as server, server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 70_000)
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
        assert reply.startswith(b"HTTP/1.1 431 ")
        assert b'"error"' in reply


def test_what_is_no_http_is_refused(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path)) as server, server.connect() as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_head_that_comes_drop_by_drop_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "HEAD_SECONDS", 0.2)
    with running(lambda: fake_model(tmp_path)) as server, server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        ended = False
        for _ in range(100):
            try:
                connection.sendall(b"X-A: b\r\n")
            except OSError:
                ended = True
                break
            time.sleep(0.02)
        assert ended
        assert server.send("/health").status == 200
