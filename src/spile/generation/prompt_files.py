"""Keys and values of a prompt into a file and back, with all that must agree for it to be of use.

A file is: 8 bytes of magic, a header's length (4 bytes, little-endian), the header (JSON), the full layers'
bits, the sliding layers' bits, and three SHA-256: of all before the bits, and twice of that and one kind's
bits. Bits come in runs of 128 positions, layer by layer in each. The header says which token ids the positions
`start` and on belong to, from which position on sliding layers are there, and the identity: model, engine, bits
and whatever else changes what is stored. Everything is checked before it is used; nothing in a file is ever
executed. A file appears whole or not at all, readable by its owner alone.

It does not know what a prompt says: `about` is the caller's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spile.engines.base import CopyableState, LayerKind
from spile.errors import PromptFileError, WriteError, quote, shown
from spile.files.writer import FULL_DISK
from spile.generation.prompt_blocks import BLOCK, Ids

FORMAT = 2
_MAGIC = b"spile kv"
_LONGEST_HEADER = 1 << 25  # bytes: 140,000 ids take 1 MB, a prompt's text as much
_DIGEST_NBYTES = 32
_NUM_DIGESTS = 3  # the header's, and that of each kind
_KINDS: tuple[LayerKind, LayerKind] = ("full", "sliding")
_numbers = itertools.count()

Identity = Mapping[str, str | int]


@dataclass(frozen=True)
class PromptFile:
    """A file whose header was read and checked; its bits were not, but for their number."""

    path: Path
    identity: Identity
    start: int
    token_ids: Ids
    sliding_start: int  # equal to `end` where the file has none
    row_nbytes: Mapping[LayerKind, tuple[int, ...]]
    about: Mapping[str, Any]
    data_start: int

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def has_sliding(self) -> bool:
        return self.sliding_start < self.end

    def load(self, state: CopyableState, kind: LayerKind, first: int, last: int) -> None:
        """Write positions [first, last) into a state, which is good for nothing if this fails. Reads all of
        one kind's bits.

        Raises: PromptFileError for bits that are not what was written.
        """
        import hashlib  # 5 MB, for nothing where no file is used

        rows = self.row_nbytes[kind]
        if rows != state.row_nbytes(kind):
            raise PromptFileError(f"{shown(self.path)} is damaged: its positions have another size")
        nbytes = self._num_positions("full") * sum(self.row_nbytes["full"])
        begins = self.start if kind == "full" else self.sliding_start
        try:
            with open(self.path, "rb", buffering=0) as file:
                digest = hashlib.sha256(_read(file, self.data_start, self.path))
                if kind == "sliding":
                    file.seek(nbytes, os.SEEK_CUR)
                for start, end in _runs(begins, self.end):
                    layers = []
                    for row in rows:
                        data = np.empty((end - start, row), np.uint8)
                        _fill(file, data, self.path)
                        digest.update(data.data)
                        layers.append(data)
                    low, high = max(start, first), min(end, last)
                    if low < high:
                        state.write(kind, low, (data[low - start : high - start] for data in layers))
                file.seek(-_DIGEST_NBYTES * (2 if kind == "full" else 1), os.SEEK_END)
                expected = _read(file, _DIGEST_NBYTES, self.path)
        except OSError as error:
            raise PromptFileError(f"{shown(self.path)} cannot be read: {_reason(error)}") from error
        if digest.digest() != expected:
            raise PromptFileError(
                f"{shown(self.path)} is damaged: the bytes of its {kind} layers are not those that were written"
            )

    def _num_positions(self, kind: LayerKind) -> int:
        return self.end - (self.start if kind == "full" else self.sliding_start)

    def nbytes(self) -> int:
        """The size that the file has to have."""
        bits = sum(self._num_positions(kind) * sum(self.row_nbytes[kind]) for kind in _KINDS)
        return self.data_start + bits + _NUM_DIGESTS * _DIGEST_NBYTES


def open_prompt_file(path: Path) -> PromptFile:
    """Read and check a file's header, its digest too. Whether it belongs to a model is `check_identity`'s.

    Raises: PromptFileError for a file that is missing, damaged, cut short, or none of ours.
    """
    import hashlib

    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe may never end
            raise PromptFileError(f"{shown(path)} is no saved prompt: it is no regular file")
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            begin = file.read(12) or b""
            if begin[:8] != _MAGIC:
                raise PromptFileError(f"{shown(path)} is no saved prompt of spile")
            length = int.from_bytes(begin[8:], "little")
            if len(begin) < 12 or length > min(size, _LONGEST_HEADER):
                raise PromptFileError(f"{shown(path)} is damaged: its header does not fit {size:,} bytes")
            header = _read(file, length, path)
            file.seek(max(file.tell(), size - _NUM_DIGESTS * _DIGEST_NBYTES))
            digest = file.read(_DIGEST_NBYTES)
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be one
        raise PromptFileError(f"{shown(path)} cannot be read: {_reason(error)}") from error
    found = _parsed(path, header)
    if size != found.nbytes():
        raise PromptFileError(
            f"{shown(path)} is damaged: it has {size:,} bytes and its header speaks of {found.nbytes():,}"
        )
    if digest != hashlib.sha256(begin + header).digest():
        raise PromptFileError(f"{shown(path)} is damaged: its header is not what was written")
    return found


def is_prompt_file(path: Path) -> bool:
    """Whether a file begins as ours do, damaged or not."""
    try:
        if not path.is_file():  # a pipe may never end
            return False
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):
        return False


def check_identity(file: PromptFile, identity: Identity) -> None:
    """Refuse a file that was saved by something else than what would read it.

    Raises: PromptFileError naming what differs, and both values.
    """
    for name in {**identity, **file.identity}:
        saved, ours = file.identity.get(name), identity.get(name)
        if saved != ours:
            raise PromptFileError(
                f"{shown(file.path)} was saved with {name} {_plain(saved)}, and this is {_plain(ours)}",
                "Save the prompt again, or run with what it was saved with.",
            )


def write_prompt_file(
    path: Path,
    state: CopyableState,
    token_ids: Ids,
    *,
    start: int,
    sliding_start: int,
    identity: Identity,
    about: Mapping[str, Any],
    is_durable: bool,
) -> int:
    """Write positions `start` and on, one a token, as a whole or not at all; return the file's bytes. A file
    that is there is replaced. `is_durable`: it is on the disk when this returns.

    Raises: WriteError; then nothing has changed.
    """
    import hashlib

    end = start + len(token_ids)
    header = {
        "format": FORMAT,
        "identity": dict(identity),
        "start": start,
        "token_ids": token_ids.tolist(),
        "sliding_start": sliding_start,
        "row_nbytes": {kind: list(state.row_nbytes(kind)) for kind in _KINDS},
        "about": dict(about),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    begin = _MAGIC + len(text).to_bytes(4, "little") + text
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(begin)
            digests = [hashlib.sha256(begin).digest()]
            for kind, first in zip(_KINDS, (start, sliding_start), strict=True):
                digest = hashlib.sha256(begin)
                for low, high in _runs(first, end):
                    for rows in state.read(kind, low, high):
                        digest.update(rows.data)
                        file.write(rows.data)
                digests.append(digest.digest())
            file.write(b"".join(digests))
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
            nbytes = file.tell()
        os.replace(temporary, path)
        if is_durable:
            _sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink()
        if isinstance(error, (OSError, ValueError)):
            full = isinstance(error, OSError) and error.errno in FULL_DISK
            raise WriteError(
                f"{shown(path)} cannot be written: {_reason(error)}",
                "Nothing was left behind; make room and try again." if full else None,
            ) from error
        raise
    return nbytes


def _runs(start: int, end: int) -> Iterator[tuple[int, int]]:
    for low in range(start, end, BLOCK):
        yield low, min(low + BLOCK, end)


def _parsed(path: Path, header: bytes) -> PromptFile:
    try:
        fields = json.loads(header)
        if fields["format"] != FORMAT:
            raise PromptFileError(
                f"{shown(path)} has format {quote(fields['format'])}, and this spile reads format {FORMAT}"
            )
        token_ids = np.array(fields["token_ids"], np.int32).reshape(-1)
        start, sliding_start = int(fields["start"]), int(fields["sliding_start"])
        row_nbytes: dict[LayerKind, tuple[int, ...]] = {
            kind: _row_nbytes(fields["row_nbytes"][kind]) for kind in _KINDS
        }
        identity, about = dict(fields["identity"]), dict(fields["about"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise PromptFileError(f"{shown(path)} is damaged: its header cannot be read") from error
    file = PromptFile(
        path, identity, start, token_ids, sliding_start, row_nbytes, about, len(_MAGIC) + 4 + len(header)
    )
    if not (0 <= start <= sliding_start <= file.end and len(token_ids)):
        raise PromptFileError(f"{shown(path)} is damaged: its header contradicts itself")
    return file


def _row_nbytes(given: Sequence[Any]) -> tuple[int, ...]:
    rows = tuple(int(value) for value in given)
    if not all(0 < row < 1 << 24 for row in rows):
        raise ValueError("a position's size")
    return rows


def _read(file: FileIO, nbytes: int, path: Path) -> bytes:
    data = np.empty(nbytes, np.uint8)
    _fill(file, data, path)
    return data.tobytes()


def _fill(file: FileIO, data: NDArray[np.uint8], path: Path) -> None:
    view = data.reshape(-1).data
    while view:
        count = file.readinto(view)
        if not count:
            raise PromptFileError(f"{shown(path)} is damaged: it ends early")
        view = view[count:]


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems refuse; the file itself is written
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _plain(value: object) -> str:
    return "nothing" if value is None else quote(value).strip("'")


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
