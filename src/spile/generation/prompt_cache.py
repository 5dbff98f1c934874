"""Which beginning of a prompt was read before, and where it lies: in memory, in a folder, or in a file that was
saved by name.

It asks each place and takes the longest. It does not know how they keep what they have. Positions are absolute
and a position's bits depend on the tokens up to it alone, so what is put back is what reading would give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spile.engines.base import CopyableState
from spile.errors import PromptFileError
from spile.generation.prompt_blocks import SLACK, Ids, PromptBlocks, last_cut, num_common
from spile.generation.prompt_files import (
    Identity,
    PromptFile,
    check_identity,
    open_prompt_file,
    write_prompt_file,
)
from spile.generation.prompt_folder import PromptFolder


@dataclass(frozen=True)
class Found:
    """A beginning of a prompt that can be restored.

    `load(state, is_held)` puts it into a new state, or into one that has its full layers, and returns True; or
    False where it was damaged: then the state is good for nothing, and the next search does not find it again.
    """

    position: int
    load: Callable[[CopyableState, bool], bool]


class Source(Protocol):
    """A place to look for the beginning of a prompt."""

    def find(self, token_ids: Ids, state: CopyableState, num_held: int) -> Found | None:
        """Return the longest beginning there is for a state like this one, whose full layers hold the first
        `num_held` of these tokens; `is_held` is to be True for what is no longer than that.
        """
        ...


class PromptCache:
    """Earlier prompts, in memory within so many bytes and in a folder. For one thread."""

    def __init__(
        self,
        budget_nbytes: int = 0,
        open_folder: Callable[[Identity], PromptFolder] | None = None,
        *,
        fingerprint: Callable[[], str] = str,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        """`open_folder` and the model's `fingerprint` are called with the first prompt."""
        self.hold: Callable[[int], None] = lambda nbytes: None  # an engine's, once there is one
        self._blocks = (
            PromptBlocks(budget_nbytes, lambda nbytes: self.hold(nbytes)) if budget_nbytes else None
        )
        self._open_folder = open_folder
        self._fingerprint = fingerprint
        self._on_note = on_note
        self._folder: PromptFolder | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are in use."""
        return 0 if self._blocks is None else self._blocks.nbytes

    @property
    def is_in_memory(self) -> bool:
        """Whether nothing is kept in a folder."""
        return self._open_folder is None

    @property
    def wants_every_chunk(self) -> bool:
        """Whether to call `store` after each chunk of a prompt, and not only where it can be cut."""
        return self._blocks is not None

    def find(self, token_ids: Ids, state: CopyableState, num_held: int) -> Found | None:
        best: Found | None = None
        blocks, folder = self._blocks, self._opened(state)
        if blocks is not None:
            cut = blocks.find(token_ids, state.window, num_held, state.step)

            def load(state: CopyableState, is_held: bool) -> bool:
                blocks.load(cut, state, is_held=is_held)
                return True

            best = Found(cut.position, load)
        if folder is not None:
            kept = folder.find(token_ids, state.window, state.step)

            def load_files(state: CopyableState, is_held: bool) -> bool:
                try:
                    folder.load(kept, state, is_held=is_held)
                except PromptFileError:  # the folder has said so
                    return False
                return True

            if best is None or kept.position > best.position:
                best = Found(kept.position, load_files)
        return best

    def store(self, token_ids: Ids, state: CopyableState, cuts: Sequence[int], *, is_held: bool) -> None:
        """Keep what a state holds of these tokens. `cuts` are positions at which a later prompt may well leave
        this one, the likeliest first; `is_held` says that the state lives on, so that memory need not hold its
        full layers.
        """
        if self._blocks is not None:
            try:
                self._blocks.store(token_ids, state, cuts, is_held=is_held)
            except (OSError, MemoryError) as error:  # the system has no such memory after all
                self._blocks.clear()
                self._blocks = None
                if self._on_note is not None:
                    self._on_note(f"prompts are no longer kept in memory: {error}")
        folder = self._opened(state) if cuts else None
        if folder is not None:
            folder.store(token_ids, state, cuts)

    def refuse(self, engine_name: str) -> None:
        """Say once that an engine's states cannot be copied, so that nothing is kept in the folder. Of memory
        engines speak themselves.
        """
        if self._on_note is not None and not self.is_in_memory:
            self._on_note(
                f"the {engine_name} engine reads every prompt anew: nothing is kept of earlier ones"
            )
            self._on_note = None

    def clear(self) -> None:
        """Give the memory back."""
        if self._blocks is not None:
            self._blocks.clear()

    def _opened(self, state: CopyableState) -> PromptFolder | None:
        if self._folder is None and self._open_folder is not None:
            self._folder = self._open_folder({"model": self._fingerprint(), **state.identity})
        return self._folder


class SavedPrompt:
    """One saved prompt: a source that holds nothing else."""

    def __init__(self, file: PromptFile, fingerprint: str) -> None:
        self.file = file
        self.num_found: int | None = (
            None  # tokens of it that a prompt can go on from, once one was looked for
        )
        self._fingerprint = fingerprint

    @classmethod
    def open(cls, path: Path, fingerprint: str) -> SavedPrompt:
        """Read a file's header, for the model of this fingerprint.

        Raises: PromptFileError for what is damaged or another model's.
        """
        file = open_prompt_file(path)
        if file.start:
            raise PromptFileError(f"{path} is a part of a prompt cache, not a saved prompt")
        check_identity(file, {**file.identity, "model": fingerprint})
        return cls(file, fingerprint)

    @property
    def about(self) -> Mapping[str, Any]:
        """What was said of it when it was saved."""
        return self.file.about

    def find(self, token_ids: Ids, state: CopyableState, num_held: int) -> Found | None:
        """As `Source` says.

        Raises: PromptFileError for one that was saved with other options.
        """
        file = self.file
        check_identity(file, {"model": self._fingerprint, **state.identity})
        common = num_common(file.token_ids, token_ids)
        if state.window is None:
            position = oldest = common // state.step * state.step
        else:
            first = min(file.sliding_start, common)
            spans = ((0, first, False), (first, common, True))
            position, oldest = last_cut(spans, common, state.window, state.step)
        self.num_found = position

        def load(state: CopyableState, is_held: bool) -> bool:
            if not is_held:
                file.load(state, "full", 0, position)
            if state.window is not None:
                file.load(state, "sliding", oldest, position)
            state.restore(position, oldest)
            return True

        return Found(position, load)


def save_prompt(
    path: Path,
    token_ids: Sequence[int],
    state: CopyableState,
    *,
    identity: Identity,
    about: Mapping[str, Any],
) -> None:
    """Write all that can be reused of what a state holds, `token_ids`, to a file. Touches disk.

    Raises: WriteError.
    """
    ids = np.array(token_ids[: state.num_reusable], np.int32)
    sliding_start = len(ids)
    if state.window is not None:
        least = max(0, len(ids) - state.window + 1)
        sliding_start = max(0, least - SLACK)
        if not state.has("sliding", sliding_start):
            sliding_start = least
    write_prompt_file(
        path,
        state,
        ids,
        start=0,
        sliding_start=sliding_start,
        identity=identity,
        about=about,
        is_durable=True,
    )


def turn_cut(token_ids: Sequence[int], eos_ids: frozenset[int]) -> int:
    """Return where the last message of a prompt begins, as far as end tokens tell: 0 where they do not. A
    prompt that asks something else there shares all before it.
    """
    ends = [index for index, token_id in enumerate(token_ids) if token_id in eos_ids]
    return ends[-2] + 1 if len(ends) > 1 else 0
