"""Turns token ids into logits on the CPU: walks Maple's layers over the native decoder and a pool of experts.

It decides the order of work inside a token: attention, routing, the resident experts while the missing ones
are read. It does no arithmetic of its own, and does not know how the pool chooses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spile import _core
from spile.architectures.maple import MapleModel
from spile.engines import EngineOptions
from spile.engines.base import Counters, State
from spile.engines.cpu.head import Head
from spile.engines.cpu.weights import EmbeddingRows, Weights
from spile.errors import BudgetError, ContextError, OptionError
from spile.machine import memory_limit_bytes, physical_cores
from spile.residency.experts import ExpertTable
from spile.residency.mapped import MappedExperts, Touch
from spile.residency.plan import BLOCK_POSITIONS, make_plan, ring_blocks
from spile.residency.policy import Policy
from spile.residency.slots import Slots
from spile.residency.store import Store
from spile.sizes import format_size


class CpuState:
    """The keys and values of one sequence.

    Full-attention layers keep every position, sliding ones only a ring of them: what position p wrote is
    overwritten by p + ring. `written` is one past the highest position that was ever stored, also by a chunk
    that was interrupted; it does not go back with a rewind, so what was overwritten is never taken for whole.
    """

    def __init__(self, cache: _core.KvCache, *, window: int | None, max_chunk: int) -> None:
        """`window` is None where no layer slides; `max_chunk` is the decoder's."""
        self.cache: _core.KvCache | None = cache
        self.written = 0
        self._window = window
        self._ring = ring_blocks(window or 1, max_chunk) * BLOCK_POSITIONS

    @property
    def position(self) -> int:
        return 0 if self.cache is None else self.cache.position

    def can_rewind(self, position: int) -> bool:
        if self.cache is None or not 0 <= position <= self.position:
            return False
        if position in (0, self.position) or self._window is None:
            return True
        oldest = max(0, position - self._window + 1)  # that the next token sees
        return oldest + self._ring >= self.written

    def rewind(self, position: int) -> None:
        assert self.can_rewind(position), f"cannot go back from {self.position} to {position}"
        assert self.cache is not None, "the state was closed"
        self.cache.position = position
        if position == 0:
            self.written = 0

    def close(self) -> None:
        self.cache = None


class CpuEngine:
    """Maple, ready to run. One thread at a time may use it."""

    name = "cpu"
    exact = True

    def __init__(self, model: MapleModel, options: EngineOptions) -> None:
        """Plan, open files, read what stays resident.

        Raises: BudgetError, OptionError, ReadError, CheckpointError.
        """
        config = model.config
        self._config = config
        self.vocab_size = config.vocab_size
        self.num_experts = config.num_experts
        self._isa = os.environ.get("SPILE_ISA") or _core.isas()[0]
        if self._isa not in _core.isas():
            raise OptionError(
                f"SPILE_ISA is {self._isa!r}: this machine runs {', '.join(_core.isas())}",
            )
        self._threads = options.threads or physical_cores()
        table = ExpertTable(model)
        plan = make_plan(model, table, options)
        self.plan, self._kv_bits = plan, options.kv_bits
        self.context, self.prefill_chunk = plan.context, plan.prefill_chunk
        # Told of each decoded token's experts, layer by layer; the ids are its own copy.
        self.on_decode_route: Callable[[NDArray[np.int32]], None] | None = None
        self._closed = False
        self._touch: Touch | None = None
        self._store: Store | None = None
        self._rows: EmbeddingRows | None = None
        self._rows_store: Store | None = None
        try:
            self._weights = Weights(model, is_mapped=plan.is_mapped)
            self._decoder = self._make_decoder(model, options.activation_bytes)
            self.experts: MappedExperts | Slots
            if plan.is_mapped:
                self._touch = Touch(self._weights.ranges)
                self.experts = MappedExperts(table, self._weights.shard_addresses, self._touch)
                codes, scales, biases = (
                    self._weights.tensor(f"{model.embedding_name}.{part}")
                    for part in ("weight", "scales", "biases")
                )
                self._table = codes, scales, biases
                self._head = Head(model, None, config.vocab_size, self._weights)
            else:
                self._store = Store(model.checkpoint.shards, direct=plan.is_direct)
                self._store.read_cached = self._decoder.read_cached
                self._policy = Policy(table.num_layers, table.num_experts)
                self.experts = Slots(table, self._store, self._policy, plan.num_slots)
                self._head = Head(model, self._store, plan.num_head_rows, self._weights)
                # Rows are far smaller than a page: they are read through the page cache in any case.
                self._rows_store = Store(model.checkpoint.shards, direct=False)
                self._rows = EmbeddingRows(model, self._rows_store)
        except BaseException:
            self.close()
            raise
        self._expert_nbytes = table.expert_nbytes
        self._ids = np.empty(config.num_experts, np.int32)
        self._counts = np.empty(config.num_experts, np.int32)
        self._logits = np.empty((1, config.vocab_size), np.float32)

    @property
    def resident_expert_bytes(self) -> int:
        return self.experts.num_resident * self._expert_nbytes

    @property
    def notes(self) -> tuple[str, ...]:
        """What did not go as asked, one line each."""
        notes = []
        if self._store is not None and self._store.note is not None:
            notes.append(self._store.note)
        limit, budget = memory_limit_bytes(), self.plan.budget_nbytes
        if limit is not None and budget is not None and budget > limit + 1_000_000:  # limits are whole pages
            notes.append(
                f"the control group allows {format_size(limit)}, less than the budget of "
                f"{format_size(budget)}: the process may be killed"
            )
        return tuple(notes)

    def new_state(self) -> CpuState:
        config, plan = self._config, self.plan
        window = min(config.sliding_window, plan.context) if any(config.layer_is_sliding) else None
        max_chunk = min(plan.prefill_chunk, plan.context)
        return CpuState(self._decoder.new_cache(), window=window, max_chunk=max_chunk)

    def prefill(
        self, state: State, token_ids: Sequence[int], on_progress: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float32]:
        """Append T tokens, a chunk at a time; return the logits [V] after the last, valid until the next
        call.
        """
        return self._run(state, token_ids, self._logits, on_progress).reshape(-1)

    def decode(self, state: State, token_id: int) -> NDArray[np.float32]:
        return self._run(state, [token_id], self._logits, None).reshape(-1)

    def logits(self, state: State, token_ids: Sequence[int]) -> NDArray[np.float32]:
        out = np.empty((len(token_ids), self.vocab_size), np.float32)
        return self._run(state, token_ids, out, None)

    def counters(self) -> Counters:
        nbytes, reads, seconds, stall = 0, 0, 0.0, 0.0
        for store in (self._store, self._rows_store):
            if store is not None:
                more = store.counters()
                nbytes, reads, seconds = nbytes + more[0], reads + more[1], seconds + more[2]
                stall += store.stall_seconds
        if self._touch is not None:
            stall += self._touch.stall_seconds
        pool = self.experts
        return Counters(nbytes, reads, seconds, stall, pool.hits, pool.misses, pool.evictions)

    def resize(self, memory_bytes: int) -> None:
        plan = self.plan
        if isinstance(self.experts, MappedExperts) or plan.budget_nbytes is None:
            raise OptionError("everything is mapped: there is no pool to resize; load with a memory budget")
        slot_nbytes = self.experts.slot_nbytes
        wanted = plan.num_slots + (memory_bytes - plan.budget_nbytes) // slot_nbytes
        if wanted < plan.least_slots:
            floor = plan.budget_nbytes - (plan.num_slots - plan.least_slots) * slot_nbytes
            raise BudgetError(
                f"the pool cannot shrink to {format_size(memory_bytes)}: what else is resident leaves "
                f"{format_size(floor)} as the least",
                "Load the model again with the smaller budget: the head can then be streamed too.",
            )
        num_slots = min(wanted, plan.most_slots)
        self.experts.resize(num_slots)
        experts = num_slots * slot_nbytes
        self.plan = replace(
            plan,
            num_slots=num_slots,
            budget_nbytes=memory_bytes,
            parts=replace(plan.parts, experts=experts),
        )

    def lend(self, nbytes: int) -> None:
        self.experts.lend(nbytes)

    def summary(self) -> str:
        plan = self.plan
        if plan.is_mapped:
            experts = "all experts mapped in place"
        else:
            total = self._config.num_routed_experts
            reads = "direct" if self._store is not None and self._store.is_direct else "buffered"
            experts = f"{plan.num_slots:,} of {total:,} experts resident, reads {reads}"
            if plan.num_head_rows < self.vocab_size:
                experts += f", {1 - plan.num_head_rows / self.vocab_size:.0%} of the head streamed"
        budget = f"memory {format_size(plan.budget_nbytes)}: " if plan.budget_nbytes is not None else ""
        plural = "" if self._threads == 1 else "s"
        return (
            f"{budget}{experts}, KV {'FP16' if self._kv_bits == 16 else 'float32'}, "
            f"context {self.context:,}, prefill chunk {plan.prefill_chunk}, {self._threads} thread{plural}, "
            f"{self._isa}"
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._touch is not None:
            self._touch.close()
        for store in (self._store, self._rows_store):
            if store is not None:
                store.close()

    def _run(
        self,
        state: State,
        token_ids: Sequence[int],
        out: NDArray[np.float32],
        on_progress: Callable[[int, int], None] | None,
    ) -> NDArray[np.float32]:
        """Append tokens chunk by chunk; fill out [n, V] with the logits after the last n of them."""
        assert not self._closed, "the engine was closed"
        assert isinstance(state, CpuState), "a state of this engine"
        assert state.cache is not None, "the state was closed"
        total, num_logits, chunk = len(token_ids), len(out), self.plan.prefill_chunk
        assert total > 0, "no tokens"
        if state.position + total > self.context:
            raise ContextError(
                f"{state.position + total:,} tokens do not fit the context of {self.context:,}",
                "Give a larger --context, or a shorter prompt.",
            )
        self._weights.check()
        for start in range(0, total, chunk):
            end = min(total, start + chunk)
            state.written = max(state.written, state.position + end - start)
            self._run_layers(state.cache, token_ids[start:end], on_progress, start, total)
            first_wanted = max(start, total - num_logits)
            if first_wanted < end:
                at = first_wanted - (total - num_logits)
                self._decoder.finish(end - first_wanted)
                self._head.logits(self._decoder, out[at : at + end - first_wanted])
            state.cache.position += end - start
        return out

    def _run_layers(
        self,
        cache: _core.KvCache,
        token_ids: Sequence[int],
        on_progress: Callable[[int, int], None] | None,
        done: int,
        total: int,
    ) -> None:
        decoder, ids, counts, T = self._decoder, self._ids, self._counts, len(token_ids)
        num_layers = self._config.num_hidden_layers
        if self._rows is None:
            decoder.begin(*self._table, np.array(token_ids, np.int64))
        else:
            codes, scales, biases = self._rows.read(token_ids)
            addresses = codes.ctypes.data, scales.ctypes.data, biases.ctypes.data
            decoder.begin(*addresses, np.arange(T, dtype=np.int64))
            self._policy.step(T)
        for layer in range(num_layers):
            decoder.attend(cache, layer)
            if not self._config.is_moe(layer):
                decoder.dense(layer)
            else:
                num = decoder.route(layer, ids, counts)
                if T == 1 and self.on_decode_route is not None:
                    self.on_decode_route(ids[:num].copy())
                batches = self.experts.fetch(layer, ids[:num], counts[:num], in_order=T > 1)
                with closing(batches):  # an interrupt between two batches settles the reads in flight
                    for some_ids, places in batches:
                        decoder.experts(layer, some_ids, places)
                decoder.combine()
            if on_progress is not None and T > 1:
                on_progress(done + T * (layer + 1) // num_layers, total)

    def _make_decoder(self, model: MapleModel, activation_bytes: int) -> _core.Decoder:
        config, plan = model.config, self.plan
        decoder = _core.Decoder(
            {
                "hidden_size": config.hidden_size,
                "num_layers": config.num_hidden_layers,
                "num_heads": config.num_attention_heads,
                "num_kv_heads": config.num_key_value_heads,
                "head_dim": config.head_dim,
                "num_experts": config.num_experts,
                "num_chosen": config.num_experts_per_tok,
                "expert_size": config.moe_intermediate_size,
                "dense_size": config.intermediate_size,
                "rope_dims": config.rope_dims,
                "vocab_size": config.vocab_size,
                "window": min(config.sliding_window, plan.context),
                "rms_norm_eps": config.rms_norm_eps,
                "rope_theta": config.rope_theta,
                "half_cache": self._kv_bits == 16,
                "max_chunk": min(plan.prefill_chunk, plan.context),
                "activation_bytes": activation_bytes,
                "sliding": list(config.layer_is_sliding),
            },
            self._isa,
            self._threads,
        )
        for layer in range(config.num_hidden_layers):
            decoder.set_layer(layer, self._weights.layer(layer))
        decoder.set_final_norm(self._weights.tensor("model.norm.weight"))
        return decoder
