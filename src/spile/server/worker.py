"""Runs a model on a thread of its own: requests in, events out. The only thread that computes with it.

It does not know HTTP. A request is checked and encoded aside (`aside.py`), at once however busy the model is; only a
text that is too long for that under a budget is encoded here, between two steps, as it borrows the pool's memory.
Several answers are worked on in turn (`schedule.py`), each a stream of the model with its own state, one step at a
time: a piece of the prompt, or a token. Whatever a step raises ends its own request and no other; if the thread itself
fails, everybody who waits is told, and everybody who comes.
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
from spile.errors import BudgetError, ReadError, SpileError
from spile.generation.generate import Chunk
from spile.machine import available_memory_bytes
from spile.memory import current_memory_bytes, peak_memory_bytes
from spile.model import AsideError
from spile.server.aside import Aside
from spile.server.choices import entries_of, make_choices
from spile.server.errors import BusyError, Failure, RequestError, UnavailableError, failure_of
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
_RATE_TOKENS = 200  # over which the rate of /status is taken


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
        budget_bytes: int | None = None,
        defaults: Mapping[str, Any] | None = None,
        metrics: Metrics | None = None,
        log: Log | None = None,
        on_ready: Callable[[Model], None] = lambda model: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`load` makes the model ready to run, on the thread; with `budget_bytes` its plan bounds the keys and values
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
        self.answers_nbytes = 0  # that keys and values of all answers take at most, once the model is ready
        self._load = load
        self._parallel = parallel
        self.budget_bytes = budget_bytes
        self._on_ready = on_ready
        self._on_end = on_end
        self._schedule: Schedule[Choice] = Schedule(parallel)
        self._tasks: list[Task] = []  # prepared, and not over
        self._aside = Aside()
        self._inbox: deque[Task | Callable[[], None]] = deque()  # tasks that were prepared
        self._num_accepted = 0  # requests that are not over
        self._num_beside = 0  # calls that are not over
        self._wake = threading.Condition()
        self._is_stopping = False
        self._num_unreadable = 0  # requests in a row that failed as weights could not be read
        self._token_seconds: deque[float] = deque(
            maxlen=_RATE_TOKENS
        )  # that steps took which chose a next token
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
            self._check_room(self._num_accepted)
            self._num_accepted += 1
        self._aside.do(partial(self._prepare, task, aside=True), task.nbytes)

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
        with self._wake:
            self._check_phase()
            self._inbox.append(partial(self._call, future, function))
            self._wake.notify()
        return future

    def beside(self, function: Callable[[Model, bool], T], nbytes: int) -> Future[T]:
        """Do something that computes nothing, for a request of so many bytes: aside, and once more on the model's
        thread if it raises AsideError. The function's second argument says which.

        Raises: UnavailableError, BusyError.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(self._text_model(), True))
            except AsideError:
                self._hand_on(partial(self._call, future, lambda model: function(model, False)))
            except Exception as error:
                future.set_exception(error)

        def note_end(future: Future[T]) -> None:
            with self._wake:
                self._num_beside -= 1

        with self._wake:
            self._check_phase()
            self._check_room(self._num_beside)
            self._num_beside += 1
        future.set_running_or_notify_cancel()
        future.add_done_callback(note_end)
        self._aside.do(run, nbytes)
        return future

    def resize(self, memory: int | str) -> Future[dict[str, Any]]:
        """Keep to another budget from the next step on; what is told is the new plan in words.

        Raises: UnavailableError; in the future, what `Model.resize` raises.
        """

        def resize(model: Model) -> dict[str, Any]:
            try:
                model.resize(memory)
            except BudgetError as error:
                raise RequestError(error.message, param="memory", hint=error.hint) from error
            self.budget_bytes = model.budget_bytes
            self._schedule.room_nbytes = _room_nbytes(self._engine(), has_budget=True)
            return {"budget_bytes": model.budget_bytes, "summary": model.summary}

        return self.call(resize)

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
        recent = list(self._token_seconds)
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
            "budget_bytes": self.budget_bytes,
            "memory_bytes": current_memory_bytes(),
            "peak_memory_bytes": peak_memory_bytes(),
            "resident_expert_bytes": engine.resident_expert_bytes if engine else 0,
            "bytes_read": counters.bytes_read,
            "hits": counters.hits,
            "misses": counters.misses,
            "hit_rate": counters.hits / wanted if wanted else None,
            "tokens_per_second": len(recent) / sum(recent) if sum(recent) > 0 else None,
            "sampling": {name: getattr(sampling, name) for name in names} if sampling else None,
            "requests": [task.as_dict() for task in tasks],
        }

    def _check_room(self, num_requests: int) -> None:
        if num_requests >= self._parallel + self.max_queue:
            seconds = self.metrics.retry_seconds(self._parallel)
            raise BusyError(
                f"{num_requests:,} requests run or wait, as many as the server takes; try again later",
                seconds,
            )

    def _check_phase(self) -> None:
        if self.phase == "loading":
            raise UnavailableError("the model is still loading; try again in a moment", "loading")
        if self.phase == "failed":
            raise UnavailableError("the model has failed; the server's log says why", "failed")
        if self.phase == "stopping" or self._is_stopping:
            raise UnavailableError("the server is ending", "shutting_down")

    # What follows runs aside, or on the thread.

    def _prepare(self, task: Task, *, aside: bool) -> None:
        """Encode and check a request; then its answers wait for their turn."""
        try:
            if not task.is_cancelled:
                make_choices(task, self._text_model(), self.defaults, self._note_prefill, aside=aside)
                task.tell(Prepared())
            self._hand_on(task)
        except AsideError:
            self._hand_on(partial(self._prepare, task, aside=False))
        except Exception as error:
            self._refuse(task, error)

    def _text_model(self) -> Model:
        if self.model is None or self._is_stopping:
            raise self._ending()
        return self.model

    def _hand_on(self, item: Task | Callable[[], None]) -> None:
        """Give the model's thread something to do; where it has ended, end that too."""
        with self._wake:
            is_taken = not self._is_stopping
            if is_taken:
                self._inbox.append(item)
                self._wake.notify()
        if not is_taken:
            self._give_up(item)

    def _give_up(self, item: Task | Callable[[], None]) -> None:
        if isinstance(item, Task):
            self._refuse(item, self._ending())
        else:
            item()  # and it says so

    def _refuse(self, task: Task, error: Exception) -> None:
        """End a request on which no work was done yet."""
        for choice in task.choices:
            choice.stream.close()
        task.choices.clear()
        self._end(task)
        task.tell(Failed(self._told(task, error)))

    def _told(self, task: Task, error: Exception) -> Failure:
        """Return what a client is told of an error; where that is not all there is to it, the log has the rest."""
        failure = failure_of(error)
        if not isinstance(error, SpileError) or error.message not in failure.message:
            self.log.failed(task.id, error)
        return failure

    def _call(self, future: Future[T], function: Callable[[Model], T]) -> None:
        if not future.running() and not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(self._text_model()))
        except Exception as error:
            future.set_exception(error)

    def _ending(self) -> UnavailableError:
        if self.phase == "failed":
            return UnavailableError("the model has failed; the server's log says why", "failed")
        return UnavailableError("the server is ending", "shutting_down")

    # All below runs on the thread.

    def _run(self) -> None:
        try:
            self.model = self._load()
            engine = self.model.open()
            room_nbytes = _room_nbytes(engine, has_budget=self.budget_bytes is not None)
            self.answers_nbytes = min(room_nbytes, self._parallel * engine.kv_nbytes(engine.context))
            self._schedule = Schedule(self._parallel, room_nbytes)
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
            self._aside.stop()
            if self.model is not None:
                with suppress(Exception):
                    self.model.close()
            self._on_end()

    def _work(self) -> bool:
        """Do the next thing, or wait for one; return False at the end."""
        for item in self._take():
            if isinstance(item, Task):
                self._enqueue(item)
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

    def _enqueue(self, task: Task) -> None:
        """Let a request's answers wait for their turn."""
        if task.is_cancelled:
            self._drop(task)
            return
        engine = self._engine()
        self._tasks.append(task)
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
            choice.last = now
            self.metrics.said()
            if not was_prompt:
                self._token_seconds.append(now - started)
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
        if isinstance(error, ReadError):
            self._num_unreadable += 1
        self._drop(task, partial(task.tell, Failed(self._told(task, error))))

    def _drop(self, task: Task, tell: Callable[[], None] = lambda: None) -> None:
        """Forget a request, and give what it holds back."""
        for choice in task.choices:
            self._schedule.remove(choice)
            with suppress(Exception):
                choice.stream.close()
        if task in self._tasks:
            self._tasks.remove(task)
        tell()
        self._end(task)

    def _end(self, task: Task) -> None:
        if task.end():
            with self._wake:
                self._num_accepted -= 1

    def _abandon(self) -> None:
        """Tell everybody who still waits that no answer will come."""
        with self._wake:
            self._is_stopping = True
            items = list(self._inbox)
            self._inbox.clear()
        for item in items:
            self._give_up(item)
        for task in list(self._tasks):
            self._drop(task, partial(task.tell, Failed(failure_of(self._ending()))))


def _is_pause(chunk: Chunk) -> bool:
    return chunk.token_id is None and chunk.finish_reason is None


def _room_nbytes(engine: Engine, *, has_budget: bool) -> int:
    """Return the KV room that all answers have together: what the plan keeps, or without a budget as much of the
    memory that is free now as the rest of the machine can spare.
    """
    planned = engine.kv_room_nbytes
    return planned if has_budget else max(planned, int(available_memory_bytes() * _AVAILABLE_SHARE))
