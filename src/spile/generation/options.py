"""Turns what a user asks of an answer (how tokens are chosen, when it ends) into one checked value, with the
defaults in one place.

It does not sample: it stays free of NumPy, so that help texts can show the defaults at no cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from spile.errors import OptionError, quote

MOST_LOGPROBS = 100  # alternatives a token; OpenAI's protocol has 20
_BANNED = -100  # a bias that excludes a token altogether, as in OpenAI's protocol


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, and when to end. Checked when it is made.

    temperature 0, like any below 1e-6, takes the most probable token; top_k 0, top_p 1 and min_p 0 switch a
    filter off. Without a seed every answer differs; with one it is the same again. max_tokens None means:
    until the model ends or the context is full; 0 only reads the prompt.

    Penalties are about the tokens of the answer so far, not about the prompt: a token that occurred n times
    has its logit divided by repetition_penalty (multiplied, where it is negative), then lowered by
    n * frequency_penalty + presence_penalty. logit_bias (token id -> number) is added before; -100 excludes
    the token.

    logprobs None means that none are asked for; 0 asks for those of the chosen tokens, n for the n likeliest
    alternatives too. stop texts end the answer and are no part of it. With ignore_eos end tokens are never
    chosen, so that only a limit ends the answer: for benchmarks.

    Raises: OptionError naming parameter, value and range.
    """

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 40
    min_p: float = 0.05
    seed: int | None = None
    max_tokens: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, 100)
        _check_number("top_p", self.top_p, 0, 1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_number("presence_penalty", self.presence_penalty, -100, 100)
        _check_number("frequency_penalty", self.frequency_penalty, -100, 100)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise OptionError(f"ignore_eos is {quote(self.ignore_eos)}: it must be true or false")
        # One form for what may be given in several; the value is still as new.
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_stops(self.stop))

    @property
    def biases(self) -> Mapping[int, float]:
        """logit_bias by token id, minus infinity for a token that is excluded."""
        return {i: float("-inf") if value <= _BANNED else value for i, value in dict(self.logit_bias).items()}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        return tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether what was chosen before matters."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

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
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
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


def check_text(name: str, text: str) -> None:
    """Check that a text has a UTF-8 form: bytes of a command line that are none have not.

    Raises: OptionError naming the place.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"{name} is not valid UTF-8 at character {error.start:,}") from error


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise OptionError(f"{name} is {quote(value)}: it must be a number from {low:g} to {high:g}")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(f"{name} is {quote(value)}: it must be a whole number from {low} to {high:,}")


def _checked_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """Return (id, bias) in the order of ids. Ids may be written as text, as in JSON's objects."""
    try:
        pairs = sorted((int(token_id), value) for token_id, value in dict(given).items())
    except (TypeError, ValueError):
        raise OptionError(f"logit_bias is {quote(given)}: it must map token ids to numbers") from None
    for token_id, value in pairs:
        _check_integer("a token id of logit_bias", token_id, 0, 2**31 - 1)
        _check_number(f"logit_bias of token {token_id}", value, -100, 100)
    return tuple((token_id, float(value)) for token_id, value in pairs)


def _checked_stops(given: Any) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else given
    if not isinstance(stops, Sequence) or not all(isinstance(stop, str) and stop for stop in stops):
        raise OptionError(
            f"stop is {quote(given)}: it must be a text, or a list of texts, none of them empty"
        )
    for stop in stops:
        check_text("stop", stop)
    return tuple(stops)
