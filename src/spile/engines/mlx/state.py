"""One sequence on the mlx engine: mlx-lm's caches of its layers, and where they can be cut back exactly.

MLX's kernels depend on the number of rows, so a position's keys carry the bits of the chunk in which they were
computed. A state can therefore go back only to positions at which some computation ended: what it holds then is
what it held at that moment. It does not know what a cache holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spile.engines.mlx import adapter


class MlxState:
    """What one sequence has left behind."""

    def __init__(self, make_caches: Callable[[], list[Any]]) -> None:
        self.caches = make_caches()
        self._make_caches = make_caches
        self._position = 0
        self._is_spoiled = False
        self._ends: list[int] = []  # positions at which a computation ended, ascending

    @property
    def position(self) -> int:
        return self._position

    def advance(self, num_tokens: int) -> None:
        """Say that so many tokens were computed at once."""
        self._position += num_tokens
        self._ends.append(self._position)

    def spoil(self) -> None:
        """Say that a computation broke off: layers may hold different numbers of tokens."""
        self._is_spoiled = True

    def can_rewind(self, position: int) -> bool:
        if self._is_spoiled:
            return position == 0 and bool(self.caches)
        if not self.caches or not 0 <= position <= self._position:
            return False
        if position in (0, self._position):
            return True
        return position in self._ends and adapter.can_trim(self.caches)

    def rewind(self, position: int) -> None:
        assert self.can_rewind(position), f"cannot go back from {self._position} to {position}"
        if position == 0:
            self.caches, self._is_spoiled = self._make_caches(), False
        elif position == self._position:
            return
        else:
            adapter.trim(self.caches, self._position - position)
        self._position = position
        self._ends = [end for end in self._ends if end <= position]

    def close(self) -> None:
        self.caches = []
        self._position = 0
