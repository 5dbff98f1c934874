"""Answers that follow a grammar: what may come next, with which tokens, before and after the reasoning."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from fakes import FakeEngine, write_byte_tokenizer
from spile.cli import run
from spile.errors import BudgetError, OptionError, TextError
from spile.generation.generate import Completion, generate, join
from spile.generation.grammar import Grammar, GrammarTable, json_grammar
from spile.generation.options import Sampling
from spile.generation.sampling import Sampler
from spile.text.reasoning import ReasoningSplitter
from spile.text.tokenizer import Tokenizer, open_tokenizer

ENTRIES = [
    b'{"',
    b'": ',
    b'"}',
    b"true",
    b", ",
    b"</think>\n\n",
    b'"a": 1',
    b"a" * 40,
    "é".encode(),
    b"<tool_call>{",
]
END = "<|endoftext|>"
FIRST = 256  # the id of the first of ENTRIES
EOS = FIRST + len(ENTRIES)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    added = ("<think>", "</think>")
    write_byte_tokenizer(
        tmp_path, special=(END, "<|im_start|>"), added=added, entries=ENTRIES, config={"eos_token": END}
    )
    found = open_tokenizer(tmp_path, config={})
    assert found is not None
    return found


@pytest.fixture
def table(tokenizer: Tokenizer) -> GrammarTable:
    return GrammarTable(tokenizer, vocab_size=300)


def answer(
    tokenizer: Tokenizer, grammar: Any, script: str | list[int], *, begins_inside: bool | None = None, **sampling: Any
) -> Completion:  # fmt: skip
    """Let an engine that wants to say the script answer by a grammar: where it may not, the lowest id comes."""
    script = list(script.encode()) if isinstance(script, str) else script
    constraint = GrammarTable(tokenizer, 300).constraint(grammar, begins_inside=begins_inside)
    splitter = None if begins_inside is None else ReasoningSplitter(has_begun=begins_inside)
    options = {"temperature": 0.0, "max_tokens": 200, **sampling}
    engine = FakeEngine(script)
    return join(
        generate(
            engine,
            [1],
            sampling=Sampling(**options),
            num_entries=tokenizer.num_entries,
            eos_ids=tokenizer.eos_ids,
            decoder=tokenizer.decoder(),
            splitter=splitter,
            constraint=constraint,
        )
    )


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "kind", "tags"]
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 8
    assert type(person["age"]) is int
    assert 0 <= person["age"] <= 150
    assert person["kind"] in ("cat", "dog")
    assert len(person["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in person["tags"])


def test_allowed_ids_are_those_whose_bytes_can_come(table: GrammarTable) -> None:
    constraint = table.constraint(json_grammar({"enum": [{"a": True}, [True], {"b": False}]}))
    assert constraint.allowed().tolist() == [ord("["), ord("{"), FIRST]  # the last is '{"'
    for token_id in (FIRST, ord("a"), ord('"'), ord(":"), FIRST + 3):
        assert not constraint.is_complete
        assert token_id in constraint.allowed()
        constraint.accept(token_id)
    constraint.accept(ord("}"))
    assert constraint.is_complete
    assert constraint.allowed().tolist() == [EOS]


def test_end_tokens_come_only_where_the_answer_may_end(table: GrammarTable) -> None:
    constraint = table.constraint(json_grammar({"type": "integer"}))
    assert EOS not in constraint.allowed()
    constraint.accept(ord("7"))
    assert {EOS, ord("0")} <= set(constraint.allowed().tolist())
    assert not constraint.is_complete


def test_special_tokens_are_no_text(table: GrammarTable, tokenizer: Tokenizer) -> None:
    """The bytes of a special token could stand in a string, but its text would not."""
    constraint = table.constraint(json_grammar({"type": "string"}))
    constraint.accept(ord('"'))
    allowed = set(constraint.allowed().tolist())
    assert not allowed & tokenizer.special_ids
    assert ord("<") in allowed


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_an_answer_follows_its_schema_whatever_the_model_wants(
    tokenizer: Tokenizer, temperature: float
) -> None:
    for seed in range(8):
        wishes = np.random.default_rng(seed).integers(0, EOS, 300).tolist()
        found = answer(
            tokenizer, json_grammar(PERSON), wishes, temperature=temperature, seed=seed, max_tokens=2000
        )
        assert found.finish_reason == "stop"
        check_person(found.text)


def test_a_wanted_answer_comes_as_wanted(tokenizer: Tokenizer) -> None:
    text = '{"name": "B\u00f6b", "age": 30,\n "kind": "dog", "tags": [true, false]}'
    assert answer(tokenizer, json_grammar(PERSON), text).text == text


def test_an_answer_ends_when_nothing_can_follow_without_another_step(tokenizer: Tokenizer) -> None:
    found = answer(tokenizer, json_grammar({"const": 1}), "1111")
    assert (found.text, found.finish_reason, found.stats.completion_tokens) == ("1", "stop", 1)


def test_a_limit_still_ends_an_answer(tokenizer: Tokenizer) -> None:
    found = answer(tokenizer, json_grammar({"type": "string"}), '"aaaa', max_tokens=3)
    assert (found.text, found.finish_reason) == ('"aa', "length")


def test_without_end_tokens_only_the_grammar_ends_an_answer(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, special=())
    tokenizer = open_tokenizer(tmp_path, config={})
    assert tokenizer is not None
    assert (
        answer(tokenizer, json_grammar(PERSON), '{"name":"x","age":1,"kind":"cat","tags":[]}').finish_reason
        == "stop"
    )


def test_ignoring_the_end_still_ends_a_whole_answer(tokenizer: Tokenizer) -> None:
    assert answer(tokenizer, json_grammar({"const": 12}), "12", ignore_eos=True).text == "12"


def test_white_space_cannot_fill_an_answer(tokenizer: Tokenizer) -> None:
    found = answer(tokenizer, json_grammar({"type": "array", "items": {"type": "integer"}}), "[" + " " * 500)
    assert not re.search(r"\s{26}", found.text)


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 1, "temperature": 2.0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 5.0},
        {"top_k": 0, "top_p": 0.5, "temperature": 1.0},
        {"top_k": 3, "min_p": 0.9, "temperature": 1.0},
        {"repetition_penalty": 50.0, "presence_penalty": 100.0, "temperature": 1.0},
        {"logit_bias": {EOS: 100, ord("x"): 100}, "temperature": 1.0},
    ],
)
def test_filters_and_penalties_are_about_allowed_tokens(
    tokenizer: Tokenizer, sampling: dict[str, Any]
) -> None:
    check_person(answer(tokenizer, json_grammar(PERSON), "no!", seed=3, max_tokens=2000, **sampling).text)


def test_sampling_among_allowed_ids_is_sampling_without_the_others() -> None:
    numbers = np.random.default_rng(0)
    for seed in range(100):
        logits = numbers.normal(0, 3, 400).astype(np.float32)
        allowed = np.flatnonzero(numbers.random(400) < numbers.choice([0.3, 0.9]))
        others = np.setdiff1d(np.arange(400), allowed)
        masked = logits.copy()
        masked[others] = -np.inf
        options = {"top_k": int(numbers.choice([0, 5])), "top_p": float(numbers.choice([0.8, 1.0]))}
        expected = Sampler(Sampling(seed=seed, **options), 400).sample(masked)
        assert Sampler(Sampling(seed=seed, **options), 400).sample(logits, allowed) == expected


def test_a_token_that_must_come_and_is_excluded_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(OptionError, match="no token is left"):
        answer(tokenizer, json_grammar({"const": 1}), "1", logit_bias={ord("1"): -100})


@pytest.mark.parametrize("begins_inside", [True, False])
def test_reasoning_is_free_and_the_answer_after_it_is_not(tokenizer: Tokenizer, begins_inside: bool) -> None:
    script = ("" if begins_inside else "<think>\n") + "7 < 8, {so</think>\n\nI say: 17"
    found = answer(
        tokenizer, json_grammar({"type": "integer", "maximum": 9}), script, begins_inside=begins_inside
    )
    assert found.reasoning == "7 < 8, {so"
    assert type(json.loads(found.text)) is int


def test_a_marker_inside_of_a_larger_token_ends_the_reasoning(tokenizer: Tokenizer) -> None:
    script = [*b"hm", FIRST + 5, *b"1"]  # </think>\n\n
    found = answer(tokenizer, json_grammar({"const": 1}), script, begins_inside=True)
    assert (found.reasoning, found.text) == ("hm", "1")


def test_a_reasoning_model_may_answer_at_once(tokenizer: Tokenizer) -> None:
    found = answer(
        tokenizer,
        json_grammar(PERSON),
        '{"name": "x", "age": 1, "kind": "cat", "tags": []}',
        begins_inside=False,
    )
    assert found.reasoning == ""
    check_person(found.text)


def test_reasoning_does_not_end_the_answer(table: GrammarTable) -> None:
    constraint = table.constraint(json_grammar(PERSON), begins_inside=True)
    assert EOS not in constraint.allowed()
    assert len(constraint.allowed()) > 150


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "banana"}, "banana"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "http://example.org/x"}, "not present"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
        ({"type": "string", "format": "banana"}, "banana"),
        ({"enum": []}, "[Uu]nsatisfiable"),
        (False, "not"),
        ([], "must be an object"),
        ("x", "must be an object"),
        ({"default": float("nan")}, "no JSON"),
        ({"items": [{"type": "integer", "multipleOf": 99_991}]}, "multipleOf 99,991: 10,000 is the most"),
        ({"enum": [f"number {i}" for i in range(5_000)]}, "64,000 is the most"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(
    table: GrammarTable, schema: Any, reason: str
) -> None:
    with pytest.raises(OptionError, match=reason) as caught:
        table.constraint(json_grammar(schema))
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300


def test_deep_and_costly_schemas_end_in_an_error_or_an_answer(tokenizer: Tokenizer) -> None:
    deep: Any = {"type": "integer"}
    for _ in range(50):
        deep = {"type": "array", "items": deep, "minItems": 1, "maxItems": 1}
    nested = "[" * 50 + "1" + "]" * 50
    assert answer(tokenizer, json_grammar(deep), nested).text == nested
    for _ in range(200):
        deep = {"items": deep}
    with pytest.raises(OptionError, match="recursion"):
        answer(tokenizer, json_grammar(deep), "1")
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(OptionError):
        json_grammar(deep)
    costly = json_grammar({"type": "string", "pattern": "^(a|b)*c(a|b){40}$"})
    with contextlib.suppress(OptionError):
        answer(tokenizer, costly, '"' + "abbaab" * 2000, max_tokens=1000)


def test_a_tokenizer_without_bytes_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "has_bytes", False)
    with pytest.raises(TextError, match="beside"):
        GrammarTable(tokenizer, 300)


def test_without_the_library_the_error_names_the_command(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(OptionError, match="llguidance") as caught:
        GrammarTable(tokenizer, 300)
    assert "pip install" in (caught.value.hint or "")


def test_the_demo_model_answers_by_a_schema() -> None:
    with spile.load() as model:
        for seed in range(3):
            found = model.generate("A cat named Tom", json_schema=PERSON, seed=seed, max_tokens=200)
            assert found.finish_reason == "stop"
            check_person(found.text)
        found = model.generate(
            "A cat", json_schema={"type": "object", "maxProperties": 2}, seed=1, max_tokens=300
        )
        assert found.finish_reason == "length" or isinstance(json.loads(found.text), dict)


def test_the_command_line_takes_a_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(PERSON))
    assert run(["generate", "A cat named Tom", "--json-schema", str(path), "--seed", "1"]) == 0
    check_person(capsys.readouterr().out)
    for text, reason in (
        ("{", "not valid JSON"),
        ("null", "must be an object"),
        ('{"type": "banana"}', "banana"),
    ):
        path.write_text(text)
        assert run(["generate", "x", "--json-schema", str(path)]) == 2
        assert reason in capsys.readouterr().err
    assert run(["generate", "x", "--json-schema", str(tmp_path / "none")]) == 2


def test_a_constrained_answer_leaves_others_as_they_are() -> None:
    with spile.load() as model:
        alone = model.generate("The sun", temperature=0, max_tokens=12).token_ids
        constrained = model.stream("A cat", json_schema=PERSON, seed=1)
        plain = model.stream("The sun", temperature=0, max_tokens=12)
        pairs = list(zip(constrained, plain, strict=False))
        rest = [chunk.token_id for chunk in plain]
        ids = [chunk.token_id for _, chunk in pairs] + rest
        assert tuple(token_id for token_id in ids if token_id is not None) == alone


def test_the_table_comes_out_of_the_budget(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(vocab_size=320, tokenizer_entries=0)
    write_byte_tokenizer(folder, special=(END,), config={"eos_token": END})
    with spile.load(folder) as model:
        engine = model.open()
        model._memory_bytes, given = 10**9, []
        engine.hold = lambda owner, nbytes: given.append(nbytes)  # type: ignore[method-assign]
        model.generate("x", raw=True, json_schema=PERSON, max_tokens=3, temperature=0)
        model.generate("x", raw=True, json_schema=PERSON, max_tokens=3, temperature=0)
        assert given == [GrammarTable.nbytes(257)]


def test_a_pool_without_room_for_the_table_is_an_error(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(vocab_size=320, tokenizer_entries=0)
    write_byte_tokenizer(folder, special=(END,), config={"eos_token": END})
    with spile.load(folder) as model:
        engine = model.open()
        model._memory_bytes = 10**9

        def refuse(owner: str, nbytes: int) -> None:
            raise BudgetError(f"no room for {owner}", "Give more.")

        engine.hold = refuse  # type: ignore[method-assign]
        with pytest.raises(BudgetError, match=r"no room for the table of tokens"):
            model.generate("x", raw=True, json_schema=PERSON)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"at": {"$ref": "#/$defs/thing"}},
                "required": ["at"],
                "additionalProperties": False,
                "$defs": {"thing": {"enum": ["sun", "sea"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "wait"}},
]


def tool_answer(
    tokenizer: Tokenizer, script: str, *, begins_inside: bool | None = None, **body: Any
) -> tuple[str, list[tuple[str, Any]]]:
    """Return text and calls of an answer to a request with tools."""
    from spile.server.constrain import request_grammar
    from spile.server.protocol import parse_chat
    from spile.server.tools import Arguments, CallBegun, Text, ToolCallParser

    request = parse_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], **body}).encode())
    grammar = request_grammar(request)
    assert grammar is not None
    found = answer(tokenizer, grammar, [*script.encode(), EOS], begins_inside=begins_inside, max_tokens=1000)
    parser = ToolCallParser()
    deltas = parser.push(found.text) + parser.flush()
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, CallBegun):
            calls.append((delta.name, ""))
        elif isinstance(delta, Arguments):
            calls[-1] = calls[-1][0], calls[-1][1] + delta.text
    text = "".join(delta.text for delta in deltas if isinstance(delta, Text))
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def test_a_required_call_comes_and_keeps_to_its_parameters(tokenizer: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
    assert tool_answer(tokenizer, call, tools=TOOLS, tool_choice="required") == (
        "",
        [("look", {"at": "sea"})],
    )
    _, calls = tool_answer(tokenizer, "I would rather not.", tools=TOOLS[:1], tool_choice="required")
    assert calls[0][0] == "look"
    assert calls[0][1]["at"] in ("sun", "sea")


def test_a_named_function_is_the_one_that_is_called(tokenizer: Tokenizer) -> None:
    named = {"type": "function", "function": {"name": "wait"}}
    call = '<tool_call>{"name": "wait", "arguments": {"a": 1}}</tool_call>'
    assert tool_answer(tokenizer, call, tools=TOOLS, tool_choice=named) == ("", [("wait", {"a": 1})])
    call = '<tool_call>{"name": "look", "arguments": {"at": "sun"}}</tool_call>'
    assert tool_answer(tokenizer, call, tools=TOOLS, tool_choice=named)[1][0][0] == "wait"


def test_one_call_is_all_where_parallel_calls_are_off(tokenizer: Tokenizer) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
    for allowed, number in ((True, 2), (False, 1)):
        _, calls = tool_answer(
            tokenizer, call * 2, tools=TOOLS, tool_choice="required", parallel_tool_calls=allowed
        )
        assert len(calls) == number


@pytest.mark.parametrize("begins_inside", [None, True, False])
def test_a_strict_tool_is_kept_to_also_where_calls_are_free(
    tokenizer: Tokenizer, begins_inside: bool | None
) -> None:
    reasoning = {None: "", True: "<tool_call>?</think>\n\n", False: "<think>a <tool_call> x</think>\n"}[
        begins_inside
    ]
    text, calls = tool_answer(
        tokenizer,
        reasoning
        + 'Let me < see.\n<tool_call>{"name": "look", "arguments": {"at": "moon"}}</tool_call> Well.',
        begins_inside=begins_inside,
        tools=TOOLS,
    )
    assert text.startswith("Let me < see.")
    assert calls[0][0] == "look"
    assert calls[0][1]["at"] in ("sun", "sea")


def test_free_text_is_free_with_a_strict_tool(tokenizer: Tokenizer) -> None:
    assert tool_answer(tokenizer, "Just <tool text.", tools=TOOLS) == ("Just <tool text.", [])


def test_an_answer_by_a_schema_may_be_a_call_where_there_are_tools(tokenizer: Tokenizer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    call = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
    assert tool_answer(tokenizer, call, tools=TOOLS, response_format=form) == ("", [("wait", {})])
    assert tool_answer(tokenizer, "17", tools=TOOLS, response_format=form) == ("17", [])


def test_requests_without_a_form_have_no_grammar() -> None:
    from spile.server.constrain import request_grammar
    from spile.server.protocol import parse_chat

    for body in (
        {},
        {"tools": TOOLS[1:]},
        {"tools": TOOLS, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
    ):
        data = json.dumps({"messages": [{"role": "user", "content": "x"}], **body}).encode()
        assert request_grammar(parse_chat(data)) is None


def test_a_refused_schema_names_its_parameter(tokenizer: Tokenizer) -> None:
    from spile.server.constrain import make_constraint
    from spile.server.errors import RequestError
    from spile.server.protocol import parse_chat

    table = GrammarTable(tokenizer, 300)
    bad = {"type": "banana"}
    broken = {"type": "function", "function": {"name": "f", "parameters": bad}}
    for param, body in (
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": bad}}},
        ),
        ("tools", {"tools": [broken], "tool_choice": "required"}),
    ):
        data = json.dumps({"messages": [{"role": "user", "content": "x"}], **body}).encode()
        with pytest.raises(RequestError, match="banana") as caught:
            make_constraint(parse_chat(data), table, begins_inside=None)  # type: ignore[arg-type]
        assert caught.value.param == param


def test_a_grammar_of_ones_own_can_be_given(tokenizer: Tokenizer) -> None:
    assert answer(tokenizer, Grammar("answer: /[ab]{3}/\n"), "abba!").text == "abb"
    assert re.fullmatch("[ab]{3}", answer(tokenizer, Grammar("answer: /[ab]{3}/\n"), "xyz").text)
