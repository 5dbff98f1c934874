"""A pool of experts over a fake store, in rooms of every kind, and everything that must hold of it.

The store brings the bytes late, in any order, and writes rubbish first, as a disk may.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spile.errors import ReadError
from spile.residency.experts import Extent
from spile.residency.pages import Pages, keys_of
from spile.residency.policy import Policy
from spile.residency.pool import Order, Pool, Reads, Room
from spile.residency.store import ENDED, Store

PARTS_NBYTES = (5000, 4096, 300)  # of gate, up, down: no alignment anywhere


class FakeTable:
    """L layers of E experts that lie one after the other in one file, behind an odd header; the first layers
    may be dense.
    """

    def __init__(self, num_layers: int = 4, num_experts: int = 8, num_dense: int = 0) -> None:
        self.num_layers, self.num_experts, self.num_dense = num_layers, num_experts, num_dense
        self.expert_nbytes = sum(PARTS_NBYTES)
        nbytes = 77 + num_layers * num_experts * self.expert_nbytes
        self.content = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)

    def is_moe(self, layer: int) -> bool:
        return layer >= self.num_dense

    def extents(self, layer: int, expert: int) -> tuple[Extent, Extent, Extent]:
        gate, up, down = PARTS_NBYTES
        start = 77 + (layer * self.num_experts + expert) * self.expert_nbytes
        return Extent(0, start, gate), Extent(0, start + gate, up), Extent(0, start + gate + up, down)


class FakeStore:
    """Reads end when somebody waits, or when chance has it; `failing` are (layer-wide) extents that fail."""

    delta = staticmethod(Store.delta)

    def __init__(self, table: FakeTable, seed: int = 0, *, is_direct: bool) -> None:
        """Direct reads write whole pages."""
        self.table, self.is_direct = table, is_direct
        self.rng = np.random.default_rng(seed)
        self.pending: dict[int, tuple[Sequence[Extent], Sequence[int]]] = {}
        self.failing: set[Extent] = set()
        self.failed: set[int] = set()
        self.waited_for: set[int] = set()  # tickets that somebody may wait for
        self.num_submitted = self.num_drains = 0
        self.is_drain_interrupted = False

    def _submit(self, extents: Sequence[Extent], addresses: Sequence[int]) -> int:
        self.num_submitted += 1
        self.pending[self.num_submitted] = (extents, addresses)
        for extent, address in zip(extents, addresses, strict=True):
            assert address % 4096 == 0 or not self.is_direct
            first, nbytes = (
                (0, Store.room(extent)) if self.is_direct else (Store.delta(extent), extent.nbytes)
            )
            ctypes.memset(address + first, 0xEE, nbytes)
        if self.rng.random() < 0.2 and not self.failing.intersection(extents):  # in the page cache
            self._end(self.num_submitted)
            return ENDED
        self.waited_for.add(self.num_submitted)
        return self.num_submitted

    def submit_groups(self, shards: Any, offsets: Any, nbytes: Any, addresses: Any) -> list[int]:
        rows = zip(shards.tolist(), offsets.tolist(), nbytes.tolist(), addresses.tolist(), strict=True)
        return [self._submit([Extent(*e) for e in zip(s, o, n, strict=True)], a) for s, o, n, a in rows]

    def is_done(self, ticket: int) -> bool:
        if self.rng.random() < 0.4:
            self._end(ticket)
        return ticket not in self.pending

    def wait(self, ticket: int) -> None:
        if ticket == ENDED:
            return
        self.waited_for.remove(ticket)  # once, and not after a drain
        self._end(ticket)
        if ticket in self.failed:
            self.failed.remove(ticket)
            raise ReadError("this read was to fail")

    def drain(self) -> None:
        self.num_drains += 1
        for ticket in list(self.pending):
            if self.rng.random() < 0.5:
                self._end(ticket)
            else:  # it had not begun
                del self.pending[ticket]
        if self.is_drain_interrupted:
            self.is_drain_interrupted = False
            raise KeyboardInterrupt
        self.waited_for.clear()
        self.failed.clear()

    def end_some(self) -> None:
        for ticket in list(self.pending):
            if self.rng.random() < 0.5:
                self._end(ticket)

    def _end(self, ticket: int) -> None:
        extents, addresses = self.pending.pop(ticket, ((), ()))
        for extent, address in zip(extents, addresses, strict=True):
            if extent in self.failing:
                self.failed.add(ticket)
                continue
            data = self.table.content[extent.offset : extent.offset + extent.nbytes]
            ctypes.memmove(address + Store.delta(extent), data.ctypes.data, extent.nbytes)


class FakeRoom(Room):
    """As small as a room can be: an array a slot and part."""

    def __init__(self, table: Any) -> None:
        self.table, self.num_experts, self.keys = table, table.num_experts, keys_of(table)
        self.slot_nbytes, self.num_slots = sum(PARTS_NBYTES), 0
        self.slots: list[list[NDArray[np.uint8]]] = []

    def resize(self, num_slots: int) -> None:
        self.num_slots = min(self.num_slots, num_slots)
        new = [[np.zeros(n, np.uint8) for n in PARTS_NBYTES] for _ in range(num_slots - len(self.slots))]
        self.slots = [*self.slots[:num_slots], *new]
        self.num_slots = num_slots

    def reads(self, keys: NDArray[np.int64], slots: Sequence[int]) -> Reads:
        extents = np.array([self.table.extents(*divmod(int(key), self.num_experts)) for key in keys])
        starts = np.array([[part.ctypes.data for part in self.slots[slot]] for slot in slots])
        shards, offsets, nbytes = extents.transpose(2, 0, 1)
        return shards, offsets, nbytes, starts - offsets % 4096

    def places(self, keys: NDArray[np.int64], slots: NDArray[np.int32]) -> NDArray[Any]:
        return np.array([[part.ctypes.data for part in self.slots[slot]] for slot in slots.tolist()])

    def close(self) -> None:
        self.slots, self.num_slots = [], 0


def make_bank(table: Any) -> Any:
    """The room of the mlx engine, of parts of bytes; the last is put in place after the read."""
    import mlx.core as mx

    from spile.engines.mlx.banks import Bank
    from spile.engines.mlx.experts import Part, Piece

    names = ("gate", "up", "down")
    layout = tuple(Part(n, (size,), mx.uint8, size) for n, size in zip(names, PARTS_NBYTES, strict=True))
    view: Any = SimpleNamespace(itemsize=1, shape=(1, 300), strides=(300, 1), negated=False)

    def pieces(layer: int, expert: int) -> list[Any]:
        gate, up, down = table.extents(layer, expert)
        return [Piece(0, gate, view, None), Piece(1, up, view, None), Piece(2, down, view, (slice(0, 300),))]

    layers: Any = [
        SimpleNamespace(
            index=layer,
            num_experts=table.num_experts,
            layout=layout,
            expert_nbytes=sum(PARTS_NBYTES),
            pieces=lambda expert, layer=layer: pieces(layer, expert),
        )
        for layer in range(table.num_layers)
        if table.is_moe(layer)
    ]
    return Bank(layers, table.num_experts)


ROOMS: dict[str, Callable[[Any], Any]] = {"fake": FakeRoom, "pages": Pages, "bank": make_bank}
MakePool = Callable[..., "CheckedPool"]


class CheckedPool:
    """A pool over a fake store, and everything that must hold of it."""

    def __init__(self, room: str, num_slots: int, seed: int = 0, **sizes: int) -> None:
        self.table = FakeTable(**sizes)
        self.store = FakeStore(self.table, seed, is_direct=room == "pages")
        self.policy = Policy(self.table.num_layers, self.table.num_experts)
        store: Any = self.store
        self.room = ROOMS[room](self.table)
        self.slots = Pool(self.room, store, self.policy, num_slots)

    def fetch(
        self, layer: int, experts: Sequence[int], order: Order, guess: Sequence[int] | None = None
    ) -> Iterator[Any]:
        """`guess` is what the next layer may want, the likeliest first."""
        ids = np.array(sorted(experts), np.int32)
        following = (layer + 1) % self.table.num_layers
        foretell = None if guess is None else lambda: (following, np.array(guess, np.int32))
        return self.slots.fetch(layer, ids, np.ones(len(ids), np.int32), order=order, foretell=foretell)

    def run(
        self,
        layer: int,
        experts: Sequence[int],
        order: Order = "ready",
        guess: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Fetch and check one layer; return the ids of each batch."""
        resident = self.resident(layer)
        batches: list[list[int]] = []
        with closing(self.fetch(layer, experts, order, guess)) as fetched:  # type: ignore[type-var]
            for ids, addresses in fetched:
                self.check_bytes(layer, ids, addresses)
                self.check_table()
                self.store.end_some()
                self.check_bytes(layer, ids, addresses)  # still, whatever was read meanwhile
                batches.append(ids.tolist())
        found = [expert for batch in batches for expert in batch]
        assert sorted(found) == sorted(experts)  # each exactly once
        hits = sorted(set(experts) & resident)
        if order == "ascending":
            assert found == sorted(found)
        elif hits:
            assert set(hits) <= set(batches[0])  # residents do not wait
        self.check_idle()
        return batches

    def resident(self, layer: int) -> set[int]:
        slots = self.slots.slots_of(layer, np.arange(self.table.num_experts))
        return set(np.flatnonzero(slots >= 0).tolist())

    def check_bytes(self, layer: int, ids: NDArray[np.int32], places: NDArray[Any]) -> None:
        if isinstance(self.room, FakeRoom | Pages):
            addresses = places.tolist()
        else:  # a bank's rows
            parts = [rows for _, rows in self.room.parts]
            addresses = [[rows[slot].ctypes.data for rows in parts] for slot in places.tolist()]
        for expert, starts in zip(ids.tolist(), addresses, strict=True):
            for extent, start in zip(self.table.extents(layer, expert), starts, strict=True):
                wanted = self.table.content[extent.offset : extent.offset + extent.nbytes].tobytes()
                assert ctypes.string_at(start, extent.nbytes) == wanted

    def check_table(self) -> None:
        slots = self.slots
        for slot, key in enumerate(slots._slot_to_key):
            assert key < 0 or slots._key_to_slot[key] == slot
        held = slots._key_to_slot[slots._key_to_slot >= 0]
        assert len(set(held.tolist())) == len(held) == slots.num_resident <= slots.num_slots

    def check_idle(self) -> None:
        """Between layers nothing is in use or in flight but what is read ahead, and every other slot is either free
        or holds an expert.
        """
        slots = self.slots
        self.check_table()
        coming = [*slots._ahead, *slots._strays]
        assert len(coming) <= slots.num_slots // 4
        in_use = slots._is_pinned[slots._slot_to_key]
        in_use[[load.slot for load in coming]] = True
        assert slots._in_use.tolist() == in_use.tolist()
        assert set(self.store.pending) <= {load.ticket for load in coming}
        holding = np.flatnonzero(slots._slot_to_key >= 0).tolist()
        held = [*slots._free, *holding, *(load.slot for load in coming)]
        assert sorted(held) == list(range(slots.num_slots))
        for slot in holding:
            layer, expert = divmod(int(slots._slot_to_key[slot]), self.table.num_experts)
            key, places = slots._slot_to_key[slot : slot + 1], np.array([slot], np.int32)
            self.check_bytes(layer, np.array([expert], np.int32), self.room.places(key, places))
