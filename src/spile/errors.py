"""The errors a user can meet, as one tree. It does not know where they are raised or how they are shown.

    SpileError
     +- ModelError                the model cannot be used
     |   +- ModelNotFoundError      no such folder, hub id or file
     |   +- CheckpointError         damaged, incomplete or contradictory files
     |   +- UnsupportedModelError   an architecture or a config value that spile does not run
     +- BudgetError               memory that cannot be kept
     +- ReadError                 a read of a shard failed or came back short
     +- TextError                 tokenizer or chat template missing, damaged or refusing
     +- ContextError              a prompt longer than the context
     +- OptionError               a parameter out of range
     +- WriteError                output cannot be written
     +- PromptFileError           a saved prompt is damaged, or another model's

Foreign values (tensor names, config values) enter a message through `quote`, as printable ASCII. Whatever else is in a
message, a template's own words or a file's name, is made one clean line by the error itself, so that nothing in it
drives a terminal or begins a line of a log.
"""

from __future__ import annotations

import os
from typing import Any

_LONGEST_QUOTE = 120
_LONGEST_MESSAGE = 2_000


class SpileError(Exception):
    """The base of every error that spile raises on purpose; `hint` is a second sentence for the user."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        message = clean(message)
        super().__init__(message)
        self.message = message
        self.hint = None if hint is None else clean(hint)


class ModelError(SpileError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError):
    """There is no such folder, hub id or file."""


class CheckpointError(ModelError):
    """The files of a checkpoint are damaged, incomplete or contradict each other."""


class UnsupportedModelError(ModelError):
    """The architecture, or a value of its config, is one that spile does not run."""


class BudgetError(SpileError):
    """The memory budget cannot be kept; the message holds the numbers."""


class ReadError(SpileError):
    """A read of a shard failed or came back short; the message holds file, offset, wanted and got."""

    @classmethod
    def at(
        cls, path: str | os.PathLike[str], offset: int, wanted: int, got: int, reason: str | None = None
    ) -> ReadError:
        """Make the error for a read of `wanted` bytes at `offset` that brought `got`."""
        why = f": {reason}" if reason else ""
        return cls(
            f"cannot read {os.fspath(path)}: at offset {offset:,} wanted {wanted:,} bytes, got {got:,}{why}",
            "The file may have been cut short or replaced, or the disk may be failing.",
        )


class TextError(SpileError):
    """The tokenizer or the chat template is missing or damaged, or refuses its input."""


class ContextError(SpileError):
    """The prompt is longer than the context; the message holds both numbers."""


class OptionError(SpileError):
    """A parameter is out of range."""


class WriteError(SpileError):
    """Output cannot be written: the disk is full or the folder exists."""


class PromptFileError(SpileError):
    """A saved prompt is missing, damaged, or was saved by another model or with other options."""


def quote(value: Any) -> str:
    """Show a foreign value in a message: printable ASCII, one line, 120 characters at most."""
    shown = ascii(value)
    if len(shown) > _LONGEST_QUOTE:
        shown = shown[: _LONGEST_QUOTE - 3] + "..."
    return shown


def shown(path: str | os.PathLike[str]) -> str:
    """Show a file's name as it is, or quoted where it would not be one clean line."""
    text = os.fspath(path)
    return text if text.isprintable() and len(text) <= _LONGEST_MESSAGE // 2 else quote(text)


def clean(text: str) -> str:
    """Show foreign text of any language: one line, 2,000 characters at most, and whatever has no shape of its own
    (control characters, marks that turn the writing direction, halves of surrogate pairs) as an escape.
    """
    if len(text) > _LONGEST_MESSAGE:
        text = text[: _LONGEST_MESSAGE - 3] + "..."
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else " " if char.isspace() else ascii(char)[1:-1] for char in text
    )
