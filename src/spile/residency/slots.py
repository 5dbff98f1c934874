"""The experts in memory: one pool of slots, and the table (layer, expert) -> slot that changes with it.

It hands out addresses of packed codes and waits for reads. It knows no arithmetic, and asks `policy` whom to
give up.

A slot is free, loading, or holds one expert; one that is loading or in use by the engine is never
overwritten. An expert is resident from the moment its read ended well: a failed read leaves its slot free.
"""

from __future__ import annotations

import mmap
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spile.errors import ReadError
from spile.residency.experts import ExpertTable
from spile.residency.places import Places, part_nbytes
from spile.residency.policy import NEVER, Policy
from spile.residency.store import ENDED, PAGE_NBYTES, Store, private_memory

# Says which layer comes next, and which experts it may want, the likeliest first.
Foretell = Callable[[], tuple[int, NDArray[np.int32]]]
Batch = tuple[NDArray[np.int32], NDArray[np.uint64]]  # expert ids [n], addresses [n, 3] of gate, up, down
_FREE = -1
_GIVE_BACK = mmap.MADV_FREE if sys.platform == "darwin" else mmap.MADV_DONTNEED
# Loads in flight at a time. 16 experts are 48 reads: enough to keep every reader thread busy, few enough that
# a long list of misses does not give up experts long before their successors arrive.
_MAX_IN_FLIGHT = 16
_LEAST_IN_FLIGHT = 8  # at 4, a prompt was read 10 % slower from the disk in 16 slots


# Experts that are read before their layer asks, of the likelier three quarters that are foretold. Decode from the disk
# at 300 MB, 630 MB, 1 GB and 2 GB is 7, 20, 26 and 14 % faster with 4, and reads 2 to 12 % more; with 6, or of all that
# are foretold, no faster (full-size random model, 1.3 GB/s, 2026-11-30).
_MOST_AHEAD = 4


class _Load(NamedTuple):
    ticket: int
    layer: int
    expert: int
    slot: int


class Slots:
    """A pool of S slots over the experts of one model.

    Invariant: `slot_to_key[s] == k` exactly when `key_to_slot[k] == s`, and slot s then holds expert k whole.
    A Ctrl-C may come between any two statements and break it; `slot_to_key` alone is true at every moment,
    and what follows such a fetch makes the rest agree with it first.
    """

    def __init__(self, table: ExpertTable, store: Store, policy: Policy, num_slots: int) -> None:
        """Reserve the pool; memory is taken as slots are first filled."""
        assert num_slots >= 1, "a pool needs a slot"
        self._store, self._policy = store, policy
        self._num_experts = table.num_experts
        parts = part_nbytes(table)
        self.slot_nbytes = sum(parts)
        self._part_starts = np.array([0, parts[0], parts[0] + parts[1]])
        self._places = Places.of(table)
        self._group_nbytes = np.tile(self._places.nbytes, (_MAX_IN_FLIGHT, 1))
        self._deltas = self._places.offsets % PAGE_NBYTES  # of each part behind the page that it begins in
        self._segments: list[mmap.mmap] = []
        self._starts = np.zeros(0, np.int64)  # address of each slot
        num_keys = table.num_layers * table.num_experts
        self._key_to_slot = np.full(num_keys, _FREE, np.int32)
        self._slot_to_key = np.zeros(0, np.int64)
        self._in_use = np.zeros(0, bool)
        self._is_pinned = np.zeros(0, bool)  # in use for good
        self._free: list[int] = []
        self._limit = 0  # slots from this one on are not to be used
        self._change: object | None = None  # a fetch or another change that has begun and has not ended well
        self._num_drains = 0  # of the store, that the loads below have survived
        self._ahead: list[_Load] = []  # begun for the next layer, which has not asked yet
        self._strays: list[
            _Load
        ] = []  # begun for a layer that did not want them; resident once they are there
        self.hits = self.misses = self.evictions = 0
        self.unwanted = 0  # read ahead for a layer that did not ask for them
        self.resize(num_slots)

    @staticmethod
    def nbytes_per_slot(table: ExpertTable) -> int:
        """Bytes of one slot: an expert, its parts rounded up to whole pages."""
        return sum(part_nbytes(table))

    @property
    def num_resident(self) -> int:
        return int((self._slot_to_key != _FREE).sum())

    def fetch(
        self,
        layer: int,
        ids: NDArray[np.int32],
        counts: NDArray[np.int32],
        *,
        in_order: bool,
        foretell: Foretell | None = None,
    ) -> Generator[Batch, None, None]:
        """Yield every expert of `ids` (ascending, each once) in batches, reading those that are missing.

        Where the order is free, residents come first and the others as their reads end; `in_order` keeps the
        ascending one. Misses are read in file order, as far ahead as there are slots that this layer does not
        need any more. What `foretell` says, asked once, is read behind them. `counts` says how many tokens want each.
        A batch's addresses hold until the next is asked for. A fetch that is given up ends when it is closed, or else
        when the next one begins: its reads end, and what they brought is dropped.

        Raises: ReadError; nothing that failed is resident then, and what was in flight has ended.
        """
        if self._is_broken:
            self._recover()
        self._change = mine = object()
        try:
            yield from self._batches(layer, ids, counts, in_order, foretell)
            self._change = None
        finally:
            if self._change is mine:  # not where a later fetch has begun before this one was collected
                self._recover()

    def _batches(
        self,
        layer: int,
        ids: NDArray[np.int32],
        counts: NDArray[np.int32],
        in_order: bool,
        foretell: Foretell | None,
    ) -> Generator[Batch, None, None]:
        loading = deque(self._join(layer, ids, in_order)) if self._ahead or self._strays else deque[_Load]()
        keys = layer * self._num_experts + ids.astype(np.int64)
        slots = self._key_to_slot[keys]
        is_hit = slots != _FREE
        self.hits += int(is_hit.sum())
        self.misses += len(ids) - int(is_hit.sum())
        self._policy.choose(keys, counts)
        self._in_use[slots[is_hit]] = True
        coming = {load.expert for load in loading}
        misses = deque[int](expert for expert in ids[~is_hit].tolist() if expert not in coming)
        hits = deque[int](ids[is_hit].tolist())
        # A chunk wants nearly every expert of a layer: read too far ahead, it would give up all that a small pool
        # holds. One token's few misses are all wanted at once.
        most = max(_LEAST_IN_FLIGHT, min(_MAX_IN_FLIGHT, self._limit // 4)) if in_order else _MAX_IN_FLIGHT
        if not in_order and len(misses) <= _MAX_IN_FLIGHT:
            self._start_loads(layer, misses, loading, most)
            if foretell is not None and not misses:
                self._read_ahead(*foretell())
            if not misses and all(load.ticket == ENDED for load in loading):
                self._admit(loading)
                slots = self._key_to_slot[keys]
                yield ids, self._addresses(keys, slots)
                self._in_use[slots] = self._is_pinned[slots]
                return
        choose = self._next_in_order if in_order else self._next_ready
        while hits or misses or loading:
            self._start_loads(layer, misses, loading, most)
            experts = np.array(choose(layer, hits, misses, loading), np.int32)
            if not len(experts):
                continue
            self._start_loads(layer, misses, loading, most)
            batch_keys = layer * self._num_experts + experts.astype(np.int64)
            slots = self._key_to_slot[batch_keys]
            yield experts, self._addresses(batch_keys, slots)
            self._in_use[slots] = self._is_pinned[slots]

    def _addresses(self, keys: NDArray[np.int64], slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Where the parts of resident experts lie, [n, 3]."""
        addresses: NDArray[np.int64] = self._starts[slots][:, None] + self._part_starts + self._deltas[keys]
        return addresses.view(np.uint64)

    def _next_ready(
        self, layer: int, hits: deque[int], misses: deque[int], loading: deque[_Load]
    ) -> list[int]:
        """Take all residents and the loads that have ended; waits for the first of these where nothing else is
        there.
        """
        experts = list(hits)
        hits.clear()
        if not experts:
            assert loading, "some slot is free, or could be"
            experts.append(self._finish_load(loading))
        while loading and self._store.is_done(loading[0].ticket):
            experts.append(self._finish_load(loading))
        return experts

    def _next_in_order(
        self, layer: int, hits: deque[int], misses: deque[int], loading: deque[_Load]
    ) -> list[int]:
        """Take the longest run of experts, in ascending order, that is there; waits where it would be empty.

        Returns nothing when a resident expert had to be given up so that an earlier one can be loaded: it is
        among the misses then.
        """
        experts: list[int] = []
        while hits or loading:
            if hits and (not loading or hits[0] < loading[0].expert) and (not misses or hits[0] < misses[0]):
                experts.append(hits.popleft())
            elif loading and (not experts or self._store.is_done(loading[0].ticket)):
                experts.append(self._finish_load(loading))
            else:
                break
        if not experts:
            assert hits, "every slot is held by an expert that comes later"
            held = [int(self._key_to_slot[layer * self._num_experts + expert]) for expert in hits]
            last = max(at for at, slot in enumerate(held) if not self._is_pinned[slot])
            expert, later = hits[last], deque[int]()
            del hits[last]
            self._evict_into_free(held[last])
            while misses and misses[-1] > expert:
                later.appendleft(misses.pop())
            misses.append(expert)
            misses.extend(later)
        return experts

    @property
    def num_slots(self) -> int:
        return self._limit

    def pin(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Read these experts of a layer and keep them for good: nothing evicts, lends or shrinks them away.

        For an empty pool, so that they lie in its first slots. Blocks.

        Raises: ReadError.
        """
        for some, _ in self.fetch(layer, ids, np.zeros(len(ids), np.int32), in_order=True):
            slots = self._key_to_slot[layer * self._num_experts + some.astype(np.int64)]
            self._is_pinned[slots] = self._in_use[slots] = True

    def resize(self, num_slots: int) -> None:
        """Grow or shrink the pool between tokens. Experts beyond the new size are given up and their memory
        goes back to the system; what stays resident stays where it is.
        """
        assert num_slots >= 1, "a pool needs a slot"
        self._end_all()
        missing = num_slots - len(self._starts)
        if missing > 0:
            segment = private_memory(missing * self.slot_nbytes)
            first = np.frombuffer(segment, np.uint8).ctypes.data
            grown = (
                [*self._segments, segment],
                np.append(self._starts, first + np.arange(missing) * self.slot_nbytes),
                np.append(self._slot_to_key, np.full(missing, _FREE)),
                np.append(self._in_use, np.zeros(missing, bool)),
                np.append(self._is_pinned, np.zeros(missing, bool)),
            )
            # together, as a Ctrl-C may come between two statements
            self._segments, self._starts, self._slot_to_key, self._in_use, self._is_pinned = grown
        self._give_back(num_slots)
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if self._slot_to_key[slot] == _FREE]
        self._limit = num_slots
        self._change = None

    def lend(self, nbytes: int) -> None:
        """Give up experts worth `nbytes`, pinned ones excepted, and hand their memory back to the system until
        later loads.
        """
        self._end_all()
        num_slots = -(-nbytes // self.slot_nbytes)
        self._give_back(max(int(self._is_pinned.sum()), self._limit - num_slots))
        self._free.sort(reverse=True)  # fill the slots that still have memory first
        self._change = None

    def _end_all(self) -> None:
        """End what is in flight between tokens, whose bytes are dropped, and begin a change."""
        if self._is_broken or self._ahead or self._strays:
            self._change = self._change or object()  # a Ctrl-C may come while the store drops them
            self._recover()
        self._change = object()

    @property
    def _is_broken(self) -> bool:
        """Whether a change was broken off, or somebody else dropped what the pool has in flight."""
        has_loads = bool(self._ahead or self._strays)
        return self._change is not None or (has_loads and self._num_drains != self._store.num_drains)

    def _give_back(self, first: int) -> None:
        """Give up what slots from `first` on hold, and their memory."""
        for slot in range(first, len(self._starts)):
            if self._slot_to_key[slot] != _FREE:
                assert not self._in_use[slot], (
                    "no layer is running, and pinned experts lie in the first slots"
                )
                self._evict_into_free(slot)
        page, slot = mmap.PAGESIZE, 0
        for segment in self._segments:
            start = max(0, first - slot) * self.slot_nbytes
            start = -(-start // page) * page
            if start < len(segment):
                segment.madvise(_GIVE_BACK, start, len(segment) - start)
            slot += len(segment) // self.slot_nbytes

    def _start_loads(self, layer: int, waiting: deque[int], loading: deque[_Load], most: int) -> None:
        """Start what fits into `most` loads in flight, and into the slots that can be had."""
        room = min(len(waiting), most - len(loading))
        if room <= 0:
            return
        slots = self._take_slots(layer, room)
        if not slots:
            return
        experts = [waiting.popleft() for _ in slots]
        keys = layer * self._num_experts + np.array(experts)
        addresses = self._starts[slots][:, None] + self._part_starts
        self._in_use[slots] = True
        shards, offsets, _ = self._places
        tickets = self._store.submit_groups(
            shards[keys], offsets[keys], self._group_nbytes[: len(keys)], addresses
        )
        loading.extend(
            _Load(ticket, layer, expert, slot)
            for ticket, expert, slot in zip(tickets, experts, slots, strict=True)
        )

    def _read_ahead(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Start reading what the next layer may want and is not there, behind what this one waits for."""
        room = min(_MOST_AHEAD, (self._limit - int(self._is_pinned.sum())) // 4) - len(self._strays)
        if room <= 0:
            return
        ids = ids[: -(-3 * len(ids) // 4)]
        missing = ids[self._key_to_slot[layer * self._num_experts + ids.astype(np.int64)] == _FREE]
        strays = {(load.layer, load.expert) for load in self._strays}
        # each once: values that are no numbers foretell nonsense
        likely = dict.fromkeys(missing.tolist())
        wanted = deque(expert for expert in likely if (layer, expert) not in strays)
        begun = deque[_Load]()
        self._num_drains = self._store.num_drains
        self._start_loads(layer, wanted, begun, room)
        self._ahead = list(begun)

    def _join(self, layer: int, ids: NDArray[np.int32], in_order: bool) -> list[_Load]:
        """Return the loads in flight that this layer wants; the others become resident as they end. Where the order
        counts, all do at once.
        """
        wanted = set() if in_order else set(ids.tolist())
        mine: list[_Load] = []
        strays: list[_Load] = []
        for load in (*self._ahead, *self._strays):
            if load.layer == layer and load.expert in wanted:
                mine.append(load)
                continue
            self.unwanted += load in self._ahead
            if in_order or self._store.is_done(load.ticket):
                self._settle(load)
            else:
                strays.append(load)
        self._ahead, self._strays = [], strays
        return mine

    def _settle(self, load: _Load) -> None:
        """Wait for a load that nobody waits for, and keep what it brought; an error in it is nobody's."""
        try:
            self._store.wait(load.ticket)
        except ReadError:
            self._free.append(load.slot)
        else:
            self._admit([load])
        self._in_use[load.slot] = self._is_pinned[load.slot]

    def _finish_load(self, loading: deque[_Load]) -> int:
        """Wait for the first load in flight; return its expert, resident now."""
        load = loading[0]
        self._store.wait(load.ticket)
        loading.popleft()
        self._admit([load])
        return load.expert

    def _recover(self) -> None:
        """End what is in flight, and make everything agree with `slot_to_key`."""
        self._store.drain()
        self._ahead, self._strays = [], []
        self._in_use[:] = self._is_pinned
        resident = np.flatnonzero(self._slot_to_key != _FREE)
        self._key_to_slot[:] = _FREE
        self._key_to_slot[self._slot_to_key[resident]] = resident
        self._free = [int(s) for s in np.flatnonzero(self._slot_to_key[: self._limit] == _FREE)[::-1]]
        self._change = None

    def _admit(self, loads: Sequence[_Load]) -> None:
        """Make experts resident whose bytes are there."""
        slots = [load.slot for load in loads]
        keys = [load.layer * self._num_experts + load.expert for load in loads]
        self._slot_to_key[slots] = keys  # from here on they are resident
        self._key_to_slot[keys] = slots

    def _take_slots(self, layer: int, count: int) -> list[int]:
        """Return up to `count` slots to fill: free ones, then those of the experts wanted latest."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        missing = count - len(taken)
        if missing:
            rank = self._policy.rank(layer, self._slot_to_key)
            rank[self._in_use] = NEVER
            latest = (
                np.argpartition(rank, -missing)[-missing:] if missing < len(rank) else np.arange(len(rank))
            )
            latest = latest[rank[latest] > NEVER]
            self._evict(latest)
            taken += latest.tolist()
        return taken

    def _evict(self, slots: NDArray[np.int64]) -> None:
        self._key_to_slot[self._slot_to_key[slots]] = _FREE
        self._slot_to_key[slots] = _FREE
        self.evictions += len(slots)

    def _evict_into_free(self, slot: int) -> None:
        self._evict(np.array([slot]))
        self._in_use[slot] = False
        self._free.append(slot)
