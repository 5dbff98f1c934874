"""Turns token ids into logits on the CPU: walks a model's layers over the native decoder and a pool of experts.

It decides the order of work inside a token: attention, routing, the resident experts while the missing ones
are read. It does no arithmetic of its own, and does not know how the pool chooses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from spile import _core
from spile.architectures.flash_head import open_flash_head
from spile.architectures.spec import OwnModel
from spile.engines.base import Counters, OnLogits, State
from spile.engines.cpu.decoder import make_decoder, rope_of
from spile.engines.cpu.faults import raise_fault
from spile.engines.cpu.flash_head import ClusteredHead
from spile.engines.cpu.head import Head
from spile.engines.cpu.rope import RopeTable
from spile.engines.cpu.state import CpuState
from spile.engines.cpu.weights import EmbeddingRows, Weights
from spile.errors import BudgetError, ContextError, OptionError, SpileError
from spile.machine import memory_limit_bytes, physical_cores
from spile.memory import trim
from spile.options import EngineOptions
from spile.residency.experts import ExpertTable
from spile.residency.kv import group_size, kv_format, kv_nbytes
from spile.residency.mapped import MappedRoom, Touch
from spile.residency.pages import Pages
from spile.residency.plan import MemoryNow, Plan, make_plan, memory_now
from spile.residency.policy import Policy
from spile.residency.pool import Foretell, Order, Pool
from spile.residency.selection import Selection
from spile.residency.store import ShardWatch, Store
from spile.sizes import format_size

# Positions whose logits exist at once where those of all are wanted: 10 MB of a full-size Maple. More would spare
# passes over a streamed head, at the cost of the pool.
_SCORED_TOGETHER = 16
_SHORT_CONTEXT = 1024  # tokens of a conversation that a summary counts on, where nobody named a budget


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
        self._model, self._table, self._options = model, ExpertTable(model), options
        self.expert_nbytes, self.kv_format = self._table.expert_nbytes, kv_format(spec, options)
        self.exact = options.reselect_every == 1 and not options.flash_head
        self._num_active = options.num_active(spec.num_experts_per_tok) or spec.num_experts
        self._rope = RopeTable(rope_of(spec))
        self._state_identity = {
            "kv_bits": self.kv_format.key_bits,
            "kv_v_bits": self.kv_format.value_bits,
            **({"kv_ring_bits": self.kv_format.ring_bits} if any(spec.layer_is_sliding) else {}),
            "activation_bytes": options.activation_bytes,
        }
        # Told of each decoded token's experts, layer by layer; the ids are its own copy.
        self.on_decode_route: Callable[[NDArray[np.int32]], None] | None = None
        self._closed = False
        self._last: Counters | None = None  # of a closed engine
        self._states: WeakSet[CpuState] = WeakSet()
        self._held_nbytes: dict[str, int] = {}
        plan = make_plan(model, self._table, options)
        self._check_selection(plan.num_slots)
        self._begin(plan)
        self._ids = np.empty(spec.num_experts, np.int32)
        self._counts = np.empty(spec.num_experts, np.int32)
        self._foretold = np.empty(spec.num_experts_per_tok, np.int32)
        self._logits = np.empty((1, spec.vocab_size), np.float32)

    def _begin(self, plan: Plan) -> None:
        """Open files and read what stays resident, as a plan says; what fails is given back.

        Raises: ReadError, CheckpointError, OptionError.
        """
        model, table, options = self._model, self._table, self._options
        self.plan, self.context, self.prefill_chunk = plan, plan.context, plan.prefill_chunk
        self._touch: Touch | None = None
        self._store: Store | None = None
        self._pool: Pool | None = None
        self._rows: EmbeddingRows | None = None
        self._rows_store: Store | None = None
        self._flash_store: Store | None = None
        self._watch = ShardWatch(model.checkpoint.shards)
        try:
            self._weights = Weights(model, is_mapped=plan.is_mapped)
            self._layers = [self._weights.layer(layer) for layer in range(table.num_layers)]
            self._final_norm = self._weights.tensor(f"{model.spec.norm.name}.weight")
            self._decoder = self._make_decoder()
            policy = Policy(table.num_layers, table.num_experts)
            if plan.is_mapped:
                self._touch = Touch(self._weights.ranges, self._weights)
                room = MappedRoom(table, self._weights.shard_addresses, self._touch)
                self._pool = Pool(room, None, policy, 0)
                codes, scales, biases = (
                    self._weights.tensor(each.name) for each in model.spec.embedding.tensors()
                )
                self._embedding = codes, scales, biases
            else:
                self._store = Store(model.checkpoint.shards, direct=plan.is_direct)
                self._pool = Pool(Pages(table), self._store, policy, plan.num_slots)
                shared = np.arange(options.shared_experts, dtype=np.int32)
                for layer in range(table.num_layers):
                    if len(shared) and table.is_moe(layer):
                        self._pool.pin(layer, shared)
                # Rows are far smaller than a page: they are read through the page cache in any case.
                self._rows_store = Store(model.checkpoint.shards, direct=False)
                self._rows = EmbeddingRows(model, self._rows_store)
            self._head = self._open_head()
            self._read_with_decoder()
            self._share_room()
        except BaseException:
            self.close()
            raise

    def _read_with_decoder(self) -> None:
        """Let the decoder's threads copy what the page cache holds."""
        for store in (self._store, self._flash_store):
            if store is not None:
                store.read_cached = self._decoder.read_cached

    @property
    def experts(self) -> Pool:
        """The pool.

        Raises: SpileError after `close`.
        """
        if self._pool is None:
            raise SpileError("this model was closed")
        return self._pool

    @property
    def resident_expert_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.num_resident * self.expert_nbytes

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
        state = CpuState(
            self._decoder.new_cache(),
            window=window,
            max_chunk=max_chunk,
            layer_is_sliding=spec.layer_is_sliding,
            selection=selection,
            identity=self._state_identity,
            context=plan.context,
            on_grow=self._share_room,
        )
        self._states.add(state)
        return state

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

    def score(
        self,
        state: State,
        token_ids: Sequence[int],
        on_logits: OnLogits,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Append T tokens and hand over the logits after each, `_SCORED_TOGETHER` positions at a time: the pool
        lends their memory. A streamed head is read again for each such block.
        """
        self._read(state, token_ids, self._logits[:0], on_progress, on_logits)

    def counters(self) -> Counters:
        if self._last is not None:
            return self._last
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
        plan, now = self.plan, memory_now()
        outside = max(0, now.process_nbytes - plan.parts.process)  # what this engine holds
        then = MemoryNow(plan.parts.process, now.available_nbytes + outside, now.limit_nbytes)
        options = replace(self._options, memory_bytes=memory_bytes)
        wanted = make_plan(self._model, self._table, options, then)
        self._check_selection(wanted.num_slots)
        self._check_states(wanted)
        self._options = options
        if plan.is_mapped or wanted.is_mapped:
            if not (plan.is_mapped and wanted.is_mapped):
                self._end()
                self._begin(wanted)
            self.plan = wanted
            return
        wanted = replace(wanted, is_direct=plan.is_direct)
        shape = plan.prefill_chunk, plan.context, plan.num_head_rows
        is_other = shape != (wanted.prefill_chunk, wanted.context, wanted.num_head_rows)
        self.plan, self.context, self.prefill_chunk = wanted, wanted.context, wanted.prefill_chunk
        self._share_room()  # first, so that there is room for what follows
        if is_other:
            try:
                del self._head, self._decoder
                trim()
                self._decoder = self._make_decoder()
                self._head = self._open_head()
                self._read_with_decoder()
            except BaseException:  # half of an engine would answer nothing
                self.close()
                raise
        trim()

    def _check_states(self, plan: Plan) -> None:
        """Check that a plan has room for what is held now.

        Raises: BudgetError.
        """
        longest = max((state.position for state in self._states), default=0)
        used = self._used_nbytes()
        has_room = plan.is_mapped or plan.slots_beside(used) >= plan.least_slots or not plan.shared_nbytes
        if longest <= plan.context and has_room:
            return
        raise BudgetError(
            f"a budget of {format_size(plan.budget_nbytes or 0)} has room for a context of {plan.context:,} tokens, "
            f"and a conversation of {longest:,} is going on ({format_size(used)} of keys, values and kept prompts)",
            "Let it end first, or give a larger budget.",
        )

    def hold(self, owner: str, nbytes: int) -> None:
        if nbytes <= self._held_nbytes.get(owner, 0):
            self._held_nbytes[owner] = nbytes  # the pool grows with the next token
            return
        used = self._used_nbytes() - self._held_nbytes.get(owner, 0) + nbytes
        plan = self.plan
        if not plan.is_mapped and plan.slots_beside(used) < plan.least_slots:
            lacking = used - plan.shared_nbytes - (plan.num_slots - plan.least_slots) * plan.slot_nbytes
            raise BudgetError(
                f"{owner} would take {format_size(nbytes)}, and the budget has {format_size(nbytes - lacking)} for it",
                "Load the model with a larger budget.",
            )
        self._held_nbytes[owner] = nbytes
        self._share_room()

    def _used_nbytes(self, growing: CpuState | None = None, end: int = 0) -> int:
        """Return the bytes of keys and values, once a state has `end` positions, and of what others hold."""
        used = sum(self._held_nbytes.values())
        for state in self._states:
            if state.cache is not None:
                grown = self.kv_nbytes(end) if state is growing else 0
                used += max(state.cache.nbytes, grown)
        return used

    def _share_room(self, growing: CpuState | None = None, end: int = 0) -> None:
        """Let the pool have what is set aside for keys, values and kept prompts and not in use: before a state grows
        to `end` positions, its room is taken from the pool.
        """
        plan = self.plan
        if plan.is_mapped or not plan.shared_nbytes:
            return
        num_slots = max(plan.slots_beside(self._used_nbytes(growing, end)), plan.least_slots)
        if num_slots != self.experts.num_slots:
            self.experts.resize(num_slots)

    def _check_selection(self, num_slots: int) -> None:
        """Check that the pool can hold what is selected, so that nothing is read between two selections.

        Raises: OptionError with both numbers.
        """
        spec = self._spec
        needed = self._num_active * sum(map(spec.is_moe, range(spec.num_hidden_layers)))
        if self._options.reselect_every != 1 and num_slots < needed:
            raise OptionError(
                f"a selection of {self._num_active} experts a layer takes {needed:,} slots, and the pool has "
                f"{num_slots:,}",
                "Give more memory, fewer --active-experts, or leave out --reselect-every.",
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
            experts = f"{self.experts.num_slots:,} of {total:,} experts resident, reads {reads}"
            if plan.num_head_rows < self.vocab_size:
                experts += f", {1 - plan.num_head_rows / self.vocab_size:.0%} of the head streamed"
            if self._options.shared_experts:
                experts += f", the first {self._options.shared_experts} of each layer pinned"
        if not self.exact:
            experts += f", {self._approximation}"
        budget = f"memory {format_size(plan.budget_nbytes)}: " if plan.budget_nbytes is not None else ""
        if self._options.memory_bytes is None and not plan.is_mapped and not plan.shared_nbytes:
            first = plan.parts.total - plan.parts.kv + self.kv_nbytes(min(plan.context, _SHORT_CONTEXT))
            budget = f"memory {format_size(first)}, {format_size(plan.parts.total)} at a full context: "
        plural = "" if self._threads == 1 else "s"
        return (
            f"{budget}{experts}, KV {self._kv_text}, "
            f"context {self.context:,}, prefill chunk {plan.prefill_chunk}, {self._threads} thread{plural}, "
            f"{self._isa}"
        )

    @property
    def _kv_text(self) -> str:
        spec = self._spec
        return self.kv_format.describe(has_rings=any(spec.layer_is_sliding), group=group_size(spec.head_dim))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._last = self.counters() if self._pool is not None else Counters()
        for state in list(self._states):
            state.close()
        self._end()

    def _end(self) -> None:
        """Close files and give memory back: what a plan had and the next does not."""
        if self._touch is not None:
            self._touch.close()
        if self._pool is not None:
            self._pool.close()
        for store in (self._store, self._rows_store, self._flash_store):
            if store is not None:
                store.close()
        self._watch.close()
        self._touch = self._store = self._pool = self._rows = self._rows_store = self._flash_store = None
        for name in ("_head", "_decoder", "_weights", "_layers"):
            vars(self).pop(name, None)
        trim()

    def _read(
        self,
        state: State,
        token_ids: Sequence[int],
        out: NDArray[np.float32],
        on_progress: Callable[[int, int], None] | None,
        on_logits: OnLogits | None = None,
    ) -> NDArray[np.float32]:
        """Append tokens that were given, with every expert there to choose from."""
        assert isinstance(state, CpuState), "a state of this engine"
        if state.selection is not None:
            state.selection.begin_prompt()
            self.experts.release()
        return self._append(state, token_ids, out, on_progress, on_logits)

    def _append(
        self,
        state: CpuState,
        token_ids: Sequence[int],
        out: NDArray[np.float32],
        on_progress: Callable[[int, int], None] | None,
        on_logits: OnLogits | None = None,
    ) -> NDArray[np.float32]:
        """Append tokens chunk by chunk; fill out [n, V] with the logits after the last n of them, and hand those
        after every token to `on_logits`.
        """
        assert not self._closed, "the engine was closed"
        assert state.cache is not None, "the state was closed"
        total, num_logits = len(token_ids), len(out)
        chunk, context = min(self.prefill_chunk, state.max_chunk), min(self.context, state.context)
        assert total > 0, "no tokens"
        if state.position + total > context:
            raise ContextError(
                f"{state.position + total:,} tokens do not fit the context of {context:,}",
                "Give a larger --context, or a shorter prompt.",
            )
        for start in range(0, total, chunk):
            self._watch.check()
            end = min(total, start + chunk)
            self._share_room(state, state.position + end - start)
            state.written = max(state.written, state.position + end - start)
            self._run_layers(state, token_ids[start:end], on_progress, start, total)
            if on_logits is not None:
                self._score(start, end, on_logits)
            first_wanted = max(start, total - num_logits)
            if first_wanted < end:
                at = first_wanted - (total - num_logits)
                self._decoder.finish(end - first_wanted)
                self._head.logits(self._decoder, out[at : at + end - first_wanted])
                self._check_finite(token_ids[start:end])
            state.cache.position += end - start
        return out

    def _score(self, start: int, end: int, on_logits: OnLogits) -> None:
        """Hand over the logits after the tokens [start, end) that the layers just ran for, block by block."""
        most = min(_SCORED_TOGETHER, end - start)
        self.experts.lend(most * self.vocab_size * 4)
        block = np.empty((most, self.vocab_size), np.float32)
        for at in range(start, end, most):
            count = min(most, end - at)
            self._decoder.finish(count, end - at - count)
            self._head.logits(self._decoder, block[:count])
            on_logits(at, block[:count])

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
            decoder.begin(*self._embedding, np.array(token_ids, np.int64), rope)
        else:
            codes, scales, biases, rows = self._rows.read(token_ids)
            addresses = codes.ctypes.data, scales.ctypes.data, biases.ctypes.data
            decoder.begin(*addresses, rows, rope)
        self.experts.step(T)
        for layer in range(num_layers):
            decoder.attend(state.cache, layer)
            if not self._spec.is_moe(layer):
                decoder.dense(layer)
            else:
                selected = None
                if selection is None:
                    num = decoder.route(layer, ids, counts)
                else:
                    num = decoder.route(layer, ids, counts, selection.allowed(layer))
                    selected = selection.choose(layer, ids[:num], counts[:num])
                if selected is not None:
                    self.experts.keep(layer, selected)
                if T == 1 and self.on_decode_route is not None:
                    self.on_decode_route(ids[:num].copy())
                foretell = self._foretell(layer + 1) if T == 1 and selection is None else None
                order: Order = "ascending" if T > 1 else "ready"
                batches = self.experts.fetch(layer, ids[:num], counts[:num], order=order, foretell=foretell)
                with closing(batches):  # an interrupt between two batches settles the reads in flight
                    for some_ids, places in batches:
                        decoder.experts(layer, some_ids, places)
                if selected is not None:
                    self.experts.load(layer, selected)
                decoder.combine()
            self._check_finite(token_ids)
            if on_progress is not None and T > 1:
                on_progress(done + T * (layer + 1) // num_layers, total)

    def _check_finite(self, token_ids: Sequence[int]) -> None:
        """Say so if the decoder met a value that is not finite in the chunk that it is at.

        Raises: CheckpointError or ModelError naming it.
        """
        fault = self._decoder.take_fault()
        if fault is not None:
            flash = self._head.flash if isinstance(self._head, ClusteredHead) else None
            raise_fault(self._model, fault, token_ids, flash)

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

    def _open_head(self) -> Head | ClusteredHead:
        model, store, num_rows = self._model, self._store, self.plan.num_head_rows
        if not self._options.flash_head:
            return Head(model, store, num_rows, self._weights)
        spec = model.spec
        flash = open_flash_head(model.checkpoint, vocab_size=spec.vocab_size, hidden_size=spec.hidden_size)
        if store is not None:
            if self._flash_store is not None:
                self._flash_store.close()
            self._flash_store = Store(flash.shards, direct=False)
        return ClusteredHead(model, flash, num_rows, self._weights, store=store, rows_store=self._flash_store)

    def _make_decoder(self) -> _core.Decoder:
        spec, plan = self._spec, self.plan
        decoder = make_decoder(
            spec,
            self._isa,
            self._threads,
            context=plan.context,
            max_chunk=plan.prefill_chunk,
            kv=self.kv_format,
            activation_bytes=self._options.activation_bytes,
        )
        for layer, addresses in enumerate(self._layers):
            decoder.set_layer(layer, addresses)
        decoder.set_final_norm(self._final_norm)
        return decoder
