"""What a user may ask of an engine, checked once: engines, residency and commands read it, and none of them owns it."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from spile.errors import OptionError, quote

ENGINES = ("auto", "cpu", "mlx")
PROMPT_FOLDER_LIMIT = "2GB"  # of a folder that keeps what was read of prompts, by default
IO_MODES = ("auto", "buffered", "direct", "mapped")
KV_BITS = (32, 16, 8, 4)


@dataclass(frozen=True)
class EngineOptions:
    """What a user may ask of an engine. Checked when made.

    `kv_bits`, `kv_v_bits`, `kv_ring_bits` and `activation_bytes` change the answer's last digits; `flash_head`, and
    `reselect_every` other than 1, make it approximate; nothing else changes a bit of it.

    Raises: OptionError naming the option, its value and its range.
    """

    engine: str = "auto"
    memory_bytes: int | None = None  # of the whole process; None: what the machine has
    threads: int | None = None  # None: the physical cores
    io: str = "auto"
    kv_bits: int = 16  # of keys
    kv_v_bits: int | None = None  # of values; None: the keys'
    kv_ring_bits: int | None = None  # of both, in layers with a sliding window; None: 16, or 32 beside 32
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
    reserved_bytes: int = 0  # of the budget, that others in this process or its helper processes may take

    def __post_init__(self) -> None:
        _check_choice("engine", self.engine, ENGINES)
        _check_choice("io", self.io, IO_MODES)
        _check_choice("kv_bits", self.kv_bits, KV_BITS)
        for name, bits in (("kv_v_bits", self.kv_v_bits), ("kv_ring_bits", self.kv_ring_bits)):
            if bits is not None:
                _check_choice(name, bits, KV_BITS)
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
            ("reserved_bytes", self.reserved_bytes, 2**50),
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


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if type(value) is not type(choices[0]) or value not in choices:
        raise OptionError(f"{name} is {quote(value)}: it must be one of {', '.join(map(str, choices))}")
