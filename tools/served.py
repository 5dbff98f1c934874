"""A `spile serve` process of one's own for as long as a block, and what it takes of the machine. For the tools beside
it; Linux, as it reads /proc.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MEMORY_V1, _MEMORY_V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Served:
    """A server that runs. `log` is what it wrote so far."""

    def __init__(self, process: subprocess.Popen[str], group: Path | None) -> None:
        self.process = process
        self.group = group
        self.log: list[str] = []
        self.port = 0
        self.exit_code: int | None = None

    def send(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Send a request; return status and JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
            connection.request(method, path, data, {"content-type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def usage(self) -> dict[str, int]:
        """Return resident and peak bytes, threads and open files of the process, as the kernel has them."""
        folder = Path(f"/proc/{self.process.pid}")
        status = dict(
            line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
        )
        return {
            "resident_bytes": int(status["VmRSS"].split()[0]) * 1024,
            "peak_bytes": int(status["VmHWM"].split()[0]) * 1024,
            "threads": int(status["Threads"]),
            "files": len(os.listdir(folder / "fd")),
        }

    def forget_charged(self) -> None:
        """Begin anew to look for the most that is charged; where the kernel can (version 1)."""
        if self.group is not None and (self.group / "memory.max_usage_in_bytes").exists():
            (self.group / "memory.max_usage_in_bytes").write_text("0")

    def charged_bytes(self) -> int | None:
        """Return the most that the control group was charged; None without one."""
        if self.group is None:
            return None
        names = ("memory.max_usage_in_bytes", "memory.peak")
        return next((int((self.group / n).read_text()) for n in names if (self.group / n).exists()), None)


@contextmanager
def served(flags: Sequence[str], *, group_bytes: int | None = None) -> Iterator[Served]:
    """Run `spile serve` with these flags on a free port, inside of a control group with a hard limit where one is
    given (needs root). Raises RuntimeError where it does not get ready.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server goes too
    group = None if group_bytes is None else _make_group(group_bytes)
    process = subprocess.Popen(
        [sys.executable, "-m", "spile", "serve", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=None if group is None else lambda: _enter(group),
    )
    server = Served(process, group)
    assert process.stderr is not None, "it was asked for"
    ready = threading.Event()
    reader = threading.Thread(target=_read, args=(server, ready), daemon=True)
    reader.start()
    try:
        ready.wait(600)
        if process.poll() is not None or not server.port:
            raise RuntimeError("the server did not start: " + " ".join(server.log))
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        server.exit_code = process.wait(30)
        reader.join(5)
        process.stderr.close()
        if group is not None:
            group.rmdir()


def _read(server: Served, ready: threading.Event) -> None:
    assert server.process.stderr is not None, "it was asked for"
    for line in server.process.stderr:
        server.log.append(line.rstrip())
        if line.startswith("listening"):
            server.port = int(line.split(",")[0].rsplit(":", 1)[1])
        if line.startswith("ready"):
            ready.set()
    ready.set()


def _make_group(nbytes: int) -> Path:
    is_v2 = (_MEMORY_V2 / "cgroup.controllers").exists()
    group = (_MEMORY_V2 if is_v2 else _MEMORY_V1) / f"spile-{os.getpid()}"
    group.mkdir()
    (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(nbytes))
    return group


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
