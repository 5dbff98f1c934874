"""Log-probabilities against their definition in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spile.generation.logprobs import measure


@pytest.mark.parametrize("num_entries", [5, 300, 20_000])
@pytest.mark.parametrize("offset", [0.0, 500.0, -500.0])
def test_they_are_the_log_of_the_softmax(num_entries: int, offset: float) -> None:
    logits = (np.random.default_rng(1).normal(size=num_entries) * 3 + offset).astype(np.float32)
    exact = logits.astype(np.float64)
    exact = exact - exact.max()
    exact = exact - math.log(np.exp(exact).sum())
    found = measure(logits, 3, 4, num_entries)
    assert found.token_id == 3
    assert found.logprob == pytest.approx(exact[3], abs=1e-4)
    order = np.argsort(-exact, kind="stable")[:4]
    assert [one.token_id for one in found.top] == order.tolist()
    assert [one.logprob for one in found.top] == pytest.approx(exact[order].tolist(), abs=1e-4)


def test_probabilities_worked_out_by_hand() -> None:
    logits = np.log(np.array([1 / 4, 1 / 8, 1 / 2, 1 / 8], np.float32))
    found = measure(logits, 1, 2, 4)
    assert math.exp(found.logprob) == pytest.approx(1 / 8)
    assert [(one.token_id, round(math.exp(one.logprob), 6)) for one in found.top] == [(2, 0.5), (0, 0.25)]


def test_equals_go_by_id_and_rows_past_the_last_entry_are_left_out() -> None:
    logits = np.array([0, 0, 0, 90], np.float32)
    found = measure(logits, 2, 10, 3)
    assert [one.token_id for one in found.top] == [0, 1, 2]
    assert found.logprob == pytest.approx(math.log(1 / 3))
    assert measure(logits, 0, 0, 3).top == ()


def test_excluded_tokens_are_minus_infinity_and_no_error() -> None:
    found = measure(np.array([0, -np.inf], np.float32), 0, 2, 2)
    assert found.logprob == 0
    assert found.top[1].logprob == -math.inf
