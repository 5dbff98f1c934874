"""Turns the head's rows into logits: rows that are resident in place, the others read for each token, piece
by piece.

At a small budget the head (175 MB of a full-size Maple) does not fit beside the rest. Every row of it is
needed for every token, so which rows stay does not matter: the first ones do. The others pass through a ring
of buffers, read while the piece before is computed.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from spile import _core
from spile.architectures.spec import OwnModel
from spile.engines.cpu.weights import Weights
from spile.residency.experts import Extent
from spile.residency.store import Store, aligned_buffer
from spile.residency.weights import HEAD_PIECE_ROWS, HEAD_RING_PIECES

_Addresses = tuple[int, int, int]  # codes, scales, biases


class Head:
    """lm_head: `num_resident` rows in memory, the rest in `store`."""

    def __init__(self, model: OwnModel, store: Store | None, num_resident: int, weights: Weights) -> None:
        """Read the resident rows, or take all of them from mapped weights when `store` is None. Touches disk.

        Raises: ReadError.
        """
        tensors = model.tensors(model.spec.head)
        self._tensors = tensors
        self._row_nbytes = [tensor.nbytes // tensor.shape[0] for tensor in tensors]
        self._num_rows = model.spec.vocab_size
        self._num_resident = self._num_rows if store is None else num_resident
        self._store = store
        self._is_reading = False  # stays set when a call is interrupted
        if store is None:
            codes, scales, biases = (weights.tensor(tensor.name) for tensor in tensors)
            self._resident: _Addresses = codes, scales, biases
        else:
            self._rows = [weights.rows(tensor.name, 0, num_resident) for tensor in tensors if num_resident]
            codes, scales, biases = (rows.ctypes.data for rows in self._rows) if num_resident else (0, 0, 0)
            self._resident = codes, scales, biases
            rooms = [Store.room(extent) for extent in self._extents(0, HEAD_PIECE_ROWS)]
            self._starts = np.cumsum([0, *(room + 4096 for room in rooms)])
            num_pieces = HEAD_RING_PIECES if num_resident < self._num_rows else 0
            ring = aligned_buffer(num_pieces * int(self._starts[-1]))  # one: small ones get no huge pages
            self._ring = list(ring.reshape(num_pieces, -1)) if num_pieces else []

    def logits(self, decoder: _core.Decoder, out: NDArray[np.float32]) -> None:
        """Fill out [num, V] with the logits of the tokens that `decoder.finish` made ready. Touches disk
        unless resident.

        Raises: ReadError.
        """
        if self._is_reading and self._store is not None:
            self._store.drain()  # reads of a call that did not end well would spoil the ring
        self._is_reading = True
        waiting = deque(range(self._num_resident, self._num_rows, HEAD_PIECE_ROWS))
        reading: deque[tuple[int, int, int]] = deque()  # ticket, first row, buffer
        free = deque(range(len(self._ring))) if waiting else deque[int]()
        self._read_ahead(waiting, reading, free)
        if self._num_resident:
            decoder.head(*self._resident, 0, self._num_resident, out)
        while reading:
            ticket, row, buffer = reading.popleft()
            assert self._store is not None
            self._store.wait(ticket)
            count = min(HEAD_PIECE_ROWS, self._num_rows - row)
            decoder.head(*self._piece_addresses(row, count, buffer), row, count, out)
            free.append(buffer)
            self._read_ahead(waiting, reading, free)
        self._is_reading = False

    def _read_ahead(
        self, waiting: deque[int], reading: deque[tuple[int, int, int]], free: deque[int]
    ) -> None:
        count = min(len(waiting), len(free))
        if not count or (count == 1 and len(waiting) > 1 and reading):
            return  # two pieces at a time: what the page cache holds is copied by all threads
        rows, buffers = ([queue.popleft() for _ in range(count)] for queue in (waiting, free))
        extents = [self._extents(row, min(HEAD_PIECE_ROWS, self._num_rows - row)) for row in rows]
        shards, offsets, nbytes = np.array(extents, np.int64).transpose(2, 0, 1)
        addresses = np.array([self._buffer_addresses(buffer) for buffer in buffers], np.int64)
        assert self._store is not None
        tickets = self._store.submit_groups(shards, offsets, nbytes, addresses)
        reading.extend(zip(tickets, rows, buffers, strict=True))

    def _extents(self, row: int, count: int) -> list[Extent]:
        return [
            Extent(tensor.shard, tensor.offset + row * nbytes, count * nbytes)
            for tensor, nbytes in zip(self._tensors, self._row_nbytes, strict=True)
        ]

    def _buffer_addresses(self, buffer: int) -> list[int]:
        base = self._ring[buffer].ctypes.data
        return [base + int(start) for start in self._starts[:3]]

    def _piece_addresses(self, row: int, count: int, buffer: int) -> _Addresses:
        extents = self._extents(row, count)
        starts = self._buffer_addresses(buffer)
        codes, scales, biases = (
            start + Store.delta(extent) for start, extent in zip(starts, extents, strict=True)
        )
        return codes, scales, biases
