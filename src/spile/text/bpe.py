"""Turns text into the ids of a byte-level BPE vocabulary, from a compact table that is mapped from a file.

`tokenizers` does the same from objects that take twenty times the memory. The table is made from
tokenizer.json once, by `bpe_table.py`, and lies in the user's cache folder under the SHA-256 of that file. The
merges and the entries' bytes are read by the native core (the layout is in src/core/bpe.h); what this file
does is what comes before them: added tokens, normalisation, and the cutting of text into words. All of it
gives the ids that `tokenizers` gives, or None for text of which the table cannot say so. It knows nothing of
special meanings of tokens, nor of the model.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import stat
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spile import _core
from spile.text.marks import Hidden
from spile.text.patterns import Pattern, PatternError, Ranges, are_ranges, one_of

MAGIC = b"spileBPE"
VERSION = 1
HEADER = struct.Struct(
    "<8s4I2Q32s32s"
)  # magic, version, entries, merge slots, word slots, blob, meta, source, digest
DIGEST_AT = HEADER.size - 32
NONE = 0xFFFFFFFF  # no id
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_READ_NBYTES = 1 << 18
_LARGEST_NBYTES = 1 << 30


@dataclass(frozen=True)
class Added:
    """A token that is found in text as it stands, before anything else. Flags as in tokenizer.json."""

    token_id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


@dataclass(frozen=True)
class Step:
    """One step of cutting text into words; `adds_space` puts a space before a piece that has none."""

    pattern: str | None
    adds_space: bool = False


@dataclass(frozen=True)
class Meta:
    """What a table says beside its numbers. `sets` are the characters that each one-character part of the
    patterns matches; `differing` are those that Python normalises otherwise than `tokenizers`.
    """

    added: tuple[Added, ...]
    steps: tuple[Step, ...]
    nfc: bool
    prefix_ids: tuple[int, ...]  # what the file's post-processor puts before a text
    sets: Mapping[str, Ranges]
    differing: Ranges
    spaces: Ranges  # that lstrip and rstrip take; empty where no token does
    word_characters: Ranges  # beside which no single_word token stands; empty where there is none
    unicode_version: str  # Python's, of which `differing` was found


class TableError(ValueError):
    """A table that is damaged, or not one."""


class Table:
    """An opened table. The memory of `buffer` stays in use for as long as this lives."""

    def __init__(self, buffer: mmap.mmap | bytes) -> None:
        """Raises: TableError for damage of any kind."""
        self._buffer = buffer
        view = memoryview(buffer)
        fields = HEADER.unpack_from(view)
        try:
            self._bpe = _core.Bpe(np.frombuffer(buffer, np.uint8))
            self.meta = _parse_meta(bytes(view[len(view) - fields[6] :]), self._bpe.num_entries)
            self._patterns = [
                None if step.pattern is None else Pattern(step.pattern, self.meta.sets.__getitem__)
                for step in self.meta.steps
            ]
        except (ValueError, KeyError, TypeError, PatternError) as error:
            raise TableError(str(error)) from error
        self.num_entries = self._bpe.num_entries
        blob_start = len(view) - fields[6] - fields[5]
        self.blob = view[blob_start : blob_start + fields[5]]
        self.offsets = view[blob_start - 4 * (self.num_entries + 1) : blob_start].cast("I")
        differing = self.meta.differing
        self._differing = re.compile(one_of(differing)) if differing else None
        self._as_is = _Finder((a for a in self.meta.added if not a.normalized), self.meta, str)
        self._normal = _Finder((a for a in self.meta.added if a.normalized), self.meta, self._normalize)
        self.rest()

    @property
    def nbytes(self) -> int:
        """The table's size: the most that it ever takes of memory, most of it the file's own pages."""
        return len(self._buffer)

    def can_encode(self, text: str) -> bool:
        """Whether the ids are certain to be those of `tokenizers`: not for the few characters that the two
        sides' Unicode versions normalise differently.
        """
        return self._differing is None or text.isascii() or self._differing.search(text) is None

    def encode(self, text: str, hidden: Hidden | None = None) -> list[int]:
        """Turn text that `can_encode` into ids. Nothing is put before or after it. What `hidden` says is turned back
        once the added tokens are found.
        """
        token_ids: list[int] = []
        for piece in self._as_is.split(text):
            if isinstance(piece, int):
                token_ids.append(piece)
                continue
            for part in self._normal.split(self._normalize(piece)):
                if isinstance(part, int):
                    token_ids.append(part)
                    continue
                shown = part if hidden is None else self._normalize(hidden.shown(part))
                for words in self._batches(shown):
                    token_ids += self._bpe.encode(words)
        return token_ids

    def token_to_id(self, content: str) -> int | None:
        """Return the id of an entry with this text; added tokens come first."""
        for added in self.meta.added:
            if added.content == content:
                return added.token_id
        wanted = content.encode("utf-8", "surrogatepass")
        blob, at = bytes(self.blob), -1
        while wanted and (at := blob.find(wanted, at + 1)) >= 0:
            token_id = bisect_left(self.offsets, at + 1) - 1  # the last entry that begins at or before it
            if self.offsets[token_id] == at and self.offsets[token_id + 1] == at + len(wanted):
                return token_id
        return None

    def rest(self) -> None:
        """Let go of the file's pages until they are needed again; they stay in the page cache."""
        if isinstance(self._buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self._buffer.madvise(mmap.MADV_DONTNEED)

    def _normalize(self, text: str) -> str:
        if not self.meta.nfc or text.isascii():
            return text
        import unicodedata

        return unicodedata.normalize("NFC", text)

    def _batches(self, text: str) -> Iterator[list[str]]:
        """Cut text into words, some thousands at a time."""
        batches: Iterable[list[str]] = [[text]]
        for step, pattern in zip(self.meta.steps, self._patterns, strict=True):
            if step.adds_space:
                batches = map(_with_spaces, batches)
            if pattern is not None:
                batches = _cut(batches, pattern)
        yield from batches


def _with_spaces(words: list[str]) -> list[str]:
    return [word if word.startswith(" ") else f" {word}" for word in words]


def _cut(batches: Iterable[list[str]], pattern: Pattern) -> Iterator[list[str]]:
    for batch in batches:
        for word in batch if len(batch) == 1 else ():
            yield from pattern.batches(word)
        if len(batch) > 1:
            yield [part for word in batch for part in pattern.words(word)]


class _Finder:
    """Finds added tokens in text: the leftmost, of those the longest, as `tokenizers` does."""

    def __init__(self, added: Iterable[Added], meta: Meta, normalize: Any) -> None:
        self._tokens = {normalize(token.content): token for token in added}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._spaces = re.compile(f"{one_of(meta.spaces)}*")
        self._word_character = re.compile(one_of(meta.word_characters))

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the ids of the tokens that are found, and the text between them."""
        end = 0
        if self._pattern is not None:
            for match in self._pattern.finditer(text):
                token = self._tokens[match.group()]
                start, stop = match.span()
                if token.single_word and self._touches_word(text, start, stop):
                    continue
                if token.lstrip:
                    while start > end and self._spaces.fullmatch(text, start - 1, start):
                        start -= 1
                if token.rstrip:
                    spaces = self._spaces.match(text, stop)
                    assert spaces is not None, "a pattern that matches nothing too"
                    stop = spaces.end()
                if start > end:
                    yield text[end:start]
                yield token.token_id
                end = stop
        if end < len(text):
            yield text[end:]

    def _touches_word(self, text: str, start: int, stop: int) -> bool:
        is_word = self._word_character.fullmatch
        return bool(is_word(text, start - 1, start) if start else None) or bool(is_word(text, stop, stop + 1))


def tables_folder() -> Path:
    """Return the folder of the user's tables, whether or not it exists."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "spile" / "tokenizers"


def source_digest(path: Path) -> bytes:
    """Return the SHA-256 of tokenizer.json. Reads all of it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def table_path(digest: bytes) -> Path:
    """Return where the table of the tokenizer.json with this digest lies."""
    return tables_folder() / f"{digest.hex()}.bpe"


def open_table(digest: bytes) -> Table | None:
    """Open the table of the tokenizer.json with this digest: None if there is none, or it is not the user's
    own, damaged, or made for another version of Python's Unicode. Reads all of it once.
    """
    try:
        descriptor = os.open(table_path(digest), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if not _is_trusted(os.fstat(descriptor)):
            return None
        header = os.pread(descriptor, HEADER.size, 0)
        if not _is_header(header, digest) or _digest_of(descriptor) != header[DIGEST_AT:]:
            return None
        table = Table(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError, struct.error):
        return None
    finally:
        os.close(descriptor)
    return table if table.meta.unicode_version == _unicode_version(table.meta.nfc) else None


def write_table(digest: bytes, table: bytes) -> bool:
    """Put a table where `open_table` finds it, whole or not at all. False where that cannot be."""
    path = table_path(digest)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(table)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError:
        return False
    return True


def _is_trusted(found: os.stat_result) -> bool:
    """Whether a file is one that only this user could have written."""
    is_plain = stat.S_ISREG(found.st_mode) and HEADER.size <= found.st_size <= _LARGEST_NBYTES
    return is_plain and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _is_header(header: bytes, digest: bytes) -> bool:
    if len(header) != HEADER.size:
        return False
    fields = HEADER.unpack(header)
    return (fields[0], fields[1], fields[7]) == (MAGIC, VERSION, digest)


def _digest_of(descriptor: int) -> bytes:
    """Digest a table without its own digest, through a small buffer: its pages need not become resident."""
    digest = hashlib.sha256(os.pread(descriptor, DIGEST_AT, 0))
    offset = HEADER.size
    while piece := os.pread(descriptor, _READ_NBYTES, offset):
        digest.update(piece)
        offset += len(piece)
    return digest.digest()


def _unicode_version(nfc: bool) -> str:
    if not nfc:
        return ""
    import unicodedata

    return unicodedata.unidata_version


def meta_bytes(meta: Meta) -> bytes:
    """Write what a table says beside its numbers."""
    value = {
        "added": [list(vars(token).values()) for token in meta.added],
        "steps": [[step.pattern, step.adds_space] for step in meta.steps],
        "nfc": meta.nfc,
        "prefix_ids": list(meta.prefix_ids),
        "sets": {atom: list(ranges) for atom, ranges in meta.sets.items()},
        "differing": list(meta.differing),
        "spaces": list(meta.spaces),
        "word_characters": list(meta.word_characters),
        "unicode_version": meta.unicode_version,
    }
    return json.dumps(value, separators=(",", ":")).encode()


def _parse_meta(text: bytes, num_entries: int) -> Meta:
    value = json.loads(text)
    meta = Meta(
        added=tuple(Added(*fields) for fields in value["added"]),
        steps=tuple(Step(*fields) for fields in value["steps"]),
        nfc=value["nfc"] is True,
        prefix_ids=tuple(value["prefix_ids"]),
        sets=value["sets"],
        differing=value["differing"],
        spaces=value["spaces"],
        word_characters=value["word_characters"],
        unicode_version=value["unicode_version"],
    )
    token_ids = [*(token.token_id for token in meta.added), *meta.prefix_ids]
    if not all(type(token_id) is int and 0 <= token_id < num_entries for token_id in token_ids):
        raise TableError("an added token is none of its entries")
    if not all(step.pattern is None or isinstance(step.pattern, str) for step in meta.steps):
        raise TableError("a pattern is not text")
    if not all(isinstance(token.content, str) and token.content for token in meta.added):
        raise TableError("an added token without text")
    if not all(map(are_ranges, [*meta.sets.values(), meta.differing, meta.spaces, meta.word_characters])):
        raise TableError("a set of characters is not one")
    return meta
