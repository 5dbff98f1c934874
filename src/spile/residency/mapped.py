"""Turns mapped shards into the room of a pool that has every expert in its slot from the start, where all fits.

Files are used in place, with no load time. Faulting experts in a page at a time is many times slower than reading them,
so until the files have been made present once, in the background, the experts that a token wants are touched by reader
threads first.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spile import _core
from spile.residency.experts import ExpertTable
from spile.residency.pages import keys_of
from spile.residency.pool import Room

_NO_FILE = 2**64 - 1  # a request with this descriptor makes mapped pages present
_PIECE_NBYTES = 4 << 20


class MappedRoom(Room):
    """Every expert in place in mapped shards, in the slot of its own number."""

    def __init__(self, table: ExpertTable, shard_addresses: Sequence[int], touch: Touch | None) -> None:
        self.num_experts, self.keys = table.num_experts, keys_of(table)
        self.slot_nbytes, self._touch = table.expert_nbytes, touch
        self.num_slots = num_keys = int(self.keys.max(initial=-1)) + 1
        self._part_nbytes: list[int] = []
        self._addresses = np.zeros((num_keys, 3), np.uint64)
        for key in self.keys.tolist():
            extents = table.extents(*divmod(key, self.num_experts))
            self._part_nbytes = [extent.nbytes for extent in extents]
            self._addresses[key] = [shard_addresses[extent.shard] + extent.offset for extent in extents]

    def places(self, keys: NDArray[np.int64], slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return the address of each part, [n, parts]."""
        addresses: NDArray[np.uint64] = self._addresses[keys]
        if self._touch is not None and not self._touch.is_complete():
            self._touch.touch(addresses, self._part_nbytes)
        return addresses


def touch_reader() -> _core.Reader:
    """Make the threads that touch whole files in the background."""
    return _core.Reader(2)


def touch_requests(ranges: Sequence[tuple[int, int]]) -> NDArray[np.uint64]:
    """Return requests [n, 5] that make (address, nbytes) ranges present, piece by piece."""
    pieces = [
        (_NO_FILE, 0, min(_PIECE_NBYTES, nbytes - start), 0, address + start)
        for address, nbytes in ranges
        for start in range(0, nbytes, _PIECE_NBYTES)
    ]
    return np.array(pieces, np.uint64).reshape(-1, 5)


class Touch:
    """Makes mapped pages present, in the background as a whole and at once where somebody waits."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Start making (address, nbytes) ranges present."""
        self._front, self._back = _core.Reader(8), touch_reader()
        self._ticket = self._back.submit(touch_requests(ranges))
        self._complete = False
        # Also at exit, where nobody closed: the threads must not touch pages that are being unmapped.
        self._end = weakref.finalize(self, _end, self._front, self._back)
        self.stall_seconds = 0.0

    def is_complete(self) -> bool:
        if not self._complete:
            self._complete = self._back.is_done(self._ticket)
        return self._complete

    def touch(self, addresses: NDArray[np.uint64], part_nbytes: list[int]) -> None:
        """Make the experts at `addresses` [n, 3] present. Blocks."""
        requests = np.empty((addresses.size, 5), np.uint64)
        requests[:, 0], requests[:, 1], requests[:, 3] = _NO_FILE, 0, 0
        requests[:, 2] = np.tile(np.array(part_nbytes, np.uint64), len(addresses))
        requests[:, 4] = addresses.reshape(-1)
        started = time.perf_counter()
        self._front.wait(self._front.submit(requests))
        self.stall_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Stop. May be called twice."""
        self._end()


def _end(front: _core.Reader, back: _core.Reader) -> None:
    back.cancel()
    front.drain()
    back.drain()
