"""Where a value was met that is not finite -> the error that names the tensor, or the layer, that it came from.

The decoder notes where (`Decoder.take_fault`); the weights that were used there are looked through only then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

from spile.architectures.flash_head import FlashHead
from spile.architectures.spec import Experts, OwnModel
from spile.errors import ModelError
from spile.files.checkpoint import Tensor
from spile.files.finite import check_finite


class Stage(IntEnum):
    """Mirrors `Stage` of decoder.h."""

    EMBEDDING = 1
    ATTENTION = 2
    ROUTER = 3
    EXPERTS = 4
    DENSE = 5
    HEAD = 6


_WHERE = {
    Stage.EMBEDDING: "the embedding of token {item}",
    Stage.ATTENTION: "layer {layer}'s attention",
    Stage.ROUTER: "layer {layer}'s router",
    Stage.EXPERTS: "layer {layer}'s expert {item}",
    Stage.DENSE: "layer {layer}'s MLP",
    Stage.HEAD: "the output head",
}


def raise_fault(
    model: OwnModel, fault: tuple[int, int, int], token_ids: Sequence[int], flash: FlashHead | None
) -> None:
    """Raise what `take_fault` found in a chunk of these tokens. Touches disk.

    Raises:
        CheckpointError: a weight that was used is not finite.
        ModelError: all are; what was computed with them is not.
    """
    stage, layer, item = Stage(fault[0]), fault[1], fault[2]
    if stage is Stage.EMBEDDING:
        item = int(token_ids[item])
    checkpoint = model.checkpoint
    check_finite(checkpoint.shards, _used(model, stage, layer, item))
    if stage is Stage.HEAD and flash is not None:
        check_finite(flash.shards, [(tensor, None) for tensor in flash.centroids + (flash.rows or ())])
    raise ModelError(
        f"{_WHERE[stage].format(layer=layer, item=item)} gave a value that is not finite, though its weights are",
        "The weights are damaged, or not those of this config; 'spile verify' compares them with a record.",
    )


def _used(model: OwnModel, stage: Stage, layer: int, item: int) -> Iterator[tuple[Tensor, int | None]]:
    """Yield the tensors that a stage reads, each with the one entry of it that it reads."""
    spec = model.spec
    if stage is Stage.EMBEDDING:
        yield from ((tensor, item) for tensor in model.tensors(spec.embedding))
    elif stage is Stage.HEAD:
        yield from ((tensor, None) for tensor in (*model.tensors(spec.norm), *model.tensors(spec.head)))
    else:
        ffn = spec.layers[layer].ffn
        stacks = [*ffn.glu.weights()] if isinstance(ffn, Experts) else []
        for weight in spec.layers[layer].weights():
            if weight not in stacks:
                yield from ((tensor, None) for tensor in model.tensors(weight))
            elif stage is Stage.EXPERTS:
                yield from ((tensor, item) for tensor in model.tensors(weight))
