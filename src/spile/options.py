"""Turns what a user asks of the sampler into one checked value, with the defaults in one place.

It does not sample: it stays free of NumPy, so that help texts can show the defaults at no cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from spile.errors import OptionError, quote


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, and how many at most. Checked when it is made.

    temperature 0 takes the most probable token; top_k 0, top_p 1 and min_p 0 switch a filter off. Without a
    seed every answer differs; with one it is the same again. max_tokens None means: until the model ends or
    the context is full.

    Raises: OptionError naming parameter, value and range.
    """

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 40
    min_p: float = 0.05
    seed: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, 100)
        _check_number("top_p", self.top_p, 0, 1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)

    def changed(self, changes: Mapping[str, Any]) -> Sampling:
        """Return a copy with these values in place; None keeps what is there.

        Raises: OptionError for a name that is no parameter, or a value out of range.
        """
        known = {field.name for field in fields(self)}
        for name in changes:
            if name not in known:
                names = ", ".join(sorted(known))
                raise OptionError(f"there is no sampling parameter {name!r}: there are {names}")
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def sampling_of(generation_config: Mapping[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
    """Return the defaults that a model's generation_config.json asks for, and notes on values that cannot be
    used.
    """
    sampling, notes = Sampling(), []
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            sampling = sampling.changed({name: value})
        except OptionError as error:
            notes.append(f"generation_config.json: {error}; {getattr(sampling, name)} is used")
    if generation_config.get("do_sample") is False:
        sampling = replace(sampling, temperature=0.0)
    return sampling, tuple(notes)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise OptionError(f"{name} is {quote(value)}: it must be a number from {low:g} to {high:g}")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(f"{name} is {quote(value)}: it must be a whole number from {low} to {high:,}")
