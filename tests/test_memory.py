"""The process's own memory, as the system counts it."""

from __future__ import annotations

import subprocess
import sys

from spile import memory


def test_what_is_held_shows_and_the_peak_stays() -> None:
    before = memory.current_memory_bytes()
    block = bytearray(b"x" * 80_000_000)
    held = memory.current_memory_bytes()
    del block
    assert held - before > 60_000_000
    assert memory.peak_memory_bytes() >= held
    assert memory.current_memory_bytes() < held - 60_000_000


def test_small_blocks_that_are_freed_go_back_to_the_system() -> None:
    """Blocks too small to be mapped each for itself, with one that lives on at the end of the heap."""
    code = """
import ctypes, sys
from spile import memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(50_000) for _ in range(1600)]
for block in blocks:
    ctypes.memset(block, 1, 50_000)
last = libc.malloc(50_000)
for block in blocks:
    libc.free(block)
held = memory.current_memory_bytes()
memory.trim()
print(held - memory.current_memory_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if sys.platform.startswith("linux"):
        assert int(done.stdout) > 60_000_000


def test_systems_without_proc_are_asked_otherwise() -> None:
    assert memory._psutil_resident_bytes() > 1_000_000
    assert memory._rusage_peak_bytes() > 1_000_000
