"""Turns the logits of one position into log-probabilities: of the chosen token, and of the likeliest.

They are the model's own: of all entries, before biases, penalties, filters and temperature, as the softmax of
the logits has them. It does not know how the token was chosen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spile.generation.sampling import largest


class Alternative(NamedTuple):
    """One of the likeliest tokens of a position."""

    token_id: int
    logprob: float


class Logprob(NamedTuple):
    """What the model thought of one token: natural logarithms; `top` has the likeliest first."""

    token_id: int
    logprob: float
    top: tuple[Alternative, ...]


def measure(logits: NDArray[np.float32], token_id: int, num_top: int, num_entries: int) -> Logprob:
    """Return the log-probability of a token and of the `num_top` likeliest, of float32 logits [V].

    Ids from `num_entries` on are left out: they are no tokens.
    """
    logits = logits[:num_entries]
    most = logits.max()
    total = float(most) + math.log(float(np.exp(logits - most).sum(dtype=np.float64)))
    top_ids = largest(logits, num_top) if num_top else ()
    top = tuple(Alternative(int(i), float(logits[i]) - total) for i in top_ids)
    return Logprob(token_id, float(logits[token_id]) - total, top)
