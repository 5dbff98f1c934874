import numpy as np
import pytest

from spile.residency.replay import POLICIES, replay, sizes_to_try


def random_trace(seed: int, N: int = 60, L: int = 4, K: int = 2, E: int = 8) -> np.ndarray:
    rng = np.random.default_rng(seed)
    odds = rng.dirichlet(np.ones(E) * 0.5, L)
    rows = [
        [rng.choice(E, K, replace=False, p=odds[layer] * 0.9 + 0.1 / E) for layer in range(L)]
        for _ in range(N)
    ]
    return np.sort(np.array(rows, np.int32), axis=2)


@pytest.mark.parametrize("policy", POLICIES)
def test_pool_of_everything_hits_all_that_was_seen_before(policy: str) -> None:
    trace = random_trace(1)
    seen, misses = set(), 0
    for token, row in enumerate(trace):
        for layer, ids in enumerate(row):
            for expert in ids:
                misses += token >= 30 and (layer, expert) not in seen
                seen.add((layer, expert))
    result = replay(trace, 8, 32, policy)
    assert (result.hits, result.misses) == (30 * 4 * 2 - misses, misses)


def test_lru_below_a_cycle_hits_nothing_and_the_pool_hits_its_share() -> None:
    trace = np.tile(np.array([[[0, 1]] * 4], np.int32), (40, 1, 1))  # the same eight experts at every token
    assert replay(trace, 8, 7, "lru").hits == 0
    assert replay(trace, 8, 7, "optimal").hit_rate == pytest.approx(7 / 8)  # all but one stay
    assert replay(trace, 8, 7, "spile").hit_rate >= 5 / 8


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_beats_the_optimal_one_and_more_slots_help_it(seed: int) -> None:
    trace, before = random_trace(seed), -1.0
    for num_slots in sizes_to_try(trace, 8):
        best = replay(trace, 8, num_slots, "optimal").hit_rate
        assert best >= before
        before = best
        for policy in POLICIES:
            assert replay(trace, 8, num_slots, policy).hit_rate <= best + 0.03  # the cold half is not counted
