"""Turns messages into the text that a chat template makes of them, within bounds of memory and time.

A template is a foreign program, and a line of it can fill any memory or compute for hours; so it runs in a process
of its own (`template_process.py`), which the system ends where it takes too much, and which ends with this one. It is
started with the first text, or earlier by `start`, and stays for the next ones: 11 MB of its own beside pages that it
shares. What it may grow to within a budget is `reserved_nbytes`, for the plan. Any thread may render; texts are made
one at a time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spile.errors import OptionError, TextError, clean
from spile.sizes import format_size

_OURS = ("messages", "add_generation_prompt")  # arguments that no caller can give
# The most that the process may have of its own, within a budget. It begins with 11 MB. With 24 MB each of 70 templates
# of models in use, up to 17 kB long, renders 20 tools and 600 messages of 1 kB, with 22 MB two do not (measured:
# Linux, Python 3.11). They take milliseconds.
_RESERVED_NBYTES = 24_000_000
# Below 500 MB, where a context is a few thousand tokens: 18 MB do for all of them with 100 messages, 15 MB not for 7.
_LEAST_NBYTES, _SMALL_BUDGET = 18_000_000, 500_000_000
_MOST_NBYTES = 128_000_000  # where nobody named a budget
_SHARED_NBYTES = 16_000_000  # of it that are others' too, where resident memory is all that can be seen
LIMIT_SECONDS = 2.0  # of computing
_WAIT_SECONDS = 5.0  # of a busy machine for the same, the start included
_TURN_SECONDS = 60.0  # until others' texts are made
_LOOK_SECONDS = 0.02  # where the system has no bound of memory to set
_ENDS = (BrokenPipeError, ConnectionResetError)
_HINT = "Give a plainer one by --chat-template (chat_template of spile.load)."


class Renderer:
    """The process that runs one model's template, if it runs. `close` ends it; another text starts it again."""

    def __init__(self, budget_nbytes: int | None = None) -> None:
        self._nbytes = _MOST_NBYTES if budget_nbytes is None else reserved_nbytes(budget_nbytes)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start the process, to be ready when it is needed. Does not wait for it."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the process. May be called twice, and while another thread renders, which is then told."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._drop()

    def render(
        self,
        template: str,
        messages: Sequence[Any],
        *,
        special_tokens: Mapping[str, str] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        restore: Mapping[int, str] | None = None,
    ) -> str:
        """Run a template over messages. `special_tokens` has bos_token and its like, `arguments` whatever else it
        takes, such as tools or enable_thinking; `restore` is applied to what it says of a fault. Waits: for
        milliseconds mostly, for some seconds at most where the template takes too much.

        Raises:
            OptionError: an argument that is not for callers, or that JSON has no form for.
            TextError: the template refuses the messages (with its own words), is damaged, does what the sandbox
            forbids, or takes too much.
        """
        for name in _OURS:
            if name in (arguments or {}):
                raise OptionError(
                    f"the template argument {name!r} comes from the messages: it cannot be given"
                )
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **(special_tokens or {}),
            **(arguments or {}),
        }
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        request = _as_json([template, variables])
        if not self._lock.acquire(timeout=_TURN_SECONDS):
            raise TextError(f"the chat template is still busy with other prompts after {_TURN_SECONDS:g} s")
        try:
            kind, answer = self._ask(request)
        finally:
            self._lock.release()
        text = answer.decode("utf-8", "surrogatepass")
        if kind == b"t":
            return text
        raise TextError(f"the chat template {clean(text.translate(restore or {}))}")

    def _ask(self, request: bytes) -> tuple[bytes, bytes]:
        process = self._running()
        try:
            answer = self._talk(process, len(request).to_bytes(8, "big"), request)
        except BaseException:  # an answer that nobody reads must not be taken for the next one
            self._drop()
            raise
        if answer is not None and answer[0] in (b"t", b"f"):
            return answer
        self._drop()
        code = process.returncode if answer is None else 0
        if code == -signal.SIGPROF:
            raise TextError(
                f"the chat template takes too long: it was ended after {LIMIT_SECONDS:g} s of computing",
                _HINT,
            )
        raise TextError(
            f"the chat template takes too much memory: it was ended at {format_size(self._nbytes)}", _HINT
        )

    def _talk(self, process: subprocess.Popen[bytes], *pieces: bytes) -> tuple[bytes, bytes] | None:
        """Send a request; return the answer's kind and bytes, or None where the process has ended instead.

        Raises: TextError where neither comes.
        """
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        wait = _Wait(process, self._nbytes)
        try:
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    wait.until(process.stdin, select.POLLOUT)
                    left = left[os.write(process.stdin.fileno(), left) :]
            got = bytearray()
            while len(got) < 9 or len(got) < 9 + int.from_bytes(got[1:9], "big"):
                wait.until(process.stdout, select.POLLIN)
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece or len(got) > self._nbytes:
                    break
                got += piece
            else:
                return bytes(got[:1]), bytes(memoryview(got)[9:])
        except _ENDS:
            pass
        process.kill()
        process.wait()
        return None

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is not None and process.poll() is None:
            return process
        self._drop()
        try:
            process = self._process = _start(self._nbytes)
        except OSError as error:
            raise TextError(f"no process for the chat template can be started: {error.strerror}") from error
        self._end = weakref.finalize(self, _stop, process)
        return process

    def _drop(self) -> None:
        self._end()
        self._process = None


def reserved_nbytes(budget_nbytes: int | None) -> int:
    """Return what the process may take of a budget."""
    is_small = budget_nbytes is not None and budget_nbytes < _SMALL_BUDGET
    return _LEAST_NBYTES if is_small else _RESERVED_NBYTES


class _Wait:
    """Waits for a process's pipes until its time is over, and looks at its memory where the system does not."""

    def __init__(self, process: subprocess.Popen[bytes], most_nbytes: int) -> None:
        self._process = process
        self._most_nbytes = most_nbytes
        self._deadline = time.monotonic() + _WAIT_SECONDS
        self._looks = not sys.platform.startswith("linux")

    def until(self, pipe: Any, event: int) -> None:
        """Return when a pipe is ready or closed.

        Raises: TextError when the time is over.
        """
        poll = select.poll()
        poll.register(pipe, event)
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TextError(f"the chat template takes too long: no answer in {_WAIT_SECONDS:g} s", _HINT)
            if poll.poll(1000 * (min(left, _LOOK_SECONDS) if self._looks else left)):
                return
            if self._looks and _resident_nbytes(self._process.pid) > self._most_nbytes + _SHARED_NBYTES:
                raise BrokenPipeError


def _resident_nbytes(pid: int) -> int:
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _start(nbytes: int) -> subprocess.Popen[bytes]:
    # Without `site`, which takes a third of the start; so it is told where the few packages lie.
    folders = dict.fromkeys(_folder_of(name) for name in ("spile", "jinja2", "markupsafe"))
    program = (
        f"import sys; sys.path[:0] = {list(folders)!r}; from spile.text.template_process import main; "
        f"main({nbytes}, {LIMIT_SECONDS})"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        process_group=0,  # a terminal's Ctrl-C is not for it
    )
    assert process.stdin is not None, "it is a pipe"
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _folder_of(package: str) -> str:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise TextError(f"a chat template needs the package {package}, which is not installed")
    return str(Path(found.origin).parent.parent)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _as_json(value: Any) -> bytes:
    try:
        return json.dumps(value, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"what the chat template is given has no form in JSON: {clean(str(error))}"
        ) from error
    except RecursionError as error:
        raise OptionError("what the chat template is given is nested too deeply") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__}")
