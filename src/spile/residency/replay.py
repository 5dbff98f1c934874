"""Turns a recorded trace of routed experts into hit rates: what each policy and each pool would have hit.

Ids and numbers only: no model, no files. A trace is int [N, L, K]: for each decoded token and layer with
experts the K experts that the router chose. The pool starts empty; the first half of the trace warms it and is
not counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spile.residency.policy import Policy

Trace = NDArray[np.int32]
LFU_DECAY = 0.97  # of what a choice counts one token later, in `lfu-decay`


@dataclass(frozen=True)
class Replayed:
    """How one policy did with one pool."""

    policy: str
    num_slots: int
    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


def replay(trace: Trace, num_experts: int, num_slots: int, policy: str) -> Replayed:
    """Play a trace [N, L, K] against a pool of S slots. Cost: about 20 us a token and layer.

    `policy` is a key of POLICIES.
    """
    return POLICIES[policy](trace, num_experts, num_slots)


def sizes_to_try(trace: Trace, num_experts: int) -> list[int]:
    """Return pool sizes from a sliver to everything, each about half as large again as the one before."""
    _, L, K = trace.shape
    sizes, size = [], float(2 * K)
    while size < L * num_experts:
        sizes.append(int(size))
        size *= 1.5
    return [*sizes, L * num_experts]


def _pool_policy(trace: Trace, num_experts: int, num_slots: int) -> Replayed:
    """What `pool.py` does: the policy of `policy.py`, over one pool."""
    N, L, K = trace.shape
    policy = Policy(L, num_experts)
    resident = np.zeros(L * num_experts, bool)
    counts = np.ones(K, np.int32)
    hits = misses = 0
    for token in range(N):
        policy.step(1)
        for layer in range(L):
            keys = layer * num_experts + trace[token, layer].astype(np.int64)
            is_hit = resident[keys]
            if 2 * token >= N:
                hits += int(is_hit.sum())
                misses += K - int(is_hit.sum())
            policy.choose(keys, counts)
            resident[keys] = True
            over = int(resident.sum()) - num_slots
            if over > 0:
                resident[keys] = False
                others = np.flatnonzero(resident)
                resident[keys] = True
                rank = policy.rank(layer, others)
                resident[others[np.argsort(-rank, kind="stable")[:over]]] = False
                over -= len(others)
                if over > 0:  # fewer slots than a layer wants: what was loaded first is gone first
                    resident[keys[:over]] = False
    return Replayed("spile", num_slots, hits, misses)


def _lru(trace: Trace, num_experts: int, num_slots: int) -> Replayed:
    """Least recently used, over one pool."""
    hits, misses = _lru_counts(_key_rows(trace, num_experts), num_slots, len(trace) // 2 * trace.shape[1])
    return Replayed("lru", num_slots, hits, misses)


def _lru_per_layer(trace: Trace, num_experts: int, num_slots: int) -> Replayed:
    """Least recently used, an equal share of the slots for each layer."""
    N, L, _ = trace.shape
    hits = misses = 0
    for layer in range(L):
        share = num_slots // L + (layer < num_slots % L)
        more = _lru_counts(trace[:, layer].tolist(), share, N // 2)
        hits, misses = hits + more[0], misses + more[1]
    return Replayed("lru-per-layer", num_slots, hits, misses)


def _lfu(trace: Trace, num_experts: int, num_slots: int) -> Replayed:
    """Least frequently used, counting from the start, over one pool; ties go by age."""
    return _least_frequent(trace, num_experts, num_slots, "lfu", 1.0)


def _lfu_decay(trace: Trace, num_experts: int, num_slots: int) -> Replayed:
    """The same with counts that age."""
    return _least_frequent(trace, num_experts, num_slots, "lfu-decay", LFU_DECAY)


def _least_frequent(trace: Trace, num_experts: int, num_slots: int, name: str, decay: float) -> Replayed:
    N, L, _ = trace.shape
    counts = np.zeros(L * num_experts)
    resident: OrderedDict[int, None] = OrderedDict()
    hits = misses = 0
    for row, keys in enumerate(_key_rows(trace, num_experts)):
        if row % L == 0:
            counts *= decay
        for key in keys:
            counts[key] += 1
            if row >= N // 2 * L:
                hits, misses = hits + (key in resident), misses + (key not in resident)
            resident[key] = None
            resident.move_to_end(key)
        wanted = set(keys)
        while len(resident) > num_slots:
            others = [key for key in resident if key not in wanted] or list(resident)
            del resident[min(others, key=counts.__getitem__)]
    return Replayed(name, num_slots, hits, misses)


def _optimal(trace: Trace, num_experts: int, num_slots: int) -> Replayed:
    """Belady: keep what is wanted soonest. Knows the future; no policy can hit more."""
    N, L, _ = trace.shape
    rows = _key_rows(trace, num_experts)
    next_use = [[0] * len(keys) for keys in rows]
    seen: dict[int, int] = {}
    for row in range(len(rows) - 1, -1, -1):
        for i, key in enumerate(rows[row]):
            next_use[row][i] = seen.get(key, len(rows))
            seen[key] = row
    resident: dict[int, int] = {}
    hits = misses = 0
    for row, keys in enumerate(rows):
        for key, upcoming in zip(keys, next_use[row], strict=True):
            if row >= N // 2 * L:
                hits, misses = hits + (key in resident), misses + (key not in resident)
            resident[key] = upcoming
        over = len(resident) - num_slots
        if over > 0:
            for key in sorted(resident, key=resident.__getitem__, reverse=True)[:over]:
                del resident[key]
    return Replayed("optimal", num_slots, hits, misses)


def _key_rows(trace: Trace, num_experts: int) -> list[list[int]]:
    """One list of keys a token and layer, in the order in which they are wanted."""
    N, L, K = trace.shape
    keys = trace.astype(np.int64) + np.arange(L)[None, :, None] * num_experts
    rows: list[list[int]] = keys.reshape(N * L, K).tolist()
    return rows


def _lru_counts(rows: Sequence[Sequence[int]], num_slots: int, first_counted: int) -> tuple[int, int]:
    resident: OrderedDict[int, None] = OrderedDict()
    hits = misses = 0
    for row, keys in enumerate(rows):
        for key in keys:
            hit = key in resident
            if row >= first_counted:
                hits, misses = hits + hit, misses + (not hit)
            resident[key] = None
            resident.move_to_end(key)
            while len(resident) > num_slots:
                resident.popitem(last=False)
    return hits, misses


POLICIES: dict[str, Callable[[Trace, int, int], Replayed]] = {
    "spile": _pool_policy,
    "lru": _lru,
    "lru-per-layer": _lru_per_layer,
    "lfu": _lfu,
    "lfu-decay": _lfu_decay,
    "optimal": _optimal,
}
