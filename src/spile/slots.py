"""The experts in memory: one pool of slots, and the table (layer, expert) -> slot that changes with it.

It hands out addresses of packed codes and waits for reads. It knows no arithmetic, and asks `policy` whom to give up.

A slot is free, loading, or holds one expert; one that is loading or in use by the engine is never overwritten. An
expert is resident from the moment its read ended well: a failed read leaves its slot free.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spile.experts import ExpertTable
from spile.policy import Policy
from spile.store import PAGE_NBYTES, Store, private_memory

Batch = tuple[NDArray[np.int32], NDArray[np.uint64]]  # expert ids [n], addresses [n, 3] of gate, up, down
_FREE = -1
# Loads in flight at a time. 16 experts are 48 reads: enough to keep every reader thread busy, few enough that a
# long list of misses does not give up experts long before their successors arrive.
_MAX_IN_FLIGHT = 16


class _Load(NamedTuple):
    ticket: int
    expert: int
    slot: int


class Slots:
    """A pool of S slots over the experts of one model.

    Invariant: `slot_to_key[s] == k` exactly when `key_to_slot[k] == s`, and slot s then holds expert k whole.
    """

    def __init__(self, table: ExpertTable, store: Store, policy: Policy, num_slots: int) -> None:
        """Reserve the pool; memory is taken as slots are first filled."""
        assert num_slots >= 1, "a pool needs a slot"
        self._table, self._store, self._policy = table, store, policy
        self._num_experts = table.num_experts
        self._part_nbytes = _part_nbytes(table)
        self.slot_nbytes = sum(self._part_nbytes)
        self.num_slots = num_slots
        self._pool = private_memory(num_slots * self.slot_nbytes)
        self._base = np.frombuffer(self._pool, np.uint8).ctypes.data
        num_keys = table.num_layers * table.num_experts
        self._key_to_slot = np.full(num_keys, _FREE, np.int32)
        self._slot_to_key = np.full(num_slots, _FREE, np.int64)
        self._addresses = np.zeros((num_keys, 3), np.uint64)
        self._in_use = np.zeros(num_slots, bool)
        self._free = list(range(num_slots - 1, -1, -1))
        self.hits = self.misses = self.evictions = 0

    @staticmethod
    def nbytes_per_slot(table: ExpertTable) -> int:
        """Bytes of one slot: an expert, its parts rounded up to whole pages."""
        return sum(_part_nbytes(table))

    @property
    def num_resident(self) -> int:
        return int((self._slot_to_key != _FREE).sum())

    def fetch(self, layer: int, ids: NDArray[np.int32], counts: NDArray[np.int32]) -> Iterator[Batch]:
        """Yield every expert of `ids` (ascending, each once) in batches: residents first, then as reads end.

        A batch's addresses hold until the next batch is asked for. Misses are read in file order, as many ahead
        as there are slots that nobody needs any more.

        Raises: ReadError; nothing that failed is resident then, and what was in flight has ended.
        """
        keys = layer * self._num_experts + ids.astype(np.int64)
        slots = self._key_to_slot[keys]
        is_hit = slots != _FREE
        self.hits += int(is_hit.sum())
        self.misses += len(ids) - int(is_hit.sum())
        self._policy.choose(keys, counts)
        hit_slots = slots[is_hit]
        self._in_use[hit_slots] = True
        waiting = deque(int(expert) for expert in ids[~is_hit])
        loading: deque[_Load] = deque()
        try:
            self._start_loads(layer, waiting, loading)
            if len(hit_slots):
                yield ids[is_hit], self._addresses[keys[is_hit]]
                self._in_use[hit_slots] = False
            while waiting or loading:
                self._start_loads(layer, waiting, loading)
                assert loading, "some slot is free, or could be"
                batch = self._finish_loads(layer, loading)
                self._start_loads(layer, waiting, loading)
                experts = np.array([load.expert for load in batch], np.int32)
                yield experts, self._addresses[layer * self._num_experts + experts.astype(np.int64)]
                self._in_use[[load.slot for load in batch]] = False
        finally:
            self._in_use[hit_slots] = False
            self._settle(layer, loading)

    def lend(self, nbytes: int) -> None:
        """Give up experts worth `nbytes` and hand their memory back to the system; later loads take it again."""
        wanted = min(self.num_slots, -(-nbytes // self.slot_nbytes))
        for slot in range(self.num_slots - wanted, self.num_slots):
            if self._slot_to_key[slot] != _FREE and not self._in_use[slot]:
                self._evict(slot)
                self._free.append(slot)
        page = mmap.PAGESIZE
        start = -(-(self.num_slots - wanted) * self.slot_nbytes // page) * page
        self._pool.madvise(mmap.MADV_DONTNEED, start, len(self._pool) - start)

    def _start_loads(self, layer: int, waiting: deque[int], loading: deque[_Load]) -> None:
        room = min(len(waiting), _MAX_IN_FLIGHT - len(loading))
        if room <= 0:
            return
        for slot in self._take_slots(layer, room):
            expert = waiting.popleft()
            extents = self._table.extents(layer, expert)
            ticket = self._store.submit(extents, self._part_addresses(slot))
            self._in_use[slot] = True
            loading.append(_Load(ticket, expert, slot))

    def _finish_loads(self, layer: int, loading: deque[_Load]) -> list[_Load]:
        """Wait for the first load in flight; take along those behind it that have ended too."""
        batch: list[_Load] = []
        while loading and (not batch or self._store.is_done(loading[0].ticket)):
            load = loading[0]
            self._store.wait(load.ticket)  # raises with the load still listed: _settle frees its slot
            loading.popleft()
            self._admit(layer, load)
            batch.append(load)
        return batch

    def _settle(self, layer: int, loading: deque[_Load]) -> None:
        """End what is still in flight when the engine stopped early; keep what arrived whole."""
        for load in loading:
            try:
                self._store.wait(load.ticket)
            except Exception:  # the error that stopped the engine is the one to tell
                self._free.append(load.slot)
            else:
                self._admit(layer, load)
            self._in_use[load.slot] = False
        loading.clear()

    def _admit(self, layer: int, load: _Load) -> None:
        key = layer * self._num_experts + load.expert
        extents = self._table.extents(layer, load.expert)
        parts = self._part_addresses(load.slot)
        for part, (extent, address) in enumerate(zip(extents, parts, strict=True)):
            self._addresses[key, part] = address + self._store.delta(extent)
        self._key_to_slot[key] = load.slot
        self._slot_to_key[load.slot] = key

    def _take_slots(self, layer: int, count: int) -> list[int]:
        """Return up to `count` slots to fill: free ones, then those of the experts wanted latest."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        missing = count - len(taken)
        if missing:
            candidates = np.flatnonzero(~self._in_use & (self._slot_to_key != _FREE))
            if missing < len(candidates):
                rank = self._policy.rank(layer, self._slot_to_key[candidates])
                candidates = candidates[np.argpartition(-rank, missing - 1)[:missing]]
            for slot in candidates:
                self._evict(int(slot))
                taken.append(int(slot))
        return taken

    def _evict(self, slot: int) -> None:
        self._key_to_slot[self._slot_to_key[slot]] = _FREE
        self._slot_to_key[slot] = _FREE
        self.evictions += 1

    def _part_addresses(self, slot: int) -> tuple[int, int, int]:
        start = self._base + slot * self.slot_nbytes
        gate, up, _ = self._part_nbytes
        return start, start + gate, start + gate + up


def _part_nbytes(table: ExpertTable) -> tuple[int, int, int]:
    """Room of gate, up and down in a slot: the most that any expert needs, in whole pages."""
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
