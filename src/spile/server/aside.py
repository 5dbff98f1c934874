"""Runs what needs no model beside the model's thread: requests are checked, rendered and encoded here.

It does not know what it runs. Two threads, one for short requests and one for long ones: what is short never waits for
a text that takes seconds, and each thread takes its work in the order it came. How much may wait is its callers' to
bound.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

SHORT_NBYTES = 64_000  # of a body: 10 to 20 ms of encoding


class Aside:
    """The two threads. They start with the first work, and end with the process or by `stop`."""

    def __init__(self) -> None:
        self._lanes = (_Lane("spile-short"), _Lane("spile-long"))

    def do(self, work: Callable[[], None], nbytes: int) -> None:
        """Run work of a request of so many bytes soon. It must not raise. May be called from any thread."""
        self._lanes[nbytes > SHORT_NBYTES].put(work)

    def stop(self) -> None:
        """End both threads after what they have to do. Returns at once."""
        for lane in self._lanes:
            lane.put(None)


class _Lane:
    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()

    def put(self, work: Callable[[], None] | None) -> None:
        self._work.put(work)
        with self._lock:
            if work is not None and self._thread.ident is None:
                self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
