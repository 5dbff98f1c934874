"""Turns hidden states into logits of some tokens only, in MLX: the clustered head in the place of `lm_head`.

What that does to the answer is said in `architectures/flash_head.py`. Everything is lazy, so a prompt's chunk
whose logits nobody reads costs nothing. One vector gets the rows of its clusters gathered; several, as in a
certificate, get all rows and a mask. It knows no disk: the arrays are MLX's, the head's rows those of the
module that it replaces.
"""

# mypy: allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn

from spile.architectures.flash_head import FlashHead
from spile.architectures.spec import AFFINE4

nn: Any = mlx.nn  # it has no types


def use_flash_head(model: Any, flash: FlashHead) -> None:
    """Replace the head of a model by its clusters. Touches disk: centroids and map are read.

    Raises: ReadError, CheckpointError.
    """
    model.lm_head = ClusteredHead(model.lm_head, flash)


class ClusteredHead(nn.Module):
    """Logits [B, T, V] of hidden states [B, T, D]; -inf for a token that no chosen cluster holds."""

    def __init__(self, head: Any, flash: FlashHead) -> None:
        """`head` is the quantized linear layer with all rows."""
        super().__init__()
        self.head = head
        codes, *factors = (flash.read(tensor) for tensor in flash.centroids)
        self.centroids = [mx.array(codes), *(mx.array(bits).view(mx.bfloat16) for bits in factors)]
        self.token_map = mx.array(flash.read_token_map(head.weight.shape[0]))
        self.forced = mx.array(flash.forced, mx.int32)
        self._num_probes = flash.num_probes

    def __call__(self, h: mx.array) -> mx.array:
        B, T, _ = h.shape
        V, vectors = self.head.weight.shape[0], h.reshape(B * T, -1)
        token_ids = self._choose(_multiply(vectors, *self.centroids))
        if B * T > 1:
            allowed = mx.put_along_axis(mx.zeros((B * T, V), mx.bool_), token_ids, mx.array(True), axis=-1)
            return mx.where(allowed.reshape(B, T, V), self.head(h), -mx.inf)
        parts = (self.head.weight, self.head.scales, self.head.biases)
        computed = _multiply(vectors, *(part[token_ids[0]] for part in parts))
        none = mx.full((1, V), -mx.inf, h.dtype)
        return mx.put_along_axis(none, token_ids, computed, axis=-1).reshape(B, T, V)

    def _choose(self, scores: mx.array) -> mx.array:
        """Return the ids of the tokens that get logits, [N, ..] of scores [N, C]; some may be there twice."""
        order = mx.argsort(-scores.astype(mx.float32), axis=-1)  # a stable sort: ties go to the lower id
        ids = self.token_map[order[:, : self._num_probes]].reshape(len(scores), -1)
        return mx.concatenate([ids, mx.broadcast_to(self.forced, (len(scores), len(self.forced)))], axis=-1)


def _multiply(x: mx.array, codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    return mx.quantized_matmul(
        x, codes, scales, biases, transpose=True, group_size=AFFINE4.group, bits=AFFINE4.bits
    )
