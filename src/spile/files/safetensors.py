"""Turns one safetensors file into the table of its tensors, reading nothing but the header.

Every rule of the format is checked here, once, before a byte of data is used: the header's length
(bounded by the file and by 32 MB, so no length that a file merely claims is ever allocated), UTF-8, JSON
without duplicate keys, known dtypes, shape x dtype equal to the byte range, ranges inside the file that
neither overlap nor leave holes, and a file that is exactly as long as its header says. It does not know
which tensors a model needs, nor what several shards have to do with each other.

Source: the format's README and `safetensors/src/tensor.rs` of huggingface/safetensors 0.8.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from spile.errors import CheckpointError, quote

# The official reader takes 100 MB, which parsed would be a gigabyte. A header of 32 MB has 250,000 tensors, three times
# those of the largest models in use.
LARGEST_HEADER_NBYTES = 32_000_000
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
_LARGEST_COUNT = 2**64
_INCOMPLETE = "an incomplete download? Download it again."


class Entry(NamedTuple):
    """One tensor of a file; `offset` is absolute."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> list[Entry]:
    """Read and check the header of a safetensors file; the tensors come in file order.

    Raises:
        CheckpointError: the file cannot be read, is something else, or breaks a rule of the format.
    """
    try:
        status = path.stat()  # before opening: a pipe would block
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            start = file.read(512)
            header_nbytes = _check_start(path, start, status.st_size)
            header = start[8 : 8 + header_nbytes]
            while len(header) < header_nbytes:
                piece = file.read(header_nbytes - len(header))
                if not piece:
                    raise CheckpointError(f"{path} ended while its header was read", _INCOMPLETE)
                header += piece
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    entries = _parse_header(path, header, 8 + header_nbytes)
    end = entries[-1].offset + entries[-1].nbytes if entries else 8 + header_nbytes
    if status.st_size < end:
        last = next(entry for entry in entries if entry.offset + entry.nbytes > status.st_size)
        raise CheckpointError(
            f"{path} ends at {status.st_size:,} bytes but its header needs {end:,} "
            f"(tensor {quote(last.name)} is cut)",
            f"Is this {_INCOMPLETE}",
        )
    if status.st_size > end:
        raise CheckpointError(
            f"{path} has {status.st_size:,} bytes but its header accounts for {end:,}",
            "The file is damaged or something was appended to it; download it again.",
        )
    return entries


def guess_content(start: bytes) -> str:
    """Say what a file that is not safetensors probably is, from its first bytes."""
    text = start.lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer: the weights were not downloaded (run `git lfs pull`)"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "it is a web page, not weights: the download was answered with an error or a login page"
    if start.startswith(b"PK\x03\x04"):
        return "it is a zip archive, probably PyTorch weights; spile reads safetensors only"
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05" and len(start) > 1:
        return "it is a Python pickle, probably PyTorch weights; spile reads safetensors only"
    if start.startswith(b"GGUF"):
        return "it is a GGUF file; spile reads safetensors only"
    if start.startswith(b"\x1f\x8b"):
        return "it is a gzip archive"
    if text.startswith((b"{", b"[")):
        return "it is JSON text, not weights: the download was answered with an error"
    if start and not start.strip(b"\x00"):
        return "it begins with zeros: an incomplete download that only reserved its space"
    if start and not start.strip(b"\xff"):
        return "it holds no header: damaged, or blank flash or disk"
    return "its beginning is damaged, or is that of another kind of file"


def strict_json(text: str) -> Any:
    """Parse JSON and refuse what Python lets pass: duplicate keys, NaN, numbers and nesting without end.

    Raises:
        ValueError: with a reason that fits in a sentence.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
        check_text(text, value)
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_text(text: str, value: Any) -> None:
    """Check that the texts in parsed JSON have a UTF-8 form: escapes can spell half of a surrogate pair.

    Raises: ValueError with a reason that fits in a sentence.
    """
    if "\\ud" not in text and "\\uD" not in text:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a text in it has half of a surrogate pair") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {quote(key)} stands in it twice")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_start(path: Path, start: bytes, file_nbytes: int) -> int:
    """Return the header's length, once it is known to lie inside the file."""
    if file_nbytes == 0:
        raise CheckpointError(f"{path} is empty", f"Is this {_INCOMPLETE}")
    if file_nbytes < 8:
        raise CheckpointError(
            f"{path} has only {file_nbytes} bytes, too few for a header", f"Is this {_INCOMPLETE}"
        )
    header_nbytes = int.from_bytes(start[:8], "little")
    plausible = 2 <= header_nbytes <= LARGEST_HEADER_NBYTES
    if file_nbytes >= 10 and plausible and header_nbytes <= file_nbytes - 8:
        if start[8:9] != b"{":
            raise CheckpointError(f"{path} is not a safetensors file: {guess_content(start)}")
        return header_nbytes
    if plausible and (start[8:9] == b"{" or file_nbytes == 8):
        raise CheckpointError(
            f"{path} ends at {file_nbytes:,} bytes, inside its header of {header_nbytes:,}",
            f"Is this {_INCOMPLETE}",
        )
    raise CheckpointError(f"{path} is not a safetensors file: {guess_content(start)}")


def _parse_header(path: Path, header: bytes, data_start: int) -> list[Entry]:
    try:
        fields = strict_json(header.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"the header of {path} is not UTF-8 (byte {error.start:,})") from error
    except ValueError as error:
        raise CheckpointError(f"the header of {path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"the header of {path} is not a JSON object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"the header of {path} has a __metadata__ that is not a map of strings")
    entries = [_parse_entry(path, name, field, data_start) for name, field in fields.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    end, previous = data_start, "the header"
    for entry in entries:
        if entry.offset != end:
            fault = "overlaps" if entry.offset < end else "leaves a hole after"
            raise CheckpointError(
                f"in {path} tensor {quote(entry.name)} {fault} {previous}: it begins at byte "
                f"{entry.offset:,}, expected {end:,}"
            )
        end, previous = entry.offset + entry.nbytes, f"tensor {quote(entry.name)}"
    return entries


def _parse_entry(path: Path, name: str, field: Any, data_start: int) -> Entry:
    where = f"in {path} tensor {quote(name)}"
    if not isinstance(field, dict):
        raise CheckpointError(f"{where} is not described by a JSON object")
    dtype, shape, offsets = field.get("dtype"), field.get("shape"), field.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where} has dtype {quote(dtype)}, which safetensors does not know")
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise CheckpointError(f"{where} has shape {quote(shape)}, expected a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise CheckpointError(f"{where} has data_offsets {quote(offsets)}, expected [begin, end]")
    begin, end = offsets
    if end < begin:
        raise CheckpointError(f"{where} has data_offsets {quote(offsets)}: the end lies before the beginning")
    numel = 0 if 0 in shape else 1
    for size in shape:
        numel *= size
        if numel >= _LARGEST_COUNT:
            raise CheckpointError(f"{where} has shape {quote(shape)}, larger than any file")
    bits = numel * DTYPE_BITS[dtype]
    if bits != (end - begin) * 8:
        raise CheckpointError(
            f"{where} of dtype {dtype} and shape {quote(shape)} needs {(bits + 7) // 8:,} bytes "
            f"but its range holds {end - begin:,}"
        )
    return Entry(name, dtype, tuple(shape), data_start + begin, end - begin)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_COUNT
