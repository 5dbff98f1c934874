"""Turns progress and statistics into lines for a person, on standard error; text into safe text on standard
output.

It does not know models or commands. Plain writes and a few escape codes, on purpose: a library for this takes
more memory than it is worth inside a budget that counts every page of the process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, TextIO

from spile.errors import WriteError, clean
from spile.memory import current_memory_bytes
from spile.sizes import format_size

if TYPE_CHECKING:
    from spile.engines.base import Counters
    from spile.generation.generate import Chunk, Stats
    from spile.model import Model

_ERASE_LINE = "\r\x1b[K"
_DIM = "\x1b[2m"
_PLAIN = "\x1b[0m"
_FEWEST_ROWS = 4  # of a screen that can spare one
_SECONDS_BETWEEN = 0.1  # of two updates of the live line
_TAB = 8  # columns between two stops
_FEWEST_COLUMNS = 20  # of a screen that words are kept whole on
# What a model writes must not drive the terminal: control characters but tab and newline are shown as '?'.
_CONTROLS = {code: "?" for code in [*range(32), *range(127, 160)] if code not in (9, 10)}


class StdoutClosedError(Exception):
    """Whoever read standard output has closed it, as `| head` does. No failure of ours."""


class Cursor:
    """The column that text has brought the cursor to, since the last new line."""

    def __init__(self) -> None:
        self.column = 0  # as many as the screen has: in the last one, and the next character goes below

    def advance(self, text: str, columns: int) -> None:
        """Follow a text, without control sequences, that is written to a screen of so many columns."""
        for character in text:
            if character == "\n":
                self.column = 0
            elif character == "\t":
                stop = (self.column // _TAB + 1) * _TAB
                self.column = max(self.column, min(stop, columns - 1))
            elif width := _width(character):
                self.column = self.column + width if self.column + width <= columns else width

    def is_at_margin(self, columns: int) -> bool:
        """Whether the last column was written. Saving the cursor may lose that, and then the next character
        takes the place of the last one (in tmux and screen).
        """
        return self.column >= columns


_cursor = Cursor()  # of the one screen that a process has


class WordWrap:
    """Breaks lines between words at a screen's edge, while the words come in pieces: one that does not fit is
    taken back and written on the next line. A word that is wider than the screen is cut, as terminals do.
    """

    def __init__(self) -> None:
        self._word = ""  # the unfinished one, as far as it was written
        self._width = 0  # its columns

    def wrap(self, text: str, column: int, columns: int) -> tuple[str, int]:
        """Return what to send for a text that begins in a column, and the column after it. The last column stays
        empty: in it the cursor's place differs between terminals.
        """
        sent: list[str] = []
        edge = columns - 1
        for character in text:
            if character in " \n\t":
                self._word, self._width = "", 0
                if character == "\n":
                    column = 0
                elif character == "\t":
                    column = min((column // _TAB + 1) * _TAB, edge)
                elif column >= edge:
                    continue  # the line's end is as good as the space
                else:
                    column += 1
                sent.append(character)
                continue
            width = _width(character)
            if column + width > edge:
                if self._width < column:
                    back = f"\x1b[{self._width}D\x1b[K" if self._width else ""
                    sent.append(f"{back}\n{self._word}")
                    column = self._width
                else:
                    sent.append("\n")
                    self._word, self._width, column = "", 0, 0
            sent.append(character)
            column += width
            is_own_word = width == 2  # lines of Chinese or Japanese break anywhere
            self._word = "" if is_own_word else self._word + character
            self._width = 0 if is_own_word else self._width + width
        return "".join(sent), column


class Stdout:
    """Standard output: whole characters at once, whatever its encoding; safe where it is a terminal. With `wraps`
    words are not cut at the edge of a screen that can do it.
    """

    def __init__(self, stream: TextIO | None, *, wraps: bool = False) -> None:
        if stream is None:
            raise WriteError("standard output is closed")
        self.stream = stream
        self.is_terminal = stream.isatty()
        self.is_styled = self.is_terminal and has_styles()
        can_wrap = self.is_terminal and os.environ.get("TERM", "dumb") != "dumb"
        self._wrap = WordWrap() if wraps and can_wrap else None
        self._at_line_start = True

    def write(self, text: str) -> None:
        """Write and flush.

        Raises: StdoutClosedError, or WriteError when the disk is full.
        """
        if not text:
            return
        if self.is_terminal:
            text = text.translate(_CONTROLS)
            columns = _screen(self.stream)[0]
            if self._wrap is None or columns < _FEWEST_COLUMNS:
                _cursor.advance(text, columns)
            else:
                text, _cursor.column = self._wrap.wrap(text, _cursor.column, columns)
        self._at_line_start = text.endswith("\n")
        self._send(text)

    def dim(self, on: bool) -> None:
        """Dim what is written from now on, or no longer; nothing where there are no styles."""
        if self.is_styled:
            self._send(_DIM if on else _PLAIN)

    def _send(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError as error:
            raise StdoutClosedError from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WriteError(f"standard output cannot be written: {reason}") from error

    def end_line(self) -> None:
        """Begin a new line unless one has just begun."""
        if not self._at_line_start:
            self.write("\n")


class AnswerWriter:
    """Writes one answer as it comes: the reasoning dimmed, where it is wanted, then the text.

    Standard output has both only where it is a terminal; in a file or a pipe it has the answer alone, and
    the reasoning goes to standard error.
    """

    def __init__(self, stdout: Stdout, stderr: TextIO, *, shows_reasoning: bool) -> None:
        self._stdout = stdout
        self._reasoning = stdout if stdout.is_terminal else Stdout(stderr)
        self._shows_reasoning = shows_reasoning
        self._is_reasoning = False

    def write(self, chunk: Chunk) -> None:
        """Write what a chunk brings.

        Raises: StdoutClosedError, WriteError.
        """
        if chunk.reasoning and self._shows_reasoning:
            with self._forgiving():
                self._begin()
                self._reasoning.write(chunk.reasoning)
        if chunk.text:
            self._end()
            self._stdout.write(chunk.text)

    def close(self) -> None:
        """Leave no style behind. The last line is not ended, unless it is one of reasoning."""
        if self._is_reasoning:
            self._is_reasoning = False
            with self._forgiving():
                self._reasoning.dim(False)
                self._reasoning.end_line()

    def _forgiving(self) -> AbstractContextManager[None]:
        """A standard error that nobody reads is no reason to stop."""
        aside = self._reasoning is not self._stdout
        return suppress(StdoutClosedError, WriteError) if aside else nullcontext()

    def _begin(self) -> None:
        if self._is_reasoning:
            return
        self._is_reasoning = True
        if self._reasoning.is_styled:
            self._reasoning.dim(True)
        else:
            self._reasoning.write("[thinking]\n")

    def _end(self) -> None:
        """Part the answer from the reasoning."""
        if self._is_reasoning:
            self.close()
            if self._reasoning is self._stdout:
                self._reasoning.write("\n" if self._reasoning.is_styled else "[answer]\n")


class LiveLine:
    """One line on standard error that is written over again and again. Does nothing where that is no
    terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.is_enabled = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._shown_at = float("-inf")
        self._is_shown = False

    def show(self, make_text: Callable[[], str], *, at_once: bool = False) -> None:
        """Show a text, which is only made when the last one is old enough."""
        now = time.monotonic()
        if not self.is_enabled or (now - self._shown_at < _SECONDS_BETWEEN and not at_once):
            return
        self._shown_at = now
        self._is_shown = True
        self._write(self._place(make_text()))

    def clear(self) -> None:
        """Take the line away."""
        if self._is_shown:
            self._is_shown = False
            self._shown_at = float("-inf")
            self._write(_ERASE_LINE)

    def _place(self, text: str) -> str:
        return f"{_ERASE_LINE}{text[: _screen(self.stream)[0] - 1]}"

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # a terminal that went away is no reason to stop
            self.is_enabled = False


class BottomLine(LiveLine):
    """A live line in the last row, for when the answer appears on the same screen.

    While it is shown, the terminal scrolls only the rows above it (DECSTBM, as apt and others do); they go to
    the scrollback as ever. A screen of few rows, or one that is no terminal, has no such line. While the
    cursor is at the right margin nothing is shown, as that would lose a character of the answer.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._rows = 0  # of the screen, as far as the line is shown

    def show(self, make_text: Callable[[], str], *, at_once: bool = False) -> None:
        if not _cursor.is_at_margin(_screen(self.stream)[0]):
            super().show(make_text, at_once=at_once)

    def clear(self) -> None:
        """Take the line away and let all rows scroll again."""
        if self._is_shown:
            self._is_shown = False
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[K\x1b8")
            self._rows = 0

    def _place(self, text: str) -> str:
        columns, rows = _screen(self.stream)
        if rows < _FEWEST_ROWS:
            return ""
        begin = ""
        if rows != self._rows:  # at first, and when the terminal was resized
            # A new line and one up again: the cursor may have been in the last row.
            begin = f"\x1bD\x1b[A\x1b7\x1b[1;{rows - 1}r\x1b8"
            self._rows = rows
        return f"{begin}\x1b7\x1b[{rows};1H\x1b[K{text[: columns - 1]}\x1b8"


class Progress:
    """The live line of one answer: the prompt's part that is read, then speed, memory and hits.

    With `shares_screen` the answer's text appears on the same screen: the line then moves to the last row.
    """

    def __init__(
        self, stream: TextIO, counters: Callable[[], Counters | None], *, shares_screen: bool
    ) -> None:
        self.context: tuple[int, int] | None = None  # tokens before the answer, and the most there can be
        self._line = LiveLine(stream)
        self._answer_line = BottomLine(stream) if shares_screen else self._line
        self._counters = counters
        self._before = counters()
        self._started = self._first = time.monotonic()
        self._num_tokens = 0
        self._is_thinking = False

    def load(self) -> None:
        """Say that the model is being loaded."""
        self._line.show(lambda: "loading the model", at_once=True)

    def start(self) -> None:
        """Take away what is shown; the prompt is read from now on."""
        self._line.clear()
        self._started = time.monotonic()

    def prefill(self, done: int, total: int) -> None:
        """Say that so many tokens of the prompt were read."""
        self._line.show(lambda: prefill_text(done, total, time.monotonic() - self._started))

    def token(self, chunk: Chunk) -> None:
        """Say that a token of the answer, or of the reasoning before it, came."""
        self._is_thinking = (self._is_thinking or bool(chunk.reasoning)) and not chunk.text
        if self._num_tokens == 0:
            self._first = time.monotonic()
            self._line.clear()
        self._num_tokens += 1
        word = "thinking: " if self._is_thinking else ""
        self._answer_line.show(lambda: word + self.text())

    def close(self) -> None:
        """Take the line away."""
        self._line.clear()
        self._answer_line.clear()

    def text(self) -> str:
        """Return what the line says of the answer so far."""
        after, before = self._counters(), self._before
        hits = after.hits - (before.hits if before else 0) if after else 0
        wanted = hits + (after.misses - (before.misses if before else 0) if after else 0)
        seconds = time.monotonic() - self._first
        context = None if self.context is None else (self.context[0] + self._num_tokens, self.context[1])
        rate = hits / wanted if wanted else None
        return generation_text(self._num_tokens, seconds, current_memory_bytes(), rate, context)


def prefill_text(done: int, total: int, seconds: float) -> str:
    """Return the live line of a prompt that is being read."""
    rate = f", {done / seconds:,.1f} tok/s" if done and seconds > 0 else ""
    return f"reading the prompt: {100 * done // max(total, 1)} % of {total:,} tokens{rate}"


def generation_text(
    num_tokens: int,
    seconds: float,
    memory_bytes: int,
    hit_rate: float | None,
    context: tuple[int, int] | None = None,
) -> str:
    """Return the live line of an answer in the making; `seconds` since its first token; of the context, how
    many tokens are used of how many.
    """
    rate = f"{(num_tokens - 1) / seconds:,.1f} tok/s, " if num_tokens > 1 and seconds > 0 else ""
    hits = "" if hit_rate is None else f", {100 * hit_rate:.1f} % hits"
    used = "" if context is None else f", context {context[0]:,} of {context[1]:,}"
    return f"{num_tokens:,} tokens, {rate}memory {format_size(memory_bytes)}{hits}{used}"


def bytes_text(what: str, done: int, total: int) -> str:
    """Return the live line of work that is counted in bytes."""
    return f"{what}: {100 * done // max(total, 1)} % of {format_size(total)}"


def summary_lines(stats: Stats) -> list[str]:
    """Return the closing summary of one answer."""
    rate = stats.hit_rate
    hits = "no expert wanted" if rate is None else f"{100 * rate:.1f} % hits"
    if rate is not None:
        hits += f" ({stats.expert_hits:,} of {stats.expert_hits + stats.expert_misses:,})"
    lines = [
        f"Prompt: {stats.prompt_tokens:,} tokens, {_rate(stats.prompt_tokens_per_second)}",
        f"Generation: {stats.completion_tokens:,} tokens, {_rate(stats.tokens_per_second)}",
        f"Peak memory: {format_size(stats.peak_memory_bytes)}",
        f"Experts: {format_size(stats.bytes_read)} read, {hits}",
    ]
    if not stats.exact:
        lines.append("Approximate: this answer is not that of the whole model")
    return lines


def unanswered_note(stats: Stats, context: int) -> str:
    """Return the sentence for an answer that ended inside of its reasoning."""
    if stats.prompt_tokens + stats.completion_tokens >= context:
        where = f"the context of {context:,} tokens was full"
    else:
        where = f"the limit of {stats.completion_tokens:,} tokens fell"
    return f"{where} inside of the reasoning, before any answer; --think off asks for none"


def note(text: str, *, word: str = "note: ") -> None:
    """Write a line to standard error, below an answer's unfinished one; where that is closed, to nobody. Foreign text
    in it does not drive the terminal.
    """
    text = "\n".join(map(clean, text.split("\n")))
    with suppress(OSError):
        begins = "\n" if _cursor.column and sys.stderr.isatty() else ""
        print(f"{begins}{word}{text}", file=sys.stderr, flush=True)
        if begins:
            _cursor.column = 0


def note_model(model: Model) -> None:
    """Say which model answers, and what its engine does with memory."""
    from spile.files.hub import DEMO_FOLDER

    is_demo = model.folder == DEMO_FOLDER
    name = (
        "the demo, a toy of 7 MB that tells children's stories; -m names another" if is_demo else model.folder
    )
    note(f"{name or 'unnamed'}\n{model.summary or ''}".rstrip(), word="model: ")


def fitting(text: str) -> str:
    """Return as much of a line as fits one row of the screen."""
    return text[: _screen(sys.stderr)[0] - 1]


def has_styles() -> bool:
    """Whether terminals may be sent styles: not dumb ones, and not where NO_COLOR is set (no-color.org)."""
    return os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")


def prepare_streams() -> None:
    """Let no character that an encoding lacks end the program: it is shown as '?'. Messages for a standard
    error that was closed before the start go nowhere, instead of into the next file that is opened.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (as long as the process)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _rate(tokens_per_second: float | None) -> str:
    return "- tok/s" if tokens_per_second is None else f"{tokens_per_second:,.1f} tok/s"


def _width(character: str) -> int:
    """Return the columns that a character takes."""
    if character.isascii():
        return 1
    import unicodedata

    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def _screen(stream: TextIO) -> tuple[int, int]:
    """Return columns and rows."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns, rows = 0, 0
    return columns or 80, rows or 24  # some terminals say 0
