"""Says what this machine lets the process use: cores and memory, control groups included.

It does not decide what to do with them; `plan.py` does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
CPUS = Path("/sys/devices/system/cpu")
CPUINFO = Path("/proc/cpuinfo")
_UNLIMITED = 2**60  # version 1 writes "no limit" as a number just below 2**63


def describe_machine() -> dict[str, str | int]:
    """Name this machine in a record: processor, cores, bytes of memory, system. Touches /proc."""
    import platform

    import psutil

    return {
        "cpu": _cpu_name() or platform.processor() or platform.machine(),
        "cores": physical_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "os": f"{platform.platform()}, Python {platform.python_version()}",
    }


def physical_cores() -> int:
    """Count the physical cores that this process may run on, at least 1. Touches /sys."""
    if sys.platform == "darwin":
        return _darwin_cores()
    allowed = sorted(os.sched_getaffinity(0))
    cores = set()
    for cpu in allowed:
        path = CPUS / f"cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(path.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    count = len(cores)
    quota = _cpu_quota()
    return max(1, min(count, quota) if quota else count)


def available_memory_bytes() -> int:
    """Return the bytes that this process could still take without pushing anything out to swap.

    The machine's available memory, or what a control group (version 1 or 2) leaves below its limit if that is
    less; file cache in the group counts as reclaimable.
    """
    import psutil

    available = int(psutil.virtual_memory().available)
    group = _cgroup_memory_left()
    return available if group is None else max(0, min(available, group))


def memory_limit_bytes() -> int | None:
    """Return the limit of the innermost limiting control group; None where there is none."""
    limits = [limit for limit, _ in _cgroup_memory()]
    return min(limits, default=None)


def _darwin_cores() -> int:
    try:  # performance cores: the efficiency cores would hold every loop's end back
        return max(1, int(_sysctl("hw.perflevel0.physicalcpu")))
    except ValueError:
        return max(1, os.cpu_count() or 1)


def _cpu_name() -> str:
    """Return the processor's own name; empty where it has none."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string")
    try:
        lines = CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _sysctl(name: str) -> str:
    import subprocess

    try:
        found = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def _cpu_quota() -> int | None:
    """Return the cores' worth of time of the tightest group, rounded up."""
    quotas = []
    for folder in _cgroup_folders("cpu"):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
            if quota not in ("max", "-1"):
                quotas.append(max(1, -(-int(quota) // int(period))))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(quotas, default=None)


def _cgroup_folders(controller: str) -> list[Path]:
    """List this process's control-group folders for a controller, innermost first, up to the root."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "unified"
        elif controller in controllers.split(","):
            root = next((p for p in (CGROUPS / controllers, CGROUPS / controller) if p.exists()), CGROUPS)
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            if folder.exists():
                folders.append(folder)
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent
    return folders


def _cgroup_memory() -> list[tuple[int, int]]:
    """List (limit, bytes in use that cannot be reclaimed) of each limiting group."""
    found = []
    for folder in _cgroup_folders("memory"):
        v2 = (folder / "memory.max").exists()
        try:
            text = (folder / ("memory.max" if v2 else "memory.limit_in_bytes")).read_text().strip()
            if text == "max" or int(text) >= _UNLIMITED:
                continue
            used = int((folder / ("memory.current" if v2 else "memory.usage_in_bytes")).read_text())
            found.append((int(text), max(0, used - _cached(folder / "memory.stat", v2))))
        except (OSError, ValueError):
            continue
    return found


def _cached(path: Path, v2: bool) -> int:
    """Return the bytes of file cache that a group's memory.stat counts; 0 where it cannot be read."""
    keys = ("active_file", "inactive_file") if v2 else ("total_active_file", "total_inactive_file")
    try:
        stat = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return sum(int(stat.get(key, 0)) for key in keys)
    except (OSError, ValueError):
        return 0


def _cgroup_memory_left() -> int | None:
    return min((limit - used for limit, used in _cgroup_memory()), default=None)
