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
from typing import TYPE_CHECKING, TextIO

from spile.errors import WriteError
from spile.memory import current_memory_bytes
from spile.sizes import format_size

if TYPE_CHECKING:
    from spile.engines.base import Counters
    from spile.generate import Stats

_ERASE_LINE = "\r\x1b[K"
_FEWEST_ROWS = 4  # of a screen that can spare one
_SECONDS_BETWEEN = 0.1  # of two updates of the live line
# What a model writes must not drive the terminal: control characters but tab and newline are shown as '?'.
_CONTROLS = {code: "?" for code in [*range(32), *range(127, 160)] if code not in (9, 10)}


class StdoutClosedError(Exception):
    """Whoever read standard output has closed it, as `| head` does. No failure of ours."""


class Stdout:
    """Standard output: whole characters at once, whatever its encoding; safe where it is a terminal."""

    def __init__(self, stream: TextIO | None) -> None:
        if stream is None:
            raise WriteError("standard output is closed")
        self.stream = stream
        self.is_terminal = stream.isatty()
        self._at_line_start = True

    def write(self, text: str) -> None:
        """Write and flush.

        Raises: StdoutClosedError, or WriteError when the disk is full.
        """
        if not text:
            return
        if self.is_terminal:
            text = text.translate(_CONTROLS)
        self._at_line_start = text.endswith("\n")
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
    the scrollback as ever. A screen of few rows, or one that is no terminal, has no such line.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._rows = 0  # of the screen, as far as the line is shown

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
        self._line = LiveLine(stream)
        self._answer_line = BottomLine(stream) if shares_screen else self._line
        self._counters = counters
        self._started = self._first = time.monotonic()
        self._num_tokens = 0

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

    def token(self) -> None:
        """Say that a token of the answer came."""
        if self._num_tokens == 0:
            self._first = time.monotonic()
            self._line.clear()
        self._num_tokens += 1
        self._answer_line.show(self._generation_text)

    def close(self) -> None:
        """Take the line away."""
        self._line.clear()
        self._answer_line.clear()

    def _generation_text(self) -> str:
        counters = self._counters()
        wanted = counters.hits + counters.misses if counters else 0
        hit_rate = counters.hits / wanted if counters and wanted else None
        seconds = time.monotonic() - self._first
        return generation_text(self._num_tokens, seconds, current_memory_bytes(), hit_rate)


def prefill_text(done: int, total: int, seconds: float) -> str:
    """Return the live line of a prompt that is being read."""
    rate = f", {done / seconds:,.1f} tok/s" if done and seconds > 0 else ""
    return f"reading the prompt: {100 * done // max(total, 1)} % of {total:,} tokens{rate}"


def generation_text(num_tokens: int, seconds: float, memory_bytes: int, hit_rate: float | None) -> str:
    """Return the live line of an answer in the making; `seconds` since its first token."""
    rate = f"{(num_tokens - 1) / seconds:,.1f} tok/s, " if num_tokens > 1 and seconds > 0 else ""
    hits = "" if hit_rate is None else f", {100 * hit_rate:.1f} % hits"
    return f"{num_tokens:,} tokens, {rate}memory {format_size(memory_bytes)}{hits}"


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


def _screen(stream: TextIO) -> tuple[int, int]:
    """Return columns and rows."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns, rows = 0, 0
    return columns or 80, rows or 24  # some terminals say 0
