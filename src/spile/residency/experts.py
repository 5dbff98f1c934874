"""Turns a model's tensor table into where the bytes of (layer, expert) lie, and row alphas into arrays.

It hides how experts are stored: one stacked tensor a projection or a tensor each, row alphas or group
scales. It does not read expert codes (the store does) and does not know which experts are resident.

Sizes: E experts, F expert width, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spile.architectures.maple import PROJECTIONS, Form, MapleModel
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
    """Where each expert's weights lie; every expert of a model has the same three sizes."""

    def __init__(self, model: MapleModel) -> None:
        self._model = model
        self.num_layers = model.config.num_hidden_layers
        self.num_experts = model.config.num_experts
        layer = model.config.first_k_dense_replace
        self.expert_nbytes = (
            sum(extent.nbytes for extent in self.extents(layer, 0)) if self.is_moe(layer) else 0
        )

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts; the others are dense."""
        return self._model.config.is_moe(layer) and layer < self.num_layers

    def extents(self, layer: int, expert: int) -> tuple[Extent, Extent, Extent]:
        """Locate the weights of gate, up and down (packed codes; BF16 values in the BF16 form)."""
        gate, up, down = (self._extent(layer, expert, projection) for projection in PROJECTIONS)
        return gate, up, down

    def alpha_extent(self, layer: int, projection: str) -> Extent:
        """Locate the row alphas of all experts, BF16 [E, out]; only in the form that has them."""
        assert self._model.form is Form.ROW_ALPHA, "group scales have no alpha tensor: use read_alphas"
        tensor = self._model.checkpoint.tensors[f"{_prefix(layer, projection)}.row_alpha"]
        return Extent(tensor.shard, tensor.offset, tensor.nbytes)

    def _extent(self, layer: int, expert: int, projection: str) -> Extent:
        assert 0 <= expert < self.num_experts, f"expert {expert} of {self.num_experts}"
        tensors = self._model.checkpoint.tensors
        if self._model.form is Form.BF16:
            tensor = tensors[f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"]
            return Extent(tensor.shard, tensor.offset, tensor.nbytes)
        tensor = tensors[f"{_prefix(layer, projection)}.weight"]
        nbytes = tensor.nbytes // self.num_experts
        return Extent(tensor.shard, tensor.offset + expert * nbytes, nbytes)


def read_alphas(model: MapleModel, layer: int, projection: str) -> NDArray[np.uint16]:
    """Read the row alphas of all experts of a layer as BF16 bits, [E, out]. Touches disk.

    Raises:
        CheckpointError: group scales that are not one alpha a row, or an alpha that is not finite.
        ReadError: the shard could not be read.
    """
    return read_row_alpha(model, _prefix(layer, projection))


def read_row_alpha(model: MapleModel, prefix: str) -> NDArray[np.uint16]:
    """Read the row alphas of one ternary layer as BF16 bits, [out] ([E, out] for experts). Touches disk.

    Raises: as `read_alphas`.
    """
    tensors = model.checkpoint.tensors
    if model.form is Form.ROW_ALPHA:
        name = f"{prefix}.row_alpha"
        alphas = np.empty(tensors[name].nbytes, np.uint8)
        _read(model, tensors[name], 0, alphas)
        result = alphas.view("<u2").reshape(tensors[name].shape)
        _check_finite(model, name, result, 0)
        return result
    assert model.form is Form.GROUP_SCALES, "BF16 weights have no row alphas"
    return _alphas_of_groups(model, tensors[f"{prefix}.scales"], tensors[f"{prefix}.biases"])


def _alphas_of_groups(model: MapleModel, scales: Tensor, biases: Tensor) -> NDArray[np.uint16]:
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


def _check_finite(model: MapleModel, name: str, bits: NDArray[np.uint16], first: int) -> None:
    finite = (bits & _EXPONENT) != _EXPONENT
    if not finite.all():
        raise _fault(model, name, first + int(finite.reshape(-1).argmin()), "has an alpha that is not finite")


def _fault(model: MapleModel, name: str, row: int, what: str) -> CheckpointError:
    tensor = model.checkpoint.tensors[name]
    out = tensor.shape[-2] if name.endswith((".scales", ".biases")) else tensor.shape[-1]
    place = f"expert {row // out}, row {row % out}" if ".switch_mlp." in name else f"row {row}"
    return CheckpointError(f"tensor {name} of {model.checkpoint.shards[tensor.shard].name}: {place} {what}")


def _read(model: MapleModel, tensor: Tensor, start: int, data: NDArray[np.uint8]) -> None:
    read_into(model.checkpoint.shards[tensor.shard], tensor.offset + start, data)


def _prefix(layer: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.switch_mlp.{projection}"


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
