"""Turns a plan and a short probe of this machine into the speed to expect: decode and prefill, cold and warm.

It knows bytes and multiplications, not how they are done. The probe reads some experts from the disk and multiplies
some random codes; where weights are not here it says nothing about cold runs.

A decoded token waits for the bytes that are missing, then computes: what is missing in a layer can only be read
while the layer's residents are computed, so the two hardly overlap. A prefill chunk reads ahead while it
computes: the slower of the two sets its pace, and a part of the other shows.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spile import _core
from spile.architectures.maple import MapleConfig, MapleModel
from spile.errors import SpileError
from spile.residency.experts import ExpertTable
from spile.residency.plan import Plan, head_nbytes
from spile.residency.store import PAGE_NBYTES, Store, aligned_buffer

PROBE_SECONDS = 0.4
# Hit rate of the pool by the share of the experts that it holds. Between a trained model of balanced routing and a
# random one of uneven routing, which differ by 0.15 at most (replays of the demo model and of a random full-size
# one, 2026-11-30); a recorded trace says it better: `spile bench replay`.
_SHARES = (0.0, 0.006, 0.013, 0.03, 0.067, 0.15, 0.34, 0.76, 1.0)
_HIT_RATES = (0.0, 0.035, 0.065, 0.12, 0.19, 0.32, 0.55, 0.9, 1.0)
# What a layer of a decoded token costs beyond its multiplications: starting loops on all threads, norms, routing,
# attention over a short context, Python (0.2 ms a layer, 2 cores of a Zen 4 server, 2026-11-30).
LAYER_SECONDS = 0.0002
# Speed of the tiles that prefill runs, against the probe's single-vector kernel.
PREFILL_GAIN = 1.25
PREFILL_EXPOSED = 0.4  # of the faster of reading and computing, in a cold prefill (measured at 630 MB)
CACHED_PART = 0.56  # of the probe's copying rate that the pool reaches: many files' pages into many slots
THREAD_GAIN = 0.85  # of a further thread: memory and turns are shared


@dataclass(frozen=True)
class Probe:
    """What a machine does in a second, all threads together."""

    macs: float  # products of ternary codes, one vector, weights in memory
    head_macs: float  # the same for 4-bit codes
    cached_nbytes: float  # copied from the page cache
    disk_nbytes: float | None  # read directly, in the pieces that experts lie in; None: unknown


@dataclass(frozen=True)
class Forecast:
    """Tokens per second; `cold` when nothing is in the page cache, None where the disk is unknown."""

    hit_rate: float
    bytes_per_token: int  # that a decoded token misses
    decode_warm: float
    decode_cold: float | None
    prefill_warm: float
    prefill_cold: float | None

    def first_token_seconds(self, num_tokens: int, *, cold: bool) -> float | None:
        """Seconds from a prompt of so many tokens to the first answer token, loading not counted."""
        rate = self.prefill_cold if cold else self.prefill_warm
        return None if rate is None else num_tokens / rate


def probe_machine(model: MapleModel, threads: int) -> Probe:
    """Measure for about a second. Touches disk: some 400 MB of experts are read."""
    gain = 1 + (threads - 1) * THREAD_GAIN
    table = ExpertTable(model)
    disk = cached = None
    with contextlib.suppress(SpileError, OSError):  # weights that are not here: the forecast says less
        disk, cached = _disk_rate(model, table), _cached_rate(model, table, threads)
    return Probe(_ternary_rate() * gain, _head_rate() * gain, cached or 8e9, disk)


def forecast(model: MapleModel, plan: Plan, probe: Probe) -> Forecast:
    """Predict the speed of a plan from a probe. Cost: none."""
    config, table = model.config, ExpertTable(model)
    num_experts = config.num_routed_experts
    token_nbytes = config.num_moe_layers * config.num_experts_per_tok * table.expert_nbytes
    whole_head = head_nbytes(model, config.vocab_size)
    streamed = whole_head * (config.vocab_size - plan.num_head_rows) // config.vocab_size
    share = 1.0 if plan.is_mapped else plan.num_slots / max(1, num_experts)
    hit_rate = float(np.interp(share, _SHARES, _HIT_RATES))
    missed = int(token_nbytes * (1 - hit_rate)) + streamed
    layers, head = layer_macs(config), config.hidden_size * config.vocab_size
    compute = layers / probe.macs + head / probe.head_macs + config.num_hidden_layers * LAYER_SECONDS
    chunk = plan.prefill_chunk
    used = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** chunk
    chunk_compute = chunk * layers / (probe.macs * PREFILL_GAIN)
    chunk_missed = (
        used * max(0, num_experts - (0 if plan.is_mapped else plan.num_slots)) * table.expert_nbytes
    )

    def decode(rate: float | None, nbytes: int) -> float | None:
        return None if rate is None else 1 / (compute + nbytes / rate)

    def prefill(rate: float | None, overlap: bool) -> float | None:
        if rate is None:
            return None
        read = chunk_missed / rate
        slower, faster = max(chunk_compute, read), min(chunk_compute, read)
        return chunk / (slower + faster * (PREFILL_EXPOSED if overlap else 1.0))

    warm = float("inf") if plan.is_mapped else probe.cached_nbytes * CACHED_PART
    decode_warm, prefill_warm = decode(warm, missed), prefill(warm, overlap=False)
    assert decode_warm is not None
    assert prefill_warm is not None
    # A mapped model is cold for its first seconds only, until the files have been read once.
    missed_cold = token_nbytes + whole_head if plan.is_mapped else missed
    return Forecast(
        hit_rate,
        0 if plan.is_mapped else missed,
        decode_warm,
        decode(probe.disk_nbytes, missed_cold),
        prefill_warm,
        prefill(probe.disk_nbytes, overlap=True),
    )


def layer_macs(config: MapleConfig) -> int:
    """Products of codes and activations that a token takes in all layers, without the head."""
    D, q_size = config.hidden_size, config.num_attention_heads * config.head_dim
    attention = D * (2 * q_size + 2 * config.num_key_value_heads * config.head_dim)
    experts = 3 * D * config.moe_intermediate_size * config.num_experts_per_tok
    dense = 3 * D * config.intermediate_size
    num_dense = config.first_k_dense_replace
    return (
        config.num_hidden_layers * attention
        + num_dense * dense
        + (config.num_hidden_layers - num_dense) * experts
    )


def _ternary_rate() -> float:
    rng = np.random.default_rng(0)
    n, out = 2048, 65536  # 32 MB of codes: more than a core's cache
    codes = rng.integers(0, 2**32, (out, n // 16), np.uint32)
    x, alpha = rng.standard_normal((1, n), np.float32), np.full(out, 0x3C00, np.uint16)
    seconds = min(_seconds(lambda: _core.ternary_linear(x, codes, alpha)) for _ in range(3))
    return n * out / seconds


def _head_rate() -> float:
    rng = np.random.default_rng(0)
    n, out = 2048, 16384
    codes = rng.integers(0, 2**32, (out, n // 8), np.uint32)
    x, scales = rng.standard_normal((1, n), np.float32), np.full((out, n // 64), 0x3C00, np.uint16)
    seconds = min(_seconds(lambda: _core.affine4_linear(x, codes, scales, scales)) for _ in range(3))
    return n * out / seconds


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _disk_rate(model: MapleModel, table: ExpertTable) -> float | None:
    """Bytes a second of direct reads of random experts; None where direct reads are refused."""
    store = Store(model.checkpoint.shards, direct=True)
    try:
        if not store.is_direct:
            return None
        return _read_rate(table, store, PROBE_SECONDS)
    finally:
        store.close()


def _read_rate(table: ExpertTable, store: Store, seconds: float) -> float:
    rng = np.random.default_rng(os.getpid())
    layers = [layer for layer in range(table.num_layers) if table.is_moe(layer)]
    # whole pages, and one more for an expert that begins elsewhere in its page
    rooms = [Store.room(extent) + PAGE_NBYTES for extent in table.extents(layers[0], 0)]
    in_flight = 8
    buffer = aligned_buffer(in_flight * sum(rooms))
    at = buffer.ctypes.data + np.cumsum([0, *rooms * in_flight])[:-1]
    starts = at.reshape(in_flight, len(rooms)).tolist()
    tickets: list[int] = []
    nbytes, started = 0, time.perf_counter()
    turn = 0
    while time.perf_counter() - started < seconds:
        if len(tickets) == in_flight:
            store.wait(tickets.pop(0))
            nbytes += table.expert_nbytes
        extents = table.extents(int(rng.choice(layers)), int(rng.integers(table.num_experts)))
        tickets.append(store.submit(extents, starts[turn % in_flight]))
        turn += 1
    elapsed = time.perf_counter() - started
    for ticket in tickets:
        store.wait(ticket)
    return nbytes / elapsed


def _cached_rate(model: MapleModel, table: ExpertTable, threads: int) -> float:
    """Bytes a second that all threads copy from the page cache: the experts of a layer, the second time."""
    layer = next(layer for layer in range(table.num_layers) if table.is_moe(layer))
    extents = [e for expert in range(min(16, table.num_experts)) for e in table.extents(layer, expert)]
    buffer = aligned_buffer(max(extent.nbytes for extent in extents)).data
    with model.checkpoint.shards[extents[0].shard].open("rb", buffering=0) as file:

        def copy() -> None:
            for extent in extents:
                os.preadv(file.fileno(), [buffer[: extent.nbytes]], extent.offset)

        copy()
        seconds = min(_seconds(copy) for _ in range(3))
    return sum(extent.nbytes for extent in extents) / seconds * (1 + (threads - 1) * THREAD_GAIN)
