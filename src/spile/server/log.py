"""Writes what the server does to standard error, a line at a time.

It does not know how anything is done. While a long prompt is read, a line every few seconds; one line at the end of
each request. Nothing that a client wrote is ever shown, and what a template or a file says is made one clean line.
"""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import suppress
from typing import TextIO

from spile.errors import SpileError, clean
from spile.memory import peak_memory_bytes
from spile.server.tasks import Choice, Task
from spile.sizes import format_size

_SECONDS_BETWEEN = 2.0  # of two lines about one prompt


class Log:
    """The server's lines, with the time of day. `stream` None is standard error as it is at the time."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write one line; nobody reading is no reason to stop."""
        with suppress(OSError, ValueError):
            print(f"{time.strftime('%H:%M:%S')} {clean(text)}", file=self._stream or sys.stderr, flush=True)

    def prefill(self, choice: Choice, done: int, total: int) -> None:
        """Say how far a prompt is, if it has been a while."""
        now = time.perf_counter()
        began = choice.began or now
        if now - max(choice.logged, began) < _SECONDS_BETWEEN:
            return
        choice.logged = now
        self.write(
            f"request {choice.task.number}: prompt {100 * done // max(total, 1)} % of {total:,} tokens, "
            f"{done / (now - began):,.1f} tok/s"
        )

    def answered(self, task: Task) -> None:
        """Sum a request up."""
        stats = [choice.stats for choice in task.choices if choice.stats is not None]
        prompt, answer = sum(one.prompt_tokens for one in stats), sum(one.completion_tokens for one in stats)
        cached = sum(one.cached_tokens for one in stats)
        figures, first = task.figures(), stats[0]
        rates = [one.tokens_per_second for one in stats if one.tokens_per_second]
        parts = [
            f"Prompt: {prompt:,} tokens, {_rate(first.prompt_tokens_per_second)}"
            + (f" ({cached:,} cached)" if cached else ""),
            f"Generation: {answer:,} tokens, {_rate(sum(rates) if rates else None)}",
            f"Peak memory: {format_size(peak_memory_bytes())}",
            f"Experts: {format_size(figures.bytes_read)} read"
            + ("" if figures.hit_rate is None else f", {100 * figures.hit_rate:.1f} % hits"),
            "/".join(str(choice.finish_reason) for choice in task.choices),
        ]
        if not first.exact:
            parts.append("approximate")
        self.write(f"request {task.number}: {'; '.join(parts)}")

    def left(self, task: Task) -> None:
        """Say that a client went away."""
        answer = sum(choice.completion_tokens for choice in task.choices)
        self.write(f"request {task.number}: the client left after {answer:,} tokens")

    def failed(self, task: Task, error: BaseException) -> None:
        """Say what went wrong; where it was none of the faults that can be expected, say where."""
        kind = "" if isinstance(error, SpileError) else f"unexpected {type(error).__name__}: "
        self.write(f"request {task.number}: {kind}{error}")
        if not isinstance(error, SpileError):
            traceback.print_exception(error, file=self._stream or sys.stderr)


def _rate(value: float | None) -> str:
    return "rate unknown" if value is None else f"{value:,.1f} tok/s"
