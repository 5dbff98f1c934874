"""A program on a pseudo-terminal of its own, driven key by key: what a person at a screen would do."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Keys:
    """Starts a command; `shown` is everything it wrote so far, escape codes included; `text` is that without
    the bottom line.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        rows: int = 24,
        columns: int = 80,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.shown = ""
        self._seen = 0  # of the text, by `wait`
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        self._ours, theirs = pty.openpty()
        self.resize(rows=rows, columns=columns)
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=self.folder,
            env={**os.environ, "TERM": "xterm", **(environment or {})},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, *, rows: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def text(self) -> str:
        return re.sub(r"\x1bD\x1b\[A|\x1b7.*?(\x1b8|\Z)", "", self.shown, flags=re.DOTALL)

    def wait(self, text: str, *, seconds: float = 15) -> None:
        """Read until this text was shown, after what was waited for last."""
        deadline = time.monotonic() + seconds
        while (at := self.text.find(text, self._seen)) < 0:
            left = deadline - time.monotonic()
            goes_on = left > 0 and self._read(left)
            assert goes_on, f"never showed {text!r}; since then: {self.text[self._seen :]!r}"
        self._seen = at + len(text)

    def wait_code(self, code: str, *, seconds: float = 15) -> None:
        """Read until this was sent, which may be an escape code or part of the bottom line."""
        deadline = time.monotonic() + seconds
        while code not in self.shown:
            left = deadline - time.monotonic()
            goes_on = left > 0 and self._read(left)
            assert goes_on, f"never sent {code!r}; all of it: {self.shown!r}"

    def end(self, *, seconds: float = 15) -> int:
        """Wait for the end and return the exit code."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._read(0.2):
            pass
        return self._process.wait(max(0.1, deadline - time.monotonic()))

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)
        self._temporary.cleanup()

    def _read(self, seconds: float) -> bool:
        """Read what comes within this time; False at the end."""
        ready, _, _ = select.select([self._ours], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


def _take_terminal() -> None:
    """Make the pseudo-terminal the one that Ctrl-C comes from."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
