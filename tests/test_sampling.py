"""Each filter against its definition, and what must never happen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spile.errors import ModelError, OptionError
from spile.generation.options import Sampling, sampling_of
from spile.generation.sampling import Sampler, _draw, largest

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
    assert sampling_of({"repetition_penalty": 1.1})[0] == Sampling(repetition_penalty=1.1)
    assert sampling_of({"do_sample": False, "temperature": 0.6})[0].temperature == 0
    assert sampling_of({"eos_token_id": 3, "max_new_tokens": 20})[0] == Sampling()


def test_useless_values_of_generation_config_are_told_and_left() -> None:
    sampling, notes = sampling_of({"temperature": "warm", "top_k": None, "min_p": 7, "top_p": 0.5})
    assert sampling == Sampling(top_p=0.5)
    assert [note.split(":")[0] for note in notes] == ["generation_config.json"] * 2


def chosen(logits: NDArray[np.float32], count: int, **changes: Any) -> list[int]:
    """Return what one sampler chooses of the same logits again and again."""
    sampler = Sampler(Sampling(**{**OPEN, "temperature": 0, **changes}), len(logits))
    return [sampler.sample(logits) for _ in range(count)]


def test_penalties_are_about_what_was_chosen_before() -> None:
    logits = np.array([4.0, 3.5, -1.0, 1.0], np.float32)
    assert chosen(logits, 4) == [0] * 4
    # presence: 1 off, once. 4.0 | 3.0, 3.5 | 3.0, 2.5 and so on
    assert chosen(logits, 5, presence_penalty=1.0) == [0, 1, 0, 0, 0]
    # frequency: 0.3 off each time. 4.0, 3.7, 3.4 | 3.5, 3.2 ...
    assert chosen(logits, 6, frequency_penalty=0.3) == [0, 0, 1, 0, 1, 0]
    # repetition: halved once: 4.0 | 2.0, 3.5 | 2.0, 1.75
    assert chosen(logits, 4, repetition_penalty=2.0) == [0, 1, 0, 0]


def test_penalties_follow_the_formula_on_negative_logits_too() -> None:
    """(logit / r, or * r where negative) - n * frequency - presence, by hand, against a sampler that
    remembers.
    """
    random_ = np.random.default_rng(4)
    logits = (random_.normal(size=50) * 2).astype(np.float32)
    options = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    sampler = Sampler(Sampling(**{**OPEN, "temperature": 0, **options}), 50)
    counts: dict[int, int] = {}
    for _ in range(200):
        changed = logits.astype(np.float64)
        for token_id, count in counts.items():
            value = changed[token_id]
            value = value / 1.3 if value > 0 else value * 1.3
            changed[token_id] = value - 0.2 * count - 0.4
        token_id = sampler.sample(logits)
        best = np.sort(changed)[::-1]
        if best[0] - best[1] > 1e-4:
            assert token_id == int(changed.argmax())
        counts[token_id] = counts.get(token_id, 0) + 1
    assert len(counts) > 5


def test_negative_penalties_and_small_repetition_encourage() -> None:
    logits = np.array([1.0, 0.9], np.float32)
    assert chosen(logits, 3, presence_penalty=-1.0) == [0, 0, 0]
    assert chosen(-logits, 3, repetition_penalty=0.5, logit_bias={1: 0.0}) == [1, 1, 1]


def test_penalties_of_many_tokens_remember_all() -> None:
    logits = np.linspace(1, 0, 1000, dtype=np.float32)
    assert chosen(logits, 300, presence_penalty=100) == list(range(300))


def test_bias_is_added_before_everything() -> None:
    assert_distribution(
        frequencies(HALVES, logit_bias={0: math.log(8), 2: -100}),
        {0: 8 / 15, 1: 4 / 15, 3: 1 / 15, 4: 2 / 15},
    )
    assert set(frequencies(HALVES, draws=50, logit_bias={3: 100})) == {3}
    assert set(frequencies(HALVES, draws=50, top_k=1, logit_bias={3: 10})) == {3}


def test_bias_of_minus_100_excludes_whatever_the_logit() -> None:
    logits = np.array([1000.0, 0.0], np.float32)
    assert chosen(logits, 3, logit_bias={"0": -100}) == [1, 1, 1]
    with pytest.raises(OptionError, match="no token is left to choose from"):
        chosen(logits, 1, logit_bias={0: -100, 1: -100})


def test_ids_of_a_bias_past_the_last_entry_do_nothing() -> None:
    sampler = Sampler(Sampling(**{**OPEN, "temperature": 0, "logit_bias": {3: 100}}), 3)
    assert sampler.sample(np.array([0, 1, 0, 0], np.float32)) == 1


def test_banned_tokens_are_never_chosen() -> None:
    sampler = Sampler(Sampling(**OPEN), 5, banned=[2, 9])
    assert {sampler.sample(HALVES) for _ in range(300)} == {0, 1, 3, 4}


def test_logits_stay_as_they_are() -> None:
    logits = HALVES.copy()
    chosen(logits, 5, presence_penalty=1, logit_bias={1: 3})
    assert logits.tolist() == HALVES.tolist()


@pytest.mark.parametrize(
    ("changes", "logits_of"),
    [
        ({}, lambda x: x),
        ({"temperature": 0.7}, lambda x: x / 0.7),
        ({"top_k": 5}, lambda x: np.where(np.argsort(np.argsort(-x)) < 5, x, -np.inf)),
        ({"min_p": 0.2}, lambda x: np.where(x >= x.max() + math.log(0.2), x, -np.inf)),
        ({"logit_bias": {0: 2.0, 3: -1.0}}, lambda x: x + np.array([2, 0, 0, -1, *[0] * 8])),
    ],
)
def test_distribution_is_that_of_the_definition_by_chi_square(
    changes: dict[str, Any], logits_of: Any
) -> None:
    """Pearson's statistic on 12 tokens stays below the 1-in-1e5 quantile of chi-square."""
    logits = np.random.default_rng(9).normal(size=12).astype(np.float32)
    wanted = np.exp(logits_of(logits.astype(np.float64)))
    wanted /= wanted.sum()
    draws = 20_000
    sampler = Sampler(Sampling(**{**OPEN, "seed": 2, **changes}), 12)
    found = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=12)
    assert not found[wanted == 0].any()
    some = wanted > 0
    statistic = float(((found[some] - draws * wanted[some]) ** 2 / (draws * wanted[some])).sum())
    freedom = int(some.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile at z = 4.26.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.26 * math.sqrt(2 / (9 * freedom))) ** 3
    print(f"{changes}: chi-square {statistic:.1f} of {freedom} degrees, limit {limit:.1f}")
    assert statistic < limit


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("repetition_penalty", 0, "repetition_penalty is 0"),
        ("presence_penalty", "x", "presence_penalty is 'x'"),
        ("frequency_penalty", math.nan, "frequency_penalty is nan"),
        ("logprobs", -1, "logprobs is -1"),
        ("logprobs", 101, "logprobs is 101: it must be a whole number from 0 to 100"),
        ("logprobs", True, "logprobs is True"),
        ("ignore_eos", 1, "ignore_eos is 1"),
        ("stop", "", "stop is ''"),
        ("stop", ["a", ""], "none of them empty"),
        ("stop", [3], "stop is"),
        ("stop", 3, "stop is 3"),
        ("logit_bias", {"a": 1}, "logit_bias is"),
        ("logit_bias", {1: "a"}, "logit_bias of token 1 is 'a'"),
        ("logit_bias", {1: 101}, "logit_bias of token 1 is 101"),
        ("logit_bias", {-1: 1}, "a token id of logit_bias is -1"),
        ("logit_bias", 3, "logit_bias is 3"),
    ],
)
def test_further_values_out_of_range_are_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Sampling(**{name: value})


def test_what_can_be_given_in_several_forms_has_one() -> None:
    assert Sampling(stop="a") == Sampling(stop=["a"]) == Sampling(stop=("a",))
    assert Sampling(logit_bias={"2": 1, 1: 2}) == Sampling(logit_bias={1: 2.0, 2: 1.0})
    assert hash(Sampling(stop=["a"], logit_bias={1: 2})) == hash(Sampling(stop="a", logit_bias={1: 2}))


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 3.0])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_p": 0.5, "min_p": 0.3}, {"min_p": 0.02}])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draw_of_many_is_that_of_the_definition(
    spread: float, options: dict[str, Any], temperature: float
) -> None:
    """At given random numbers: sort everything in float64, cut, and walk the running sum in order of ids."""
    logits = (np.random.default_rng(6).normal(size=5_000) * spread).astype(np.float32)
    logits[17] = -np.inf
    exact = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-logits, kind="stable")
    kept = np.zeros(5_000, bool)
    top_p, min_p = options.get("top_p", 1.0), options.get("min_p", 0.0)
    sums = np.cumsum(exact[order]) / exact.sum()
    kept[order[: np.searchsorted(sums, top_p) + 1] if top_p < 1 else order] = True
    kept &= exact >= min_p
    weights = np.where(kept, exact ** (1 / temperature), 0)
    running = np.cumsum(weights) / weights.sum()
    sampler = Sampler(Sampling(**{**OPEN, "temperature": temperature, **options}), 5_000)
    if top_p < 1 and kept.sum() < 255:
        pytest.skip("few are left: another way through the code, drawn in order of probability")
    for part in np.random.default_rng(8).random(300):
        sampler._random.random = lambda part=part: part  # type: ignore[method-assign]
        found = sampler.sample(logits)
        wanted = int(np.searchsorted(running, part, side="right"))
        assert weights[found] > 0 or abs(found - wanted) <= 2
        # float32 weights move the walk by a few parts in ten million.
        low, high = np.searchsorted(running, [part - 2e-5, part + 2e-5], side="right")
        assert low <= found <= high


@pytest.mark.parametrize("part", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("count", [1, 3, 1024, 2048, 5_000])
def test_draw_at_either_end_has_weight(part: float, count: int) -> None:
    weights = np.zeros(count, np.float32)
    weights[count // 2] = 0.1
    weights[count // 3] = 0.3
    assert weights[_draw(weights, part)] > 0
    assert _draw(weights, part) == (count // 3 if part == 0 else count // 2)


@pytest.mark.parametrize("options", [{}, {"top_k": 0}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}])
@pytest.mark.parametrize("temperature", [1e-320, 1e-38, 1e-7, 1e-6])
def test_almost_no_temperature_is_greedy_and_warns_of_nothing(temperature: float, options: Any) -> None:
    """Broke: the gaps divided by 1e-320 overflow."""
    logits = np.linspace(-1e4, 1e4, 2000, dtype=np.float32)
    for seed in range(5):
        assert Sampler(Sampling(temperature=temperature, seed=seed, **options), 2000).sample(logits) == 1999
