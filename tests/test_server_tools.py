"""Tools and schemas over the wire, by OpenAI's own client: calls as they were written, answers that validate."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
import pytest

from fakes import FakeEngine
from serving import EOS, TEMPLATE, Running, fake_model, running

USER = [{"role": "user", "content": "Hi"}]
TAKES_TOOLS = TEMPLATE + "{% if tools %}[{{ tools | length }} tools: <tool_call>]{% endif %}"
REASONS = TEMPLATE + "{% if false %}<think></think>{% endif %}{{ '<think>' if thinks }}"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sea"}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCHEMA = {
    "type": "object",
    "properties": {"tree": {"enum": ["maple", "birch"]}, "litres": {"type": "integer", "maximum": 99}},
    "required": ["tree", "litres"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "yield", "schema": SCHEMA, "strict": True}}


@pytest.fixture
def says(says: Callable[..., Running]) -> Callable[..., Running]:
    """A function that runs a server whose model wants to say a text, and whose template takes tools."""
    return partial(says, template=TAKES_TOOLS)


def ask(server: Running, **body: Any) -> Any:
    """Ask streamed and not; check that both say the same, and return the answer's choice."""
    create = server.client.chat.completions.create
    answer = create(model="tiny", messages=USER, **body)
    (whole,) = answer.choices
    content, calls, reasons = "", {}, []
    for chunk in create(model="tiny", messages=USER, stream=True, **body):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for delta in choice.delta.tool_calls or ():
                if delta.id is not None:
                    assert delta.type == "function"
                    calls[delta.index] = [delta.function.name, ""]
                calls[delta.index][1] += delta.function.arguments or ""
    assert content == (whole.message.content or "")
    assert [tuple(call) for call in calls.values()] == called(whole)
    assert reasons == [whole.finish_reason]
    return whole


def called(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def test_a_call_comes_back_as_a_call(says: Callable[..., Running]) -> None:
    choice = ask(says(CALL), tools=TOOLS)
    assert choice.message.content is None
    assert called(choice) == [("look", '{"at": "the sea"}')]
    assert choice.finish_reason == "tool_calls"


def test_text_and_several_calls(says: Callable[..., Running]) -> None:
    choice = ask(says(f"Let me see.\n{CALL}\n{CALL}"), tools=TOOLS)
    assert choice.message.content == "Let me see."
    assert called(choice) == [("look", '{"at": "the sea"}')] * 2


def test_a_call_cut_by_the_limit_ends_with_length(says: Callable[..., Running]) -> None:
    for limit in (5, 20, 45, 60):
        choice = ask(says(CALL), tools=TOOLS, max_tokens=limit)
        assert choice.finish_reason == "length"
        if called(choice):
            assert '{"at": "the sea"}'.startswith(called(choice)[0][1])
        else:
            assert choice.message.content == CALL[:limit]


def test_without_tools_a_call_is_text(says: Callable[..., Running]) -> None:
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = ask(says(CALL), **body)
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_one_call_ends_the_answer_where_parallel_calls_are_off(says: Callable[..., Running]) -> None:
    choice = ask(says(CALL * 2), tools=TOOLS, parallel_tool_calls=False)
    assert called(choice) == [("look", '{"at": "the sea"}')]
    assert choice.finish_reason == "tool_calls"


def test_a_whole_exchange_can_be_sent_back(says: Callable[..., Running]) -> None:
    server = says(CALL)
    first = server.client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS).choices[0].message
    history: Any = [
        *USER,
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "blue"},
    ]
    answer = server.client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_required_call_comes_though_the_model_would_rather_talk(says: Callable[..., Running]) -> None:
    strict = [{"type": "function", "function": {"name": "note", "parameters": SCHEMA}}]
    for choice in ("required", {"type": "function", "function": {"name": "note"}}):
        found = ask(says("No."), tools=strict, tool_choice=choice, parallel_tool_calls=False)
        ((name, arguments),) = called(found)
        assert name == "note"
        assert json.loads(arguments)["tree"] in ("maple", "birch")
        assert found.finish_reason == "tool_calls"


def test_a_template_without_tools_refuses_them(says: Callable[..., Running]) -> None:
    with pytest.raises(openai.BadRequestError, match="takes no tools") as caught:
        ask(says("Hello", template=TEMPLATE), tools=TOOLS)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("text", ['{"tree": "birch", "litres": 7}', "I would rather talk.", '{"tree": 7'])
def test_an_answer_validates_whatever_the_model_wants(says: Callable[..., Running], text: str) -> None:
    choice = ask(says(text), response_format=FORM)
    found = json.loads(choice.message.content)
    assert set(found) == {"tree", "litres"}
    assert found["tree"] in ("maple", "birch")
    assert found["litres"] <= 99
    assert choice.finish_reason == "stop"


def test_any_object_is_json_too(says: Callable[..., Running]) -> None:
    choice = ask(says('{"a": [1, {"b": null}]} and more'), response_format={"type": "json_object"})
    assert choice.message.content == '{"a": [1, {"b": null}]}'


def test_reasoning_before_it_is_free(says: Callable[..., Running]) -> None:
    text = 'Hm {"tree"?</think>\n\n{"tree": "maple", "litres": 3}'
    choice = ask(
        says(text, template=REASONS),
        response_format=FORM,
        extra_body={"chat_template_kwargs": {"thinks": True}},
    )
    assert json.loads(choice.message.content) == {"tree": "maple", "litres": 3}
    assert choice.message.reasoning_content == 'Hm {"tree"?'


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "banana"}, "banana"),
        ({"not": {}}, "allows nothing"),
        ({"pattern": "(", "type": "string"}, "group"),
        ({"$ref": "#"}, "no text can follow it"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_and_the_next_request_is_answered(
    says: Callable[..., Running], schema: Any, reason: str
) -> None:
    server = says("Hello")
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=reason) as caught:
            server.client.chat.completions.create(
                model="tiny", messages=USER, response_format=form, stream=stream
            )
        assert caught.value.param == "response_format"
    assert ask(server).message.content == "Hello"


def test_without_the_library_a_schema_is_refused_with_the_command(
    says: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match="pip install"):
        ask(says("Fresh"), response_format=FORM)


def test_n_answers_each_keep_to_the_schema(says: Callable[..., Running]) -> None:
    answer = says("No.").client.chat.completions.create(
        model="tiny", messages=USER, response_format=FORM, n=3, temperature=1, max_tokens=400
    )
    assert len(answer.choices) == 3
    assert all(json.loads(choice.message.content)["litres"] <= 99 for choice in answer.choices)


def test_constrained_and_free_answers_at_once_are_as_if_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """They share an engine, but neither a sampler nor a grammar."""
    from concurrent.futures import ThreadPoolExecutor

    text = '{"tree": "birch", "litres": 7}'
    engine = FakeEngine([*text.encode(), EOS])
    with running(partial(fake_model, tmp_path_factory.mktemp("fake"), engine=engine)) as server:
        forms: list[Any] = [{"response_format": FORM}, {}] * 4
        with ThreadPoolExecutor(4) as pool:
            for choice in pool.map(lambda body: ask(server, **body), forms):
                assert choice.message.content == text
