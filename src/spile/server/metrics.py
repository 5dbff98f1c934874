"""Counts what the server did, and writes it as Prometheus reads it (text format 0.0.4).

It does not know HTTP or models; it is told. Written on the model thread and the event loop, read on the loop.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from spile.server.tasks import Figures, Task

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_RATES = (1, 2, 5, 10, 20, 30, 50, 75, 100, 200, 500, 1000, 5000)
_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1, 120


class Histogram:
    """How often a value was at most each of some bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class Metrics:
    """All counters of one server. They only grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests: dict[tuple[str, int, str], int] = {}  # path, status and outcome -> requests
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.first_token_seconds = Histogram(_SECONDS)
        self.request_seconds = Histogram(_SECONDS)
        self.queue_seconds = Histogram(_SECONDS)
        self.prompt_rates = Histogram(_RATES)
        self.token_rates = Histogram(_RATES)
        self.stall_seconds = self.compute_seconds = 0.0

    def waited(self, seconds: float) -> None:
        """Count the time that an answer waited for its turn to begin."""
        with self._lock:
            self.queue_seconds.add(seconds)

    def answered(self, task: Task) -> None:
        """Count a request whose answers all ended."""
        with self._lock:
            for choice in task.choices:
                stats = choice.stats
                assert stats is not None, "all answers ended"
                self.prompt_tokens += stats.prompt_tokens
                self.cached_tokens += stats.cached_tokens
                for histogram, value in (
                    (self.first_token_seconds, stats.time_to_first_token_seconds),
                    (self.prompt_rates, stats.prompt_tokens_per_second),
                    (self.token_rates, stats.tokens_per_second),
                ):
                    if value is not None and math.isfinite(value):
                        histogram.add(value)
            self.request_seconds.add(task.seconds)

    def worked(self, step: Figures) -> None:
        """Count one step of an answer, whatever becomes of it."""
        with self._lock:
            self.stall_seconds += step.stall_seconds
            self.compute_seconds += step.compute_seconds

    def said(self) -> None:
        """Count a token of an answer, whatever becomes of it."""
        with self._lock:
            self.completion_tokens += 1

    def ended(self, path: str, status: int, outcome: str) -> None:
        """Count a request, however it ended: by finish reasons, an error's code, or `ok`."""
        with self._lock:
            key = (path, status, outcome)
            self.requests[key] = self.requests.get(key, 0) + 1

    def retry_seconds(self, parallel: int) -> int:
        """Guess when a place will be free, from what requests have taken so far."""
        with self._lock:
            seconds = self.request_seconds
            mean = seconds.total / seconds.count if seconds.count else 1.0
        return min(max(math.ceil(mean / max(parallel, 1)), _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)

    def text(self, status: Mapping[str, Any]) -> str:
        """Return all of it, and the moment's picture that `Worker.status` gives."""
        lines: list[str] = []

        def one(name: str, kind: str, what: str, value: float | None) -> None:
            if value is not None:
                lines.extend(_family(name, kind, what, [f"spile_{name} {_number(value)}"]))

        with self._lock:
            requests = [
                f'spile_requests_total{{path="{path}",status="{status}",outcome="{outcome}"}} {count}'
                for (path, status, outcome), count in sorted(self.requests.items())
            ]
            lines += _family("requests_total", "counter", "requests that ended, by how", requests)
            one("prompt_tokens_total", "counter", "tokens of prompts", self.prompt_tokens)
            one("cached_prompt_tokens_total", "counter", "of these, known from before", self.cached_tokens)
            one("completion_tokens_total", "counter", "tokens of answers", self.completion_tokens)
            one("stall_seconds_total", "counter", "waited for reads", self.stall_seconds)
            one("compute_seconds_total", "counter", "computed", self.compute_seconds)
            one("bytes_read_total", "counter", "read from disk", status["bytes_read"])
            one("expert_hits_total", "counter", "wanted experts that were resident", status["hits"])
            one("expert_misses_total", "counter", "wanted experts that were read", status["misses"])
            one("up", "gauge", "1 while requests are answered", float(status["status"] == "ok"))
            one("requests_running", "gauge", "answers that are worked on", status["running"])
            one("requests_waiting", "gauge", "requests that wait for their turn", status["waiting"])
            one("memory_bytes", "gauge", "resident memory of the process", status["memory_bytes"])
            one("memory_peak_bytes", "gauge", "its high-water mark", status["peak_memory_bytes"])
            one("memory_budget_bytes", "gauge", "its bound", status.get("budget_bytes"))
            one("resident_expert_bytes", "gauge", "experts in memory", status["resident_expert_bytes"])
            one("exact", "gauge", "0 in an approximate mode", status["exact"])
            one(
                "tokens_per_second",
                "gauge",
                "of all answers, while they were given",
                status["tokens_per_second"],
            )
            for name, what, histogram in (
                (
                    "time_to_first_token_seconds",
                    "from the request to its first token",
                    self.first_token_seconds,
                ),
                ("request_seconds", "from the request to its end", self.request_seconds),
                ("queue_seconds", "before its turn", self.queue_seconds),
                ("prompt_tokens_per_second", "while a prompt was read", self.prompt_rates),
                ("completion_tokens_per_second", "while an answer was given", self.token_rates),
            ):
                lines += _family(name, "histogram", what, _buckets(name, histogram))
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, what: str, samples: Sequence[str]) -> list[str]:
    return [f"# HELP spile_{name} {what}", f"# TYPE spile_{name} {kind}", *samples]


def _buckets(name: str, histogram: Histogram) -> list[str]:
    samples, running = [], 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        running += count
        samples.append(f'spile_{name}_bucket{{le="{_number(bound)}"}} {running}')
    samples.append(f'spile_{name}_bucket{{le="+Inf"}} {histogram.count}')
    samples.append(f"spile_{name}_sum {_number(histogram.total)}")
    samples.append(f"spile_{name}_count {histogram.count}")
    return samples


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
