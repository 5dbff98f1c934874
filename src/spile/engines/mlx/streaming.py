"""Turns a lazily loaded model into one whose experts come from a pool: the way that the engine and other
people's programs share.

It decides the order: experts located, layers replaced, memory planned, pool made, the rest read. It does not
compute, and does not know who runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from spile.engines.base import Counters
from spile.engines.mlx.adapter import load_lazily
from spile.engines.mlx.experts import ExpertLayer, find_experts, shard_loader
from spile.engines.mlx.layers import put_back, replace_switches
from spile.engines.mlx.plan import MlxPlan, make_plan, resized
from spile.engines.mlx.pool import Pool
from spile.engines.mlx.provenance import dtype_of
from spile.errors import OptionError, ReadError, UnsupportedModelError
from spile.files.checkpoint import Checkpoint
from spile.memory import trim
from spile.options import EngineOptions
from spile.residency.policy import Policy
from spile.residency.store import Store
from spile.sizes import format_size, parse_size


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
        self._pool: Pool | None = None
        self._is_lent = False
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
                policy = Policy(len(layers), max(layer.num_experts for layer in layers))
                self._pool = Pool(layers, self._store, policy, self.plan.slots, options.shared_experts)
                for layer in self._layers:
                    layer.attach(self._pool)
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
        nbytes = parse_size(memory, name="memory") if isinstance(memory, str) else memory
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
        return self.plan.parts.experts if self._pool is None else self._pool.resident_nbytes

    def counters(self) -> Counters:
        """Say what was read and found so far."""
        if self._store is None or self._pool is None:
            return Counters()
        nbytes, reads, seconds = self._store.counters()
        pool = self._pool
        return Counters(
            nbytes, reads, seconds, self._store.stall_seconds, pool.hits, pool.misses, pool.evictions
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
        if self._pool is None:
            raise OptionError(
                "every expert is resident: there is no pool to resize; load with a memory budget"
            )
        self.plan = resized(self.plan, memory_bytes)
        self._resize(self.plan.slots)
        self._set_limits()

    def lend(self, nbytes: int) -> None:
        """Shrink the pool by so many bytes until `take_back`."""
        if self._pool is None:
            return
        whole = max(1, self.plan.parts.experts)
        share = max(0, whole - nbytes) / whole
        self._resize({layout: max(1, int(count * share)) for layout, count in self.plan.slots.items()})
        self._is_lent = True

    def take_back(self) -> None:
        """Let the pool be as large as planned again."""
        if self._is_lent:
            self._resize(self.plan.slots)
            self._is_lent = False

    def close(self) -> None:
        """Stop reading. The model cannot compute after that. May be called twice."""
        if self._store is not None:
            self._store.close()
        for layer in self._layers:
            layer.detach()
        if self._pool is not None:
            self._pool.close()
        self._pool, self._store, self._layers = None, None, []
        mx.clear_cache()

    def _resize(self, slots: dict[Any, int]) -> None:
        assert self._pool is not None, "nothing is streamed"
        self._pool.resize(slots)
        for layer in self._layers:
            layer.use_banks()
        mx.clear_cache()
        trim()

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
    """Read what stays resident, array by array: some are made of others, which are gone before the next."""
    for _, array in tree_flatten(model.parameters()):
        try:
            mx.eval(array)
        except RuntimeError as error:
            raise ReadError(f"cannot read the weights: {' '.join(str(error).split())}") from error
    mx.clear_cache()
