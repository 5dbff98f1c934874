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
    """Where the three parts of each expert lie, as arrays: looking extents up one by one would cost a
    token 2 ms.
    """

    shards: NDArray[np.int64]  # [L * E, 3]
    offsets: NDArray[np.int64]  # [L * E, 3]
    nbytes: NDArray[np.int64]  # [3]

    @classmethod
    def of(cls, table: ExpertTable) -> Places:
        L, E = table.num_layers, table.num_experts
        shards, offsets = np.zeros((L * E, 3), np.int64), np.zeros((L * E, 3), np.int64)
        nbytes = np.zeros(3, np.int64)
        for layer in range(L):
            if not table.is_moe(layer):
                continue
            for expert in range(E):
                extents = table.extents(layer, expert)
                shards[layer * E + expert] = [extent.shard for extent in extents]
                offsets[layer * E + expert] = [extent.offset for extent in extents]
            nbytes[:] = [extent.nbytes for extent in extents]
        return cls(shards, offsets, nbytes)


def part_nbytes(table: ExpertTable) -> tuple[int, int, int]:
    """Return the bytes of gate, up and down in a slot: the most that any expert needs, in whole pages."""
    sizes = [0, 0, 0]
    for layer in range(table.num_layers):
        if not table.is_moe(layer):
            continue
        for part, extent in enumerate(table.extents(layer, 0)):
            room = Store.room(extent)
            if extent.nbytes % PAGE_NBYTES:  # then each expert begins elsewhere in its page
                room = -(-(PAGE_NBYTES - 1 + extent.nbytes) // PAGE_NBYTES) * PAGE_NBYTES
            sizes[part] = max(sizes[part], room)
    gate, up, down = sizes
    return gate, up, down
