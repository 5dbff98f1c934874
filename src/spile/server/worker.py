"""Runs a model on a thread of its own: requests in, events out. The only thread that touches the model.

It does not know HTTP. Several answers are worked on in turn (`schedule.py`), each a stream of the model with its
own state, one step at a time: a piece of the prompt, or a token. Prompts are encoded here too, between two steps,
as encoding borrows the pool's memory. Whatever a step raises ends its own request and no other; if the thread
itself fails, everybody who waits is told, and everybody who comes.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from spile.engines.base import Counters
from spile.errors import ReadError, SpileError
from spile.generation.generate import Chunk
from spile.machine import available_memory_bytes
from spile.memory import current_memory_bytes, peak_memory_bytes
from spile.server.choices import entries_of, make_choices
from spile.server.errors import BusyError, UnavailableError, failure_of
from spile.server.log import Log
from spile.server.metrics import Metrics
from spile.server.schedule import Schedule
from spile.server.tasks import Choice, Done, Failed, Prepared, Said, Task

if TYPE_CHECKING:
    from spile.engines.base import Engine
    from spile.model import Model

Phase = Literal["loading", "ok", "failed", "stopping"]
T = TypeVar("T")
_LONGEST_WAIT = 0.05  # seconds: only while every client reads too slowly is there something to look for again
_AVAILABLE_SHARE = 0.5
_RATE_SECONDS = 5.0  # over which the rate of /status is taken


class _LeftError(Exception):
    """Nobody wants this answer any more; raised in the middle of its prompt."""


class Worker:
    """One model, its thread, and those who wait for it. Methods may be called from any thread."""

    def __init__(
        self,
        load: Callable[[], Model],
        *,
        parallel: int,
        max_queue: int,
        has_budget: bool = False,
        defaults: Mapping[str, Any] | None = None,
        metrics: Metrics | None = None,
        log: Log | None = None,
        on_ready: Callable[[Model], None] = lambda model: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`load` makes the model ready to run, on the thread; with `has_budget` its plan bounds the keys and values
        of all answers; `defaults` are sampling fields for requests that leave them out; `on_ready` is called on
        the thread when requests are answered from then on, `on_end` when it is over, for whatever reason.
        """
        self.phase: Phase = "loading"
        self.error: BaseException | None = None  # why it failed
        self.max_queue = max_queue
        self.defaults = dict(defaults or {})
        self.metrics = metrics or Metrics()
        self.log = log or Log()
        self.model: Model | None = None
        self._load = load
        self._parallel = parallel
        self._has_budget = has_budget
        self._on_ready = on_ready
        self._on_end = on_end
        self._schedule: Schedule[Choice] = Schedule(parallel)
        self._tasks: list[Task] = []  # prepared, and not over
        self._inbox: deque[Task | Callable[[], None]] = deque()
        self._num_accepted = 0  # requests that are not over
        self._wake = threading.Condition()
        self._is_stopping = False
        self._num_unreadable = 0  # requests in a row that failed as weights could not be read
        self._token_times: deque[float] = deque(maxlen=1000)
        self._thread = threading.Thread(target=self._run, name="spile-model", daemon=True)

    def start(self) -> None:
        """Begin to load the model."""
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Take a request. Returns at once; all else comes as events.

        Raises: UnavailableError, BusyError.
        """
        with self._wake:
            self._check_phase()
            most = self._parallel + self.max_queue
            if self._num_accepted >= most:
                seconds = self.metrics.retry_seconds(self._parallel)
                raise BusyError(
                    f"{self._num_accepted:,} requests run or wait, as many as the server takes; try again later",
                    seconds,
                )
            self._num_accepted += 1
            self._inbox.append(task)
            self._wake.notify()

    def cancel(self, task: Task) -> None:
        """End a request whose client has left: within a token, or a layer of its prompt."""
        task.is_cancelled = True
        with self._wake:
            self._wake.notify()

    def call(self, function: Callable[[Model], T]) -> Future[T]:
        """Do something with the model on its thread, between two steps.

        Raises: UnavailableError.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self.model is None or self._is_stopping:
                    raise UnavailableError("the server is ending", "shutting_down")
                future.set_result(function(self.model))
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            self._check_phase()
            self._inbox.append(run)
            self._wake.notify()
        return future

    def stop(self) -> None:
        """End all requests, each with an error, and close the model. Returns at once; may be called twice."""
        with self._wake:
            self._is_stopping = True
            if self.phase in ("loading", "ok"):
                self.phase = "stopping"
            self._wake.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread to end; say whether it did."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def counters(self) -> Counters:
        """What was read and found since the engine was opened."""
        counters = self.model.counters() if self.model is not None and self.phase == "ok" else None
        return counters or Counters()

    @property
    def health(self) -> str:
        """How it is: "ok", or why nothing is answered. Weights that fail one request may be there for the next; where
        they fail two in a row, it is "failing" until one is answered.
        """
        return "failing" if self.phase == "ok" and self._num_unreadable > 1 else self.phase

    @property
    def context(self) -> int | None:
        """The most tokens of a prompt and its answer; None before the model is ready."""
        return self._engine().context if self.phase == "ok" else None

    def status(self) -> dict[str, Any]:
        """Say how things are, for people and pages; a moment's picture."""
        model, counters, tasks = self.model, self.counters(), list(self._tasks)
        engine = self._engine() if self.phase == "ok" else None
        wanted = counters.hits + counters.misses
        now = time.perf_counter()
        recent = [at for at in list(self._token_times) if now - at < _RATE_SECONDS]
        seconds = now - recent[0] if recent else 0.0
        sampling = model.sampling.changed(self.defaults) if model is not None else None
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
        return {
            "status": self.phase,
            "exact": engine.exact if engine else None,
            "summary": engine.summary() if engine else None,
            "context": engine.context if engine else None,
            "can_reason": model.can_reason if model is not None else None,
            "running": len(self._schedule.running),
            "waiting": max(0, self._num_accepted - len({choice.task for choice in self._schedule.running})),
            "memory_bytes": current_memory_bytes(),
            "peak_memory_bytes": peak_memory_bytes(),
            "resident_expert_bytes": engine.resident_expert_bytes if engine else 0,
            "bytes_read": counters.bytes_read,
            "hits": counters.hits,
            "misses": counters.misses,
            "hit_rate": counters.hits / wanted if wanted else None,
            "tokens_per_second": len(recent) / seconds if len(recent) > 1 and seconds > 0 else None,
            "sampling": {name: getattr(sampling, name) for name in names} if sampling else None,
            "requests": [task.as_dict() for task in tasks],
        }

    def _check_phase(self) -> None:
        if self.phase == "loading":
            raise UnavailableError("the model is still loading; try again in a moment", "loading")
        if self.phase == "failed":
            raise UnavailableError("the model has failed; the server's log says why", "failed")
        if self.phase == "stopping" or self._is_stopping:
            raise UnavailableError("the server is ending", "shutting_down")

    # All below runs on the thread.

    def _run(self) -> None:
        try:
            self.model = self._load()
            engine = self.model.open()
            self._schedule = Schedule(self._parallel, _room_nbytes(engine, self._has_budget))
            with self._wake:
                if not self._is_stopping:
                    self.phase = "ok"
            self._on_ready(self.model)
            while self._work():
                pass
        except BaseException as error:
            self.error = error
            self.phase = "failed"
            if not isinstance(error, SpileError):
                traceback.print_exc()
        finally:
            self._abandon()
            if self.model is not None:
                with suppress(Exception):
                    self.model.close()
            self._on_end()

    def _work(self) -> bool:
        """Do the next thing, or wait for one; return False at the end."""
        for item in self._take():
            if isinstance(item, Task):
                self._prepare(item)
            else:
                item()
        if self._is_stopping:
            return False
        for task in [task for task in self._tasks if task.is_cancelled]:
            self._drop(task)
        for choice in self._schedule.admit():
            choice.began = time.perf_counter()
            self.metrics.waited(choice.began - choice.task.created)
        choice = self._schedule.turn(lambda choice: not choice.task.is_held_back)  # type: ignore[assignment]
        if choice is not None:
            self._step(choice)
        return True

    def _take(self) -> list[Task | Callable[[], None]]:
        """Return what has come in; wait for something where there is nothing else to do."""
        with self._wake:
            if not self._has_work():
                held_back = bool(self._schedule.running)
                self._wake.wait(_LONGEST_WAIT if held_back else None)
            items = list(self._inbox)
            self._inbox.clear()
        return items

    def _has_work(self) -> bool:
        """Whether there is anything to do at once."""
        if self._inbox or self._is_stopping or any(task.is_cancelled for task in self._tasks):
            return True
        running = self._schedule.running
        if not running:
            return bool(self._schedule.waiting)
        return not all(choice.task.is_held_back for choice in running)

    def _prepare(self, task: Task) -> None:
        """Encode and check a request, and let its answers wait for their turn."""
        if task.is_cancelled:
            self._end(task)
            return
        assert self.model is not None, "a model that was loaded"
        try:
            make_choices(task, self.model, self.defaults, self._note_prefill)
        except Exception as error:
            self._fail(task, error)
            return
        engine = self._engine()
        self._tasks.append(task)
        task.tell(Prepared())
        for choice in task.choices:
            longest = {**self.defaults, **task.request.sampling}.get("max_tokens")
            longest = engine.context if longest is None else longest
            num_tokens = min(engine.context, choice.prompt_tokens + longest)
            self._schedule.add(choice, engine.kv_nbytes(num_tokens))

    def _step(self, choice: Choice) -> None:
        task, was_prompt = choice.task, choice.is_prompt
        started = time.perf_counter()
        try:
            with choice.measured(self._engine().counters, self.metrics.worked):
                chunk = next(choice.stream)
        except _LeftError:
            if task.is_cancelled:
                self._drop(task)
            return  # at the end, all are told together
        except Exception as error:
            self._fail(task, error)
            return
        now = time.perf_counter()
        self._schedule.note(choice, now - started, is_prompt=was_prompt, is_answering=not _is_pause(chunk))
        if _is_pause(chunk):
            if chunk.prompt_logprobs or chunk.text:
                task.tell(Said(choice.index, chunk, entries_of(chunk, self.model)))
            return
        if choice.first is None:
            choice.first = now
        if chunk.token_id is not None:
            choice.completion_tokens += 1
            self.metrics.said()
            self._token_times.append(now)
        if chunk.finish_reason is None:
            task.tell(Said(choice.index, chunk, entries_of(chunk, self.model)))
            return
        self._schedule.remove(choice)
        choice.stats, choice.finish_reason = chunk.stats, chunk.finish_reason
        choice.stream.close()
        task.tell(Said(choice.index, chunk, entries_of(chunk, self.model)))
        if all(other.stats is not None for other in task.choices):
            self._tasks.remove(task)
            self._num_unreadable = 0
            self.metrics.answered(task)
            self.log.answered(task)
            task.tell(Done())
            self._end(task)

    def _note_prefill(self, choice: Choice, done: int, total: int) -> None:
        if choice.task.is_cancelled or self._is_stopping:
            raise _LeftError
        choice.prompt_done = choice.prompt_tokens - total + done
        self.log.prefill(choice, done, total)

    def _engine(self) -> Engine:
        assert self.model is not None, "a model that was loaded"
        return self.model.open()

    def _fail(self, task: Task, error: Exception) -> None:
        """End a request by an error that is its client's to know, and ours to log."""
        failure = failure_of(error)
        if failure.status >= 500:
            self.log.failed(task, error)
        if isinstance(error, ReadError):
            self._num_unreadable += 1
        self.metrics.failed(task, failure)
        self._drop(task, partial(task.tell, Failed(failure)))

    def _drop(self, task: Task, tell: Callable[[], None] = lambda: None) -> None:
        """Forget a request, and give what it holds back."""
        for choice in task.choices:
            self._schedule.remove(choice)
            with suppress(Exception):
                choice.stream.close()
        if task in self._tasks:
            self._tasks.remove(task)
        if task.is_cancelled and not task.is_over:
            self.metrics.left(task)
            self.log.left(task)
        tell()
        self._end(task)

    def _end(self, task: Task) -> None:
        if not task.is_over:
            task.is_over = True
            with self._wake:
                self._num_accepted -= 1

    def _abandon(self) -> None:
        """Tell everybody who still waits that no answer will come."""
        with self._wake:
            self._is_stopping = True
            items = list(self._inbox)
            self._inbox.clear()
        if self.phase == "failed":
            error = UnavailableError("the model has failed; the server's log says why", "failed")
        else:
            error = UnavailableError("the server is ending", "shutting_down")
        for item in items:
            if isinstance(item, Task):
                self._drop(item, partial(item.tell, Failed(failure_of(error))))
            else:
                item()
        for task in list(self._tasks):
            self._drop(task, partial(task.tell, Failed(failure_of(error))))


def _is_pause(chunk: Chunk) -> bool:
    return chunk.token_id is None and chunk.finish_reason is None


def _room_nbytes(engine: Engine, has_budget: bool) -> int:
    """Return the KV room that all answers have together: what the plan keeps, or without a budget as much of the
    memory that is free now as the rest of the machine can spare.
    """
    planned = engine.kv_room_nbytes
    return planned if has_budget else max(planned, int(available_memory_bytes() * _AVAILABLE_SHARE))
