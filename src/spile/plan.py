"""Turns one memory budget into slots, prefill chunk and KV room, or refuses with the numbers.

It reads no weights; it knows sizes from headers and what the process holds now. The budget is the process: what is
resident when the engine opens counts, and so does everything that will be.
"""

from __future__ import annotations

from dataclasses import dataclass

from spile.architectures.maple import PROJECTIONS, MapleModel
from spile.engines import EngineOptions
from spile.errors import BudgetError
from spile.experts import ExpertTable
from spile.machine import available_memory_bytes
from spile.memory import current_memory_bytes
from spile.sizes import format_size
from spile.slots import Slots

BLOCK_POSITIONS = 128  # of the KV cache, as in kv_cache.h
RESIDENT_CHUNK, BUDGET_CHUNK, TIGHT_CHUNK = 512, 256, 64  # tokens of a prefill chunk
BUDGET_CONTEXT = 4096  # tokens that a budget makes room for, if nobody says
# What nobody counts: allocator slack, thread stacks, page tables, Python objects of a run. Measured on the full-size
# model at 630 MB: 8 to 11 MB between the sum below and the high-water mark (2026-11-30).
MARGIN_NBYTES = 16_000_000
MMAP_SHARE = 0.9  # of the available memory that a mapped checkpoint may fill


@dataclass(frozen=True)
class Plan:
    """What the engine will do with memory. Sizes in bytes."""

    is_mapped: bool
    num_slots: int  # 0 when mapped
    is_direct: bool
    prefill_chunk: int
    context: int
    budget_nbytes: int | None
    fixed_nbytes: int  # all that is not slots


def make_plan(model: MapleModel, table: ExpertTable, options: EngineOptions, *, tokenizer_nbytes: int = 0) -> Plan:
    """Decide. Cost: reads /proc, no file of the model.

    Raises: BudgetError when the smallest plan does not fit; the message holds the smallest budget that does.
    """
    config = model.config
    total = sum(path_nbytes for path_nbytes in _shard_nbytes(model))
    num_experts = sum(table.num_experts for layer in range(table.num_layers) if table.is_moe(layer))
    slot_nbytes = Slots.nbytes_per_slot(table) if num_experts else 0
    least_slots = min(num_experts, 2 * config.num_experts_per_tok)

    def fixed(chunk: int, context: int) -> int:
        return (
            current_memory_bytes()
            + _resident_weight_nbytes(model)
            + scratch_nbytes(model, chunk)
            + kv_nbytes(model, context, chunk, options.kv_bits)
            + MARGIN_NBYTES
        )

    budget = options.memory_bytes
    most = config.max_position_embeddings
    if options.slots is None and options.io in ("auto", "mapped"):
        context = options.context or most
        chunk = options.prefill_chunk or RESIDENT_CHUNK
        room = budget if budget is not None else int(available_memory_bytes() * MMAP_SHARE)
        wanted = total + fixed(chunk, min(context, BUDGET_CONTEXT if options.context is None else context))
        if wanted <= room or not num_experts or options.io == "mapped":
            return Plan(True, 0, False, chunk, context, budget, wanted)
    context = options.context or min(most, BUDGET_CONTEXT)
    room = budget if budget is not None else max(int(available_memory_bytes() * 0.7), 0) + current_memory_bytes()
    chunk, num_slots = TIGHT_CHUNK, 0
    for chunk in (options.prefill_chunk,) if options.prefill_chunk else (BUDGET_CHUNK, 128, TIGHT_CHUNK, 16):
        num_slots = (room - fixed(chunk, context)) // slot_nbytes
        if num_slots >= num_experts // 32:  # a longer chunk pays only while the pool stays useful
            break
    if options.slots is not None:
        num_slots = options.slots
    elif num_slots < least_slots:
        needed = fixed(chunk, context) + least_slots * slot_nbytes
        raise BudgetError(
            f"{model.checkpoint.folder} needs {format_size(needed)} with a context of {context:,} tokens, "
            f"and the budget is {format_size(room)}",
            f"Give --memory {-(-needed // 1_000_000)}MB or more, or a smaller --context.",
        )
    num_slots = min(num_slots, num_experts)
    return Plan(
        False, num_slots, _is_direct(options, total, room), chunk, context, budget,
        fixed(chunk, context),
    )  # fmt: skip


def kv_nbytes(model: MapleModel, context: int, chunk: int, kv_bits: int) -> int:
    """Bytes of keys and values of one sequence that fills the context."""
    config = model.config
    position = (config.head_dim + -(-config.head_dim // 16) * 16) * config.num_key_value_heads * kv_bits // 8
    block = -(-position * BLOCK_POSITIONS // 4096) * 4096
    full_blocks = -(-context // BLOCK_POSITIONS)
    ring_blocks = min((config.sliding_window + chunk - 2) // BLOCK_POSITIONS + 2, full_blocks)
    sliding = sum(config.layer_is_sliding)
    return block * (sliding * ring_blocks + (config.num_hidden_layers - sliding) * full_blocks)


def scratch_nbytes(model: MapleModel, chunk: int) -> int:
    """Bytes of activations that a chunk of T tokens takes; the largest part is one output an expert and token."""
    config = model.config
    D, F, K = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    per_token = 4 * (2 * D + 2 * q_size + 2 * kv_size + config.num_experts + K * D) + 3 * (D + q_size + 512)
    per_pair = 4 * 2 * F + 3 * (F + 256)
    per_dense = (4 * 2 + 3) * config.intermediate_size
    return chunk * (per_token + per_dense) + max(chunk, 4 * K) * per_pair + config.vocab_size * 8


def _resident_weight_nbytes(model: MapleModel) -> int:
    """Bytes of the weights that are read at the start and stay: all but experts' codes and embeddings."""
    config = model.config
    nbytes = 0
    for name, tensor in model.checkpoint.tensors.items():
        if name.startswith(("lm_head_flash.", "head.", model.embedding_name)) or ".switch_mlp." in name:
            continue
        nbytes += tensor.nbytes
    moe_layers = config.num_hidden_layers - config.first_k_dense_replace
    rows = (len(PROJECTIONS) - 1) * config.moe_intermediate_size + config.hidden_size
    return nbytes + 2 * moe_layers * config.num_experts * rows  # row alphas, BF16


def _shard_nbytes(model: MapleModel) -> list[int]:
    return [path.stat().st_size for path in model.checkpoint.shards]


def _is_direct(options: EngineOptions, total_nbytes: int, room: int) -> bool:
    """Read buffered where free memory outside the budget could keep the whole checkpoint warm; else direct."""
    if options.io != "auto":
        return options.io == "direct"
    return available_memory_bytes() - room < total_nbytes
