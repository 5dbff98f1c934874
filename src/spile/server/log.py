"""Writes what the server does to standard error, a line at a time, and never more than so much.

It does not know how anything is done. While a long prompt is read, a line every few seconds; one line at the end of
each request. Of a burst of the same kind the first is written and the rest summed up. A line has an end, and so has a
minute's worth of them; that some were left out is a line too. What a client wrote is shown without its control
characters, and never more of it than a path's beginning.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from spile.errors import SpileError
from spile.memory import peak_memory_bytes
from spile.server.tasks import Choice, Task
from spile.sizes import format_size

_SECONDS_BETWEEN = 2.0  # of two lines about one prompt
_LONGEST_LINE = 400  # characters
# A minute's lines: 120 kB at the most, and in a day 170 MB, however many come to be refused.
_MOST_LINES = 300
_MINUTE = 60.0
_BURST_SECONDS = (10, 60, 600)  # a burst is summed up after each, and then at the last again and again
_MOST_KINDS = 64


@dataclass
class _Burst:
    began: float
    stage: int = 0
    count: int = 0  # since the last line about it


class Log:
    """The server's lines, with the time of day. `stream` None is standard error as it is at the time. Any thread may
    write.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._minute = (
            -_MINUTE
        )  # when it began, how many lines it has, and how many it would have had beyond them
        self._num_lines = self._num_left_out = 0
        self._bursts: dict[str, _Burst] = {}
        self._timer: threading.Timer | None = None

    def write(self, text: str) -> None:
        """Write one line; nobody reading is no reason to stop."""
        with self._lock:
            now = time.monotonic()
            if now - self._minute >= _MINUTE:
                left_out, self._minute, self._num_lines, self._num_left_out = self._num_left_out, now, 0, 0
                self._put_left_out(left_out)
            if self._num_lines < _MOST_LINES - 1:
                self._num_lines += 1
                self._put(text)
                return
            self._num_left_out += 1
            if self._num_left_out == 1:
                self._put(f"log: {_MOST_LINES} lines in a minute are the most; the rest of it is left out")

    def note(self, kind: str, text: str) -> None:
        """Write a line of a kind that may come in bursts: the first, and then how many more like it came."""
        with self._lock:
            if kind not in self._bursts and len(self._bursts) >= _MOST_KINDS:
                kind = "of other kinds"
            burst = self._bursts.get(kind)
            if burst is not None:
                burst.count += 1
                return
            self._bursts[kind] = _Burst(time.monotonic())
            self.write(text)
            self._wind()

    def flush(self, *, is_end: bool = False) -> None:
        """Sum up the bursts whose time has come; at the end all of them."""
        with self._lock:
            now = time.monotonic()
            for kind, burst in list(self._bursts.items()):
                seconds = now - burst.began
                if seconds < _BURST_SECONDS[burst.stage] and not is_end:
                    continue
                if burst.count:
                    self.write(f"{kind}: … and {burst.count:,} more like it in {max(seconds, 1):.0f} s")
                if is_end or not burst.count:
                    del self._bursts[kind]
                    continue
                burst.began, burst.count = now, 0
                burst.stage = min(burst.stage + 1, len(_BURST_SECONDS) - 1)
            self._wind()

    def close(self) -> None:
        """Write what was not written yet."""
        with self._lock:
            self.flush(is_end=True)
            self._put_left_out(self._num_left_out)
            self._num_left_out = 0
            if self._timer is not None:
                self._timer.cancel()

    def prefill(self, choice: Choice, done: int, total: int) -> None:
        """Say how far a prompt is, if it has been a while."""
        now = time.perf_counter()
        began = choice.began or now
        if now - max(choice.logged, began) < _SECONDS_BETWEEN:
            return
        choice.logged = now
        self.write(
            f"request {choice.task.id}: prompt {100 * done // max(total, 1)} % of {total:,} tokens, "
            f"{done / (now - began):,.1f} tok/s"
        )

    def failed(self, request_id: str, error: BaseException) -> None:
        """Say what went wrong; where it was none of the faults that can be expected, say where."""
        kind = "" if isinstance(error, SpileError) else f"unexpected {type(error).__name__}: "
        self.write(f"request {request_id}: {kind}{error}")
        if not isinstance(error, SpileError):
            for line in "".join(traceback.format_exception(error)).splitlines():
                self.write(line)

    def _put_left_out(self, count: int) -> None:
        if count:
            self._put(f"log: {count:,} lines were left out; it takes {_MOST_LINES} a minute")

    def _put(self, text: str) -> None:
        line = "".join(letter if letter.isprintable() else "?" for letter in text[: _LONGEST_LINE + 1])
        if len(line) > _LONGEST_LINE:
            line = f"{line[: _LONGEST_LINE - 1]}…"
        with suppress(OSError, ValueError):
            print(f"{time.strftime('%H:%M:%S')} {line}", file=self._stream or sys.stderr, flush=True)

    def _wind(self) -> None:
        """Have the next burst summed up when its time comes, whether or not anything else is written then."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._bursts:
            due = min(burst.began + _BURST_SECONDS[burst.stage] for burst in self._bursts.values())
            self._timer = threading.Timer(max(0.05, due - time.monotonic()), self.flush)
            self._timer.daemon = True
            self._timer.start()


def summary(task: Task) -> str:
    """Sum up a request whose answers have all ended."""
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
    ]
    if task.unkept:
        parts.append(f"not enforced: {', '.join(task.unkept)}")
    if not first.exact:
        parts.append("approximate")
    return "; ".join(parts)


def finish_reason(task: Task) -> str:
    """Return how a request's answers ended, each way once."""
    return "/".join(sorted({str(choice.finish_reason) for choice in task.choices}))


def _rate(value: float | None) -> str:
    return "rate unknown" if value is None else f"{value:,.1f} tok/s"
