"""Turns messages that a person types into a conversation on the terminal: answers, commands, interruptions.

It does not know how a model answers or how lines are edited. Answers go to standard output, all else to
standard error, so that a pipe holds nothing but answers. The engine's state is held from turn to turn: what
the next prompt has in common with it is not read again.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spile.console.conversation import Conversation
from spile.console.lines import Lines, read_message
from spile.console.terminal import (
    AnswerWriter,
    Progress,
    Stdout,
    StdoutClosedError,
    fitting,
    note,
    note_model,
    summary_lines,
    unanswered_note,
)
from spile.errors import ContextError, OptionError, SpileError, quote
from spile.generation.generate import Chunk, Stats, join
from spile.generation.options import Sampling

if TYPE_CHECKING:
    from spile.model import Model

OVERFLOW = ("stop", "drop-oldest")
THINK = ("show", "hide", "off")
_TEMPLATE_TOKENS = 64  # more than a template adds to one message
_NAMES = {"temp": "temperature"}  # of /set and of Sampling, where they differ
_EXAMPLES = {"seed": "7", "max-tokens": "500", "stop": "###"}  # of values that are mostly none

HELP = """\
/help               this list
/system [TEXT]      show or set the system message; /system "" removes it
/reset              forget the conversation
/undo               take the last turn back
/save FILE          write the conversation
/load FILE          go on from one
/stats              what the last answer took
/set [NAME VALUE]   show or change temp, top-p, seed, max-tokens, think, overflow, ...
                    (/set NAME default gives a number or stop its default back)
/exit               leave; so do /quit, /bye and Ctrl-D
Ctrl-C stops an answer. A line that ends in \\ goes on; \"\"\" begins and ends a block."""


@dataclass(frozen=True)
class ChatOptions:
    """What a conversation begins with, and what `/set` changes. Checked when made.

    Raises: OptionError.
    """

    sampling: Sampling
    arguments: dict[str, Any]
    think: str = "show"
    overflow: str = "stop"

    def __post_init__(self) -> None:
        for name, value, choices in (("think", self.think, THINK), ("overflow", self.overflow, OVERFLOW)):
            if value not in choices:
                raise OptionError(f"{name} is {value!r}: it must be one of {', '.join(choices)}")


class _Stopped(Exception):
    """Ctrl-C while an answer was in the making."""


class Chat:
    """One conversation with one model."""

    def __init__(
        self, model: Model, options: ChatOptions, lines: Lines, *, system: str | None, is_interactive: bool
    ) -> None:
        self._model = model
        self._options = options
        self._lines = lines
        self._is_interactive = is_interactive
        self._stdout = Stdout(sys.stdout, wraps=True)
        self._conversation = Conversation(system)
        self._held = model.hold()
        self._stats: Stats | None = None  # of the last answer; None where it was stopped, too
        self._is_stopped = False
        self._is_open = True
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: _say(HELP),
            "/system": self._set_system,
            "/reset": lambda _: self._reset(),
            "/undo": lambda _: self._undo(),
            "/save": self._save,
            "/load": self._load,
            "/stats": lambda _: self._show_stats(),
            "/set": self._set,
            **dict.fromkeys(("/exit", "/quit", "/bye"), lambda _: self._leave()),
        }

    def run(self) -> None:
        """Talk until the person leaves.

        Raises: in a pipe, the first SpileError; on a terminal it is shown and the conversation goes on.
        """
        self._open_model()
        if self._is_interactive:
            _say("/help lists the commands; Ctrl-D leaves.")
        while self._is_open:
            try:
                message = read_message(self._lines)
                if message.strip():
                    self._take(message)
            except EOFError:
                if self._is_interactive:
                    _say("")
                return
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                _say("\n(Ctrl-D or /exit leaves)")
            except SpileError as error:
                if not self._is_interactive:
                    raise
                note(str(error), word="error: ")
                if error.hint:
                    note(error.hint, word="hint: ")

    def _open_model(self) -> None:
        """Open the engine, so that what keeps the model from answering is said before a person types."""
        progress = Progress(sys.stderr, self._model.counters, shares_screen=False)
        progress.load()
        try:
            self._model.open()
        finally:
            progress.close()
        note_model(self._model)

    def _take(self, message: str) -> None:
        """Follow a command, or answer a message."""
        word, _, rest = message.partition(" ")
        if not (message.startswith("/") and word[1:].isalpha()):
            self._answer(message)
        elif word in self._commands:
            self._follow(word, rest.strip())
        else:
            raise OptionError(f"there is no command {word}", "/help lists them; a space before it sends it.")

    def _follow(self, word: str, rest: str) -> None:
        """Follow a command; whatever goes wrong in it, a person's conversation is not lost."""
        try:
            self._commands[word](rest)
        except (SpileError, StdoutClosedError):
            raise
        except Exception as error:
            if not self._is_interactive:
                raise
            what = " ".join(str(error).split())
            raise SpileError(f"{word} failed: unexpected {type(error).__name__}: {what}") from error

    def _answer(self, message: str) -> None:
        """Answer a message; one that could not be answered is taken back."""
        self._conversation.ask(message)
        text: str | None = None
        chunks: list[Chunk] = []
        try:
            if self._options.overflow == "drop-oldest":
                self._make_room(message)
            text = self._stream(chunks)
        except KeyboardInterrupt:  # before the first token: loading, or a second Ctrl-C
            if not self._is_interactive:
                raise
            self._note_stopped()
            text = _text_of(chunks) or None
            _say("\n(stopped)")
        except ContextError as error:
            if self._options.overflow == "drop-oldest" or len(self._conversation.turns) == 1:
                raise  # there is no turn to drop
            raise ContextError(
                error.message, "/reset or /undo makes room, and /set overflow drop-oldest does so by itself."
            ) from error
        finally:
            if text:
                self._conversation.answer(text)
            else:
                self._conversation.undo()
        if text == "":
            _say("(no answer: the message is taken back)")

    def _stream(self, chunks: list[Chunk]) -> str:
        """Write the answer as it comes, and return its text, or what there is of it when it is stopped. What
        came is in `chunks` even where this ends with an exception.
        """
        model, options, stdout = self._model, self._options, self._stdout
        writer = AnswerWriter(stdout, sys.stderr, shows_reasoning=options.think == "show")
        progress = Progress(sys.stderr, model.counters, shares_screen=stdout.is_terminal)
        try:
            with _stop_asked() as is_stop_asked:

                def check_stop() -> None:
                    if is_stop_asked():
                        raise KeyboardInterrupt if not self._is_interactive else _Stopped

                def prefill(done: int, total: int) -> None:
                    check_stop()
                    progress.prefill(done, total)

                stream = model.stream(
                    self._conversation.messages,
                    think=options.think != "off",
                    template_arguments=options.arguments,
                    held=self._held,
                    on_prefill=prefill,
                    **_changes(options.sampling),
                )
                progress.start()
                with closing(stream):
                    for chunk in stream:
                        chunks.append(chunk)
                        progress.context = (self._held.num_prompt, model.context)
                        if chunk.token_id is not None:
                            progress.token(chunk)
                        writer.write(chunk)
                        if chunk.finish_reason is None:
                            check_stop()
        except _Stopped:
            status = None
        else:
            status = progress.text()
        finally:
            progress.close()
            writer.close()
            stdout.end_line()
        if status is None:
            self._note_stopped()
            _say("(stopped)")
            return _text_of(chunks)
        return self._finish(chunks, status)

    def _note_stopped(self) -> None:
        self._stats, self._is_stopped = None, True

    def _finish(self, chunks: list[Chunk], status: str) -> str:
        """Say what is to be said of a whole answer, and return its text."""
        completion = join(chunks)
        stats = self._stats = completion.stats
        context = self._model.context
        if sys.stderr.isatty():
            _say(fitting(f"[{status}]"))
        if completion.finish_reason == "length":
            if completion.reasoning and not completion.text:
                note(unanswered_note(stats, context))
            elif stats.prompt_tokens + stats.completion_tokens >= context:
                then = (
                    "the oldest turns are dropped with the next message"
                    if self._options.overflow == "drop-oldest"
                    else "/reset or /undo makes room, and so does /set overflow drop-oldest"
                )
                note(f"the context of {context:,} tokens is full and the answer ends here; {then}")
        return completion.text

    def _make_room(self, message: str) -> None:
        """Drop the oldest turns when a prompt and its answer may not fit: until half of the context is free,
        so that the rest, which must be read again, is read again rarely.
        """
        model, conversation = self._model, self._conversation
        context = model.context
        wanted = min(self._options.sampling.max_tokens or context // 4, context // 2)
        most = len(self._held.token_ids) + len(message.encode()) + _TEMPLATE_TOKENS
        if len(conversation.turns) < 2 or (self._held.token_ids and most + wanted <= context):
            return
        if self._num_tokens() + wanted <= context:
            return
        num_dropped = 0
        while self._num_tokens() > context // 2 and conversation.drop_oldest():
            num_dropped += 1
        if num_dropped:
            turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
            note(f"the context of {context:,} tokens is nearly full: the oldest {turns} dropped")

    def _num_tokens(self) -> int:
        options = self._options
        return len(
            self._model.encode(
                self._conversation.messages,
                think=options.think != "off",
                template_arguments=options.arguments,
            )
        )

    def _set_system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == '""' else text
        else:
            _say(self._conversation.system or "there is no system message")

    def _reset(self) -> None:
        self._conversation.reset()
        self._held.close()
        _say("the conversation is forgotten")

    def _undo(self) -> None:
        done = self._conversation.undo()
        _say(f"took the last turn back: {len(self._conversation.turns)} left" if done else "nothing to undo")

    def _save(self, name: str) -> None:
        path = _path(name, "/save")
        self._conversation.save(path)
        _say(f"wrote {path}")

    def _load(self, name: str) -> None:
        path = _path(name, "/load")
        self._conversation.load(path)
        _say(f"{path}: {len(self._conversation.turns)} turns")

    def _show_stats(self) -> None:
        if self._stats is None:
            stopped = "the last answer was stopped: only a whole one is measured"
            _say(stopped if self._is_stopped else "nothing was answered yet")
            return
        used, cached = len(self._held.token_ids), self._stats.cached_tokens
        for line in summary_lines(self._stats):
            _say(line)
        _say(f"Context: {used:,} of {self._model.context:,} tokens; {cached:,} of the prompt were held")

    def _set(self, text: str) -> None:
        if not text:
            for name, value in self._settings().items():
                _say(f"{name:20} {'-' if value in (None, ()) else value}")
            return
        name, _, value = text.replace("=", " ", 1).partition(" ")
        name, value = name.replace("_", "-"), value.strip()
        if name not in self._settings():
            raise OptionError(f"there is no setting {name!r}", "/set lists them.")
        if not value:
            raise OptionError(f"{name} needs a value", self._hint(name))
        if name == "think":
            self._options = replace(self._options, think=value)
            return
        if name == "overflow":
            self._options = replace(self._options, overflow=value)
            return
        field = _NAMES.get(name, name.replace("-", "_"))
        default = getattr(self._model.sampling, field)
        if value == "default" or (value.lower() == "none" and default is None):
            found = default
        else:
            found = (value,) if field == "stop" else _number(value)
        self._options = replace(self._options, sampling=replace(self._options.sampling, **{field: found}))

    def _hint(self, name: str) -> str:
        """Say what value a setting may have."""
        choices = {"think": THINK, "overflow": OVERFLOW}.get(name)
        if choices is not None:
            return f"It is one of {', '.join(choices)}."
        example = _EXAMPLES.get(name, self._settings()[name])
        return f"Such as /set {name} {example}; /set {name} default gives the default back."

    def _settings(self) -> dict[str, Any]:
        """Return what `/set` can change, and its values."""
        flags = {field: name for name, field in _NAMES.items()}
        left_out = ("logit_bias", "logprobs", "ignore_eos")
        return {
            flags.get(field.name, field.name.replace("_", "-")): getattr(self._options.sampling, field.name)
            for field in fields(Sampling)
            if field.name not in left_out
        } | {"think": self._options.think, "overflow": self._options.overflow}

    def _leave(self) -> None:
        self._is_open = False


def commands() -> tuple[str, ...]:
    """Return the commands' names."""
    return (*(line.split()[0] for line in HELP.splitlines() if line.startswith("/")), "/quit", "/bye")


@contextmanager
def _stop_asked() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C only be noted, so that an answer stops between two tokens; a second one is
    KeyboardInterrupt, whatever is going on.
    """
    asked = False

    def handle(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _changes(sampling: Sampling) -> dict[str, Any]:
    return {field.name: getattr(sampling, field.name) for field in fields(sampling)}


def _text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def _number(text: str) -> Any:
    """Read a whole number or a broken one; anything else stays text, which the options refuse by name."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _path(name: str, command: str) -> Path:
    if not name:
        raise OptionError(f"{command} needs a file's name")
    try:
        return Path(name).expanduser()
    except (RuntimeError, ValueError):
        raise OptionError(f"{quote(name)} names the home folder of a user who has none here") from None


def _say(text: str) -> None:
    note(text, word="")
