"""Turns token ids into logits on the CPU: walks a model's layers over the native decoder and a pool of experts.

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
from spile.architectures.flash_head import open_flash_head
from spile.architectures.spec import OwnModel
from spile.engines.base import Counters, State
from spile.engines.cpu.decoder import make_decoder, rope_of
from spile.engines.cpu.flash_head import ClusteredHead
from spile.engines.cpu.head import Head
from spile.engines.cpu.rope import RopeTable
from spile.engines.cpu.state import CpuState
from spile.engines.cpu.weights import EmbeddingRows, Weights
from spile.errors import BudgetError, ContextError, OptionError
from spile.machine import memory_limit_bytes, physical_cores
from spile.options import EngineOptions
from spile.residency.experts import ExpertTable
from spile.residency.kv import kv_format, kv_nbytes
from spile.residency.mapped import MappedExperts, Touch
from spile.residency.plan import make_plan
from spile.residency.policy import Policy
from spile.residency.selection import Selection
from spile.residency.slots import Foretell, Slots
from spile.residency.store import ShardWatch, Store
from spile.sizes import format_size


class CpuEngine:
    """A model, ready to run. One thread at a time may use it."""

    name = "cpu"

    def __init__(self, model: OwnModel, options: EngineOptions) -> None:
        """Plan, open files, read what stays resident.

        Raises: BudgetError, OptionError, ReadError, CheckpointError.
        """
        spec = model.spec
        self._spec = spec
        self.vocab_size = spec.vocab_size
        self.num_experts = spec.num_experts
        self._isa = os.environ.get("SPILE_ISA") or _core.isas()[0]
        if self._isa not in _core.isas():
            raise OptionError(
                f"SPILE_ISA is {self._isa!r}: this machine runs {', '.join(_core.isas())}",
            )
        self._threads = options.threads or physical_cores()
        table = ExpertTable(model)
        plan = make_plan(model, table, options)
        self.plan, self.kv_format, self._options = plan, kv_format(spec, options), options
        self.exact = options.reselect_every == 1 and not options.flash_head
        self._num_active = options.num_active(spec.num_experts_per_tok) or spec.num_experts
        self.context, self.prefill_chunk = plan.context, plan.prefill_chunk
        self._rope = RopeTable(rope_of(spec))
        self._state_identity = {
            "kv_bits": self.kv_format.key_bits,
            "kv_v_bits": self.kv_format.value_bits,
            "activation_bytes": options.activation_bytes,
        }
        # Told of each decoded token's experts, layer by layer; the ids are its own copy.
        self.on_decode_route: Callable[[NDArray[np.int32]], None] | None = None
        self._closed = False
        self._touch: Touch | None = None
        self._store: Store | None = None
        self._rows: EmbeddingRows | None = None
        self._rows_store: Store | None = None
        self._flash_store: Store | None = None
        self._watch = ShardWatch(model.checkpoint.shards)
        try:
            self._weights = Weights(model, is_mapped=plan.is_mapped)
            self._decoder = self._make_decoder(model, options.activation_bytes)
            self.experts: MappedExperts | Slots
            if plan.is_mapped:
                self._touch = Touch(self._weights.ranges)
                self.experts = MappedExperts(table, self._weights.shard_addresses, self._touch)
                codes, scales, biases = (self._weights.tensor(each.name) for each in spec.embedding.tensors())
                self._table = codes, scales, biases
                self._head = self._open_head(model, None)
            else:
                self._store = Store(model.checkpoint.shards, direct=plan.is_direct)
                self._store.read_cached = self._decoder.read_cached
                self._policy = Policy(table.num_layers, table.num_experts)
                self.experts = Slots(table, self._store, self._policy, plan.num_slots)
                shared = np.arange(options.shared_experts, dtype=np.int32)
                for layer in range(table.num_layers):
                    if len(shared) and table.is_moe(layer):
                        self.experts.pin(layer, shared)
                self._head = self._open_head(model, self._store)
                # Rows are far smaller than a page: they are read through the page cache in any case.
                self._rows_store = Store(model.checkpoint.shards, direct=False)
                self._rows = EmbeddingRows(model, self._rows_store)
        except BaseException:
            self.close()
            raise
        self.expert_nbytes = table.expert_nbytes
        self._ids = np.empty(spec.num_experts, np.int32)
        self._counts = np.empty(spec.num_experts, np.int32)
        self._foretold = np.empty(spec.num_experts_per_tok, np.int32)
        self._logits = np.empty((1, spec.vocab_size), np.float32)

    @property
    def resident_expert_bytes(self) -> int:
        return self.experts.num_resident * self.expert_nbytes

    @property
    def kv_room_nbytes(self) -> int:
        return self.plan.parts.kv

    def kv_nbytes(self, num_tokens: int) -> int:
        return kv_nbytes(self._spec, num_tokens, min(self.prefill_chunk, self.context), self.kv_format)

    @property
    def notes(self) -> tuple[str, ...]:
        """What did not go as asked, one line each."""
        notes = []
        if not self.exact:
            notes.append(self._approximation)
        if isinstance(self._head, ClusteredHead) and self._head.note is not None:
            notes.append(self._head.note)
        if self._store is not None and self._store.note is not None:
            notes.append(self._store.note)
        limit, budget = memory_limit_bytes(), self.plan.budget_nbytes
        if limit is not None and budget is not None and budget > limit + 1_000_000:  # limits are whole pages
            notes.append(
                f"the control group allows {format_size(limit)}, less than the budget of "
                f"{format_size(budget)}: the process may be killed"
            )
        return tuple(notes)

    @property
    def _approximation(self) -> str:
        """What is not the model's own answer, in a few words."""
        reasons = []
        every = self._options.reselect_every
        if every != 1:
            when = f"every {every} tokens" if every else "after the prompt only"
            reasons.append(
                f"routers choose from {self._num_active} experts a layer, selected {when} "
                f"(reselect_every {every})"
            )
        if isinstance(self._head, ClusteredHead):
            reasons.append(self._head.approximation)
        return f"approximate: {' and '.join(reasons)}"

    def new_state(self) -> CpuState:
        spec, plan = self._spec, self.plan
        window = min(spec.sliding_window, plan.context) if any(spec.layer_is_sliding) else None
        max_chunk = min(plan.prefill_chunk, plan.context)
        selection = None
        if self._options.reselect_every != 1:
            selection = Selection(
                spec.num_hidden_layers,
                spec.num_experts,
                num_active=self._num_active,
                num_shared=self._options.shared_experts,
                every=self._options.reselect_every,
            )
        return CpuState(
            self._decoder.new_cache(),
            window=window,
            max_chunk=max_chunk,
            layer_is_sliding=spec.layer_is_sliding,
            selection=selection,
            identity=self._state_identity,
        )

    def prefill(
        self, state: State, token_ids: Sequence[int], on_progress: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float32]:
        """Append T tokens, a chunk at a time; return the logits [V] after the last, valid until the next
        call.
        """
        return self._read(state, token_ids, self._logits, on_progress).reshape(-1)

    def read(
        self, state: State, token_ids: Sequence[int], on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Append T tokens whose logits nobody wants: the head is not computed, nor read where it is streamed."""
        self._read(state, token_ids, self._logits[:0], on_progress)

    def decode(self, state: State, token_id: int) -> NDArray[np.float32]:
        assert isinstance(state, CpuState), "a state of this engine"
        if state.selection is not None:
            state.selection.begin_token()
        return self._append(state, [token_id], self._logits, None).reshape(-1)

    def logits(self, state: State, token_ids: Sequence[int]) -> NDArray[np.float32]:
        out = np.empty((len(token_ids), self.vocab_size), np.float32)
        return self._read(state, token_ids, out, None)

    def counters(self) -> Counters:
        nbytes, reads, seconds, stall = 0, 0, 0.0, 0.0
        for store in (self._store, self._rows_store, self._flash_store):
            if store is not None:
                more = store.counters()
                nbytes, reads, seconds = nbytes + more[0], reads + more[1], seconds + more[2]
                stall += store.stall_seconds
        if self._touch is not None:
            stall += self._touch.stall_seconds
        pool = self.experts
        return Counters(nbytes, reads, seconds, stall, pool.hits, pool.misses, pool.evictions, pool.unwanted)

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
            total = self._spec.num_routed_experts
            reads = "direct" if self._store is not None and self._store.is_direct else "buffered"
            experts = f"{plan.num_slots:,} of {total:,} experts resident, reads {reads}"
            if plan.num_head_rows < self.vocab_size:
                experts += f", {1 - plan.num_head_rows / self.vocab_size:.0%} of the head streamed"
            if self._options.shared_experts:
                experts += f", the first {self._options.shared_experts} of each layer pinned"
        if not self.exact:
            experts += f", {self._approximation}"
        budget = f"memory {format_size(plan.budget_nbytes)}: " if plan.budget_nbytes is not None else ""
        plural = "" if self._threads == 1 else "s"
        return (
            f"{budget}{experts}, KV {self.kv_format.describe(self._spec)}, "
            f"context {self.context:,}, prefill chunk {plan.prefill_chunk}, {self._threads} thread{plural}, "
            f"{self._isa}"
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._touch is not None:
            self._touch.close()
        for store in (self._store, self._rows_store, self._flash_store):
            if store is not None:
                store.close()
        self._watch.close()

    def _read(
        self,
        state: State,
        token_ids: Sequence[int],
        out: NDArray[np.float32],
        on_progress: Callable[[int, int], None] | None,
    ) -> NDArray[np.float32]:
        """Append tokens that were given, with every expert there to choose from."""
        assert isinstance(state, CpuState), "a state of this engine"
        if state.selection is not None:
            state.selection.begin_prompt()
        return self._append(state, token_ids, out, on_progress)

    def _append(
        self,
        state: CpuState,
        token_ids: Sequence[int],
        out: NDArray[np.float32],
        on_progress: Callable[[int, int], None] | None,
    ) -> NDArray[np.float32]:
        """Append tokens chunk by chunk; fill out [n, V] with the logits after the last n of them."""
        assert not self._closed, "the engine was closed"
        assert state.cache is not None, "the state was closed"
        total, num_logits, chunk = len(token_ids), len(out), self.plan.prefill_chunk
        assert total > 0, "no tokens"
        if state.position + total > self.context:
            raise ContextError(
                f"{state.position + total:,} tokens do not fit the context of {self.context:,}",
                "Give a larger --context, or a shorter prompt.",
            )
        for start in range(0, total, chunk):
            self._watch.check()
            end = min(total, start + chunk)
            state.written = max(state.written, state.position + end - start)
            self._run_layers(state, token_ids[start:end], on_progress, start, total)
            first_wanted = max(start, total - num_logits)
            if first_wanted < end:
                at = first_wanted - (total - num_logits)
                self._decoder.finish(end - first_wanted)
                self._head.logits(self._decoder, out[at : at + end - first_wanted])
            state.cache.position += end - start
        return out

    def _run_layers(
        self,
        state: CpuState,
        token_ids: Sequence[int],
        on_progress: Callable[[int, int], None] | None,
        done: int,
        total: int,
    ) -> None:
        decoder, ids, counts, T = self._decoder, self._ids, self._counts, len(token_ids)
        num_layers, selection = self._spec.num_hidden_layers, state.selection
        assert state.cache is not None, "the state was closed"
        rope = self._rope.rows(state.cache.position, T)
        if self._rows is None:
            decoder.begin(*self._table, np.array(token_ids, np.int64), rope)
        else:
            codes, scales, biases, rows = self._rows.read(token_ids)
            addresses = codes.ctypes.data, scales.ctypes.data, biases.ctypes.data
            decoder.begin(*addresses, rows, rope)
            self._policy.step(T)
        for layer in range(num_layers):
            decoder.attend(state.cache, layer)
            if not self._spec.is_moe(layer):
                decoder.dense(layer)
            else:
                if selection is None:
                    num = decoder.route(layer, ids, counts)
                else:
                    num = decoder.route(layer, ids, counts, selection.allowed(layer))
                    selection.choose(layer, ids[:num], counts[:num])
                if T == 1 and self.on_decode_route is not None:
                    self.on_decode_route(ids[:num].copy())
                foretell = self._foretell(layer + 1) if T == 1 and selection is None else None
                batches = self.experts.fetch(
                    layer, ids[:num], counts[:num], in_order=T > 1, foretell=foretell
                )
                with closing(batches):  # an interrupt between two batches settles the reads in flight
                    for some_ids, places in batches:
                        decoder.experts(layer, some_ids, places)
                decoder.combine()
            if on_progress is not None and T > 1:
                on_progress(done + T * (layer + 1) // num_layers, total)

    def _foretell(self, layer: int) -> Foretell | None:
        """Return what guesses a layer's experts, where reading some before it asks may pay: from the disk."""
        if self._store is None or not self._store.is_direct:
            return None
        if layer == self._spec.num_hidden_layers or not self._spec.is_moe(layer):
            return None

        def foretell() -> tuple[int, NDArray[np.int32]]:
            self._decoder.foretell(layer, self._foretold)
            return layer, self._foretold

        return foretell

    def _open_head(self, model: OwnModel, store: Store | None) -> Head | ClusteredHead:
        num_rows = self.plan.num_head_rows
        if not self._options.flash_head:
            return Head(model, store, num_rows, self._weights)
        spec = model.spec
        flash = open_flash_head(model.checkpoint, vocab_size=spec.vocab_size, hidden_size=spec.hidden_size)
        if store is not None:
            self._flash_store = Store(flash.shards, direct=False)
            self._flash_store.read_cached = self._decoder.read_cached
        return ClusteredHead(model, flash, num_rows, self._weights, store=store, rows_store=self._flash_store)

    def _make_decoder(self, model: OwnModel, activation_bytes: int) -> _core.Decoder:
        spec, plan = model.spec, self.plan
        decoder = make_decoder(
            spec,
            self._isa,
            self._threads,
            context=plan.context,
            max_chunk=plan.prefill_chunk,
            kv=self.kv_format,
            activation_bytes=activation_bytes,
        )
        for layer in range(spec.num_hidden_layers):
            decoder.set_layer(layer, self._weights.layer(layer))
        decoder.set_final_norm(self._weights.tensor(f"{spec.norm.name}.weight"))
        return decoder
