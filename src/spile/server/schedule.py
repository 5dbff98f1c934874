"""Says which of several answers is worked on next, and which may begin: a queue, room for some, and turns.

It does not know models, threads or time's passing beyond the seconds that it is told. Answers wait in the order
they came, none overtaking another, and begin as soon as there is a place and KV room. Of those that run, some
read their prompt, a chunk a turn, and some choose tokens, one a turn. A chunk takes far longer than a token, so
after each chunk those that choose tokens get as much time as it took, and a turn each at the least: however
long a prompt is, it holds nobody up for more than a chunk, and takes no more than half of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Seat(Generic[T]):
    """One answer, and the bytes of keys and values that it may come to need."""

    item: T
    nbytes: int


class Schedule(Generic[T]):
    """The answers that wait and run. Invariant: those that run are at most `most_running`, and need no more than
    `room_nbytes` (None: no bound) unless one runs alone.
    """

    def __init__(self, most_running: int, room_nbytes: int | None = None) -> None:
        assert most_running >= 1, "somebody must be able to run"
        self.most_running = most_running
        self.room_nbytes = room_nbytes
        self._waiting: deque[Seat[T]] = deque()
        self._prompts: deque[Seat[T]] = deque()  # running, in turn
        self._answers: deque[Seat[T]] = deque()
        self._used_nbytes = 0
        self._owed_seconds = 0.0  # to those that choose tokens, for the last chunk of a prompt
        self._owed_turns = 0

    @property
    def waiting(self) -> list[T]:
        return [seat.item for seat in self._waiting]

    @property
    def running(self) -> list[T]:
        return [seat.item for seat in (*self._prompts, *self._answers)]

    def add(self, item: T, nbytes: int) -> None:
        """Put an answer at the end of the queue."""
        self._waiting.append(Seat(item, nbytes))

    def admit(self) -> list[T]:
        """Let those begin for whom there is room now; return them."""
        admitted = []
        while self._waiting and self._has_room(self._waiting[0]):
            seat = self._waiting.popleft()
            self._used_nbytes += seat.nbytes
            self._prompts.append(seat)
            admitted.append(seat.item)
        return admitted

    def turn(self, can_go_on: Callable[[T], bool] = lambda _: True) -> T | None:
        """Return whose turn it is; None where nobody runs who can go on."""
        if self._owed_seconds > 0 or self._owed_turns > 0:
            order = (self._answers, self._prompts)
        else:
            order = (self._prompts, self._answers)
        for seats in order:
            for _ in range(len(seats)):
                seat = seats[0]
                seats.rotate(-1)
                if can_go_on(seat.item):
                    return seat.item
        return None

    def note(self, item: T, seconds: float, *, is_prompt: bool, is_answering: bool) -> None:
        """Take note of a turn: how long it was, what it was spent on, and what the next will be."""
        if is_answering:
            seat = next((seat for seat in self._prompts if seat.item is item), None)
            if seat is not None:
                self._prompts.remove(seat)
                self._answers.append(seat)
        if is_prompt:
            self._owed_seconds, self._owed_turns = seconds, len(self._answers)
        else:
            self._owed_seconds -= seconds
            self._owed_turns -= 1
        if not self._answers:
            self._owed_seconds = self._owed_turns = 0

    def remove(self, item: T) -> None:
        """Let an answer go, wherever it is; one that is nowhere is no error."""
        for seats in (self._waiting, self._prompts, self._answers):
            seat = next((seat for seat in seats if seat.item is item), None)
            if seat is None:
                continue
            seats.remove(seat)
            if seats is not self._waiting:
                self._used_nbytes -= seat.nbytes
        if not self._answers:
            self._owed_seconds = self._owed_turns = 0

    def _has_room(self, seat: Seat[T]) -> bool:
        num_running = len(self._prompts) + len(self._answers)
        if num_running == 0:
            return True
        fits = self.room_nbytes is None or self._used_nbytes + seat.nbytes <= self.room_nbytes
        return num_running < self.most_running and fits
