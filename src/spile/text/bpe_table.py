"""Turns tokenizer.json into the compact table that `bpe.py` reads, once, while `tokenizers` has it loaded.

What decides where text is cut is asked of `tokenizers` itself, for every code point: which characters a part
of a pattern matches, and which ones Python's Unicode version normalises otherwise. The entries and merges are
read from the file piece by piece, as the library gives them out only in objects that are larger than all of
the rest. A tokenizer with any part whose effect is not known here gets no table, nor does one for which
the table gives other ids than `tokenizers` on a sample.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import normalizers, pre_tokenizers

from spile import _core
from spile.text.alphabet import byte_alphabet, entry_bytes
from spile.text.bpe import (
    DIGEST_AT,
    GPT2_PATTERN,
    HEADER,
    MAGIC,
    NONE,
    VERSION,
    Added,
    Meta,
    Step,
    Table,
    meta_bytes,
)
from spile.text.patterns import Pattern, PatternError, Ranges

_CHUNK = 0x1000  # code points asked about at a time: `tokenizers` keeps 16 bytes for each byte of text
_CHARACTERS = [(0, 0xD7FF), (0xE000, 0x10FFFF)]  # all that text can hold: no surrogates
_ASSIGNED = [
    (0, 0xD7FF),
    (0xE000, 0x3FFFF),
    (0xE0000, 0xEFFFF),
]  # no plane beside these has had any but private ones

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(rb"\s*+(" + _STRING + rb"|[^\s\",:\[\]{}]++|[\[\]{},:])", re.DOTALL)
_BRACKET = re.compile(_STRING + rb"|[\[\]{}]", re.DOTALL)
_ENTRY = re.compile(rb"\s*+(" + _STRING + rb")\s*+:\s*+(\d++)\s*+([,}])", re.DOTALL)
_MERGE = re.compile(
    rb"\s*+(?:(" + _STRING + rb")|\[\s*+(" + _STRING + rb")\s*+,\s*+(" + _STRING + rb")\s*+\])\s*+([,\]])",
    re.DOTALL,
)

_SPACES = (9, 11, 12, 13, 28, 32, 160, 5760, *range(8192, 8208), 8232, 8233, 8239, 8287, 12288)
_SAMPLE = (
    "The quick brown fox's 12,345 jumps; we'll: it'S IT'RE 'Ve \u2019s\n\n  def f(x):\r\n\treturn x**2  # done \n",
    "e\u0301a\u0308\u0323 \u1e9b\u0323 \uac01\u1100\u1161\u11a8 \u212b \u0958",
    "\ufb01 '\u017f \u01c5\u02b0\u0345\u0334\u0315 q\u0307\u0323",
    "\u05e9\u05dc\u05d5\u05b9\u05dd \u0645\u0631\u062d\u0628\u0627 \u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "\u3053\u3093 \ud55c\uad6d \u0967\u0968 \u00bd \u2167 \x00\x1b\x7f\x85\ufeff \U0001d7d8\U0002f800",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd\U0001f1e9\U0001f1ea",
    "".join(f"a{chr(code)}{chr(code)} " for code in _SPACES),
    "x" * 300 + "ab" * 200 + " " * 70 + "=" * 90 + "\n" * 5 + "   \n  ",
)


class NoTableError(Exception):
    """A tokenizer for which there is no table; the message says why."""


def build_table(
    path: Path, loaded: tokenizers.Tokenizer, digest: bytes, *, prefix_ids: tuple[int, ...] = ()
) -> bytes:
    """Make the table of a tokenizer.json that was loaded from `path` and has this digest. `prefix_ids` are what
    its post-processor puts before a text; the table only keeps them.

    Takes about a second, and memory of three times the table beside what is loaded.

    Raises: NoTableError where ids could differ from those of `tokenizers`.
    """
    try:
        table = _build(path, loaded, digest, prefix_ids)
        _compare(Table(table), loaded)
    except NoTableError:
        raise
    except (PatternError, ValueError, KeyError, StopIteration, TypeError, OSError) as error:
        raise NoTableError(str(error)) from error
    return table


def _build(path: Path, loaded: tokenizers.Tokenizer, digest: bytes, prefix_ids: tuple[int, ...]) -> bytes:
    byte_of = byte_alphabet()
    byte_ids = _byte_ids(loaded.model, byte_of)
    steps = _steps(_state(loaded.pre_tokenizer))
    nfc = _is_nfc(_state(loaded.normalizer))
    if _types(_state(loaded.decoder), "decoders") != ["ByteLevel"]:
        raise NoTableError("its decoder joins more than bytes")
    asked: dict[str, Ranges] = {}
    for step in steps:
        if step.pattern is not None:
            Pattern(step.pattern, lambda atom: asked.setdefault(atom, []))
    differing = _differing() if nfc else []
    added = _added(loaded, nfc, differing)

    entries, merges = _read_model(path, loaded.model, byte_of)
    for token in added:
        entries += [None] * (token.token_id + 1 - len(entries))
    word_ids = _word_ids(loaded.model, entries, added, byte_of)
    for token in added:
        entries[token.token_id] = token.content.encode()
    offsets = np.zeros(len(entries) + 1, np.uint32)
    np.cumsum([len(entry or b"") for entry in entries], out=offsets[1:])
    blob = b"".join(entry or b"" for entry in entries)
    num_entries = len(entries)
    del entries

    meta = meta_bytes(
        Meta(
            added=added,
            steps=steps,
            nfc=nfc,
            prefix_ids=prefix_ids,
            sets=_matched_by(asked),
            differing=differing,
            spaces=_beside("lstrip") if any(token.lstrip or token.rstrip for token in added) else [],
            word_characters=_beside("single_word") if any(token.single_word for token in added) else [],
            unicode_version=unicodedata.unidata_version if nfc else "",
        )
    )
    slots = _core.bpe_merge_slots(merges)
    words = np.zeros(0, np.uint32)
    if word_ids is not None:
        words = _core.bpe_word_slots(word_ids, offsets, np.frombuffer(blob or b"\0", np.uint8))
    header = HEADER.pack(
        MAGIC, VERSION, num_entries, len(slots), len(words), len(blob), len(meta), digest, bytes(32)
    )
    parts = [byte_ids.tobytes(), slots.tobytes(), words.tobytes(), offsets.tobytes(), blob, meta]
    own_digest = hashlib.sha256(header[:DIGEST_AT])
    for part in parts:
        own_digest.update(part)
    return b"".join([header[:DIGEST_AT], own_digest.digest(), *parts])


def _compare(table: Table, loaded: tokenizers.Tokenizer) -> None:
    """Encode a sample both ways."""
    contents = [token.content for token in table.meta.added]
    texts = [*_SAMPLE, *(f"a {content} {content}b\n{content}" for content in contents[:200])]
    for text in texts:
        if table.can_encode(text) and table.encode(text) != loaded.encode(text, add_special_tokens=False).ids:
            raise NoTableError(f"the table gives other ids for {text[:40]!r}")


def _state(part: Any) -> Any:
    """Return the JSON of one part of a tokenizer; None where it has none."""
    return None if part is None else json.loads(part.__getstate__())


def _types(state: Any, key: str) -> list[str]:
    return [] if state is None else [part.get("type") for part in state.get(key, [state])]


def _is_nfc(state: Any) -> bool:
    types = _types(state, "normalizers")
    if types not in ([], ["NFC"]):
        raise NoTableError(f"its normaliser is {types}")
    return bool(types)


def _steps(state: Any) -> tuple[Step, ...]:
    """Read the pre-tokenizer: patterns that cut, and at the end the change to bytes, which may cut too."""
    parts = [] if state is None else state.get("pretokenizers", [state])
    if [part["type"] for part in parts[-1:]] != ["ByteLevel"]:
        raise NoTableError("its pre-tokenizer does not end in bytes")
    steps = []
    for part in parts[:-1]:
        if (
            part["type"] != "Split"
            or part["behavior"] != "Isolated"
            or part["invert"]
            or "Regex" not in part["pattern"]
        ):
            raise NoTableError(f"its pre-tokenizer has a part {part['type']} of a kind that is not known")
        steps.append(Step(part["pattern"]["Regex"]))
    last = parts[-1]
    steps.append(Step(GPT2_PATTERN if last["use_regex"] else None, last["add_prefix_space"]))
    return tuple(steps)


def _byte_ids(model: Any, byte_of: dict[str, int]) -> NDArray[np.uint32]:
    if type(model).__name__ != "BPE":
        raise NoTableError(f"it is a {type(model).__name__} model")
    if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        raise NoTableError("its merges depend on chance or on a word's ends")
    byte_ids = np.full(256, NONE, np.uint32)
    for letter, byte in byte_of.items():
        if (token_id := model.token_to_id(letter)) is not None:
            byte_ids[byte] = token_id
    if (model.unk_token or model.byte_fallback) and NONE in byte_ids:
        raise NoTableError("some bytes have no entry and something takes their place")
    return byte_ids


def _added(loaded: tokenizers.Tokenizer, nfc: bool, differing: Ranges) -> tuple[Added, ...]:
    added = tuple(
        Added(i, t.content, t.single_word, t.lstrip, t.rstrip, t.normalized, t.special)
        for i, t in sorted(loaded.get_added_tokens_decoder().items())
    )
    normal = [unicodedata.normalize("NFC", t.content) if nfc else t.content for t in added if t.normalized]
    bounds = list(zip(differing[::2], differing[1::2], strict=True))
    odd = any(first <= ord(char) <= last for t in added for char in t.content for first, last in bounds)
    if len(set(normal)) < len(normal) or odd:
        raise NoTableError("its added tokens are not told apart once normalised")
    return added


def _word_ids(
    model: Any, entries: list[bytes | None], added: Iterable[Added], byte_of: dict[str, int]
) -> NDArray[np.uint32] | None:
    """Return the ids of all entries that a whole word can be, where one wins over merges; else None."""
    if not model.ignore_merges:
        return None
    for token in added:
        entry = entries[token.token_id]
        if entry is not None and entry != token.content.encode():
            raise NoTableError("a word can be an added token that is written in two ways")
    # An entry outside of the alphabet stands for its UTF-8 form, and no word can be it.
    return np.array(
        [
            i
            for i, entry in enumerate(entries)
            if entry is not None
            and (text := model.id_to_token(i)) is not None
            and all(char in byte_of for char in text)
        ],
        np.uint32,
    )


# What the characters are


def _matched_by(atoms: Iterable[str]) -> dict[str, Ranges]:
    """Ask `tokenizers` which characters each of these expressions for one character matches."""
    splits = {atom: pre_tokenizers.Split(tokenizers.Regex(f"(?:{atom})+"), "removed") for atom in atoms}
    left: dict[str, list[int]] = {atom: [] for atom in splits}  # ranges of what is not matched
    for text in _chunks(chr):
        for atom, split in splits.items():
            pieces = tokenizers.PreTokenizedString(text)
            split.pre_tokenize(pieces)
            for piece, _, _ in pieces.get_splits(offset_type="byte"):
                left[atom] += [ord(piece[0]), ord(piece[-1])]
    return {atom: _complement(_joined(ranges)) for atom, ranges in left.items()}


def _chunks(
    write: Callable[[int], str], characters: Iterable[tuple[int, int]] = _CHARACTERS
) -> Iterator[str]:
    """Yield what is written for all characters, in order, some thousands at a time."""
    for first, last in characters:
        for start in range(first, last + 1, _CHUNK):
            yield "".join(map(write, range(start, min(start + _CHUNK, last + 1))))


def _joined(ranges: list[int]) -> list[int]:
    """Join ranges that touch."""
    joined: list[int] = []
    for first, last in zip(ranges[::2], ranges[1::2], strict=True):
        if joined and joined[-1] + 1 == first:
            joined[-1] = last
        else:
            joined += [first, last]
    return joined


def _complement(ranges: list[int]) -> list[int]:
    """Return the characters that are in no range, surrogates not among them."""
    found: list[int] = []
    bounds = list(zip(ranges[::2], ranges[1::2], strict=True))
    for first, last in _CHARACTERS:
        at = first
        for low, high in bounds:
            if first <= low <= last:
                if at < low:
                    found += [at, low - 1]
                at = high + 1
        if at <= last:
            found += [at, last]
    return found


def _beside(flag: str) -> list[int]:
    """Ask `tokenizers` which characters matter beside an added token: those that `lstrip` takes, or those
    that keep a `single_word` from being one.
    """
    mark = "\ue000"
    probe = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    probe.add_tokens([tokenizers.AddedToken(mark, normalized=False, **{flag: True})])
    mark_id = probe.token_to_id(mark)
    takes = flag == "lstrip"
    found: list[int] = []
    for text in _chunks(lambda code: "" if chr(code) == mark else f"{chr(code)}{mark}\n", _ASSIGNED):
        encoding = probe.encode(text, add_special_tokens=False)
        spans = [span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i == mark_id]
        if takes:
            hits = [stop - 2 for start, stop in spans if stop - start > 1]
        else:
            whole = {start - 1 for start, _ in spans}
            hits = [at for at in range(0, len(text), 3) if at not in whole]
        for at in hits:
            found += [ord(text[at])] * 2
    return _joined(found)


def _differing() -> list[int]:
    """Find the characters that Python's NFC treats otherwise than that of `tokenizers`: decomposed, composed
    or ordered among marks.

    Marks are tried after one of the last and before one of the first class, so that one side's not knowing
    a mark shows. The classes of a mark that both know are the same: Unicode never changes them.
    """
    composed, decomposed = normalizers.NFC(), normalizers.NFD()
    trials: list[tuple[Literal["NFC", "NFD"], Any, Callable[[str], str]]] = [
        ("NFC", composed, str),
        ("NFD", decomposed, str),
        ("NFC", composed, lambda char: unicodedata.normalize("NFD", char)),
        ("NFD", decomposed, lambda char: f"x\u0345{char}"),
        ("NFD", decomposed, lambda char: f"x{char}\u0334"),
    ]
    differing: set[str] = set()
    for chars in _chunks(chr, _ASSIGNED):
        chars = chars.replace("\n", "")
        for form, theirs, write in trials:
            text = "\n".join(map(write, chars))
            ours, given = unicodedata.normalize(form, text), theirs.normalize_str(text)
            if ours != given:
                pairs = zip(chars, ours.split("\n"), given.split("\n"), strict=True)
                differing.update(char for char, a, b in pairs if a != b)
    for char in list(differing):
        parts = {*unicodedata.normalize("NFD", char), *decomposed.normalize_str(char)}
        # A new composition has a new part, and a block of its own; a mark that it shares with others is old.
        differing |= {part for part in parts if part > "\uffff"} or parts
    return _joined([code for code in sorted(map(ord, differing)) for _ in range(2)])


# What the file holds


def _read_model(
    path: Path, model: Any, byte_of: dict[str, int]
) -> tuple[list[bytes | None], NDArray[np.uint32]]:
    """Read every entry's bytes, by id, and the merges as rows of left, right, merged."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        at = next(at for key, at in _members(text, 0) if key == "model")
        fields: dict[str, int] = {}
        for key, value_at in _members(text, at):
            fields[key] = value_at
            if fields.keys() >= {"vocab", "merges"}:
                break
        entries: list[bytes | None] = []
        for entry, token_id in _entries(text, fields["vocab"]):
            entries += [None] * (token_id + 1 - len(entries))
            entries[token_id] = entry_bytes(entry, byte_of)
            if token_id > NONE // 256:
                raise NoTableError("its ids are too large")
        id_of = model.token_to_id
        rows = array("I")
        for left, right in _merges(text, fields["merges"]):
            rows.extend((id_of(left), id_of(right), id_of(left + right)))
    return entries, np.array(rows, np.uint32).reshape(-1, 3)


def _members(text: mmap.mmap, at: int) -> Iterator[tuple[str, int]]:
    """Yield the keys of a JSON object and where their values begin."""
    at = _expect(text, at, b"{")
    while True:
        match = _TOKEN.match(text, at)
        if match is None or match.group(1)[:1] != b'"':
            return
        at = _expect(text, match.end(), b":")
        yield _unquoted(match.group(1)), at
        at = _skip(text, at)
        match = _TOKEN.match(text, at)
        if match is None or match.group(1) != b",":
            return
        at = match.end()


def _skip(text: mmap.mmap, at: int) -> int:
    """Return where a JSON value ends."""
    match = _TOKEN.match(text, at)
    if match is None:
        raise NoTableError("its JSON ends early")
    if match.group(1) not in (b"[", b"{"):
        return match.end()
    depth = 0
    for bracket in _BRACKET.finditer(text, match.start(1)):
        depth += (bracket.group() in (b"[", b"{")) - (bracket.group() in (b"]", b"}"))
        if depth == 0:
            return bracket.end()
    raise NoTableError("its JSON ends early")


def _expect(text: mmap.mmap, at: int, wanted: bytes) -> int:
    match = _TOKEN.match(text, at)
    if match is None or match.group(1) != wanted:
        raise NoTableError(f"its JSON has no {wanted.decode()} at {at}")
    return match.end()


def _unquoted(string: bytes) -> str:
    if b"\\" in string:
        decoded: str = json.loads(string)
        return decoded
    return string[1:-1].decode()


def _entries(text: mmap.mmap, at: int) -> Iterator[tuple[str, int]]:
    at = _expect(text, at, b"{")
    while (match := _ENTRY.match(text, at)) is not None:
        yield _unquoted(match.group(1)), int(match.group(2))
        at = match.end()
        if match.group(3) == b"}":
            return
    _expect(text, at, b"}")


def _merges(text: mmap.mmap, at: int) -> Iterator[tuple[str, str]]:
    """Yield the pairs of all merges, which are written as "left right" or as [left, right]."""
    at = _expect(text, at, b"[")
    while (match := _MERGE.match(text, at)) is not None:
        if match.group(1) is None:
            yield _unquoted(match.group(2)), _unquoted(match.group(3))
        elif not (line := _unquoted(match.group(1))).startswith("#version"):
            left, right = line.split(" ")
            yield left, right
        at = match.end()
        if match.group(4) == b"]":
            return
    _expect(text, at, b"]")
