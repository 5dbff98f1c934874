"""Turns the regular expressions by which a tokenizer cuts text into ones of Python that cut it in the same places.

`tokenizers` runs Oniguruma's expressions, whose classes (letters, numbers, white space) come from the Unicode
version that it was built with; Python's `re` knows no `\\p{L}` and has another version. So every part of an
expression that stands for one character is taken out, and what it matches is asked of whoever translates:
`tokenizers` itself while a table is built, the table afterwards. What is left (alternatives, groups,
repetition, looking ahead) means the same in both. It does not know which expressions there are; one that goes
beyond this is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise

Ranges = Sequence[int]  # first, last, first, last, ... of code points, ascending
Ask = Callable[[str], Ranges]  # an expression for one character -> what it matches

_LAST = 0x10FFFF
_PAST_PLANE = re.compile("[\U00010000-\U0010ffff]")  # sets cost time, past the first plane most
_BATCH = 1 << 14
_NOTHING = f"[^\\x00-\\U{_LAST:08x}]"
_ESCAPE = re.compile(r"\\(?:[pP]\{[^{}]*\}|[sSdDwW])")
_CONTROLS = {"r": "\r", "n": "\n", "t": "\t"}
_REPEAT = re.compile(r"[?*+][?+]?|\{(\d+)(?:,(\d*))?\}(?![?+])")
# The one thing that tokenizers write without regard to case. Letters that could fold together, as "st" does
# into one ligature, are not among them.
_LETTERS = r"'?(?:s|t|re|ve|m|ll|d|\[[sdmt]+\])"
_CONTRACTION = re.compile(rf"\(\?i:({_LETTERS}(?:\|{_LETTERS})*)\)")


class PatternError(ValueError):
    """An expression that is not translated."""


class Pattern:
    """A translated expression: cuts text into its matches and what lies between them."""

    def __init__(self, pattern: str, ask: Ask) -> None:
        self._parts: list[str | Ranges] = _Translation(pattern, ask).parts
        self._compiled: dict[int, re.Pattern[str]] = {}

    def words(self, text: str) -> list[str]:
        """Cut a text into pieces; none is empty."""
        pattern = self._for(text)
        words: list[str] = pattern.findall(text)
        if sum(map(len, words)) == len(text):
            return words
        return list(_with_gaps(pattern, text))

    def batches(self, text: str) -> Iterator[list[str]]:
        """Cut a text into pieces, of a long one only some thousands at a time: each takes 60 bytes."""
        if len(text) <= _BATCH:
            yield self.words(text)
            return
        pieces = _with_gaps(self._for(text), text)
        while batch := list(islice(pieces, _BATCH)):
            yield batch

    def _for(self, text: str) -> re.Pattern[str]:
        limit = 0x7F if text.isascii() else _LAST if _PAST_PLANE.search(text) else 0xFFFF
        if limit not in self._compiled:
            parts = (part if isinstance(part, str) else one_of(part, limit) for part in self._parts)
            self._compiled[limit] = re.compile("".join(parts))
        return self._compiled[limit]


def _with_gaps(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    end = 0
    for match in pattern.finditer(text):
        start, stop = match.span()
        if start > end:
            yield text[end:start]
        yield text[start:stop]
        end = stop
    if end < len(text):
        yield text[end:]


def one_of(ranges: Ranges, limit: int = _LAST) -> str:
    """Write a set of characters as Python's `re` does, without those past `limit`."""
    pieces = [
        f"\\U{first:08x}-\\U{min(last, limit):08x}"
        for first, last in zip(ranges[::2], ranges[1::2], strict=True)
        if first <= limit
    ]
    return f"[{''.join(pieces)}]" if pieces else _NOTHING


def are_ranges(value: object) -> bool:
    """Whether a value from a file is a list of ranges."""
    if not isinstance(value, list) or len(value) % 2 or not all(type(number) is int for number in value):
        return False
    ordered = all(a <= b for a, b in pairwise(value))
    return ordered and (not value or (value[0] >= 0 and value[-1] <= _LAST))


class _Translation:
    """One walk over an expression. Its methods return the fewest characters that what they read matches."""

    def __init__(self, pattern: str, ask: Ask) -> None:
        self.parts: list[str | Ranges] = []
        self._pattern = pattern
        self._ask = ask
        self._at = 0
        if self._alternatives() == 0:
            raise PatternError(f"{pattern!r} can match nothing")
        if self._at < len(pattern):
            raise self._refusal()

    def _alternatives(self) -> int:
        fewest = self._sequence()
        while self._take("|"):
            self.parts.append("|")
            fewest = min(fewest, self._sequence())
        return fewest

    def _sequence(self) -> int:
        fewest = 0
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            fewest += self._repeated()
        return fewest

    def _repeated(self) -> int:
        looks_ahead = self._pattern.startswith(("(?=", "(?!"), self._at)
        fewest = self._one()
        match = _REPEAT.match(self._pattern, self._at)
        if match is None:
            return fewest
        if looks_ahead:
            raise self._refusal()
        self._at = match.end()
        self.parts.append(match.group())
        if match.group(1):
            return fewest * int(match.group(1))
        return fewest if match.group()[0] == "+" else 0

    def _one(self) -> int:
        if self._pattern.startswith("(?i:", self._at):
            return self._contraction()
        for opening, width in (("(?=", 0), ("(?!", 0), ("(?:", 1)):
            if self._take(opening):
                self.parts.append(opening)
                fewest = self._alternatives()
                if not self._take(")"):
                    raise self._refusal()
                self.parts.append(")")
                return fewest * width
        char = self._pattern[self._at]
        if char == "[":
            self._set(self._class_end())
        elif char == "\\":
            match = _ESCAPE.match(self._pattern, self._at)
            if match is not None:
                self._set(match.end())
            else:
                self._escaped()
        elif char in "(.^$*+?{}]":
            raise self._refusal()
        else:
            self.parts.append(re.escape(char))
            self._at += 1
        return 1

    def _set(self, end: int) -> None:
        self.parts.append(self._ask(self._pattern[self._at : end]))
        self._at = end

    def _escaped(self) -> None:
        char = self._pattern[self._at + 1 : self._at + 2]
        if not char or (char.isalnum() and char not in _CONTROLS):
            raise self._refusal()
        self.parts.append(re.escape(_CONTROLS.get(char, char)))
        self._at += 2

    def _class_end(self) -> int:
        depth, at = 0, self._at
        while at < len(self._pattern):
            char = self._pattern[at]
            at += 2 if char == "\\" else 1
            depth += (char == "[") - (char == "]")
            if depth == 0:
                return at
        raise self._refusal()

    def _contraction(self) -> int:
        match = _CONTRACTION.match(self._pattern, self._at)
        if match is None:
            raise self._refusal()
        self.parts.append("(?:")
        for piece in re.findall(r"\[\w+\]|.", match.group(1)):
            self.parts.append(piece if piece in "'|" else self._ask(f"(?i:{piece})"))
        self.parts.append(")")
        self._at = match.end()
        return 1

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _refusal(self) -> PatternError:
        return PatternError(f"{self._pattern!r} is not translated from character {self._at} on")
