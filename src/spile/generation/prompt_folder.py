"""Keys and values of earlier prompts, kept in a folder across runs: one file a block of 128 positions.

A file is named by what its block holds: the digest of all that came before, the model and its options included,
and that of its own tokens. So prompts that begin alike share files, other models find nothing, and two processes
that write the same file write the same bytes. A file's time is that of its last use: where the folder would
grow past its cap, the oldest go, the ends of prompts before their beginnings. Files appear whole or not at all,
and each holds digests, so none needs to survive a power cut.

It does not know engines beyond their states' interface, nor text.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from spile.engines.base import CopyableState
from spile.errors import PromptFileError, SpileError, WriteError
from spile.generation.prompt_blocks import SLACK, Ids, block_size, last_cut, num_common
from spile.generation.prompt_files import (
    Identity,
    PromptFile,
    check_identity,
    open_prompt_file,
    write_prompt_file,
)

_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-(\d{1,8})(w?)\.kv")
_ABANDONED_SECONDS = 3600  # a half-written file this old has no writer any more


class _Entry(NamedTuple):
    path: Path
    own: str
    length: int
    has_sliding: bool


class FolderCut(NamedTuple):
    """How much of a prompt is there, and the files that hold it."""

    position: int
    oldest: int
    files: tuple[PromptFile, ...]


class PromptFolder:
    """A folder of blocks, with a cap on its bytes. It is made with the first block that is stored."""

    def __init__(
        self, folder: Path, cap_nbytes: int, identity: Identity, on_note: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self.cap_nbytes = cap_nbytes
        self._identity = identity
        self._on_note = on_note
        self._origin = _digest(json.dumps(dict(identity), sort_keys=True).encode())
        self._is_full = False
        self._damaged: set[str] = set()  # names, in case they cannot be removed

    def find(self, token_ids: Ids, window: int | None, step: int = 1) -> FolderCut:
        """Return the longest beginning that can be restored. Reads names, and headers of what fits."""
        size = block_size(step)
        children = self._scan()
        path: list[tuple[PromptFile, int]] = []
        parent, at = self._origin, 0
        while at < len(token_ids):
            file, common, own = self._closest(children.get(parent, ()), parent, at, token_ids[at : at + size])
            if file is None or not common:
                break
            path.append((file, common))
            at += common
            if common < size:
                break
            parent = own
        if window is None:
            position = oldest = at // step * step
        else:
            spans = ((file.start, file.start + common, file.has_sliding) for file, common in path)
            position, oldest = last_cut(spans, at, window, step)
        return FolderCut(position, oldest, tuple(file for file, _ in path if file.start < position))

    def load(self, cut: FolderCut, state: CopyableState, *, is_held: bool) -> None:
        """Put what was found into a new state, or into one whose full layers are held. Touches disk.

        Raises: PromptFileError for a damaged file, which is removed; the state is good for nothing then.
        """
        for file in cut.files:
            try:
                if not is_held:
                    file.load(state, "full", file.start, min(file.end, cut.position))
                first, last = max(file.start, cut.oldest), min(file.end, cut.position)
                if state.window is not None and first < last:
                    file.load(state, "sliding", first, last)
            except PromptFileError as error:
                self._discard(file.path, error)
                raise
        state.restore(cut.position, cut.oldest)
        _touch([file.path for file in cut.files])

    def store(self, token_ids: Ids, state: CopyableState, cuts: Sequence[int]) -> None:
        """Keep what a state holds of these tokens, with the windows before `cuts`. Touches disk. What cannot be
        written is left out, and said once.
        """
        if self._is_full:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._store(token_ids[: state.num_reusable], state, cuts)
        except (OSError, WriteError) as error:
            self._is_full = True
            what = error.message if isinstance(error, SpileError) else str(error.strerror or error)
            self._on_note(f"prompts are no longer kept in {self.folder}: {what}")

    def _store(self, token_ids: Ids, state: CopyableState, cuts: Sequence[int]) -> None:
        children = self._scan()
        window_nbytes, size = 0, block_size(state.step)
        if state.window is not None:
            window_nbytes = (state.window + size) * sum(state.row_nbytes("sliding"))
        row_nbytes = sum(state.row_nbytes("full"))
        most = (self.cap_nbytes - window_nbytes) // max(1, row_nbytes) // size * size
        token_ids = token_ids[: max(0, most)]
        kept = [(cut - (state.window or 1) + 1 - SLACK, min(cut, len(token_ids))) for cut in cuts]
        parent, paths = self._origin, []
        for start in range(0, len(token_ids), size):
            ids = token_ids[start : start + size]
            end, own = start + len(ids), _chain(parent, ids)
            siblings = children.get(parent, ())
            can_slide = state.window is not None and state.has("sliding", start)
            # What this block takes the place of: itself without a window, or a beginning of it.
            shorter = [
                one for one in siblings if one.own == own or one.own == _chain(parent, ids[: one.length])
            ]
            wants = any(low < end and start < high for low, high in kept) or any(
                one.has_sliding for one in shorter
            )
            has_sliding = can_slide and wants
            exact = sorted((one for one in shorter if one.own == own), key=lambda one: not one.has_sliding)
            if exact and (exact[0].has_sliding or not has_sliding):
                paths.append(exact[0].path)
            else:
                path = self.folder / f"{parent}-{own}-{len(ids)}{'w' if has_sliding else ''}.kv"
                nbytes = len(ids) * (row_nbytes + has_sliding * sum(state.row_nbytes("sliding")))
                if not self._make_room(nbytes + 4096, paths):
                    break
                write_prompt_file(
                    path,
                    state,
                    ids,
                    start=start,
                    sliding_start=start if has_sliding else end,
                    identity=self._identity,
                    about={},
                    is_durable=False,
                )
                for one in shorter:
                    if has_sliding or not one.has_sliding:
                        _remove(one.path)
                paths.append(path)
            parent = own
        _touch(paths)

    def _scan(self) -> dict[str, list[_Entry]]:
        """Return the blocks in the folder, by the digest of what comes before them."""
        children: dict[str, list[_Entry]] = {}
        try:
            names = os.listdir(self.folder)
        except OSError:
            return children
        for name in names:
            match = _NAME.fullmatch(name)
            if match is not None and name not in self._damaged:
                parent, own, count, sliding = match.groups()
                children.setdefault(parent, []).append(
                    _Entry(self.folder / name, own, int(count), bool(sliding))
                )
        return children

    def _closest(
        self, entries: Sequence[_Entry], parent: str, start: int, token_ids: Ids
    ) -> tuple[PromptFile | None, int, str]:
        """Return the block with the longest common beginning; of equals one that can be cut."""
        own = _chain(parent, token_ids)
        exact = [entry for entry in entries if entry.own == own and entry.length == len(token_ids)]
        best: tuple[int, bool, PromptFile | None, str] = (0, False, None, "")
        for entry in exact or entries:
            try:
                file = open_prompt_file(entry.path)
                check_identity(file, self._identity)
                if file.start != start or len(file.token_ids) != entry.length:
                    raise PromptFileError(f"{entry.path} is damaged: it is named after another block")
            except PromptFileError as error:
                self._discard(entry.path, error)
                continue
            common = num_common(file.token_ids, token_ids)
            if (common, file.has_sliding) > best[:2]:
                best = common, file.has_sliding, file, entry.own
        return best[2], best[0], best[3]

    def _discard(self, path: Path, error: PromptFileError) -> None:
        """Remove a damaged file and say so; nothing is said of one that another process removed."""
        self._damaged.add(path.name)
        if path.exists():
            _remove(path)
            self._on_note(f"a kept prompt was dropped: {error.message}")

    def _make_room(self, nbytes: int, used: Sequence[Path]) -> bool:
        """Remove what was used least lately until so many bytes more stay within the cap."""
        files: list[tuple[int, int, str]] = []
        total = 0
        in_use = {path.name for path in used}
        for entry in os.scandir(self.folder):
            with contextlib.suppress(OSError):  # another process removed it
                status = entry.stat()
                if _NAME.fullmatch(entry.name):
                    total += status.st_size
                    if entry.name not in in_use:
                        files.append((status.st_mtime_ns, status.st_size, entry.name))
                elif entry.name.endswith(".kv") or ".kv." in entry.name:
                    if time.time() - status.st_mtime > _ABANDONED_SECONDS:
                        _remove(Path(entry.path))
                    else:
                        total += status.st_size
        files.sort(reverse=True)
        while total + nbytes > self.cap_nbytes and files:
            _, size, name = files.pop()
            _remove(self.folder / name)
            total -= size
        return total + nbytes <= self.cap_nbytes


def _chain(parent: str, token_ids: Ids) -> str:
    """Return the digest of a block and all that came before it."""
    return _digest(parent.encode() + token_ids.astype("<i4").tobytes())


def _digest(data: bytes) -> str:
    import hashlib  # 5 MB, for nothing where no folder is used

    return hashlib.sha256(data).hexdigest()[:32]


def _touch(paths: Sequence[Path]) -> None:
    """Note that these blocks of one prompt were used now, the first last."""
    now = time.time_ns()
    for index, path in enumerate(paths):
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now - index * 1000))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
