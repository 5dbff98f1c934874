"""Turns a lazily loaded mlx-lm model into its layers of experts: which tensors make an expert, and which
extents of the files hold each of them.

Layers are found by type (SwitchGLU, SwitchMLP), never by name, and a SwitchLinear that stands alone is none.
Where the bytes lie is what `provenance` found out, so it holds for every naming a checkpoint may use. It
reads no weights and knows nothing of slots.

Sizes: E experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spile.engines.mlx import adapter
from spile.engines.mlx.provenance import Computed, Joined, Origin, View, take, trace
from spile.errors import UnsupportedModelError
from spile.residency.experts import Extent

if TYPE_CHECKING:
    from spile.files.checkpoint import Checkpoint


class Part(NamedTuple):
    """One tensor of an expert: `name` within its layer ('gate_proj.scales'), shape without the expert."""

    name: str
    shape: tuple[int, ...]
    dtype: Any  # an mlx Dtype
    nbytes: int


Layout = tuple[Part, ...]  # experts of one layout can share a slot


class Piece(NamedTuple):
    """What a read brings for one part of an expert.

    `place` is where the elements go in the part's array; None: `extent` is the whole part as it lies in memory.
    """

    part: int
    extent: Extent
    view: View
    place: tuple[slice, ...] | None


@dataclass(frozen=True)
class ExpertLayer:
    """One layer of experts of a model, in the order of computation."""

    index: int
    path: str
    module: Any
    num_experts: int
    layout: Layout
    origins: tuple[Origin, ...]  # of each part, [E, *shape]

    @property
    def expert_nbytes(self) -> int:
        return sum(part.nbytes for part in self.layout)

    def pieces(self, expert: int) -> list[Piece]:
        """List what has to be read for one expert."""
        assert 0 <= expert < self.num_experts, f"expert {expert} of {self.num_experts}"
        pieces: list[Piece] = []
        for index, (part, origin) in enumerate(zip(self.layout, self.origins, strict=True)):
            rank = len(part.shape) + 1
            row = take(origin, [expert] + [0] * (rank - 1), [1] * rank, (1, *part.shape))
            for place, view in _leaves(row, tuple(slice(0, size) for size in (1, *part.shape))):
                is_whole = view.is_contiguous and view.nbytes == part.nbytes
                extent = Extent(view.tensor.shard, view.tensor.offset + view.offset, view.span)
                pieces.append(Piece(index, extent, view, None if is_whole else place[1:]))
        return pieces


def _leaves(origin: Origin, place: tuple[slice, ...]) -> Iterator[tuple[tuple[slice, ...], View]]:
    """Yield the views that make up an array, each with its place in it."""
    assert not isinstance(origin, Computed), origin.reason
    if isinstance(origin, View):
        yield place, origin
        return
    first = place[origin.axis].start
    for part in origin.parts:
        last = first + part.shape[origin.axis]
        inner = tuple(slice(first, last) if i == origin.axis else axis for i, axis in enumerate(place))
        yield from _leaves(part, inner)
        first = last


def find_switches(model: Any) -> list[tuple[str, Any]]:
    """Return path and module of every layer of experts, in the order of their paths.

    Raises: UnsupportedModelError where one computes in a way of its own.
    """
    layers = adapter.switch_layers()
    found = []
    for path, module in model.named_modules():
        if getattr(type(module), "is_switch", False):
            found.append((path, module))
        elif isinstance(module, (layers.SwitchGLU, layers.SwitchMLP)):
            base = layers.SwitchGLU if isinstance(module, layers.SwitchGLU) else layers.SwitchMLP
            if type(module).__call__ is not base.__call__:
                raise UnsupportedModelError(
                    f"{path} is a {type(module).__name__} with a computation of its own"
                )
            found.append((path, module))
    return sorted(found, key=lambda item: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", item[0])])


def arrays_of(module: Any) -> list[tuple[str, Any]]:
    """Return name and array of every tensor of a layer of experts, [E, ...] each."""
    from mlx.utils import tree_flatten

    flat: list[Any] = tree_flatten(module.parameters())
    return [(name, array) for name, array in flat if array.ndim]


def find_experts(model: Any, checkpoint: Checkpoint) -> list[ExpertLayer]:
    """Locate every expert of a model that was loaded lazily from a checkpoint. Reads no weights.

    Raises:
        UnsupportedModelError: an expert's tensor is computed at load, or no model can be followed.
        CheckpointError: mlx-lm cannot load the checkpoint.
    """
    switches = find_switches(model)
    if not switches:
        return []
    wanted = [(path, name, array) for path, module in switches for name, array in arrays_of(module)]
    origins = iter(_trace(checkpoint, [path for path, _ in switches]))
    layers = []
    for index, (path, module) in enumerate(switches):
        arrays = arrays_of(module)
        found = [next(origins) for _ in arrays]
        for (name, array), origin in zip(arrays, found, strict=True):
            _check(path, name, array, origin)
        layout = tuple(
            Part(name, tuple(array.shape[1:]), array.dtype, prod(array.shape[1:]) * array.dtype.size)
            for name, array in arrays
        )
        counts = {array.shape[0] for _, array in arrays}
        if len(counts) != 1:
            raise UnsupportedModelError(
                f"the tensors of {path} disagree on the number of experts: {sorted(counts)}"
            )
        layers.append(ExpertLayer(index, path, module, counts.pop(), layout, tuple(found)))
    assert len(wanted) == sum(len(layer.layout) for layer in layers)
    return layers


def _check(path: str, name: str, array: Any, origin: Origin) -> None:
    if isinstance(origin, Computed):
        raise UnsupportedModelError(
            f"{path}.{name} is {origin.reason}: its experts cannot be read one by one",
            "Convert the checkpoint once, with `mlx_lm.convert`, and give spile the result.",
        )
    if origin.shape != tuple(array.shape):
        raise UnsupportedModelError(
            f"{path}.{name} has shape {tuple(array.shape)} and its file {origin.shape}"
        )
    leaf = origin
    while isinstance(leaf, Joined):
        leaf = leaf.parts[0]
    assert isinstance(leaf, View)
    if leaf.itemsize != array.dtype.size:
        raise UnsupportedModelError(
            f"{path}.{name} has {array.dtype.size} bytes an element and its file {leaf.itemsize}"
        )


def _trace(checkpoint: Checkpoint, paths: Sequence[str]) -> list[Origin]:
    def load(stand_ins: Any) -> list[Any]:
        shards: list[dict[str, Any]] = [{} for _ in checkpoint.shards]
        for name, tensor in checkpoint.tensors.items():
            shards[tensor.shard][name] = stand_ins[name]
        model = adapter.load_lazily(checkpoint, shard_loader(shards))
        modules = dict(find_switches(model))
        return [array for path in paths for _, array in arrays_of(modules[path])]

    return trace(checkpoint.tensors, load)


def shard_loader(shards: Sequence[dict[str, Any]]) -> Callable[..., Any]:
    """Return what stands for mx.load: the arrays of the shard whose number a file's name ends in."""

    def load(path: Any, *rest: Any, **named: Any) -> dict[str, Any]:
        return dict(shards[int(Path(path).stem.rsplit("-", 1)[1])])

    return load
