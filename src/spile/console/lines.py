"""Turns what a person types, or a pipe holds, into messages of one line or several.

It does not know what a message is for. On a terminal the standard library's readline edits lines and
remembers them, where Python has it; a plain prompt does where not. Two ways to several lines: a line that
ends in a backslash goes on, and three double quotes begin and end a block. What is pasted comes as one.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from spile.console.terminal import note
from spile.errors import OptionError, SpileError
from spile.files.whole import read_whole

_PROMPT, _MORE = "> ", ". "
_BLOCK = '"""'
_MOST_REMEMBERED = 1000
_PASTE_SECONDS = 0.02  # between two lines of a paste, where the terminal does not mark pastes
_MOST_HISTORY_NBYTES = 64_000_000


class Lines(Protocol):
    """Where lines come from."""

    def read(self, prompt: str) -> str:
        """Return the next line without its end.

        Raises: EOFError at the end, KeyboardInterrupt for Ctrl-C, OptionError for what is no text.
        """
        ...

    def remember(self, message: str) -> None:
        """Keep a message for the arrow keys, now and in later sessions."""
        ...


def read_message(lines: Lines) -> str:
    """Return the next message, of several lines where the first asks for more.

    Raises: as `Lines.read`; EOFError only before the first line, as a message that was begun counts.
    """
    line = lines.read(_PROMPT)
    if line.lstrip().startswith(_BLOCK):
        message = "\n".join(_block(lines, line.lstrip().removeprefix(_BLOCK)))
    else:
        parts = [line]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1].removesuffix("\\")
            try:
                parts.append(lines.read(_MORE))
            except EOFError:
                break
        message = "\n".join(parts)
    if message.strip():
        lines.remember(message)
    return message


def _block(lines: Lines, line: str) -> Iterator[str]:
    """Yield the lines up to the one that ends with the quotes."""
    while not line.rstrip().endswith(_BLOCK):
        yield line
        try:
            line = lines.read(_MORE)
        except EOFError:
            return
    yield line.rstrip().removesuffix(_BLOCK)


class PipeLines:
    """Lines of a file or a pipe, in UTF-8 whatever the locale. Nothing is prompted and nothing remembered."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # of bytes; None where standard input is closed
        self._num_read = 0

    def read(self, prompt: str) -> str:
        data = self._stream.readline() if self._stream is not None else b""
        if not data:
            raise EOFError
        try:
            text: str = data.decode("utf-8-sig" if self._num_read == 0 else "utf-8")
        except UnicodeDecodeError as error:
            at = self._num_read + error.start
            raise OptionError(f"standard input is not valid UTF-8 at byte {at:,}") from error
        self._num_read += len(data)
        return text.removesuffix("\n").removesuffix("\r")

    def remember(self, message: str) -> None:
        pass


class TerminalLines:
    """Lines that a person types at a terminal. `words` are completed at the start of a line."""

    def __init__(self, history: Path | None, words: Sequence[str]) -> None:
        self._history = history
        self._readline = _import_readline()
        is_gnu = self._readline is not None and "libedit" not in (self._readline.__doc__ or "")
        # Whether terminal and library tell what is pasted from what is typed; elsewhere a paste is known by its speed.
        self._marks_pastes = is_gnu and os.environ.get("TERM", "dumb") != "dumb"
        if self._readline is None:
            self._history = None
            return
        self._readline.set_auto_history(False)
        self._complete(words)
        for message in self._remembered():
            self._recall(message)

    def read(self, prompt: str) -> str:
        try:
            line = input(prompt)
            while not self._marks_pastes and _has_input():
                line += "\n" + input()
            line.encode()
        except UnicodeError:
            raise OptionError("this line is not valid text in the terminal's encoding") from None
        return line

    def remember(self, message: str) -> None:
        if self._readline is not None:
            self._recall(message)
        if self._history is None:
            return
        try:
            self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with open(os.open(self._history, flags, 0o600), "ab") as file:
                os.fchmod(file.fileno(), 0o600)  # of a file that was there before, too
                file.write(json.dumps(message).encode() + b"\n")
        except OSError as error:
            note(f"messages are not remembered: {self._history}: {error.strerror or error}")
            self._history = None

    def _recall(self, message: str) -> None:
        """Give a message to the arrow keys, unless the locale cannot write it."""
        with suppress(ValueError):  # UnicodeEncodeError, or a zero byte
            self._readline.add_history(message)

    def _remembered(self) -> list[str]:
        """Return the messages of earlier sessions; when they are many, cut the file to the last of them."""
        if self._history is None:
            return []
        messages: list[str] = []
        with suppress(OSError, SpileError):
            for line in read_whole(self._history, _MOST_HISTORY_NBYTES, SpileError).splitlines():
                with suppress(ValueError, RecursionError):
                    message = json.loads(line)
                    if isinstance(message, str):
                        messages.append(message)
            if len(messages) > 2 * _MOST_REMEMBERED:
                lines = "".join(json.dumps(message) + "\n" for message in messages[-_MOST_REMEMBERED:])
                self._history.write_bytes(lines.encode())
        return messages[-_MOST_REMEMBERED:]

    def _complete(self, words: Sequence[str]) -> None:
        readline = self._readline

        def complete(text: str, state: int) -> str | None:
            if readline.get_begidx() > 0:
                return None
            found = [word + " " for word in words if word.startswith(text)] if text else []
            return found[state] if state < len(found) else None

        readline.set_completer(complete)
        readline.set_completer_delims(" \t\n")
        if "libedit" in (readline.__doc__ or ""):
            readline.parse_and_bind("bind ^I rl_complete")
            return
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')  # Alt-Enter: a new line in the message
        # Python switches bracketed paste off when it imports readline (bpo-42819).
        readline.parse_and_bind(f"set enable-bracketed-paste {'on' if self._marks_pastes else 'off'}")
        readline.parse_and_bind("set enable-active-region off")  # no colours for what was pasted


def _has_input() -> bool:
    """Whether another line is there sooner than anybody types one."""
    return bool(select.select([sys.stdin], [], [], _PASTE_SECONDS)[0])


def open_lines(history: Path | None, words: Sequence[str]) -> tuple[Lines, bool]:
    """Return where lines come from, and whether a person types them."""
    if sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty():
        return TerminalLines(history, words), True
    return PipeLines(None if sys.stdin is None else sys.stdin.buffer), False


def default_history() -> Path | None:
    """Return where messages are remembered: in the user's state folder; None when there is no home."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return Path(state) / "spile" / "chat_history"


def _import_readline() -> Any:
    try:
        import readline
    except ImportError:  # some builds of Python have none
        return None
    return readline
