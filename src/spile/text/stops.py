"""Turns text that comes in pieces into the text before the first stop text, never showing a part of one.

It does not know tokens. The result does not depend on how the text was cut into pieces: of several stop texts
the one that is complete first ends the text, and of those that are complete at the same character the longest
does. What could still become a stop text is held back until that is decided.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on until one of `stops` is complete; `matched` is that one from then on."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop text would end every answer"
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Return what can be shown of the text so far. Nothing more comes once a stop text matched."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        num_held = max(held_back(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return what was held back: the text is over, and it became no stop text."""
        held, self._held = self._held, ""
        return held


def held_back(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker` without being all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
