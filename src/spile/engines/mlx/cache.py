"""Turns mlx-lm's prompt caches into ones that keep keys and values in fewer bits, each in its own.

What is kept of a position is one row of 32-bit words: MLX's affine codes along the head, in groups of 64 dimensions or
32, then their scales and biases. Rows grow and rotate in mlx-lm's own caches, and attention is given what the rows
say, dequantized, also for the chunk's own tokens: so chunks change nothing, and attention sinks, masks and layers
that share keys work as they do without. The dequantized copy is of one layer and lives as long as its attention;
the plan counts it. It does not know a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from spile.engines.mlx import adapter
from spile.errors import OptionError
from spile.options import EngineOptions
from spile.residency.kv import KvFormat, asked_format

GROUPS = (
    64,
    32,
)  # dimensions that share a scale and a bias, of those that MLX has; the largest that divides a head
WHOLE_BITS = 16  # as the model computes them
WHOLE = KvFormat(WHOLE_BITS, WHOLE_BITS, WHOLE_BITS)
_caches: Any = adapter.cache_module()


def kv_format(options: EngineOptions) -> KvFormat:
    """Return the bits of keys and values that were asked for.

    Raises: OptionError for 32.
    """
    kv = asked_format(options)
    for name, bits in (
        ("kv_bits", kv.key_bits),
        ("kv_v_bits", kv.value_bits),
        ("kv_ring_bits", kv.ring_bits),
    ):
        if bits > WHOLE_BITS:
            raise OptionError(
                f"{name} is {bits}: the mlx engine keeps keys and values as they are computed (16) or in fewer bits",
                "Give 16, 8 or 4.",
            )
    return kv


def make_caches(model: Any, kv: KvFormat) -> list[Any]:
    """Make the empty prompt cache of a model: mlx-lm's, and ours in place of its plain kinds where fewer bits were
    asked for. Kinds that hold something else than keys and values stay.
    """
    caches = adapter.make_cache(model)
    for index, cache in enumerate(caches):
        if type(cache) is _caches.KVCache and min(kv.key_bits, kv.value_bits) < WHOLE_BITS:
            caches[index] = QuantizedCache(kv)
        elif type(cache) is _caches.RotatingKVCache and kv.ring != WHOLE:
            caches[index] = QuantizedRing(kv.ring, max_size=cache.max_size, keep=cache.keep)
    return caches


def ring_cache() -> type:
    """mlx-lm's cache of a layer with a window; ours is one of them."""
    kind: type = _caches.RotatingKVCache
    return kind


@dataclass
class Rows:
    """How keys, or values, of one layer lie in rows. What they are is known from the first that come."""

    bits: int
    name: str
    dims: int = 0
    group: int = 0
    dtype: Any = None

    def pack(self, x: mx.array) -> mx.array:
        """Turn [B, heads, T, dims] into rows [B, heads, T, words].

        Raises: OptionError where the head cannot be divided into groups.
        """
        self.dims, self.dtype = x.shape[-1], x.dtype
        if not self.is_packed:
            return x
        self.group = next((size for size in GROUPS if self.dims % size == 0), 0)
        if not self.group:
            raise OptionError(
                f"{self.name} is below {WHOLE_BITS}: this model's heads have {self.dims} dimensions, no multiple of "
                f"{GROUPS[-1]}",
                "Give 16.",
            )
        codes, scales, biases = mx.quantize(x, group_size=self.group, bits=self.bits)
        return mx.concatenate([codes, mx.concatenate([scales, biases], axis=-1).view(mx.uint32)], axis=-1)

    def unpack(self, rows: mx.array) -> mx.array:
        """Turn rows into what they say, in the dtype that came."""
        if not self.is_packed:
            return rows
        codes, rest = mx.split(rows, [self.dims * self.bits // 32], axis=-1)
        scales, biases = mx.split(rest.view(self.dtype), 2, axis=-1)
        return mx.dequantize(codes, scales, biases, group_size=self.group, bits=self.bits)

    @property
    def is_packed(self) -> bool:
        return self.bits < WHOLE_BITS and (self.dims > 0 or self.dtype is None)

    @property
    def unpacked_nbytes(self) -> int:
        """Bytes of one head's dequantized position; 0 where rows are attended to as they are."""
        return self.dims * self.dtype.size if self.is_packed and self.dtype is not None else 0


class _Packing:
    """What both kinds share. It stands before mlx-lm's class, which takes rows for keys and values."""

    keys: Any

    def _keep(self, kv: KvFormat, *names: str) -> None:
        self._key_rows = Rows(kv.key_bits, names[0])
        self._value_rows = Rows(kv.value_bits, names[-1])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values; return what is kept of all, dequantized."""
        parent: Any = super()
        parent.update_and_fetch(self._key_rows.pack(keys), self._value_rows.pack(values))
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        parent: Any = super()
        keys, values = parent.keys_and_values()
        return self._key_rows.unpack(keys), self._value_rows.unpack(values)

    @property
    def unpacked_nbytes(self) -> int:
        """Bytes that a position's dequantized keys and values take while they are attended to."""
        heads = 0 if self.keys is None else self.keys.shape[0] * self.keys.shape[1]
        return int(heads * (self._key_rows.unpacked_nbytes + self._value_rows.unpacked_nbytes))


class QuantizedCache(_Packing, _caches.KVCache):
    """Keeps every position."""

    def __init__(self, kv: KvFormat) -> None:
        super().__init__()
        self._keep(kv, "kv_bits", "kv_v_bits")


class QuantizedRing(_Packing, _caches.RotatingKVCache):
    """Keeps the positions of a window."""

    def __init__(self, kv: KvFormat, *, max_size: int, keep: int) -> None:
        super().__init__(max_size=max_size, keep=keep)
        self._keep(kv, "kv_ring_bits")
