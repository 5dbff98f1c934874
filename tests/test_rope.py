"""Cosines and sines of positions: the values themselves, and the same bits however they are asked for."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from spile.architectures.spec import Rope
from spile.engines.cpu.rope import RopeTable


@pytest.mark.parametrize(
    ("dims", "theta", "sha256"),
    [  # as the core's own C++ computed them, before the tables were made here
        (32, 1e4, "56476558c877864a"),
        (64, 1e4, "09de81c85793dd19"),
        (64, 1e6, "1585760cf8f2f373"),
        (32, 5e5, "b707eb7356ab53fc"),
        (32, 37.5, "c47b5cbc4f300154"),
    ],
)
def test_rows_of_1024_positions_have_the_recorded_bits(dims: int, theta: float, sha256: str) -> None:
    rows = RopeTable(Rope(dims, theta)).rows(0, 1024)
    assert hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()[:16] == sha256


def test_rows_are_cosines_then_sines_of_position_times_frequency() -> None:
    rows = RopeTable(Rope(64, 1e6)).rows(40_000, 3)
    angles = np.arange(40_000, 40_003)[:, None] * 1e6 ** (-2.0 * np.arange(32) / 64)
    np.testing.assert_allclose(rows[:, :32], np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(rows[:, 32:], np.sin(angles), atol=1e-7)


def test_a_row_is_the_same_alone_in_any_order_and_in_a_chunk() -> None:
    rope = Rope(32, 1e4)
    whole, table = RopeTable(rope).rows(0, 2000), RopeTable(rope)
    for position in (0, 255, 256, 1999, 3, 700):
        assert table.rows(position, 1).tobytes() == whole[position].tobytes()
    assert table.rows(650, 200).tobytes() == whole[650:850].tobytes()


def test_without_rotation_rows_have_no_columns() -> None:
    assert RopeTable(None).rows(7, 3).shape == (3, 0)
