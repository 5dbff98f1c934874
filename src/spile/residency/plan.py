"""Turns one memory budget into slots, resident head rows, prefill chunk and KV room, or refuses with the
numbers.

It reads no weights; it knows sizes from headers and what the process holds now. The budget is the process:
what is resident when the engine opens counts, and so does everything that will be. How it gives memory away:
first what nothing runs without, then a prefill chunk and a context in proportion to the budget, then the head
(every row kept saves its bytes at every token), and the rest to experts (a slot saves a part of its bytes at
every token). Each of these grows with the budget and never shrinks: what is set aside for chunk and context is a
share, and the few MB of it that are too little for their next step stay free.

Keys, values and kept prompts come and go. What is set aside for them and not in use works for experts meanwhile:
`Plan.slots_beside` says how many slots there are at a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from spile.architectures.spec import OwnModel
from spile.errors import BudgetError, OptionError, ReadError
from spile.machine import available_memory_bytes, memory_limit_bytes
from spile.memory import current_memory_bytes
from spile.options import EngineOptions
from spile.residency.experts import ExpertTable
from spile.residency.kv import BLOCK_POSITIONS, kv_format, kv_nbytes
from spile.residency.pages import Pages
from spile.residency.weights import (
    HEAD_PIECE_ROWS,
    activation_nbytes,
    flash_head_nbytes,
    head_nbytes,
    resident_weight_nbytes,
)
from spile.sizes import format_size

CHUNKS = (512, 256, 128, 64, 32, 16)  # prefill chunks to choose from, in tokens
CHUNK_SHARE = 0.08  # of the budget that a longer chunk's activations may take
CHUNK_STEP = 16  # tokens
KV_SHARE = 0.08  # of the budget that the growing KV cache of a sequence may take, if nobody names a context
MOST_KV_SHARE = 0.30  # of all sequences
LEAST_CONTEXT = 512
# What nobody counts: allocator slack, thread stacks, Python objects of a run. Measured on the full-size model
# between the sum of the parts and the high-water mark: 4 to 8 MB (2026-11-30).
MARGIN_NBYTES = 12_000_000
_VARYING_NBYTES = 300_000  # of what a process holds, from one run of the same command to the next
AVAILABLE_SHARE = 0.9  # of the memory that is free now, which an unnamed budget may take


@dataclass(frozen=True)
class Parts:
    """Where each byte of a plan goes."""

    process: int  # what is resident before the engine opens: interpreter, libraries, text
    reserved: int  # what others may still take: a server's requests, the chat template's process
    weights: int  # attention, routers, norms, row alphas
    head: int  # its resident rows, and the ring that the others pass through
    kv: int  # of all sequences that may run at once
    prompts: int  # keys and values of earlier prompts
    activations: int
    experts: int
    margin: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in PART_NAMES)


PART_NAMES = tuple(field.name for field in fields(Parts))


@dataclass(frozen=True)
class Plan:
    """What the engine will do with memory."""

    is_mapped: bool  # everything in place in mapped files; then the fields of the pool say "all"
    is_direct: bool
    num_slots: int
    least_slots: int
    most_slots: int
    num_head_rows: int  # resident
    prefill_chunk: int  # tokens
    context: int  # tokens
    budget_nbytes: int | None  # None: nobody named one and everything fits
    parts: Parts
    slot_nbytes: int = 0
    shared_nbytes: int = 0  # set aside for keys, values and kept prompts: experts have it until they come

    def slots_beside(self, used_nbytes: int) -> int:
        """Return the slots that there is room for while so many bytes of keys, values and kept prompts are in use."""
        return min(
            self.num_slots + (self.shared_nbytes - used_nbytes) // max(1, self.slot_nbytes), self.most_slots
        )


@dataclass(frozen=True)
class MemoryNow:
    """What a plan starts from."""

    process_nbytes: int  # that this process holds
    available_nbytes: int  # that it could still take
    limit_nbytes: int | None  # of the control group; None: there is none


def memory_now() -> MemoryNow:
    """Look. Cost: reads /proc and /sys."""
    return MemoryNow(current_memory_bytes(), available_memory_bytes(), memory_limit_bytes())


def make_plan(
    model: OwnModel, table: ExpertTable, options: EngineOptions, memory: MemoryNow | None = None
) -> Plan:
    """Decide. Cost: reads file sizes, and /proc where `memory` is not given.

    Raises:
        BudgetError: the smallest plan does not fit; the message holds the smallest budget that does.
        OptionError: a way of reading for experts that the model does not have.
        ReadError: a shard is gone.
    """
    memory = memory or memory_now()
    process, available = memory.process_nbytes, memory.available_nbytes
    budget = options.memory_bytes
    room = budget if budget is not None else process + int(available * AVAILABLE_SHARE)
    total = _shard_nbytes(model)
    num_experts = model.spec.num_routed_experts
    if not num_experts and options.io in ("buffered", "direct"):
        raise OptionError(f"io is {options.io!r}: this model has no experts to read, all of it stays mapped")
    if options.may_map or not num_experts:
        plan = _mapped_plan(model, options, process, total, num_experts * table.expert_nbytes)
        if plan.parts.total <= room or not num_experts:
            return plan
        if options.io == "mapped":
            if budget is None:
                return plan
            needed = plan.parts.total
            raise BudgetError(
                f"{model.checkpoint.folder} takes {format_size(needed)} mapped whole, "
                f"and the budget is {format_size(room)}",
                f"Give --memory {-(-needed // 1_000_000)}MB or more, or leave out --io mapped.",
            )
    is_direct = options.io == "direct"
    if options.io == "auto":
        # Read buffered where memory outside the budget could keep the whole checkpoint warm, for nothing;
        # else direct.
        is_direct = available - (room - process) < total
    made = _pool_plan(model, table, options, memory, room, num_experts, is_direct)
    if options.io == "auto":  # fewer slots than there is room for leave more to the page cache
        made = replace(made, is_direct=available - (made.parts.total - process) < total)
    return made


def _mapped_plan(
    model: OwnModel, options: EngineOptions, process: int, total: int, expert_nbytes: int
) -> Plan:
    spec = model.spec
    chunk, context = options.prefill_chunk or CHUNKS[0], options.context or spec.max_position_embeddings
    head, kv = head_nbytes(model, spec.vocab_size), kv_format(spec, options)
    flash = flash_head_nbytes(model, options)
    parts = Parts(
        process=process,
        reserved=options.reserved_bytes,
        weights=total - expert_nbytes - head,
        head=head + flash,
        kv=options.sequences * kv_nbytes(spec, options.context or min(context, 4096), chunk, kv),
        prompts=options.prompt_cache_bytes,
        activations=activation_nbytes(spec, chunk),
        experts=expert_nbytes,
        margin=MARGIN_NBYTES,
    )
    return Plan(
        is_mapped=True,
        is_direct=False,
        num_slots=0,
        least_slots=0,
        most_slots=0,
        num_head_rows=spec.vocab_size,
        prefill_chunk=chunk,
        context=context,
        budget_nbytes=options.memory_bytes,
        parts=parts,
    )


def _pool_plan(
    model: OwnModel,
    table: ExpertTable,
    options: EngineOptions,
    memory: MemoryNow,
    room: int,
    num_experts: int,
    is_direct: bool,
) -> Plan:
    spec, V = model.spec, model.spec.vocab_size
    slot_nbytes = Pages.nbytes_per_slot(table)
    needs = _Needs(model, table, options, memory.process_nbytes)
    least = needs.least().total
    if options.slots is None:
        if options.memory_bytes is not None and least > room:  # whatever the group allows, this is too little
            raise needs.refusal(room)
        _check_group(model, options, memory, least, least, room if options.memory_bytes is None else 2**62)
        if least > room:
            raise needs.refusal(room)
    extra = max(0, room - least)
    chunk, chunk_nbytes = needs.chunk(min(int(CHUNK_SHARE * room), extra))
    share = min(KV_SHARE * options.sequences, MOST_KV_SHARE)
    context, kv_nbytes_more = needs.context(min(int(share * room), extra - chunk_nbytes))
    extra -= chunk_nbytes + kv_nbytes_more
    least_slots, most_slots = needs.least_slots, needs.most_slots
    parts, num_active = needs.parts, options.num_active(spec.num_experts_per_tok)
    num_head_rows = V
    if options.slots is not None:
        num_slots = min(options.slots, num_experts)
    else:
        head = head_nbytes(model, V) - head_nbytes(model, 0)
        if extra < head:
            pieces = extra // (head_nbytes(model, V) // V * HEAD_PIECE_ROWS)
            num_head_rows, extra = min(V - 1, pieces * HEAD_PIECE_ROWS), head
        num_slots = min(needs.wanted_slots + (extra - head) // slot_nbytes, most_slots)
    planned = parts(chunk, context, num_head_rows, num_slots)
    is_named = options.slots is not None or num_active is not None
    if options.slots is None:
        _check_group(model, options, memory, least, planned.total, room)
    return Plan(
        is_mapped=False,
        is_direct=is_direct,
        num_slots=num_slots,
        least_slots=min(least_slots, num_slots),
        most_slots=most_slots,
        num_head_rows=num_head_rows,
        prefill_chunk=chunk,
        context=context,
        budget_nbytes=room if num_active is None or options.memory_bytes else planned.total,
        parts=planned,
        slot_nbytes=slot_nbytes,
        shared_nbytes=0 if is_named else planned.kv + planned.prompts,
    )


def smaller_asks(options: EngineOptions) -> list[str]:
    """Name what was asked for by hand that takes memory: less of it is a way out where a plan does not fit."""
    asks = []
    if (options.prefill_chunk or 0) > CHUNKS[-1]:
        asks.append("a smaller --prefill-step-size")
    if options.context:
        asks.append("a smaller --context")
    if max(options.kv_bits, options.kv_v_bits or 0, options.kv_ring_bits or 0) > 16:
        asks.append("fewer KV bits")
    if options.active_experts:
        asks.append("fewer --active-experts")
    if options.shared_experts:
        asks.append("fewer --shared-experts")
    if options.sequences > 1:
        asks.append("room for fewer answers at once")
    return asks


def give(asks: list[str], otherwise: str | None = None) -> str:
    """Say what to do: give one of these, or else something that is not given."""
    sentence = ", or ".join(
        [*([f"give {', or '.join(asks)}"] if asks else []), *([otherwise] if otherwise else [])]
    )
    return f"{sentence[0].upper()}{sentence[1:]}."


def _check_group(
    model: OwnModel, options: EngineOptions, memory: MemoryNow, least: int, planned: int, room: int
) -> None:
    """Check that a control group leaves what is planned on top of what the process has: it would be killed.

    The plan's margin is for what the group counts beyond it.

    Raises: BudgetError.
    """
    process, limit = memory.process_nbytes, memory.limit_nbytes
    if limit is None:
        return
    left = min(memory.available_nbytes + MARGIN_NBYTES, room - process)
    if least - process > left:
        raise BudgetError(
            f"{model.checkpoint.folder} needs {format_size(least - process)} more at the least, and the control "
            f"group, which allows {format_size(limit)}, leaves {format_size(left)}",
            give(
                smaller_asks(options),
                f"raise the group's limit by {-(-(least - process - left) // 1_000_000)}MB or more",
            ),
        )
    if planned - process > left:
        raise BudgetError(
            f"the budget of {format_size(room)} takes {format_size(planned - process)} more, and the control "
            f"group, which allows {format_size(limit)}, leaves {format_size(left)}",
            f"Give --memory {(process + left) // 1_000_000}MB or less, or raise the group's limit.",
        )


class _Needs:
    """What a pool's engine takes, by chunk and context; those that the user named are kept."""

    def __init__(self, model: OwnModel, table: ExpertTable, options: EngineOptions, process: int) -> None:
        spec = model.spec
        self._model, self._options, self._process = model, options, process
        self._kv, self._flash = kv_format(spec, options), flash_head_nbytes(model, options)
        self._slot_nbytes, num_experts = Pages.nbytes_per_slot(table), spec.num_routed_experts
        moe_layers = num_experts // max(1, spec.num_experts)
        num_active = options.num_active(spec.num_experts_per_tok)
        pinned = options.shared_experts * moe_layers
        self.most_slots = num_experts if num_active is None else num_active * moe_layers
        self.least_slots = min(num_experts, pinned + 2 * spec.num_experts_per_tok, self.most_slots)
        # without which the plan is refused
        self.wanted_slots = self.least_slots if num_active is None else self.most_slots

    def parts(self, chunk: int, context: int, head_rows: int, slots: int) -> Parts:
        model, options = self._model, self._options
        return Parts(
            process=self._process,
            reserved=options.reserved_bytes,
            weights=resident_weight_nbytes(model),
            head=head_nbytes(model, head_rows) + self._flash,
            kv=options.sequences * kv_nbytes(model.spec, context, chunk, self._kv),
            prompts=options.prompt_cache_bytes,
            activations=activation_nbytes(model.spec, chunk),
            experts=slots * self._slot_nbytes,
            margin=MARGIN_NBYTES,
        )

    def least(self) -> Parts:
        return self.parts(self._least_chunk, self._least_context, 0, self.wanted_slots)

    def chunk(self, nbytes: int) -> tuple[int, int]:
        """Return the longest chunk that takes at most so many bytes beyond the least one, and the bytes to set
        aside for it: what no chunk would use is not set aside.
        """
        if self._options.prefill_chunk is not None:
            return self._options.prefill_chunk, 0
        chunk = _largest(lambda n: self._chunk_nbytes(n) <= nbytes, CHUNKS[-1], CHUNKS[0], CHUNK_STEP)
        return chunk, min(nbytes, self._chunk_nbytes(CHUNKS[0]))

    def context(self, nbytes: int) -> tuple[int, int]:
        """Return the longest context likewise, for all sequences together."""
        if self._options.context is not None:
            return self._options.context, 0
        longest = self._model.spec.max_position_embeddings
        context = _largest(
            lambda n: self._context_nbytes(n) <= nbytes, self._least_context, longest, BLOCK_POSITIONS
        )
        return context, min(nbytes, self._context_nbytes(longest))

    def refusal(self, room: int) -> BudgetError:
        """Say what is too little, with the sum."""
        options, least = self._options, self.least()
        num_active = options.num_active(self._model.spec.num_experts_per_tok)
        asked = "" if num_active is None else f", {num_active} active experts a layer"
        if options.sequences > 1:
            asked += f", {options.sequences} sequences at once"
        sizes = {name: getattr(least, name) for name in PART_NAMES}
        added = " + ".join(f"{name} {format_size(nbytes)}" for name, nbytes in sizes.items() if nbytes)
        return BudgetError(
            f"{self._model.checkpoint.folder} needs {format_size(least.total)} with a context of "
            f"{self._least_context:,} tokens{asked} and a prefill chunk of {self._least_chunk}, "
            f"and the budget is {format_size(room)}: {added}",
            give(
                [f"--memory {_whole_megabytes(least.total) // 1_000_000}MB or more", *smaller_asks(options)]
            ),
        )

    @property
    def _least_chunk(self) -> int:
        return self._options.prefill_chunk or CHUNKS[-1]

    @property
    def _least_context(self) -> int:
        return self._options.context or min(LEAST_CONTEXT, self._model.spec.max_position_embeddings)

    def _chunk_nbytes(self, chunk: int) -> int:
        """Bytes beyond the least chunk: activations, and longer rings."""
        spec, longest = (
            self._model.spec,
            self._options.context or self._model.spec.max_position_embeddings,
        )

        def cost(chunk: int) -> int:
            rings = kv_nbytes(spec, longest, chunk, self._kv) * self._options.sequences
            return activation_nbytes(spec, chunk) + rings

        return cost(chunk) - cost(self._least_chunk)

    def _context_nbytes(self, context: int) -> int:
        """Bytes of all sequences beyond the least context."""
        more, least = (
            kv_nbytes(self._model.spec, n, self._least_chunk, self._kv)
            for n in (context, self._least_context)
        )
        return self._options.sequences * (more - least)


def _largest(fits: Callable[[int], bool], least: int, most: int, step: int) -> int:
    """Return the largest of least, and of the multiples of `step` up to most, that fits; `most` where it does."""
    if most <= least or fits(most):
        return max(least, most)
    low, high = least // step, most // step + 1  # low fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return max(least, low * step)


def smallest_budget(model: OwnModel, table: ExpertTable, options: EngineOptions, memory: MemoryNow) -> int:
    """Return the least bytes that a plan works with, in whole MB. No disk access.

    Raises: as `make_plan`, but BudgetError.
    """
    return _whole_megabytes(_Needs(model, table, options, memory.process_nbytes).least().total)


def _whole_megabytes(nbytes: int) -> int:
    """Return the whole MB, in bytes, that the next process can keep to as well."""
    return -(-(nbytes + _VARYING_NBYTES) // 1_000_000) * 1_000_000


def mapped_budget(model: OwnModel, table: ExpertTable, options: EngineOptions, memory: MemoryNow) -> int:
    """Return the least bytes with which everything is mapped, in whole MB. Cost: reads file sizes."""
    experts = model.spec.num_routed_experts * table.expert_nbytes
    whole = _mapped_plan(model, options, memory.process_nbytes, _shard_nbytes(model), experts).parts.total
    return -(-whole // 1_000_000) * 1_000_000


def _shard_nbytes(model: OwnModel) -> int:
    try:
        return sum(path.stat().st_size for path in model.checkpoint.shards)
    except OSError as error:
        raise ReadError(f"cannot read {error.filename}: {error.strerror}") from error
