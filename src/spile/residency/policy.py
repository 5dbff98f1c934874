"""Decides which resident expert gives up its slot. Ids and numbers only: no bytes, no files, no engine.

The model walks its layers in a cycle, so the expert that is wanted latest is the one to give up. When expert
x of layer l is wanted next is estimated in layers: (1 / p - 1) cycles of waiting, p being how often tokens
chose x lately, and the distance from the current layer to l. The distance is what makes a pool below one
token's cycle useful: a plain LRU gives up the very experts whose layers come next and never hits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DECAY = 0.97  # of what a token's choice still counts one token later
PRIOR = 0.05  # what every expert counts for: one choice alone must not outweigh the distance


class Policy:
    """How often each expert was chosen lately. A key is layer * num_experts + expert."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._counts = np.zeros(num_layers * num_experts)  # in units that grow instead of ageing every entry
        self._unit = 1.0

    def step(self, num_tokens: int) -> None:
        """Let what was chosen so far age by `num_tokens` tokens."""
        self._unit *= DECAY ** -min(num_tokens, 1000)
        if self._unit > 1e100:
            self._counts /= self._unit
            self._unit = 1.0

    def choose(self, keys: NDArray[np.int64], num_tokens: NDArray[np.int32]) -> None:
        """Record that these experts were chosen, each by so many tokens."""
        self._counts[keys] += self._unit * np.minimum(num_tokens, 1.0 / (1.0 - DECAY))

    def rank(self, layer: int, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        """Estimate when each resident expert is wanted next, in layers from `layer`: give up the largest."""
        p = np.minimum(PRIOR + (1.0 - DECAY) * self._counts[keys] / self._unit, 1.0)
        # from 1, the next layer, to all of them: what this layer has used is wanted a whole cycle later
        distance = (keys // self._num_experts - layer - 1) % self._num_layers + 1
        return (1.0 / p - 1.0) * self._num_layers + distance
