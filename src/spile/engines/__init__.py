"""Chooses and opens an engine for a model; the options of all engines in one place.

It does not know how an engine works.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

from spile.errors import OptionError, quote

if TYPE_CHECKING:
    from spile.architectures.maple import MapleModel
    from spile.engines.base import Engine

ENGINES = ("auto", "cpu", "mlx")
IO_MODES = ("auto", "buffered", "direct", "mapped")


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
        _check_choice("kv_bits", self.kv_bits, (16, 32))
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

    def check_context(self, longest: int) -> None:
        """Check the context against the longest that the model was made for.

        Raises: OptionError with both numbers.
        """
        if self.context is not None and self.context > longest:
            raise OptionError(f"context is {self.context:,}: this model can have at most {longest:,} tokens")


def open_engine(model: MapleModel, options: EngineOptions) -> Engine:
    """Open the cpu engine, the only one so far. Touches disk: weights that stay resident are read.

    Raises:
        BudgetError: the budget is below what the model needs; the message says what that is.
        OptionError: an option that this machine cannot follow.
        ReadError, CheckpointError: weights that cannot be read.
    """
    from spile.engines.cpu.engine import CpuEngine

    return CpuEngine(model, options)


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if type(value) is not type(choices[0]) or value not in choices:
        raise OptionError(f"{name} is {quote(value)}: it must be one of {', '.join(map(str, choices))}")
