"""Turns a checkpoint's `lm_head_flash.*` tensors into a clustered head: which rows of the head to compute.

The rows of the head are grouped; a group's centroid stands for it. The groups whose centroids score best get
their exact rows, with some tokens that are always wanted; every other token gets none. So the answer is
approximate: a token whose cluster scored low cannot be chosen. Both engines use this; how scores and rows are
computed is theirs. The tensors may lie in the model's shards or in a file beside them that the index need not
name.

Sizes: C clusters, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spile.architectures.reading import check_tensor
from spile.architectures.spec import AFFINE4, Expected
from spile.errors import CheckpointError, UnsupportedModelError, quote
from spile.files.checkpoint import FLASH_HEAD_NAME, Checkpoint, Tensor, read_into
from spile.files.safetensors import read_header

_PREFIX = "lm_head_flash"
_PARTS = ("weight", "scales", "biases")
_HINT = "Leave out --flash-head: the exact head needs nothing of it."


@dataclass(frozen=True)
class FlashHead:
    """A clustered head whose tensors are all there, with the dtypes and shapes that belong together."""

    shards: tuple[Path, ...]  # the checkpoint's, and the file beside them where the tensors lie there
    centroids: tuple[Tensor, Tensor, Tensor]  # 4-bit, [C, ..]: weight, scales, biases
    token_map: Tensor  # I32 [C, tokens of a cluster]
    rows: tuple[Tensor, Tensor, Tensor] | None  # the head's rows in the order of token_map; None: not stored
    num_clusters: int
    cluster_size: int
    num_probes: int
    forced: tuple[int, ...]  # token ids

    @property
    def centroid_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.centroids)

    @property
    def approximation(self) -> str:
        """What is not the model's own answer, in a few words."""
        return f"only tokens of the {self.num_probes:,} best of {self.num_clusters:,} clusters have logits (flash head)"

    def read(self, tensor: Tensor) -> NDArray[Any]:
        """Read a whole tensor: I32 as int32, U32 as uint32, BF16 as uint16 bits. Touches disk.

        Raises: ReadError.
        """
        dtype = {"I32": "<i4", "U32": "<u4", "BF16": "<u2"}[tensor.dtype]
        data = np.empty(tensor.nbytes, np.uint8)
        read_into(self.shards[tensor.shard], tensor.offset, data)
        return data.view(dtype).reshape(tensor.shape)

    def read_token_map(self, vocab_size: int) -> NDArray[np.int32]:
        """Read the ids of each cluster's tokens, [C, tokens of a cluster]. Touches disk.

        Raises: CheckpointError for an id that the model does not have, ReadError.
        """
        ids: NDArray[np.int32] = self.read(self.token_map)
        wrong = (ids < 0) | (ids >= vocab_size)
        if wrong.any():
            cluster = int(wrong.any(axis=1).argmax())
            raise CheckpointError(
                f"tensor {self.token_map.name} of {self.shards[self.token_map.shard].name}: cluster {cluster} "
                f"holds id {int(ids[wrong][0])}, expected 0 to {vocab_size - 1:,}",
                _HINT,
            )
        return ids

    def choose(self, scores: NDArray[np.float32]) -> NDArray[np.intp]:
        """Return the clusters to compute, [num_probes] of scores [C]: the best, ties to the lower id."""
        return np.argsort(-scores, kind="stable")[: self.num_probes]


def open_flash_head(checkpoint: Checkpoint, *, vocab_size: int, hidden_size: int) -> FlashHead:
    """Find the clustered head of a checkpoint and check it. Touches disk: a header.

    Raises:
        UnsupportedModelError: it has none, or one of another kind.
        CheckpointError: a value makes no sense, a tensor is missing or has another dtype or shape.
    """
    shards, tensors = _find(checkpoint)
    block = checkpoint.config.get("flash_head")
    if not isinstance(block, Mapping):
        raise CheckpointError(
            f"config.json of {checkpoint.folder}: flash_head is {quote(block)}, expected an object", _HINT
        )
    for key, fixed in (("bits", AFFINE4.bits), ("group_size", AFFINE4.group), ("scaled_centroids", True)):
        value = block.get(key, fixed)
        if type(value) is not type(fixed) or value != fixed:
            raise UnsupportedModelError(
                f"config.json: flash_head.{key} is {quote(value)}; spile runs {fixed!r} only", _HINT
            )
    num_clusters = _count(block, "n_clusters", vocab_size)
    cluster_size = _count(block, "cluster_size", vocab_size)
    num_probes = _count(block, "n_probes", num_clusters)
    centroids = _table(tensors, f"{_PREFIX}.centroids", num_clusters, hidden_size)
    token_map = _tensor(tensors, Expected(f"{_PREFIX}.token_map", "I32", (num_clusters, cluster_size)))
    has_rows = f"{_PREFIX}.head.weight" in tensors
    rows = _table(tensors, f"{_PREFIX}.head", num_clusters * cluster_size, hidden_size) if has_rows else None
    return FlashHead(
        shards, centroids, token_map, rows, num_clusters, cluster_size, num_probes, _forced(block, vocab_size)
    )


def _find(checkpoint: Checkpoint) -> tuple[tuple[Path, ...], Mapping[str, Tensor]]:
    """Return the files and the tensors in them; those of the model's shards, else of the file beside them."""
    if f"{_PREFIX}.centroids.weight" in checkpoint.tensors:
        return checkpoint.shards, checkpoint.tensors
    path = checkpoint.folder / FLASH_HEAD_NAME
    if not path.is_file():
        raise UnsupportedModelError(
            f"{checkpoint.folder} has no clustered head: looked for {_PREFIX}.centroids.weight in its shards "
            f"and for {FLASH_HEAD_NAME}",
            _HINT,
        )
    shard = len(checkpoint.shards)
    tensors = {
        entry.name: Tensor(entry.name, entry.dtype, entry.shape, shard, entry.offset, entry.nbytes)
        for entry in read_header(path)
    }
    return (*checkpoint.shards, path), tensors


def _table(
    tensors: Mapping[str, Tensor], prefix: str, rows: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, biases = (_tensor(tensors, each) for each in AFFINE4.tensors(prefix, (rows, width)))
    return codes, scales, biases


def _tensor(tensors: Mapping[str, Tensor], expected: Expected) -> Tensor:
    return check_tensor(tensors, expected, "config.json's flash_head", _HINT)


def _count(block: Mapping[str, Any], key: str, largest: int) -> int:
    value = block.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise CheckpointError(
            f"config.json: flash_head.{key} is {quote(value)}, expected an integer from 1 to {largest:,}",
            _HINT,
        )
    return value


def _forced(block: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    value = block.get("force_tokens", [])
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise CheckpointError(
                f"config.json: flash_head.force_tokens has {quote(token)}, expected ids from 0 to "
                f"{vocab_size - 1:,}",
                _HINT,
            )
    return tuple(sorted(set(ids)))
