"""Who is in memory: a pool of slots over the experts of a model, and the table (layer, expert) -> slot.

It deals in ids alone, for every engine. Where a slot's bytes lie, and how they come there, is its Room's to know: pages
of a process (`pages.py`), mapped files (`mapped.py`), rows of MLX arrays. Whom to give up it asks `policy`.

A slot is free, loading, or holds one expert; one that is loading or in use by the engine is never overwritten. An
expert is resident from the moment its read ended well: a failed read leaves its slot free.

A KeyboardInterrupt may come between any two statements and in any thread: from a signal, a callback, a generator that
is closed. One array is true at every moment: `_slot_to_key` names an expert only while its slot holds it whole, and
forgets it before a read into the slot begins. All else follows from that array. What is broken off leaves `_change`
set, and whatever comes next then ends the reads in flight and derives the rest anew. No signal is held back, so nobody
waits for a layer to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spile.errors import ReadError
from spile.residency.policy import NEVER, Policy
from spile.residency.store import ENDED, Store

# Says which layer comes next, and which experts it may want, the likeliest first.
Foretell = Callable[[], tuple[int, NDArray[np.int32]]]
Batch = tuple[
    NDArray[np.int32], NDArray[Any]
]  # expert ids [n], and their places [n, ..], as the room gives them
# "ready": residents first, the others as their reads end. "ascending": as `ids`, in runs. "together": in as few
# batches as there are slots for.
Order = Literal["ready", "ascending", "together"]
_FREE = -1
# Loads in flight at a time. 16 experts are 48 reads: enough to keep every reader thread busy, few enough that
# a long list of misses does not give up experts long before their successors arrive.
_MAX_IN_FLIGHT = 16
_LEAST_IN_FLIGHT = 8  # at 4, a prompt was read 10 % slower from the disk in 16 slots
# Experts that are read before their layer asks, of the likelier three quarters that are foretold. Decode from the disk
# at 300 MB, 630 MB, 1 GB and 2 GB is 7, 20, 26 and 14 % faster with 4, and reads 2 to 12 % more; with 6, or of all that
# are foretold, no faster (full-size random model, 1.3 GB/s, 2026-11-30).
_MOST_AHEAD = 4
_LAST_TO_GO = 1e12  # layers from now: behind all that the policy ranks


# How n experts come into slots, m reads each: shards, offsets, bytes, addresses, [n, m]. For `Store.submit_groups`.
Reads = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


class Room(Protocol):
    """Memory for slots. It does not know which of them hold something. What it does by itself is for a room where all
    is in place for good.
    """

    num_experts: int  # of a layer: the key of an expert is layer * num_experts + expert
    keys: NDArray[np.int64]  # of all experts that the slots are for
    slot_nbytes: int
    num_slots: int  # that may be written to; right also where `resize` was broken off

    def resize(self, num_slots: int) -> None:
        """Have memory for so many slots: of those that there are before and after, bytes stay; the memory of others
        goes back to the system.
        """
        raise AssertionError("nobody resizes what is in place")

    def reads(self, keys: NDArray[np.int64], slots: Sequence[int]) -> Reads:
        """Say how experts of one layer come into slots. From here on nobody reads what the slots held before."""
        raise AssertionError("nothing is missing where all is in place")

    def arrive(self, slots: Sequence[int]) -> None:
        """Do what is left to do once the reads into slots have ended."""
        return

    def places(self, keys: NDArray[np.int64], slots: NDArray[np.int32]) -> NDArray[Any]:
        """Say where resident experts lie, in the engine's terms."""
        ...

    def close(self) -> None:
        """Give all memory back. May be called twice."""
        return


class _Load(NamedTuple):
    ticket: int
    layer: int
    expert: int
    slot: int


class Pool:
    """Experts in the slots of one room.

    Invariant: `_slot_to_key[s] == k` exactly when slot s holds expert k whole; between two calls that ended well,
    `_key_to_slot[k] == s` then, too.
    """

    def __init__(self, room: Room, store: Store | None, policy: Policy, num_slots: int) -> None:
        """Without a store, every expert is in the slot of its own number, for good."""
        assert num_slots >= 1 or store is None, "a pool needs a slot"
        self._room, self._store, self._policy = room, store, policy
        self._num_experts, self.slot_nbytes = room.num_experts, room.slot_nbytes
        num_keys = int(room.keys.max(initial=-1)) + 1
        self._key_to_slot = np.full(num_keys, _FREE, np.int32)
        self._slot_to_key = np.zeros(0, np.int64)
        self._in_use = np.zeros(0, bool)
        # by key; the last is no expert's: key -1
        self._is_pinned = np.zeros(num_keys + 1, bool)
        self._is_kept = np.zeros(num_keys + 1, bool)
        self._has_kept = False
        self._is_whole = (
            False  # every expert is resident, and nothing will ever be given up but by a change of size
        )
        self._free: list[int] = []
        self._change: object | None = None  # a fetch or another change that has begun and has not ended well
        self._num_drains = 0  # of the store, that the loads below have survived
        self._ahead: list[_Load] = []  # begun for the next layer, which has not asked yet
        self._strays: list[_Load] = []  # for a layer that did not want them; resident once they are there
        self.hits = self.misses = self.evictions = 0
        self.unwanted = 0  # read ahead for a layer that did not ask for them
        if store is None:
            self._slot_to_key = np.full(num_keys, _FREE, np.int64)
            self._slot_to_key[room.keys] = room.keys
            self._rebuild()
        else:
            self.resize(num_slots)

    @property
    def num_slots(self) -> int:
        return len(self._slot_to_key)

    @property
    def num_resident(self) -> int:
        return int((self._slot_to_key != _FREE).sum())

    @property
    def may_hold_all(self) -> bool:
        """Whether there is a slot for every expert, so that none is ever given up."""
        return self.num_slots >= len(self._room.keys)

    def step(self, num_tokens: int) -> None:
        """Say of how many tokens the next fetches are, one pass over the layers."""
        self._policy.step(num_tokens)

    def slots_of(self, layer: int, ids: NDArray[Any]) -> NDArray[np.int32]:
        """Return the slots of experts that are resident, in the shape of `ids`."""
        slots: NDArray[np.int32] = self._key_to_slot[layer * self._num_experts + ids]
        return slots

    def fetch(
        self,
        layer: int,
        ids: NDArray[np.int32],
        counts: NDArray[np.int32],
        *,
        order: Order,
        foretell: Foretell | None = None,
    ) -> Generator[Batch, None, None]:
        """Yield every expert of `ids` (ascending, each once) in batches, reading those that are missing.

        Misses are read in file order, as far ahead as there are slots that this layer does not need any more. What
        `foretell` says, asked once, is read behind them. `counts` says how many tokens want each. A batch's places
        hold until the next is asked for. A fetch that is given up ends when it is closed, or else when the next one
        begins: its reads end, and what they brought is dropped.

        Raises: ReadError; nothing that failed is resident then, and what was in flight has ended.
        """
        if self._is_whole:
            self.hits += len(ids)
            keys = layer * self._num_experts + ids.astype(np.int64)
            yield ids, self._room.places(keys, self._key_to_slot[keys])
            return
        if self._is_broken:
            self._recover()
        self._change = mine = object()
        try:
            if self._room.num_slots < self.num_slots:  # some were lent
                self._room.resize(self.num_slots)
            yield from self._batches(layer, ids, counts, order, foretell)
            self._change = None
            if self.may_hold_all and not (self._ahead or self._strays):
                self._is_whole = len(self._free) == self.num_slots - len(self._room.keys)
        finally:
            if self._change is mine:  # not where a later fetch has begun before this one was collected
                self._recover()

    def load(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Read those of a layer's experts that are not resident. Blocks.

        Raises: ReadError.
        """
        missing = np.sort(ids[self._key_to_slot[layer * self._num_experts + ids.astype(np.int64)] == _FREE])
        if len(missing):
            for _ in self.fetch(layer, missing, np.zeros(len(missing), np.int32), order="together"):
                pass

    def pin(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Read these experts of a layer and keep them for good: nothing evicts, lends or shrinks them away.

        For an empty pool, so that they lie in its first slots. Blocks.

        Raises: ReadError.
        """
        self._is_pinned[layer * self._num_experts + ids] = True
        self.load(layer, ids)

    def keep(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Let these experts of a layer be the last to go, in place of those that `keep` named for it before."""
        first = layer * self._num_experts
        self._has_kept = True
        self._is_kept[first : first + self._num_experts] = False
        self._is_kept[first + ids] = True

    def release(self) -> None:
        """Keep no expert longer than the policy says."""
        self._is_kept[:] = False
        self._has_kept = False

    def resize(self, num_slots: int) -> None:
        """Grow or shrink the pool between layers. Experts beyond the new size are given up and their memory
        goes back to the system; what stays resident stays where it is.
        """
        assert num_slots >= 1, "a pool needs a slot"
        self._change_size(num_slots, num_slots)

    def lend(self, nbytes: int) -> None:
        """Give up experts worth `nbytes`, pinned ones excepted, and hand their memory back to the system until
        the next fetch.
        """
        if self._store is not None:  # mapped pages are the system's to take back
            num_left = self.num_slots - -(-nbytes // self.slot_nbytes)
            num_left = max(int(self._is_pinned.sum()), num_left)
            self._change_size(self.num_slots, min(num_left, self._room.num_slots))

    def close(self) -> None:
        """End what is in flight and give the memory back. May be called twice."""
        self._change_size(0, 0)
        self._room.close()

    def _change_size(self, num_slots: int, num_in_room: int) -> None:
        """Have so many slots, the first of them with memory, nothing in the others, and nothing in flight."""
        self._is_whole = False
        if self._is_broken or self._ahead or self._strays:
            self._change = self._change or object()  # a Ctrl-C may come while the store drops them
            self._recover()
        self._change = object()
        held = self._slot_to_key[:num_in_room]
        self.evictions += int((self._slot_to_key[num_in_room:] != _FREE).sum())
        self._slot_to_key = np.append(held, np.full(num_slots - len(held), _FREE))
        if self._store is not None:
            self._room.resize(num_in_room)
        self._rebuild()

    # -- a fetch --

    def _batches(
        self,
        layer: int,
        ids: NDArray[np.int32],
        counts: NDArray[np.int32],
        order: Order,
        foretell: Foretell | None,
    ) -> Generator[Batch, None, None]:
        loading = deque(self._join(layer, ids, order)) if self._ahead or self._strays else deque[_Load]()
        keys = layer * self._num_experts + ids.astype(np.int64)
        slots = self._key_to_slot[keys]
        is_hit = slots != _FREE
        num_hits = int(is_hit.sum())
        self.hits += num_hits
        self.misses += len(ids) - num_hits
        self._policy.choose(keys, counts)
        self._in_use[slots[is_hit]] = True
        coming = {load.expert for load in loading}
        misses = deque[int](expert for expert in ids[~is_hit].tolist() if expert not in coming)
        hits = deque[int](ids[is_hit].tolist())
        most = _MAX_IN_FLIGHT
        if order == "ascending":
            # A chunk wants nearly every expert of a layer: read too far ahead, it would give up all that a small
            # pool holds. One token's few misses are all wanted at once.
            most = max(_LEAST_IN_FLIGHT, min(most, self.num_slots // 4))
        elif order == "together":
            most = len(ids)
        elif len(misses) <= _MAX_IN_FLIGHT:
            self._start_loads(layer, misses, loading, most)
            if foretell is not None and not misses:
                self._read_ahead(*foretell())
            if not misses and all(load.ticket == ENDED for load in loading):
                self._admit(loading)
                slots = self._key_to_slot[keys]
                yield ids, self._room.places(keys, slots)
                self._in_use[slots] = self._is_pinned[keys]
                return
        choose = {"ready": self._next_ready, "ascending": self._next_ascending}.get(
            order, self._next_together
        )
        while hits or misses or loading:
            self._start_loads(layer, misses, loading, most)
            experts = np.array(choose(layer, hits, misses, loading), np.int32)
            if not len(experts):
                continue
            self._start_loads(layer, misses, loading, most)
            batch_keys = layer * self._num_experts + experts.astype(np.int64)
            slots = self._key_to_slot[batch_keys]
            yield experts, self._room.places(batch_keys, slots)
            self._in_use[slots] = self._is_pinned[batch_keys]

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
        while loading and self._reader.is_done(loading[0].ticket):
            experts.append(self._finish_load(loading))
        return experts

    def _next_together(
        self, layer: int, hits: deque[int], misses: deque[int], loading: deque[_Load]
    ) -> list[int]:
        """Take all that there were slots for; waits for it."""
        assert hits or loading, "some slot is free, or could be"
        experts = list(hits)
        hits.clear()
        while loading:
            experts.append(self._finish_load(loading))
        return sorted(experts)

    def _next_ascending(
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
            elif loading and (not experts or self._reader.is_done(loading[0].ticket)):
                experts.append(self._finish_load(loading))
            else:
                break
        if not experts:
            assert hits, "every slot is held by an expert that comes later"
            first = layer * self._num_experts
            last = max(at for at, expert in enumerate(hits) if not self._is_pinned[first + expert])
            expert, later = hits[last], deque[int]()
            del hits[last]
            slot = int(self._key_to_slot[first + expert])
            self._evict(np.array([slot]))
            self._in_use[slot] = False
            self._free.append(slot)
            while misses and misses[-1] > expert:
                later.appendleft(misses.pop())
            misses.append(expert)
            misses.extend(later)
        return experts

    def _start_loads(self, layer: int, waiting: deque[int], loading: deque[_Load], most: int) -> None:
        """Start what fits into `most` loads in flight, and into the slots that can be had."""
        count = min(len(waiting), most - len(loading))
        if count <= 0:
            return
        slots = self._take_slots(layer, count)
        if not slots:
            return
        experts = [waiting.popleft() for _ in slots]
        self._in_use[slots] = True
        reads = self._room.reads(layer * self._num_experts + np.array(experts), slots)
        tickets = self._reader.submit_groups(*reads)
        loading.extend(
            _Load(ticket, layer, expert, slot)
            for ticket, expert, slot in zip(tickets, experts, slots, strict=True)
        )

    def _take_slots(self, layer: int, count: int) -> list[int]:
        """Return up to `count` slots to fill: free ones, then those of the experts wanted latest."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        missing = count - len(taken)
        if missing:
            rank = self._policy.rank(layer, self._slot_to_key)
            if self._has_kept:
                rank[self._is_kept[self._slot_to_key]] -= _LAST_TO_GO
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

    def _finish_load(self, loading: deque[_Load]) -> int:
        """Wait for the first load in flight; return its expert, resident now."""
        load = loading[0]
        self._reader.wait(load.ticket)
        loading.popleft()
        self._admit([load])
        return load.expert

    def _admit(self, loads: Sequence[_Load]) -> None:
        """Make experts resident whose bytes are there."""
        slots = [load.slot for load in loads]
        keys = [load.layer * self._num_experts + load.expert for load in loads]
        self._room.arrive(slots)
        self._slot_to_key[slots] = keys  # from here on they are resident
        self._key_to_slot[keys] = slots

    @property
    def _reader(self) -> Store:
        assert self._store is not None, "everything is in place"
        return self._store

    # -- reading ahead --

    def _read_ahead(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Start reading what the next layer may want and is not there, behind what this one waits for."""
        most = min(_MOST_AHEAD, (self.num_slots - int(self._is_pinned.sum())) // 4) - len(self._strays)
        if most <= 0:
            return
        ids = ids[: -(-3 * len(ids) // 4)]
        missing = ids[self._key_to_slot[layer * self._num_experts + ids.astype(np.int64)] == _FREE]
        strays = {(load.layer, load.expert) for load in self._strays}
        # each once: values that are no numbers foretell nonsense
        likely = dict.fromkeys(missing.tolist())
        wanted = deque(expert for expert in likely if (layer, expert) not in strays)
        begun = deque[_Load]()
        self._num_drains = self._reader.num_drains
        self._start_loads(layer, wanted, begun, most)
        self._ahead = list(begun)

    def _join(self, layer: int, ids: NDArray[np.int32], order: Order) -> list[_Load]:
        """Return the loads in flight that this layer wants; the others become resident as they end. Where the order
        counts, all do at once.
        """
        wanted = set(ids.tolist()) if order == "ready" else set()
        mine: list[_Load] = []
        strays: list[_Load] = []
        for load in (*self._ahead, *self._strays):
            if load.layer == layer and load.expert in wanted:
                mine.append(load)
                continue
            self.unwanted += load in self._ahead
            if order != "ready" or self._reader.is_done(load.ticket):
                self._end_stray(load)
            else:
                strays.append(load)
        self._ahead, self._strays = [], strays
        return mine

    def _end_stray(self, load: _Load) -> None:
        """Wait for a load that nobody waits for, and keep what it brought; an error in it is nobody's."""
        try:
            self._reader.wait(load.ticket)
        except ReadError:
            self._free.append(load.slot)
        else:
            self._admit([load])
        self._in_use[load.slot] = self._is_pinned[self._slot_to_key[load.slot]]

    # -- what was broken off --

    @property
    def _is_broken(self) -> bool:
        """Whether a change was broken off, or somebody else dropped what the pool has in flight."""
        has_loads = bool(self._ahead or self._strays)
        return self._change is not None or (has_loads and self._num_drains != self._reader.num_drains)

    def _recover(self) -> None:
        """End what is in flight."""
        self._reader.drain()
        self._rebuild()

    def _rebuild(self) -> None:
        """Derive everything from `_slot_to_key`; nothing is in flight, and the change has ended."""
        self._ahead, self._strays = [], []
        held = np.flatnonzero(self._slot_to_key != _FREE)
        self._key_to_slot[:] = _FREE
        self._key_to_slot[self._slot_to_key[held]] = held
        self._in_use = self._is_pinned[self._slot_to_key]
        self._free = np.flatnonzero(self._slot_to_key == _FREE)[::-1].tolist()
        self._is_whole = len(held) == len(self._room.keys) > 0
        self._change = None
