"""Turns texts of users and tools into ones in which a tokenizer finds no mark, and says how to turn them back.

Marks are the tokens that give a prompt its structure, such as `<|im_end|>`. They come from the chat template alone:
whoever writes one into a message means the words. So before the template runs, the punctuation of what could become
a mark is replaced, one character for one, by private characters that occur nowhere else; the tokenizer finds the
template's own marks in what comes out, and then gives everything between them its characters back (`Hidden`). What
could become one is also a part of a mark at the beginning or end of a text, as the rest may stand beside it.

What a model said in earlier turns may hold the marks that templates look for in it, such as `</think>`: those stay.
It does not know tokens' ids or templates beyond their text. Ordinary text is never touched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Some tokenizers declare these special, but they are what an answer says: readers of it look for them.
SAID = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_PRIVATE = range(0x10F000, 0x10FFFE)  # of plane 16, where no script and no known font has any
_SAID_IN = ("content", "reasoning_content", "reasoning", "thinking")  # of an assistant's message
_PLAIN = "_/-."  # of a mark's punctuation: words in use begin with it (/no_think), and none is a mark by it


@dataclass(frozen=True)
class Hidden:
    """How to turn texts back, once marks are found in them: `restore` is for `str.translate`."""

    restore: Mapping[int, str]

    def is_in(self, text: str) -> bool:
        """Whether anything in a text is to be turned back."""
        return not text.isascii() and any(chr(code) in text for code in self.restore)

    def shown(self, text: str) -> str:
        """Turn a text back."""
        return text.translate(self.restore) if self.is_in(text) else text


class Marks:
    """The marks of one model: special tokens, and those that look like one: `<|so|>`, or `<so>` and `[so]` where it
    stands in the template.
    """

    def __init__(self, added: Iterable[tuple[str, bool]], template: str) -> None:
        """`added` are the tokens that are found in text as it stands, and whether each is special."""
        added = list(added)
        special = {content for content, is_special in added if is_special and content.strip()}
        others = {
            content
            for content, _ in added
            if content in SAID or _is_fenced(content) or (_is_bracketed(content) and content in template)
        }
        self._text, self._said = _Finder(special | others), _Finder(special.difference(SAID))

    def hide(self, given: Any) -> tuple[Any, Hidden | None]:
        """Return what a template is given without any mark; None where there was none.

        All strings in it are text of users and tools, but for those of an assistant's messages.
        """
        texts = list(_texts(given))
        if not any(map(self._text.has, set(texts))):
            return given, None
        characters = sorted(self._text.characters)
        table = dict(zip(map(ord, characters), _unused(len(characters), texts), strict=True))
        hidden = Hidden({code: chr(ordinary) for ordinary, code in table.items()})

        def walk(value: Any, find: _Finder) -> Any:
            if isinstance(value, str):
                return find.replace(value, table)
            if isinstance(value, Mapping):
                said = self._said if value.get("role") == "assistant" else find
                return {
                    walk(key, find): walk(part, said if key in _SAID_IN else find)
                    for key, part in value.items()
                }
            if isinstance(value, (list, tuple)):
                return [walk(part, find) for part in value]
            return value

        return walk(given, self._text), hidden


def _is_fenced(content: str) -> bool:
    return len(content) > 4 and content[:2] + content[-2:] in ("<||>", "<\uff5c\uff5c>")


def _is_bracketed(content: str) -> bool:
    return len(content) > 2 and content[0] + content[-1] in ("<>", "[]")


def _unused(count: int, texts: list[str]) -> range:
    """Return private characters that stand in no text; the last ones, in a text that has them all."""
    blocks = [range(start, start + count) for start in range(_PRIVATE.start, _PRIVATE.stop - count, count)]
    others = [text for text in texts if not text.isascii()]
    free = (block for block in blocks if not any(chr(code) in text for text in others for code in block))
    return next(free, blocks[-1])


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(key)
            yield from _texts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)


class _Finder:
    """Finds what is a mark in a text, or could become one with what stands beside it.

    Within a text that is two characters of a mark's punctuation in a row (`<|`, `|>`), or a whole mark without such a
    pair, in letters of any case; at its ends, a part of a mark of two characters or more.
    """

    def __init__(self, marks: Collection[str]) -> None:
        self.characters = {char for mark in marks for char in [*filter(_is_punctuation, mark)] or mark[:1]}
        self._pairs = {
            mark[at : at + 2]
            for mark in marks
            for at in range(len(mark) - 1)
            if _is_punctuation(mark[at]) and _is_punctuation(mark[at + 1])
        }
        whole = {mark.lower() for mark in marks if not any(pair in mark for pair in self._pairs)}
        starts = sorted(self._pairs | {mark[:2] for mark in whole})
        self._pattern = re.compile("|".join(map(re.escape, starts)) or r"(?!)", re.IGNORECASE)
        self._whole, self._lengths = whole, sorted({len(mark) for mark in whole}, reverse=True)
        self._firsts, self._lasts = {mark[0] for mark in whole}, {mark[-1] for mark in whole}
        self._between = "\0" + "\0".join(whole) + "\0"  # what begins or ends one stands here beside a zero
        self._inside, self._longest = "\0".join(marks), max(map(len, marks), default=0)

    def has(self, text: str) -> bool:
        """Whether there is anything to replace."""
        return any(True for _ in self._spans(text))

    def replace(self, text: str, table: Mapping[int, int]) -> str:
        """Return the text with all of it replaced, character by character."""
        pieces, done = [], 0
        for begin, end in sorted(self._spans(text)):
            if end > done:
                begin = max(begin, done)
                pieces += [text[done:begin], text[begin:end].translate(table)]
                done = end
        return "".join([*pieces, text[done:]])

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where something is to be replaced, in no order."""
        for match in self._pattern.finditer(text):
            begin, end = match.span()
            if match.group() in self._pairs:
                yield begin, end
                continue
            for length in self._lengths:
                if text[begin : begin + length].lower() in self._whole:
                    yield begin, begin + length
                    break
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        is_short = 1 < end - begin < self._longest
        if is_short and any(map(_is_punctuation, text[begin:end])) and text[begin:end] in self._inside:
            yield begin, end
        sizes = range(2, min(end - begin, self._longest - 1) + 1)
        for size in sizes:
            if (
                text[begin + size - 1] in self._lasts
                and f"{text[begin : begin + size].lower()}\0" in self._between
            ):
                yield begin, begin + size
            if text[end - size] in self._firsts and f"\0{text[end - size : end].lower()}" in self._between:
                yield end - size, end


def _is_punctuation(char: str) -> bool:
    return not (char.isalnum() or char.isspace() or char in _PLAIN)
