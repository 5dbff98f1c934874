"""What people and programs send, made plain for templates."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from spile.errors import OptionError
from spile.text.messages import checked_tools, plain_messages

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (["Hi"], r"messages\[0\] is a str"),
        ([USER, {"content": "Hi"}], r"messages\[1\] has no role"),
        ([{"role": 3}], r"messages\[0\] has no role"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing: only an assistant's"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content is a int"),
        ([{"role": "user", "content": {"text": "a"}}], r"messages\[0\]\.content is a dict"),
        (
            [USER, {"role": "user", "content": ["a", {"type": "image_url", "image_url": {}}]}],
            r"messages\[1\]\.content\[1\] is of type 'image_url': the model reads only text",
        ),
        ([{"role": "user", "content": [3]}], r"messages\[0\]\.content\[0\] is of type 'int'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\] has no text"),
        ([{"role": "assistant", "tool_calls": "add"}], r"messages\[0\]\.tool_calls is a str"),
        ([{"role": "assistant", "tool_calls": ["add"]}], r"messages\[0\]\.tool_calls\[0\] is a str"),
    ],
)
def test_what_is_no_message_is_refused_by_place(messages: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plain_messages(messages)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    "content", ["AB", ["A", "B"], [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], ["AB", ""]]
)
def test_parts_are_joined_with_nothing_between(role: str, content: Any) -> None:
    assert plain_messages([{"role": role, "content": content}]) == [{"role": role, "content": "AB"}]


def test_empty_list_of_parts_is_an_empty_text() -> None:
    assert plain_messages([{"role": "user", "content": []}])[0]["content"] == ""


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_turn_that_called_a_tool_may_have_no_content(content: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [USER, {"role": "assistant", **content, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    before = copy.deepcopy(history)
    plain = plain_messages(history)
    assert plain[1]["content"] == ""
    assert plain[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert plain[2] == {"role": "tool", "content": "2"}
    assert history == before


def test_calls_without_a_function_object_and_damaged_arguments_stay_as_they_are() -> None:
    calls = [{"name": "add", "arguments": '{"a": 1}'}, {"function": {"name": "add", "arguments": "{a"}}]
    plain = plain_messages([{"role": "assistant", "tool_calls": calls}])[0]["tool_calls"]
    assert plain == [{"name": "add", "arguments": {"a": 1}}, {"function": {"name": "add", "arguments": "{a"}}]
    assert plain_messages([{"role": "assistant", "tool_calls": None}])[0]["tool_calls"] is None


def test_tools_are_a_list_of_objects() -> None:
    assert checked_tools(None) is None
    assert checked_tools([]) is None
    assert checked_tools([{"type": "function"}]) == [{"type": "function"}]
    for wrong in ("add", {"type": "function"}, 3):
        with pytest.raises(OptionError, match="tools is a"):
            checked_tools(wrong)
    with pytest.raises(OptionError, match=r"tools\[0\] is a str"):
        checked_tools(["add"])
