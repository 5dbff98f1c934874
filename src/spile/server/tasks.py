"""What the model thread and the event loop know of one request, and what the one tells the other.

It does not know how either works. The loop makes a `Task` and reads its events; the thread answers its choices.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from spile.engines.base import Counters
from spile.generation.generate import Chunk, Stats
from spile.server.errors import Failure
from spile.server.protocol import Request

MOST_UNREAD = 256  # events of a task: a client that reads more slowly than the model writes holds it back


@dataclass
class Figures:
    """What the steps of one answer took, and nothing of the others' in between. `compute_seconds` is the time of its
    steps less what they waited for reads.
    """

    bytes_read: int = 0
    hits: int = 0
    misses: int = 0
    stall_seconds: float = 0.0
    compute_seconds: float = 0.0

    def add(self, before: Counters, after: Counters, seconds: float) -> None:
        """Count one step."""
        stall = after.stall_seconds - before.stall_seconds
        self.bytes_read += after.bytes_read - before.bytes_read
        self.hits += after.hits - before.hits
        self.misses += after.misses - before.misses
        self.stall_seconds += stall
        self.compute_seconds += max(0.0, seconds - stall)

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.bytes_read + other.bytes_read,
            self.hits + other.hits,
            self.misses + other.misses,
            self.stall_seconds + other.stall_seconds,
            self.compute_seconds + other.compute_seconds,
        )

    @property
    def hit_rate(self) -> float | None:
        """The part of the wanted experts that were resident; None where none was wanted."""
        wanted = self.hits + self.misses
        return self.hits / wanted if wanted else None


@dataclass(frozen=True)
class Prepared:
    """The request is in order: nothing but a failure keeps it from being answered."""


@dataclass(frozen=True)
class Said:
    """A choice went on by a token; or it ended, and the chunk has its statistics."""

    index: int
    chunk: Chunk
    entries: Mapping[int, bytes] = field(default_factory=dict)  # of the tokens in the chunk's logprob


@dataclass(frozen=True)
class Failed:
    """The request ends here."""

    failure: Failure


@dataclass(frozen=True)
class Done:
    """All choices have ended."""


Event = Prepared | Said | Failed | Done


@dataclass(eq=False)
class Choice:
    """One answer of a request. `stream` is the model's; `prompt_done` of `prompt_tokens` were read."""

    task: Task
    index: int
    prompt_tokens: int
    stream: Generator[Chunk, None, None]
    prompt_ids: tuple[int, ...] = ()  # where they were asked for
    figures: Figures = field(default_factory=Figures)
    prompt_done: int = 0
    completion_tokens: int = 0
    began: float | None = None  # time.perf_counter() of the first step, and of the first and the last token
    first: float | None = None
    last: float | None = None  # of the last token
    logged: float = 0.0
    stats: Stats | None = None
    finish_reason: str | None = None

    @property
    def is_prompt(self) -> bool:
        """Whether the next step reads a piece of the prompt."""
        return self.first is None and self.stats is None

    @contextmanager
    def measured(self, counters: Callable[[], Counters], tell: Callable[[Figures], None]) -> Iterator[None]:
        """Count what the engine does inside for this answer, and tell what this step took, however it ends."""
        before, started, step = counters(), time.perf_counter(), Figures()
        try:
            yield
        finally:
            step.add(before, counters(), time.perf_counter() - started)
            self.figures += step
            tell(step)


@dataclass(eq=False)
class Task:
    """One request. The thread calls `send`; the loop sets `is_cancelled` when nobody wants the answer any more."""

    request: Request
    send: Callable[[Event], None]
    nbytes: int = 0  # of its body
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    created: float = field(default_factory=time.perf_counter)
    choices: list[Choice] = field(default_factory=list)
    unkept: tuple[str, ...] = ()  # what was asked of the answers' form and is not kept to
    is_cancelled: bool = False
    is_over: bool = False
    failure: Failure | None = None  # that ended it
    _then: list[Callable[[], None]] = field(default_factory=list)  # once no more work is done on it
    _num_unread: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, event: Event) -> None:
        """Send an event to whoever reads this task's."""
        if isinstance(event, Failed):
            self.failure = event.failure
        with self._lock:
            self._num_unread += 1
        self.send(event)

    def end(self) -> bool:
        """Take note that no more work is done on it; say whether that is news."""
        with self._lock:
            is_news, self.is_over = not self.is_over, True
            then, self._then = self._then, []
        for each in then:
            each()
        return is_news

    def when_over(self, then: Callable[[], None]) -> None:
        """Do something once no more work is done on it: at once, or on the thread that ends it."""
        with self._lock:
            if not self.is_over:
                self._then.append(then)
                return
        then()

    def note_read(self) -> None:
        """Take note that an event was handed on to the client."""
        with self._lock:
            self._num_unread -= 1

    @property
    def is_held_back(self) -> bool:
        """Whether its client reads too slowly for more."""
        return self._num_unread > MOST_UNREAD

    @property
    def is_answered(self) -> bool:
        """Whether all its answers have ended as answers do."""
        return bool(self.choices) and all(choice.stats is not None for choice in self.choices)

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.perf_counter() - self.created

    def figures(self) -> Figures:
        """Return what all choices took together."""
        return sum((choice.figures for choice in self.choices), Figures())

    def as_dict(self) -> dict[str, Any]:
        """Return what /status says of it."""
        tokens = sum(choice.completion_tokens for choice in self.choices)
        times = [
            (one.first, one.last) for one in self.choices if one.first is not None and one.last is not None
        ]
        seconds = max(last for _, last in times) - min(first for first, _ in times) if times else 0.0
        phase = "answer" if times else "prompt" if any(c.began for c in self.choices) else "waiting"
        return {
            "id": self.id,
            "phase": phase,
            "prompt_done": sum(choice.prompt_done for choice in self.choices),
            "prompt_tokens": sum(choice.prompt_tokens for choice in self.choices),
            "completion_tokens": tokens,
            "tokens_per_second": (tokens - len(times)) / seconds if seconds > 0 else None,
        }
