"""Turns positions into the cosines and sines by which RoPE turns heads, with the same bits on every machine.

libm's powers and sines differ from one C library to the next, and NumPy's from one processor to the next. Here they
are sums and products of float64, each rounded as IEEE says, and only the result is rounded to float32.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from spile.architectures.spec import Rope

_BLOCK = 256  # positions that are made at a time: a decoded token then costs a look-up
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)  # their sum


class RopeTable:
    """The rows of one `Rope`, R/2 cosines and then R/2 sines a position; no columns without one."""

    def __init__(self, rope: Rope | None) -> None:
        self._frequencies = frequencies(rope) if rope is not None else np.zeros(0)
        self._first, self._block = 0, self._rows(0, _BLOCK)

    def rows(self, position: int, num: int) -> NDArray[np.float32]:
        """Return the rows of positions [position, position + num), [num, R]."""
        if num > _BLOCK:
            return self._rows(position, num)
        start = position - self._first
        if not 0 <= start <= _BLOCK - num:
            self._first, start = position, 0
            self._block = self._rows(position, _BLOCK)
        return self._block[start : start + num]

    def _rows(self, position: int, num: int) -> NDArray[np.float32]:
        angles = np.arange(position, position + num, dtype=np.float64)[:, None] * self._frequencies
        sines, cosines = _sin_cos(angles)
        return np.concatenate([cosines, sines], axis=1).astype(np.float32)


def frequencies(rope: Rope) -> NDArray[np.float64]:
    """Return the angle a position adds to each pair, [R/2]: theta^(-2i/R)."""
    log_theta = _log(rope.theta)
    return np.array([_exp(-2.0 * i / rope.dims * log_theta) for i in range(rope.dims // 2)], np.float64)


def _exp(x: float) -> float:
    """e^x for |x| < 700: 2^n times Taylor's series to r^17, |r| <= ln2/2."""
    n = math.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    term = total = 1.0
    for i in range(1, 18):
        term = term * r / i
        total += term
    return math.ldexp(total, n)


def _log(x: float) -> float:
    """The natural logarithm of x > 0: x = m * 2^e, the series of atanh for m in [0.7, 1.4]."""
    m, e = math.frexp(x)
    if m < 0.70710678118654752:
        m, e = 2.0 * m, e - 1
    z = (m - 1.0) / (m + 1.0)
    power, total = z, 0.0
    for i in range(1, 42, 2):
        total += power / i
        power *= z * z
    return 2.0 * total + e * 6.93147180559945286227e-01


def _sin_cos(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sines and cosines of |x| < 2^20 or so: pi/2 taken off in three parts, then Taylor's series."""
    n = np.floor(x * 0.63661977236758134308 + 0.5)
    r = x
    for part in _HALF_PI:
        r = r - n * part
    r2 = r * r
    s = c = np.zeros_like(r)
    for i in range(10, 0, -1):
        s = r2 / ((2.0 * i) * (2.0 * i + 1.0)) * (1.0 - s)
        c = r2 / ((2.0 * i - 1.0) * (2.0 * i)) * (1.0 - c)
    s, c = r * (1.0 - s), 1.0 - c
    quarter = n.astype(np.int64) & 3
    return np.choose(quarter, [s, c, -s, -c]), np.choose(quarter, [c, -s, -c, s])
