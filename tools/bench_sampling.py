"""Measures what choosing one token costs at the vocabulary of the full-size model.

The ceiling: a resident full-size token takes about 20 ms on two cores (docs/log.md), and choosing the next
one may take 5 % of that, 1 ms. Logits are random: normal ones (spread 3, as a language model's), and flat
ones, which top-p finds hardest. Each case is the median of many calls.

    python tools/bench_sampling.py

Prints a table, then one JSON line: case -> microseconds.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import numpy as np

from spile.generation.logprobs import measure
from spile.generation.options import Sampling
from spile.generation.sampling import Sampler

NUM_ENTRIES = 151_669
NUM_ROWS = 151_936
REPEATS = 200
SAID = 2_000  # tokens of the answer so far, for the penalties

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "greedy": {"temperature": 0},
    "top-p alone": {**OFF, "top_p": 0.9},
    "min-p alone": {**OFF, "min_p": 0.05},
    "no filter": OFF,
    "penalties": PENALTIES,
    "bias of 300 tokens": {"logit_bias": {i * 500: -5.0 for i in range(300)}},
    "penalties, bias, 20 log-probabilities": {
        **PENALTIES,
        "logit_bias": {i * 500: -5.0 for i in range(300)},
        "logprobs": 20,
    },
}


def time_case(options: dict[str, Any], logits: np.ndarray) -> float:
    """Return the median seconds of one token."""
    sampling = Sampling(seed=1).changed(options)
    sampler = Sampler(sampling, NUM_ENTRIES)
    if sampling.has_penalties:
        some = np.random.default_rng(2).integers(0, NUM_ENTRIES, SAID)
        for token_id in some:
            sampler._penalised.count(int(token_id))  # type: ignore[union-attr]
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        token_id = sampler.sample(logits)
        if sampling.logprobs is not None:
            measure(logits, token_id, sampling.logprobs, NUM_ENTRIES)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    random = np.random.default_rng(0)
    kinds = {
        "normal": (random.normal(size=NUM_ROWS) * 3).astype(np.float32),
        "flat": (random.normal(size=NUM_ROWS) * 0.01).astype(np.float32),
    }
    report = {}
    for name, options in CASES.items():
        for kind, logits in kinds.items():
            seconds = time_case(options, logits)
            report[f"{name}, {kind} logits"] = round(seconds * 1e6, 1)
            print(f"{name + ', ' + kind + ' logits':55} {seconds * 1e3:7.3f} ms")
    print(json.dumps({"num_entries": NUM_ENTRIES, "microseconds": report}))


if __name__ == "__main__":
    main()
