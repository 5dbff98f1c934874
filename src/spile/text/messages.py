"""Turns the messages that people and programs send into the plain ones that chat templates expect.

It does not know templates or tokens. What is made plain: content as a list of parts becomes one text, an
assistant turn without content (it called a tool) has an empty one, and a call's arguments, which arrive as
JSON in a string, become the object they stand for. What is given is never changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spile.errors import OptionError, quote

Message = Mapping[str, Any]


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Check messages, and return them as templates expect them.

    Raises: OptionError naming the first that is none, or what in it is no text.
    """
    if not messages:
        raise OptionError("messages is empty: give at least one message")
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def checked_tools(tools: Any) -> list[Any] | None:
    """Return tools as templates expect them; an empty list is none at all.

    Raises: OptionError for what is no list of objects.
    """
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise OptionError(f"tools is a {type(tools).__name__}: it must be a list of tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise OptionError(f"tools[{index}] is a {type(tool).__name__}: it must be an object")
    return list(tools) or None


def _plain(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise OptionError(f"{where} is a {kind}: it must be a mapping with role and content")
    role = message.get("role")
    if not isinstance(role, str):
        raise OptionError(f"{where} has no role: it must be a text such as 'user'")
    plain = dict(message)
    plain["content"] = _text_of(message.get("content"), role, f"{where}.content")
    if "tool_calls" in message:
        plain["tool_calls"] = _plain_calls(message["tool_calls"], f"{where}.tool_calls")
    return plain


def _text_of(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role != "assistant":
            raise OptionError(f"{where} is missing: only an assistant's message may have none")
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise OptionError(f"{where} is a {type(content).__name__}: it must be text or a list of text parts")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "input_text", "output_text"):
        raise OptionError(f"{where} is of type {quote(kind)}: the model reads only text")
    text = part.get("text")
    if not isinstance(text, str):
        raise OptionError(f"{where} has no text")
    return text


def _plain_calls(calls: Any, where: str) -> list[Any] | None:
    if calls is None:
        return None
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise OptionError(f"{where} is a {type(calls).__name__}: it must be a list of calls")
    return [_plain_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise OptionError(f"{where} is a {type(call).__name__}: it must be an object")
    plain = dict(call)
    if isinstance(call.get("function"), Mapping):
        plain["function"] = _with_object(call["function"])
    return _with_object(plain)


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function with its arguments as an object, an empty one where there are none. A string that
    is none stays as     the model wrote it: a program that replays a damaged call is to be answered, not refused.
    """
    plain = dict(function)
    if "arguments" in plain and (plain["arguments"] is None or plain["arguments"] == ""):
        plain["arguments"] = {}
    if isinstance(plain.get("arguments"), str):
        try:
            found = json.loads(plain["arguments"])
        except (ValueError, RecursionError):
            return plain
        if isinstance(found, dict):
            plain["arguments"] = found
    return plain
