"""The experts in memory as MLX sees them: banks of arrays, one row a slot, and who is in which row.

A bank holds the experts of one layout (shapes and dtypes of their tensors): an array [S, ...] a tensor, made
once. The store reads straight into a row through the array's memory, after the computation that last read the
row was evaluated; which row that is, is data to MLX and never changes a result. Only this file writes into
arrays that MLX knows. It knows no arithmetic, and asks the policy whom to give up.

Sizes: S slots of a bank, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from spile.engines.mlx.experts import ExpertLayer, Layout, Piece
from spile.errors import CheckpointError
from spile.files.finite import DAMAGED_HINT
from spile.residency.policy import Policy
from spile.residency.store import PAGE_NBYTES, Store

_FREE = -1
# Bits of an exponent, all of which are set where a value is infinite or no number.
_INFINITIES: dict[Any, tuple[Any, Any]] = {
    mx.bfloat16: (np.uint16, np.uint16(0x7F80)),
    mx.float16: (np.uint16, np.uint16(0x7C00)),
    mx.float32: (np.uint32, np.uint32(0x7F800000)),
}


class Bank:
    """Arrays [S, ...] for the experts of one layout.

    Invariant: `slot_to_key[s] == k` exactly when slot s holds expert k whole; it is _FREE otherwise.
    """

    def __init__(self, layout: Layout, num_slots: int) -> None:
        self.layout = layout
        self.slot_nbytes = sum(part.nbytes for part in layout)
        self.arrays: list[Any] = []
        self.rows: list[NDArray[np.uint8]] = []  # the same memory, [S, bytes of a row]
        self.slot_to_key = np.full(num_slots, _FREE, np.int64)
        self.in_use = np.zeros(num_slots, bool)
        for part in layout:
            self._append(part, num_slots)

    @property
    def num_slots(self) -> int:
        return len(self.slot_to_key)

    def resize(self, num_slots: int) -> None:
        """Make the arrays anew with another number of slots; the experts that fit stay. Array by array, so
        that only one is there twice.
        """
        kept = np.flatnonzero(self.slot_to_key != _FREE)[:num_slots]
        old_rows, self.rows = self.rows, []
        old_arrays, self.arrays = self.arrays, []
        for part in self.layout:
            old = old_rows.pop(0)
            old_arrays.pop(0)
            self._append(part, num_slots)
            self.rows[-1][: len(kept)] = old[kept]
            del old
            mx.clear_cache()
        keys = self.slot_to_key[kept]
        self.slot_to_key = np.full(num_slots, _FREE, np.int64)
        self.slot_to_key[: len(kept)] = keys
        self.in_use = np.zeros(num_slots, bool)

    def view(self, part: int, num_rows: int) -> Any:
        """Return the array of a part as if it had so many rows: MLX's Metal kernels are chosen by rows wanted for
        each row there is, and a bank must not differ in that from a layer with all its experts. Rows past the
        bank's end are never asked for. Cost: none, the memory is the bank's.

        On the CPU, which has one kernel, a slot's place is taken modulo the rows: never fewer than the bank's.
        """
        array = self.arrays[part]
        if mx.default_device() == mx.Device(mx.cpu):
            num_rows = max(num_rows, self.num_slots)
        strides = [1]
        for size in reversed(array.shape[1:]):
            strides.insert(0, strides[0] * size)
        return mx.as_strided(array, (num_rows, *array.shape[1:]), strides)

    def check_finite(self, slot: int, layer: ExpertLayer, expert: int) -> None:
        """Look at a slot's scales, biases and offsets, which a clamp could hide when they are not finite; not at
        unquantized weights, whose products show it.

        Raises: CheckpointError.
        """
        for part, rows in zip(self.layout, self.rows, strict=True):
            if part.dtype not in _INFINITIES or part.name.endswith("weight"):
                continue
            dtype, infinity = _INFINITIES[part.dtype]
            if (rows[slot].view(dtype) & infinity == infinity).any():
                raise CheckpointError(
                    f"{layer.path}.{part.name}: expert {expert} holds a value that is not finite",
                    DAMAGED_HINT,
                )

    def fill(self, slot: int, piece: Piece, data: NDArray[np.uint8]) -> None:
        """Put what was read for a piece that is no whole part, the bytes of its span, in place."""
        part, view = self.layout[piece.part], piece.view
        dtype = np.dtype(f"u{view.itemsize}")
        source = np.ndarray(view.shape[1:], dtype, data.data, 0, view.strides[1:])
        if view.negated:
            source = source ^ dtype.type(1 << (8 * view.itemsize - 1))
        row = self.rows[piece.part][slot].view(dtype).reshape(part.shape)
        assert piece.place is not None
        row[piece.place] = source

    def _append(self, part: Any, num_slots: int) -> None:
        array = mx.zeros((num_slots, *part.shape), part.dtype)
        mx.eval(array)
        raw = array.view(mx.uint8) if array.ndim > 1 else array.reshape(num_slots, 1).view(mx.uint8)
        mx.eval(raw)
        rows = np.array(raw, copy=False).reshape(num_slots, part.nbytes)
        self.arrays.append(array)
        self.rows.append(rows)


@dataclass(frozen=True)
class Load:
    """Reads in flight for one expert."""

    ticket: int
    key: int
    slot: int
    staged: tuple[tuple[Piece, NDArray[np.uint8]], ...]  # pieces that are put in place when they are there


class Pool:
    """Slots over the experts of one model. A key is layer * most experts of a layer + expert."""

    def __init__(
        self, layers: Sequence[ExpertLayer], store: Store, policy: Policy, num_slots: dict[Layout, int],
        num_pinned: int = 0,
    ) -> None:  # fmt: skip
        """`num_slots` says how many of each layout; the first `num_pinned` experts of a layer stay once read, which
        `read_pinned` does.
        """
        assert not store.is_direct, "reads land in arrays, which start anywhere in a page"
        self._layers, self._store, self._policy = list(layers), store, policy
        self.num_experts = max(layer.num_experts for layer in layers)
        self.num_pinned = num_pinned
        self._key_to_slot = np.full(len(layers) * self.num_experts, _FREE, np.int32)
        self.banks = {layout: Bank(layout, count) for layout, count in num_slots.items()}
        self._pending: list[Any] = []  # results that read slots and may not be evaluated yet
        self._loading: list[Load] = []
        self._last_layer = len(layers)
        self._looked_at = np.zeros(len(layers) * self.num_experts, bool)  # whose values were found finite
        self._tables: dict[int, Any] = {}  # layer -> slot of each expert [E], where all are there for good
        self.hits = self.misses = self.evictions = 0

    @property
    def resident_nbytes(self) -> int:
        return sum(int((bank.slot_to_key != _FREE).sum()) * bank.slot_nbytes for bank in self.banks.values())

    def bank(self, layer: int) -> Bank:
        return self.banks[self._layers[layer].layout]

    def step(self, layer: int, num_tokens: int) -> None:
        """Say that a layer is about to run; a pass over the model begins where layers start again."""
        if layer <= self._last_layer:
            self._policy.step(num_tokens)
        self._last_layer = layer

    def table(self, layer: int) -> Any | None:
        """Return the slot of each expert of a layer, uint32 [E], once all are there for good; None where the
        pool is smaller than the model. Reads the whole layer the first time.
        """
        bank = self.bank(layer)
        if layer in self._tables:
            return self._tables[layer]
        same = [other for other in self._layers if other.layout == bank.layout]
        if bank.num_slots < sum(other.num_experts for other in same):
            return None
        experts = np.arange(self._layers[layer].num_experts)
        for _ in self.fetch(layer, experts, np.zeros(len(experts), np.int32), split=False):
            pass
        first = layer * self.num_experts
        table = mx.array(self._key_to_slot[first : first + len(experts)].astype(np.uint32))
        mx.eval(table)
        self._tables[layer] = table
        return table

    def read_pinned(self) -> None:
        """Read the pinned experts that are not there. None of it counts as asked for.

        Raises: ReadError, CheckpointError.
        """
        counted = self.hits, self.misses
        for layer in self._layers if self.num_pinned else ():
            experts = np.arange(min(self.num_pinned, layer.num_experts))
            for _ in self.fetch(layer.index, experts, np.zeros(len(experts), np.int32), split=False):
                pass
        self.hits, self.misses = counted

    def count_hits(self, num: int) -> None:
        """Count experts that were used by way of a table."""
        self.hits += num

    def settle(self, indices: Any) -> NDArray[np.int64]:
        """Evaluate the router's ids, and whatever still has to read slots. Returns the ids. Blocks."""
        mx.eval(indices, *self._pending)
        self._pending.clear()
        return np.array(indices).astype(np.int64)

    def add_pending(self, result: Any) -> None:
        """Remember a result that reads slots: no slot is written to before it was evaluated."""
        self._pending.append(result)

    def slots_of(self, layer: int, experts: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the slots of experts that are resident."""
        slots = self._key_to_slot[layer * self.num_experts + experts]
        return slots.astype(np.uint32)

    def fetch(
        self, layer: int, experts: NDArray[np.int64], counts: NDArray[np.int32], *, split: bool
    ) -> Generator[NDArray[np.int64], None, None]:
        """Yield every expert (ascending, each once) in as few groups as there are slots for, reading those
        that are missing. With `split`, those that are resident come first, while the others are read.

        A group's experts are resident until the next group is asked for, and what was added as pending by then
        is evaluated before a slot of theirs is given up.

        Raises: ReadError; nothing that failed is resident then, and what was in flight has ended.
        """
        if self._loading:
            self._recover()
        bank = self.bank(layer)
        keys = layer * self.num_experts + experts
        slots = self._key_to_slot[keys]
        is_hit = slots != _FREE
        self.hits += int(is_hit.sum())
        self.misses += len(experts) - int(is_hit.sum())
        self._policy.choose(keys, counts)
        ready, missing = list(experts[is_hit]), list(experts[~is_hit])
        bank.in_use[:] = False
        bank.in_use[slots[is_hit]] = True
        try:
            while ready or missing or self._loading:
                self._start(layer, bank, missing)
                if ready and (split or not self._loading):
                    yield np.array(ready)
                    self._release(layer, bank, ready)
                    ready = []
                    continue
                ready = sorted([*ready, *self._finish(bank)])
                yield np.array(ready)
                self._release(layer, bank, ready)
                ready = []
        finally:
            if self._loading:
                self._recover()

    def resize(self, num_slots: dict[Layout, int]) -> None:
        """Grow or shrink the banks between tokens; the experts that fit stay."""
        mx.eval(*self._pending)
        self._pending.clear()
        if self._loading:
            self._recover()
        self._tables.clear()
        for layout, count in num_slots.items():
            if count != self.banks[layout].num_slots:
                self.banks[layout].resize(count)
        self._rebuild()

    def close(self) -> None:
        """Give the arrays up. The store ended its reads before."""
        self.banks.clear()
        self._pending.clear()

    def _start(self, layer: int, bank: Bank, missing: list[Any]) -> None:
        """Begin to read as many of the missing experts, first come first, as slots can be had for."""
        slots = self._take_slots(layer, bank, len(missing))
        if slots and self._pending:
            mx.eval(*self._pending)
            self._pending.clear()
        for slot in slots:
            key = layer * self.num_experts + int(missing.pop(0))
            bank.in_use[slot] = True
            self._loading.append(self._submit(bank, key, slot))

    def _submit(self, bank: Bank, key: int, slot: int) -> Load:
        extents, addresses, staged = [], [], []
        for piece in self._layers[key // self.num_experts].pieces(key % self.num_experts):
            row = bank.rows[piece.part][slot]
            if piece.place is not None:
                row = np.empty(piece.extent.nbytes, np.uint8)
                staged.append((piece, row))
            extents.append(piece.extent)
            # the store writes an extent as far into its page as it lies in the file's
            addresses.append(row.ctypes.data - piece.extent.offset % PAGE_NBYTES)
        return Load(self._store.submit(extents, addresses), key, slot, tuple(staged))

    def _finish(self, bank: Bank) -> list[int]:
        """Wait for all loads; return their experts, resident now."""
        experts = []
        while self._loading:
            load = self._loading[0]
            self._store.wait(load.ticket)
            for piece, data in load.staged:
                bank.fill(load.slot, piece, data)
            if not self._looked_at[load.key]:
                layer, expert = divmod(load.key, self.num_experts)
                bank.check_finite(load.slot, self._layers[layer], expert)
                self._looked_at[load.key] = True
            self._loading.pop(0)
            bank.slot_to_key[load.slot] = load.key
            self._key_to_slot[load.key] = load.slot
            experts.append(load.key % self.num_experts)
        return experts

    def _release(self, layer: int, bank: Bank, experts: list[Any]) -> None:
        keys = layer * self.num_experts + np.array(experts)
        bank.in_use[self._key_to_slot[keys]] = False

    def _take_slots(self, layer: int, bank: Bank, count: int) -> list[int]:
        """Return up to `count` slots to fill: free ones, then those of the experts wanted latest."""
        free = np.flatnonzero((bank.slot_to_key == _FREE) & ~bank.in_use)[:count]
        taken = [int(slot) for slot in free]
        lacking = count - len(taken)
        if lacking > 0:
            candidates = np.flatnonzero(~bank.in_use & (bank.slot_to_key != _FREE))
            if self.num_pinned:
                is_pinned = bank.slot_to_key[candidates] % self.num_experts < self.num_pinned
                candidates = candidates[~is_pinned]
            if lacking < len(candidates):
                rank = self._policy.rank(layer, bank.slot_to_key[candidates])
                candidates = candidates[np.argpartition(-rank, lacking - 1)[:lacking]]
            for slot in candidates:
                self._key_to_slot[bank.slot_to_key[slot]] = _FREE
                bank.slot_to_key[slot] = _FREE
                self.evictions += 1
                taken.append(int(slot))
        return taken

    def _recover(self) -> None:
        """End what is in flight, and make everything agree with the banks' `slot_to_key`."""
        self._store.drain()
        self._loading.clear()
        self._rebuild()

    def _rebuild(self) -> None:
        self._key_to_slot[:] = _FREE
        for bank in self.banks.values():
            bank.in_use[:] = False
            resident = np.flatnonzero(bank.slot_to_key != _FREE)
            self._key_to_slot[bank.slot_to_key[resident]] = resident
