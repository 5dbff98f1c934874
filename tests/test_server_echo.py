"""Prompts' log-probabilities over the API, against a softmax in float64 of the model's own logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import spile
from serving import Running, fake_model, running
from spile.commands.serve import DefaultFlags
from spile.errors import OptionError
from spile.server import choices

DEMO = Path(spile.__file__).parent / "demo" / "model"
TEXT = "Once upon a time there was a little fox who said: “naïve 🦊”. "
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def model() -> Iterator[spile.Model]:
    with spile.load(DEMO, prefill_chunk=16) as model:
        yield model


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(lambda: spile.load(DEMO, prefill_chunk=16)) as server:
        yield server


def log_softmax(model: spile.Model, ids: list[int]) -> NDArray[np.float64]:
    assert model.tokenizer is not None
    logits = model.logits(ids)[:, : model.tokenizer.num_entries].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return result


def echoed(server: Running, prompt: Any, **more: Any) -> Any:
    reply = server.send(PATH, {"model": "tiny", "prompt": prompt, "echo": True, "max_tokens": 1, **more})
    assert reply.status == 200, reply.body
    return reply.body


def test_numbers_are_those_of_the_models_logits(server: Running, model: spile.Model) -> None:
    ids = model.encode(TEXT * 3, raw=True)
    assert len(ids) > 48, "several chunks, and one that is no whole block"
    exact = log_softmax(model, ids)
    for prompt in (TEXT * 3, ids):
        body = echoed(server, prompt, logprobs=2)
        found = body["choices"][0]["logprobs"]
        assert len(found["tokens"]) == len(ids) + 1
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        wanted = [exact[i, ids[i + 1]] for i in range(len(ids) - 1)]
        assert found["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-5)
        best = [max(top.values()) for top in found["top_logprobs"][1:]]
        assert best == pytest.approx(exact.max(axis=1).tolist(), abs=1e-5)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (len(ids), 1)


def test_text_is_the_prompt_and_its_answer_and_offsets_count_its_characters(server: Running) -> None:
    choice = echoed(server, TEXT, logprobs=0, max_tokens=3)["choices"][0]
    plain = server.send(PATH, {"prompt": TEXT, "max_tokens": 3}).body["choices"][0]
    assert choice["text"] == TEXT + plain["text"]
    found = choice["logprobs"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset : offset + len(token)] == token


def test_a_split_characters_tokens_have_its_offset(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path / "m", "!")) as server:
        choice = echoed(server, "aé🦊b", logprobs=1, max_tokens=0)["choices"][0]
        assert choice["text"] == "aé🦊b"
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"][1] == "bytes:\\xc3"
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]


def test_many_prompts_of_ids_are_each_scored(server: Running, model: spile.Model) -> None:
    prompts = [model.encode(text, raw=True) for text in ("The sun rose", "A dog and a cat", "x")]
    body = echoed(server, prompts, logprobs=1, max_tokens=0, n=2)
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [
        len(prompt) for prompt in prompts for _ in range(2)
    ]
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens"] == sum(len(prompt) for prompt in prompts)


def test_an_end_token_is_measured_too_as_scorers_cut_one_token_off(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path / "m", "")) as server:
        body = echoed(server, "abc", logprobs=1)
        choice = body["choices"][0]
        assert choice["logprobs"]["tokens"] == ["a", "b", "c", "<|endoftext|>"]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
        assert body["usage"]["completion_tokens"] == 0


def test_streamed_says_the_same(server: Running) -> None:
    body = {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 2}
    whole = server.send(PATH, body).body["choices"][0]
    parts = [frame["choices"][0] for frame in server.frames(PATH, body)[:-1]]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name in whole["logprobs"]:
        joined = [one for part in parts if part["logprobs"] for one in part["logprobs"][name] or [None]]
        assert joined == whole["logprobs"][name]


def test_echo_without_logprobs_and_stop_texts_that_the_prompt_has(server: Running) -> None:
    choice = echoed(server, TEXT, stop="fox")["choices"][0]
    assert choice["text"].startswith(TEXT)
    assert choice["logprobs"] is None


def test_what_was_read_before_is_read_again_for_its_logits(server: Running) -> None:
    first = echoed(server, TEXT, logprobs=1, max_tokens=1)
    server.send(PATH, {"prompt": TEXT, "max_tokens": 1})
    again = echoed(server, TEXT, logprobs=1, max_tokens=1)
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_what_answers_would_keep_is_bounded_at_the_door(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "MOST_SCORED", 20)
    reply = server.send(PATH, {"prompt": [5] * 11, "echo": True, "logprobs": 1})
    assert reply.status == 400
    assert "22 numbers" in reply.body["error"]["message"]
    assert server.send(PATH, {"prompt": [5] * 10, "echo": True, "logprobs": 1, "max_tokens": 0}).status == 200


def test_streamed_weights_and_head_score_alike_under_a_budget(tmp_path: Path, model: spile.Model) -> None:
    ids = model.encode(TEXT * 3, raw=True)
    whole = model.generate(ids, prompt_logprobs=True, logprobs=1, max_tokens=0).prompt_logprobs
    with spile.load(DEMO, io="buffered", prefill_chunk=24) as streamed:
        found = streamed.generate(ids, prompt_logprobs=True, logprobs=1, max_tokens=0).prompt_logprobs
    assert found[1:] == whole[1:], "to the last bit"


def test_a_server_whose_answers_would_all_be_empty_is_refused() -> None:
    with pytest.raises(OptionError, match="max_tokens is 0"):
        DefaultFlags(max_tokens=0).changes()
