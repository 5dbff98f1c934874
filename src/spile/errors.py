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

Foreign text (tensor names, config values) enters a message only through `quote`, so that a message stays
one line of printable ASCII whatever a file holds.
"""

from __future__ import annotations

import os
from typing import Any

_LONGEST_QUOTE = 120


class SpileError(Exception):
    """The base of every error that spile raises on purpose; `hint` is a second sentence for the user."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


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
