"""The fixed-point arithmetic of ternary layers where it is weakest: entries that dwarf the rest, tiny
widths, odd numbers.

The bar is what rounding the activations to BF16 would cost. Fixed point shares one scale, so an outlier
coarsens the others; rows whose code at the outlier is zero show nothing but that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spile import _core

ISAS = list(_core.isas())
ROWS = 96


def layer(n: int, zero_at: NDArray[np.intp], seed: int = 1) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Return packed codes [ROWS, n / 16] with code 1 (value 0) at some inputs, and BF16 row alphas."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 3, (ROWS, n), dtype=np.uint32)
    codes[:, zero_at] = 1
    shifts = 2 * np.arange(16, dtype=np.uint32)
    packed = (codes.reshape(ROWS, n // 16, 16) << shifts).sum(-1, dtype=np.uint32)
    alphas = rng.uniform(0.5, 2.0, ROWS).astype(np.float32).view(np.uint32) >> 16
    return packed, alphas.astype(np.uint16)


def product(
    x: NDArray[np.float64], codes: NDArray[np.uint32], alphas: NDArray[np.uint16]
) -> NDArray[np.float64]:
    """Multiply in float64: [T, n] -> [T, ROWS]."""
    shifts = 2 * np.arange(16, dtype=np.uint32)
    values = ((codes[..., None] >> shifts) & 3).reshape(ROWS, -1).astype(np.float64) - 1.0
    values *= (alphas.astype(np.uint32) << 16).view(np.float32)[:, None]
    result: NDArray[np.float64] = x @ values.T
    return result


def round_to_bf16(x: NDArray[np.float32]) -> NDArray[np.float64]:
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


@pytest.mark.parametrize("n", [64, 80, 128, 2048])
@pytest.mark.parametrize("ratio", [1.0, 63.0, 100.0, 1000.0, 10_000.0])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.1])  # of the entries: 0 means one
def test_outliers_cost_no_more_than_rounding_to_bf16(n: int, ratio: float, share: float) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((8, n)).astype(np.float32)
    at = rng.choice(n, max(1, int(share * n)), replace=False)
    x[:, at] = ratio * np.sign(x[:, at])
    codes, alphas = layer(n, at)
    exact = product(x.astype(np.float64), codes, alphas)
    ours = np.abs(_core.ternary_linear(x, codes, alphas, 2, ISAS[0]) - exact)
    bf16 = np.abs(product(round_to_bf16(x), codes, alphas) - exact)
    print(f"n {n}, ratio {ratio:g}, {len(at)} outliers: {ours.mean():.1e}, with BF16 {bf16.mean():.1e}")
    assert ours.mean() <= bf16.mean()
    assert ours.max() <= bf16.max()


@pytest.mark.parametrize("activation_bytes", [2, 3])
@pytest.mark.parametrize("rows", [1, 3, 13, ROWS])
@pytest.mark.parametrize("n", [16, 48, 80, 128, 272, 2048])
def test_all_isas_and_numbers_of_tokens_give_the_same_bits(n: int, rows: int, activation_bytes: int) -> None:
    rng = np.random.default_rng(n)
    x = (rng.standard_normal((9, n)) * 10.0 ** rng.integers(-3, 3, (9, 1))).astype(np.float32)
    x[1] = 0.0
    x[2, 3] = 5e4
    codes, alphas = (part[:rows] for part in layer(n, np.array([3])))
    wanted = _core.ternary_linear(x, codes, alphas, activation_bytes, "scalar")
    for isa in ISAS:
        np.testing.assert_array_equal(_core.ternary_linear(x, codes, alphas, activation_bytes, isa), wanted)
        for row in range(len(x)):
            alone = _core.ternary_linear(x[row : row + 1], codes, alphas, activation_bytes, isa)
            np.testing.assert_array_equal(alone[0], wanted[row])


def test_code_three_is_twice_alpha() -> None:
    x = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
    codes = np.full((ROWS, 4), 0xFFFFFFFF, np.uint32)
    _, alphas = layer(64, np.array([0]))
    wanted = product(x.astype(np.float64), codes, alphas)
    for isa in ISAS:
        np.testing.assert_allclose(
            _core.ternary_linear(x, codes, alphas, 3, isa), wanted, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("isa", ISAS)
def test_zeros_and_tiny_numbers_give_zeros(isa: str) -> None:
    codes, alphas = layer(128, np.array([0]))
    x = np.zeros((3, 128), np.float32)
    x[1] = 1e-42  # denormal
    x[2] = 1e-36
    result = _core.ternary_linear(x, codes, alphas, 2, isa)
    np.testing.assert_array_equal(result[0], 0.0)
    np.testing.assert_allclose(result, product(x.astype(np.float64), codes, alphas), rtol=0, atol=1e-30)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_vector_that_is_not_finite_spoils_only_itself(isa: str, bad: float) -> None:
    codes, alphas = layer(128, np.array([], np.intp))
    x = np.random.default_rng(0).standard_normal((3, 128)).astype(np.float32)
    clean = _core.ternary_linear(x, codes, alphas, 2, isa)
    x[1, 70] = bad
    result = _core.ternary_linear(x, codes, alphas, 2, isa)
    assert not np.isfinite(result[1]).any()  # never a plausible number
    np.testing.assert_array_equal(result[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("isa", ISAS)
def test_largest_numbers_stay_within_float32(isa: str) -> None:
    codes, alphas = layer(2048, np.array([], np.intp))
    x = np.full((1, 2048), 1e30, np.float32)
    wanted = product(x.astype(np.float64), codes, alphas)
    found = _core.ternary_linear(x, codes, alphas, 2, isa)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e28)


def table(n: int, rows: int) -> tuple[list[NDArray[Any]], NDArray[np.float64], NDArray[np.float64]]:
    """Return 4-bit codes with BF16 scales and biases of groups of 64, the weights that they mean, and the
    sizes of the two terms whose rounding errors remain.
    """
    rng = np.random.default_rng(n)
    codes = rng.integers(0, 16, (rows, n), dtype=np.uint32)
    packed = (codes.reshape(rows, n // 8, 8) << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    scales, biases = rng.uniform(0.01, 0.1, (rows, n // 64)), rng.uniform(-1, 0, (rows, n // 64))
    halves = [(part.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for part in (scales, biases)]
    scale, bias = (
        np.repeat((half.astype(np.uint32) << 16).view(np.float32), 64, 1).astype(np.float64)
        for half in halves
    )
    return [packed, *halves], codes * scale.astype(np.float64) + bias, codes * scale.astype(np.float64) - bias


@pytest.mark.parametrize("rows", [1, 7, 37])
@pytest.mark.parametrize("n", [64, 128, 192, 320, 1088, 2048])
def test_four_bit_layer_is_right_and_the_same_on_all_isas(n: int, rows: int) -> None:
    layer, weights, sizes = table(n, rows)
    x = np.random.default_rng(rows).standard_normal((6, n)).astype(np.float32)
    x[2] *= 1e-4
    x[3, 5] = 3e3  # an outlier: a third byte
    x[4] = 0.0
    exact = x.astype(np.float64) @ weights.T
    size = np.abs(x).astype(np.float64) @ sizes.T + 1e-30
    for activation_bytes, tolerance in ((2, 1e-5), (3, 2e-7)):  # measured 3e-6 and 2e-8
        wanted = _core.affine4_linear(x, *layer, activation_bytes, "scalar")
        errors = np.max(np.abs(wanted - exact) / size, axis=1)
        print(f"{activation_bytes} bytes:", *(f"{error:.1e}" for error in errors))
        assert errors[3] < 1e-5  # the scale is the outlier's
        assert np.delete(errors, 3).max() < tolerance
        for isa in ISAS:
            np.testing.assert_array_equal(_core.affine4_linear(x, *layer, activation_bytes, isa), wanted)
            alone = [_core.affine4_linear(x[t : t + 1], *layer, activation_bytes, isa) for t in range(len(x))]
            np.testing.assert_array_equal(np.concatenate(alone), wanted)
