"""Turns a lazily loaded model into one whose experts come from a pool: the way that the engine and other
people's programs share.

It decides the order: experts located, layers replaced, memory planned, pool made, the rest read. It does not
compute, and does not know who runs the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from spile.engines.base import Counters
from spile.engines.mlx.adapter import load_lazily
from spile.engines.mlx.banks import Bank
from spile.engines.mlx.experts import ExpertLayer, Layout, find_experts, shard_loader
from spile.engines.mlx.layers import put_back, replace_switches
from spile.engines.mlx.plan import MlxPlan, make_plan, resized
from spile.engines.mlx.provenance import dtype_of
from spile.errors import CheckpointError, OptionError, ReadError, UnsupportedModelError
from spile.files.checkpoint import Checkpoint
from spile.files.finite import DAMAGED_HINT
from spile.memory import trim
from spile.options import EngineOptions
from spile.residency.policy import Policy
from spile.residency.pool import Pool
from spile.residency.store import Store
from spile.sizes import format_size, parse_budget


class Streaming:
    """A model whose experts are streamed, or all resident where the plan says so."""

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        options: EngineOptions,
        *,
        longest: int,
        num_chosen: int,
    ) -> None:
        """Replace the layers of experts of `model` in place, plan, and read what stays resident.

        Raises: BudgetError, OptionError, ReadError, UnsupportedModelError, CheckpointError.
        """
        layers = find_experts(model, checkpoint)
        _check_dtypes(layers)
        check_experts(layers, options, num_chosen)
        self._store: Store | None = None
        self._pools: dict[Layout, Pool] = {}
        self._layers = replace_switches(model, layers)
        try:
            self.plan = make_plan(
                model,
                layers,
                options,
                config=checkpoint.config,
                longest=longest,
                num_chosen=num_chosen,
            )
            self._set_limits()
            if self.plan.is_resident:
                put_back(model, self._layers)
                self._layers = []
            else:
                self._store = Store(checkpoint.shards, direct=False)
                self._pools = self._make_pools(layers)
                for one in layers:
                    self._pools[one.layout].pin(one.index, np.arange(options.shared_experts, dtype=np.int32))
            _read_weights(model)
        except BaseException:
            put_back(model, self._layers)
            self.close()
            raise

    @classmethod
    def begin(cls, model: Any, path: str | Path, *, memory: int | str | None, slots: int | None) -> Streaming:
        """As `spile.mlx.stream_experts`."""
        from spile.architectures import open_model
        from spile.files.checkpoint import open_checkpoint
        from spile.files.hub import resolve

        opened = open_model(open_checkpoint(resolve(path)))
        nbytes = parse_budget(memory) if isinstance(memory, str) else memory
        return cls(
            model,
            opened.checkpoint,
            EngineOptions(engine="mlx", memory_bytes=nbytes, slots=slots),
            longest=opened.spec.max_position_embeddings,
            num_chosen=opened.spec.num_experts_per_tok,
        )

    @property
    def resident_expert_bytes(self) -> int:
        """Bytes of experts in memory now."""
        if not self._pools:
            return self.plan.parts.experts
        return sum(pool.num_resident * pool.slot_nbytes for pool in self._pools.values())

    def counters(self) -> Counters:
        """Say what was read and found so far."""
        if self._store is None:
            return Counters()
        nbytes, reads, seconds = self._store.counters()
        counts = [(pool.hits, pool.misses, pool.evictions) for pool in self._pools.values()]
        return Counters(
            nbytes, reads, seconds, self._store.stall_seconds, *map(sum, zip(*counts, strict=True))
        )

    def summary(self) -> str:
        """Say in one line what was planned for the experts."""
        plan, total = self.plan, self.plan.num_experts
        budget = f"memory {format_size(plan.budget_nbytes)}: " if plan.budget_nbytes is not None else ""
        if not total:
            return f"{budget}no experts, nothing streamed"
        if plan.is_resident:
            return f"{budget}all {total:,} experts resident"
        return f"{budget}{plan.num_slots:,} of {total:,} experts resident, reads buffered"

    def resize(self, memory_bytes: int) -> None:
        """Keep to another budget from the next token on.

        Raises: BudgetError below the least, OptionError where there is no pool.
        """
        if not self._pools:
            raise OptionError(
                "every expert is resident: there is no pool to resize; load with a memory budget"
            )
        self.plan = resized(self.plan, memory_bytes)
        for layout, pool in self._pools.items():
            pool.resize(self.plan.slots[layout])
        self._set_limits()
        trim()

    def lend(self, nbytes: int) -> None:
        """Give so many bytes of the pools back to the system until the next token."""
        for layout, pool in self._pools.items():
            share = self.plan.slots[layout] * pool.slot_nbytes / max(1, self.plan.parts.experts)
            pool.lend(int(nbytes * share))
        trim()

    def close(self) -> None:
        """Stop reading. The model cannot compute after that. May be called twice."""
        for pool in self._pools.values():
            pool.close()
        if self._store is not None:
            self._store.close()
        for layer in self._layers:
            layer.detach()
        self._pools, self._store, self._layers = {}, None, []
        mx.clear_cache()

    def _make_pools(self, layers: Sequence[ExpertLayer]) -> dict[Layout, Pool]:
        """Make a pool for each layout, all with one policy and one store."""
        num_experts = max(layer.num_experts for layer in layers)
        policy, pools = Policy(len(layers), num_experts), {}
        for layout, num_slots in self.plan.slots.items():
            bank = Bank([layer for layer in layers if layer.layout == layout], num_experts)
            pools[layout] = Pool(bank, self._store, policy, num_slots)
            for streamed in self._layers:
                if streamed.layer.layout == layout:
                    streamed.attach(pools[layout], bank)
        return pools

    def _set_limits(self) -> None:
        """Tell MLX what the plan gives it: of freed buffers to keep, of memory in all, and of wired memory."""
        mx.set_cache_limit(self.plan.cache_limit)
        if not mx.metal.is_available():
            return
        own = self.plan.parts.total - self.plan.parts.process
        mx.set_memory_limit(own)
        most = int(mx.device_info().get("max_recommended_working_set_size", 0))
        if most:
            mx.set_wired_limit(min(own, most))


def plan_checkpoint(
    checkpoint: Checkpoint, options: EngineOptions, *, longest: int, num_chosen: int
) -> MlxPlan:
    """Plan for a checkpoint of which only headers need be there. Cost: a second; no weight is read.

    Raises: BudgetError, OptionError, UnsupportedModelError, CheckpointError.
    """
    check_io(options)
    shards: list[dict[str, Any]] = [{} for _ in checkpoint.shards]
    for name, tensor in checkpoint.tensors.items():
        shards[tensor.shard][name] = mx.zeros(tensor.shape, dtype_of(tensor))
    model = load_lazily(checkpoint, shard_loader(shards))
    layers = find_experts(model, checkpoint)
    check_experts(layers, options, num_chosen)
    replace_switches(model, layers)
    return make_plan(model, layers, options, config=checkpoint.config, longest=longest, num_chosen=num_chosen)


def check_io(options: EngineOptions) -> None:
    """Refuse ways of reading that this engine does not have.

    Raises: OptionError.
    """
    if options.io not in ("auto", "buffered"):
        raise OptionError(f"io is {options.io!r}: the mlx engine reads buffered", "Leave out --io.")


def check_experts(layers: Sequence[ExpertLayer], options: EngineOptions, num_chosen: int) -> None:
    """Check what was asked about experts against the layer that has the fewest.

    Raises: OptionError.
    """
    if layers:
        options.check_experts(min(layer.num_experts for layer in layers), num_chosen or 1)


def _check_dtypes(layers: Sequence[ExpertLayer]) -> None:
    """Refuse experts that MLX cannot multiply here.

    Raises: UnsupportedModelError.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return
    for layer in layers:
        for part in layer.layout:
            if part.name.endswith("weight") and part.dtype in (mx.bfloat16, mx.float16):
                raise UnsupportedModelError(
                    f"{layer.path}.{part.name} is unquantized {str(part.dtype).removeprefix('mlx.core.')}: "
                    f"MLX's CPU backend multiplies experts of float32 and quantized ones only",
                    "Quantize it with mlx_lm.convert -q, or run it on a GPU.",
                )


def _read_weights(model: Any) -> None:
    """Read what stays resident, array by array: some are made of others, which are gone before the next.

    Raises: ReadError; CheckpointError where a value is not finite.
    """
    for name, array in tree_flatten(model.parameters()):
        try:
            mx.eval(array)
        except RuntimeError as error:
            raise ReadError(f"cannot read the weights: {' '.join(str(error).split())}") from error
        # Both are NaN where any value is. (A mask of all of them would be half an array more.)
        if mx.issubdtype(array.dtype, mx.floating) and not all(
            math.isfinite(end.item()) for end in (mx.max(array), mx.min(array))
        ):
            raise CheckpointError(f"{name} holds a value that is not finite", DAMAGED_HINT)
    mx.clear_cache()
