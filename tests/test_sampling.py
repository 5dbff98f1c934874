"""Each filter against its definition, and what must never happen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spile.errors import ModelError, OptionError
from spile.options import Sampling, sampling_of
from spile.sampling import Sampler, largest

OPEN: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
# probabilities 1/2, 1/4, 1/8, 1/16, 1/16, in no order of ids
HALVES = np.log(np.array([1 / 16, 1 / 4, 1 / 2, 1 / 16, 1 / 8], np.float32))


def frequencies(logits: NDArray[np.float32], draws: int = 3_000, **changes: Any) -> dict[int, float]:
    """Return how often each id was drawn, with one generator."""
    sampler = Sampler(Sampling(**{**OPEN, "seed": 1, **changes}), len(logits))
    drawn = [sampler.sample(logits) for _ in range(draws)]
    return {token_id: drawn.count(token_id) / draws for token_id in sorted(set(drawn))}


def assert_distribution(found: dict[int, float], expected: dict[int, float], draws: int = 3_000) -> None:
    """Each frequency within five standard deviations: a false alarm in a million seeds, and the seed is
    fixed.
    """
    assert set(found) == set(expected)
    for token_id, part in expected.items():
        assert abs(found[token_id] - part) < 5 * math.sqrt(part * (1 - part) / draws) + 1e-9


def test_plain_sampling_follows_the_probabilities() -> None:
    assert_distribution(frequencies(HALVES), {0: 1 / 16, 1: 1 / 4, 2: 1 / 2, 3: 1 / 16, 4: 1 / 8})


def test_temperature_raises_probabilities_to_its_inverse() -> None:
    weights = {0: 1 / 256, 1: 1 / 16, 2: 1 / 4, 3: 1 / 256, 4: 1 / 64}
    total = sum(weights.values())
    assert_distribution(
        frequencies(HALVES, temperature=0.5), {token_id: w / total for token_id, w in weights.items()}
    )


def test_temperature_zero_takes_the_largest_and_the_lower_of_equals() -> None:
    assert frequencies(HALVES, draws=5, temperature=0) == {2: 1.0}
    assert frequencies(np.array([0, 3, 1, 3], np.float32), draws=5, temperature=0) == {1: 1.0}


def test_tiny_temperature_is_greedy_and_no_overflow() -> None:
    assert frequencies(HALVES * 1000, draws=100, temperature=1e-6) == {2: 1.0}


def test_top_k_keeps_k_and_the_lower_of_equals() -> None:
    assert_distribution(frequencies(HALVES, top_k=2), {1: 1 / 3, 2: 2 / 3})
    assert set(frequencies(HALVES, top_k=4)) == {0, 1, 2, 4}  # 0 and 3 are equals


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert set(frequencies(HALVES, top_p=0.5)) == {2}
    assert set(frequencies(HALVES, top_p=0.51)) == {1, 2}
    assert set(frequencies(HALVES, top_p=0.8)) == {1, 2, 4}
    assert set(frequencies(HALVES, top_p=0)) == {2}


def test_min_p_is_a_part_of_the_largest() -> None:
    assert set(frequencies(HALVES, min_p=0.6)) == {2}
    assert set(frequencies(HALVES, min_p=0.2)) == {1, 2, 4}
    assert set(frequencies(HALVES, min_p=1)) == {2}


def test_top_p_counts_within_what_top_k_left() -> None:
    """llama.cpp's order: of the two that are left the first has 2/3."""
    assert set(frequencies(HALVES, top_k=2, top_p=0.6)) == {2}
    assert set(frequencies(HALVES, top_p=0.6)) == {1, 2}


def test_temperature_comes_last_and_lets_nothing_back_in() -> None:
    assert set(frequencies(HALVES, temperature=50, min_p=0.2)) == {1, 2, 4}


@pytest.mark.parametrize(
    "options", [{"top_p": 0.0, "top_k": 1, "min_p": 1.0}, {"top_p": 0.0}, {"min_p": 1.0}]
)
def test_one_is_always_left(options: dict[str, Any]) -> None:
    assert frequencies(HALVES, draws=5, **options) == {2: 1.0}


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}, {"top_k": 3, "top_p": 0.9}],
)
def test_ids_past_the_last_entry_are_never_chosen(options: dict[str, Any]) -> None:
    logits = np.array([1, 2, 0, 90, 90], np.float32)
    sampler = Sampler(Sampling(**{**OPEN, **options}), 3)
    assert max(sampler.sample(logits) for _ in range(200)) < 3
    assert logits.tolist() == [1, 2, 0, 90, 90]


def test_masked_ids_are_never_chosen() -> None:
    logits = np.array([-np.inf, 0, -np.inf, 0], np.float32)
    for options in ({}, {"top_k": 3}, {"top_p": 0.999}):
        assert set(frequencies(logits, draws=200, **options)) == {1, 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("num_logits", [5, 20_000])
@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_logits_that_are_no_numbers_are_an_error(
    bad: float, num_logits: int, options: dict[str, Any]
) -> None:
    logits = np.zeros(num_logits, np.float32)
    logits[3] = bad
    with pytest.raises(ModelError, match=r"largest logit is (nan|inf)"):
        Sampler(Sampling(**{**OPEN, **options}), num_logits).sample(logits)


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(ModelError, match="largest logit is -inf"):
        Sampler(Sampling(), 9).sample(np.full(9, -np.inf, np.float32))


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0])
@pytest.mark.parametrize("count", [1, 2, 40, 255, 1000, 19_999, 20_000])
def test_largest_are_found_exactly_with_ties_to_the_lower_id(spread: float, count: int) -> None:
    logits = np.round(np.random.default_rng(3).normal(size=20_000) * spread, 2).astype(np.float32)
    expected = np.lexsort((np.arange(len(logits)), -logits))[:count]
    assert largest(logits, count).tolist() == expected.tolist()


@pytest.mark.parametrize("spread", [0.001, 1.0, 8.0])
def test_top_p_of_many_is_exact_however_flat(spread: float) -> None:
    """The flat ones take another way through the code."""
    logits = (np.random.default_rng(5).normal(size=4_000) * spread).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64))
    sums = np.cumsum(weights) / weights.sum()
    kept = set(order[: np.searchsorted(sums, 0.3) + 1].tolist())
    sampler = Sampler(Sampling(**{**OPEN, "top_p": 0.3, "temperature": 100.0, "seed": 0}), len(logits))
    drawn = {sampler.sample(logits) for _ in range(300)}
    boundary = {int(order[len(kept) - 2 + i]) for i in range(3) if 0 <= len(kept) - 2 + i < len(order)}
    assert drawn <= kept | boundary  # sums of float32 and float64 may differ by the last id
    assert len(drawn) > min(len(kept), 250) * 0.5


def test_equals_of_the_last_one_kept_go_by_id() -> None:
    logits = np.zeros(2000, np.float32)
    sampler = Sampler(Sampling(**{**OPEN, "top_p": 0.25}), 2000)
    drawn = {sampler.sample(logits) for _ in range(4000)}
    assert max(drawn) < 500
    assert len(drawn) > 400


def test_same_seed_same_tokens_and_no_seed_other_ones() -> None:
    logits = np.zeros(1000, np.float32)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(**{**OPEN, "seed": seed}), 1000)
        return [sampler.sample(logits) for _ in range(10)]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert draw(None) != draw(None)


def test_samplers_share_no_generator() -> None:
    logits = np.zeros(1000, np.float32)
    first, second = (Sampler(Sampling(**{**OPEN, "seed": 5}), 1000) for _ in range(2))
    mixed = [(first.sample(logits), second.sample(logits)) for _ in range(10)]
    assert all(one == other for one, other in mixed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", 2),
        ("top_k", -1),
        ("top_k", 1.5),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", True),
    ],
)
def test_value_out_of_range_names_parameter_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"^{name} is .*: it must be a (whole )?number from \d.* to \d"):
        Sampling(**{name: value})


def test_unknown_parameter_is_refused() -> None:
    with pytest.raises(OptionError, match=r"no sampling parameter 'temp': there are .*, max_tokens, min_p,"):
        Sampling().changed({"temp": 1})


def test_none_keeps_what_is_there() -> None:
    assert Sampling(top_k=3).changed({"top_k": None, "seed": 4}) == Sampling(top_k=3, seed=4)


def test_defaults_are_those_of_the_issue() -> None:
    assert Sampling() == Sampling(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=None, max_tokens=None
    )


def test_generation_config_gives_the_defaults() -> None:
    sampling, notes = sampling_of({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True})
    assert sampling == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    assert notes == ()
    assert sampling_of({"do_sample": False, "temperature": 0.6})[0].temperature == 0
    assert sampling_of({"eos_token_id": 3, "max_new_tokens": 20})[0] == Sampling()


def test_useless_values_of_generation_config_are_told_and_left() -> None:
    sampling, notes = sampling_of({"temperature": "warm", "top_k": None, "min_p": 7, "top_p": 0.5})
    assert sampling == Sampling(top_p=0.5)
    assert [note.split(":")[0] for note in notes] == ["generation_config.json"] * 2
