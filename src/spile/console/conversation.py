"""Turns what was said by turns into the messages of the next prompt, and into a file and back.

It does not know models or terminals. A turn is a user's message and what answers it; reasoning is not kept,
so it is never sent back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spile.errors import OptionError, SpileError, TextError, WriteError, shown
from spile.files.whole import read_whole
from spile.text.messages import Message, plain_messages

_LONGEST_FILE_NBYTES = 64_000_000  # more than any context holds


class Conversation:
    """A system message, if there is one, and the turns after it."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[list[dict[str, Any]]] = []  # each begins with a message of the user

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages in order, the system's first."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [message for turn in self.turns for message in turn]

    def ask(self, text: str) -> None:
        """Begin a turn."""
        self.turns.append([{"role": "user", "content": text}])

    def answer(self, text: str) -> None:
        """End the turn that `ask` began."""
        assert self.turns, "an answer to nothing"
        self.turns[-1].append({"role": "assistant", "content": text})

    def undo(self) -> bool:
        """Take the last turn back; False when there is none."""
        return bool(self.turns and self.turns.pop())

    def drop_oldest(self) -> bool:
        """Forget the oldest turn; False when only the last is left, which has to stay."""
        return len(self.turns) > 1 and bool(self.turns.pop(0))

    def reset(self) -> None:
        """Forget all turns, but not the system message."""
        self.turns.clear()

    def replace(self, messages: Sequence[Message]) -> None:
        """Take these messages instead. One of the system may come first, and then one of the user.

        Raises: OptionError for what is no conversation.
        """
        plain = plain_messages(messages)
        system = plain.pop(0)["content"] if plain[0]["role"] == "system" else None
        turns: list[list[dict[str, Any]]] = []
        for message in plain:
            if message["role"] == "user":
                turns.append([message])
            elif not turns:
                raise OptionError(f"a conversation begins with the user, not with {message['role']!r}")
            else:
                turns[-1].append(message)
        self.system, self.turns = system, turns

    def save(self, path: Path) -> None:
        """Write the messages as JSON, for the owner's eyes only; a conversation that is there is replaced.

        Raises: WriteError, OptionError for a conversation without a message.
        """
        if not self.messages:
            raise OptionError("there is nothing to save: the conversation is empty")
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n"
        try:
            if path.exists() and not _holds_conversation(path):
                raise WriteError(f"{shown(path)} is there and holds no conversation", "Choose another name.")
            _replace(path, text.encode())
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be one, a text without UTF-8
            raise WriteError(f"{shown(path)} cannot be written: {_reason(error)}") from error

    def load(self, path: Path) -> None:
        """Take the messages of a file that `save` wrote, or of a bare JSON list of messages.

        Raises: TextError for a file that cannot be read, OptionError for what is no conversation.
        """
        self.replace(_read(path))


def _read(path: Path) -> list[Any]:
    data = _read_bytes(path)
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise TextError(f"{shown(path)} is not valid JSON: {error}") from error
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise OptionError(f"{shown(path)} holds no list of messages")
    for index, message in enumerate(messages):
        try:
            json.dumps(message, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise OptionError(
                f"{shown(path)}: messages[{index}] holds half of a surrogate pair, which is no text"
            ) from error
    return messages


def _read_bytes(path: Path) -> bytes:
    try:
        return read_whole(path, _LONGEST_FILE_NBYTES, TextError)
    except FileNotFoundError as error:
        raise TextError(f"{shown(path)} cannot be read: {_reason(error)}") from error


def _holds_conversation(path: Path) -> bool:
    try:
        Conversation().load(path)
    except SpileError:
        return False
    return True


def _replace(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError, ValueError):
            temporary.unlink()
        raise


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
