"""Turns a prompt's token ids into an answer, chunk by chunk: the one token loop over any engine.

It does not know files, templates or terminals. It ends when the model gives an end token ("stop"), or when
the limit that was asked for or the context is full ("length"). An end token is neither part of the answer nor
counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from spile import memory
from spile.engines.base import Counters, Engine
from spile.errors import ContextError, OptionError
from spile.options import Sampling
from spile.sampling import Sampler
from spile.tokenizer import Decoder

FinishReason = Literal["stop", "length"]
OnPrefill = Callable[[int, int], None]  # tokens done, tokens in all


@dataclass(frozen=True)
class Stats:
    """What one answer took. Bytes, hits and misses are of this answer alone; rates that cannot be told are
    None.

    tokens_per_second = (n - 1) / (time of the last token - time of the first): the prompt's time is not in
    it. time_to_first_token_seconds counts from the request on, opening the engine included.
    """

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_per_second: float | None
    tokens_per_second: float | None
    time_to_first_token_seconds: float | None
    peak_memory_bytes: int
    resident_expert_bytes: int
    bytes_read: int
    expert_hits: int
    expert_misses: int
    stall_seconds: float
    engine: str
    exact: bool

    @property
    def hit_rate(self) -> float | None:
        """The part of the wanted experts that were resident; None when none was wanted."""
        wanted = self.expert_hits + self.expert_misses
        return self.expert_hits / wanted if wanted else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer. One comes for every token, with the text it completes (often part of a word, or
    nothing); the last has no token, the text still held back, the reason for the end, and the statistics."""

    text: str
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    stats: Stats | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats


def check_prompt(num_tokens: int, context: int) -> None:
    """Check, before any work, that a prompt can be answered.

    Raises: OptionError for an empty one, ContextError for one longer than the context.
    """
    if num_tokens == 0:
        raise OptionError("the prompt is empty: there is no token to go on from")
    if num_tokens > context:
        raise ContextError(
            f"the prompt has {num_tokens:,} tokens and the context holds {context:,}",
            "Shorten the prompt, or ask for a larger context if the model has one.",
        )


def generate(
    engine: Engine,
    token_ids: Sequence[int],
    *,
    sampling: Sampling,
    num_entries: int,
    eos_ids: frozenset[int],
    decoder: Decoder | None = None,
    on_prefill: OnPrefill | None = None,
    requested: float | None = None,
) -> Generator[Chunk, None, None]:
    """Yield the answer to a prompt that `check_prompt` has passed.

    Without a decoder chunks have no text. `requested` is the `time.perf_counter()` of the request, now by
    default. Closing the iterator, or an exception thrown into it, frees the state and leaves the engine as
    good as before.
    """
    requested = time.perf_counter() if requested is None else requested
    sampler = Sampler(sampling, min(num_entries, engine.vocab_size))
    before = engine.counters()
    state = engine.new_state()
    clock = _Clock(requested, time.perf_counter())
    finish_reason: FinishReason = "length"
    try:
        logits = engine.prefill(state, token_ids, on_prefill)
        while sampling.max_tokens is None or clock.num_tokens < sampling.max_tokens:
            token_id = sampler.sample(logits)
            if token_id in eos_ids:
                clock.note_end()
                finish_reason = "stop"
                break
            clock.note_token()
            yield Chunk(decoder.push(token_id) if decoder else "", token_id)
            if state.position >= engine.context:
                break
            if clock.num_tokens != sampling.max_tokens:
                logits = engine.decode(state, token_id)
        stats = clock.stats(len(token_ids), engine, before)
        yield Chunk(decoder.flush() if decoder else "", None, finish_reason, stats)
    finally:
        state.close()


class _Clock:
    """When the tokens of one answer came."""

    def __init__(self, requested: float, started: float) -> None:
        self.requested = requested
        self.started = started
        self.num_tokens = 0
        self.prefilled: float | None = None  # when the first token was known, an end token or not
        self.first: float | None = None
        self.last: float | None = None

    def note_token(self) -> None:
        now = time.perf_counter()
        self.num_tokens += 1
        if self.first is None:
            self.first = self.prefilled = now
        self.last = now

    def note_end(self) -> None:
        if self.prefilled is None:
            self.prefilled = time.perf_counter()

    def stats(self, prompt_tokens: int, engine: Engine, before: Counters) -> Stats:
        after = engine.counters()
        return Stats(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.num_tokens,
            prompt_tokens_per_second=_rate(prompt_tokens, self.started, self.prefilled),
            tokens_per_second=_rate(self.num_tokens - 1, self.first, self.last),
            time_to_first_token_seconds=None if self.first is None else self.first - self.requested,
            peak_memory_bytes=memory.peak_memory_bytes(),
            resident_expert_bytes=engine.resident_expert_bytes,
            bytes_read=after.bytes_read - before.bytes_read,
            expert_hits=after.hits - before.hits,
            expert_misses=after.misses - before.misses,
            stall_seconds=after.stall_seconds - before.stall_seconds,
            engine=engine.name,
            exact=engine.exact,
        )


def _rate(count: int, start: float | None, end: float | None) -> float | None:
    """Return a count by seconds; None where nothing was counted or no time passed."""
    if count < 1 or start is None or end is None or end <= start:
        return None
    return count / (end - start)
