"""Turns a prompt's token ids into an answer, chunk by chunk: the one token loop over any engine.

It does not know files, templates or terminals. It ends when the model gives an end token or the answer says a
stop text ("stop"), or when the limit that was asked for or the context is full ("length"). An end token is
neither part of the answer nor counted; the tokens that made a stop text are counted, as they were computed.
Stop texts are looked for in the answer proper, not in the reasoning before it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from spile import memory
from spile.engines.base import CopyableState, Counters, Engine, OnLogits, State
from spile.errors import ContextError, OptionError
from spile.generation.held import Held
from spile.generation.logprobs import Logprob, measure
from spile.generation.options import Sampling
from spile.generation.prompt_cache import PromptCache, Source, turn_cut
from spile.generation.sampling import Sampler
from spile.text.reasoning import Piece, ReasoningSplitter
from spile.text.stops import StopFilter
from spile.text.tokenizer import Decoder

FinishReason = Literal["stop", "length"]
OnPrefill = Callable[[int, int], None]  # tokens done, tokens in all
OnPrompt = Callable[
    [State], None
]  # a state that holds of the prompt what another can go on from, and no more


class Constraint(Protocol):
    """What an answer has to look like, as a rule for each next token. For one answer."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end."""
        ...

    def allowed(self) -> NDArray[np.intp]:
        """Return the ids that may come next, ascending, at least one; end tokens where the answer may end."""
        ...

    def accept(self, token_id: int) -> None:
        """Take note of the token that was chosen. Not called for an end token."""
        ...


@dataclass(frozen=True)
class Stats:
    """What one answer took. Bytes, hits and misses are of this answer alone; rates that cannot be told are
    None.

    tokens_per_second = (n - 1) / (time of the last token - time of the first): the prompt's time is not in
    it. time_to_first_token_seconds counts from the request on, opening the engine included. cached_tokens are
    those of the prompt that were read before and not computed again; prompt_tokens_per_second is about the others.
    reasoning_tokens are those of completion_tokens that were reasoning, its markers included.
    """

    prompt_tokens: int
    cached_tokens: int
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
    reasoning_tokens: int = 0

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
    nothing); the last has no token, the text still held back, the reason for the end, the stop text if there
    was one, and the statistics. A reasoning model's chunks have `reasoning` before they have text. Where the prompt's
    log-probabilities are asked for, chunks without a token have them, a piece of the prompt each; that of its first
    token, which nothing predicts, is not a number."""

    text: str
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    reasoning: str = ""
    logprob: Logprob | None = None
    stopped_by: str | None = None
    prompt_logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A whole answer. `token_ids` are all that were chosen, those of the reasoning and of a stop text too."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    reasoning: str = ""
    logprobs: tuple[Logprob, ...] = ()
    stopped_by: str | None = None
    prompt_logprobs: tuple[Logprob, ...] = ()


def join(chunks: Iterable[Chunk]) -> Completion:
    """Make one answer of all its chunks."""
    texts: list[str] = []
    reasoning: list[str] = []
    token_ids: list[int] = []
    logprobs: list[Logprob] = []
    prompt_logprobs: list[Logprob] = []
    chunk = None
    for chunk in chunks:
        texts.append(chunk.text)
        reasoning.append(chunk.reasoning)
        prompt_logprobs += chunk.prompt_logprobs
        if chunk.token_id is not None:
            token_ids.append(chunk.token_id)
        if chunk.logprob is not None:
            logprobs.append(chunk.logprob)
    assert chunk is not None, "a stream is never empty"
    assert chunk.finish_reason is not None, "a stream ends with its reason"
    assert chunk.stats is not None, "and with its statistics"
    return Completion(
        text="".join(texts),
        token_ids=tuple(token_ids),
        finish_reason=chunk.finish_reason,
        stats=chunk.stats,
        reasoning="".join(reasoning),
        logprobs=tuple(logprobs),
        prompt_logprobs=tuple(prompt_logprobs),
        stopped_by=chunk.stopped_by,
    )


def check_prompt(num_tokens: int, context: int, *, num_answer: int = 0) -> None:
    """Check, before any work, that a prompt can be read, with so many tokens of an answer.

    Raises: OptionError for an empty one, ContextError for one longer than the context.
    """
    if num_tokens == 0:
        raise OptionError("the prompt is empty: there is no token to go on from")
    if num_tokens > context:
        raise ContextError(
            f"the prompt has {num_tokens:,} tokens and the context holds {context:,}",
            "Shorten the prompt, or ask for a larger context if the model has one.",
        )
    if num_tokens + num_answer > context:
        raise ContextError(
            f"the prompt has {num_tokens:,} tokens and fills the context: there is no room for an answer",
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
    splitter: ReasoningSplitter | None = None,
    held: Held | None = None,
    cache: PromptCache | None = None,
    sources: Sequence[Source] = (),
    on_prefill: OnPrefill | None = None,
    on_prompt: OnPrompt | None = None,
    requested: float | None = None,
    pauses: bool = False,
    constraint: Constraint | None = None,
    prompt_logprobs: bool = False,
) -> Generator[Chunk, None, None]:
    """Yield the answer to a prompt that `check_prompt` has passed.

    Without a decoder chunks have no text; without a splitter all of it is answer. With `held` the state goes
    on from what it holds and stays for the next prompt. What `cache` or `sources` have of the prompt is not read
    again, and `cache` gets what was read. Prompt and answer together are no longer than the
    context. `requested` is the `time.perf_counter()` of the request, now by default. With `pauses` an empty
    chunk comes between two chunks of the prompt, for whoever runs several answers at once. A `constraint` says
    which tokens may come, and ends an answer to which nothing can be added. With `prompt_logprobs` come those
    of the prompt's tokens; logits of what was read before are nowhere, so all of it is read, and no cache gets it; and
    the last chunk has that of an end token, so that each choice is measured. Closing the iterator, or an exception
    thrown into it, frees a state that is not held and leaves the engine as good as before.
    """
    requested = time.perf_counter() if requested is None else requested
    num_entries = min(num_entries, engine.vocab_size)
    sampler = Sampler(sampling, num_entries, banned=eos_ids if sampling.ignore_eos else ())
    answer = _Answer(decoder, splitter, StopFilter(sampling.stops))
    before = engine.counters()
    scorer = end_logprob = None
    if prompt_logprobs:
        scorer, cache, sources = _Scorer(token_ids, sampling.logprobs or 0, num_entries), None, ()
    kept = Held(is_lasting=False) if held is None else held
    finish_reason: FinishReason = "length"
    is_whole = False
    try:
        state, num_cached = kept.begin(engine, token_ids, cache, sources)
        clock = _Clock(requested, time.perf_counter())
        reuse_step = state.step if isinstance(state, CopyableState) else 1
        # The last position up to which the prompt is worth keeping.
        last = len(token_ids) if reuse_step == 1 else (len(token_ids) - 1) // reuse_step * reuse_step
        cut = turn_cut(token_ids, eos_ids) // reuse_step * reuse_step
        is_kept = cache is not None or on_prompt is not None
        in_pieces = (
            pauses
            or prompt_logprobs
            or (cache is not None and cache.wants_every_chunk)
            or (reuse_step > 1 and is_kept)
        )
        step = engine.prefill_chunk if in_pieces else len(token_ids)
        # Where no logits are wanted an engine may have less to do than in `prefill`.
        read = getattr(engine, "read", engine.prefill)
        # Where an engine's bits may depend on the pieces, these are the same wherever a prompt begins; elsewhere none
        # is shorter than it must be, as each may cost a pass over all experts.
        is_free = isinstance(state, CopyableState) and reuse_step == 1
        start, shift = num_cached, num_cached % step if is_free else 0
        while start < len(token_ids):
            if start >= last and on_prompt is not None:
                on_prompt(state)
                on_prompt = None
            end = min(start - (start - shift) % step + step, len(token_ids))
            shifted = _shifted(on_prefill, start - num_cached, len(token_ids) - num_cached)
            if scorer is not None:
                engine.score(state, token_ids[start:end], scorer.at(start), shifted)
                logits = scorer.last
                yield Chunk("", prompt_logprobs=scorer.take())
            elif end < len(token_ids):
                read(state, token_ids[start:end], shifted)
                kept.keep(tuple(at for at in (last, cut) if start < at <= end))
                if pauses:
                    yield Chunk("")
            else:
                logits = engine.prefill(state, token_ids[start:end], shifted)
            start = end
        if on_prompt is not None:
            on_prompt(state)
        while sampling.max_tokens is None or clock.num_tokens < sampling.max_tokens:
            token_id = sampler.sample(logits, constraint.allowed() if constraint else None)
            if token_id in eos_ids:
                clock.note_end()
                finish_reason = "stop"
                if scorer is not None:
                    end_logprob = measure(logits, token_id, sampling.logprobs or 0, num_entries)
                break
            if constraint:
                constraint.accept(token_id)
            clock.note_token()
            logprob = None
            if sampling.logprobs is not None:
                logprob = measure(logits, token_id, sampling.logprobs, num_entries)
            piece = answer.push(token_id)
            kept.note(token_id)
            yield Chunk(piece.text, token_id, reasoning=piece.reasoning, logprob=logprob)
            if answer.stopped_by is not None or (constraint and constraint.is_complete):
                finish_reason = "stop"
                break
            if len(token_ids) + clock.num_tokens >= engine.context:
                break
            if clock.num_tokens == 1 and num_cached < len(token_ids) - 1:  # after the first: it need not wait
                kept.keep((len(token_ids), cut))
            if clock.num_tokens != sampling.max_tokens:
                logits = engine.decode(state, token_id)
        clock.note_end()
        stats = clock.stats(len(token_ids), num_cached, answer.num_reasoning, engine, before)
        piece = answer.flush()
        if answer.stopped_by is not None:
            finish_reason = "stop"
        yield Chunk(piece.text, None, finish_reason, stats, piece.reasoning, end_logprob, answer.stopped_by)
        is_whole = True
    except GeneratorExit:
        is_whole = True  # as far as it went
        raise
    finally:
        if is_whole:
            kept.keep_answer(turn_cut(token_ids, eos_ids))
        if held is None:
            kept.close()


def _shifted(on_prefill: OnPrefill | None, start: int, total: int) -> OnPrefill | None:
    """Report progress inside of one piece of a prompt as progress in the whole."""
    return None if on_prefill is None else lambda done, _: on_prefill(start + done, total)


class _Scorer:
    """Turns logits after a prompt's tokens into log-probabilities of the next ones."""

    def __init__(self, token_ids: Sequence[int], num_top: int, num_entries: int) -> None:
        self.last: NDArray[np.float32]  # logits after the last token that was read
        self._token_ids = token_ids
        self._num_top = num_top
        self._num_entries = num_entries
        self._measured = [Logprob(token_ids[0], math.nan, ())]

    def at(self, start: int) -> OnLogits:
        """Return what takes the logits of a piece of the prompt that begins at `start`."""

        def measure_all(first: int, logits: NDArray[np.float32]) -> None:
            nexts = self._token_ids[start + first + 1 : start + first + 1 + len(logits)]
            for row, token_id in zip(logits, nexts, strict=False):  # the last has no next one
                self._measured.append(measure(row, token_id, self._num_top, self._num_entries))
            self.last = logits[-1].copy()

        return measure_all

    def take(self) -> tuple[Logprob, ...]:
        """Return what was measured since the last call."""
        measured, self._measured = tuple(self._measured), []
        return measured


class _Answer:
    """The way of an answer's tokens to its text: decoded, split, and cut before a stop text."""

    def __init__(
        self, decoder: Decoder | None, splitter: ReasoningSplitter | None, stops: StopFilter
    ) -> None:
        self.num_reasoning = 0  # tokens, which come before all others
        self._num_tokens = 0
        self._decoder = decoder
        self._splitter = splitter
        self._stops = stops

    @property
    def stopped_by(self) -> str | None:
        return self._stops.matched

    def push(self, token_id: int) -> Piece:
        decoded = self._decoder.push(token_id) if self._decoder else ""
        self._num_tokens += 1
        piece = Piece("", decoded)
        if self._splitter is not None:
            was_thinking = self._splitter.is_thinking
            piece = self._splitter.push(decoded)
            if was_thinking or self._splitter.is_thinking or piece.reasoning:
                self.num_reasoning = self._num_tokens
        return Piece(piece.reasoning, self._stops.push(piece.text))

    def flush(self) -> Piece:
        """Return all that was held back, on the way through the same filters."""
        rest = self._decoder.flush() if self._decoder else ""
        if self._splitter is None:
            return Piece("", self._stops.push(rest) + self._stops.flush())
        pushed, last = self._splitter.push(rest), self._splitter.flush()
        text = self._stops.push(pushed.text + last.text) + self._stops.flush()
        return Piece(pushed.reasoning + last.reasoning, text)


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

    def stats(
        self, prompt_tokens: int, cached_tokens: int, reasoning_tokens: int, engine: Engine, before: Counters
    ) -> Stats:
        after = engine.counters()
        return Stats(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=self.num_tokens,
            prompt_tokens_per_second=_rate(prompt_tokens - cached_tokens, self.started, self.prefilled),
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
            reasoning_tokens=reasoning_tokens,
        )


def _rate(count: int, start: float | None, end: float | None) -> float | None:
    """Return a count by seconds; None where nothing was counted or no time passed."""
    if count < 1 or start is None or end is None or end <= start:
        return None
    return count / (end - start)
