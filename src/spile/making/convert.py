"""Turns a BF16 Maple into the 2-bit folder that spile runs.

Linear layers become ternary codes with one alpha a row; embeddings and head become 4-bit codes in groups
of 64; norms and routers are copied. Rows are converted some MB at a time, so memory does not grow with
the model; the folder appears when it is complete. It does not check that the result is a good model:
weights that were not trained ternary convert as well, and answer badly.

Sources: the threshold 0.7 * mean|w| and alpha, the mean of the survivors, are the rule that Maple was
trained with; the 4-bit rule is MLX's affine quantization, `mlx/backend/cpu/quantized.cpp` at v0.32.
Unlike MLX, groups that 16 levels hold exactly stay exact, so a model trained on such levels loses
nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spile.architectures import maple, open_own
from spile.architectures.foreign import ForeignModel
from spile.architectures.reading import PROJECTIONS
from spile.architectures.spec import AFFINE4, BF16, TERNARY, OwnModel
from spile.errors import CheckpointError, UnsupportedModelError
from spile.files.checkpoint import Tensor, open_checkpoint, read_into
from spile.files.writer import (
    ShardWriter,
    Spec,
    atomic_folder,
    count_units,
    split_shards,
    write_index,
    write_json,
)
from spile.residency.experts import decode_bf16, encode_bf16

Progress = Callable[[int, int], None]  # bytes of the source done, bytes in all

_PIECE_VALUES = 262_144  # of one piece of rows; its float64 copy of 2 MB stays in a core's cache
_LARGEST_SHARD_NBYTES = 2_000_000_000
_EMBEDDING_NAME = maple.EMBEDDING_NAMES[0]
_THRESHOLD = np.float32(0.7)
_SMALLEST_SCALE = np.float32(1e-7)
_LARGEST_CODE = np.float32(2**AFFINE4.bits - 1)
_ABSURD = np.uint16(0x7149)  # BF16 bits of 1e30; sums of such weights overflow
_COPIED = ("*token*.json", "vocab.json", "merges.txt", "*.jinja", "chat_template.json",
           "generation_config.json", "*.model", "LICENSE*", "NOTICE*")  # fmt: skip
_DROPPED_KEYS = ("auto_map", "model_file", "quantization", "quantization_config")


def ternarize(rows: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """Make rows ternary: [n, in] -> codes 0, 1, 2 [n, in] and alphas as BF16 bits [n].

    Sums run in float64, where sums of BF16 values are exact, so that no order of summation shows.
    """
    magnitude = np.abs(rows).astype(np.float64)
    mean = (magnitude.sum(axis=1) / rows.shape[1]).astype(np.float32)
    threshold = (_THRESHOLD * mean)[:, None]
    positive, negative = rows > threshold, rows < -threshold
    codes = np.ones(rows.shape, np.uint8)
    codes += positive.view(np.uint8)
    codes -= negative.view(np.uint8)
    positive |= negative  # now: survives
    magnitude *= positive
    count = np.maximum(np.count_nonzero(positive, axis=1), 1)
    return codes, encode_bf16((magnitude.sum(axis=1) / count).astype(np.float32))


def quantize_affine4(
    rows: NDArray[np.float32],
) -> tuple[NDArray[np.uint32], NDArray[np.uint16], NDArray[np.uint16]]:
    """Quantize rows [n, D] to 4 bits in groups of 64.

    A group whose values lie on 16 evenly spaced levels keeps them exactly; others are quantized as by MLX.
    Returns packed codes [n, D/8], scales and biases as BF16 bits [n, D/64].
    """
    n, width = rows.shape
    groups = rows.reshape(-1, AFFINE4.group)
    low, high = groups.min(axis=1), groups.max(axis=1)
    scale, bias = _mlx_scale(low, high)
    _use_exact_levels(groups, low, high, scale, bias)
    codes = np.clip(np.rint((groups - bias[:, None]) / scale[:, None]), 0, _LARGEST_CODE).astype(np.uint8)
    shape = (n, width // AFFINE4.group)
    words = pack(codes.reshape(n, width), AFFINE4.bits)
    return words, encode_bf16(scale).reshape(shape), encode_bf16(bias).reshape(shape)


def _mlx_scale(low: NDArray[Any], high: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return MLX's float32 scales and biases for groups from `low` to `high`."""
    low_is_edge = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / _LARGEST_CODE, _SMALLEST_SCALE)
    scale = np.where(low_is_edge, scale, -scale)
    edge = np.where(low_is_edge, low, high)
    steps = np.rint(edge / scale)  # of the edge from zero; zero is then a code of its own
    at_zero = steps == 0
    scale = np.where(at_zero, scale, edge / np.where(at_zero, np.float32(1), steps))
    return scale, np.where(at_zero, np.float32(0), edge)


def _use_exact_levels(
    groups: NDArray[Any], low: NDArray[Any], high: NDArray[Any], scale: NDArray[Any], bias: NDArray[Any]
) -> None:
    """Replace scale and bias where a group lies on evenly spaced levels, with the widest step that fits."""
    spread = high - low
    left = spread > 0
    for num_steps in range(1, int(_LARGEST_CODE) + 1):
        step = spread / np.float32(num_steps)
        found = np.flatnonzero(
            left & _is_bf16(step) & (step * np.float32(num_steps) == spread) & (low + spread == high)
        )
        if not len(found):
            continue
        distance = groups[found] - low[found, None]
        fits = (
            np.rint(distance / step[found, None]) * step[found, None] + low[found, None] == groups[found]
        ).all(axis=1)
        found = found[fits]
        left[found] = False
        scale[found] = step[found]
        # zero in the middle where that reaches both ends, as a symmetric quantizer writes it
        middle = np.float32(-8) * step[found]
        first = (low[found] - middle) / step[found]
        centred = (first >= 0) & (first == np.rint(first)) & (first + num_steps <= _LARGEST_CODE)
        bias[found] = np.where(centred, middle, low[found])


def _is_bf16(values: NDArray[Any]) -> NDArray[np.bool_]:
    result: NDArray[np.bool_] = (values.view(np.uint32) & np.uint32(0xFFFF)) == 0
    return result


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack codes [n, in] into little-endian words [n, in * bits / 32], lowest bits first."""
    per_byte = 8 // bits
    parts = codes.reshape(codes.shape[0], -1, per_byte)
    packed = parts[..., 0].copy()
    for position in range(1, per_byte):
        packed |= parts[..., position] << np.uint8(position * bits)
    return packed.view("<u4")


def convert_folder(
    source: Path,
    destination: Path,
    *,
    progress: Progress | None = None,
    on_note: Callable[[str], None] | None = None,
) -> None:
    """Convert a BF16 Maple folder; the new folder appears when it is complete. Reads and writes whole models.

    Raises:
        ModelError: the source cannot be used, is quantized already, or holds a weight that is not finite.
        WriteError: the destination is taken or the disk is full.
    """
    model = open_own(open_checkpoint(source))
    if not is_source(model):
        if model.spec.head.format == BF16:
            raise UnsupportedModelError(f"{source} is a {model.spec.model_type}: only a Maple is converted")
        raise UnsupportedModelError(f"{source} is quantized already: nothing to convert")
    specs = [Spec(*item) for item in maple.spec(model.checkpoint.config).tensors()]
    total = sum(spec.nbytes for spec in specs)
    parts = split_shards(specs, min(-(-total // _LARGEST_SHARD_NBYTES), count_units(specs)))
    reader = _Reader(model, progress)
    with atomic_folder(destination, total, on_note) as partial:
        for name, part in parts.items():
            with ShardWriter(partial / name, part) as shard:
                for spec in part:
                    if spec.name.endswith(".weight"):  # the others come with their weight
                        _convert_tensor(reader, spec, shard)
        write_index(partial, parts)
        _copy_files(source, partial)
        write_json(partial / "config.json", _config(model))


def is_source(model: OwnModel | ForeignModel) -> bool:
    """Whether a model is a BF16 source that `convert_folder` packs."""
    return isinstance(model, OwnModel) and model.spec.model_type == "maple" and model.spec.head.format == BF16


class _Reader:
    """Reads rows of the source's tensors as float32, and counts them."""

    def __init__(self, model: OwnModel, progress: Progress | None) -> None:
        self._model = model
        self._progress = progress
        self._total = sum(tensor.nbytes for tensor in model.checkpoint.tensors.values())
        self._done = 0

    def bits(self, name: str) -> Iterator[tuple[int, NDArray[np.uint16]]]:
        """Yield (first row, BF16 bits [rows, in]) over a tensor."""
        tensor = self._model.checkpoint.tensors[name]
        width = tensor.shape[-1]
        step = max(1, _PIECE_VALUES // width)
        num_rows = tensor.nbytes // (2 * width)
        for first in range(0, num_rows, step):
            data = np.empty((min(step, num_rows - first), width), np.uint16)
            path = self._model.checkpoint.shards[tensor.shard]
            read_into(path, tensor.offset + first * width * 2, data.reshape(-1).view(np.uint8))
            self._check_sane(tensor, first, data)
            self._done += data.nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)
            yield first, data

    def source_name(self, name: str) -> str:
        """Name the source's tensor for one of the result's."""
        prefix = name.removesuffix(".weight")
        return f"{self._model.spec.embedding.name if prefix == _EMBEDDING_NAME else prefix}.weight"

    @property
    def num_experts(self) -> int:
        return self._model.spec.num_experts

    def _check_sane(self, tensor: Tensor, first: int, data: NDArray[np.uint16]) -> None:
        sane = ((data & np.uint16(0x7FFF)) < _ABSURD).all(axis=1)
        if not sane.all():
            row = first + int(sane.argmin())
            shard = self._model.checkpoint.shards[tensor.shard]
            raise CheckpointError(f"tensor {tensor.name} of {shard}: row {row} is not finite, or beyond 1e30")


def _convert_tensor(reader: _Reader, spec: Spec, shard: ShardWriter) -> None:
    prefix = spec.name.removesuffix(".weight")
    if spec.dtype == "BF16":
        for first, bits in reader.bits(spec.name):
            shard.write(spec.name, first * bits.shape[1] * 2, bits)
    elif prefix in ("lm_head", _EMBEDDING_NAME):
        for first, bits in reader.bits(reader.source_name(spec.name)):
            words, scales, biases = quantize_affine4(decode_bf16(bits))
            for kind, data in (("weight", words), ("scales", scales), ("biases", biases)):
                shard.write(f"{prefix}.{kind}", first * data.shape[1] * data.itemsize, data)
    else:
        rows = 0
        for name in _ternary_sources(reader, prefix):
            for _, bits in reader.bits(name):
                codes, alphas = ternarize(decode_bf16(bits))
                words = pack(codes, TERNARY.bits)
                shard.write(spec.name, rows * words.shape[1] * 4, words)
                shard.write(f"{prefix}.row_alpha", rows * 2, alphas)
                rows += len(alphas)


def _ternary_sources(reader: _Reader, prefix: str) -> list[str]:
    """Name the source tensors whose rows, one after another, are one ternary layer of the result."""
    parent, projection = prefix.rsplit(".", 1)
    if not parent.endswith(".switch_mlp"):
        return [f"{prefix}.weight"]
    assert projection in PROJECTIONS, projection
    layer = parent.removesuffix(".switch_mlp")
    return [f"{layer}.experts.{expert}.{projection}.weight" for expert in range(reader.num_experts)]


def _config(model: OwnModel) -> dict[str, Any]:
    config = {key: value for key, value in model.checkpoint.config.items() if key not in _DROPPED_KEYS}
    quantization = maple.quantization()
    return {
        **config,
        "model_type": "maple",
        "quantization": quantization,
        "quantization_config": quantization,
    }


def _copy_files(source: Path, destination: Path) -> None:
    """Copy tokenizer, template and licence files; never code."""
    for pattern in _COPIED:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, destination / path.name)
