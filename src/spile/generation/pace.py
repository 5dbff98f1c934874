"""Turns a vocabulary and a way to choose tokens into the seconds that a token takes beside its logits.

It knows no engine: the logits are made up, and spread as those of a model are.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from spile.generation.options import Sampling
from spile.generation.sampling import Sampler
from spile.text.tokenizer import Decoder


class Pace:
    """What the token loop does between two tokens, a token at a time."""

    def __init__(self, sampling: Sampling, *, num_entries: int, decoder: Decoder | None) -> None:
        """Choose among so many tokens; without a decoder they are not turned into text."""
        self._sampler, self._decoder = Sampler(sampling, num_entries), decoder
        self._logits = np.random.default_rng(0).standard_normal(num_entries, np.float32) * np.float32(3)
        self._seconds: list[float] = []

    def step(self) -> None:
        """Choose a token and turn it into text. Cost: what that takes, 0.1 to 0.5 ms."""
        started = time.perf_counter()
        token_id = self._sampler.sample(self._logits)
        if self._decoder is not None:
            self._decoder.push(token_id)
        self._seconds.append(time.perf_counter() - started)

    @property
    def seconds(self) -> float:
        """Of a step, of those made so far; 0 where none was."""
        return median(self._seconds or [0.0])
