"""Decides which resident expert gives up its slot. Ids and numbers only: no bytes, no files, no engine.

The model walks its layers in a cycle, so the expert that is wanted latest is the one to give up. Time is counted
in layers. An expert that a token chooses with chance p is wanted 1 / p cycles after its layer was last there, on
average: that is when it is due. A plain LRU gives up the very experts whose layers come next, and below one
token's cycle it never hits.

The chance is how often tokens chose the expert, remembered for long, for shorter and for a few tokens, and what
nobody knows, the same for all. How much each counts is learned from how well it foretold the choices so far: text
that stays with its experts is served by the short memory, routing without a pattern by the long one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Of what a token's choice still counts one token later. Chosen on half of the recorded traces and of synthetic
# ones; more memories, or weights a layer, gained nothing on the other half (docs/log.md, 2026-11-30).
DECAYS = np.array([0.995, 0.97, 0.8])
LEARNING = 0.3  # of the weights, a token: it learns from one layer, another each time
LEAST = 1e-6  # of a chance
NEVER = float("-inf")  # what is not to be given up is due


class Policy:
    """How often each expert was chosen, in three memories. A key is layer * num_experts + expert."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        M = len(DECAYS)
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._counts = np.zeros((num_layers, M, num_experts))
        self._total = np.zeros((M, 1))  # what an expert that every token chose would count
        self._weights = np.full(M, 1.0 / (M + 1))  # of the memories; the rest is that of knowing nothing
        self._due = np.full(num_layers * num_experts + 1, NEVER)  # the last is no expert's: key -1
        self._cycle, self._is_new = 0, True
        self.step(1)

    def step(self, num_tokens: int) -> None:
        """Say of how many tokens the next choices are, one cycle of layers."""
        self._cycle += 1
        if self._cycle % 1000 == 0:
            self._counts[self._counts < 1e-30] = 0.0  # numbers too small to be normal make some CPUs crawl
        self._num_tokens = num_tokens
        self._fade = (DECAYS**num_tokens)[:, None]
        # What an expert that each of these tokens chooses counts after the last; one that some choose, its share.
        self._gain = (1.0 - self._fade) / (1.0 - DECAYS)[:, None]
        self._before = np.zeros_like(self._total) if self._is_new else self._total
        self._total = self._before * self._fade + self._gain
        self._per_count = self._weights / self._total[:, 0]

    def choose(self, keys: NDArray[np.int64], num_tokens: NDArray[np.int32]) -> None:
        """Record that these experts of one layer were chosen, each by so many tokens."""
        if not num_tokens.any():
            return
        self._is_new = False
        layer = int(keys[0]) // self._num_experts
        first = layer * self._num_experts
        counts, experts = self._counts[layer], keys - first
        if self._num_tokens == 1:
            blind, gain = len(keys) / self._num_experts, self._gain
            if layer == self._cycle % self._num_layers and self._before[0, 0]:
                self._learn(counts[:, experts] / self._before, blind)
        else:
            blind = float(num_tokens.sum()) / (self._num_tokens * self._num_experts)
            gain = self._gain * (num_tokens / self._num_tokens)
        counts *= self._fade
        counts[:, experts] += gain
        due = self._due[first : first + self._num_experts]
        np.matmul(self._per_count, counts, out=due)
        due += (1.0 - float(self._weights.sum())) * blind + LEAST
        np.divide(self._num_layers, due, out=due)
        due += self._cycle * self._num_layers + layer

    def rank(self, layer: int, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        """Estimate when each resident expert is wanted next, in layers from `layer`: give up the largest. No
        expert (key -1), and one that no token ever chose, ranks at NEVER.
        """
        return self._due[keys] - (self._cycle * self._num_layers + layer)

    def _learn(self, foretold: NDArray[np.float64], blind: float) -> None:
        """Move the weights towards the memories that gave the chosen experts the higher chances [M, K]."""
        shares = self._weights[:, None] * foretold
        shares /= shares.sum(axis=0) + (1.0 - self._weights.sum()) * blind + LEAST
        self._weights += LEARNING * (shares.mean(axis=1) - self._weights)
        self._per_count = self._weights / self._total[:, 0]
