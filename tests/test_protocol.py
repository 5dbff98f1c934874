"""Requests as bytes: what is understood, and what is refused by name. No socket, no model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spile.generation.options import Sampling
from spile.server.errors import RequestError
from spile.server.protocol import (
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": MESSAGES, **fields}).encode()


def test_plain_request_asks_for_nothing_special() -> None:
    request = parse_chat(chat())
    assert request.prompts == (MESSAGES,)
    assert (request.n, request.stream, request.include_usage, request.sampling) == (1, False, False, {})
    assert request.tools is None
    assert request.tool_choice == "auto"
    assert request.response_format is None


def test_sampling_is_in_the_words_of_sampling() -> None:
    request = parse_chat(
        chat(temperature=0, top_p=1, top_k=3, min_p=0, seed=-1, stop="x", logit_bias={"5": -100}, n=2)
    )
    sampling = Sampling().changed(request.choice_sampling(0))
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 1, 3, 0)
    assert sampling.seed == 2**64 - 1
    assert request.choice_sampling(1)["seed"] == 0
    assert sampling.stops == ("x",)
    assert sampling.biases == {5: float("-inf")}


def test_null_is_the_same_as_nothing() -> None:
    names = ("model", "stream", "stop", "seed", "n", "max_tokens", "tools", "logit_bias", "functions", "user")
    assert parse_chat(chat(**dict.fromkeys(names))) == parse_chat(chat())


def test_newer_limit_wins() -> None:
    assert parse_chat(chat(max_tokens=5)).sampling["max_tokens"] == 5
    assert parse_chat(chat(max_tokens=5, max_completion_tokens=7)).sampling["max_tokens"] == 7


def test_no_stop_texts_are_no_stop_texts() -> None:
    assert "stop" not in parse_chat(chat(stop=[])).sampling


def test_logprobs_of_both_endpoints() -> None:
    assert "logprobs" not in parse_chat(chat(logprobs=False)).sampling
    assert parse_chat(chat(logprobs=True)).sampling["logprobs"] == 0
    assert parse_chat(chat(logprobs=True, top_logprobs=3)).sampling["logprobs"] == 3
    assert parse_completion(b'{"prompt":"x","logprobs":2}').sampling["logprobs"] == 2


def test_prompts_of_every_kind() -> None:
    assert parse_completion(b'{"prompt":"x"}').prompts == ("x",)
    assert parse_completion(b'{"prompt":["x","y"]}').prompts == ("x", "y")
    assert parse_completion(b'{"prompt":[1,2]}').prompts == ([1, 2],)
    assert parse_completion(b'{"prompt":[[1,2],[3]]}').prompts == ([1, 2], [3])


def test_tools_are_left_out_where_none_may_be_called() -> None:
    assert parse_chat(chat(tools=[TOOL])).tools == [TOOL]
    assert parse_chat(chat(tools=[TOOL], tool_choice="none")).tools is None
    assert parse_chat(chat(tools=[])).tools is None


def test_named_tool_is_one_of_the_tools() -> None:
    choice = {"type": "function", "function": {"name": "look"}}
    assert parse_chat(chat(tools=[TOOL], tool_choice=choice)).tool_choice == {"name": "look"}
    with pytest.raises(RequestError, match="tool_choice names 'touch', none of the tools"):
        parse_chat(chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "touch"}}))


def test_messages_go_on_as_they_came_but_for_a_newer_word() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "tool_call_id": "1", "content": ["A", {"type": "text", "text": "B"}]},
        {"role": "assistant"},
    ]
    (found,) = parse_chat(chat(messages=messages)).prompts
    assert found == [{**messages[0], "role": "system"}, *messages[1:]]


def test_thinking_is_switched_by_either_name() -> None:
    assert parse_chat(chat(enable_thinking=False)).template_arguments == {"enable_thinking": False}
    both = chat(chat_template_kwargs={"enable_thinking": False, "style": "x"})
    assert parse_chat(both).template_arguments == {"enable_thinking": False, "style": "x"}
    with pytest.raises(RequestError, match="given twice"):
        parse_chat(chat(enable_thinking=True, chat_template_kwargs={"enable_thinking": False}))


def test_tokenize_takes_text_or_messages() -> None:
    assert parse_tokenize(b'{"prompt":"x"}')[0] == "x"
    assert parse_tokenize(b'{"messages":[{"role":"user","content":"x"}]}')[0] == [
        {"role": "user", "content": "x"}
    ]
    assert parse_detokenize(b'{"tokens":[1,2]}')[0] == [1, 2]
    for body in (b"{}", b'{"prompt":"x","messages":[{"role":"user"}]}', b'{"prompt":"x","tools":[]}'):
        with pytest.raises(RequestError):
            parse_tokenize(body)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"temperature": "hot"}, "temperature", "expected float"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 1000}, "n", "<= 16"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": -5}, "max_tokens", ">= 1"),
        ({"max_completion_tokens": "x"}, "max_completion_tokens", "expected int"),
        ({"stop": [""]}, "stop[0]", "length >= 1"),
        ({"stop": 5}, "stop", "expected"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "matching"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"functions": []}, "functions", "functions is not supported"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"store": True}, "store", "not supported"),
        ({"best_of": 2}, "best_of", "there is no parameter best_of"),
        ({"topp": 1}, "topp", "there is no parameter topp"),
        ({"stream_options": {"chunks": 1}}, "stream_options.chunks", "there is no parameter"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "goes with"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot be given"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": "Hi"}, "messages", "expected array"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "robot"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "expected"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "is of type 'image_url': the model reads only text",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=None) as found:
        parse_chat(chat(**fields))
    assert found.value.param == param
    assert message in str(found.value)
    assert found.value.status == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"messages":', "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "not valid"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "not valid JSON"),
        (b"[]", "a JSON array"),
        (b'"x"', "a JSON string"),
        (b"null", "a JSON null"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"messages":[{"role":"user","content":"x"}],"top_p":NaN}', "not valid JSON"),
        (b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}', "out of range"),
    ],
)
def test_what_is_no_request_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_chat(body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt":[1,"x"]}', "prompt"),
        (b'{"prompt":[]}', "prompt"),
        (b'{"prompt":""}', "prompt"),
        (b'{"prompt":[[]]}', "prompt[0]"),
        (b'{"prompt":"x","max_tokens":0}', "max_tokens"),
        (b'{"prompt":"x","best_of":2}', "best_of"),
        (b'{"prompt":"x","suffix":"y"}', "suffix"),
        (b'{"prompt":"x","messages":[]}', "messages"),
        (b"{}", "prompt"),
    ],
)
def test_completions_refuse_by_name(body: bytes, param: str) -> None:
    with pytest.raises(RequestError) as found:
        parse_completion(body)
    assert found.value.param == param


def test_too_many_answers_at_once_are_refused() -> None:
    with pytest.raises(RequestError, match="160 answers"):
        parse_completion(json.dumps({"prompt": ["x"] * 10, "n": 16}).encode())
