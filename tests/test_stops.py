"""Stop texts: cut exactly, never a part shown, nothing lost, however the text comes in pieces."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from spile.text.stops import StopFilter, held_back


def run(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], str | None]:
    """Return what was shown piece by piece, the tail included, and what ended the text."""
    stop_filter = StopFilter(stops)
    shown = [stop_filter.push(piece) for piece in pieces]
    return [*shown, stop_filter.flush()], stop_filter.matched


@pytest.mark.parametrize(
    ("stops", "shown", "matched"),
    [
        ((), "alpha beta gamma", None),
        (("pha be",), "al", "pha be"),
        (("ta ga", "never"), "alpha be", "ta ga"),
        (("gamma",), "alpha beta ", "gamma"),
        (("alpha",), "", "alpha"),
        (("gammas",), "alpha beta gamma", None),
        (("beta", "alpha beta"), "", "alpha beta"),  # complete at once: the longer
        (("lph", "alpha"), "a", "lph"),  # the one that is complete first
        (("a", "alpha"), "", "a"),
    ],
)
def test_text_is_cut_before_the_stop_however_it_comes(
    stops: tuple[str, ...], shown: str, matched: str | None
) -> None:
    text = "alpha beta gamma"
    for width in range(1, len(text) + 1):
        pieces = [text[i : i + width] for i in range(0, len(text), width)]
        found, by = run(pieces, stops)
        assert ("".join(found), by) == (shown, matched)


def expected(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """By the definition, without any clever step: read character by character, look at every end."""
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            longest = max(ends, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_random_texts_follow_the_definition() -> None:
    random_ = random.Random(3)
    for _ in range(2000):
        text = "".join(random_.choices("ab ", k=random_.randint(0, 12)))
        stops = [
            "".join(random_.choices("ab ", k=random_.randint(1, 4))) for _ in range(random_.randint(0, 4))
        ]
        pieces, rest = [], text
        while rest:
            width = random_.randint(0, 4)
            pieces.append(rest[:width])
            rest = rest[width:]
        found, by = run(pieces, stops)
        shown, matched = expected(text, stops)
        assert ("".join(found), by) == (shown, matched)
        for prefix in itertools.accumulate(found):  # at no moment more than the answer
            assert shown.startswith(prefix)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    stop_filter = StopFilter(["<end>"])
    assert [stop_filter.push(piece) for piece in ("a", "<", "e", "x", "<en")] == ["a", "", "", "<ex", ""]
    assert stop_filter.flush() == "<en"
    assert held_back("aab", "abc") == 2
    assert held_back("aba", "aba") == 1  # a whole one is no beginning
    assert held_back("", "abc") == 0


def test_nothing_comes_after_the_stop() -> None:
    stop_filter = StopFilter(["b"])
    assert stop_filter.push("abc") == "a"
    assert stop_filter.push("def") == ""
    assert stop_filter.flush() == ""
