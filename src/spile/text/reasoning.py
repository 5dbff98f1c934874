"""Turns the text of a reasoning model, piece by piece, into its reasoning and its answer.

It does not know tokens or templates' contents beyond the two markers. A reasoning model begins with
`<think>`, thinks aloud, writes `</think>` and answers; some templates write the first marker themselves, at
the end of the prompt. Only what comes first is reasoning: markers further on are text like any other. White
space around the markers belongs to neither part.
"""

from __future__ import annotations

from typing import NamedTuple

from spile.text.stops import held_back

BEGIN = "<think>"
END = "</think>"


class Piece(NamedTuple):
    """What one piece of text added to the two parts."""

    reasoning: str
    text: str


class ReasoningSplitter:
    """Splits one answer. `is_thinking` says that its reasoning has begun and has not ended.

    `has_begun`: the prompt ends with the first marker, so the answer begins inside of the reasoning.
    """

    def __init__(self, *, has_begun: bool = False) -> None:
        self.is_thinking = has_begun
        self._is_decided = has_begun  # whether the first marker came, or something else
        self._is_answering = False
        self._skips_space = has_begun  # after a marker
        self._held = ""  # what may become a marker, or is white space that may be followed by one

    def push(self, text: str) -> Piece:
        """Return what can be said of the text so far."""
        text = self._held + text
        self._held = ""
        if not self._is_decided:
            start = text.lstrip()
            if BEGIN.startswith(start) and start != BEGIN:  # white space only included
                self._held = text
                return Piece("", "")
            self._is_decided = True
            if start.startswith(BEGIN):
                self.is_thinking = self._skips_space = True
                text = start[len(BEGIN) :]
            else:
                self._is_answering = True
        reasoning = ""
        if self.is_thinking:
            reasoning, text = self._think(text)
        if self._is_answering and self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return Piece(reasoning, text if self._is_answering else "")

    def flush(self) -> Piece:
        """Return what was held back: the text is over."""
        held, self._held = self._held, ""
        if self.is_thinking:
            return Piece(held.rstrip(), "")
        return Piece("", held)

    def _think(self, text: str) -> tuple[str, str]:
        """Return the reasoning that is certain, and what follows the end marker."""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        reasoning, marker, rest = text.partition(END)
        if marker:
            self.is_thinking, self._is_answering, self._skips_space = False, True, True
            return reasoning.rstrip(), rest
        certain = text[: len(text) - held_back(text, END)].rstrip()
        self._held = text[len(certain) :]
        return certain, ""


def begins_inside(prompt: str) -> bool:
    """Whether a prompt ends with the marker, so that the answer begins inside of the reasoning."""
    return prompt.rstrip().endswith(BEGIN)


def has_ended(prompt: str) -> bool:
    """Whether a prompt ends with the end marker: its template has closed the reasoning, and the answer follows."""
    return prompt.rstrip().endswith(END)


def can_reason(template: str) -> bool:
    """Whether a chat template is that of a model that reasons between the markers."""
    return BEGIN in template or END in template
