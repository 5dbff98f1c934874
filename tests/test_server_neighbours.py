"""What neighbours of this server take, by OpenAI's own client: done, without effect, or refused by name."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import openai
import pytest

from serving import TEMPLATE, Running
from spile.server.encoding import BodyDecoder
from spile.server.errors import RequestError

USER: list[Any] = [{"role": "user", "content": "Hi"}]
OPENS = TEMPLATE + "{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}"
FREE = TEMPLATE + "{% if false %}<think></think>{% endif %}"  # the model itself begins to think
TOOLED = TEMPLATE + "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
LOOK = {"type": "object", "properties": {"ok": {"type": "boolean", "const": True}}, "required": ["ok"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": LOOK}} for name in ("look", "wait")
]


def ask(server: Running, messages: Any = USER, **body: Any) -> Any:
    known = {name: body.pop(name) for name in ("tools", "tool_choice", "response_format") if name in body}
    return server.client.chat.completions.create(model="tiny", messages=messages, extra_body=body, **known)


def said(server: Running, messages: Any = USER, **body: Any) -> str:
    content: str = ask(server, messages, **body).choices[0].message.content
    return content


@pytest.mark.parametrize(
    "body",
    [
        {"store": True},
        {"verbosity": "low"},
        {"reasoning_effort": "high"},
        {"top_k": -1},
        {"repeat_penalty": 1.0},
        {"functions": None, "function_call": None},
        {"typical_p": 1.0, "mirostat": 0, "cache_prompt": True, "priority": 3, "request_id": "x"},
        {"n_predict": -1},
        {"skip_special_tokens": True, "use_beam_search": False, "best_of": 1},
        {"ignore_eos": False, "min_tokens": 0, "stop_token_ids": []},
    ],
)
def test_what_changes_nothing_is_accepted(says: Callable[..., Running], body: dict[str, Any]) -> None:
    assert said(says(), **body) == "Hello"


@pytest.mark.parametrize("name", ["typical_p", "mirostat", "dry_multiplier", "xtc_probability", "best_of"])
def test_what_would_change_the_answer_is_refused_by_name(says: Callable[..., Running], name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=name) as caught:
        ask(says(), **{name: 0.5})
    assert caught.value.param == name


def test_limits_by_neighbours_names(says: Callable[..., Running]) -> None:
    assert said(says(), n_predict=2) == "He"
    assert said(says(), stop_token_ids=[ord("l")]) == "He"
    long = ask(says(), ignore_eos=True, max_tokens=9).choices[0]
    assert (long.finish_reason, long.message.content[:5]) == ("length", "Hello")
    assert ask(says(), min_tokens=7, max_tokens=12).usage.completion_tokens >= 7


def test_token_ids_come_where_they_were_asked_for(says: Callable[..., Running]) -> None:
    choice = ask(says(), return_token_ids=True).choices[0]
    assert choice.token_ids == list(b"Hello")
    assert bytes(choice.prompt_token_ids) == b"<user>Hi>"
    frames = says().frames("/v1/chat/completions", {"messages": USER, "return_token_ids": True})
    choices = [one for frame in frames if isinstance(frame, dict) for one in frame["choices"]]
    assert [i for one in choices for i in one.get("token_ids", ())] == list(b"Hello")


def test_every_chunk_counts_where_asked(says: Callable[..., Running]) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True, "include_obfuscation": False}
    frames = says().frames("/v1/chat/completions", {"messages": USER, "stream_options": options})
    counts = [frame["usage"]["completion_tokens"] for frame in frames if isinstance(frame, dict)]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert all(frame["usage"]["prompt_tokens"] == 9 for frame in frames if isinstance(frame, dict))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"guided_regex": "[a-c]{3}"}, "aaa"),
        ({"guided_regex": "a/b\nc"}, "a/b\nc"),
        ({"guided_choice": ["yes", 'yes, "so"']}, "yes"),
        ({"guided_json": '{"const": 7}'}, "7"),
        ({"json_schema": {"const": "1"}}, '"1"'),
        ({"guided_grammar": 'root ::= "x" y\ny ::= "z"\n'}, "xz"),
        ({"grammar": 'root ::= ("no" | "nein") "!"'}, "nein!"),
        ({"grammar": 'start: "q" /w+/ "."\n', "max_tokens": 2}, "qw"),
        ({"structured_outputs": {"regex": "u{2}"}}, "uu"),
        ({"structured_outputs": {"json": {"const": None}}}, "null"),
        ({"structured_outputs": {"choice": ["ok"]}}, "ok"),
        ({"response_format": {"type": "regex", "pattern": "v"}}, "v"),
        ({"response_format": {"type": "choice", "choices": ["w"]}}, "w"),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "r"'}}, "r"),
    ],
)
def test_forms_by_neighbours_names(says: Callable[..., Running], body: Any, expected: str) -> None:
    found = said(says(), **body)
    assert found.removesuffix(', "so"') == expected


@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "("},
        {"guided_grammar": "root ::= ::"},
        {"grammar": 'root ::= "a" }'},
        {"grammar": 'start: "a" }\nanswer: "b"\n'},
    ],
)
def test_a_form_that_is_none_is_refused(says: Callable[..., Running], body: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(says(), **body)


def test_what_a_schema_asks_in_vain_is_said(says: Callable[..., Running]) -> None:
    schema = {"type": "string", "format": "regex"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    server = says('"[a-z]"')
    answer = ask(server, response_format=form)
    assert answer.choices[0].message.content == '"[a-z]"'
    assert answer.usage.spile["not_enforced"] == ["format 'regex' (at /)"]
    assert "not enforced: format 'regex'" in server.log.getvalue()
    assert ask(server).usage.spile["not_enforced"] == []
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    calls = ask(says("No", template=TOOLED), tools=[tool], tool_choice="required", max_tokens=200)
    assert calls.usage.spile["not_enforced"] == ["format 'regex' (at /properties/a) of tool 'f'"]


@pytest.mark.parametrize("strict", [True, False])
def test_arguments_have_no_keys_that_the_tool_does_not_name(
    says: Callable[..., Running], strict: bool
) -> None:
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": strict}}]
    wish = '<tool_call>{"name": "look", "arguments": {"ok": true, "more": 1}}</tool_call>'
    (call,) = (
        ask(says(wish, template=TOOLED), tools=tools, tool_choice="required", max_tokens=300)
        .choices[0]
        .message.tool_calls[:1]
    )
    assert json.loads(call.function.arguments) == {"ok": True}


def test_a_strict_schema_is_closed_and_another_is_not(says: Callable[..., Running]) -> None:
    server = says('{"ok": true, "more": 1}')
    for strict, expected in (
        (True, {"ok": True}),
        (False, {"ok": True, "more": 1}),
        (None, {"ok": True, "more": 1}),
    ):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": LOOK, "strict": strict}}
        assert json.loads(said(server, response_format=form)) == expected


def test_a_named_function_is_called_once_by_a_model_that_repeats(says: Callable[..., Running]) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"ok": true}}</tool_call>'
    server = says(call * 30, template=TOOLED)
    named = {"type": "function", "function": {"name": "look"}}
    choice = ask(server, tools=TOOLS, tool_choice=named, max_tokens=4000).choices[0]
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")
    choice = ask(server, tools=TOOLS, tool_choice="required", max_tokens=4000).choices[0]
    assert (len(choice.message.tool_calls), choice.finish_reason) == (4, "tool_calls")
    choice = ask(
        server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=4000
    ).choices[0]
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")


def test_allowed_tools_are_all_that_the_model_sees(says: Callable[..., Running]) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "wait"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = ask(
        says("No", template=TOOLED), tools=TOOLS, tool_choice=choice, max_tokens=300, return_token_ids=True
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "wait"
    assert b"look" not in bytes(answer.choices[0].prompt_token_ids)


def test_spaces_around_a_call_stay_in_text(says: Callable[..., Running]) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"ok": true}}</tool_call>'
    server = says(f"I will call. {call} Done.", template=TOOLED)
    assert said(server, tools=TOOLS) == "I will call.  Done."
    frames = server.frames("/v1/chat/completions", {"messages": USER, "tools": TOOLS})
    deltas = [one["delta"] for frame in frames if isinstance(frame, dict) for one in frame["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I will call.  Done."


def test_a_template_with_calls_of_another_form_says_so(says: Callable[..., Running]) -> None:
    with pytest.raises(openai.BadRequestError, match="form of its own") as caught:
        ask(says("x", template=TEMPLATE + "{% if tools %}<|python_tag|>{% endif %}"), tools=TOOLS)
    assert "<tool_call>" in str(caught.value)
    assert caught.value.param == "tools"


WRITES = (
    "{% for m in messages %}{% for c in m.tool_calls or () %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{{ m.content }}{% endfor %}"
)
PRINTS = WRITES.replace("c.function.name + c.function.arguments", "c.function.arguments")
JOINS = WRITES.replace("c.function.name + c.function.arguments", "'(' ~ c.function.arguments ~ ')'")
TURNS = WRITES.replace("c.function.name + c.function.arguments", "c.function.arguments | tojson")
GOES = WRITES.replace(
    "c.function.name + c.function.arguments", "c.function.arguments.items() | list | length"
)
EITHER = WRITES.replace(
    "c.function.name + c.function.arguments",
    "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson",
)


@pytest.mark.parametrize("arguments", ["{}", "", '{"a": "é", "b": [1, null]}', "not JSON"])
@pytest.mark.parametrize("template", [WRITES, PRINTS, JOINS, TURNS, GOES, EITHER])
def test_calls_in_the_history_fit_templates_of_both_conventions(
    says: Callable[..., Running], template: str, arguments: str
) -> None:
    if arguments == "not JSON" and template == GOES:
        pytest.skip("there is nothing to go through")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    choice = ask(says("Hello", template=template), history, return_token_ids=True).choices[0]
    assert choice.message.content == "Hello"
    if template == WRITES:
        assert bytes(choice.prompt_token_ids).decode() == f"Hif{arguments or '{}'}7"


PREFILL = [*USER, {"role": "assistant", "content": "I say: "}]


def prompt_of(server: Running, messages: Any, **body: Any) -> str:
    ids = ask(server, messages, return_token_ids=True, max_tokens=1, **body).choices[0].prompt_token_ids
    return bytes(ids).decode()


def test_an_answer_is_gone_on_from(says: Callable[..., Running]) -> None:
    server = says()
    for body in ({}, {"continue_final_message": True}, {"add_generation_prompt": False}):
        assert prompt_of(server, PREFILL, **body) == "<user>Hi>I say: "
        assert said(server, PREFILL, **body) == "Hello"
    for body in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert prompt_of(server, PREFILL, **body) == "<user>Hi<assistant>I say: >"
    ids = server.send("/tokenize", {"messages": PREFILL}).body["tokens"]
    assert bytes(ids).decode() == "<user>Hi>I say: "
    for body in ({"continue_final_message": True, "add_generation_prompt": True},):
        with pytest.raises(openai.BadRequestError, match="exclude each other"):
            ask(server, PREFILL, **body)
    with pytest.raises(openai.BadRequestError, match="role user"):
        ask(server, continue_final_message=True)


def test_reasoning_of_an_answer_that_is_gone_on_from(says: Callable[..., Running]) -> None:
    server = says("Hello", template=OPENS)
    assert prompt_of(server, PREFILL) == "<user>Hi><think>\n\n</think>\n\nI say: "
    assert said(server, PREFILL) == "Hello"
    thought = [*USER, {"role": "assistant", "content": "I say: ", "reasoning_content": "Hm."}]
    assert prompt_of(server, thought) == "<user>Hi><think>\nHm.\n</think>\n\nI say: "
    thinks = [*USER, {"role": "assistant", "content": "", "reasoning_content": "Hm."}]
    assert prompt_of(server, thinks) == "<user>Hi><think>\nHm."
    message = ask(server, thinks).choices[0].message
    assert (message.content, message.reasoning_content) == ("", "Hello")


def test_a_schema_is_about_the_whole_of_an_answer_that_is_gone_on_from(says: Callable[..., Running]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": LOOK, "strict": True}}
    begun = [*USER, {"role": "assistant", "content": '{"ok": '}]
    assert said(says("No"), begun, response_format=form).split() == ["true", "}"]
    with pytest.raises(openai.BadRequestError, match="continue_final_message false"):
        ask(says("No"), PREFILL, response_format=form)


def test_where_the_template_closed_the_thinking_an_answer_begins_at_once(
    says: Callable[..., Running],
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": LOOK, "strict": True}}
    server = says("<think> and on and on", template=OPENS)
    message = ask(server, response_format=form, enable_thinking=False).choices[0].message
    assert json.loads(message.content) == {"ok": True}
    assert getattr(message, "reasoning_content", None) is None


@pytest.mark.parametrize("template", [OPENS, FREE])
@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"thinking_budget": 6}, 6),
        ({"thinking_budget_tokens": 6}, 6),
        ({"reasoning": {"max_tokens": 6}}, 6),
        ({"thinking_budget": 0, "enable_thinking": True}, 0),
        ({"thinking_budget": -1}, 1000),
    ],
)
def test_thinking_ends_at_its_bound(
    says: Callable[..., Running], template: str, body: dict[str, Any], most: int
) -> None:
    begin = "<think>" if template == FREE else ""
    thought = "".join(chr(ord("a") + i % 26) for i in range(40))
    server = says(f"{begin}{thought}</think>\n\nHello", template=template)
    message = ask(server, max_tokens=200, **body).choices[0].message
    reasoning = getattr(message, "reasoning_content", None) or ""
    assert reasoning == thought[:most]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": LOOK, "strict": True}}
    message = ask(server, max_tokens=200, response_format=form, **body).choices[0].message
    assert json.loads(message.content) == {"ok": True}


@pytest.mark.parametrize("effort", ["none", "minimal"])
def test_no_effort_is_no_thinking(says: Callable[..., Running], effort: str) -> None:
    for template in (OPENS, FREE):
        server = says("<think>abc</think>\n\nHello", template=template)
        answer = ask(server, reasoning_effort=effort, max_tokens=100, return_token_ids=True)
        if template == OPENS:
            assert bytes(answer.choices[0].prompt_token_ids).endswith(b"<think>\n\n</think>\n\n")
        else:
            assert not getattr(answer.choices[0].message, "reasoning_content", None)


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data, wbits=-15)),
        ("identity", bytes),
    ],
)
def test_a_compressed_body_is_read(
    says: Callable[..., Running], name: str, pack: Callable[[bytes], bytes]
) -> None:
    data = pack(json.dumps({"messages": USER}).encode())
    reply = says().send("/v1/chat/completions", data, headers={"Content-Encoding": name})
    assert reply.body["choices"][0]["message"]["content"] == "Hello"
    if name != "identity":
        cut = says().send("/v1/chat/completions", data[:-5], headers={"Content-Encoding": name})
        assert cut.status == 400
        assert says().send("/tokenize", b"{}", headers={"Content-Encoding": name}).status == 400


def test_other_encodings_are_refused_and_bombs_are_not_unpacked(says: Callable[..., Running]) -> None:
    for name in ("br", "zstd", "gzip, gzip"):
        reply = says().send("/v1/chat/completions", b"x", headers={"Content-Encoding": name})
        assert (reply.status, reply.body["error"]["code"]) == (415, "unsupported_encoding")
    bomb = gzip.compress(bytes(200_000_000))
    assert len(bomb) < 1_000_000
    assert says().send("/tokenize", bomb, headers={"Content-Encoding": "gzip"}).status == 413


def test_a_body_is_unpacked_as_far_as_it_is_wanted() -> None:
    data = gzip.compress(bytes(10_000))
    decoder = BodyDecoder("gzip")
    assert decoder.push(data, 100) == bytes(100)
    decoder = BodyDecoder("gzip")
    assert b"".join(decoder.push(data[i : i + 1], 20_000) for i in range(len(data))) == bytes(10_000)
    decoder.finish()
    with pytest.raises(RequestError, match="not valid gzip"):
        BodyDecoder("gzip").push(b"{}", 100)


def test_thinking_that_is_cut_in_the_middle_of_a_character_ends_after_it(
    says: Callable[..., Running],
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": LOOK, "strict": True}}
    server = says("é" * 20, template=OPENS)
    message = ask(server, response_format=form, thinking_budget=3, max_tokens=200).choices[0].message
    assert message.reasoning_content == "éé"
    assert json.loads(message.content) == {"ok": True}
