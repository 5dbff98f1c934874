"""Turns a model's shapes into made-up weights, by address, as `weights.py` turns its tensors.

Every array that an address points into is kept alive here until it is dropped.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from spile.architectures.spec import ModelSpec
from spile.residency.experts import encode_bf16

_Addresses = tuple[int, int, int]  # codes, scales, biases


class MadeUpWeights:
    """Weights whose products keep their size, through any number of layers."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._kept: list[NDArray[np.generic]] = []
        rng = np.random.default_rng(0)
        # Made once and copied for each tensor: time does not depend on values, and randomness takes seconds.
        digits = rng.integers(0, 3, (4, 1 << 20), np.uint8)
        self._codes = digits[0] | digits[1] << 2 | digits[2] << 4 | digits[3] << 6
        self._bytes = rng.integers(0, 256, 1 << 20, np.uint8)
        D, E = spec.hidden_size, spec.num_experts
        self._router = encode_bf16(rng.standard_normal(E * D, np.float32) / np.float32(np.sqrt(D)))

    def layer(self) -> dict[str, int]:
        """Return the addresses of a layer, by the names that `Decoder.set_layer` takes."""
        spec = self._spec
        D, E, F = spec.hidden_size, spec.num_experts, spec.moe_intermediate_size
        wide, narrow = (
            spec.num_attention_heads * spec.head_dim,
            spec.num_key_value_heads * spec.head_dim,
        )
        addresses = {"input_norm": self.ones(D), "post_norm": self.ones(D)}
        addresses |= {"q_norm": self.ones(spec.head_dim), "k_norm": self.ones(spec.head_dim)}
        for name, out, n in (("q", wide, D), ("k", narrow, D), ("v", narrow, D), ("o", D, wide)):
            addresses[name] = self._keep(self.ternary(out * n // 4))
            addresses[f"{name}_alpha"] = self._alphas(out, n)
        addresses["router"] = self._keep(self._router.copy())
        for name, out, n in (("gate", F, D), ("up", F, D), ("down", D, F)):
            addresses[f"{name}_alpha"] = self._alphas(E * out, n)
        return addresses

    def ternary(self, nbytes: int) -> NDArray[np.uint8]:
        """Make packed codes of 0, 1 and 2, four in a byte."""
        return np.resize(self._codes, nbytes)

    def nibbles(self, num_rows: int) -> _Addresses:
        """Return the addresses of codes, scales and biases of a 4-bit table."""
        D = self._spec.hidden_size
        codes = np.resize(self._bytes, num_rows * D // 2)
        scales = np.full(num_rows * D // 64, _bf16(0.01), np.uint16)
        biases = np.full(num_rows * D // 64, _bf16(-0.075), np.uint16)
        return self._keep(codes), self._keep(scales), self._keep(biases)

    def ones(self, count: int) -> int:
        """Return the address of so many ones."""
        return self._keep(np.full(count, _bf16(1.0), np.uint16))

    def in_small_pages(self) -> _Addresses:
        """Copy the newest 4-bit table into pages as mapped files have them."""
        codes, scales, biases = (self._keep(_in_small_pages(array)) for array in self._kept[-3:])
        return codes, scales, biases

    def drop_newest(self, count: int) -> None:
        """Forget so many arrays."""
        del self._kept[-count:]

    def _alphas(self, count: int, n: int) -> int:
        return self._keep(np.full(count, _bf16((1.5 / n) ** 0.5), np.uint16))  # products keep their size

    def _keep(self, array: NDArray[np.generic]) -> int:
        self._kept.append(array)
        return array.ctypes.data


def _in_small_pages(array: NDArray[np.generic]) -> NDArray[np.generic]:
    memory = mmap.mmap(-1, array.nbytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    copy = np.frombuffer(memory, array.dtype)
    copy[:] = array
    return copy


def _bf16(value: float) -> int:
    return int(encode_bf16(np.array([value], np.float32))[0])
