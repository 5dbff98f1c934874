"""Turns the bits of keys and values into bytes: of a position, of a sequence.

It mirrors `kv_layout.h` and `kv_cache.h`, where the core allocates; a test holds the two together.

Layers with a sliding window keep at least 8 bits, whatever was asked for: their rings do not grow with the
context, and on the demo model they bring nearly all of the error. Source: our measurement, 2026-11-30, divergence
from float32 in nats of 4-bit keys and values: 4.7e-3 with the rings of 4 bits too, 1.4e-4 without rings, 2.1e-4 with
rings of 8 bits. They cost the full-size model at most 11 MB.
"""

from __future__ import annotations

from dataclasses import dataclass

from spile.architectures.spec import ModelSpec
from spile.errors import OptionError
from spile.options import EngineOptions

BLOCK_POSITIONS = 128
PAGE_NBYTES = 4096
LEAST_RING_BITS = 8
MOST_GROUP = 80  # dimensions


@dataclass(frozen=True)
class KvFormat:
    """Bits of one entry of keys and values: 32, 16, 8 or 4."""

    key_bits: int
    value_bits: int

    @property
    def ring(self) -> KvFormat:
        """What layers with a sliding window keep."""
        return KvFormat(max(self.key_bits, LEAST_RING_BITS), max(self.value_bits, LEAST_RING_BITS))

    def of_layer(self, is_sliding: bool) -> KvFormat:
        return self.ring if is_sliding else self

    def describe(self, spec: ModelSpec) -> str:
        """Say it in a few words."""
        if self.key_bits == self.value_bits:
            text = _NAMES[self.key_bits]
        else:
            text = f"{_NAMES[self.key_bits]} keys and {_NAMES[self.value_bits]} values"
        if min(self.key_bits, self.value_bits) < 16:
            text += f" in groups of {group_size(spec.head_dim)}"
        if self.ring != self and any(spec.layer_is_sliding):
            text += f", {LEAST_RING_BITS} bits at least in sliding layers"
        return text


_NAMES = {32: "float32", 16: "FP16", 8: "8-bit", 4: "4-bit"}


def kv_format(spec: ModelSpec, options: EngineOptions) -> KvFormat:
    """Return what was asked for.

    Raises: OptionError where the model's heads cannot be quantized.
    """
    values = options.kv_bits if options.kv_v_bits is None else options.kv_v_bits
    least = min(options.kv_bits, values)
    if least < 16 and spec.head_dim % 16:
        name = "kv_bits" if least == options.kv_bits else "kv_v_bits"
        raise OptionError(
            f"{name} is {least}: this model's heads have {spec.head_dim} dimensions, no multiple of 16",
            "Give 16 or 32.",
        )
    return KvFormat(options.kv_bits, values)


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
