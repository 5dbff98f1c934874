"""Turns a plan and what a probe of this machine measured into the speed to expect: decode and prefill, cold and warm.

It measures nothing and touches no disk; `engines/cpu/probe.py` tries the engine's steps.

A decoded token's layer takes the time of one whose experts are all in the pool, and for every missing expert its part
of what a layer of missing experts takes longer; from the disk, a few together are read more slowly than many. A
prompt's chunk, read cold, overlaps its reads with the experts' computation and not with attention, where nothing is in
flight yet; read from the page cache, the same threads copy and compute. How many experts are missing is the routing's:
what a recorded trace says, or what is usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spile.architectures.spec import ModelSpec, OwnModel
from spile.errors import OptionError
from spile.residency.experts import ExpertTable
from spile.residency.plan import Plan
from spile.residency.replay import Trace, replay, sizes_to_try
from spile.residency.weights import head_nbytes

# Hit rate of the pool by the share of the experts that it holds: a replay of 200 tokens of the random full-size model
# (2026-11-30), whose routing is uneven and not predictable. Others report for trained models 0.45 to 0.67 at an eighth
# to a quarter, and 0.83 at half; the demo model, small and evenly used, has 0.1 less in the middle.
_SHARES = (0.0, 0.003, 0.016, 0.033, 0.067, 0.104, 0.2, 0.31, 0.5, 0.75, 1.0)
_HIT_RATES = (0.0, 0.01, 0.10, 0.16, 0.25, 0.33, 0.46, 0.60, 0.80, 0.94, 1.0)
_PROMPT_TOKENS = 512  # of the prompt that prefill speeds are said for
_DISTINCT_PART = 0.4  # of a prompt's tokens: 200 of 512 in English prose about software


# That a byte which comes into the page cache adds to what is computed meanwhile, at most. A virtual machine's host has
# to find memory for it too: 0.4 and 0.55 s a GB where fresh memory came at 0.8 and 0.45 GB/s (2026-11-30).
_MOST_ADDED_SECONDS = 0.45e-9


class ChunkSeconds(NamedTuple):
    """One layer of a prefill chunk."""

    attend: float  # attention and router
    experts: float


@dataclass(frozen=True)
class Probe:
    """What this machine takes for the steps of the engine; seconds are of one layer. None: unknown."""

    begin_seconds: float  # of a token, before its first layer, all in mapped files
    pooled_begin_seconds: float  # the same with a pool: its embedding rows are read
    row_seconds: float  # of an embedding row, read with those of a chunk
    attend_seconds: float  # of a token: attention and router
    resident_seconds: float  # of a token, every expert in place in mapped files
    pooled_seconds: float  # the same, through a pool that holds them all
    half_disk_seconds: float | None  # of a token of whose experts half are read from the disk
    disk_seconds: float | None  # of a token whose experts are all read from the disk
    cached_seconds: float | None  # of a token whose experts are all copied from the page cache
    head_seconds: float  # of a token, all rows resident
    mapped_head_seconds: float  # the same in mapped files
    loop_seconds: float  # between two tokens: sampling, text
    chunks: Mapping[int, ChunkSeconds]  # by tokens
    cached_miss_seconds: float | None  # that an expert copied from the page cache adds to a chunk
    cached_nbytes: float | None  # bytes a second copied from the page cache
    disk_nbytes: float | None  # bytes a second read from the disk, many reads in flight
    touched_nbytes: float | None  # bytes a second of mapped files that are made present from the disk
    overlap_loss: float  # times longer than reading or computing alone a chunk takes to do both at once
    fresh_nbytes: float  # bytes a second of memory taken from the system: a virtual machine's may be slow


@dataclass(frozen=True)
class Forecast:
    """Tokens per second; `warm` when files are in the page cache, outside the budget, `cold` when they never are. None
    where it is unknown, or cannot be: direct reads find nothing warm. Prefill is of a prompt of 512 tokens into an
    empty pool.
    """

    hit_rate: float
    bytes_per_token: int  # that a decoded token misses
    decode_warm: float | None
    decode_cold: float | None
    prefill_warm: float | None
    prefill_cold: float | None

    def first_token_seconds(self, num_tokens: int, *, cold: bool) -> float | None:
        """Seconds from a prompt of so many tokens to the first answer token, loading not counted."""
        rate = self.prefill_cold if cold else self.prefill_warm
        return None if rate is None else num_tokens / rate


class Routing:
    """How experts are wanted: the hit rate of a pool, and how many of a layer a chunk wants."""

    def __init__(
        self,
        shares: Sequence[float] = _SHARES,
        hit_rates: Sequence[float] = _HIT_RATES,
        unevenness: float = 1.0,
    ) -> None:
        """By default, what is usual."""
        self._shares, self._hit_rates, self._unevenness = np.array(shares), np.array(hit_rates), unevenness

    def hit_rate(self, share: float) -> float:
        """Return the part of wanted experts that a pool of this share of all experts holds."""
        return float(np.interp(share, self._shares, self._hit_rates))

    def used(self, num_tokens: int, num_chosen: int, num_experts: int) -> float:
        """Return the part of a layer's experts that a chunk of so many tokens wants.

        With m choices an expert on average, m / (u + m); u is 1 where popularities are spread exponentially, and less
        where experts are used evenly. Measured with real text: 0.58 at m = 2, 0.83 at 8, 0.90 at 16 (random full-size
        model, u = 1.4 to 1.8); 0.80 at 2 (demo model, u = 0.5).
        """
        m = num_tokens * num_chosen / num_experts
        return m / (self._unevenness + m)


def routing_of(
    trace: Trace,
    num_experts: int,
    spec: ModelSpec,
    name: str,
    hit_rates: Mapping[int, float] | None = None,
) -> Routing:
    """Take the routing of a model from a trace of it; `hit_rates` by slots are known from a replay, or else found.

    Raises: OptionError when the trace is another model's.
    """
    own = (spec.num_moe_layers, spec.num_experts_per_tok, spec.num_experts)
    has = (*trace.shape[1:], num_experts)
    if has != own:
        said, wanted = ("{} layers, {} of {} experts".format(*sizes) for sizes in (has, own))
        raise OptionError(f"{name} is of another model: it has {said}, and this model {wanted}")
    _, L, K = trace.shape
    if hit_rates is None:
        sizes = sizes_to_try(trace, num_experts)
        hit_rates = {size: replay(trace, num_experts, size, "spile").hit_rate for size in sizes}
    first = trace[:_PROMPT_TOKENS]
    distinct = float(np.mean([len(np.unique(first[:, layer])) for layer in range(L)])) / num_experts
    return Routing(
        [0.0, *(size / (L * num_experts) for size in hit_rates)],
        [0.0, *hit_rates.values()],
        len(first) * K / num_experts * (1 / distinct - 1),
    )


USUAL_ROUTING = Routing()


def forecast(model: OwnModel, plan: Plan, probe: Probe, routing: Routing = USUAL_ROUTING) -> Forecast:
    """Predict the speed of a plan from a probe. Cost: none."""
    return _Sum(model, plan, probe, routing).forecast()


class _Sum:
    """The seconds of a plan's parts."""

    def __init__(self, model: OwnModel, plan: Plan, probe: Probe, routing: Routing) -> None:
        spec, table = model.spec, ExpertTable(model)
        self._spec, self._plan, self._probe, self._routing = spec, plan, probe, routing
        self._expert_nbytes = table.expert_nbytes
        self._file_nbytes = sum(tensor.nbytes for tensor in model.checkpoint.tensors.values())
        self._num_experts = spec.num_routed_experts
        self._num_slots = self._num_experts if plan.is_mapped else plan.num_slots
        self._streamed = 0
        if not plan.is_mapped:
            rows = spec.vocab_size - plan.num_head_rows
            self._streamed = head_nbytes(model, spec.vocab_size) * rows // spec.vocab_size
        self._hit_rate = 1.0
        if self._num_slots < self._num_experts:
            self._hit_rate = routing.hit_rate(self._num_slots / self._num_experts)

    def forecast(self) -> Forecast:
        probe, plan = self._probe, self._plan
        wanted = self._spec.num_moe_layers * self._spec.num_experts_per_tok
        missed = int(wanted * self._expert_nbytes * (1 - self._hit_rate)) + self._streamed
        if plan.is_mapped:
            decode = 1 / self._decode(probe.resident_seconds, None)
            # the files are made present while the prompt is read, and then all is warm
            return Forecast(1.0, 0, decode, decode, self._prefill_warm(), self._mapped_prefill_cold())
        warm = prefill_warm = cold = prefill_cold = None
        if not plan.is_direct and probe.cached_seconds is not None:
            warm, prefill_warm = (
                1 / self._decode(probe.cached_seconds, probe.cached_nbytes),
                self._prefill_warm(),
            )
        if probe.disk_seconds is not None:
            tried = self._decode(probe.disk_seconds, probe.disk_nbytes, probe.half_disk_seconds)
            # a trial is short: a disk that pays back its idle time may look faster in it than it is
            cold = 1 / max(tried, missed / (probe.disk_nbytes or float("inf")))
            prefill_cold = self._prefill_cold()
        return Forecast(self._hit_rate, missed, warm, cold, prefill_warm, prefill_cold)

    def _decode(
        self, missing_seconds: float | None, rate: float | None, half_seconds: float | None = None
    ) -> float:
        """Seconds of a token; `missing_seconds` of a layer whose experts are all missing, and if half are."""
        spec, probe = self._spec, self._probe
        hit = probe.resident_seconds if self._plan.is_mapped else probe.pooled_seconds
        layer = hit
        if missing_seconds is not None:
            most = max(hit, missing_seconds)
            half = (hit + most) / 2 if half_seconds is None else min(max(hit, half_seconds), most)
            layer = float(np.interp(1 - self._hit_rate, (0.0, 0.5, 1.0), (hit, half, most)))
        experts = probe.resident_seconds - probe.attend_seconds
        chosen = spec.num_experts_per_tok * spec.moe_intermediate_size
        dense = spec.intermediate_size / chosen if chosen else 1.0  # without experts a dense layer was tried
        return (
            (probe.begin_seconds if self._plan.is_mapped else probe.pooled_begin_seconds)
            + spec.num_moe_layers * layer
            + (spec.num_hidden_layers - spec.num_moe_layers) * (probe.attend_seconds + experts * dense)
            + self._head(rate)
            + probe.loop_seconds
        )

    def _head(self, rate: float | None) -> float:
        """Seconds of the head: pieces are read while others are computed, and cached ones are copied by the same
        cores.
        """
        head = self._probe.mapped_head_seconds if self._plan.is_mapped else self._probe.head_seconds
        if not self._streamed or rate is None:
            return head
        return (
            head + self._streamed / rate
            if rate == self._probe.cached_nbytes
            else max(head, self._streamed / rate)
        )

    def _chunks(self) -> list[_Chunk]:
        """The chunks of a prompt, from an empty pool on."""
        spec, plan, probe = self._spec, self._plan, self._probe
        chunks, resident = [], 0
        for start in range(0, _PROMPT_TOKENS, plan.prefill_chunk):
            T = min(plan.prefill_chunk, _PROMPT_TOKENS - start)
            used = (
                self._routing.used(T, spec.num_experts_per_tok, max(1, spec.num_experts)) * self._num_experts
            )
            missing = 0 if plan.is_mapped else int(max(0.0, used - resident))
            tried = min(probe.chunks, key=lambda chunk: abs(chunk - T))
            scale = spec.num_hidden_layers * T / tried
            # the pool's memory comes from the system as it is first filled, on the threads that compute
            fresh = min(missing, self._num_slots - resident) * self._expert_nbytes / probe.fresh_nbytes
            attend, experts = (seconds * scale for seconds in probe.chunks[tried])
            rows = 0.0 if plan.is_mapped else _DISTINCT_PART * T * probe.row_seconds
            chunks.append(_Chunk(rows + attend, experts, fresh, missing))
            resident = self._num_slots
        return chunks

    def _prefill_warm(self) -> float | None:
        """Threads copy from the page cache, then compute."""
        miss = self._probe.cached_miss_seconds
        if miss is None and not self._plan.is_mapped:
            return None
        seconds = sum(c.attend + c.experts + c.fresh + c.missing * (miss or 0) for c in self._chunks())
        return _PROMPT_TOKENS / (seconds + self._head(self._probe.cached_nbytes))

    def _prefill_cold(self) -> float | None:
        """Experts are computed while others are read; nothing is read during attention, and the threads that read into
        fresh memory take it from the cores that compute.
        """
        rate, loss = self._probe.disk_nbytes, self._probe.overlap_loss
        if rate is None:
            return None
        seconds = sum(
            c.attend + c.fresh + loss * max(c.experts, c.missing * self._expert_nbytes / rate)
            for c in self._chunks()
        )
        return _PROMPT_TOKENS / (seconds + self._head(rate))

    def _mapped_prefill_cold(self) -> float | None:
        """The files are made present in their order while layers are computed."""
        warm, rate = self._prefill_warm(), self._probe.touched_nbytes
        if warm is None or rate is None:
            return None
        added = min(_MOST_ADDED_SECONDS, 1 / (2 * self._probe.fresh_nbytes)) * self._file_nbytes
        return _PROMPT_TOKENS / max(_PROMPT_TOKENS / warm + added, self._file_nbytes / rate)


class _Chunk(NamedTuple):
    """Seconds of all layers of a prefill chunk, and what it reads."""

    attend: float  # embedding rows, attention and routers
    experts: float
    fresh: float  # to take the pool's memory
    missing: int  # experts that it reads
