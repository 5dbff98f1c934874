"""Decides which experts of each layer a router may choose between two selections: the approximate mode that
`reselect_every` asks for by name.

Ids and numbers only. A prompt is read with every expert. The first token after it, and then every so many
tokens, is a selection: it sees every expert, and those that it chooses become its layer's set, together with
the shared ones (the first of each layer) and with those that were chosen most often lately. Until the next
selection the router sees that set alone. All of it depends on the tokens of one sequence and on nothing else: not on a
budget, threads, chunks, or other sequences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_CHOICE = 1 << 10  # what one choice counts, in whole numbers so that ties are ties everywhere
_MEMORY = 32  # tokens: at a selection, what was counted before loses reselect_every parts of so many


class Selection:
    """The sets of one sequence: `num_active` experts a layer, the first `num_shared` of them always."""

    def __init__(
        self, num_layers: int, num_experts: int, *, num_active: int, num_shared: int, every: int
    ) -> None:
        """`every` is in tokens; 0 selects after a prompt only."""
        assert num_shared <= num_active, "shared experts are active"
        self._num_active, self._num_shared, self._every = num_active, num_shared, every
        self._counts = np.zeros((num_layers, num_experts), np.int64)
        self._allowed = np.ones((num_layers, num_experts), np.uint8)
        self._num_decoded = 0  # since the prompt
        self._is_selecting = True

    def reset(self) -> None:
        """Forget the sequence."""
        self._counts[:] = 0
        self.begin_prompt()

    def begin_prompt(self) -> None:
        """Tokens of a prompt come next."""
        self._num_decoded, self._is_selecting = 0, False

    def begin_token(self) -> None:
        """One decoded token comes next."""
        first = self._num_decoded == 0
        self._is_selecting = first or (self._every > 0 and self._num_decoded % self._every == 0)
        self._num_decoded += 1

    def allowed(self, layer: int) -> NDArray[np.uint8] | None:
        """Which experts the router may choose, uint8 [E]; None: any."""
        return None if self._is_selecting or self._num_decoded == 0 else self._allowed[layer]

    def choose(
        self, layer: int, ids: NDArray[np.int32], counts: NDArray[np.int32]
    ) -> NDArray[np.int32] | None:
        """Record what the router chose, and by how many tokens each. Returns the layer's set where it was selected
        by this.
        """
        seen = self._counts[layer]
        if self._is_selecting:
            seen -= seen * min(self._every, _MEMORY) // _MEMORY
        seen[ids] += _CHOICE * counts.astype(np.int64)
        if not self._is_selecting:
            return None
        order = np.argsort(-seen, kind="stable")  # ties to the lower id
        wanted = np.unique(np.concatenate((np.arange(self._num_shared), ids)))
        others = order[~np.isin(order, wanted)][: max(0, self._num_active - len(wanted))]
        self._allowed[layer] = 0
        self._allowed[layer, wanted] = 1
        self._allowed[layer, others] = 1
        return np.concatenate((wanted, others)).astype(np.int32)
