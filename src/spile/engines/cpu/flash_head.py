"""Turns the centroids' scores into logits of some tokens: those of the best clusters, exactly, and no others.

It takes the place of `head.py` where the user asked for it; what that does to the answer is said in
`architectures/flash_head.py`. The rows that are wanted are gathered into a buffer that the same exact kernels
read: from memory, or from disk where the file holds them in the clusters' order, a read a cluster. Rows on disk
in the order of their ids are too scattered for that (nine of ten pages would be read for one row in nine): then
the whole head passes by as it does without clusters. A token without a row gets -inf.

Sizes: C clusters, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from spile import _core
from spile.architectures.flash_head import FlashHead
from spile.architectures.spec import OwnModel
from spile.engines.cpu.head import Head
from spile.engines.cpu.weights import Weights
from spile.files.checkpoint import Tensor, read_into
from spile.residency.store import PAGE_NBYTES, Store
from spile.residency.weights import FLASH_PIECE_ROWS


class ClusteredHead:
    """The rows of a head by clusters: `num_resident` of them in memory, the rest in `rows_store`."""

    def __init__(
        self,
        model: OwnModel,
        flash: FlashHead,
        num_resident: int,
        weights: Weights,
        *,
        store: Store | None,
        rows_store: Store | None,
    ) -> None:
        """Read centroids and resident rows, or map all rows when the stores are None. `store` reads the
        model's shards, `rows_store` those of `flash`, through the page cache. Touches disk.

        Raises: ReadError, CheckpointError.
        """
        self.flash, self._store = flash, rows_store
        self._num_clusters, vocab_size = flash.num_clusters, model.spec.vocab_size
        self._centroids = [flash.read(tensor) for tensor in flash.centroids]
        token_map = flash.read_token_map(vocab_size)
        self._whole: Head | None = None
        self._is_reading = False  # stays set when a call is interrupted
        self._forced = np.array(flash.forced, np.int64)
        if flash.rows is not None:
            self._tensors = flash.rows
            self._token_ids = token_map.reshape(-1)  # of each row
            self._cluster_rows = np.arange(token_map.size, dtype=np.int32).reshape(token_map.shape)
            self._forced = np.flatnonzero(np.isin(self._token_ids, self._forced))
        else:
            codes, scales, biases = model.tensors(model.spec.head)
            self._tensors = codes, scales, biases
            self._token_ids = np.arange(vocab_size, dtype=np.int32)
            self._cluster_rows = token_map
            if store is not None and num_resident < vocab_size:
                self._whole = Head(model, store, num_resident, weights)
                return
        self._row_nbytes = [tensor.nbytes // tensor.shape[0] for tensor in self._tensors]
        if store is None:
            self._num_resident = len(self._token_ids)
            self._resident = [self._mapped(tensor, weights) for tensor in self._tensors]
        else:
            self._num_resident = min(num_resident, len(self._token_ids))
            self._resident = [self._copied(tensor) for tensor in self._tensors]
        self._gathered = [np.empty((FLASH_PIECE_ROWS, nbytes), np.uint8) for nbytes in self._row_nbytes]

    @property
    def approximation(self) -> str:
        """What is not the model's own answer, in a few words."""
        return self.flash.approximation

    @property
    def note(self) -> str | None:
        """What the user should know about speed."""
        if self._whole is None:
            return None
        return "the flash head saves no reads here: its file does not hold the head's rows in the clusters' order"

    def logits(self, decoder: _core.Decoder, out: NDArray[np.float32]) -> None:
        """Fill out [num, V] with the logits of the tokens that `decoder.finish` made ready. Touches disk
        unless resident.

        Raises: ReadError.
        """
        if self._is_reading and self._store is not None:
            self._store.drain()  # reads of a call that did not end well would spoil the buffer
        self._is_reading = True
        codes, scales, biases = (array.ctypes.data for array in self._centroids)
        decoder.head(codes, scales, biases, 0, self._num_clusters, out)
        wanted = np.zeros((len(out), len(self._token_ids)), np.bool_)
        wanted[:, self._forced] = True
        for row, scores in zip(wanted, out[:, : self._num_clusters], strict=True):
            row[self._cluster_rows[self.flash.choose(scores)]] = True
        if self._whole is not None:
            self._whole.logits(decoder, out)
            out[~wanted] = -np.inf
        else:
            self._gather_logits(decoder, wanted, out)
        self._is_reading = False

    def _gather_logits(
        self, decoder: _core.Decoder, wanted: NDArray[np.bool_], out: NDArray[np.float32]
    ) -> None:
        """Compute the rows that each vector wants, [num, rows], and put them at their tokens' places."""
        out.fill(-np.inf)
        computed = np.empty_like(out)
        codes, scales, biases = (array.ctypes.data for array in self._gathered)
        rows = np.flatnonzero(wanted[0] if len(wanted) == 1 else wanted.any(axis=0))
        for some in self._gather(rows):
            decoder.head(codes, scales, biases, 0, len(some), computed)
            token_ids = self._token_ids[some]
            for of_token, values, is_wanted in zip(out, computed, wanted, strict=True):
                kept = is_wanted[some]
                of_token[token_ids[kept]] = values[: len(some)][kept]

    def _gather(self, rows: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
        """Bring rows (ascending) into the buffer, some at a time; yield which are there."""
        num_resident = int(np.searchsorted(rows, self._num_resident))
        for start in range(0, num_resident, FLASH_PIECE_ROWS):
            some = rows[start : min(start + FLASH_PIECE_ROWS, num_resident)]
            for resident, gathered in zip(self._resident, self._gathered, strict=True):
                np.take(resident, some, axis=0, out=gathered[: len(some)], mode="clip")
            yield some
        for start in range(num_resident, len(rows), FLASH_PIECE_ROWS):
            some = rows[start : start + FLASH_PIECE_ROWS]
            self._read(some)
            yield some

    def _read(self, rows: NDArray[np.intp]) -> None:
        """Read rows (ascending) into the buffer, each run of neighbours at once."""
        assert self._store is not None, "rows that are not resident have a store"
        first = np.r_[0, np.flatnonzero(np.diff(rows) != 1) + 1]  # of each run, its place in the buffer
        counts = np.diff(np.r_[first, len(rows)])
        parts = []
        for tensor, nbytes, gathered in zip(self._tensors, self._row_nbytes, self._gathered, strict=True):
            offsets = tensor.offset + rows[first] * nbytes
            # The store puts an extent as far behind an address as it lies behind the start of a page.
            addresses = gathered.ctypes.data + first * nbytes - offsets % PAGE_NBYTES
            parts.append((np.full_like(offsets, tensor.shard), offsets, counts * nbytes, addresses))
        requests = [np.concatenate(each)[None] for each in zip(*parts, strict=True)]
        for ticket in self._store.submit_groups(*requests):
            self._store.wait(ticket)

    def _mapped(self, tensor: Tensor, weights: Weights) -> NDArray[np.uint8]:
        if tensor.shard < len(weights.ranges):
            memory = (ctypes.c_uint8 * tensor.nbytes).from_address(weights.tensor(tensor.name))
            return np.ctypeslib.as_array(memory).reshape(tensor.shape[0], -1)
        shape = (tensor.shape[0], tensor.nbytes // tensor.shape[0])
        return np.memmap(self.flash.shards[tensor.shard], np.uint8, "r", tensor.offset, shape)

    def _copied(self, tensor: Tensor) -> NDArray[np.uint8]:
        nbytes = tensor.nbytes // tensor.shape[0]
        data = np.empty(self._num_resident * nbytes, np.uint8)
        if len(data):
            read_into(self.flash.shards[tensor.shard], tensor.offset, data)
        return data.reshape(-1, nbytes)
