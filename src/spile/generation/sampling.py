"""Turns the logits of one position into one token id.

It does not know text or models; of earlier tokens, those that it chose itself. Everything runs in the order
of llama.cpp, and each step sees what the one before it left: biases, penalties, top-k, top-p, min-p, then
temperature over the survivors. So top-p and min-p are about the model's own probabilities, and a high
temperature lets in no token that they cut. Ties go to the lower id; at least one id is always left.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spile.errors import ModelError, OptionError
from spile.generation.options import Sampling

_NUM_BLOCKS = 1024  # of the logits, to find the largest 40: 0.10 ms of 151,936 (np.argpartition: 0.99 ms)
_BLOCK = 1024  # of weights, in a draw
# Temperatures below it choose the most probable token, as 0 does: a second one would have to lie within 2e-5 of
# it, and dividing by smaller ones overflows float32.
_COLDEST = 1e-6
_BINNED_AT_ONCE = 8192  # at a time, so that what this takes stays in the cache
_BIN_SHIFT = 20  # of a float's bits: eight bins for each power of two
_FIRST_SORTED = 255  # tried first when top-k is off; all are sorted only where these do not hold top_p


class Sampler:
    """Chooses the tokens of one answer. Each has its own random numbers.

    `num_entries`: ids from here on are never chosen (the head has more rows than the tokenizer has entries),
    nor are those in `banned`.
    """

    def __init__(self, sampling: Sampling, num_entries: int, banned: Collection[int] = ()) -> None:
        self.sampling = sampling
        self.num_entries = num_entries
        # Python's generator promises the same numbers for the same seed in every version, and importing
        # NumPy's takes 7 MB.
        self._random = random.Random(sampling.seed)
        biases = {i: value for i, value in sampling.biases.items() if i < num_entries}
        biases |= {i: -math.inf for i in banned if i < num_entries}
        self._biased = np.array(list(biases), np.intp)
        self._biases = np.array(list(biases.values()), np.float32)
        self._penalised = _Penalised(sampling) if sampling.has_penalties else None
        self._scratch: NDArray[np.float32] | None = None  # [num_entries], made when logits must be changed
        self._weighed: NDArray[np.float32] | None = None  # [2, num_entries], made when all are weighed

    def sample(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None = None) -> int:
        """Choose an id from float32 logits [V], which stay as they are, and remember it for the penalties.
        `allowed` are the ids that there are to choose from, ascending; None: all. Filters are about these alone.

        Raises: ModelError when the logits are no numbers to choose by, OptionError when none is left.
        """
        logits = logits[: self.num_entries]
        _check_largest(float(logits.max()))  # which is NaN if any is
        if allowed is None:
            token_id = self._choose(self._changed(logits))
        else:
            left = self._changed(logits)[allowed]
            _check_largest(float(left.max()) if len(left) else -math.inf, "constraint and biases included, ")
            token_id = int(allowed[self._choose(left)])
        if self._penalised is not None:
            self._penalised.count(token_id)
        return token_id

    def _changed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits with biases and penalties, in a copy that is used again; as they are without."""
        if not len(self._biased) and self._penalised is None:
            return logits
        if self._scratch is None:
            self._scratch = np.empty_like(logits)
        np.copyto(self._scratch, logits)
        self._scratch[self._biased] += self._biases
        if self._penalised is not None:
            self._penalised.apply(self._scratch)
        _check_largest(float(self._scratch.max()), "biases and penalties included, ")
        return self._scratch

    def _choose(self, logits: NDArray[np.float32]) -> int:
        sampling = self.sampling
        if sampling.temperature < _COLDEST:
            return int(np.argmax(logits))  # the first of equals
        if 0 < sampling.top_k < len(logits):
            token_ids, gaps = _most_probable(logits, sampling.top_k)
            weights = np.exp(gaps)
            count = _count_kept(weights, float(weights.sum()), sampling)
        elif sampling.top_p < 1:
            all_gaps, weights = self._weigh(logits)
            total = float(weights.sum(dtype=np.float64))
            if total * sampling.top_p > _FIRST_SORTED:  # more than so many weights of at most 1 can hold
                return self._choose_of_all(all_gaps, weights)
            token_ids, gaps = _most_probable(logits, _FIRST_SORTED)
            count = _count_kept(np.exp(gaps), total, sampling)
            if count == len(gaps) < len(logits):
                return self._choose_of_all(all_gaps, weights)
        else:
            return self._choose_of_all(*self._weigh(logits))
        return int(token_ids[_draw(np.exp(gaps[:count] / sampling.temperature), self._random.random())])

    def _choose_of_all(self, gaps: NDArray[np.float32], weights: NDArray[np.float32]) -> int:
        """Choose without top-k, when more than a few ids are left: nothing is sorted that need not be.
        The arrays are those of `_weigh`; the weights are changed.
        """
        sampling = self.sampling
        kept: NDArray[np.bool_] | None = None
        if sampling.top_p < 1:
            bound, num_equal = _top_p_bound(gaps, weights, sampling.top_p)
            kept = gaps >= bound
            kept[np.flatnonzero(gaps == bound)[num_equal:]] = False  # those with higher ids
        if sampling.min_p > 0:
            probable = weights >= sampling.min_p
            kept = probable if kept is None else kept & probable
        if sampling.temperature != 1:
            np.divide(gaps, np.float32(sampling.temperature), out=weights)
            np.exp(weights, out=weights)
        if kept is not None:
            weights *= kept
        return _draw(weights, self._random.random())

    def _weigh(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return how far each logit lies below the largest (0 or negative), and e to that. In arrays that are
        used again: fresh ones of this size cost more in page faults than in arithmetic (measured 6 ms against
        1 ms on a busy machine).
        """
        if self._weighed is None:
            self._weighed = np.empty((2, self.num_entries), np.float32)
        gaps, weights = self._weighed[:, : len(logits)]
        np.subtract(logits, logits.max(), out=gaps)
        np.exp(gaps, out=weights)
        return gaps, weights


class _Penalised:
    """The tokens chosen so far and how often, in arrays that grow by doubling."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._token_to_index: dict[int, int] = {}
        self._token_ids = np.zeros(64, np.intp)
        self._counts = np.zeros(64, np.float32)

    def count(self, token_id: int) -> None:
        index = self._token_to_index.setdefault(token_id, len(self._token_to_index))
        if index == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[index] = token_id
        self._counts[index] += 1

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Lower the logits of the tokens chosen so far, in place."""
        num, sampling = len(self._token_to_index), self._sampling
        token_ids = self._token_ids[:num]
        values = logits[token_ids]
        if sampling.repetition_penalty != 1:
            penalty = np.float32(sampling.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        values -= self._counts[:num] * np.float32(sampling.frequency_penalty)
        values -= np.float32(sampling.presence_penalty)
        logits[token_ids] = values


def _most_probable(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the ids of the largest logits in order, and how far their logits lie below the largest."""
    token_ids = largest(logits, count)
    kept = logits[token_ids].astype(np.float64)
    return token_ids, kept - kept[0]


def largest(logits: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Return the ids of the `count` largest logits, the largest first, the lower id first among equals.

    Exact: at least `count` blocks have a maximum at or above the count-th largest maximum, so all ids that
    are wanted lie at or above it, and few others do.
    """
    num_logits = len(logits)
    if count < _NUM_BLOCKS // 4 and num_logits >= 8 * _NUM_BLOCKS:
        width = num_logits // _NUM_BLOCKS
        body = logits[: width * _NUM_BLOCKS].reshape(_NUM_BLOCKS, width)
        maxima = body.max(axis=1)
        bound = np.partition(maxima, _NUM_BLOCKS - count)[_NUM_BLOCKS - count]
    elif count < num_logits:
        bound = np.partition(logits, num_logits - count)[num_logits - count]
    else:
        bound = np.float32(-np.inf)
    ids = np.flatnonzero(logits >= bound)
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order][:count]


def _count_kept(weights: NDArray[np.floating[Any]], total: float, sampling: Sampling) -> int:
    """Return how many of the most probable ids top-p and min-p keep: at least one. `weights[0]` is 1."""
    count = len(weights)
    if sampling.top_p < 1:
        sums = np.cumsum(weights, dtype=np.float64)
        count = min(count, int(np.searchsorted(sums, sampling.top_p * total, side="left")) + 1)
    if sampling.min_p > 0:
        count = min(count, int(np.count_nonzero(weights >= sampling.min_p)))
    return max(count, 1)


def _top_p_bound(
    gaps: NDArray[np.float32], weights: NDArray[np.float32], top_p: float
) -> tuple[np.float32, int]:
    """Return the gap of the last id that top-p keeps, and how many ids of that very gap it keeps.

    `gaps` are 0 or negative, and the bits of such floats, read as an integer, grow as they fall: so the upper
    bits are a histogram's bins, and only the bin in which the sum passes top_p has to be sorted.
    """
    bits, counted, binned = gaps.view(np.uint32), np.zeros(1 << (32 - _BIN_SHIFT)), []
    for start in range(0, len(gaps), _BINNED_AT_ONCE):
        block = slice(start, start + _BINNED_AT_ONCE)
        bins = (bits[block] >> _BIN_SHIFT).astype(np.intp)
        binned.append((block, bins))
        found = np.bincount(bins, weights=weights[block])
        counted[: len(found)] += found
    sums = np.cumsum(counted)
    wanted = top_p * sums[-1]
    last = int(np.searchsorted(sums, wanted, side="left"))
    inside = np.concatenate([gaps[block][bins == last] for block, bins in binned])
    inside = np.sort(inside)[::-1]
    before = sums[last - 1] if last else 0.0
    within = before + np.cumsum(np.exp(inside), dtype=np.float64)
    count = min(int(np.searchsorted(within, wanted, side="left")) + 1, len(inside))
    bound = inside[count - 1]
    return bound, count - int(np.count_nonzero(inside > bound))


def _draw(weights: NDArray[np.floating[Any]], part: float) -> int:
    """Return the index at which the running sum of the weights passes this part of their total. An index of
    no weight is never returned.

    In two steps, as a running sum of 151,936 takes 1.5 ms: over blocks, then inside of one.
    """
    start, target = 0, None
    num_blocks = len(weights) // _BLOCK
    if num_blocks > 1:
        body, rest = weights[: num_blocks * _BLOCK], weights[num_blocks * _BLOCK :]
        of_blocks = [
            *body.reshape(num_blocks, _BLOCK).sum(axis=1, dtype=np.float64),
            rest.sum(dtype=np.float64),
        ]
        sums = np.cumsum(of_blocks)
        target = part * float(sums[-1])
        block = min(
            int(np.searchsorted(sums, target, side="right")),
            int(np.searchsorted(sums, sums[-1], side="left")),
        )
        target -= float(sums[block - 1]) if block else 0.0
        start = block * _BLOCK
        weights = weights[start : start + _BLOCK]
    sums = np.cumsum(weights, dtype=np.float64)
    if target is None:
        target = part * float(sums[-1])
    index = int(np.searchsorted(sums, max(target, 0.0), side="right"))
    if index == len(sums):  # rounding went past the end
        index = int(np.flatnonzero(weights)[-1])
    return start + index


def _check_largest(value: float, what: str = "") -> None:
    if math.isfinite(value):
        return
    if what and value == -math.inf:
        raise OptionError(f"{what}no token is left to choose from", "Exclude fewer tokens by logit_bias.")
    raise ModelError(
        f"the model's largest logit is {what}{value}: no token can be chosen from that",
        "The weights are damaged, or not those of this config; 'spile verify' checks them.",
    )
