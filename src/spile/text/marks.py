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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
        if not any(map(self._text.has, texts)):
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

    Within a text that is two characters of a mark's punctuation in a row (`<|`, `|>`), or a whole mark, in letters
    of any case; at its ends, a part of a mark of two characters or more.
    """

    def __init__(self, marks: Collection[str]) -> None:
        kinds = {
            mark: [char for char in mark if _is_punctuation(char)] or [mark[0]] for mark in marks if mark
        }
        self.characters = {char for chars in kinds.values() for char in chars}
        pairs = {
            mark[at : at + 2]
            for mark in kinds
            for at in range(len(mark) - 1)
            if all(map(_is_punctuation, mark[at : at + 2]))
        }
        whole = {mark for mark in kinds if not any(pair in mark for pair in pairs)}
        found = sorted(pairs) + sorted(whole, key=lambda mark: (-len(mark), mark))
        self._pattern = re.compile("|".join(map(re.escape, found)), re.IGNORECASE) if found else None
        self._starts = {mark[:end] for mark in kinds for end in range(2, len(mark))}
        self._ends = {mark[start:] for mark in kinds for start in range(1, len(mark) - 1)}
        self._marks, self._longest = list(kinds), max(map(len, kinds), default=0)

    def has(self, text: str) -> bool:
        """Whether there is anything to replace."""
        return bool(self._pattern and self._pattern.search(text)) or any(self._at_ends(text))

    def replace(self, text: str, table: Mapping[int, int]) -> str:
        """Return the text with all of it replaced."""
        if self._pattern is not None:
            swap: Callable[[re.Match[str]], str] = lambda match: match.group().translate(table)  # noqa: E731
            text = self._pattern.sub(swap, text)
        first, last = self._at_ends(text)
        if first:
            text = text[:first].translate(table) + text[first:]
        if last:
            text = text[: len(text) - last] + text[len(text) - last :].translate(table)
        return text

    def _at_ends(self, text: str) -> tuple[int, int]:
        """Return how many characters of a text's beginning, and of its end, are to be replaced."""
        bare = text.strip()
        before, after = len(text) - len(text.lstrip()), len(text) - len(text.rstrip())
        is_part = len(bare) < self._longest and any(bare in mark for mark in self._marks)
        if is_part and any(map(_is_punctuation, bare)):
            return len(text), 0
        sizes = range(min(len(bare), self._longest - 1), 1, -1)
        first = next((before + size for size in sizes if bare[:size] in self._ends), 0)
        last = next((after + size for size in sizes if bare[-size:] in self._starts), 0)
        return first, last


def _is_punctuation(char: str) -> bool:
    return not (char.isalnum() or char.isspace() or char in _PLAIN)
