"""Turns keys and values in mlx-lm's caches into rows of bytes, a position each, and back.

It knows the kinds of cache that hold keys and values and nothing else, in a single order: mlx-lm's growing and
rotating ones, and ours of fewer bits. Where a layer has another kind, nothing can be copied. It does not know which
positions are worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from spile.engines.base import LayerKind
from spile.engines.mlx import adapter
from spile.engines.mlx.cache import QuantizedCache, QuantizedRing

STEP = 256  # positions by which mlx-lm's caches grow
_caches: Any = adapter.cache_module()
_GROWING = (_caches.KVCache, QuantizedCache)
_ROTATING = (_caches.RotatingKVCache, QuantizedRing)


@dataclass(frozen=True)
class Side:
    """The shape of keys, or of values, of one layer."""

    heads: int
    dims: int
    dtype: Any

    @property
    def nbytes(self) -> int:
        """Bytes of a position."""
        return int(self.heads * self.dims * self.dtype.size)

    def to_rows(self, x: mx.array) -> mx.array:
        """Turn [1, heads, T, dims] into bytes [T, row]."""
        rows = x[0].transpose(1, 0, 2).reshape(x.shape[2], self.heads * self.dims)
        return mx.contiguous(rows).view(mx.uint8)

    def from_rows(self, rows: mx.array) -> mx.array:
        """Turn bytes [T, row] into [1, heads, T, dims]."""
        x = mx.contiguous(rows).view(self.dtype).reshape(rows.shape[0], self.heads, self.dims)
        return x.transpose(1, 0, 2)[None]


@dataclass(frozen=True)
class Layer:
    """One layer's cache: its kind, and what a position is."""

    kind: LayerKind
    keys: Side
    values: Side

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def read(self, cache: Any, start: int, end: int) -> NDArray[np.uint8]:
        """Copy positions out of a cache, in which they are in order."""
        first = cache.offset - num_kept(cache) if self.kind == "sliding" else 0
        sides = []
        for side, array in ((self.keys, cache.keys), (self.values, cache.values)):
            sides.append(side.to_rows(array[..., start - first : end - first, :]))
        return np.array(mx.concatenate(sides, axis=-1))

    def fill(self, cache: Any, pieces: Sequence[mx.array], position: int, most: int) -> None:
        """Make a cache hold these rows, the last of which is that of the position before `position`; of a
        rotating one `most` of them.
        """
        rows = mx.concatenate(pieces, axis=0) if len(pieces) > 1 else pieces[0]
        if self.kind == "sliding":
            rows = rows[-most:]
        else:
            assert rows.shape[0] == position, "all positions"
        arrays = []
        at = 0
        for side in (self.keys, self.values):
            arrays.append(side.from_rows(rows[:, at : at + side.nbytes]))
            at += side.nbytes
        if self.kind == "full" and position % STEP:
            missing = STEP - position % STEP
            arrays = [
                mx.concatenate([one, mx.zeros((*one.shape[:2], missing, one.shape[3]), one.dtype)], axis=2)
                for one in arrays
            ]
        cache.keys, cache.values = (mx.contiguous(one) for one in arrays)
        mx.eval(cache.keys, cache.values)
        cache.offset = position
        if self.kind == "sliding":
            cache._idx = cache.keys.shape[2]


@dataclass(frozen=True)
class Layers:
    """All layers of a model whose states can be copied; `most` is what rotating caches hold, None without them."""

    each: tuple[Layer, ...]
    most: int | None

    def row_nbytes(self, kind: LayerKind) -> tuple[int, ...]:
        return tuple(layer.nbytes for layer in self.each if layer.kind == kind)


def num_kept(cache: Any) -> int:
    """Positions that a rotating cache holds just after a chunk, in order."""
    return 0 if cache.keys is None else int(min(cache.keys.shape[2], cache._idx))


def find_layers(model: Any, make: Callable[[], list[Any]]) -> Layers | None:
    """Ask a model's caches what they hold, with a pass that computes nothing; None where that cannot be copied."""
    caches = make()
    if not caches or not all(type(cache) in (*_GROWING, *_ROTATING) for cache in caches):
        return None
    model(mx.zeros((1, 2), mx.int32), cache=caches)
    layers = []
    for cache in caches:
        keys, values = cache.keys, cache.values
        if keys is None or keys.ndim != 4 or values.ndim != 4 or keys.shape[0] != 1 or values.shape[0] != 1:
            return None
        keys, values = (Side(one.shape[1], one.shape[3], one.dtype) for one in (keys, values))
        layers.append(Layer("full" if type(cache) in _GROWING else "sliding", keys, values))
    rings = [cache for cache in caches if type(cache) in _ROTATING]
    sizes = {cache.max_size for cache in rings}
    if len(sizes) > 1 or any(cache.keep for cache in rings):
        return None
    return Layers(tuple(layers), sizes.pop() if sizes else None)
