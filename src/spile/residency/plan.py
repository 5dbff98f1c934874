"""Turns one memory budget into slots, resident head rows, prefill chunk and KV room, or refuses with the
numbers.

It reads no weights; it knows sizes from headers and what the process holds now. The budget is the process:
what is resident when the engine opens counts, and so does everything that will be. How it gives memory away:
first what nothing runs without, then a prefill chunk and a context in proportion to the budget, then the head
(every row kept saves its bytes at every token), and the rest to experts (a slot saves a part of its bytes at
every token).
"""

from __future__ import annotations

from dataclasses import dataclass

from spile.architectures.maple import PROJECTIONS, MapleConfig, MapleModel
from spile.engines import EngineOptions
from spile.errors import BudgetError, ReadError
from spile.machine import available_memory_bytes
from spile.memory import current_memory_bytes
from spile.residency.experts import ExpertTable
from spile.residency.slots import Slots
from spile.sizes import format_size

BLOCK_POSITIONS = 128  # of the KV cache, as in kv_cache.h
CHUNKS = (512, 256, 128, 64, 32, 16)  # prefill chunks to choose from, in tokens
CHUNK_SHARE = 0.08  # of the budget that a longer chunk's activations may take
KV_SHARE = 0.10  # of the budget that the growing KV caches may take, if nobody names a context
LEAST_CONTEXT = 512
HEAD_PIECE_ROWS, HEAD_RING_PIECES = 1024, 4  # of a streamed head: 1.2 MB a piece of a full-size one
# What nobody counts: allocator slack, thread stacks, Python objects of a run. Measured on the full-size model
# between the sum of the parts and the high-water mark: 4 to 8 MB (2026-11-30).
MARGIN_NBYTES = 12_000_000
AVAILABLE_SHARE = 0.9  # of the memory that is free now, which an unnamed budget may take


@dataclass(frozen=True)
class Parts:
    """Where each byte of a plan goes."""

    process: int  # what is resident before the engine opens: interpreter, libraries, text
    weights: int  # attention, routers, norms, row alphas
    head: int  # its resident rows, and the ring that the others pass through
    kv: int  # of all sequences that may run at once
    prompts: int  # keys and values of earlier prompts
    activations: int
    experts: int
    margin: int

    @property
    def total(self) -> int:
        return (
            self.process
            + self.weights
            + self.head
            + self.kv
            + self.prompts
            + self.activations
            + self.experts
            + self.margin
        )


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


def make_plan(model: MapleModel, table: ExpertTable, options: EngineOptions) -> Plan:
    """Decide. Cost: reads /proc and file sizes.

    Raises:
        BudgetError: the smallest plan does not fit; the message holds the smallest budget that does.
        ReadError: a shard is gone.
    """
    process = current_memory_bytes()
    available = available_memory_bytes()
    budget = options.memory_bytes
    room = budget if budget is not None else process + int(available * AVAILABLE_SHARE)
    total = _shard_nbytes(model)
    num_experts = model.config.num_routed_experts
    if options.slots is None and options.io in ("auto", "mapped"):
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
    return _pool_plan(model, table, options, process, room, num_experts, is_direct)


def _mapped_plan(
    model: MapleModel, options: EngineOptions, process: int, total: int, expert_nbytes: int
) -> Plan:
    config = model.config
    chunk, context = options.prefill_chunk or CHUNKS[0], options.context or config.max_position_embeddings
    head = head_nbytes(model, config.vocab_size)
    parts = Parts(
        process=process,
        weights=total - expert_nbytes - head,
        head=head,
        kv=options.sequences
        * kv_nbytes(config, options.context or min(context, 4096), chunk, options.kv_bits),
        prompts=options.prompt_cache_bytes,
        activations=activation_nbytes(config, chunk),
        experts=expert_nbytes,
        margin=MARGIN_NBYTES,
    )
    return Plan(
        is_mapped=True,
        is_direct=False,
        num_slots=0,
        least_slots=0,
        most_slots=0,
        num_head_rows=config.vocab_size,
        prefill_chunk=chunk,
        context=context,
        budget_nbytes=options.memory_bytes,
        parts=parts,
    )


def _pool_plan(
    model: MapleModel,
    table: ExpertTable,
    options: EngineOptions,
    process: int,
    room: int,
    num_experts: int,
    is_direct: bool,
) -> Plan:
    config, V = model.config, model.config.vocab_size
    slot_nbytes = Slots.nbytes_per_slot(table)
    least_slots = min(num_experts, 2 * config.num_experts_per_tok)

    def parts(chunk: int, context: int, head_rows: int, slots: int) -> Parts:
        return Parts(
            process=process,
            weights=resident_weight_nbytes(model),
            head=head_nbytes(model, head_rows),
            kv=options.sequences * kv_nbytes(config, context, chunk, options.kv_bits),
            prompts=options.prompt_cache_bytes,
            activations=activation_nbytes(config, chunk),
            experts=slots * slot_nbytes,
            margin=MARGIN_NBYTES,
        )

    context = options.context or _default_context(config, options.kv_bits, room)
    chunk = options.prefill_chunk or _default_chunk(config, options.kv_bits, context, room)
    if options.context is None or options.prefill_chunk is None:
        while parts(chunk, context, 0, least_slots).total > room:
            if options.prefill_chunk is None and chunk > CHUNKS[-1]:
                chunk //= 2
            elif options.context is None and context > LEAST_CONTEXT:
                context //= 2
            else:
                break
    least = parts(chunk, context, 0, least_slots).total
    if options.slots is None and least > room:
        raise BudgetError(
            f"{model.checkpoint.folder} needs {format_size(least)} with a context of {context:,} tokens "
            f"and a prefill chunk of {chunk}, and the budget is {format_size(room)}",
            f"Give --memory {-(-least // 1_000_000)}MB or more"
            + (", or a smaller --context." if options.context else "."),
        )
    num_head_rows = V
    if options.slots is not None:
        num_slots = min(options.slots, num_experts)
    else:
        if parts(chunk, context, V, least_slots).total > room:
            row_nbytes = head_nbytes(model, V) // V
            num_head_rows = (room - least) // row_nbytes // HEAD_PIECE_ROWS * HEAD_PIECE_ROWS
            num_head_rows = max(0, min(V - 1, num_head_rows))
        spare = room - parts(chunk, context, num_head_rows, 0).total
        num_slots = max(min(spare // slot_nbytes, num_experts), least_slots)
    return Plan(
        is_mapped=False,
        is_direct=is_direct,
        num_slots=num_slots,
        least_slots=min(least_slots, num_slots),
        most_slots=num_experts,
        num_head_rows=num_head_rows,
        prefill_chunk=chunk,
        context=context,
        budget_nbytes=room,
        parts=parts(chunk, context, num_head_rows, num_slots),
    )


def _shard_nbytes(model: MapleModel) -> int:
    try:
        return sum(path.stat().st_size for path in model.checkpoint.shards)
    except OSError as error:
        raise ReadError(f"cannot read {error.filename}: {error.strerror}") from error


def kv_nbytes(config: MapleConfig, context: int, chunk: int, kv_bits: int) -> int:
    """Bytes of keys and values of one sequence that fills the context."""
    position = (config.head_dim + -(-config.head_dim // 16) * 16) * config.num_key_value_heads * kv_bits // 8
    block = -(-position * BLOCK_POSITIONS // 4096) * 4096
    full_blocks = -(-context // BLOCK_POSITIONS)
    ring = min(ring_blocks(config.sliding_window, chunk), full_blocks)
    sliding = sum(config.layer_is_sliding)
    return block * (sliding * ring + (config.num_hidden_layers - sliding) * full_blocks)


def ring_blocks(window: int, chunk: int) -> int:
    """Blocks of a sliding layer's ring: what a window before a chunk and the chunk itself can touch
    (ring_blocks of src/core/kv_cache.h).
    """
    return (window + chunk - 2) // BLOCK_POSITIONS + 2


def activation_nbytes(config: MapleConfig, chunk: int) -> int:
    """Bytes of the decoder's buffers for chunks of T tokens, and of the logits that sampling copies."""
    D, F, K = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    token = 4 * (2 * D + 2 * q_size + 2 * kv_size + 2 * config.num_experts) + 3 * (D + q_size + 512)
    pair = 4 * (2 * F + D) + 3 * (F + 256)
    dense = (4 * 2 + 3) * config.intermediate_size
    return chunk * (token + dense) + max(chunk, 4 * K) * pair + config.vocab_size * 24


def head_nbytes(model: MapleModel, num_rows: int) -> int:
    """Bytes of so many resident rows of the head, and of the ring that the others pass through."""
    V = model.config.vocab_size
    total = sum(model.checkpoint.tensors[f"lm_head.{part}"].nbytes for part in ("weight", "scales", "biases"))
    row = total // V
    ring = HEAD_RING_PIECES * (HEAD_PIECE_ROWS * row + 6 * 4096) if num_rows < V else 0
    return num_rows * row + ring


def resident_weight_nbytes(model: MapleModel) -> int:
    """Bytes of the weights that a pool's engine reads at the start: all but experts' codes, embeddings and
    head.
    """
    config = model.config
    apart = ("lm_head", "head.", model.embedding_name)
    nbytes = sum(
        tensor.nbytes
        for name, tensor in model.checkpoint.tensors.items()
        if not name.startswith(apart) and ".switch_mlp." not in name
    )
    rows = (len(PROJECTIONS) - 1) * config.moe_intermediate_size + config.hidden_size
    return nbytes + 2 * config.num_routed_experts * rows  # row alphas, BF16


def _default_context(config: MapleConfig, kv_bits: int, room: int) -> int:
    """The longest power of two whose growing caches stay within their share."""
    context = LEAST_CONTEXT
    least = kv_nbytes(config, LEAST_CONTEXT, 1, kv_bits)
    while (
        context < config.max_position_embeddings
        and kv_nbytes(config, 2 * context, 1, kv_bits) - least <= KV_SHARE * room
    ):
        context *= 2
    return min(context, config.max_position_embeddings)


def _default_chunk(config: MapleConfig, kv_bits: int, context: int, room: int) -> int:
    """The longest chunk whose activations and rings stay within their share."""

    def cost(chunk: int) -> int:
        return activation_nbytes(config, chunk) + kv_nbytes(config, context, chunk, kv_bits)

    return next((c for c in CHUNKS if cost(c) - cost(CHUNKS[-1]) <= CHUNK_SHARE * room), CHUNKS[-1])
