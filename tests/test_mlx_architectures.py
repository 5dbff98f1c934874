"""Every architecture of the installed mlx-lm that has experts: streamed equals resident, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", exc_type=ImportError)

from mlx_architectures import find_architectures
from mlx_check import check_architecture

ROOT = Path(__file__).parent.parent
# What this machine cannot run at all; anything else has to stream.
CANNOT = {"muse_spark": "Metal kernel", "prism_hadamard_qwen35": "no tiny config"}


@pytest.mark.parametrize("name", find_architectures())
def test_an_architecture_streams_exactly_with_few_slots_and_with_all(name: str) -> None:
    found = check_architecture(name)
    if isinstance(found, str):
        assert CANNOT.get(name, "\0") in found, found
        return
    few, every = found
    assert (few.prefill, few.decode) == (True, True), "few slots"
    assert (every.prefill, every.decode) == (True, True), "a slot for each expert"
    assert few.evictions > 10, "the routing touches more experts than there are slots"
    assert every.evictions == 0


def test_at_least_thirty_architectures_stream() -> None:
    assert sum(not isinstance(check_architecture(name), str) for name in find_architectures()) >= 30


def test_the_table_in_the_docs_is_what_was_found() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from write_mlx_table import page
    finally:
        sys.path.pop(0)
    assert (ROOT / "docs/mlx.md").read_text() == page(), "run python tools/write_mlx_table.py"
