"""What needs no model is answered at once, however busy the model is, and before a stream's first header."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import spile
from fakes import write_byte_tokenizer
from serving import EOS, TEMPLATE, Running, fake_model, raw_request, running, until
from spile.model import AsideError, Model
from spile.server import aside as aside_module
from spile.server.aside import Aside
from test_server_faults import SlowEngine
from test_server_visits import counts

USER = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REFUSES = "{% if messages[0].content == 'no' %}{{ raise_exception('not that') }}{% endif %}" + TEMPLATE
NOT = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "integer", "minimum": 5, "maximum": 2}},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@contextmanager
def busy(folder: Path, **options: Any) -> Iterator[tuple[Running, SlowEngine]]:
    """A server whose model is inside of a long prompt, and stays there until `go`."""
    engine = SlowEngine([*b"Hello", EOS], context=1000)
    with running(lambda: fake_model(folder, engine=engine, template=REFUSES), **options) as server:
        try:
            with server.connect() as connection:
                connection.sendall(raw_request(COMPLETIONS, {"prompt": "x", "stream": True}))
                until(lambda: engine.layers > 2)
                yield server, engine
        finally:
            engine.go.set()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (COMPLETIONS, {"prompt": "x" * 1000}, "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [[1], [7] * 1001]}, "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [999]}, None),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"4000": 1}}, None),
        (COMPLETIONS, {"prompt": "x", "response_format": NOT}, "unsupported_schema"),
        (CHAT, {"messages": USER, "response_format": NOT}, "unsupported_schema"),
        (CHAT, {"messages": [{"role": "user", "content": "no"}]}, None),
        (CHAT, {"messages": USER, "tools": [TOOL]}, "unsupported_parameter"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 1000}]}, "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, None),
    ],
)
def test_refusal_comes_at_once_and_as_a_status(
    tmp_path: Path, path: str, body: dict[str, Any], code: str | None, stream: bool
) -> None:
    with busy(tmp_path) as (server, engine):
        layers = engine.layers
        reply = server.send(path, {**body, "stream": stream})
        assert (reply.status, reply.body["error"]["code"]) == (400, code)
        assert not engine.go.is_set()
        until(lambda: engine.layers > layers)  # which is still at work
        assert server.worker._num_accepted == 1


def test_headers_of_a_stream_come_once_it_is_in_order_and_comments_after_them(tmp_path: Path) -> None:
    with busy(tmp_path, comment_seconds=0.05) as (server, engine), server.connect() as connection:
        connection.sendall(raw_request(CHAT, {"messages": USER, "stream": True}))
        data = b""
        while data.count(b": waiting") < 2:
            data += connection.recv(65536)
        assert data.startswith(b"HTTP/1.1 200 ")
        assert b"x-request-id" in data
        assert not engine.go.is_set()


def test_text_is_tokenized_while_the_model_is_busy(tmp_path: Path) -> None:
    with busy(tmp_path) as (server, engine):
        assert server.send("/tokenize", {"prompt": "Hé"}).body["count"] == 3
        assert server.send("/detokenize", {"tokens": [72, 105]}).body == {"prompt": "Hi"}
        assert not engine.go.is_set()


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_requests_that_are_checked_are_bounded_and_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    go, begun = threading.Event(), threading.Event()

    def encoded(self: Model, *args: Any, **options: Any) -> Any:
        begun.set()
        assert go.wait(60)
        raise AssertionError("nobody waits for this any more")

    with running(lambda: fake_model(tmp_path), parallel=1, max_queue=1) as server:
        monkeypatch.setattr(Model, "encoded", encoded)
        replies: list[Any] = []
        threads = [
            threading.Thread(target=lambda: replies.append(server.send(path, {"messages": USER})))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        assert begun.wait(60)
        until(lambda: 2 in (server.worker._num_accepted, server.worker._num_beside))
        assert server.send(path, {"messages": USER}).status == 429
        server.serving.stop()
        go.set()
        for thread in threads:
            thread.join(60)
        assert len(replies) == 2
        assert {reply.status for reply in replies} <= {500, 503}


def test_client_that_leaves_while_it_is_checked_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun = threading.Event(), threading.Event()
    encoded = Model.encoded

    def slow(self: Model, *args: Any, **options: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return encoded(self, *args, **options)

    with running(lambda: fake_model(tmp_path)) as server:
        monkeypatch.setattr(Model, "encoded", slow)
        for stream in (True, False):
            with server.connect() as connection:
                connection.sendall(raw_request(CHAT, {"messages": USER, "stream": stream}))
                assert begun.wait(60)
        until(lambda: server.worker._num_accepted == 2 and not server.serving.server.server_state.connections)
        go.set()
        until(lambda: server.worker._num_accepted == 0)
        until(lambda: counts(server)[f"{CHAT} 499 cancelled"] == 2)
        assert server.send(CHAT, {"messages": USER}).status == 200


def test_short_requests_do_not_wait_for_long_ones() -> None:
    lanes, go, done = Aside(), threading.Event(), threading.Event()
    lanes.do(lambda: go.wait(60) and None, aside_module.SHORT_NBYTES + 1)
    lanes.do(done.set, aside_module.SHORT_NBYTES)
    assert done.wait(60)
    go.set()
    lanes.stop()


def test_under_a_budget_a_long_text_is_encoded_between_two_steps(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no room in the plan borrows the pool's, which the model's thread alone may do."""
    lent: list[tuple[str, int]] = []
    folder = tiny_checkpoint(tokenizer_entries=300)
    with spile.load(folder, io="direct", active_experts=3, on_note=lambda note: None) as model:
        engine = model.open()
        lend = type(engine).lend
        monkeypatch.setattr(
            type(engine),
            "lend",
            lambda self, nbytes: (lent.append((threading.current_thread().name, nbytes)), lend(self, nbytes)),
        )
        assert model.tokenizer is not None
        model.encode("first", raw=True)
        monkeypatch.setattr(model.tokenizer, "keep", False)
        model.tokenizer.release()
        with running(lambda: model) as server:
            monkeypatch.setattr(model.tokenizer, "encode_nbytes", len)
            model.text_room_nbytes = len("short")
            wanted = server.send(COMPLETIONS, {"prompt": "short", "max_tokens": 3})
            assert wanted.status == 200
            assert lent == []
            assert server.send("/tokenize", {"prompt": "longer than that"}).status == 200
            assert server.send(COMPLETIONS, {"prompt": "longer than that", "max_tokens": 3}).status == 200
            assert {name for name, _ in lent} == {"spile-model"}
            assert len(lent) == 2


def test_encoding_aside_needs_room_in_the_plan(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    model = fake_model(tmp_path)
    assert model.tokenizer is not None
    model.tokenizer.keep = False
    model.encode("first", raw=True)
    with pytest.raises(AsideError):
        model.encoded("x", raw=True, aside=True)
    model.text_room_nbytes = 10**6
    with model._alone():  # as while another thread computes
        assert model.encoded("x", raw=True, aside=True).token_ids == [120]


def test_ids_are_the_same_aside_and_in_many_threads(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(tokenizer_entries=300)
    with spile.load(folder, on_note=lambda note: None) as model:
        texts = [f"{index} " * 200 for index in range(20)]
        wanted = [model.encode(text, raw=True) for text in texts]
        stream = model.stream([1, 2, 3], ignore_eos=True)
        found: list[list[int]] = []
        thread = threading.Thread(
            target=lambda: found.extend(model.encoded(t, raw=True, aside=True).token_ids for t in texts * 5)
        )
        thread.start()
        for _ in range(100):
            next(stream)
        thread.join(60)
        assert found == wanted * 5


def test_text_that_cannot_fit_is_refused_aside_though_it_has_no_room_there(tmp_path: Path) -> None:
    """By pieces: none of them takes more than the room, and one that fits is never refused."""
    model = fake_model(tmp_path, context=1000)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    tokenizer.keep = False
    model.encode("first", raw=True)
    model.text_room_nbytes = tokenizer.encode_nbytes("x" * 300)
    pieces: list[str] = []
    encode = tokenizer.encode

    def seen(text: str, add_bos: bool = True) -> list[int]:
        pieces.append(text)
        return encode(text, add_bos)

    tokenizer.encode = seen  # type: ignore[method-assign]
    with model._alone():
        with pytest.raises(
            spile.ContextError, match=r"more than 1,\d\d\d tokens and the context holds 1,000"
        ):
            model.encoded("word " * 400, raw=True, aside=True)
        assert max(map(len, pieces)) <= 300
        assert "".join(pieces) == ("word " * 400)[: sum(map(len, pieces))]
        for text in ("word " * 199, "x" * 2000):  # fits; or there is nowhere to cut
            with pytest.raises(AsideError):
                model.encoded(text, raw=True, aside=True)
