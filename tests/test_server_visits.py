"""What an operator sees of requests, refused ones too, and what clients are told by which to find them again."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from fakes import FakeEngine, FakeState
from serving import EOS, Running, fake_model, raw_request, running, until
from spile.server import log as log_module
from spile.server.intake import Limits
from spile.server.log import Log
from test_server_faults import SlowEngine

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


def counts(server: Running) -> dict[str, int]:
    """Return what /metrics counts, by path, status and outcome."""
    headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    text = server.send("/metrics", headers=headers).body.decode()
    found = re.findall(
        r'^spile_requests_total\{path="(.*?)",status="(.*?)",outcome="(.*?)"\} (\d+)', text, re.M
    )
    return {" ".join(labels): int(count) for *labels, count in found}


def raw(server: Running, data: bytes) -> bytes:
    with server.connect() as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_every_refusal_has_a_line_a_count_and_an_id(tmp_path: Path) -> None:
    options = {"api_keys": ("secret",), "limits": replace(Limits.of(None), body_nbytes=1000)}
    key = {"authorization": "Bearer secret"}
    with running(lambda: fake_model(tmp_path), **options) as server:
        for path, body, method, headers, status, outcome in (
            (CHAT, b"{", None, key, 400, "invalid_json"),
            (CHAT, {"messages": USER}, None, {}, 401, "invalid_api_key"),
            (CHAT, {"messages": USER}, None, {"host": "evil.example"}, 403, "forbidden"),
            ("/nowhere/\x1b[31m", None, None, key, 404, "not_found"),
            (CHAT, {"messages": USER, "model": "x"}, None, key, 404, "model_not_found"),
            (CHAT, None, "DELETE", key, 405, "method_not_allowed"),
            (
                CHAT,
                {"messages": [{"role": "user", "content": "x" * 2000}]},
                None,
                key,
                413,
                "request_too_large",
            ),
        ):
            reply = server.send(path.replace("\x1b", "%1b"), body, method=method, headers=headers)
            assert reply.status == status
            lines = [
                line for line in server.log.getvalue().splitlines() if reply.headers["x-request-id"] in line
            ]
            assert len(lines) == 1
            assert f" {status} {outcome}; " in lines[0]
            assert lines[0].isprintable()
            named = "other" if status == 404 and outcome == "not_found" else path
            assert counts(server)[f"{named} {status} {outcome}"] == 1


def test_malformed_http_has_a_line_a_count_and_an_id(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(lambda: fake_model(tmp_path)) as server:
        for data, status in (
            (b"\x16\x03\x01 hello\r\n\r\n", 400),
            (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 70_000, 431),
        ):
            reply = raw(server, data).decode()
            assert reply.startswith(f"HTTP/1.1 {status} ")
            found = re.search(r"x-request-id: (\w+)", reply)
            assert found is not None
            assert found[1] in server.log.getvalue()
            assert counts(server)[f"malformed {status} malformed_request"] == 1
    assert "Invalid HTTP" not in capfd.readouterr().err


def test_client_that_leaves_and_streams_that_are_cut_are_seen(tmp_path: Path) -> None:
    engine = SlowEngine([*b"abc", EOS])
    with running(lambda: fake_model(tmp_path, engine=engine)) as server:
        for stream in (True, False):
            with server.connect() as connection:
                connection.sendall(raw_request(CHAT, {"messages": USER, "stream": stream}))
                until(lambda: server.worker._schedule.running)
            until(lambda: not server.worker._tasks)
        until(lambda: server.log.getvalue().count("499 cancelled") == 2)
        assert counts(server)[f"{CHAT} 499 cancelled"] == 2
        with server.connect() as connection:
            connection.sendall(raw_request(CHAT, {"messages": USER, "stream": True}))
            until(lambda: server.worker._schedule.running)
            server.serving.stop()
            data = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b"shutting_down" in data
        found = re.search(rb"x-request-id: (\w+)", data)
        assert found is not None
        until(lambda: re.search(f"{found[1].decode()}: .* 200 shutting_down; ", server.log.getvalue()))


def test_clients_own_id_comes_back_clean_and_stands_in_the_log(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path)) as server:
        for given, wanted in (
            ("trace-1.2:3", "trace-1.2:3"),
            ("a b\tc<x>", "abcx"),
            ("é" * 3 + "z", "z"),
            ("x" * 500, "x" * 64),
        ):
            headers = {"x-request-id": given.encode().decode("latin-1")}
            reply = server.send(CHAT, {"messages": USER}, headers=headers)
            assert reply.headers["x-request-id"] == wanted
            key = reply.body["id"].removeprefix("chatcmpl-")
            assert f"request {key} as {wanted}: " in server.log.getvalue()
        assert server.send("/health", headers={"x-request-id": "<>"}).headers["x-request-id"].isalnum()


def test_openai_client_has_the_id_of_the_log(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path)) as server:
        answer = server.client.chat.completions.create(model="tiny", messages=USER)
        assert f"request {answer._request_id}: " in server.log.getvalue()
        assert answer.id == f"chatcmpl-{answer._request_id}"
        with pytest.raises(openai.BadRequestError) as caught:
            server.client.chat.completions.create(model="tiny", messages=USER, temperature=-1)
        assert f"request {caught.value.request_id}: " in server.log.getvalue()


def test_fault_of_our_own_is_counted_once_and_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(lambda: fake_model(tmp_path)) as server:
        monkeypatch.setattr(server.worker, "status", None)
        reply = server.send("/status")
        assert (reply.status, reply.body["error"]["code"]) == (500, "internal_error")
        until(lambda: "TypeError" in server.log.getvalue())
        monkeypatch.undo()
        assert counts(server)["/status 500 internal_error"] == 1
    assert capfd.readouterr().err == ""


def test_thousand_refusals_are_two_lines(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path, engine=FakeEngine([EOS]))) as server:
        head = b"GET /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        data = raw(server, (head + b"\r\n") * 999 + head + b"Connection: close\r\n\r\n")
        assert data.count(b"HTTP/1.1 404 ") == 1000
        assert counts(server)["other 404 not_found"] == 1000
    lines = [
        line for line in server.log.getvalue().splitlines() if "nowhere" in line or "more like it" in line
    ]
    assert len(lines) == 2
    assert re.search(r"GET other 404 not_found: … and 999 more like it in \d+ s", lines[1])


def test_burst_is_summed_up_when_its_time_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_BURST_SECONDS", (0.1, 0.2, 0.4))
    stream = StringIO()
    log = Log(stream)
    for _ in range(413):
        log.note("a kind", "the first")
    until(lambda: "a kind: … and 412 more like it in 1 s" in stream.getvalue())
    log.note("a kind", "the first")
    time.sleep(0.05)
    assert len(stream.getvalue().splitlines()) == 2  # it goes on
    until(lambda: "and 1 more" in stream.getvalue())
    until(lambda: not log._bursts)
    log.note("a kind", "first again")
    assert "first again" in stream.getvalue()
    log.close()


def test_lines_of_a_minute_are_bounded_and_that_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_MINUTE", 0.5)
    stream = StringIO()
    log = Log(stream)
    for index in range(5000):
        log.write(f"{index} " + "é\x1b\n" * 1000)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 300
    assert lines[-1].endswith("300 lines in a minute are the most; the rest of it is left out")
    assert all(line.isprintable() and len(line) <= 409 for line in lines)
    time.sleep(0.6)
    log.write("later")
    assert "log: 4,701 lines were left out" in stream.getvalue().splitlines()[-2]
    for index in range(1000):
        log.note(f"kind {index}", "of many kinds")
    assert len(log._bursts) <= 65
    log.close()


def test_paths_without_a_version_are_answered(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path)) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        with client:
            answer = client.chat.completions.create(model="tiny", messages=USER)
            assert answer.choices[0].message.content == "Hello"
            assert client.completions.create(model="tiny", prompt="x").choices[0].text == "Hello"
            assert [model.id for model in client.models.list()] == ["tiny"]
            assert client.models.retrieve("tiny").id == "tiny"
        assert counts(server)["/chat/completions 200 stop"] == 1
        assert counts(server)["/models/ 200 ok"] == 1


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("//v1/models", "/v1/models"),
        ("/api/v1/models", "/v1/models"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions/", "/v1/chat/completions"),
        ("/V1/Chat/Completions", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/health", "/health"),
        ("/api/tags", "/openapi.json"),
        ("/" + "a" * 5000, "/openapi.json"),
    ],
)
def test_unknown_path_is_told_what_is_near(tmp_path: Path, path: str, near: str) -> None:
    with running(lambda: fake_model(tmp_path)) as server:
        reply = server.send(path, {} if "chat" in path else None)
        assert (reply.status, reply.body["error"]["code"]) == (404, "not_found")
        assert re.search(rf"{near}(\?| or | has )", reply.body["error"]["message"])
        assert len(reply.body["error"]["message"]) < 300


def test_all_names_that_were_given_are_listed_and_answered(tmp_path: Path) -> None:
    names = ("big", "small alias", "org/third", "folder")
    with running(lambda: fake_model(tmp_path), model_ids=names, num_listed=3) as server:
        assert [model.id for model in server.client.models.list()] == list(names[:3])
        for name in names:
            assert server.client.models.retrieve(name).id == name
            answer = server.client.chat.completions.create(model=name, messages=USER)
            assert answer.model == "big"
        with pytest.raises(openai.NotFoundError, match="big, small alias, org/third, folder"):
            server.client.chat.completions.create(model="other", messages=USER)


def test_speed_is_that_of_answers_however_long_nothing_is_asked(tmp_path: Path) -> None:
    class Slow(FakeEngine):
        def decode(self, state: FakeState, token_id: int) -> NDArray[np.float32]:
            time.sleep(0.01)
            return super().decode(state, token_id)

    with running(lambda: fake_model(tmp_path, engine=Slow([*b"abcdefghij", EOS]))) as server:
        assert server.send("/status").body["tokens_per_second"] is None
        reply = server.send(CHAT, {"messages": USER})
        told = reply.body["usage"]["spile"]["tokens_per_second"]
        time.sleep(0.5)
        shown = server.send("/status").body["tokens_per_second"]
        assert 0.5 * told < shown <= 101
