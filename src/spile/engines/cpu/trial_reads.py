"""Turns a model's files into reads as a pool makes them, so that a trial can time them.

It does not know what is computed meanwhile; `trial.py` does.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spile import _core
from spile.errors import SpileError
from spile.residency.experts import ExpertTable, Extent
from spile.residency.mapped import touch_reader, touch_requests
from spile.residency.pages import Pages
from spile.residency.policy import NEVER, Policy
from spile.residency.pool import Batch, Pool
from spile.residency.store import PAGE_NBYTES, Store, aligned_buffer

_STREAM_SECONDS = 0.3
_TOUCH_SECONDS, _TOUCH_NBYTES = 0.25, 1 << 28
_IN_FLIGHT = 16  # experts, as in the pool
# Of the likelier three quarters that a router foretells one layer ahead; of all 0.75 (demo and random full-size model).
_RIGHT_PART = 0.9
_ROWS, _FEW_ROWS = 128, 16  # of the embedding table


class Copied:
    """Times what the decoder's threads copy from the page cache."""

    def __init__(self, decoder: _core.Decoder) -> None:
        self._decoder = decoder
        self.seconds, self.is_whole = 0.0, True

    def copy(self, requests: NDArray[np.uint64], done: NDArray[np.uint8]) -> None:
        started = time.perf_counter()
        self._decoder.read_cached(requests, done)
        self.seconds += time.perf_counter() - started
        self.is_whole &= bool(done.all())


class _LeastRecent(Policy):
    """Counts as the engine's policy does, at its cost, and gives up what was chosen longest ago: what a trial just
    brought stays.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._choices = 0
        self._chosen = np.zeros(num_layers * num_experts + 1)
        self._chosen[-1] = NEVER  # no expert's
        super().__init__(num_layers, num_experts)

    def choose(self, keys: NDArray[np.int64], num_tokens: NDArray[np.int32]) -> None:
        super().choose(keys, num_tokens)
        self._choices += 1
        self._chosen[keys] = -self._choices

    def rank(self, layer: int, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        super().rank(layer, keys)
        return self._chosen[keys]


class PoolFetch:
    """Brings a trial's experts through a pool, from all over the model's layers."""

    def __init__(
        self,
        table: ExpertTable,
        store: Store,
        num_layers: int,
        num_slots: int,
        foretell: Callable[[int], None],
    ) -> None:
        """`foretell` takes the time of foretelling a layer's experts."""
        self._foretell, self._is_direct = foretell, store.is_direct
        self._policy = _LeastRecent(table.num_layers, table.num_experts)
        self.slots = Pool(Pages(table), store, self._policy, num_slots)
        self._num_layers, self._num_experts = num_layers, table.num_experts
        self._moe = [layer for layer in range(table.num_layers) if table.is_moe(layer)]
        self._index = 0
        self.is_half = False  # bring half of what is asked for, and answer with that
        self.in_order = False

    def begin(self, index: int) -> None:
        """Say which token comes: the same one wants the same experts, whatever is computed with them."""
        self._index = index
        rng = np.random.default_rng(index % 2**32)
        self._wanted = [rng.permutation(self._num_experts).astype(np.int32) for _ in range(self._num_layers)]
        self._is_right = rng.random((self._num_layers, self._num_experts)) < _RIGHT_PART

    def step(self) -> None:
        """Do what the pool does before a token's first layer."""
        self._policy.step(1)

    def __call__(self, layer: int, ids: NDArray[np.int32], counts: NDArray[np.int32]) -> Iterator[Batch]:
        if self.in_order:
            at = self._moe[self._index % len(self._moe)]  # a layer that the one before was not
            yield from self.slots.fetch(at, ids, counts, order="ascending")
            return
        foretell = None
        if self.is_half:
            ids, counts = ids[::2], counts[::2]
        elif self._is_direct and layer + 1 < self._num_layers:
            foretell = partial(self._guess, layer + 1, len(ids))
        wanted = np.sort(self._wanted[layer][: len(ids)])
        for some, places in self.slots.fetch(
            self._moe[layer % len(self._moe)], wanted, counts, order="ready", foretell=foretell
        ):
            yield ids[np.searchsorted(wanted, some)], places

    def _guess(self, layer: int, num_chosen: int) -> tuple[int, NDArray[np.int32]]:
        """Say what a layer will want, as often rightly as a model's next router does."""
        self._foretell(layer)
        wanted, others = self._wanted[layer][:num_chosen], self._wanted[layer][-num_chosen:]
        guess = np.where(self._is_right[layer][:num_chosen], wanted, others)
        return self._moe[layer % len(self._moe)], guess


class RowReads:
    """Reads embedding rows, as many bytes from anywhere in a file, as the engine does: through the page cache."""

    def __init__(self, path: Path, row_nbytes: Sequence[int]) -> None:
        self._store, self._row_nbytes = Store([path], direct=False), row_nbytes
        self._span = max(1, path.stat().st_size - max(row_nbytes))
        self._turn = 0  # of tokens, few of which are new in a text

    def read(self) -> None:
        """Read the rows of another token."""
        self._turn = (self._turn + 1) % _FEW_ROWS
        extents = self._extents(self._turn)
        if self._store.read_if_cached(extents) is None:
            self._store.read(extents)

    def row_seconds(self) -> float:
        """Seconds of a row, of many that are read together, as a prompt's are."""
        started = time.perf_counter()
        extents = [extent for row in range(_ROWS) for extent in self._extents(_FEW_ROWS + row)]
        self._store.read(extents)
        return (time.perf_counter() - started) / _ROWS

    def _extents(self, row: int) -> list[Extent]:
        return [
            Extent(0, (row * 3 + part) * 1_000_003 % self._span, nbytes)
            for part, nbytes in enumerate(self._row_nbytes)
        ]

    def close(self) -> None:
        self._store.close()


def stream_rate(table: ExpertTable, store: Store) -> float:
    """Bytes a second of experts read with many reads in flight, as a prompt and a streamed head are."""
    rng = np.random.default_rng(os.getpid())
    layers = [layer for layer in range(table.num_layers) if table.is_moe(layer)]
    # whole pages, and one more for an expert that begins elsewhere in its page
    rooms = [Store.room(extent) + PAGE_NBYTES for extent in table.extents(layers[0], 0)]
    buffer = aligned_buffer(sum(rooms) * _IN_FLIGHT)
    at = buffer.ctypes.data + np.arange(_IN_FLIGHT) * sum(rooms)
    starts = (at[:, None] + np.cumsum([0, *rooms[:-1]])).tolist()
    tickets: list[int] = []
    turn, nbytes, begun, started = 0, 0, time.perf_counter(), 0.0
    while not nbytes or time.perf_counter() - begun < _STREAM_SECONDS:
        if len(tickets) == _IN_FLIGHT:
            store.wait(tickets.pop(0))
            nbytes += table.expert_nbytes if started else 0
            started = started or time.perf_counter()  # from the first on, as many are in flight at the end
        extents = table.extents(int(rng.choice(layers)), int(rng.integers(table.num_experts)))
        tickets.append(store.submit(extents, starts[turn % _IN_FLIGHT]))
        turn += 1
    elapsed = time.perf_counter() - started
    for ticket in tickets:
        store.wait(ticket)
    return nbytes / elapsed


def touch_rate(path: Path) -> float:
    """Bytes a second of a mapped file that become present from the disk as `mapped.py` touches them. What was in the
    page cache of a piece is dropped, and read again.

    Raises: SpileError where the page cache cannot be told to forget.
    """
    if not hasattr(os, "posix_fadvise"):
        raise SpileError("the page cache cannot be told to forget")
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = np.frombuffer(mapping, np.uint8)
        nbytes = min(len(view), _TOUCH_NBYTES)
        start = int(np.random.default_rng(os.getpid()).integers(len(view) - nbytes + 1))
        start -= start % PAGE_NBYTES
        os.posix_fadvise(file.fileno(), start, nbytes, os.POSIX_FADV_DONTNEED)
        reader = touch_reader()
        started, done = time.perf_counter(), 0
        requests = touch_requests([(view.ctypes.data + start, nbytes)])
        tickets = [reader.submit(request[None]) for request in requests]
        for request, ticket in zip(requests, tickets, strict=True):
            reader.wait(ticket)
            done += int(request[2])
            if time.perf_counter() - started > _TOUCH_SECONDS:
                break
        elapsed = time.perf_counter() - started
        reader.cancel()
        reader.drain()
    return done / elapsed
