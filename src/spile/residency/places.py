"""Turns a table of experts into arrays: where the parts of each lie in the shards, and a slot's room for them.

It does not know who is in a slot; `slots.py` does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spile.residency.experts import ExpertTable
from spile.residency.store import PAGE_NBYTES, Store


class Places(NamedTuple):
    """Where the n parts of each expert lie, as arrays: looking extents up one by one would cost a
    token 2 ms.
    """

    shards: NDArray[np.int64]  # [L * E, n]
    offsets: NDArray[np.int64]  # [L * E, n]
    nbytes: NDArray[np.int64]  # [n]

    @classmethod
    def of(cls, table: ExpertTable) -> Places:
        L, E = table.num_layers, table.num_experts
        n = _num_parts(table)
        shards, offsets = np.zeros((L * E, n), np.int64), np.zeros((L * E, n), np.int64)
        nbytes = np.zeros(n, np.int64)
        for layer in range(L):
            if not table.is_moe(layer):
                continue
            for expert in range(E):
                extents = table.extents(layer, expert)
                shards[layer * E + expert] = [extent.shard for extent in extents]
                offsets[layer * E + expert] = [extent.offset for extent in extents]
            nbytes[:] = [extent.nbytes for extent in extents]
        return cls(shards, offsets, nbytes)


def part_nbytes(table: ExpertTable) -> tuple[int, ...]:
    """Return the bytes of each part of an expert in a slot: the most that any expert needs, in whole pages."""
    sizes = [0] * _num_parts(table)
    for layer in range(table.num_layers):
        if not table.is_moe(layer):
            continue
        for part, extent in enumerate(table.extents(layer, 0)):
            room = Store.room(extent)
            if extent.nbytes % PAGE_NBYTES:  # then each expert begins elsewhere in its page
                room = -(-(PAGE_NBYTES - 1 + extent.nbytes) // PAGE_NBYTES) * PAGE_NBYTES
            sizes[part] = max(sizes[part], room)
    return tuple(sizes)


def _num_parts(table: ExpertTable) -> int:
    layers = range(table.num_layers)
    return next((len(table.extents(layer, 0)) for layer in layers if table.is_moe(layer)), 0)
