"""Turns the text of an answer, piece by piece, into plain text and tool calls.

The form is Maple's and Qwen's: a JSON object with a name and arguments, between `<tool_call>` and
`</tool_call>`, any number of times. It does not know tokens, models or HTTP. How the text was cut into pieces does
not matter: the joined deltas are the same.

Nothing that a model wrote is dropped. Arguments are passed on as they stand, valid JSON or not; what has no name
becomes text again, markers included. White space around calls is kept where text stands before and after them, and
belongs to nothing elsewhere. A marker inside of a JSON string is part of the string.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spile.text.stops import held_back

BEGIN = "<tool_call>"
END = "</tool_call>"
# Mistral's templates refuse ids of any other form; to clients an id is only a text.
_ID_LENGTH, _ID_LETTERS = 9, string.ascii_letters + string.digits


@dataclass(frozen=True)
class Text:
    """A piece of the answer proper."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call whose name is known; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of a call's arguments, as text."""

    index: int
    text: str


Delta = Text | CallBegun | Arguments


def lack_for_tools(template: str | None) -> str | None:
    """Return what a chat template lacks for tools to be called in this form; None where it has it."""
    if template is None or "tools" not in template:
        return "takes no tools"
    if BEGIN not in template:
        return (
            f"takes tools, and has calls written in a form of its own: the one that can be read here is a JSON object "
            f'with "name" and "arguments" between {BEGIN} and {END}'
        )
    return None


class ToolCallParser:
    """Parses one answer. `num_calls` counts the calls that ended: by the marker, or by the end of their JSON."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """The tools are not looked at: a name that is none of them is for the client to answer."""
        self.num_calls = 0
        self._num_begun = 0
        self._space = ""  # white space that a call or more text may follow
        self._held = ""  # what may become a marker
        self._call: _Call | None = None
        self._has_said = False  # any text
        self._is_after_call = False  # and no text since

    def push(self, text: str) -> list[Delta]:
        """Return what is certain of the text so far."""
        deltas: list[Delta] = []
        while text:
            text = self._plain(text, deltas) if self._call is None else self._inside(text, deltas)
        return deltas

    def flush(self) -> list[Delta]:
        """Return what was held back: the text is over. A call that was cut short is passed on as far as it came."""
        deltas: list[Delta] = []
        if self._call is not None:
            self._end(deltas)
        elif self._held or not self._is_after_call:
            self._say(self._held, deltas)
        self._held = self._space = ""
        return deltas

    def _plain(self, text: str, deltas: list[Delta]) -> str:
        """Take text outside of calls; return what follows a marker."""
        text, self._held = self._held + text, ""
        before, marker, rest = text.partition(BEGIN)
        if not marker:
            before = text[: len(text) - held_back(text, BEGIN)]
            self._held = text[len(before) :]
        said = before.rstrip()
        if said:
            self._say(said, deltas)
        self._space += before[len(said) :]
        if marker:
            self._call = _Call(self._num_begun)
        return rest

    def _say(self, text: str, deltas: list[Delta]) -> None:
        """Give text out, with the white space before it; a text that begins after calls begins without."""
        text, self._space = self._space + text, ""
        if self._num_begun and not self._has_said:
            text = text.lstrip()
        if text:
            self._has_said, self._is_after_call = True, False
            deltas.append(Text(text))

    def _inside(self, text: str, deltas: list[Delta]) -> str:
        """Take text inside of a call; return what follows it."""
        assert self._call is not None, "only inside of a call"
        rest = self._call.push(text, deltas)
        if self._call.has_ended:
            self._end(deltas)
        return rest

    def _end(self, deltas: list[Delta]) -> None:
        call, self._call = self._call, None
        assert call is not None, "only inside of a call"
        if text := call.finish(deltas):
            self._say(text, deltas)
        self._num_begun += call.has_begun
        self.num_calls += call.is_whole
        self._is_after_call = self._is_after_call or call.has_begun


class _Call:
    """The inside of one call: a reader of JSON that gives the arguments out while they are being written.

    `has_begun`: the name is known and was told. `has_ended`: the end marker came. `is_whole`: it has a name, and
    its object was closed or the marker came.
    """

    def __init__(self, index: int) -> None:
        self.has_begun = False
        self.has_ended = False
        self.is_whole = False
        self._index = index
        self._seen = [BEGIN]  # all of it, until there is a name
        self._step = _OPEN
        self._key = ""
        self._name: str | None = None
        self._token = ""  # of the key or value that is being read
        self._scan = _Value()
        self._marker = ""  # what may become the end marker
        self._given: list[str] = []  # arguments that were not told yet
        self._has_told = False

    def push(self, text: str, deltas: list[Delta]) -> str:
        """Take a piece; return what follows the end marker."""
        for at, character in enumerate(text):
            if not self.has_begun:
                self._seen.append(character)
            self._take(character, deltas)
            if self.has_ended:
                return text[at + 1 :]
        self._tell(deltas)
        return ""

    def finish(self, deltas: list[Delta]) -> str:
        """Say the rest: the marker came, or the text is over. Return the text that it is where it is no call."""
        if not self.has_ended:
            for character in self._marker:
                self._read(character, deltas)
        if not self.has_begun:
            return "".join(self._seen)
        if self._step is _VALUE and self._key == "arguments":
            self._given.append(self._token)  # a string that was not closed, as it stands
        self._tell(deltas)
        self.is_whole = self.has_ended or self._step is _CLOSED
        if self.is_whole and not self._has_told:
            deltas.append(Arguments(self._index, "{}"))
        return ""

    def _take(self, character: str, deltas: list[Delta]) -> None:
        """Take one character, which may belong to the end marker."""
        if not self._scan.in_string:
            held = self._marker + character
            if END.startswith(held):
                self._marker, self.has_ended = held, held == END
                return
            for before in self._marker:
                self._read(before, deltas)
            self._marker = "<" if character == "<" else ""
            if self._marker:
                return
        self._read(character, deltas)

    def _read(self, character: str, deltas: list[Delta]) -> None:
        """Take one character of the object."""
        step = self._step
        if step is _KEY or step is _VALUE:
            self._read_token(character, deltas)
        elif step is _BROKEN:
            self._given.append(character)
        elif character.isspace() or step is _CLOSED:
            pass
        elif step is _BEFORE_VALUE:
            self._step, self._token, self._scan = _VALUE, "", _Value()
            self._read_token(character, deltas)
        elif step is _BEFORE_KEY and character == '"':
            self._step, self._token, self._scan = _KEY, "", _Value()
            self._read_token(character, deltas)
        else:
            self._step = _NEXT.get((step, character), _BROKEN)
            if self._step is _BROKEN:
                self._given.append(character)

    def _read_token(self, character: str, deltas: list[Delta]) -> None:
        """Take one character of a key or a value, or the one after a number."""
        is_over, is_part = self._scan.take(character)
        if is_part:
            is_told = self._step is _VALUE and self._key == "arguments" and not self._scan.is_text
            if is_told:
                self._given.append(character)
            else:
                self._token += character
        if not is_over:
            return
        if self._step is _KEY:
            self._key, self._step = _string(self._token) or "", _AFTER_KEY
        else:
            self._step = _AFTER_VALUE
            text = _string(self._token) if self._scan.is_text else None
            if self._key == "arguments" and self._scan.is_text:
                self._given.append(self._token if text is None else text)
            elif self._key == "name" and text and self._name is None:
                self._name = text
                self._begin(text, deltas)
        if not is_part:
            self._read(character, deltas)

    def _begin(self, name: str, deltas: list[Delta]) -> None:
        self.has_begun = True
        self._seen.clear()
        letters = (secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
        deltas.append(CallBegun(self._index, "".join(letters), name))

    def _tell(self, deltas: list[Delta]) -> None:
        """Give the arguments out that came so far, once it is known whose they are."""
        text = "".join(self._given)
        if self.has_begun and text:
            self._given.clear()
            self._has_told = True
            deltas.append(Arguments(self._index, text))


# Where a call's reader stands.
_OPEN, _BEFORE_KEY, _KEY, _AFTER_KEY = "before {", "before a key", "in a key", "before :"
_BEFORE_VALUE, _VALUE, _AFTER_VALUE = "before a value", "in a value", "after a value"
_CLOSED, _BROKEN = "after }", "in what is no JSON"
_NEXT = {
    (_OPEN, "{"): _BEFORE_KEY,
    (_BEFORE_KEY, "}"): _CLOSED,
    (_AFTER_KEY, ":"): _BEFORE_VALUE,
    (_AFTER_VALUE, ","): _BEFORE_KEY,
    (_AFTER_VALUE, "}"): _CLOSED,
}


class _Value:
    """Finds the end of one JSON value. `is_text`: it is a string."""

    def __init__(self) -> None:
        self.in_string = False
        self.is_text = False
        self._depth = 0
        self._is_escaped = False
        self._is_bare = False  # a number or a word

    def take(self, character: str) -> tuple[bool, bool]:
        """Take one character; return whether the value is over, and whether the character is part of it."""
        if self.in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self.in_string = False
                return self._depth == 0, True
            return False, True
        if self._is_bare:
            is_over = character in ",}]" or character.isspace()
            return is_over, not is_over
        if character == '"':
            self.in_string = True
            self.is_text = self._depth == 0
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth <= 0, True
        elif self._depth == 0:
            self._is_bare = True
        return False, True


def _string(token: str) -> str | None:
    """Return the text that a JSON string stands for, raw line ends and all; None where it is none."""
    try:
        value = json.loads(token, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
