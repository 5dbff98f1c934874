"""Turns a model's shapes into a few layers of made-up weights and a pool, on which the engine's steps can be timed.

It knows no budgets and keeps no results; `probe.py` decides what is tried. Attention, router and experts are as many
bytes as a processor's cache does not hold, as in a model.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spile import _core
from spile.architectures.spec import Experts, ModelSpec, Router, Weight
from spile.engines.cpu.decoder import make_decoder, rope_of
from spile.engines.cpu.rope import RopeTable
from spile.engines.cpu.trial_reads import Copied, PoolFetch, RowReads, stream_rate
from spile.engines.cpu.trial_weights import MadeUpWeights
from spile.errors import SpileError
from spile.residency.experts import ExpertTable
from spile.residency.forecast import ChunkSeconds
from spile.residency.kv import KvFormat
from spile.residency.pool import Batch
from spile.residency.store import ShardWatch, Store

_LAYERS = 12  # of attention and router: 44 MB of a full-size model
_TOKEN_LAYERS = 6  # that a token runs through: the first ones and the others in turn
_IN_PLACE_NBYTES = 64_000_000  # of experts: twice a processor's cache
_HEAD_ROWS = 49_152  # 57 MB
_ROWS = 256  # of the made-up embedding table: as many distinct tokens as a page of text has
_DISK_SECONDS = 0.6
# Tokens tried with experts in memory, and three times as many that copy them from the page cache: 300 MB of a full-size
# model. More where a token takes next to nothing, until so many seconds have passed.
_TOKENS, _TOKEN_SECONDS = 8, 0.03
_CHUNK_SECONDS = 0.1  # of chunks, at least

_Fetch = Callable[[int, NDArray[np.int32], NDArray[np.int32]], Iterable[Batch]]
_Tried = tuple[float, ...]  # misses and seconds of a token, three times


class CachedTimes(NamedTuple):
    """Of a layer of a token: all its experts in the pool, none, copied from the page cache; what each that is missing
    adds to a chunk; bytes a second that are copied.
    """

    pooled_seconds: float
    missing_seconds: float
    chunk_miss_seconds: float
    nbytes: float


class DiskTimes(NamedTuple):
    """Of a layer of a token: all its experts in the pool, half of them, none; bytes a second of reads in a row;
    how many times longer than reading or computing alone a chunk takes for both.
    """

    pooled_seconds: float
    half_seconds: float
    missing_seconds: float
    nbytes: float
    loss: float


class Trial:
    """A decoder of a few layers over made-up weights, and a pool."""

    def __init__(
        self,
        spec: ModelSpec,
        table: ExpertTable,
        threads: int,
        chunks: list[int],
        kv: KvFormat,
        files: list[Path],
        *,
        mapped: bool,
        between: Callable[[], None],
    ) -> None:
        """`files` are looked at before each token; `mapped` says whether they hold the experts to compute in place.
        `between` is called between two tokens, so that processor and threads are as a token finds them.

        Raises: ReadError for files that cannot be opened.
        """
        self._spec = _few_layers(spec)
        layers = self._spec.num_hidden_layers
        self._token_layers, self._first_layer = min(_TOKEN_LAYERS, layers), 0
        context = max(chunks) + 1024
        self._table, self.chunks = table, chunks
        self._weights = MadeUpWeights(self._spec)
        self._rng = np.random.default_rng(0)
        self._between = between
        self._watch = ShardWatch(files)
        self._rows: RowReads | None = None
        if files:
            D = spec.hidden_size
            self._rows = RowReads(files[0], (D // 2, D // 32, D // 32))
        self._attend_seconds: list[float] = []
        self._begin_seconds: dict[bool, list[float]] = {False: [], True: []}  # of tokens through a pool
        self._computing: dict[int, float] = {}  # seconds of a chunk's experts
        self._next_place = 0
        self._mapped: list[NDArray[np.uint8]] = []
        self._place_experts(files if mapped else [])
        isa = os.environ.get("SPILE_ISA") or _core.isas()[0]
        self._decoder = make_decoder(
            self._spec,
            isa,
            threads,
            context=context,
            max_chunk=max(chunks),
            kv=kv,
            activation_bytes=2,
        )
        for layer in range(layers):
            self._decoder.set_layer(layer, self._weights.layer())
        self._decoder.set_final_norm(self._weights.ones(spec.hidden_size))
        self._embedding = self._weights.nibbles(_ROWS)
        self._rope = RopeTable(rope_of(spec))
        self._cache = self._decoder.new_cache()
        self._ids = np.empty(self._spec.num_experts, np.int32)
        self._counts = np.empty(self._spec.num_experts, np.int32)
        self._out = np.empty((1, self._spec.vocab_size), np.float32)

    def chunk(self, num_tokens: int) -> ChunkSeconds:
        """Time one layer of a prefill chunk, every expert in place."""
        self._chunk(num_tokens, self._in_place)  # buffers are touched for the first time
        tried = [self._chunk(num_tokens, self._in_place) for _ in _rounds(1, _CHUNK_SECONDS)]
        self._cache.position = num_tokens
        attend, experts = (_usual(seconds) for seconds in zip(*tried, strict=True))
        self._computing[num_tokens] = experts
        return ChunkSeconds(attend, experts)

    def _chunk(self, num_tokens: int, fetch: _Fetch) -> ChunkSeconds:
        rows = self._rng.integers(0, _ROWS, num_tokens)
        position, self._cache.position = self._cache.position, 0
        self._decoder.begin(*self._embedding, rows, self._rope.rows(0, num_tokens))
        started = time.perf_counter()
        self._decoder.attend(self._cache, 0)
        num = self._decoder.route(0, self._ids, self._counts)
        routed = time.perf_counter()
        for ids, places in fetch(0, self._ids[:num], self._counts[:num]):
            self._decoder.experts(0, ids, places)
        self._decoder.combine()
        ended = time.perf_counter()
        self._cache.position = position
        return ChunkSeconds(routed - started, ended - routed)

    def resident(self) -> tuple[float, float]:
        """Time a layer of a token with every expert in place: its attention and router alone, and all of it."""
        for index in range(2):
            self._token(index, self._in_place)
        self._attend_seconds.clear()
        seconds = [self._token(index, self._in_place) for index in _rounds(_TOKENS, _TOKEN_SECONDS)]
        layers = self._token_layers
        return float(np.median(self._attend_seconds)) / layers, float(np.median(seconds)) / layers

    def begin(self, *, pooled: bool) -> float:
        """Return the seconds before the first layer of the tokens tried so far, through a pool or not."""
        return float(np.median(self._begin_seconds[pooled] or [0.0]))

    def row_seconds(self) -> float:
        """Time an embedding row of a prompt's; 0 where there is no file to read one from."""
        return 0.0 if self._rows is None else self._rows.row_seconds()

    def head(self, vocab_size: int, *, in_files: bool = False) -> float:
        """Time the logits of a token, for all `vocab_size` rows; `in_files` in small pages, as mapped ones are."""
        num_rows = self._spec.vocab_size
        head, seconds = self._weights.nibbles(num_rows), []
        if in_files:
            head = self._weights.in_small_pages()
        for _ in range(3):
            started = time.perf_counter()
            self._decoder.finish(1)
            self._decoder.head(*head, 0, num_rows, self._out)
            seconds.append(time.perf_counter() - started)
        self._weights.drop_newest(6 if in_files else 3)
        return min(seconds) * vocab_size / num_rows

    def disk(self, table: ExpertTable, files: list[Path]) -> DiskTimes:
        """Time tokens and a chunk whose experts are read from the disk.

        Raises: ReadError, and where direct reads are refused, so that the disk cannot be told from memory.
        """
        store = Store(files, direct=True)
        try:
            if not store.is_direct:
                raise SpileError("direct reads are refused")
            fetch = self._filled_pool(table, store)
            tried = [self._try(2 * index, fetch) for index in _rounds(2, _DISK_SECONDS)]
            hit, half, missing = self._fitted(np.mean(np.array(tried), axis=0))
            rate = stream_rate(table, store)
            loss = self._loss(fetch, 2 * len(tried), rate)
            return DiskTimes(hit, half, missing, rate, loss)
        finally:
            store.close()

    def cached(self, table: ExpertTable, files: list[Path]) -> CachedTimes:
        """Time tokens and a chunk whose experts are copied from the page cache."""
        store = Store(files, direct=False)
        copied = Copied(self._decoder)
        store.read_cached = copied.copy
        try:
            fetch = self._filled_pool(table, store)
            for _ in range(2):  # again, where the files were not in the page cache
                copied.seconds, copied.is_whole, before = 0.0, True, fetch.slots.misses
                tried = [self._try(2 * index, fetch) for index in _rounds(_TOKENS, _TOKEN_SECONDS)]
                nbytes = (fetch.slots.misses - before) * self._table.expert_nbytes
                rate = nbytes / max(1e-9, copied.seconds)
                miss = self._chunk_miss(fetch, 2 * len(tried))
                if copied.is_whole:
                    break
            hit, _, missing = self._fitted(np.median(np.array(tried), axis=0))
            return CachedTimes(hit, missing, miss, rate)
        finally:
            store.close()

    def _filled_pool(self, table: ExpertTable, store: Store) -> PoolFetch:
        """Make a pool whose memory was touched."""
        foretold = np.empty(self._spec.num_experts_per_tok, np.int32)
        fetch = PoolFetch(
            table,
            store,
            self._token_layers,
            self._num_slots(),
            lambda layer: self._decoder.foretell(layer, foretold),
        )
        for index in range(-4, 0):
            self._token(index, fetch)
        return fetch

    def _try(self, index: int, fetch: PoolFetch) -> _Tried:
        """Run a token whose experts are missing, the same one again, and the next one with half of them there; return
        what each missed and its seconds.
        """
        found = []
        for token in (index, index, index + 1):
            if token != index:
                fetch.is_half = True
                self._token(token, fetch)
                fetch.is_half = False
            before = fetch.slots.misses
            seconds = self._token(token, fetch)
            found += [fetch.slots.misses - before, seconds]
        return tuple(found)

    def _fitted(self, tried: NDArray[np.float64]) -> tuple[float, float, float]:
        """Return the seconds of a layer with all its experts there, half of them, and none, from what `_try` found."""
        most, most_seconds, least, least_seconds, some, some_seconds = tried.tolist()
        K, L = self._spec.num_experts_per_tok, self._token_layers
        slope = max(0.0, most_seconds - least_seconds) / max(1e-9, most - least) if most > least else 0.0
        hit = max(0.0, least_seconds - slope * least)
        half = max(0.0, some_seconds - hit) / some * K * L / 2 if some else slope * K * L / 2
        return hit / L, (hit + half) / L, (hit + slope * K * L) / L

    def _loss(self, fetch: PoolFetch, index: int, rate: float) -> float:
        """How many times longer than the longer of the two a chunk takes to read its experts and compute them."""
        T = max(self.chunks)
        losses = [
            seconds / max(self._computing[T], misses * self._table.expert_nbytes / rate)
            for misses, seconds in self._missing_chunks(fetch, index)
        ]
        return max(1.0, _usual(losses))

    def _chunk_miss(self, fetch: PoolFetch, index: int) -> float:
        """Seconds that a missing expert adds to the longest chunk."""
        computing = self._computing[max(self.chunks)]
        added = [
            (seconds - computing) / max(1, misses) for misses, seconds in self._missing_chunks(fetch, index)
        ]
        return max(0.0, _usual(added))

    def _missing_chunks(self, fetch: PoolFetch, index: int) -> list[tuple[int, float]]:
        """Run the longest chunk with its experts missing, twice or more; return how many and the seconds of all
        experts.
        """
        tried = []
        fetch.in_order = True
        for turn in _rounds(2, _CHUNK_SECONDS):
            fetch.begin(index + turn)
            before = fetch.slots.misses
            seconds = self._chunk(max(self.chunks), fetch).experts
            tried.append((fetch.slots.misses - before, seconds))
        fetch.in_order = False
        return tried

    def _token(self, index: int, fetch: _Fetch) -> float:
        """Run one token through the layers and forget it; return its seconds."""
        decoder, ids, counts = self._decoder, self._ids, self._counts
        row = np.array([index % _ROWS], np.int64)
        pool = fetch if isinstance(fetch, PoolFetch) else None
        if pool is not None:
            pool.begin(index)
        self._between()
        asked = time.perf_counter()
        self._watch.check()
        if pool is not None:
            if self._rows is not None:
                self._rows.read()
            pool.step()
        first = self._first_layer
        self._first_layer = (first + self._token_layers) % self._spec.num_hidden_layers
        attending, started = 0.0, time.perf_counter()
        self._begin_seconds[pool is not None].append(started - asked)
        decoder.begin(*self._embedding, row, self._rope.rows(self._cache.position, 1))
        for turn in range(self._token_layers):
            layer = (first + turn) % self._spec.num_hidden_layers
            at = time.perf_counter()
            decoder.attend(self._cache, layer)
            num = decoder.route(layer, ids, counts)
            attending += time.perf_counter() - at
            for some_ids, places in fetch(turn, ids[:num], counts[:num]):
                decoder.experts(layer, some_ids, places)
            decoder.combine()
        self._attend_seconds.append(attending)
        return time.perf_counter() - started

    def _in_place(self, layer: int, ids: NDArray[np.int32], counts: NDArray[np.int32]) -> Iterator[Batch]:
        at = self._next_place + np.arange(len(ids))  # in turn, so that the cache never has the next one
        self._next_place = int(at[-1] + 1) % len(self._places)
        yield ids, self._places[at % len(self._places)]

    def drop_weights_of_experts(self) -> None:
        """Make room for a pool."""
        self._places = np.zeros((0, 3), np.uint64)
        self._experts = np.zeros(0, np.uint8)
        self._mapped.clear()

    def close(self) -> None:
        """Close the files that were looked at. May be called twice."""
        self._watch.close()
        if self._rows is not None:
            self._rows.close()

    def _num_slots(self) -> int:
        """Slots for two tokens: the second time that a token runs it finds all, another token nearly nothing."""
        K, E = self._spec.num_experts_per_tok, self._spec.num_experts
        all_experts = E * sum(self._table.is_moe(layer) for layer in range(self._table.num_layers))
        return min(2 * K * self._token_layers, max(2 * K, all_experts // 2))

    def _place_experts(self, files: list[Path]) -> None:
        """Find experts to compute in place: of the mapped files, or else of memory."""
        table, rng = self._table, self._rng
        layers = [layer for layer in range(table.num_layers) if table.is_moe(layer)]
        if not layers:  # all layers are dense: what the trial's own would take
            nbytes = self._spec.hidden_size * self._spec.moe_intermediate_size // 4
            self._experts = self._weights.ternary(3 * nbytes)
            self._places = (self._experts.ctypes.data + np.arange(3)[None, :] * nbytes).astype(np.uint64)
            return
        num = min(len(layers) * table.num_experts, max(1, _IN_PLACE_NBYTES // table.expert_nbytes))
        if not files:
            parts = [extent.nbytes for extent in table.extents(layers[0], 0)]
            self._experts = self._weights.ternary(num * sum(parts))
            starts = self._experts.ctypes.data + np.arange(num)[:, None] * sum(parts)
            self._places = (starts + np.cumsum([0, *parts[:2]])).astype(np.uint64)
            return
        store = Store(files, direct=False)
        try:
            chosen = [
                table.extents(int(rng.choice(layers)), int(rng.integers(table.num_experts)))
                for _ in range(num)
            ]
            for extents in chosen:  # a page fault would read one page after the other
                store.read(extents)
        finally:
            store.close()
        bases = []
        for path in files:
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapping.madvise(mmap.MADV_RANDOM)
            self._mapped.append(np.frombuffer(mapping, np.uint8))
            bases.append(self._mapped[-1].ctypes.data)
        self._places = np.array([[bases[e.shard] + e.offset for e in three] for three in chosen], np.uint64)


def _few_layers(spec: ModelSpec) -> ModelSpec:
    """Return a model of the last layers, each with experts; a dense model's have one, their dense layer."""
    ffn, glu = spec.first_experts, spec.first_dense
    if ffn is None:
        assert glu is not None, "a layer has experts or is dense"
        router = Weight("router", spec.norm.format, (1, spec.hidden_size))
        ffn = Experts(1, Router(router, 1), glu)
    rows = min(_HEAD_ROWS, spec.vocab_size)
    return replace(
        spec,
        layers=tuple(replace(layer, ffn=ffn) for layer in spec.layers[-_LAYERS:]),
        embedding=replace(spec.embedding, shape=(rows, spec.hidden_size)),
    )


def _rounds(least: int, seconds: float) -> Iterator[int]:
    """Count trials: so many at least, and more until so many seconds have passed."""
    started, index = time.perf_counter(), 0
    while index < least or time.perf_counter() - started < seconds:
        yield index
        index += 1


def _usual(values: Sequence[float]) -> float:
    """Return the lower quartile: what disturbs a trial only adds to it."""
    return float(np.quantile(values, 0.25, method="lower"))
