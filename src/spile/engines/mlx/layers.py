"""Turns a layer of experts whose weights lie in a pool's banks into the same outputs as with all of them
resident: mlx-lm's own projections and activation, over rows of the banks.

Rows are sorted as mlx-lm sorts them, by expert id and never by slot, and every call has the shapes of the
resident model's, so that the same kernels run on the same rows. It does not know where experts come from.

What MLX's Metal kernels depend on, and how it is kept (mlx 0.32, backend/metal/quantized.cpp, GatherQMM): rows
that are sorted, 16 or more and four or more an expert of the weight array take a tiled kernel, others one row at
a time. Therefore the array has as many rows as the layer has experts (`Bank.view`), and where a chunk needs more
experts than there are slots, each group of rows is given an array that leads to the kernel which the whole would
have taken, and 16 rows at least. The tiled kernel looks for runs of one index, not for ascending ones: rows sorted
by expert are still runs when ids become slots. CUDA is not known to: there `sorted_indices` is said only where it
is true of the slots. On the CPU every row is computed alone. Measured on the CPU alone; see docs/metal.md.

Sizes: D width, K experts chosen by a token, N rows (tokens times K), E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from spile.engines.mlx import adapter
from spile.engines.mlx.banks import Bank
from spile.engines.mlx.experts import ExpertLayer
from spile.errors import SpileError
from spile.residency.pool import Order, Pool

SORTED_ROWS = 64  # from so many rows on mlx-lm sorts them by expert (switch_layers.py, 0.32.2)
_TILED_ROWS, _TILED_SHARE = 16, 4  # least rows of the tiled kernel, and least rows an expert


class StreamedExperts(nn.Module):
    """Takes the place of a SwitchGLU, a SwitchMLP or a switch of our own: same call, same bits."""

    def __init__(self, layer: ExpertLayer) -> None:
        super().__init__()
        # Past nn.Module, which would take them for parameters and children.
        for name, value in (("_inner", layer.module), ("_layer", layer), ("_pool", None), ("_closed", False)):
            object.__setattr__(self, name, value)

    @property
    def layer(self) -> ExpertLayer:
        return self._layer  # type: ignore[no-any-return]

    def attach(self, pool: Pool, bank: Bank) -> None:
        """Take experts from a pool, whose room is the bank, from now on."""
        object.__setattr__(self, "_pool", pool)
        object.__setattr__(self, "_bank", bank)
        bank.on_resize.append(self._leave_bank)
        self._leave_bank()  # nor hold the layer's own arrays any longer

    def detach(self) -> None:
        """Say that the pool is gone: from now on a call is an error."""
        object.__setattr__(self, "_closed", True)

    def _leave_bank(self) -> None:
        """Forget the bank's arrays, and where they have the experts."""
        object.__setattr__(self, "_num_rows", None)
        object.__setattr__(self, "_table", None)
        self._set_weights(lambda part: None)

    def _use_bank(self, num_rows: int | None = None) -> None:
        """Let the projections read the bank, as arrays of so many rows; None: as many as there are experts."""
        num_rows = num_rows or self._layer.num_experts
        if num_rows != self._num_rows:
            object.__setattr__(self, "_num_rows", None)  # until all have it
            self._set_weights(lambda part: self._bank.view(part, num_rows))
            object.__setattr__(self, "_num_rows", num_rows)

    def _set_weights(self, array_of: Callable[[int], Any]) -> None:
        for index, part in enumerate(self._layer.layout):
            *path, name = part.name.split(".")
            module = self._inner
            for step in path:
                module = module[step]
            module[name] = array_of(index)

    def _slot_table(self) -> Any | None:
        """Return the slot of each expert, uint32 [E], once all are there for good; None where the pool is smaller
        than the model. Reads the whole layer the first time.
        """
        if self._table is None and self._pool.may_hold_all:
            experts = np.arange(self._layer.num_experts, dtype=np.int32)
            self._pool.load(self._layer.index, experts)
            table = mx.array(self._pool.slots_of(self._layer.index, experts).astype(np.uint32))
            mx.eval(table)
            object.__setattr__(self, "_table", table)
        return self._table

    def __call__(self, x: Any, indices: Any) -> Any:
        """Return each chosen expert's output, [..., K, D], for x [..., D] and ids [..., K]."""
        indices = mx.stop_gradient(indices)
        pool, layer = self._pool, self._layer.index
        if self._closed:
            raise SpileError("the experts of this model are streamed no more: its streaming was closed")
        if pool is None:  # a pass that only asks for shapes
            return mx.zeros((*indices.shape, x.shape[-1]), x.dtype)
        if layer == 0:
            pool.step(indices.size // indices.shape[-1])
        table = self._slot_table()
        if table is not None:
            pool.hits += min(indices.size, self._layer.num_experts)
            return self._whole(x, indices, table[indices])
        ids = self._bank.settle(indices)
        experts, counts = np.unique(ids, return_counts=True)
        order: Order = "together" if ids.size >= SORTED_ROWS else "ready"
        groups = pool.fetch(layer, experts.astype(np.int32), counts.astype(np.int32), order=order)
        with closing(groups):
            first, _ = next(groups)
            if len(first) == len(experts):
                y = self._whole(x, indices, mx.array(pool.slots_of(layer, ids).astype(np.uint32)))
                self._bank.add_pending(y)
                return y
            return self._in_groups(x, ids, first, groups)

    def _whole(self, x: Any, indices: Any, slots: Any) -> Any:
        """Compute all rows at once, step by step as mlx-lm does."""
        self._use_bank()
        x = mx.expand_dims(x, (-2, -3))
        if indices.size < SORTED_ROWS:
            return self._compute(x, slots, False).squeeze(-2)
        order = mx.argsort(indices.flatten())
        x = x.flatten(0, -3)[order // indices.shape[-1]]
        y = self._compute(x, slots.flatten()[order], True)
        return mx.unflatten(y[mx.argsort(order)], 0, indices.shape).squeeze(-2)

    def _in_groups(self, x: Any, ids: NDArray[np.int64], group: NDArray[np.int64], groups: Any) -> Any:
        """Compute the rows of each group of experts as the group is there; then put them in order."""
        K, flat = ids.shape[-1], ids.reshape(-1)
        do_sort = flat.size >= SORTED_ROWS
        is_tiled = do_sort and flat.size >= _TILED_SHARE * self._layer.num_experts
        order = np.argsort(flat, kind="stable") if do_sort else np.arange(flat.size)
        if x.shape[:-1] != ids.shape[:-1]:
            x = mx.broadcast_to(x, (*ids.shape[:-1], x.shape[-1]))
        x = x.reshape(-1, 1, x.shape[-1])
        rows: list[NDArray[np.int64]] = []
        results = []
        while True:
            mine = padded = order[np.isin(flat[order], group)]
            if is_tiled:
                padded = np.append(mine, np.repeat(mine[-1:], max(0, _TILED_ROWS - len(mine))))
            self._use_bank(len(padded) // _TILED_SHARE if is_tiled else None)
            slots = mx.array(self._pool.slots_of(self._layer.index, flat[padded]).astype(np.uint32))
            y = self._compute(x[mx.array(padded // K)], slots, do_sort)[: len(mine)]
            self._bank.add_pending(y)
            rows.append(mine)
            results.append(y)
            if sum(map(len, rows)) == flat.size:
                break
            mx.async_eval(y)
            group, _ = next(groups)
        order = np.argsort(np.concatenate(rows))
        y = mx.concatenate(results)[mx.array(order)]
        return mx.unflatten(y, 0, ids.shape).squeeze(-2)

    def _compute(self, x: Any, slots: Any, sorted_indices: bool) -> Any:
        if sorted_indices and mx.cuda.is_available():
            slots_now = np.array(slots)
            sorted_indices = bool((slots_now[1:] >= slots_now[:-1]).all())
        return compute(self._inner, x, slots, sorted_indices)


def compute(switch: Any, x: Any, indices: Any, sorted_indices: bool) -> Any:
    """Run one layer of experts over rows that are sorted already, or need no sorting."""
    layers = adapter.switch_layers()
    if isinstance(switch, layers.SwitchGLU):
        up = switch.up_proj(x, indices, sorted_indices=sorted_indices)
        gate = switch.gate_proj(x, indices, sorted_indices=sorted_indices)
        return switch.down_proj(switch.activation(up, gate), indices, sorted_indices=sorted_indices)
    if isinstance(switch, layers.SwitchMLP):
        hidden = switch.activation(switch.fc1(x, indices, sorted_indices=sorted_indices))
        return switch.fc2(hidden, indices, sorted_indices=sorted_indices)
    return switch.compute(x, indices, sorted_indices)


def replace_switches(model: Any, layers: Sequence[ExpertLayer]) -> list[StreamedExperts]:
    """Put streamed layers, without a pool yet, in the places of a model's layers of experts."""
    streamed = [StreamedExperts(layer) for layer in layers]
    for new in streamed:
        _put(model, new.layer.path, new)
    return streamed


def put_back(model: Any, streamed: Sequence[StreamedExperts]) -> None:
    """Put a model's own layers of experts in their places again."""
    for one in streamed:
        _put(model, one.layer.path, one.layer.module)


def _put(model: Any, path: str, module: Any) -> None:
    *steps, name = path.split(".")
    owner = model
    for step in steps:
        owner = owner[int(step)] if isinstance(owner, (list, tuple)) else owner[step]
    if isinstance(owner, list):
        owner[int(name)] = module
    else:
        owner[name] = module
