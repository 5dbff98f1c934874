"""The keys and values of one sequence: which positions are there, which can be taken out, put back or forgotten.

It does not know tokens, nor how a position's bits lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spile import _core
from spile.engines.base import LayerKind
from spile.residency.kv import BLOCK_POSITIONS, ring_blocks
from spile.residency.selection import Selection

# Goes up when any bit of what a state holds for the same model, tokens and options changes: what was saved before
# is then refused.
ARITHMETIC = 1


class CpuState:
    """Full-attention layers keep every position, sliding ones only a ring of them: what position p wrote is
    overwritten by p + ring. `written` is one past the highest position that was ever stored, also by a chunk
    that was interrupted; it does not go back with a rewind, so what was overwritten is never taken for whole.
    Before `_oldest` sliding layers hold nothing: it is above 0 after a restore.
    """

    def __init__(
        self,
        cache: _core.KvCache,
        *,
        window: int | None,
        max_chunk: int,
        layer_is_sliding: Sequence[bool] = (),
        selection: Selection | None = None,
        identity: Mapping[str, str | int] | None = None,
        context: int = 2**31,
        on_grow: Callable[[CpuState, int], None] = lambda state, end: None,
    ) -> None:
        """`window` is None where no layer slides; `max_chunk` and `context` are the most tokens at a time and in all
        that its rings are made for; `selection` is None where every token may have every expert; `on_grow` is told
        of the positions that there will be before what they hold is put back.
        """
        self.cache: _core.KvCache | None = cache
        self.selection = selection
        self.max_chunk, self.context = max_chunk, context
        self._on_grow = on_grow
        self.identity: Mapping[str, str | int] = {
            "engine": "cpu",
            "arithmetic": ARITHMETIC,
            **(identity or {}),
        }
        self.written = 0
        self._oldest = 0
        self._window = window
        self._ring = ring_blocks(window or 1, max_chunk) * BLOCK_POSITIONS
        self._layers: dict[LayerKind, tuple[int, ...]] = {
            "full": tuple(layer for layer, slides in enumerate(layer_is_sliding) if not slides),
            "sliding": tuple(layer for layer, slides in enumerate(layer_is_sliding) if slides),
        }

    @property
    def position(self) -> int:
        return 0 if self.cache is None else self.cache.position

    @property
    def step(self) -> int:
        return 1

    @property
    def num_reusable(self) -> int:
        return self.position

    @property
    def window(self) -> int | None:
        return self._window

    def can_rewind(self, position: int) -> bool:
        if self.cache is None or not 0 <= position <= self.position:
            return False
        if position in (0, self.position):
            return True
        if self.selection is not None:
            return False  # which experts were selected does not go back
        if self._window is None:
            return True
        return self.has("sliding", max(0, position - self._window + 1))

    def rewind(self, position: int) -> None:
        assert self.can_rewind(position), f"cannot go back from {self.position} to {position}"
        assert self.cache is not None, "the state was closed"
        self.cache.position = position
        if position == 0:
            self.written = self._oldest = 0
            if self.selection is not None:
                self.selection.reset()

    def row_nbytes(self, kind: LayerKind) -> tuple[int, ...]:
        assert self.cache is not None, "the state was closed"
        return tuple(self.cache.nbytes_per_position(layer) for layer in self._layers[kind])

    def has(self, kind: LayerKind, start: int) -> bool:
        return kind == "full" or (start >= self._oldest and start + self._ring >= self.written)

    def read(self, kind: LayerKind, start: int, end: int) -> Iterator[NDArray[np.uint8]]:
        assert self.cache is not None, "the state was closed"
        assert self.has(kind, start), f"position {start} was overwritten"
        assert end <= self.position, f"position {end} was not reached"
        for layer in self._layers[kind]:
            yield self.cache.read(layer, start, end)

    def write(self, kind: LayerKind, start: int, layers: Iterable[NDArray[np.uint8]]) -> None:
        assert self.cache is not None, "the state was closed"
        for layer, rows in zip(self._layers[kind], layers, strict=True):
            self._on_grow(self, start + len(rows))
            self.cache.write(layer, start, rows)

    def restore(self, position: int, oldest: int) -> None:
        assert self.cache is not None, "the state was closed"
        assert oldest <= max(0, position - (self._window or 1) + 1), "the next token sees more than that"
        self.cache.position = self.written = position
        self._oldest = oldest

    def close(self) -> None:
        self.cache = None
