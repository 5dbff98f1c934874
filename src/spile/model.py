"""Turns prompts into answers: what `spile.load(...)` gives.

It ties the parts together and does none of their work. Where its parts come from is `loading`'s matter. What it
decides is order. The prompt is encoded before the engine is opened, so that under a budget the tokenizer and
the pool of experts are never in memory together; later prompts borrow the pool's memory for as long as they are
being encoded.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from spile.errors import (
    BudgetError,
    ContextError,
    OptionError,
    SpileError,
    TextError,
    clean,
    quote,
)
from spile.generation.generate import Chunk, Completion, Constraint, OnPrefill, check_prompt, generate, join
from spile.generation.held import Held
from spile.generation.options import Sampling, sampling_of
from spile.generation.prompt_reuse import PromptReuse, continued
from spile.memory import trim
from spile.sizes import parse_budget
from spile.text.marks import Marks
from spile.text.prompts import OnNote, Prompt, PromptText, Rendering, check_ids_rendering, is_ids, prompt_text
from spile.text.reasoning import END, ReasoningSplitter, can_reason
from spile.text.renderer import Renderer
from spile.text.sidecar import Sidecar, eos_ids_of
from spile.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from spile.engines.base import Counters, Engine, State
    from spile.generation.grammar import Grammar, GrammarConstraint, GrammarTable


_LONGEST_PIECE = 1 << 17  # characters
_MOST_AT_A_CUT = 8  # tokens that may become fewer where two pieces of a text are joined again


class AsideError(Exception):
    """A text that cannot be encoded beside a computation: its memory must be borrowed from the pool first."""


# Characters that one token may stand for: Qwen2's longest entry is 128 spaces; composition (NFC) makes three
# characters one at most.
_LONGEST_ENTRY = 3 * 128


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as ids. `begins_inside`: whether it ends inside of the answer's reasoning; None where the answer
    has no reasoning to split off. Of use with the model that made it, any number of times.
    """

    token_ids: list[int]
    begins_inside: bool | None = None
    prefill: Sequence[int] = ()  # what the prompt has of the answer already, after its reasoning

    def splitter(self) -> ReasoningSplitter | None:
        """Make what splits one answer."""
        return None if self.begins_inside is None else ReasoningSplitter(has_begun=self.begins_inside)


class Model:
    """A model that is ready to answer. Made by `spile.load`; a context manager; for one thread at a time.

    The engine is opened with the first use that needs it, and stays until `close`.
    """

    def __init__(
        self,
        *,
        open_engine: Callable[[], Engine],
        config: Mapping[str, Any],
        sidecar: Sidecar,
        tokenizer: Tokenizer | None,
        plan_context: Callable[[], int],
        vocab_size: int,
        folder: Path | None = None,
        memory_bytes: int | None = None,
        prompts: PromptReuse | None = None,
        renderer: Renderer | None = None,
        parse_special: bool = False,
        on_note: OnNote | None = None,
        resources: ExitStack | None = None,
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._open_engine = open_engine
        self._engine: Engine | None = None
        self._config = config
        self._sidecar = sidecar
        self._plan_context = plan_context
        self._planned_context: int | None = None
        self._memory_bytes = memory_bytes
        self._grammar_table: GrammarTable | None = None
        self._grammar_lock = threading.Lock()
        self._closing_ids: list[int] | None = None  # of what ends the reasoning
        self._lock = threading.RLock()
        self._on_note = on_note or warn_of
        self._prompts = prompts or PromptReuse(str, on_note=self._on_note)
        self._text_lock = threading.Lock()
        self.text_room_nbytes = (
            0  # under a budget, what the plan leaves free for a text that is encoded `aside`
        )
        self._renderer = renderer or Renderer(memory_bytes)
        self._parse_special = parse_special
        self._marks: Marks | None = None
        self._knows_bytes = False  # whether the tokenizer's were looked at
        self._told: set[str] = set()  # notes that need no second time
        self._resources = resources or ExitStack()
        self._closed = False
        self._registry = threading.Lock()  # of what follows: whose states must go before the engine
        self._streams: WeakSet[Generator[Chunk, None, None]] = WeakSet()
        self._held: WeakSet[Held] = WeakSet()
        self.sampling, notes = sampling_of(sidecar.generation_config)
        for note in (*sidecar.notes, *notes):
            self._on_note(note)

    @property
    def context(self) -> int:
        """The most tokens that a prompt and its answer can have together."""
        if self._engine is not None:
            return self._engine.context
        if self._planned_context is None:
            self._planned_context = self._plan_context()
        return self._planned_context

    @property
    def summary(self) -> str | None:
        """The plan in one line; None before the engine is opened."""
        return None if self._engine is None else self._engine.summary()

    @property
    def chat_template(self) -> str | None:
        """The template that messages go through; None where there is none."""
        return self._sidecar.chat_template

    @property
    def budget_bytes(self) -> int | None:
        """The bound of the process's memory that somebody named."""
        return self._memory_bytes

    @property
    def has_budget(self) -> bool:
        """Whether somebody named a bound for the process's memory."""
        return self._memory_bytes is not None

    @property
    def can_reason(self) -> bool:
        """Whether the chat template is that of a model that reasons before it answers."""
        return can_reason(self._sidecar.chat_template or "")

    def open(self) -> Engine:
        """Open the engine now, if it is not open yet, and return it.

        Raises: BudgetError when the budget cannot be kept, ModelError and ReadError for files that fail.
        """
        return self._opened()

    def resize(self, memory: int | str) -> None:
        """Keep to another memory budget (bytes, or a size such as "1GB") from the next token on.

        Exact: only the pool of experts grows or shrinks. Answers that are being given go on.

        Raises: OptionError for no size, or a model whose files are mapped whole; BudgetError below the floor.
        """
        nbytes = parse_budget(memory) if isinstance(memory, str) else memory
        if isinstance(nbytes, bool) or not isinstance(nbytes, Integral) or nbytes < 1:
            raise OptionError(f"memory is {quote(memory)}: it must be bytes, or a size such as '1GB'")
        engine = self._opened()
        with self._alone():
            engine.resize(nbytes)
            self._memory_bytes = nbytes

    def counters(self) -> Counters | None:
        """What was read and found since the engine was opened; None before."""
        return None if self._engine is None else self._engine.counters()

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return float32 logits [T, V] after each of T token ids. Needs no tokenizer. The array itself, 4 T V
        bytes, comes on top of a memory budget.

        Raises: OptionError for ids that are none of the model's, ContextError for more than the context
        holds.
        """
        token_ids = self._checked_ids(token_ids)
        check_prompt(len(token_ids), self.context)
        engine = self._opened()
        check_prompt(len(token_ids), engine.context)
        with self._alone():
            self._check_open()
            with closing(engine.new_state()) as state:
                return engine.logits(state, token_ids)

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """Answer a prompt. Arguments and errors as in `stream`."""
        return join(self.stream(prompt, **options))

    def stream(
        self,
        prompt: Prompt | EncodedPrompt,
        *,
        raw: bool = False,
        system: str | None = None,
        think: bool = True,
        tools: Sequence[Any] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        held: Held | None = None,
        on_prefill: OnPrefill | None = None,
        pauses: bool = False,
        constraint: Constraint | None = None,
        prompt_logprobs: bool = False,
        json_schema: Mapping[str, Any] | None = None,
        save_prompt: str | Path | None = None,
        load_prompt: str | Path | None = None,
        **sampling: Any,
    ) -> Generator[Chunk, None, None]:
        """Answer a prompt chunk by chunk.

        A text is the user's message, or with `raw` the very text to go on from; a list of messages
        (`{"role": ..., "content": ...}`) goes through the chat template, which is also given `tools` and
        `template_arguments`, and is asked to leave reasoning out where `think` is False; a list of ids is
        taken as it is. `sampling` are the fields of `Sampling`; what is not given is the model's default.
        With `held`, made by `hold`, the answer goes on from the part of the prompt that was read before; with
        `pauses` an empty chunk comes after each piece of the prompt. A `constraint` rules which tokens may come,
        and with `json_schema` the answer is JSON that follows it (`{"type": "object"}` for any object);
        what `encoded` made is taken as it is. With `prompt_logprobs` chunks have those of the prompt's tokens too.
        `save_prompt` is a file that gets the prompt, once read; with `load_prompt` the prompt goes on from such
        a file's: the answer is as if both had been given in one text, and what the file holds is not read again.
        The prompt is encoded and checked, and the engine opened, before this returns; the rest happens as
        chunks are asked for.

        Raises:
            OptionError: a parameter out of range, or an empty prompt.
            ContextError: a prompt that leaves no room for an answer in the context.
            TextError: no tokenizer or no template where one is needed, or either is damaged or refuses.
            BudgetError, ModelError, ReadError: the engine cannot be opened, or a read fails.
            PromptFileError, WriteError: a saved prompt that is damaged or another model's; one that cannot be
                written.
        """
        requested = time.perf_counter()
        options = self.sampling.changed(sampling)
        self._check_sampling(options)
        saved = None if load_prompt is None else self._prompts.saved(load_prompt)
        text = prompt if isinstance(prompt, str) else None
        if saved is not None and not isinstance(prompt, EncodedPrompt):
            prompt, system = continued(saved, prompt, raw=raw, system=system)
            text = prompt if isinstance(prompt, str) else None
        rendering = Rendering(raw, system, think, tools, template_arguments or {})
        encoded = prompt if isinstance(prompt, EncodedPrompt) else self._encode(prompt, rendering)
        token_ids = encoded.token_ids
        num_answer = 0 if options.max_tokens == 0 else 1
        check_prompt(len(token_ids), self.context, num_answer=num_answer)
        save = None
        if save_prompt is not None:
            about = {"text": text, "raw": raw, "system": system}
            save = self._prompts.saver(save_prompt, token_ids, about)
        if json_schema is not None:
            from spile.generation.grammar import json_grammar

            if constraint is not None:
                raise OptionError("constraint and json_schema both say what the answer may be: give one")
            constraint = self.constraint(json_grammar(json_schema), begins_inside=encoded.begins_inside)
            for what in constraint.unkept:
                self._tell_once(f"the JSON schema is not kept to in this: {what}")
        if options.thinking_budget >= 0 and encoded.begins_inside is not None:
            constraint = self._thinking_limit(constraint, encoded, options.thinking_budget)
        tokenizer = self.tokenizer
        num_entries, eos_ids, decoder = self.vocab_size, self._configured_eos_ids(), None
        if tokenizer is not None:
            self._make_room_to_learn(tokenizer)  # a prompt of ids, before any text
            num_entries, eos_ids, decoder = tokenizer.num_entries, tokenizer.eos_ids, tokenizer.decoder()
        if not any(token_id < self.vocab_size for token_id in eos_ids):
            self._tell_once(
                "this model's files name no end token: an answer ends at a stop text or its limit alone"
            )
        engine = self._opened()
        check_prompt(len(token_ids), engine.context, num_answer=num_answer)
        if save is not None:
            self._prompts.check_savable(engine, len(token_ids))

        def on_prompt(state: State) -> None:
            if saved is not None:
                self._prompts.note_unused(saved)
            if save is not None:
                save(state)

        chunks = generate(
            engine,
            token_ids,
            sampling=options,
            num_entries=num_entries,
            eos_ids=eos_ids,
            decoder=decoder,
            splitter=encoded.splitter(),
            held=held,
            cache=self._prompts.cache,
            sources=() if saved is None else (saved,),
            on_prefill=self._while_wanted(on_prefill),
            on_prompt=on_prompt,
            requested=requested,
            pauses=pauses,
            constraint=constraint,
            prompt_logprobs=prompt_logprobs,
        )
        with self._registry:
            self._check_open()
            self._streams.add(chunks)
        return self._while_open(chunks)

    def hold(self) -> Held:
        """Make what keeps an engine's state from one answer to the next, for `stream`. The model closes it;
        close it earlier to give its memory back.
        """
        held = Held()
        with self._registry:
            self._check_open()
            self._held.add(held)
        return held

    def constraint(
        self, grammar: Grammar, *, begins_inside: bool | None = None, prefill: Sequence[int] = ()
    ) -> GrammarConstraint:
        """Make what keeps one answer to a grammar; `begins_inside` and `prefill` are the encoded prompt's. The first
        takes the memory of a table of all tokens for good: out of the budget, where there is one.

        Raises: OptionError for a grammar that cannot be followed, or without llguidance; TextError without a
        tokenizer of bytes; BudgetError where the pool cannot give up the table's bytes.
        """
        found = self._opened_table().constraint(grammar, begins_inside=begins_inside)
        if prefill:
            found.begin(prefill)
        return found

    def prepare_grammars(self) -> None:
        """Take the memory that `constraint` needs now. Before the engine is opened the plan then counts it, which
        leaves room where a pool could not give it up later.

        Raises: as `constraint`.
        """
        self._opened_table()

    def encode(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        think: bool = True,
        tools: Sequence[Any] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        continues: bool = False,
        add_bos: bool = True,
    ) -> list[int]:
        """Turn a prompt into token ids, as `stream` does; without `add_bos` a text does not begin as the tokenizer
        begins every text.
        """
        rendering = Rendering(raw, system, think, tools, template_arguments or {}, continues)
        return self._encode(prompt, rendering, add_bos=add_bos).token_ids

    def encoded(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        tools: Sequence[Any] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        add_bos: bool = True,
        continues: bool = False,
        aside: bool = False,
    ) -> EncodedPrompt:
        """Turn a prompt into what `stream` answers later, once or several times. With `continues` the last message is
        the beginning of the answer. With `aside` another thread may compute at the same time, once a first text was
        encoded.

        Raises: as `stream`, but for the context; with `aside` AsideError where a budget has no room for it.
        """
        rendering = Rendering(raw, None, True, tools, template_arguments or {}, continues)
        return self._encode(prompt, rendering, add_bos=add_bos, aside=aside)

    def close(self) -> None:
        """Close the engine, files and temporary folders. May be called twice, and from any thread: it waits until what
        another one computes has ended, which is a token, a layer of a prompt, or all of `logits`.

        Raises: SpileError inside of an answer's own step (`on_prefill`, say), which goes on.
        """
        with self._registry:
            streams, held = list(self._streams), list(self._held)
            was_closed, self._closed = self._closed, True  # from here on a step that begins is refused
        with self._lock:
            if any(
                getgeneratorstate(chunks) == GEN_RUNNING for chunks in streams
            ):  # by this very thread: the lock is its own
                self._closed = was_closed
                raise SpileError("a model cannot be closed from inside of its own answer")
            for chunks in streams:
                chunks.close()
            for one in held:
                one.close()
            if self._prompts.cache is not None:
                self._prompts.cache.clear()
            engine, self._engine = self._engine, None
            try:
                if engine is not None:
                    engine.close()
                if self.tokenizer is not None:
                    self.tokenizer.close()
                self._renderer.close()
            finally:
                self._resources.close()
                engine = None  # nobody else has it, nor what it read
                trim()

    def __enter__(self) -> Model:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _encode(
        self, prompt: Prompt, rendering: Rendering, *, add_bos: bool = True, aside: bool = False
    ) -> EncodedPrompt:
        self._check_open()
        if is_ids(prompt):
            check_ids_rendering(rendering)
            return EncodedPrompt(self._checked_ids(prompt))  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise TextError(
                f"{self.folder or 'this model'} has no tokenizer.json: it gives logits but cannot read text",
                "Put the model's tokenizer.json beside its weights.",
            )
        tokenizer, is_first = self.tokenizer, self._marks is None
        if not rendering.raw and self._sidecar.chat_template is not None:
            self._renderer.start()  # while the tokenizer is read
        try:
            source = prompt_text(
                prompt,  # type: ignore[arg-type]
                rendering,
                self._sidecar,
                self._renderer,
                self._tell_once,
                None if self._parse_special else lambda: self._found_marks(tokenizer, aside),
            )
            if aside:
                return self._encode_aside(tokenizer, source, add_bos)
            with self._alone():
                self._check_length(source.text)
                self._make_room(tokenizer, source.text)
                return self._encode_text(tokenizer, source, add_bos)
        finally:
            if is_first and not tokenizer.keep:  # the marks were read, and perhaps nothing was encoded then
                tokenizer.release()

    def _found_marks(self, tokenizer: Tokenizer, aside: bool) -> Marks:
        """Raises: AsideError where reading the tokenizer's entries has to borrow the pool's memory first."""
        if self._marks is None:
            if aside and not (tokenizer.keep or tokenizer.is_learned):
                raise AsideError
            with nullcontext() if aside else self._alone():
                if not aside:
                    self._make_room_to_learn(tokenizer)
                self._marks = Marks(tokenizer.added, self._sidecar.chat_template or "")
        return self._marks

    def _encode_aside(self, tokenizer: Tokenizer, source: PromptText, add_bos: bool) -> EncodedPrompt:
        self._check_length(source.text)
        if tokenizer.keep:
            return self._encode_text(tokenizer, source, add_bos)
        text = source.text if source.hidden is None else source.hidden.shown(source.text)
        with self._text_lock:  # the room is for one
            if tokenizer.encode_nbytes(text) > self.text_room_nbytes:
                self._check_pieces(tokenizer, text)
                raise AsideError
            return self._encode_text(tokenizer, source, add_bos)

    def _encode_text(self, tokenizer: Tokenizer, source: PromptText, add_bos: bool) -> EncodedPrompt:
        token_ids = tokenizer.encode(source.text, add_bos, source.hidden)
        if not self._knows_bytes:
            self._knows_bytes = True
            if lost := tokenizer.num_lost_bytes:
                self._on_note(
                    f"this tokenizer has no entry for {lost} bytes: texts lose the characters that have them"
                )
        highest = max(token_ids, default=0)
        if highest >= self.vocab_size:
            raise TextError(
                f"the tokenizer gave token {highest:,} and the model has {self.vocab_size:,} tokens: "
                f"the two do not belong together"
            )
        splitter = source.splitter
        prefill = (
            tokenizer.encode(source.prefill, add_bos=False, hidden=source.hidden) if source.prefill else ()
        )
        return EncodedPrompt(token_ids, None if splitter is None else splitter.is_thinking, prefill)

    def end_of_reasoning(self) -> list[int]:
        """Return the ids that end reasoning whose budget is spent. The first call encodes them, and is not for a thread
        beside the one that computes.
        """
        if self._closing_ids is None and self.tokenizer is not None:
            with self._alone():
                self._make_room(self.tokenizer, END)
                self._closing_ids = self.tokenizer.encode(f"{END}\n\n", add_bos=False)
        return self._closing_ids or []

    def _thinking_limit(
        self, constraint: Constraint | None, encoded: EncodedPrompt, budget: int
    ) -> Constraint:
        from spile.generation.thinking import ThinkingLimit

        splitter, tokenizer = encoded.splitter(), self.tokenizer
        assert splitter is not None, "only where there is reasoning"
        assert tokenizer is not None, "which read it"
        return ThinkingLimit(constraint, tokenizer.decoder(), splitter, self.end_of_reasoning(), budget)

    def _tell_once(self, note: str) -> None:
        if note not in self._told:
            self._told.add(note)
            self._on_note(note)

    def _check_sampling(self, sampling: Sampling) -> None:
        """Check what only this model can tell of sampling options."""
        if sampling.stops and self.tokenizer is None:
            raise OptionError("stop needs text, and this model has no tokenizer: its answers are ids")
        for token_id in sampling.biases:
            if token_id >= self.vocab_size:
                last = self.vocab_size - 1
                raise OptionError(
                    f"logit_bias names token id {token_id}, none of the model's: they go from 0 to {last:,}"
                )

    def _check_length(self, text: str) -> None:
        """Refuse a text that is far longer than any that fits, before it is encoded: that takes memory, and
        the budget has no room for it. One that is a little too long is counted exactly.
        """
        try:
            context = self.context
        except BudgetError:
            if self._can_encode(text):  # refused then, with the text's part in the sum
                return
            raise
        least = len(text) // _LONGEST_ENTRY
        if least > 2 * context:
            raise ContextError(
                f"the prompt has {len(text):,} characters, {least:,} tokens at the very least, and the context "
                f"holds {context:,}",
                "Shorten the prompt, or ask for a larger context if the model has one.",
            )

    def _check_pieces(self, tokenizer: Tokenizer, text: str) -> None:
        """Refuse a text that has more tokens than fit, by the ids of one piece after the other: each has room. Pieces
        end before a space, where hardly anything depends on what follows; what might is not counted.
        """
        start, num_tokens = 0, 0
        while start < len(text):
            piece = text[start : start + _LONGEST_PIECE]
            while start + len(piece) < len(text) or tokenizer.encode_nbytes(piece) > self.text_room_nbytes:
                end = piece.rfind(" ", 1, len(piece) // 2)
                if end < 1:
                    return  # one endless word, or a tokenizer that has no room at all
                piece = piece[:end]
                if tokenizer.encode_nbytes(piece) <= self.text_room_nbytes:
                    break
            num_tokens += max(0, len(tokenizer.encode(piece, add_bos=False)) - _MOST_AT_A_CUT)
            start += len(piece)
            if num_tokens > self.context:
                raise ContextError(
                    f"the prompt has more than {num_tokens:,} tokens and the context holds {self.context:,}",
                    "Shorten the prompt, or ask for a larger context if the model has one.",
                )

    def _can_encode(self, text: str) -> bool:
        """Whether a text can be encoded within the budget before there is an engine."""
        from spile.machine import available_memory_bytes
        from spile.memory import current_memory_bytes

        if self._memory_bytes is None or self.tokenizer is None:
            return False
        left = min(self._memory_bytes - current_memory_bytes(), available_memory_bytes())
        return self.tokenizer.encode_nbytes(text) <= left

    def _make_room(self, tokenizer: Tokenizer, text: str) -> None:
        """Borrow the pool's memory, under a budget, for the tokenizer that is about to be loaded."""
        if self._engine is not None and not tokenizer.keep and not tokenizer.is_loaded:
            self._engine.lend(tokenizer.encode_nbytes(text))

    def _make_room_to_learn(self, tokenizer: Tokenizer) -> None:
        """Borrow it where the tokenizer's entries were not read yet."""
        if not tokenizer.is_learned:
            self._make_room(tokenizer, "")

    def _opened_table(self) -> GrammarTable:
        from spile.generation.grammar import GrammarTable

        self._check_open()
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise TextError("a grammar is about text, and this model has no tokenizer")
        with self._grammar_lock:
            if self._grammar_table is None:
                if tokenizer.is_learned:
                    GrammarTable.check(tokenizer)
                if self.has_budget:  # the pool makes room, for which nobody may compute
                    with self._alone():
                        self._make_room_to_learn(tokenizer)
                        GrammarTable.check(tokenizer)
                        self._set_aside(GrammarTable.nbytes(tokenizer.num_entries))
                self._grammar_table = GrammarTable(tokenizer, self.vocab_size)
            return self._grammar_table

    def _set_aside(self, nbytes: int) -> None:
        """Take bytes out of the pool for good, under a budget. What comes before the engine is in its plan."""
        if self._engine is None or self._memory_bytes is None:
            return
        try:
            self._engine.hold("the table of tokens that a grammar needs", nbytes)
        except BudgetError as error:
            raise BudgetError(
                error.message,
                "Load the model with a larger budget, or call prepare_grammars() before its first answer.",
            ) from error

    def _while_open(self, chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
        try:
            while True:
                with self._alone():
                    self._check_open()
                    try:
                        chunk = next(chunks)
                    except StopIteration:
                        return
                yield chunk
        finally:
            with (
                self._lock
            ):  # wherever it is dropped: a state is not given back while another thread computes
                chunks.close()

    def _while_wanted(self, on_prefill: OnPrefill | None) -> OnPrefill:
        """End a prompt that is being read when another thread closes the model."""

        def note(done: int, total: int) -> None:
            self._check_open()
            if on_prefill is not None:
                on_prefill(done, total)

        return note

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep a second thread out while this one computes.

        Raises: SpileError for the second one.
        """
        if not self._lock.acquire(blocking=False):
            raise SpileError(
                "this model is computing for another thread",
                "Use one model from one thread at a time, or load it once a thread.",
            )
        try:
            yield
        finally:
            self._lock.release()

    def _checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        try:
            given = list(token_ids)
        except TypeError:
            raise OptionError(f"token_ids is {quote(token_ids)}: it must be a list of token ids") from None
        for token_id in given:
            if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                raise OptionError(f"token id {quote(token_id)} is no whole number")
            if not 0 <= token_id < self.vocab_size:
                last = self.vocab_size - 1
                raise OptionError(f"token id {token_id} is none of the model's: they go from 0 to {last:,}")
        return [int(token_id) for token_id in given]

    def _configured_eos_ids(self) -> frozenset[int]:
        return eos_ids_of(self._config) | eos_ids_of(self._sidecar.generation_config)

    def _opened(self) -> Engine:
        self._check_open()
        if self._engine is None:
            with self._alone():
                self._check_open()
                self._engine = self._open_engine()
                if self._prompts.cache is not None:
                    self._prompts.cache.hold = partial(self._engine.hold, "prompts")
            for note in self._engine.notes:
                self._on_note(note)
        return self._engine

    def _check_open(self) -> None:
        if self._closed:
            raise SpileError("this model was closed")


def warn_of(note: str) -> None:
    warnings.warn(clean(note), stacklevel=3)
