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

from spile.errors import OptionError, TextError, WriteError
from spile.messages import Message, plain_messages


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

        Raises: WriteError.
        """
        if path.exists() and not _holds_messages(path):
            raise WriteError(f"{path} is there and holds no conversation", "Choose another name.")
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(text.encode())
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise WriteError(f"{path} cannot be written: {error.strerror or error}") from error

    def load(self, path: Path) -> None:
        """Take the messages of a file that `save` wrote, or of a bare JSON list of messages.

        Raises: TextError for a file that cannot be read, OptionError for what is no conversation.
        """
        self.replace(_read(path))


def _read(path: Path) -> list[Any]:
    try:
        value = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise TextError(f"{path} is not valid JSON: {error}") from error
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise OptionError(f"{path} holds no list of messages")
    return messages


def _holds_messages(path: Path) -> bool:
    try:
        _read(path)
    except (OptionError, TextError):
        return False
    return True
