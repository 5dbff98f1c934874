"""Turns a model's name into an object that answers: `spile.load(...)`.

It ties the parts together and does none of their work. What it decides is order. The prompt is encoded before
the engine is opened, so that under a budget the tokenizer and the pool of experts are never in memory
together; later prompts borrow the pool's memory for as long as they are being encoded.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from spile.engines import PROMPT_FOLDER_LIMIT
from spile.errors import (
    BudgetError,
    ContextError,
    OptionError,
    SpileError,
    TextError,
    UnsupportedModelError,
    quote,
)
from spile.generation.generate import Chunk, Completion, Constraint, OnPrefill, check_prompt, generate, join
from spile.generation.held import Held
from spile.generation.options import Sampling, sampling_of
from spile.generation.prompt_reuse import PromptReuse, continued
from spile.sizes import format_size, parse_size
from spile.text.prompts import OnNote, Prompt, PromptText, Rendering, check_ids_rendering, is_ids, prompt_text
from spile.text.reasoning import ReasoningSplitter, can_reason
from spile.text.sidecar import Sidecar, eos_ids_of, read_sidecar, read_text
from spile.text.tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from spile.architectures.foreign import ForeignModel
    from spile.architectures.maple import MapleModel
    from spile.engines import EngineOptions
    from spile.engines.base import Counters, Engine, State
    from spile.generation.grammar import Grammar, GrammarTable

AnyModel: TypeAlias = "MapleModel | ForeignModel"

# Characters that one token may stand for: Qwen2's longest entry is 128 spaces; composition (NFC) makes three
# characters one at most.
_LONGEST_ENTRY = 3 * 128
_LARGEST_CONVERTED_NBYTES = 64_000_000  # a bf16 source this small, once packed, is converted on the fly
_PACKED_PART = 0.3  # of bf16: 4-bit tables with their scales take 0.28, ternary rows 0.13


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as ids. `begins_inside`: whether it ends inside of the answer's reasoning; None where the answer
    has no reasoning to split off. Of use with the model that made it, any number of times.
    """

    token_ids: list[int]
    begins_inside: bool | None = None

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
        self._grammar_nbytes = 0  # that the pool gave up for it
        self._lock = threading.RLock()
        self._on_note = on_note or _warn
        self._prompts = prompts or PromptReuse(str, on_note=self._on_note)
        self._told: set[str] = set()  # notes that need no second time
        self._resources = resources or ExitStack()
        self._closed = False
        # Whose states must go before the engine.
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
        nbytes = parse_size(memory, name="memory") if isinstance(memory, str) else memory
        if isinstance(nbytes, bool) or not isinstance(nbytes, Integral) or nbytes < 1:
            raise OptionError(f"memory is {quote(memory)}: it must be bytes, or a size such as '1GB'")
        self._opened().resize(nbytes - self._grammar_nbytes)
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
        with self._alone(), closing(engine.new_state()) as state:
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
        what `encoded` made is taken as it is.
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
        check_prompt(len(token_ids), self.context, num_answer=1)
        save = None
        if save_prompt is not None:
            about = {"text": text, "raw": raw, "system": system}
            save = self._prompts.saver(save_prompt, token_ids, about)
        if json_schema is not None:
            from spile.generation.grammar import json_grammar

            if constraint is not None:
                raise OptionError("constraint and json_schema both say what the answer may be: give one")
            constraint = self.constraint(json_grammar(json_schema), begins_inside=encoded.begins_inside)
        tokenizer = self.tokenizer
        num_entries, eos_ids, decoder = self.vocab_size, self._configured_eos_ids(), None
        if tokenizer is not None:
            if not tokenizer.is_learned:  # a prompt of ids, before any text
                self._make_room(tokenizer, "")
            num_entries, eos_ids, decoder = tokenizer.num_entries, tokenizer.eos_ids, tokenizer.decoder()
        engine = self._opened()
        check_prompt(len(token_ids), engine.context, num_answer=1)

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
            on_prefill=on_prefill,
            on_prompt=on_prompt,
            requested=requested,
            pauses=pauses,
            constraint=constraint,
        )
        self._streams.add(chunks)
        return self._while_open(chunks)

    def hold(self) -> Held:
        """Make what keeps an engine's state from one answer to the next, for `stream`. The model closes it;
        close it earlier to give its memory back.
        """
        held = Held()
        self._held.add(held)
        return held

    def constraint(self, grammar: Grammar, *, begins_inside: bool | None = None) -> Constraint:
        """Make what keeps one answer to a grammar; `begins_inside` is the encoded prompt's. The first takes the
        memory of a table of all tokens for good: out of the budget, where there is one.

        Raises: OptionError for a grammar that cannot be followed, or without llguidance; TextError without a
        tokenizer of bytes; BudgetError where the pool cannot give up the table's bytes.
        """
        return self._opened_table().constraint(grammar, begins_inside=begins_inside)

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
    ) -> list[int]:
        """Turn a prompt into token ids, as `stream` does."""
        rendering = Rendering(raw, system, think, tools, template_arguments or {})
        return self._encode(prompt, rendering).token_ids

    def encoded(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        tools: Sequence[Any] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> EncodedPrompt:
        """Turn a prompt into what `stream` answers later, once or several times.

        Raises: as `stream`, but for the context.
        """
        return self._encode(prompt, Rendering(raw, None, True, tools, template_arguments or {}))

    def close(self) -> None:
        """Close the engine, files and temporary folders. May be called twice."""
        self._closed = True
        for chunks in list(self._streams):
            chunks.close()
        for held in list(self._held):
            held.close()
        if self._prompts.cache is not None:
            self._prompts.cache.clear()
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                engine.close()
            if self.tokenizer is not None:
                self.tokenizer.close()
        finally:
            self._resources.close()

    def __enter__(self) -> Model:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt, rendering: Rendering) -> EncodedPrompt:
        self._check_open()
        if is_ids(prompt):
            check_ids_rendering(rendering)
            return EncodedPrompt(self._checked_ids(prompt))  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise TextError(
                f"{self.folder or 'this model'} has no tokenizer.json: it gives logits but cannot read text",
                "Put the model's tokenizer.json beside its weights.",
            )
        source = prompt_text(prompt, rendering, self._sidecar, self._tell_once)  # type: ignore[arg-type]
        with self._alone():
            return self._encode_text(self.tokenizer, source)

    def _encode_text(self, tokenizer: Tokenizer, source: PromptText) -> EncodedPrompt:
        self._check_length(source.text)
        self._make_room(tokenizer, source.text)
        token_ids = tokenizer.encode(source.text)
        highest = max(token_ids, default=0)
        if highest >= self.vocab_size:
            raise TextError(
                f"the tokenizer gave token {highest:,} and the model has {self.vocab_size:,} tokens: "
                f"the two do not belong together"
            )
        splitter = source.splitter
        return EncodedPrompt(token_ids, None if splitter is None else splitter.is_thinking)

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
        context = self.context
        least = len(text) // _LONGEST_ENTRY
        if least > 2 * context:
            raise ContextError(
                f"the prompt has {len(text):,} characters, {least:,} tokens at the very least, and the context "
                f"holds {context:,}",
                "Shorten the prompt, or ask for a larger context if the model has one.",
            )

    def _make_room(self, tokenizer: Tokenizer, text: str) -> None:
        """Borrow the pool's memory, under a budget, for the tokenizer that is about to be loaded."""
        if self._engine is not None and not tokenizer.keep and not tokenizer.is_loaded:
            self._engine.lend(tokenizer.encode_nbytes(text))

    def _opened_table(self) -> GrammarTable:
        from spile.generation.grammar import GrammarTable

        self._check_open()
        if self._grammar_table is None:
            if self.tokenizer is None:
                raise TextError("a grammar is about text, and this model has no tokenizer")
            with self._alone():
                if not self.tokenizer.is_learned:
                    self._make_room(self.tokenizer, "")
                self._set_aside(GrammarTable.nbytes(self.tokenizer.num_entries))
                self._grammar_table = GrammarTable(self.tokenizer, self.vocab_size)
        return self._grammar_table

    def _set_aside(self, nbytes: int) -> None:
        """Take bytes out of the pool for good, under a budget. What comes before the engine is in its plan."""
        if self._engine is None or self._memory_bytes is None or self._grammar_nbytes:
            return
        try:
            self._engine.resize(self._memory_bytes - nbytes)
        except BudgetError as error:
            raise BudgetError(
                f"the table of tokens that a grammar needs takes {format_size(nbytes)}: {error.message}",
                "Load the model with a larger budget, or call prepare_grammars() before its first answer.",
            ) from error
        except OptionError:  # everything is mapped: the files' pages make room
            return
        self._grammar_nbytes = nbytes

    def _while_open(self, chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
        with closing(chunks):
            while True:
                self._check_open()
                with self._alone():
                    try:
                        chunk = next(chunks)
                    except StopIteration:
                        return
                yield chunk

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
                self._engine = self._open_engine()
            for note in self._engine.notes:
                self._on_note(note)
        return self._engine

    def _check_open(self) -> None:
        if self._closed:
            raise SpileError("this model was closed")


def load(
    source: str | Path | None = None,
    *,
    memory: int | str | None = None,
    threads: int | None = None,
    engine: str = "auto",
    io: str = "auto",
    kv_bits: int = 16,
    kv_v_bits: int | None = None,
    context: int | None = None,
    prefill_chunk: int | None = None,
    activation_bytes: int = 2,
    flash_moe: bool = False,
    active_experts: int | None = None,
    shared_experts: int = 0,
    reselect_every: int = 1,
    flash_head: bool = False,
    sequences: int = 1,
    prompt_cache_bytes: int = 0,
    prompt_cache: str | Path | None = None,
    prompt_cache_limit: int | str = PROMPT_FOLDER_LIMIT,
    chat_template: str | Path | None = None,
    offline: bool = False,
    on_note: OnNote | None = None,
) -> Model:
    """Open a model: a folder, a hub id (downloaded once), or None for the demo model that comes with spile.

    `memory` bounds the resident memory of the whole process (bytes, or a size such as "630MB"); None takes
    what the machine has. `threads` None means the physical cores. `io` is auto, buffered or direct; `kv_bits`
    16 or 32 for keys and values; `activation_bytes` 3 is for comparisons. `chat_template` is a file with a
    Jinja template to use instead of the model's own. `prompt_cache_bytes` of the budget keep what was read of
    earlier prompts, so that one that begins alike is not read again; a folder `prompt_cache` keeps it across runs,
    up to `prompt_cache_limit`. `flash_moe`, `active_experts`, `shared_experts` and `reselect_every` size the pool by
    experts a layer instead of bytes (docs/write-up.md). Headers and configs are read and checked now; weights
    with the first use. Notes, one line each, go to `on_note`, by default to `warnings`.

    Raises:
        ModelError: no such model, damaged or contradictory files, or an architecture that spile does not run.
        OptionError: a parameter out of range.
        TextError: a damaged tokenizer_config.json, or a template file that is missing or damaged.
    """
    from spile.architectures import open_model
    from spile.architectures.maple import Form, MapleModel
    from spile.files.checkpoint import open_checkpoint
    from spile.files.hub import resolve

    for name, value in (("source", source), ("chat_template", chat_template), ("prompt_cache", prompt_cache)):
        if value is not None and not isinstance(value, (str, Path)):
            raise OptionError(f"{name} is {quote(value)}: it must be a text or a Path")
    budget_bytes = parse_size(memory, name="memory") if isinstance(memory, str) else memory
    options = _engine_options(
        memory_bytes=budget_bytes,
        engine=engine,
        threads=threads,
        io=io,
        kv_bits=kv_bits,
        kv_v_bits=kv_v_bits,
        context=context,
        prefill_chunk=prefill_chunk,
        activation_bytes=activation_bytes,
        flash_moe=flash_moe,
        active_experts=active_experts,
        shared_experts=shared_experts,
        reselect_every=reselect_every,
        flash_head=flash_head,
        sequences=sequences,
        prompt_cache_bytes=prompt_cache_bytes,
    )
    tell = on_note or _warn
    with ExitStack() as cleanup:
        folder = resolve(source, offline=offline)
        checkpoint = open_checkpoint(folder)
        opened = open_model(checkpoint)
        options.check_context(opened.config.max_position_embeddings)
        _check_engine(opened, options)
        for note in checkpoint.notes:
            tell(note)
        if isinstance(opened, MapleModel):
            options.check_experts(opened.config.num_experts, opened.config.num_experts_per_tok)
            if opened.form is Form.BF16:
                opened = _convert(opened, cleanup, tell)
        tokenizer = open_tokenizer(folder, config=checkpoint.config, keep=budget_bytes is None)
        sidecar = read_sidecar(folder) if tokenizer is None else tokenizer.sidecar
        if chat_template is not None:
            template = read_text(Path(chat_template).expanduser(), hint="Save the template as UTF-8.")
            if template is None:
                raise TextError(f"there is no chat template {chat_template}")
            sidecar = replace(sidecar, chat_template=template)
        prompts = _prompts(opened, options, prompt_cache, prompt_cache_limit, tell)
        return Model(
            open_engine=lambda: _open_engine(opened, options),
            config=checkpoint.config,
            sidecar=sidecar,
            tokenizer=tokenizer,
            plan_context=lambda: _plan_context(opened, options),
            vocab_size=opened.config.vocab_size,
            folder=folder,
            memory_bytes=budget_bytes,
            prompts=prompts,
            on_note=tell,
            resources=cleanup.pop_all(),
        )


def _engine_options(**values: Any) -> EngineOptions:
    from spile.engines import EngineOptions

    return EngineOptions(**values)


def _prompts(
    opened: AnyModel, options: EngineOptions, folder: str | Path | None, limit: int | str, tell: OnNote
) -> PromptReuse:
    from spile.files.fingerprint import fingerprint

    limit_nbytes = parse_size(limit, name="prompt_cache_limit") if isinstance(limit, str) else limit
    if isinstance(limit_nbytes, bool) or not isinstance(limit_nbytes, Integral) or limit_nbytes < 1:
        raise OptionError(f"prompt_cache_limit is {quote(limit)}: it must be bytes, or a size such as '2GB'")
    every = options.reselect_every
    return PromptReuse(
        lambda: fingerprint(opened.checkpoint),
        budget_nbytes=options.prompt_cache_bytes,
        folder=None if folder is None else Path(folder).expanduser(),
        limit_nbytes=limit_nbytes,
        obstacle=None if every == 1 else f"with reselect_every {every} a token depends on more than its text",
        on_note=tell,
    )


def _check_engine(opened: AnyModel, options: EngineOptions) -> None:
    """Check that there is an engine for a model, before anything is read for it."""
    from spile.engines import choose_engine

    if choose_engine(opened, options) == "mlx":
        from spile.engines.mlx.adapter import require

        require()


def _open_engine(opened: AnyModel, options: EngineOptions) -> Engine:
    from spile.engines import open_engine

    return open_engine(opened, options)


def _plan_context(opened: AnyModel, options: EngineOptions) -> int:
    from spile.architectures.maple import MapleModel
    from spile.engines import choose_engine
    from spile.residency.experts import ExpertTable
    from spile.residency.plan import make_plan

    if choose_engine(opened, options) == "mlx":  # which plans with the model at hand, and checks again
        return options.context or opened.config.max_position_embeddings
    assert isinstance(opened, MapleModel), "the cpu engine was chosen"
    return make_plan(opened, ExpertTable(opened), options).context


def _convert(maple: MapleModel, cleanup: ExitStack, tell: OnNote) -> MapleModel:
    """Convert a small bf16 source into a temporary folder, which goes when `cleanup` closes; refuse a large
    one.
    """
    from spile.architectures.maple import open_maple
    from spile.files.checkpoint import open_checkpoint
    from spile.making.convert import convert_folder

    folder = maple.checkpoint.folder
    packed_nbytes = int(_PACKED_PART * sum(tensor.nbytes for tensor in maple.checkpoint.tensors.values()))
    if packed_nbytes >= _LARGEST_CONVERTED_NBYTES:
        raise UnsupportedModelError(
            f"{folder} holds the bf16 weights of training, and spile runs them packed to 2 bits",
            f"Convert them once: spile convert {folder} NEW_FOLDER",
        )
    size = format_size(packed_nbytes)
    tell(f"{folder} holds bf16 weights: they are packed to 2 bits in a temporary folder ({size})")
    temporary = cleanup.enter_context(TemporaryDirectory(prefix="spile-"))
    packed = Path(temporary) / "model"
    convert_folder(folder, packed)
    return open_maple(open_checkpoint(packed))


def _warn(note: str) -> None:
    warnings.warn(note, stacklevel=3)
