"""Text into tool calls: the same however it was cut, and nothing lost."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from spile.server.tools import Arguments, CallBegun, Delta, Text, ToolCallParser, lack_for_tools

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it", "n": [1, {"x": 2}]}}\n</tool_call>'


def parse(*pieces: str) -> list[Delta]:
    parser = ToolCallParser()
    return [delta for piece in pieces for delta in parser.push(piece)] + parser.flush()


def joined(deltas: list[Delta]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls, as a client puts them together."""
    text, calls = "", []
    for delta in deltas:
        match delta:
            case Text():
                text += delta.text
            case CallBegun():
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
            case Arguments():
                name, before = calls[delta.index]
                calls[delta.index] = name, before + delta.text
    return text, calls


def answer(text: str) -> tuple[str, list[tuple[str, str]], int]:
    parser = ToolCallParser()
    return *joined(parser.push(text) + parser.flush()), parser.num_calls


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", [], 0)),
        ("Just text. \n", ("Just text. \n", [], 0)),
        ("a < b and <tool", ("a < b and <tool", [], 0)),
        (CALL, ("", [("look", '{"at": "it", "n": [1, {"x": 2}]}')], 1)),
        (f"Let me see.\n\n{CALL}\n", ("Let me see.", [("look", '{"at": "it", "n": [1, {"x": 2}]}')], 1)),
        (f"{CALL}\n{CALL}", ("", [("look", '{"at": "it", "n": [1, {"x": 2}]}')] * 2, 2)),
        (f"a\n{CALL}\nb", ("a\n\nb", [("look", '{"at": "it", "n": [1, {"x": 2}]}')], 1)),
        ('I call. <tool_call>{"name":"f"}</tool_call> Done.\n', ("I call.  Done.\n", [("f", "{}")], 1)),
        ('\n<tool_call>{"name":"f"}</tool_call>\nDone.', ("Done.", [("f", "{}")], 1)),
        ('a <tool_call>?</tool_call> b', ("a <tool_call>?</tool_call> b", [], 0)),
        ('<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', ("", [("f", '{"a":1}')], 1)),
        ('<tool_call>{"name":"f"}</tool_call>', ("", [("f", "{}")], 1)),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')], 1)),
        ('<tool_call>{"name":"f","arguments":""}</tool_call>', ("", [("f", "{}")], 1)),
        ('<tool_call>{"name":"f","arguments":17}</tool_call>', ("", [("f", "17")], 1)),
        ('<tool_call>{"id":"7","name":"f","arguments":{}}</tool_call>', ("", [("f", "{}")], 1)),
        ('<tool_call>{"name":"f","arguments":{"a":"</tool_call>"}}', ("", [("f", '{"a":"</tool_call>"}')], 1)),
        ('<tool_call>{"name":"f","arguments":{"a":"\\"}"}}</tool_call>', ("", [("f", '{"a":"\\"}"}')], 1)),
        ('<tool_call>{"name":"\\u00e9","arguments":{"a":"\u00e9"}}', ("", [("\u00e9", '{"a":"\u00e9"}')], 1)),
    ],
)  # fmt: skip
def test_text_becomes_text_and_calls(text: str, expected: Any) -> None:
    assert answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # One brace missing: the call is whole all the same, as its marker came.
        ('<tool_call>{"name":"f","arguments":{"a":1}</tool_call>', ("", [("f", '{"a":1}')], 1)),
        ('<tool_call>{"name":"f","arguments":{"a":[1}</tool_call>', ("", [("f", '{"a":[1}')], 1)),
        ('<tool_call>{"name":"f","arguments":{"a":<b></tool_call>', ("", [("f", '{"a":<b>')], 1)),
        ('<tool_call>{"name":"f",arguments:{"a":1}}</tool_call>', ("", [("f", 'arguments:{"a":1}}')], 1)),
        ('<tool_call>{"name":"f","arguments":{a:1}}}</tool_call>', ("", [("f", "{a:1}")], 1)),
    ],
)
def test_arguments_that_are_no_json_are_passed_on_as_text(text: str, expected: Any) -> None:
    assert answer(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nlook(at=it)\n</tool_call>",
        "see\n<tool_call></tool_call>\nand more",
        '<tool_call>{"nome":"f","arguments":{}}</tool_call>',
        '<tool_call>{"name":"","arguments":{}}</tool_call>',
        '<tool_call>{"name":7}</tool_call>',
        "<tool_call>[1]",
        "<tool_call>",
        '<tool_call>{"name":"f',
        "<tool_call>{}</tool_ca",
    ],
)
def test_what_has_no_name_stays_text(text: str) -> None:
    assert answer(text) == (text, [], 0)


def test_a_call_cut_by_the_limit_is_passed_on_as_far_as_it_came_and_is_not_whole() -> None:
    for end in range(CALL.index("arguments") + 12, CALL.rindex("}") + 1):
        text, calls, num_calls = answer(CALL[:end])
        assert (text, num_calls) == ("", 0)
        assert calls == [("look", CALL[CALL.index('{"at"') : min(end, CALL.rindex("}"))])]


def test_a_string_of_arguments_that_was_cut_stands_as_it_is() -> None:
    assert answer('<tool_call>{"name":"f","arguments":"{\\"a') == ("", [("f", '"{\\"a')], 0)


def test_a_closed_object_is_a_call_without_its_marker() -> None:
    assert answer(CALL.removesuffix("\n</tool_call>"))[2] == 1


def test_name_comes_first_then_arguments_while_they_are_written() -> None:
    parser = ToolCallParser()
    assert parser.push('Hm. <tool_call>{"name": "lo') == [Text("Hm.")]
    (begun,) = parser.push('ok", "argu')
    assert isinstance(begun, CallBegun)
    assert begun.name == "look"
    assert parser.push('ments": {"at"') == [Arguments(0, '{"at"')]
    assert parser.push(': "i') == [Arguments(0, ': "i')]
    assert parser.num_calls == 0
    assert parser.push('t"}}\n</tool') == [Arguments(0, 't"}')]
    assert parser.push("_call>") == []
    assert parser.num_calls == 1


def test_ids_differ_and_are_of_nine_letters_or_digits() -> None:
    ids = [delta.id for delta in parse(CALL * 20) if isinstance(delta, CallBegun)]
    assert len(set(ids)) == 20
    assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in ids)


def test_any_cut_gives_the_same() -> None:
    random_ = random.Random(0)
    texts = [
        f"One.\n{CALL}\n {CALL} two < three </tool_call> four",
        '<tool_call>{"arguments":"{\\"a\\":\\"\\u00e9\\"}","name":"f"}</tool_call>',
        f"<tool_call>no</tool_call>{CALL}<tool_call>{{",
        '<tool_call>{"name":"f","arguments":{"a":<b></c></tool_call> x <tool_call>{"name":"g",q}</tool_call>',
    ]
    for text in texts:
        whole = joined(parse(text))
        assert joined(parse(*text)) == whole
        for _ in range(50):
            cuts = sorted(random_.choices(range(len(text)), k=6))
            pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert joined(parse(*pieces)) == whole


def test_random_json_arrives_as_it_was_written() -> None:
    random_ = random.Random(1)

    def value(depth: int) -> Any:
        kind = random_.randrange(7 if depth else 4)
        if kind < 2:
            return random_.choice(['"', "\\", "}", "</tool_call>", "<tool_call>", "\u00e9\n", "a", ""])
        if kind < 4:
            return random_.choice([None, True, -1.5e9, 0, 17])
        if kind < 6:
            return {f"{i}{value(0)}": value(depth - 1) for i in range(random_.randrange(4))}
        return [value(depth - 1) for _ in range(random_.randrange(4))]

    for _ in range(200):
        arguments = json.dumps({"x": value(3)}, indent=random_.choice([None, 2]))
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert answer(text) == ("", [("f", arguments)], 1)


def test_long_arguments_take_time_in_proportion() -> None:
    arguments = json.dumps({"text": 'line \\ "quoted" \n' * 5_000})
    text = f'<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>'
    assert joined(parse(*(text[i : i + 4] for i in range(0, len(text), 4)))) == ("", [("f", arguments)])


def test_a_template_says_what_it_lacks_for_tools() -> None:
    assert lack_for_tools("{% if tools %}<tool_call>{% endif %}") is None
    assert lack_for_tools("{{ messages }}") == lack_for_tools(None) == "takes no tools"
    assert "a form of its own" in str(lack_for_tools("{% if tools %}<|python_tag|>{% endif %}"))
