"""Turns a model's shapes into a few layers of made-up weights and a pool, on which the engine's steps can be timed.

It knows no budgets and keeps no results; `probe.py` decides what is tried. Attention, router and experts are as many
bytes as a processor's cache does not hold, as in a model.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spile import _core
from spile.architectures.maple import MapleConfig
from spile.engines.cpu.decoder import make_decoder
from spile.engines.cpu.trial_reads import Copied, PoolFetch, stream_rate
from spile.errors import SpileError
from spile.residency.experts import ExpertTable, encode_bf16
from spile.residency.forecast import ChunkSeconds
from spile.residency.kv import KvFormat
from spile.residency.slots import Batch
from spile.residency.store import Store

_LAYERS = 12  # of attention and router: 44 MB of a full-size model
_TOKEN_LAYERS = 6  # that a token runs through: the first ones and the others in turn
_IN_PLACE_NBYTES = 64_000_000  # of experts: twice a processor's cache
_HEAD_ROWS = 49_152  # 57 MB
_ROWS = 256  # of the made-up embedding table: as many distinct tokens as a page of text has
_DISK_SECONDS = 0.6
_TOKENS = 8  # tried with experts in memory
_CACHED_TOKENS = 8  # whose experts are copied from the page cache: 300 MB of a full-size model

_Fetch = Callable[[int, NDArray[np.int32], NDArray[np.int32]], Iterable[Batch]]
_Tried = tuple[float, ...]  # misses and seconds of a token, three times


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
        config: MapleConfig,
        table: ExpertTable,
        threads: int,
        chunks: list[int],
        kv: KvFormat,
        mapped: list[Path],
    ) -> None:
        layers = min(_LAYERS, config.num_hidden_layers)
        self._token_layers, self._first_layer = min(_TOKEN_LAYERS, layers), 0
        context = max(chunks) + 1024
        self._config = replace(
            config,
            num_hidden_layers=layers,
            first_k_dense_replace=0,
            layer_is_sliding=config.layer_is_sliding[-layers:],
            vocab_size=min(_HEAD_ROWS, config.vocab_size),
        )
        self._table, self.chunks = table, chunks
        self._kept: list[NDArray[np.generic]] = []
        self._rng = np.random.default_rng(0)
        self._attend_seconds: list[float] = []
        self._computing: dict[int, float] = {}  # seconds of a chunk's experts
        self._next_place = 0
        self._mapped: list[NDArray[np.uint8]] = []
        self._place_experts(mapped)
        isa = os.environ.get("SPILE_ISA") or _core.isas()[0]
        self._decoder = make_decoder(
            self._config,
            isa,
            threads,
            context=context,
            max_chunk=max(chunks),
            kv=kv,
            activation_bytes=2,
        )
        for layer in range(layers):
            self._decoder.set_layer(layer, self._layer())
        self._decoder.set_final_norm(self._ones(config.hidden_size))
        self._embedding = self._nibbles(_ROWS)
        self._cache = self._decoder.new_cache()
        self._ids = np.empty(config.num_experts, np.int32)
        self._counts = np.empty(config.num_experts, np.int32)
        self._out = np.empty((1, self._config.vocab_size), np.float32)

    def chunk(self, num_tokens: int) -> ChunkSeconds:
        """Time one layer of a prefill chunk, every expert in place."""
        # the first time, buffers are touched for the first time
        best = min((self._chunk(num_tokens, self._in_place) for _ in range(3)), key=sum)
        self._cache.position = num_tokens
        self._computing[num_tokens] = best.experts
        return best

    def _chunk(self, num_tokens: int, fetch: _Fetch) -> ChunkSeconds:
        rows = self._rng.integers(0, _ROWS, num_tokens)
        position, self._cache.position = self._cache.position, 0
        self._decoder.begin(*self._embedding, rows)
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
        seconds = [self._token(index, self._in_place) for index in range(_TOKENS)]
        layers = self._token_layers
        return float(np.median(self._attend_seconds)) / layers, float(np.median(seconds)) / layers

    def head(self, vocab_size: int, *, in_files: bool = False) -> float:
        """Time the logits of a token, for all `vocab_size` rows; `in_files` in small pages, as mapped ones are."""
        num_rows = self._config.vocab_size
        head, seconds = self._nibbles(num_rows), []
        if in_files:
            codes, scales, biases = (self._keep(_in_small_pages(array)) for array in self._kept[-3:])
            head = codes, scales, biases
        for _ in range(3):
            started = time.perf_counter()
            self._decoder.finish(1)
            self._decoder.head(*head, 0, num_rows, self._out)
            seconds.append(time.perf_counter() - started)
        del self._kept[-6 if in_files else -3 :]
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
            tried: list[_Tried] = []
            started = time.perf_counter()
            while len(tried) < 2 or time.perf_counter() - started < _DISK_SECONDS:
                tried.append(self._try(2 * len(tried), fetch))
            hit, half, missing = self._fitted(np.mean(np.array(tried), axis=0))
            rate = stream_rate(table, store)
            loss = self._loss(fetch, 2 * len(tried), rate)
            return DiskTimes(hit, half, missing, rate, loss)
        finally:
            store.close()

    def cached(self, table: ExpertTable, files: list[Path]) -> tuple[float, float, float]:
        """Time the same with experts copied from the page cache; bytes a second that are copied."""
        store = Store(files, direct=False)
        copied = Copied(self._decoder)
        store.read_cached = copied.copy
        try:
            fetch = self._filled_pool(table, store)
            for _ in range(2):  # again, where the files were not in the page cache
                copied.seconds, copied.is_whole, before = 0.0, True, fetch.slots.misses
                tried = [self._try(2 * index, fetch) for index in range(_CACHED_TOKENS)]
                if copied.is_whole:
                    break
            nbytes = (fetch.slots.misses - before) * self._table.expert_nbytes
            hit, _, missing = self._fitted(np.median(np.array(tried), axis=0))
            return hit, missing, nbytes / max(1e-9, copied.seconds)
        finally:
            store.close()

    def _filled_pool(self, table: ExpertTable, store: Store) -> PoolFetch:
        """Make a pool whose memory was touched."""
        fetch = PoolFetch(table, store, self._token_layers, self._num_slots())
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
        K, L = self._config.num_experts_per_tok, self._token_layers
        slope = max(0.0, most_seconds - least_seconds) / max(1e-9, most - least) if most > least else 0.0
        hit = max(0.0, least_seconds - slope * least)
        half = max(0.0, some_seconds - hit) / some * K * L / 2 if some else slope * K * L / 2
        return hit / L, (hit + half) / L, (hit + slope * K * L) / L

    def _loss(self, fetch: PoolFetch, index: int, rate: float) -> float:
        """How many times longer than the longer of the two a chunk takes to read its experts and compute them."""
        T, losses = max(self.chunks), []
        fetch.in_order = True
        for turn in range(2):
            fetch.begin(index + turn)
            before = fetch.slots.misses
            seconds = self._chunk(T, fetch).experts
            reading = (fetch.slots.misses - before) * self._table.expert_nbytes / rate
            losses.append(seconds / max(self._computing[T], reading))
        fetch.in_order = False
        return max(1.0, min(losses))

    def _token(self, index: int, fetch: _Fetch) -> float:
        """Run one token through the layers and forget it; return its seconds."""
        decoder, ids, counts = self._decoder, self._ids, self._counts
        row = np.array([index % _ROWS], np.int64)
        if isinstance(fetch, PoolFetch):
            fetch.begin(index)
        first = self._first_layer
        self._first_layer = (first + self._token_layers) % self._config.num_hidden_layers
        attending, started = 0.0, time.perf_counter()
        decoder.begin(*self._embedding, row)
        for turn in range(self._token_layers):
            layer = (first + turn) % self._config.num_hidden_layers
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

    def _num_slots(self) -> int:
        """Slots for two tokens: the second time that a token runs it finds all, another token nearly nothing."""
        K, E = self._config.num_experts_per_tok, self._config.num_experts
        all_experts = E * sum(self._table.is_moe(layer) for layer in range(self._table.num_layers))
        return min(2 * K * self._token_layers, max(2 * K, all_experts // 2))

    def _place_experts(self, files: list[Path]) -> None:
        """Find experts to compute in place: of the mapped files, or else of memory."""
        table, rng = self._table, self._rng
        layers = [layer for layer in range(table.num_layers) if table.is_moe(layer)]
        if not layers:
            return
        num = min(len(layers) * table.num_experts, max(1, _IN_PLACE_NBYTES // table.expert_nbytes))
        if not files:
            parts = [extent.nbytes for extent in table.extents(layers[0], 0)]
            self._experts = self._ternary(num * sum(parts))
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

    def _layer(self) -> dict[str, int]:
        config = self._config
        D, E, F = config.hidden_size, config.num_experts, config.moe_intermediate_size
        wide, narrow = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        addresses = {"input_norm": self._ones(D), "post_norm": self._ones(D)}
        addresses |= {"q_norm": self._ones(config.head_dim), "k_norm": self._ones(config.head_dim)}
        for name, out, n in (("q", wide, D), ("k", narrow, D), ("v", narrow, D), ("o", D, wide)):
            addresses[name] = self._keep(self._ternary(out * n // 4))
            addresses[f"{name}_alpha"] = self._alphas(out, n)
        router = self._rng.standard_normal(E * D, np.float32) / np.float32(np.sqrt(D))
        addresses["router"] = self._keep(encode_bf16(router))
        for name, out, n in (("gate", F, D), ("up", F, D), ("down", D, F)):
            addresses[f"{name}_alpha"] = self._alphas(E * out, n)
        return addresses

    def _ternary(self, nbytes: int) -> NDArray[np.uint8]:
        """Packed codes of 0, 1 and 2, four in a byte."""
        digits = self._rng.integers(0, 3, (4, min(nbytes, 1 << 20)), np.uint8)
        return np.resize(digits[0] | digits[1] << 2 | digits[2] << 4 | digits[3] << 6, nbytes)

    def _nibbles(self, num_rows: int) -> tuple[int, int, int]:
        """Addresses of codes, scales and biases of a 4-bit table."""
        D = self._config.hidden_size
        codes = np.resize(self._rng.integers(0, 256, 1 << 20, np.uint8), num_rows * D // 2)
        scales = np.full(num_rows * D // 64, _bf16(0.01), np.uint16)
        biases = np.full(num_rows * D // 64, _bf16(-0.075), np.uint16)
        return self._keep(codes), self._keep(scales), self._keep(biases)

    def _alphas(self, count: int, n: int) -> int:
        return self._keep(np.full(count, _bf16((1.5 / n) ** 0.5), np.uint16))  # products keep their size

    def _ones(self, count: int) -> int:
        return self._keep(np.full(count, _bf16(1.0), np.uint16))

    def _keep(self, array: NDArray[np.generic]) -> int:
        self._kept.append(array)
        return array.ctypes.data


def _in_small_pages(array: NDArray[np.generic]) -> NDArray[np.generic]:
    memory = mmap.mmap(-1, array.nbytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    copy = np.frombuffer(memory, array.dtype)
    copy[:] = array
    return copy


def _bf16(value: float) -> int:
    return int(encode_bf16(np.array([value], np.float32))[0])
