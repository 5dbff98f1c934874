"""The engine against two independent implementations on a tiny Maple: golden logits (float32) and
`reference.py` (float64)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import spile
from reference import Reference
from spile.architectures import open_own
from spile.engines import open_engine
from spile.files.checkpoint import open_checkpoint
from spile.making.convert import convert_folder
from spile.options import EngineOptions

# Two bytes an activation are within 4e-3 of float64 on this model, and the golden logits are float32: 8e-3
# leaves room for both. For scale: a window off by one, a missing clamp or full instead of half RoPE changes
# logits by 0.4 to 11.
TOLERANCE = 8e-3
THREE_BYTE_TOLERANCE = 1e-4  # measured 1e-5 to 2e-5, float32 norms and attention included


@pytest.fixture(scope="module", params=["mlx-2bit", "bf16"])
def folder(
    request: pytest.FixtureRequest, golden: Path, golden_bf16: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The model in either layout; both hold the same numbers."""
    if request.param == "mlx-2bit":
        return golden / "mlx-2bit"
    converted = tmp_path_factory.mktemp("golden") / "converted"
    convert_folder(golden_bf16, converted)
    return converted


@pytest.fixture(scope="module")
def exact(golden: Path) -> dict[int, NDArray[np.float64]]:
    reference = Reference(golden / "mlx-2bit")
    return {n: reference.logits(np.load(golden / f"ids{n}.npy")) for n in (5, 60)}


def compare(name: str, found: NDArray[Any], wanted: NDArray[Any], tolerance: float) -> None:
    """Compare logits [T, V] at every position, and the choice that greedy decoding makes of them."""
    assert found.shape == wanted.shape
    assert found.dtype == np.float32
    worst = float(np.abs(found - wanted).max())
    print(f"{name}: largest difference {worst:.1e}, allowed {tolerance:.0e}")
    assert worst <= tolerance
    np.testing.assert_array_equal(found.argmax(-1), wanted.argmax(-1))


def test_reference_agrees_with_golden_logits(golden: Path, exact: dict[int, NDArray[np.float64]]) -> None:
    for n, logits in exact.items():
        worst = np.abs(logits - np.load(golden / f"logits_{n}.npy")).max()
        print(f"float64 reference, {n} tokens: largest difference {worst:.1e}")
        assert worst < 5e-5  # measured 1.9e-5: float32 against float64


@pytest.mark.parametrize("n", [5, 60])
def test_one_batch_is_within_tolerance(
    n: int, folder: Path, golden: Path, exact: dict[int, NDArray[np.float64]]
) -> None:
    with spile.load(folder, kv_bits=32) as model:
        logits = model.logits(np.load(golden / f"ids{n}.npy").tolist())
    compare(f"{n} tokens, golden", logits, np.load(golden / f"logits_{n}.npy"), TOLERANCE)
    compare(f"{n} tokens, float64", logits, exact[n], TOLERANCE)


def test_token_by_token_is_within_tolerance_and_equals_one_batch(
    folder: Path, golden: Path, exact: dict[int, NDArray[np.float64]]
) -> None:
    ids = np.load(golden / "ids60.npy").tolist()
    engine = open_engine(open_own(open_checkpoint(folder)), EngineOptions(kv_bits=32))
    state = engine.new_state()
    rows = [engine.prefill(state, ids[:1]).copy()]
    rows += [engine.decode(state, token).copy() for token in ids[1:]]
    state.close()
    state = engine.new_state()
    batch = engine.logits(state, ids)
    engine.close()
    compare("token by token, golden", np.stack(rows), np.load(golden / "logits_60.npy"), TOLERANCE)
    compare("token by token, float64", np.stack(rows), exact[60], TOLERANCE)
    np.testing.assert_array_equal(np.stack(rows), batch)


def test_three_bytes_are_a_hundred_times_closer(
    folder: Path, golden: Path, exact: dict[int, NDArray[np.float64]]
) -> None:
    with spile.load(folder, kv_bits=32, activation_bytes=3) as model:
        logits = model.logits(np.load(golden / "ids60.npy").tolist())
    compare("three bytes, float64", logits, exact[60], THREE_BYTE_TOLERANCE)


def test_half_precision_kv_is_close(
    folder: Path, golden: Path, exact: dict[int, NDArray[np.float64]]
) -> None:
    with spile.load(folder) as model:
        logits = model.logits(np.load(golden / "ids60.npy").tolist())
    worst, typical = np.abs(logits - exact[60]).max(), np.abs(logits - exact[60]).mean()
    print(f"FP16 KV, float64: largest difference {worst:.1e}, mean {typical:.1e}")
    assert typical < 0.05  # of logits with a standard deviation of 2.3; the model magnifies small changes


def test_both_layouts_give_the_same_bits(golden: Path, golden_bf16: Path, tmp_path: Path) -> None:
    convert_folder(golden_bf16, tmp_path / "converted")
    ids = np.load(golden / "ids60.npy").tolist()
    with spile.load(golden / "mlx-2bit") as one, spile.load(tmp_path / "converted") as other:
        np.testing.assert_array_equal(one.logits(ids), other.logits(ids))
