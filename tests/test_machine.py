"""What the process may use, seen through made-up control groups of both versions."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from spile import machine

GIB = 1 << 30
MACHINE_AVAILABLE = 20 * GIB


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for /sys/fs/cgroup, on a machine with 20 GiB available."""
    root = tmp_path / "cgroup"
    root.mkdir()
    monkeypatch.setattr(machine, "CGROUPS", root)
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=MACHINE_AVAILABLE))
    return root


def belong(root: Path, text: str) -> None:
    (root.parent / "own").write_text(text)


def group_v2(folder: Path, limit: str, current: int = 0, file_cache: int = 0, cpu: str | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    active = file_cache // 3
    stat = f"anon {current - file_cache}\nfile {file_cache}\nactive_file {active}\n"
    (folder / "memory.stat").write_text(stat + f"inactive_file {file_cache - active}\nworkingset 1\n")
    if cpu is not None:
        (folder / "cpu.max").write_text(f"{cpu}\n")


def root_v2(root: Path) -> None:
    (root / "cgroup.controllers").write_text("cpu memory\n")
    belong(root, "0::/a/b/c\n")


def group_v1(folder: Path, limit: int, usage: int, file_cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    stat = f"cache 1\nactive_file 1\ntotal_active_file {file_cache}\ntotal_inactive_file 0\n"
    (folder / "memory.stat").write_text(stat)


def test_without_groups_the_machine_decides(root: Path) -> None:
    assert machine.available_memory_bytes() == MACHINE_AVAILABLE
    assert machine.memory_limit_bytes() is None


def test_file_cache_of_the_group_can_be_reclaimed(root: Path) -> None:
    root_v2(root)
    group_v2(root / "a/b/c", str(GIB), current=1000 << 20, file_cache=900 << 20)
    assert machine.memory_limit_bytes() == GIB
    assert machine.available_memory_bytes() == GIB - (100 << 20)


def test_tightest_of_the_parents_counts(root: Path) -> None:
    """A pod's limit may lie above the container's own group, which says max."""
    root_v2(root)
    group_v2(root / "a/b/c", "max", current=10 << 20)
    group_v2(root / "a/b", str(3 * GIB), current=2 * GIB)
    group_v2(root / "a", str(2 * GIB), current=GIB // 2)
    assert machine.memory_limit_bytes() == 2 * GIB
    assert machine.available_memory_bytes() == GIB  # 3 - 2 in b is less than 2 - 0.5 in a


def test_group_of_a_container_that_is_its_own_root(root: Path) -> None:
    (root / "cgroup.controllers").write_text("memory\n")
    belong(root, "0::/\n")
    group_v2(root, str(GIB), current=GIB // 4)
    assert machine.available_memory_bytes() == GIB * 3 // 4


def test_group_that_is_not_visible_from_inside_is_looked_for_above(root: Path) -> None:
    """Docker on version 1 names the host's path, and mounts the container's own group as the root."""
    belong(root, "12:memory:/docker/0123abc\n3:cpu,cpuacct:/docker/0123abc\n1:name=systemd:/x\n")
    group_v1(root / "memory", GIB, GIB // 2, GIB // 4)
    assert machine.memory_limit_bytes() == GIB
    assert machine.available_memory_bytes() == GIB * 3 // 4


def test_version_1_groups_and_their_parents(root: Path) -> None:
    belong(root, "4:memory:/slice/job\n0::/\n")
    group_v1(root / "memory/slice/job", 9223372036854771712, 5 * GIB, 0)  # its way to say none
    group_v1(root / "memory/slice", 6 * GIB, 5 * GIB, 2 * GIB)
    group_v1(root / "memory", 9223372036854771712, 9 * GIB, 0)
    assert machine.memory_limit_bytes() == 6 * GIB
    assert machine.available_memory_bytes() == 3 * GIB


def test_limit_above_what_the_machine_has_changes_nothing(root: Path) -> None:
    root_v2(root)
    group_v2(root / "a/b/c", str(500 * GIB), current=GIB)
    assert machine.available_memory_bytes() == MACHINE_AVAILABLE


def test_group_over_its_limit_leaves_nothing(root: Path) -> None:
    root_v2(root)
    group_v2(root / "a/b/c", str(GIB), current=2 * GIB)
    assert machine.available_memory_bytes() == 0


def test_limit_counts_where_the_statistics_cannot_be_read(root: Path) -> None:
    """Regression: without memory.stat the limit was overlooked."""
    root_v2(root)
    group_v2(root / "a/b/c", str(GIB), current=GIB // 4, file_cache=GIB // 8)
    (root / "a/b/c/memory.stat").write_text("what\nis this\n")
    assert machine.available_memory_bytes() == GIB * 3 // 4
    (root / "a/b/c/memory.stat").unlink()
    assert machine.available_memory_bytes() == GIB * 3 // 4


@pytest.mark.parametrize("text", ["", "many\n", "-3\n1"])
def test_damaged_group_files_are_passed_over(root: Path, text: str) -> None:
    root_v2(root)
    group_v2(root / "a/b/c", "max")
    (root / "a/b/c/memory.max").write_text(text)
    (root / "a/b/c/cpu.max").write_text(text)
    group_v2(root / "a", str(GIB))
    assert machine.available_memory_bytes() == GIB
    assert machine.physical_cores() >= 1


def processors(root: Path, monkeypatch: pytest.MonkeyPatch, siblings: list[str], allowed: set[int]) -> None:
    monkeypatch.setattr(machine, "CPUS", root.parent / "cpus")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    for cpu, text in enumerate(siblings):
        folder = root.parent / f"cpus/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")


def test_two_threads_of_a_core_count_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processors(root, monkeypatch, ["0,4", "1,5", "2,6", "3,7"] * 2, set(range(8)))
    assert machine.physical_cores() == 4


def test_only_processors_allowed_to_the_process_count(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processors(root, monkeypatch, ["0,4", "1,5", "2,6", "3,7"] * 2, {1, 2, 5})
    assert machine.physical_cores() == 2


def test_processors_without_topology_count_each(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processors(root, monkeypatch, [], {0, 1, 2})
    assert machine.physical_cores() == 3


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("900000 100000", 8),
    ],
)
def test_quota_of_processor_time_bounds_the_cores(
    root: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    processors(root, monkeypatch, [str(n) for n in range(8)], set(range(8)))
    root_v2(root)
    group_v2(root / "a/b/c", "max", cpu=quota)
    assert machine.physical_cores() == cores


def test_tightest_quota_of_the_parents_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the innermost quota was taken, and a parent's smaller one overlooked."""
    processors(root, monkeypatch, [str(n) for n in range(8)], set(range(8)))
    root_v2(root)
    group_v2(root / "a/b/c", "max", cpu="600000 100000")
    group_v2(root / "a", "max", cpu="300000 100000")
    assert machine.physical_cores() == 3


def test_quota_of_version_1(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processors(root, monkeypatch, [str(n) for n in range(8)], set(range(8)))
    belong(root, "3:cpu,cpuacct:/job\n")
    folder = root / "cpu,cpuacct/job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("250000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.physical_cores() == 3
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine.physical_cores() == 8


def test_this_machine_has_cores_and_memory() -> None:
    assert 1 <= machine.physical_cores() <= (os.cpu_count() or 1)
    assert machine.available_memory_bytes() > 0
    limit = machine.memory_limit_bytes()
    assert limit is None or limit > 0
