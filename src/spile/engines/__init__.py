"""Chooses and opens an engine for a model; the options of all engines in one place.

It does not know how an engine works.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

from spile.errors import OptionError, UnsupportedModelError, quote

if TYPE_CHECKING:
    from spile.architectures.foreign import ForeignModel
    from spile.architectures.maple import MapleModel
    from spile.engines.base import Engine

ENGINES = ("auto", "cpu", "mlx")
PROMPT_FOLDER_LIMIT = "2GB"  # of a folder that keeps what was read of prompts, by default
IO_MODES = ("auto", "buffered", "direct", "mapped")
KV_BITS = (32, 16, 8, 4)


@dataclass(frozen=True)
class EngineOptions:
    """What a user may ask of an engine. Checked when made.

    `kv_bits`, `kv_v_bits` and `activation_bytes` change the answer's last digits; `flash_head`, and
    `reselect_every` other than 1, make it approximate; nothing else changes a bit of it.

    Raises: OptionError naming the option, its value and its range.
    """

    engine: str = "auto"
    memory_bytes: int | None = None  # of the whole process; None: what the machine has
    threads: int | None = None  # None: the physical cores
    io: str = "auto"
    kv_bits: int = 16  # of keys
    kv_v_bits: int | None = None  # of values; None: the keys'
    context: int | None = None  # tokens; None: what the plan finds room for
    prefill_chunk: int | None = None  # tokens
    activation_bytes: int = 2  # 3: a third byte for every activation, for comparisons
    slots: int | None = None  # experts in the pool, for tests; None: what the budget allows
    flash_moe: bool = False  # a pool of experts even where all fit
    active_experts: int | None = None  # slots a layer, in place of what the budget allows
    shared_experts: int = 0  # the first so many of each layer stay resident
    reselect_every: int = (
        1  # tokens; other than 1, routers see resident experts alone in between: approximate
    )
    flash_head: bool = False  # the checkpoint's clustered head: approximate
    sequences: int = 1  # states at once that the plan keeps KV room for
    prompt_cache_bytes: int = 0  # of the budget, for keys and values of earlier prompts

    def __post_init__(self) -> None:
        _check_choice("engine", self.engine, ENGINES)
        _check_choice("io", self.io, IO_MODES)
        _check_choice("kv_bits", self.kv_bits, KV_BITS)
        if self.kv_v_bits is not None:
            _check_choice("kv_v_bits", self.kv_v_bits, KV_BITS)
        _check_choice("activation_bytes", self.activation_bytes, (2, 3))
        for name, value, most in (
            ("memory", self.memory_bytes, 2**50),
            ("threads", self.threads, 1024),
            ("context", self.context, 2**30),
            ("prefill_chunk", self.prefill_chunk, 2**16),
            ("slots", self.slots, 2**30),
            ("active_experts", self.active_experts, 2**16),
            ("sequences", self.sequences, 1024),
        ):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= value <= most:
                raise OptionError(f"{name} is {quote(value)}: it must be an integer from 1 to {most:,}")
        for name, count, most in (
            ("shared_experts", self.shared_experts, 2**16),
            ("reselect_every", self.reselect_every, 2**30),
            ("prompt_cache_bytes", self.prompt_cache_bytes, 2**50),
        ):
            if isinstance(count, bool) or not isinstance(count, Integral) or not 0 <= count <= most:
                raise OptionError(f"{name} is {quote(count)}: it must be an integer from 0 to {most:,}")
        for name in ("flash_moe", "flash_head"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is {quote(getattr(self, name))}: it must be True or False")
        if self.io == "mapped" and (self.flash_moe or self.active_experts is not None):
            asked = "flash_moe" if self.active_experts is None else "active_experts"
            raise OptionError(f"io is 'mapped': that keeps no pool of experts, and {asked} asks for one")
        if self.reselect_every != 1 and self.num_active(1) is None:
            raise OptionError(
                f"reselect_every is {self.reselect_every} without active_experts: "
                f"it says how often those are selected"
            )

    @property
    def may_map(self) -> bool:
        """Whether experts may be used in place in mapped files, where all fit."""
        wants_pool = self.slots is not None or self.flash_moe or self.active_experts is not None
        return not wants_pool and self.io in ("auto", "mapped")

    def num_active(self, top_k: int) -> int | None:
        """Return the slots a layer that were asked for; None: as many as the budget allows."""
        if self.active_experts is None and self.flash_moe and self.memory_bytes is None:
            return top_k + self.shared_experts
        return self.active_experts

    def check_experts(self, num_experts: int, top_k: int) -> None:
        """Check what was asked about experts against a layer's number of them, of which a token takes top_k.

        Raises: OptionError with both numbers.
        """
        shared, active = self.shared_experts, self.num_active(top_k)
        if active is None:
            if shared > num_experts:
                raise OptionError(
                    f"shared experts must be <= the model's {num_experts} a layer, and shared_experts is {shared}"
                )
            return
        if active < top_k:
            raise OptionError(f"active experts must be >= top_k ({top_k}), and active_experts is {active}")
        if active > num_experts:
            raise OptionError(
                f"active experts must be <= the model's {num_experts} a layer, and active_experts is {active}"
            )
        if shared > active:
            raise OptionError(f"shared experts must be <= active ({active}), and shared_experts is {shared}")
        if shared > active - top_k:
            raise OptionError(
                f"shared experts must be <= active - top_k ({active} - {top_k} = {active - top_k}), "
                f"and shared_experts is {shared}"
            )

    def check_context(self, longest: int) -> None:
        """Check the context against the longest that the model was made for.

        Raises: OptionError with both numbers.
        """
        if self.context is not None and self.context > longest:
            raise OptionError(f"context is {self.context:,}: this model can have at most {longest:,} tokens")


def choose_engine(model: MapleModel | ForeignModel, options: EngineOptions) -> str:
    """Return the name of the engine that runs a model: what was asked for, else mlx where it has a GPU or the
    model is foreign, else cpu. Imports neither.

    Raises: UnsupportedModelError for a foreign model on the cpu engine.
    """
    from spile.architectures.foreign import ForeignModel

    if isinstance(model, ForeignModel):
        if options.engine == "cpu":
            raise UnsupportedModelError(
                f"the cpu engine does not run model_type {quote(model.checkpoint.config.get('model_type'))}",
                "Leave out --engine cpu: the mlx engine runs it.",
            )
        return "mlx"
    if options.engine != "auto":
        return options.engine
    return "mlx" if _mlx_has_gpu() else "cpu"


def open_engine(model: MapleModel | ForeignModel, options: EngineOptions) -> Engine:
    """Open the engine that `choose_engine` names. Touches disk: weights that stay resident are read.

    Raises:
        BudgetError: the budget is below what the model needs; the message says what that is.
        OptionError: an option that this machine cannot follow.
        ReadError, CheckpointError: weights that cannot be read.
        UnsupportedModelError: an architecture that the engine does not run; mlx is missing or of another version.
    """
    from spile.architectures.maple import MapleModel

    if choose_engine(model, options) == "mlx":
        from spile.engines.mlx.adapter import require

        require()
        from spile.engines.mlx.engine import MlxEngine

        return MlxEngine(
            model.checkpoint,
            options,
            vocab_size=model.config.vocab_size,
            longest=model.config.max_position_embeddings,
            num_chosen=model.config.num_experts_per_tok,
        )
    assert isinstance(model, MapleModel), "the cpu engine was chosen"
    options.check_experts(model.config.num_experts, model.config.num_experts_per_tok)
    from spile.engines.cpu.engine import CpuEngine

    return CpuEngine(model, options)


def _mlx_has_gpu() -> bool:
    """Whether mlx and mlx-lm are installed in a form that runs on this machine's GPU. Imports neither."""
    from importlib.metadata import PackageNotFoundError, version

    def has(package: str) -> bool:
        try:
            version(package)
        except PackageNotFoundError:
            return False
        return True

    has_gpu = has("mlx-cuda-12") or has("mlx-cuda-13")
    if sys.platform == "darwin":
        has_gpu = platform.machine() == "arm64"
    return has_gpu and has("mlx") and has("mlx-lm")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if type(value) is not type(choices[0]) or value not in choices:
        raise OptionError(f"{name} is {quote(value)}: it must be one of {', '.join(map(str, choices))}")
