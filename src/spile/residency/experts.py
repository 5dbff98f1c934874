"""Turns a model's spec and tensor table into where the bytes of (layer, expert) lie, and row alphas into arrays.

It hides how experts are stored: one stacked tensor a projection or a tensor each, row alphas or group
scales. It does not read expert codes (the store does) and does not know which experts are resident.

Sizes: E experts, F expert width, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spile.architectures.spec import EXPERT, TERNARY, Expected, Experts, OwnModel, Weight
from spile.errors import CheckpointError
from spile.files.checkpoint import Tensor, read_into

_PIECE_NBYTES = 4_000_000  # of scales and of biases each: a full-size model has 600 MB of them
_SIGN, _MAGNITUDE, _EXPONENT = np.uint16(0x8000), np.uint16(0x7FFF), np.uint16(0x7F80)


class Extent(NamedTuple):
    """A contiguous byte range in a shard."""

    shard: int
    offset: int
    nbytes: int


class ExpertTable:
    """Where each expert's weights lie; every expert of a model is as many extents of the same sizes."""

    def __init__(self, model: OwnModel) -> None:
        self._tensors, self._spec = model.checkpoint.tensors, model.spec
        self.num_layers = model.spec.num_hidden_layers
        self.num_experts = model.spec.num_experts
        layer = next((layer for layer in range(self.num_layers) if self.is_moe(layer)), None)
        parts = () if layer is None else self.extents(layer, 0)
        self.expert_nbytes = sum(extent.nbytes for extent in parts)

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts; the others are dense."""
        return layer < self.num_layers and self._spec.is_moe(layer)

    def extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        """Locate what is read of an expert: gate, up and down; of each its codes and, where they are not kept in
        memory, what scales them.
        """
        experts = self._spec.layers[layer].ffn
        assert isinstance(experts, Experts), f"layer {layer} is dense"
        assert 0 <= expert < self.num_experts, f"expert {expert} of {self.num_experts}"
        return tuple(
            self._extent(weight, each, expert)
            for weight in experts.glu.weights()
            for each in streamed(weight)
        )

    def _extent(self, weight: Weight, each: Expected, expert: int) -> Extent:
        tensor = self._tensors[each.name.replace(EXPERT, str(expert))]
        if EXPERT in weight.name:
            return Extent(tensor.shard, tensor.offset, tensor.nbytes)
        nbytes = tensor.nbytes // self.num_experts
        return Extent(tensor.shard, tensor.offset + expert * nbytes, nbytes)


def streamed(weight: Weight) -> Iterator[Expected]:
    """Yield the tensors of an expert's weight that are read with it. A ternary row's alpha stays in memory."""
    tensors = weight.format.tensors(weight.name, weight.shape)
    return iter([next(tensors)]) if weight.format.kind == TERNARY.kind else tensors


def read_row_alpha(model: OwnModel, weight: Weight) -> NDArray[np.uint16]:
    """Read the row alphas of a ternary weight as BF16 bits, [out], or [E, out] of experts. Touches disk.

    Raises:
        CheckpointError: group scales that are not one alpha a row, or an alpha that is not finite.
        ReadError: the shard could not be read.
    """
    tensors = model.checkpoint.tensors
    if weight.format == TERNARY:
        name = f"{weight.name}.row_alpha"
        alphas = np.empty(tensors[name].nbytes, np.uint8)
        _read(model, tensors[name], 0, alphas)
        result = alphas.view("<u2").reshape(tensors[name].shape)
        _check_finite(model, name, result, 0)
        return result
    return _alphas_of_groups(model, tensors[f"{weight.name}.scales"], tensors[f"{weight.name}.biases"])


def _alphas_of_groups(model: OwnModel, scales: Tensor, biases: Tensor) -> NDArray[np.uint16]:
    """Reduce scales and biases [.., out, groups] to alphas [.., out], checking that nothing is lost."""
    *rows_shape, groups = scales.shape
    num_rows = scales.nbytes // (2 * groups)
    alphas = np.empty(num_rows, np.uint16)
    rows_per_piece = max(1, min(num_rows, _PIECE_NBYTES // (2 * groups)))
    buffers = np.empty((2, rows_per_piece, groups), np.uint16)
    for first in range(0, num_rows, rows_per_piece):
        count = min(rows_per_piece, num_rows - first)
        scale, bias = buffers[0, :count], buffers[1, :count]
        for tensor, piece in ((scales, scale), (biases, bias)):
            _read(model, tensor, first * groups * 2, piece.reshape(-1).view(np.uint8))
        first_of_row = scale[:, :1]
        constant = (scale == first_of_row).all(axis=1)
        if not constant.all():
            row = int(constant.argmin())
            raise _fault(model, scales.name, first + row, "is not one alpha: its group scales differ")
        # bias == -scale; zero has two signs
        opposite = ((bias == (scale ^ _SIGN)) | (((bias | scale) & _MAGNITUDE) == 0)).all(axis=1)
        if not opposite.all():
            row = int(opposite.argmin())
            raise _fault(model, biases.name, first + row, "is not ternary: bias is not -scale")
        alphas[first : first + count] = first_of_row[:, 0]
        _check_finite(model, scales.name, alphas[first : first + count], first)
    return alphas.reshape(rows_shape)


def _check_finite(model: OwnModel, name: str, bits: NDArray[np.uint16], first: int) -> None:
    finite = (bits & _EXPONENT) != _EXPONENT
    if not finite.all():
        raise _fault(model, name, first + int(finite.reshape(-1).argmin()), "has an alpha that is not finite")


def _fault(model: OwnModel, name: str, row: int, what: str) -> CheckpointError:
    tensor = model.checkpoint.tensors[name]
    rows = tensor.shape[:-1] if name.endswith((".scales", ".biases")) else tensor.shape
    place = f"row {row}" if len(rows) == 1 else f"expert {row // rows[-1]}, row {row % rows[-1]}"
    return CheckpointError(f"tensor {name} of {model.checkpoint.shards[tensor.shard].name}: {place} {what}")


def _read(model: OwnModel, tensor: Tensor, start: int, data: NDArray[np.uint8]) -> None:
    read_into(model.checkpoint.shards[tensor.shard], tensor.offset + start, data)


def decode_bf16(bits: NDArray[np.uint16]) -> NDArray[Any]:
    """Return BF16 bits as float32 values of the same shape (BF16 is the upper half of a float32)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def encode_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 values to BF16 bits, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = (
        (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    ).astype(np.uint16)
    return rounded
