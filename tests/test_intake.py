"""Memory of requests is taken from an allowance before it is used: what one takes, who waits, and what is refused."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serving import Running, fake_model, raw_request, running, until
from spile.server import intake, listen
from spile.server.errors import BusyError
from spile.server.intake import Allowance, Limits, cost_nbytes
from spile.server.protocol import parse_chat, parse_completion

COUNT = 20_000


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], **more}


def filled(before: str, piece: str, after: str, count: int = COUNT) -> bytes:
    return (before + ",".join(piece.replace("#", str(number)) for number in range(count)) + after).encode()


IN_ARGUMENTS = ('{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":[', "]}}")
GROWING: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "lists": (filled(IN_ARGUMENTS[0], "[]", IN_ARGUMENTS[1]), parse_chat),
    "lists of one": (filled(IN_ARGUMENTS[0], "[1]", IN_ARGUMENTS[1]), parse_chat),
    "objects": (filled(IN_ARGUMENTS[0], "{}", IN_ARGUMENTS[1]), parse_chat),
    "objects of one": (filled(IN_ARGUMENTS[0], '{"a":1.5}', IN_ARGUMENTS[1]), parse_chat),
    "floats": (filled(IN_ARGUMENTS[0], "1.5", IN_ARGUMENTS[1]), parse_chat),
    "texts": (filled(IN_ARGUMENTS[0], '"ab"', IN_ARGUMENTS[1]), parse_chat),
    "keys": (filled(IN_ARGUMENTS[0][:-1] + "{", '"k#":0', "}}}"), parse_chat),
    "metadata": (filled('{"messages":[{"role":"user","content":"x"}],"metadata":{', '"#":[]', "}}"), parse_chat),
    "messages": (filled('{"messages":[', '{"role":"user","content":"x"}', "]}"), parse_chat),
    "developers": (filled('{"messages":[', '{"role":"developer","content":"x"}', "]}"), parse_chat),
    "parts": (
        filled('{"messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}"),
        parse_chat,
    ),
    "tools": (
        filled(
            '{"messages":[{"role":"user","content":"x"}],"tools":[',
            '{"type":"function","function":{"name":"f#"}}',
            "]}",
        ),
        parse_chat,
    ),
    "ids": (filled('{"prompt":[', "777", "]}"), parse_completion),
    "lists of ids": (filled('{"prompt":[', "[777]", "]}", 100), parse_completion),
    "biases": (filled('{"prompt":"x","logit_bias":{', '"#":1', "}}"), parse_completion),
    "ascii": (json.dumps({"prompt": "x" * 500_000}).encode(), parse_completion),
    "wide": (('{"prompt":"\N{GRINNING FACE}%s"}' % ("x" * 500_000)).encode(), parse_completion),
    "escapes": (json.dumps({"prompt": "\N{GRINNING FACE}" * 50_000}).encode(), parse_completion),
}  # fmt: skip


@pytest.mark.parametrize("kind", GROWING)
def test_what_a_body_takes_once_read_is_known_before(kind: str) -> None:
    body, parse = GROWING[kind]
    parse(body[:0] + (json.dumps(chat()).encode() if parse is parse_chat else b'{"prompt":"x"}'))
    tracemalloc.start()
    try:
        parsed = parse(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert parsed is not None
    cost = cost_nbytes(bytearray(body))
    print(f"{kind}: {peak / len(body):.1f} bytes a byte, {peak / cost:.2f} of what was reckoned")
    assert peak <= cost


def test_text_that_looks_like_structure_costs_as_text() -> None:
    body = json.dumps({"prompt": '[],{},"a":1,' * 1000 + "\\"}).encode()
    plain = json.dumps({"prompt": "x" * (len(body) - 14)}).encode()
    assert cost_nbytes(bytearray(body)) == pytest.approx(cost_nbytes(bytearray(plain)), rel=0.01)


@pytest.mark.parametrize(
    "body", [b"", b'"', b'"\\', b'"\\u', b"\x00\x01", b"]]}}::", b'{"a', b"-", b"\xff\xf0"]
)
def test_what_is_no_json_is_reckoned_all_the_same(body: bytes) -> None:
    assert 0 <= cost_nbytes(bytearray(body)) <= 2000


def test_those_who_wait_go_on_the_smallest_first() -> None:
    order: list[int] = []

    async def take(allowance: Allowance, nbytes: int) -> None:
        await allowance.take(nbytes)
        order.append(nbytes)

    async def run() -> None:
        allowance = Allowance(100)
        await allowance.take(100)
        tasks = [asyncio.create_task(take(allowance, nbytes)) for nbytes in (90, 20, 50)]
        await asyncio.sleep(0)
        allowance.give(20)
        await asyncio.sleep(0)
        assert order == [20]
        tasks[2].cancel()
        await asyncio.sleep(0)
        allowance.give(80)
        await asyncio.sleep(0)
        assert order == [20]
        allowance.give(20)
        await asyncio.gather(tasks[0], tasks[1])
        assert order == [20, 90]
        allowance.give(90)
        assert (allowance.free, allowance.is_wanted) == (100, False)

    asyncio.run(run())


def test_who_waits_too_long_is_told_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "WAIT_SECONDS", 0.02)

    async def run() -> None:
        allowance = Allowance(10)
        await allowance.take(6)
        with pytest.raises(BusyError) as caught:
            await allowance.take(6)
        assert caught.value.retry_seconds == intake.RETRY_SECONDS
        allowance.give(6)
        assert allowance.free == 10

    asyncio.run(run())


@pytest.mark.parametrize("budget", [300_000_000, 630_000_000, 1_000_000_000, 8_000_000_000, None])
def test_limits_are_in_proportion(budget: int | None) -> None:
    limits = Limits.of(budget)
    assert limits.body_nbytes <= limits.uploads_nbytes
    assert limits.request_nbytes <= limits.requests_nbytes
    if budget is not None:
        assert limits.reserved_nbytes <= 0.08 * budget


def test_fewer_descriptors_mean_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (130, 4096))
    assert listen.room_for_connections() == 34
    assert Limits.of(None, most_connections=34).connections == 34
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert listen.room_for_connections() == listen.MOST_CONNECTIONS


# -- over HTTP --


def small(**changes: int) -> Limits:
    return replace(
        Limits.of(300_000_000), **{"body_nbytes": 1_000_000, "uploads_nbytes": 2_000_000, **changes}
    )


def test_request_that_would_take_too_much_is_refused_with_both_numbers(tmp_path: Path) -> None:
    body = filled(IN_ARGUMENTS[0], "[]", IN_ARGUMENTS[1], 300_000)
    with running(lambda: fake_model(tmp_path), limits=small()) as server:
        reply = server.send("/v1/chat/completions", body)
        assert (reply.status, reply.body["error"]["code"]) == (413, "request_too_large")
        assert f"{small().request_nbytes:,}" in reply.body["error"]["message"]
        assert server.send("/v1/chat/completions", chat()).status == 200


def test_all_that_was_taken_is_given_back(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path), limits=small()) as server:
        service = server.serving.service
        for path, body in (
            ("/v1/chat/completions", chat()),
            ("/v1/chat/completions", {"messages": 1}),
            ("/v1/chat/completions", chat(model="none")),
            ("/v1/completions", {"prompt": "x" * 100_000}),
            ("/v1/completions", {"prompt": list(range(100))}),
            ("/v1/completions", b"[" * 200_000),
            ("/tokenize", {"prompt": "abc"}),
            ("/detokenize", {"tokens": [104, 105]}),
            ("/detokenize", {"tokens": [999_999]}),
        ):
            server.send(path, body)
        server.frames("/v1/completions", {"prompt": "x"})
        with server.connect() as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{"
            )
            until(lambda: service.intake.free_nbytes[0] == small().uploads_nbytes - 99)
        whole = (small().uploads_nbytes, small().requests_nbytes)
        until(lambda: service.intake.free_nbytes == whole)


def test_reply_that_nobody_reads_stays_charged(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path), limits=small()) as server, socket.socket() as connection:
        free = server.serving.service.intake.free_nbytes
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(raw_request("/tokenize", {"prompt": "x" * 100_000}))
        until(lambda: server.serving.service.intake.free_nbytes < free)
        time.sleep(0.5)
        assert server.send("/health").status == 200
        assert server.serving.service.intake.free_nbytes < free
        data = b""
        while not data.endswith(b"}"):
            data += connection.recv(65536)
        assert msgspec.json.decode(data.partition(b"\r\n\r\n")[2])["count"] == 100_000
        until(lambda: server.serving.service.intake.free_nbytes == free)


def head(nbytes: int) -> bytes:
    return f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {nbytes}\r\n\r\n".encode()


def held(server: Running, count: int, nbytes: int) -> list[socket.socket]:
    connections = [server.connect() for _ in range(count)]
    for connection in connections:
        connection.sendall(head(nbytes) + b"{" + b" " * 1000)
    return connections


def test_uploads_that_stand_still_give_way_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_SLOW_SECONDS", 0.2)
    with running(lambda: fake_model(tmp_path), limits=small()) as server:
        connections = held(server, 6, 1_000_000)  # room for two
        started = time.perf_counter()
        body = json.dumps({"prompt": "x"}).encode() + b" " * 900_000
        assert server.send("/v1/completions", body).status == 200
        assert time.perf_counter() - started < 5
        for connection in connections[:2]:
            assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")
        for connection in connections:
            connection.close()


def test_body_is_not_read_before_there_is_room(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path), limits=small()) as server:
        connections = held(server, 2, 1_000_000)
        until(lambda: server.serving.service.intake.free_nbytes[0] == 0)
        with socket.socket() as more:
            more.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
            more.connect(("127.0.0.1", server.port))
            more.setblocking(False)
            more.send(head(1_000_000))
            sent = 0
            for _ in range(50):
                try:
                    sent += more.send(b" " * 10_000)
                except BlockingIOError:
                    time.sleep(0.01)
            assert sent < 500_000
        for connection in connections:
            connection.close()


def test_idle_connections_give_way(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path), limits=small(connections=20)) as server:
        connections = [server.connect() for _ in range(60)]
        for _ in range(5):
            assert server.send("/v1/completions", {"prompt": "x"}).status == 200
        until(lambda: len(server.serving.server.server_state.connections) <= 20)
        for connection in connections:
            connection.close()
        assert server.log.getvalue().count("more than 20 connections") == 1


def test_those_without_the_key_do_not_lock_out_those_who_have_it(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path), limits=small(connections=20), api_keys=("secret",)) as server:
        connections = held(server, 40, 1_000_000)  # refused at the head, and still sending
        headers = {"authorization": "Bearer secret"}
        for _ in range(5):
            body = json.dumps({"prompt": "x"}).encode() + b" " * 100_000
            assert server.send("/v1/completions", body, headers=headers).status == 200
        for connection in connections:
            connection.close()


def test_upload_that_was_let_in_outlives_a_flood_of_connections(tmp_path: Path) -> None:
    body = json.dumps({"prompt": "x"}).encode() + b" " * 100_000
    with (
        running(lambda: fake_model(tmp_path), limits=small(connections=20)) as server,
        server.connect() as upload,
    ):
        upload.sendall(head(len(body)) + body[:1000])
        until(lambda: server.serving.service.intake.free_nbytes[0] < small().uploads_nbytes)
        flood = [server.connect() for _ in range(60)]
        until(lambda: "more than 20" in server.log.getvalue())
        upload.sendall(body[1000:])
        assert upload.recv(65536).startswith(b"HTTP/1.1 200 ")
        for connection in flood:
            connection.close()


def test_answer_that_is_under_way_is_never_closed_for_a_new_connection(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path, "Hello" * 40), limits=small(connections=5)) as server:
        replies: list[Any] = []
        threads = [
            threading.Thread(target=lambda: replies.append(server.frames("/v1/completions", {"prompt": "x"})))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        until(lambda: server.worker._num_accepted == 4 or len(replies) > 0)
        connections = [server.connect() for _ in range(30)]
        for thread in threads:
            thread.join()
        for connection in connections:
            connection.close()
        assert [frames[-1] for frames in replies] == ["[DONE]"] * 4


def refused(server: Running, data: bytes) -> tuple[int, str]:
    """Send something, and return the status and the message that came back before the connection was closed."""
    with server.connect() as connection:
        connection.sendall(data)
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    headers, _, body = reply.partition(b"\r\n\r\n")
    return int(headers.split()[1]), msgspec.json.decode(body)["error"]["message"]


START = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (START + b"X: " + b"a" * 170_000 + b"\r\n\r\n", 431, f"{listen.MOST_HEAD_NBYTES:,} bytes"),
        (START + b"X: y\r\n" * 200 + b"\r\n", 431, f"{listen.MOST_HEAD_LINES} lines"),
        (START + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "one length"),
        (START + b"transfer-encoding: chunked\ncontent-length: 5\n\n0\r\n\r\n", 400, "one length"),
        (START + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, "Content-Length"),
        (START + b"Content-Length: x\r\n\r\n", 400, "bad Content-Length"),
        (START.replace(b"POST /", b"POST / /") + b"\r\n", 400, "illegal request line"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"\x16\x03\x01 hello\r\n\r\n", 400, "no request of HTTP/1.1"),
    ],
)
def test_malformed_request_is_refused_with_the_reason(
    tmp_path: Path, data: bytes, status: int, words: str
) -> None:
    with running(lambda: fake_model(tmp_path)) as server:
        found, message = refused(server, data)
        assert found == status
        assert words in message


def test_large_requests_hold_up_nobody(tmp_path: Path) -> None:
    """A million ids, 700,000 to decode, 400,000 messages: each is read, and refused or answered, on the side."""
    bodies = [
        ("/v1/completions", filled('{"prompt":[', "777", "]}", 1_000_000)),
        ("/detokenize", filled('{"tokens":[', "77", "]}", 700_000)),
        ("/v1/chat/completions", filled('{"messages":[', '{"role":"user","content":""}', "]}", 400_000)),
    ]
    with running(lambda: fake_model(tmp_path)) as server:
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda one=one: statuses.append(server.send(*one).status))  # type: ignore[misc]
            for one in bodies
        ]
        for thread in threads:
            thread.start()
        longest = 0.0
        while any(thread.is_alive() for thread in threads):
            started = time.perf_counter()
            assert server.send("/health").status == 200
            longest = max(longest, time.perf_counter() - started)
        print(f"longest wait {longest:.2f} s, {statuses}")
        assert longest < 3  # 0.2 s where nothing else runs
        assert sorted(statuses) == [200, 400, 413]
