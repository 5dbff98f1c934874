"""Turns a prompt that begins like the last conversation into the part of it that must still be read.

An engine's state holds the keys and values of the tokens it was fed. This file remembers which tokens those
are, and goes on from the longest beginning that a new prompt has in common with them, as far as the state can
be cut back exactly. A prompt's ids never depend on what is held: an answer that was chosen in other pieces
than its text is encoded in is read again from there. It does not know text, nor engines beyond their interface.
"""

from __future__ import annotations

from collections.abc import Sequence

from spile.engines.base import Engine, State


class Held:
    """An engine's state that outlives an answer, and the token ids it was fed.

    Invariant: the state holds exactly `token_ids[:state.position]`. The last token of an answer was chosen,
    but perhaps never fed; it is in `token_ids` all the same.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []  # of the last prompt and its answer
        self.num_prompt = 0  # of them
        self._state: State | None = None

    @property
    def position(self) -> int:
        """Tokens that the state holds."""
        return 0 if self._state is None else self._state.position

    def begin(self, engine: Engine, token_ids: Sequence[int]) -> tuple[State, int]:
        """Return a state, and how many of these tokens it already holds: never all of them, as the logits
        after the last are wanted.
        """
        num_common = _num_common(self.token_ids[: self.position], token_ids[:-1])
        state = self._state
        if state is None or not num_common or not state.can_rewind(num_common):
            self.close()
            state, num_common = engine.new_state(), 0
        else:
            state.rewind(num_common)
        self._state = state
        self.token_ids, self.num_prompt = list(token_ids), len(token_ids)
        return state, num_common

    def note(self, token_id: int) -> None:
        """Remember a token of the answer before it is fed."""
        self.token_ids.append(token_id)

    def close(self) -> None:
        """Give the state's memory back. May be called twice; the next `begin` starts anew."""
        state, self._state = self._state, None
        self.token_ids, self.num_prompt = [], 0
        if state is not None:
            state.close()


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest beginning that two sequences share."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
