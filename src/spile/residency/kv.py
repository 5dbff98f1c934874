"""Turns the bits of keys and values into bytes: of a position, of a sequence.

It mirrors `kv_layout.h` and `kv_cache.h`, where the core allocates; a test holds the two together.

Layers with a sliding window keep 16 bits unless they are asked for by name: their rings do not grow with the context
(22 MB of the full-size model), and bring nearly all of the error. Source: our measurement, tools/bench_kv.py,
2026-12-01, divergence from float32 on the demo model in nats: 4-bit keys and values 5.4e-3 with rings of 4 bits, 1.6e-4
with rings of 16; of 8 bits 1.4e-4 and 1.7e-5.
"""

from __future__ import annotations

from dataclasses import dataclass

from spile.architectures.spec import ModelSpec
from spile.errors import OptionError
from spile.options import EngineOptions

BLOCK_POSITIONS = 128
PAGE_NBYTES = 4096
MOST_GROUP = 80  # dimensions


@dataclass(frozen=True)
class KvFormat:
    """Bits of one entry of keys and values: 32, 16, 8 or 4."""

    key_bits: int
    value_bits: int
    ring_bits: int = 16  # of both, in layers with a sliding window

    @property
    def ring(self) -> KvFormat:
        """What layers with a sliding window keep."""
        return KvFormat(self.ring_bits, self.ring_bits, self.ring_bits)

    def of_layer(self, is_sliding: bool) -> KvFormat:
        return self.ring if is_sliding else self

    def describe(self, *, has_rings: bool, group: int | None = None) -> str:
        """Say it in a few words; `group` dimensions share a scale, where that is known."""
        groups = f" in groups of {group}" if group and min(self.key_bits, self.value_bits) < 16 else ""
        if self.key_bits == self.value_bits:
            text = f"{_NAMES[self.key_bits]}{groups}"
        else:
            text = f"{_NAMES[self.key_bits]} keys and {_NAMES[self.value_bits]} values{groups}"
        if not has_rings or self.ring == self:
            return text
        return f"{text}, {self.ring.describe(has_rings=False, group=group)} in sliding layers"


_NAMES = {32: "float32", 16: "FP16", 8: "8-bit", 4: "4-bit"}


def asked_format(options: EngineOptions) -> KvFormat:
    """Return the bits that were asked for: values have the keys' unless said otherwise, rings 16, or 32 beside 32."""
    keys, values = options.kv_bits, options.kv_bits if options.kv_v_bits is None else options.kv_v_bits
    rings = options.kv_ring_bits or max(16, keys, values)
    return KvFormat(keys, values, rings)


def kv_format(spec: ModelSpec, options: EngineOptions) -> KvFormat:
    """Return what was asked for.

    Raises: OptionError where the model's heads cannot be quantized.
    """
    kv = asked_format(options)
    named = {"kv_bits": kv.key_bits, "kv_v_bits": kv.value_bits}
    if any(spec.layer_is_sliding):
        named["kv_ring_bits"] = kv.ring_bits
    for name, bits in named.items():
        if bits < 16 and spec.head_dim % 16:
            raise OptionError(
                f"{name} is {bits}: this model's heads have {spec.head_dim} dimensions, no multiple of 16",
                "Give 16 or 32.",
            )
    return kv


def group_size(head_dim: int) -> int:
    """Return how many dimensions share a scale and a bias: the largest multiple of 16, up to 80, that divides
    the head (64 for heads of 64, 128, 192 and 256; 80 for 80; 48 for 96).
    """
    return next((size for size in range(MOST_GROUP, 16, -16) if head_dim % size == 0), 16)


def kv_position_nbytes(spec: ModelSpec, kv: KvFormat, *, is_sliding: bool) -> int:
    """Bytes of one position in one layer, all its KV heads."""
    head_dim, kept = spec.head_dim, kv.of_layer(is_sliding)
    groups = 4 * (head_dim // group_size(head_dim))  # an FP16 scale and bias each
    keys = head_dim * kept.key_bits // 8 + (groups if kept.key_bits < 16 else 0)
    padded = -(-head_dim // 16) * 16
    values = padded * kept.value_bits // 8 + (groups if kept.value_bits < 16 else 0)
    return (keys + values) * spec.num_key_value_heads


def kv_nbytes(spec: ModelSpec, num_tokens: int, chunk: int, kv: KvFormat) -> int:
    """Bytes of keys and values of one sequence of so many tokens, read in chunks: blocks of 128 positions in
    whole pages, as many as are needed in full layers and at most a ring of them in sliding ones.
    """
    num_blocks = -(-num_tokens // BLOCK_POSITIONS)
    ring = min(ring_blocks(spec.sliding_window, chunk), num_blocks)
    nbytes = 0
    for is_sliding in spec.layer_is_sliding:
        block = kv_position_nbytes(spec, kv, is_sliding=is_sliding) * BLOCK_POSITIONS
        nbytes += -(-block // PAGE_NBYTES) * PAGE_NBYTES * (ring if is_sliding else num_blocks)
    return nbytes


def ring_blocks(window: int, chunk: int) -> int:
    """Blocks of a sliding layer's ring: what a window before a chunk and the chunk itself can touch."""
    return (window + chunk - 2) // BLOCK_POSITIONS + 2
