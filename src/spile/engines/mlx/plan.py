"""Turns one memory budget into slots, prefill chunk and KV room of the mlx engine, or refuses with the numbers.

The budget is the process, as in `residency/plan.py`. What a model of an architecture that spile does not know
holds besides its experts is not derived from its config but asked of the model: sizes of weights are those of
its arrays, and sizes of keys and values are those that its own caches have after a pass without data. It reads
no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from spile.architectures.foreign import CHOSEN_NAMES
from spile.engines.mlx import adapter
from spile.engines.mlx.cache import QuantizedCache, QuantizedRing, kv_format, make_caches
from spile.engines.mlx.copying import STEP, Layers, find_layers
from spile.engines.mlx.experts import ExpertLayer, Layout
from spile.errors import BudgetError
from spile.machine import available_memory_bytes
from spile.memory import current_memory_bytes
from spile.options import EngineOptions
from spile.residency.plan import (
    AVAILABLE_SHARE,
    CHUNK_SHARE,
    CHUNKS,
    KV_SHARE,
    LEAST_CONTEXT,
    Parts,
    give,
    smaller_asks,
)
from spile.sizes import format_size

MakeCaches = Callable[[], list[Any]]
CACHE_SHARE = 0.02  # of the budget, which MLX may keep of freed buffers for the next arrays
LEAST_CACHE_NBYTES, MOST_CACHE_NBYTES = 16_000_000, 256_000_000
MARGIN_NBYTES = 24_000_000  # what nobody counts: MLX's graph and compiled kernels, allocator slack
_SHORT, _LONG = 2, 258  # tokens of the passes without data


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of a prompt cache: `fixed`, and per token, of layers that keep all tokens and those that keep some.
    `unpacked` are those of a layer's dequantized copy, of each layer that keeps fewer bits than it computes with.
    """

    fixed: int
    growing: tuple[tuple[int, int | None], ...]  # bytes a token, most tokens kept (None: all)
    unpacked: tuple[tuple[int, int | None], ...] = ()

    def nbytes(self, num_tokens: int, chunk: int) -> int:
        """Bytes after so many tokens; a chunk passes through a window's layers beside what they keep."""
        rounded = -(-num_tokens // STEP) * STEP
        return self.fixed + sum(_grown(kept, rounded, chunk) for kept in self.growing)

    def unpacked_nbytes(self, num_tokens: int, chunk: int) -> int:
        """Bytes of the largest dequantized copies of two layers: the next may begin before one is given back."""
        sizes = sorted((_grown(kept, num_tokens, chunk) for kept in self.unpacked), reverse=True)
        return sum(sizes[:2])


@dataclass(frozen=True)
class MlxPlan:
    """What the engine will do with memory."""

    is_resident: bool  # every expert stays: the model is mlx-lm's own, nothing is replaced
    slots: dict[Layout, int]
    least_slots: dict[Layout, int]
    most_slots: dict[Layout, int]  # every expert
    caches: CacheSizes
    layers: Layers | None  # of what states hold; None where that cannot be copied
    prefill_chunk: int
    context: int
    cache_limit: int  # bytes of freed buffers that MLX may keep
    budget_nbytes: int | None
    parts: Parts

    @property
    def num_slots(self) -> int:
        return sum(self.slots.values())

    @property
    def num_experts(self) -> int:
        return sum(self.most_slots.values())


def measure_caches(model: Any, make: MakeCaches) -> CacheSizes:
    """Ask a model's caches how they grow. Builds the graph of a short pass, and evaluates nothing."""
    fixed, growing, unpacked, unknown = 0, [], [], []
    for index, cache in enumerate(_leaves(_filled(model, make, _SHORT))):
        keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
        if keys is None:
            unknown.append(index)
            fixed += _nbytes(cache)
            continue
        arrays = [array for _, array in tree_flatten((keys, values)) if isinstance(array, mx.array)]
        each = sum(array.nbytes // max(1, array.shape[-2]) for array in arrays)
        most = getattr(cache, "max_size", None)
        growing.append((each, most))
        if isinstance(cache, QuantizedCache | QuantizedRing):
            unpacked.append((cache.unpacked_nbytes, most))
    if unknown and not all(isinstance(cache, adapter.fixed_caches()) for cache in _leaves(make())):
        # caches of another kind than keys and values: let a longer pass say whether they grow
        longer = _leaves(_filled(model, make, _LONG))
        shorter = _leaves(_filled(model, make, _SHORT))
        for index in unknown:
            each = (_nbytes(longer[index]) - _nbytes(shorter[index])) // (_LONG - _SHORT)
            if each > 0:
                growing.append((each, None))
    return CacheSizes(fixed, tuple(growing), tuple(unpacked))


def make_plan(
    model: Any, layers: Sequence[ExpertLayer], options: EngineOptions, *, config: Any, longest: int, num_chosen: int
) -> MlxPlan:  # fmt: skip
    """Decide, for a model whose layers of experts are replaced, so that `parameters` are all that else stays.

    Raises: BudgetError: the smallest plan does not fit; the message holds the smallest budget that does.
    """
    process, available = current_memory_bytes(), available_memory_bytes()
    budget = options.memory_bytes
    room = budget if budget is not None else process + int(available * AVAILABLE_SHARE)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    all_slots: dict[Layout, int] = {}
    for layer in layers:
        all_slots[layer.layout] = all_slots.get(layer.layout, 0) + layer.num_experts
    expert_nbytes = _slots_nbytes(all_slots)
    kv = kv_format(options)
    caches = measure_caches(model, lambda: make_caches(model, kv))
    copied = find_layers(model, lambda: make_caches(model, kv))
    cache_limit = min(max(LEAST_CACHE_NBYTES, int(CACHE_SHARE * room)), MOST_CACHE_NBYTES)
    pinned = {layout: options.shared_experts * _num_layers(layers, layout) for layout in all_slots}
    least = {
        layout: min(count, pinned[layout] + 2 * max(1, num_chosen)) for layout, count in all_slots.items()
    }
    context = options.context or _default_context(caches, longest, room)
    chunk = options.prefill_chunk or CHUNKS[0]

    def parts(experts: int) -> Parts:
        return Parts(
            process=process,
            reserved=options.reserved_bytes,
            weights=weights,
            head=0,
            kv=options.sequences * caches.nbytes(context, chunk),
            prompts=options.prompt_cache_bytes if copied is not None else 0,
            activations=activation_nbytes(config, chunk, context) + caches.unpacked_nbytes(context, chunk),
            experts=experts,
            margin=MARGIN_NBYTES + cache_limit,
        )

    asks_pool = options.slots is not None or options.flash_moe or options.active_experts is not None
    wants_pool = asks_pool and bool(layers)
    num_active = options.num_active(num_chosen or 1)
    slots: dict[Layout, int] | None = None
    if options.slots is not None:
        slots = {layout: min(count, options.slots) for layout, count in all_slots.items()}
    elif num_active is not None:
        slots = {
            layout: min(count, num_active * _num_layers(layers, layout))
            for layout, count in all_slots.items()
        }
    floor = _slots_nbytes(slots or least)
    while True:
        if options.prefill_chunk is None and chunk > CHUNKS[-1] and (
            parts(floor).total > room or parts(0).activations > CHUNK_SHARE * room
        ):  # fmt: skip
            chunk //= 2
        elif options.context is None and context > LEAST_CONTEXT and parts(floor).total > room:
            context //= 2
        else:
            break
    is_resident = not wants_pool and parts(expert_nbytes).total <= room
    if not is_resident and (options.slots is None or not layers) and parts(floor).total > room:
        needed = parts(floor).total
        raise BudgetError(
            f"this model needs {format_size(needed)} with a context of {context:,} tokens and a prefill chunk of "
            f"{chunk}, and the budget is {format_size(room)}",
            give([f"--memory {-(-needed // 1_000_000)}MB or more", *smaller_asks(options)]),
        )
    if is_resident:
        slots = dict(all_slots)
    elif slots is None:
        slots = _share(all_slots, least, room - parts(0).total)
    planned = parts(_slots_nbytes(slots))
    if budget is None and not is_resident:
        budget = (
            planned.total
        )  # what it will take, which is less than what is free where slots were asked for
    return MlxPlan(
        is_resident=is_resident,
        slots=slots,
        least_slots=least,
        most_slots=all_slots,
        caches=caches,
        layers=copied,
        prefill_chunk=chunk,
        context=context,
        cache_limit=cache_limit,
        budget_nbytes=budget,
        parts=planned,
    )


def resized(plan: MlxPlan, memory_bytes: int) -> MlxPlan:
    """Return a plan with the slots of another budget; what else it holds stays.

    Raises: BudgetError below the least.
    """
    rest = plan.parts.total - plan.parts.experts
    wanted, least = memory_bytes - rest, _slots_nbytes(plan.least_slots)
    if wanted < least:
        raise BudgetError(
            f"the pool cannot shrink to {format_size(memory_bytes)}: what else is resident leaves "
            f"{format_size(rest + least)} as the least",
            f"Give {-(-(rest + least) // 1_000_000)}MB or more.",
        )
    slots = _share(plan.most_slots, plan.least_slots, wanted)
    return replace(
        plan,
        slots=slots,
        budget_nbytes=memory_bytes,
        parts=replace(plan.parts, experts=_slots_nbytes(slots)),
    )


def _share(most: dict[Layout, int], least: dict[Layout, int], nbytes: int) -> dict[Layout, int]:
    """Divide bytes among layouts, to each the same part of its experts."""
    share = nbytes / max(1, _slots_nbytes(most))
    return {layout: max(least[layout], min(count, int(share * count))) for layout, count in most.items()}


def activation_nbytes(config: Any, chunk: int, context: int) -> int:
    """Estimate the bytes of one chunk's activations from a raw config's usual names.

    Keys' scores count where they are computed as one array, which MLX does on the CPU; there they are the most.
    """

    def number(*names: str, default: int = 0) -> int:
        for part in (config, config.get("text_config") or {}):
            for name in names:
                value = part.get(name)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return default

    D = number("hidden_size", "d_model", "model_dim", "n_embd", default=4096)
    F = number("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", default=4 * D)
    K = number(*CHOSEN_NAMES, default=1)
    heads = number("num_attention_heads", "num_heads", "n_heads", default=32)
    V = number("vocab_size", default=32_000)
    token = 4 * (12 * D + K * (3 * F + 3 * D))
    scores = 2 * 4 * heads * context if mx.default_device() == mx.Device(mx.cpu) else 0
    return chunk * (token + scores) + V * 24


def _grown(kept: tuple[int, int | None], num_tokens: int, chunk: int) -> int:
    each, most = kept
    return each * (num_tokens if most is None else min(num_tokens, most + chunk))


def _filled(model: Any, make: MakeCaches, num_tokens: int) -> list[Any]:
    caches = make()
    model(mx.zeros((1, num_tokens), mx.int32), cache=caches)
    return caches


def _leaves(caches: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for cache in caches:
        inner = getattr(cache, "caches", None)
        if inner is not None:
            found += _leaves(inner)
        elif cache is not None:
            found.append(cache)
    return found


def _nbytes(cache: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(cache.state) if isinstance(array, mx.array))


def _num_layers(layers: Sequence[ExpertLayer], layout: Layout) -> int:
    return sum(layer.layout == layout for layer in layers)


def _slots_nbytes(slots: dict[Layout, int]) -> int:
    return sum(count * sum(part.nbytes for part in layout) for layout, count in slots.items())


def _default_context(caches: CacheSizes, longest: int, room: int) -> int:
    """The longest power of two whose growing caches stay within their share."""
    context = LEAST_CONTEXT
    least = caches.nbytes(LEAST_CONTEXT, 1)
    while context < longest and caches.nbytes(2 * context, 1) - least <= KV_SHARE * room:
        context *= 2
    return min(context, longest)
