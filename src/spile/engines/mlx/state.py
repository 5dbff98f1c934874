"""One sequence on the mlx engine: mlx-lm's caches of its layers, where they can be cut back exactly, and which
positions can be taken out and put back.

MLX's kernels depend on the number of rows, so a position's keys carry the bits of the chunk in which they were
computed. A state can therefore go back only to positions at which some computation ended: what it holds then is
what it held at that moment. And another prompt can go on only from the end of a chunk, with what was computed in
whole chunks, one after the other from the first position on: it would compute the same. It does not know how a
cache holds what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from spile.engines.base import LayerKind
from spile.engines.mlx import adapter
from spile.engines.mlx.copying import Layer, Layers, num_kept


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


class CopyableMlxState(MlxState):
    """One whose layers hold keys and values alone. A rotating cache is in order just after a chunk, so its positions
    are there only while the state holds whole chunks and nothing after them.
    """

    def __init__(
        self,
        make_caches: Callable[[], list[Any]],
        layers: Layers,
        *,
        step: int,
        identity: Mapping[str, str | int],
    ) -> None:
        """`step` is the engine's chunk, above 1: a rotating cache takes a single token in another way."""
        super().__init__(make_caches)
        assert step > 1, "a chunk of several tokens"
        self.identity = identity
        self._layers = layers
        self._step = step
        self._num_whole = 0  # positions that were computed in whole chunks
        self._pieces: dict[int, list[mx.array]] = {}  # written rows by layer, until they are restored

    @property
    def step(self) -> int:
        return self._step

    @property
    def num_reusable(self) -> int:
        return 0 if self._is_spoiled or not self.caches else self._num_whole

    @property
    def window(self) -> int | None:
        # A ring that is full goes on as before where all it holds is put back: one more than a token sees.
        return None if self._layers.most is None else self._layers.most + 1

    def advance(self, num_tokens: int) -> None:
        if num_tokens == self._step and self._position == self._num_whole:
            self._num_whole += num_tokens
        super().advance(num_tokens)

    def rewind(self, position: int) -> None:
        super().rewind(position)
        self._num_whole = min(self._num_whole, position)

    def close(self) -> None:
        super().close()
        self._num_whole = 0
        self._pieces = {}

    def row_nbytes(self, kind: LayerKind) -> tuple[int, ...]:
        return self._layers.row_nbytes(kind)

    def has(self, kind: LayerKind, start: int) -> bool:
        if kind == "full":
            return True
        if self._position != self.num_reusable:
            return False
        return all(self._position - num_kept(cache) <= start for _, _, cache in self._of("sliding"))

    def read(self, kind: LayerKind, start: int, end: int) -> Iterator[NDArray[np.uint8]]:
        assert self.has(kind, start), f"position {start} was overwritten"
        assert end <= self.num_reusable, f"position {end} cannot be reused"
        for _, layer, cache in self._of(kind):
            yield layer.read(cache, start, end)

    def write(self, kind: LayerKind, start: int, layers: Iterable[NDArray[np.uint8]]) -> None:
        for (index, _, _), rows in zip(self._of(kind), layers, strict=True):
            self._pieces.setdefault(index, []).append(mx.array(rows))

    def restore(self, position: int, oldest: int) -> None:
        assert position % self._step == 0, f"{position} is no multiple of {self._step}"
        most = (self._layers.most or 0) + self._step - 1
        for index, (layer, cache) in enumerate(zip(self._layers.each, self.caches, strict=True)):
            pieces = self._pieces.pop(index, None)
            if pieces is not None:
                layer.fill(cache, pieces, position, most)
            else:
                assert layer.kind == "full", "sliding layers are always written"
                assert position <= cache.offset, "held"
                cache.offset = position
        self._position = self._num_whole = position
        self._ends = [position]
        self._is_spoiled = False

    def _of(self, kind: LayerKind) -> Iterator[tuple[int, Layer, Any]]:
        for index, (layer, cache) in enumerate(zip(self._layers.each, self.caches, strict=True)):
            if layer.kind == kind:
                yield index, layer, cache
