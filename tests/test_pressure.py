"""The budget is the process's, whatever is asked of it and whatever happens to it: sampled from outside the
engine, in a process of its own (tests/pressure.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spile.making.synth import SynthShape, write_checkpoint

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

PROGRAM = Path(__file__).with_name("pressure.py")
# 64 MB of experts, in 256 of 258 kB; the rest is small.
SHAPE = SynthShape(
    hidden_size=512,
    num_hidden_layers=4,
    num_experts=64,
    num_experts_per_tok=2,
    moe_intermediate_size=640,
    sliding_window=64,
    vocab_size=323,
    max_position_embeddings=1024,
)
BUDGET = 88_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pressure") / "model"
    write_checkpoint(folder, SHAPE, seed=3)
    return folder


def start(folder: Path, budget: int | str, scenario: str, group: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), str(folder), str(budget), scenario]
    if group is not None:
        command = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def result_of(process: subprocess.Popen[str], told: str = "") -> dict[str, Any]:
    out, err = process.communicate(told, timeout=60)
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    print(result)
    return result


def ran(folder: Path, budget: int | str, scenario: str) -> dict[str, Any]:
    return result_of(start(folder, budget, scenario), "\n")


def check_kept(result: dict[str, Any], budget: int) -> None:
    assert result["VmHWM"] <= budget
    assert result["RssAnon"] <= budget
    assert result["VmSwap"] == 0
    assert result["experts_over_plan"] <= 0


def test_closed_model_gives_its_memory_back(folder: Path) -> None:
    result = ran(folder, BUDGET, "closed")
    for full, after in zip(result["full"], result["after"], strict=True):
        assert full - after > 40_000_000, "a pool of 64 MB"
    assert max(result["after"]) - min(result["after"]) < 5_000_000


def test_prompts_with_other_experts_each_stay_in_the_budget_and_exact(folder: Path) -> None:
    """Elsewhere a second prompt doubled what was resident."""
    result = ran(folder, BUDGET, "disjoint")
    check_kept(result, BUDGET)
    assert min(result["asked"]) >= 16
    assert result["common"] <= 4
    assert "experts resident" in result["summary"]
    assert result["answers"] == ran(folder, "all", "disjoint")["answers"]


def test_pool_that_shrinks_in_the_middle_of_an_answer_gives_memory_back_and_changes_nothing(
    folder: Path,
) -> None:
    result = ran(folder, BUDGET, "resized")
    check_kept(result, BUDGET)
    full, shrunk, small, grown = result["anonymous"]
    assert full - shrunk >= 0.9 * result["to_free"] > 4_000_000
    assert small <= shrunk + 4_000_000  # it does not fill up again
    assert grown <= full
    assert result["ids"] == ran(folder, "all", "waiting")["ids"]


def test_second_run_reads_nothing_from_the_disk_where_memory_is_free(folder: Path) -> None:
    """Elsewhere pages were dropped after each read, and every miss came from the disk."""
    ran(folder, BUDGET, "disjoint")
    second = ran(folder, BUDGET, "disjoint")
    assert "reads buffered" in second["summary"]
    assert second["from_disk"] <= 1_000_000
    assert second["VmSwap"] == 0


# -- control groups --


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of our own that limits memory; skips where none can be made."""
    version1 = Path("/sys/fs/cgroup/memory")
    parent = version1 if version1.is_dir() else Path("/sys/fs/cgroup")
    path = parent / f"spile-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error}")
    try:
        if not _limit_file(path).exists():
            pytest.skip("control groups do not limit memory here")
        yield path
    finally:
        path.rmdir()


def _limit_file(group: Path) -> Path:
    version2 = group / "memory.max"
    return version2 if version2.exists() else group / "memory.limit_in_bytes"


def num_kills(group: Path) -> int:
    version2 = group / "memory.events"
    path = version2 if version2.exists() else group / "memory.oom_control"
    return next(
        int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("oom_kill ")
    )


def test_limit_that_is_lowered_to_the_budget_in_the_middle_of_an_answer_kills_nothing(
    folder: Path, group: Path
) -> None:
    """The page cache that the group held goes; the answer does not change."""
    _limit_file(group).write_text(str(4 * BUDGET))
    process = start(folder, BUDGET, "waiting", group)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    _limit_file(group).write_text(str(BUDGET))
    result = result_of(process, "\n")
    assert num_kills(group) == 0
    check_kept(result, BUDGET)
    assert result["ids"] == ran(folder, "all", "waiting")["ids"]


def test_memory_taken_by_others_in_the_group_kills_nothing(folder: Path, group: Path) -> None:
    """Another process fills what the budget leaves of the group's limit, and the file cache has to go."""
    other_nbytes = 100_000_000
    _limit_file(group).write_text(str(BUDGET + other_nbytes + 30_000_000))
    process = start(folder, BUDGET, "waiting", group)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    hog = subprocess.Popen(
        ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), sys.executable, "-c",
         f"data = bytearray(b'1') * {other_nbytes}; print('full', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert hog.stdout is not None
    assert hog.stdout.readline() == "full\n"
    result = result_of(process, "\n")
    hog.communicate("\n", timeout=20)
    assert num_kills(group) == 0
    check_kept(result, BUDGET)
    assert result["ids"] == ran(folder, "all", "waiting")["ids"]


def test_group_that_is_smaller_than_the_floor_is_told_in_one_sentence_before_anything_is_loaded(
    folder: Path, group: Path
) -> None:
    limit = 40_000_000
    _limit_file(group).write_text(str(limit))
    process = start(folder, BUDGET, "waiting", group)
    _, err = process.communicate("\n", timeout=60)
    assert process.returncode == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("spile.errors.BudgetError:")
    assert "the control group, which allows 40.0 MB, leaves" in last
    assert num_kills(group) == 0


def test_budget_beyond_what_the_group_allows_is_refused_with_one_that_fits(folder: Path, group: Path) -> None:
    _limit_file(group).write_text("60000000")
    process = start(folder, BUDGET, "waiting", group)
    _, err = process.communicate("\n", timeout=60)
    assert process.returncode == 1
    last = err.strip().splitlines()[-1]
    assert "the budget of 88.0 MB takes" in last
    assert num_kills(group) == 0
