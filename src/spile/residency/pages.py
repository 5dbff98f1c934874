"""Turns a table of experts into slots of whole pages: the pool's room in the memory of a process.

Direct reads land in whole pages, so a part of an expert begins as far behind its page as in its file. It does not know
who is in a slot.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spile.residency.experts import ExpertTable
from spile.residency.pool import Reads, Room
from spile.residency.store import PAGE_NBYTES, Store, private_memory

_GIVE_BACK = mmap.MADV_FREE if sys.platform == "darwin" else mmap.MADV_DONTNEED


class Pages(Room):
    """Slots in anonymous memory, which is taken as they are first filled.

    An expert's parts are looked up as arrays, [L * E, parts]: one by one would cost a token 2 ms.
    """

    def __init__(self, table: ExpertTable) -> None:
        self.num_experts, self.num_slots = table.num_experts, 0
        self.keys = keys_of(table)
        extents = [table.extents(*divmod(int(key), table.num_experts)) for key in self.keys]
        parts = part_nbytes(table)
        self.slot_nbytes = sum(parts)
        self._part_starts = np.cumsum([0, *parts[:-1]])
        self._shards, self._offsets = np.zeros((2, int(self.keys.max(initial=-1)) + 1, len(parts)), np.int64)
        self._shards[self.keys] = [[extent.shard for extent in each] for each in extents]
        self._offsets[self.keys] = [[extent.offset for extent in each] for each in extents]
        nbytes = [extent.nbytes for extent in extents[0]]
        self._nbytes = np.tile(np.array(nbytes, np.int64), (self.num_experts, 1))
        self._deltas = self._offsets % PAGE_NBYTES
        self._segments: list[tuple[int, mmap.mmap]] = []  # first slot, memory
        self._starts = np.zeros(0, np.int64)  # address of each slot

    @staticmethod
    def nbytes_per_slot(table: ExpertTable) -> int:
        """Bytes of one slot: an expert, its parts rounded up to whole pages."""
        return sum(part_nbytes(table))

    def resize(self, num_slots: int) -> None:
        self.num_slots = min(self.num_slots, num_slots)
        have = len(self._starts)
        if num_slots > have:
            segment = private_memory((num_slots - have) * self.slot_nbytes)
            start = np.frombuffer(segment, np.uint8).ctypes.data
            self._segments = [*self._segments, (have, segment)]
            self._starts = np.append(self._starts, start + np.arange(num_slots - have) * self.slot_nbytes)
        for first, segment in self._segments:
            start = max(0, num_slots - first) * self.slot_nbytes
            start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if start < len(segment):
                segment.madvise(_GIVE_BACK, start, len(segment) - start)
        self.num_slots = num_slots

    def reads(self, keys: NDArray[np.int64], slots: Sequence[int]) -> Reads:
        addresses = self._starts[slots][:, None] + self._part_starts
        return self._shards[keys], self._offsets[keys], self._nbytes[: len(keys)], addresses

    def places(self, keys: NDArray[np.int64], slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return the address of each part, [n, parts]."""
        addresses: NDArray[np.int64] = self._starts[slots][:, None] + self._part_starts + self._deltas[keys]
        return addresses.view(np.uint64)

    def close(self) -> None:
        self.num_slots, self._starts = 0, self._starts[:0]
        while self._segments:
            self._segments.pop()[1].close()


def keys_of(table: ExpertTable) -> NDArray[np.int64]:
    """Return the key of every expert, ascending."""
    layers = [layer for layer in range(table.num_layers) if table.is_moe(layer)]
    first = np.array(layers, np.int64)[:, None] * table.num_experts
    return (first + np.arange(table.num_experts)).reshape(-1)


def part_nbytes(table: ExpertTable) -> list[int]:
    """Return the bytes of each part in a slot: the most that any expert needs, in whole pages."""
    sizes: list[list[int]] = []
    for layer in range(table.num_layers):
        if table.is_moe(layer):
            sizes.append([_room(extent.nbytes, Store.room(extent)) for extent in table.extents(layer, 0)])
    return [max(part) for part in zip(*sizes, strict=True)]


def _room(nbytes: int, room: int) -> int:
    """Return a part's whole pages; where experts are no whole pages, each begins elsewhere in its page."""
    return -(-(PAGE_NBYTES - 1 + nbytes) // PAGE_NBYTES) * PAGE_NBYTES if nbytes % PAGE_NBYTES else room
