"""Turns a folder into its config and every tensor's file, offset, dtype and shape.

Only headers are read; everything is checked here, once, before anything runs (the rules of one file are
in `safetensors.py`). It decides which files of a folder are the model's shards, and does not know what a
tensor is for. Nothing in the folder is ever executed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from spile.errors import CheckpointError, ModelNotFoundError, ReadError, quote
from spile.files.safetensors import check_text, read_header, strict_json
from spile.files.whole import read_whole

INDEX_NAME = "model.safetensors.index.json"
LARGEST_CONFIG_NBYTES = 10_000_000
_LARGEST_INDEX_NBYTES = 32_000_000
_LONGEST_NAME_NBYTES = 255  # of a file, on every file system in use
FLASH_HEAD_NAME = "model-flashhead.safetensors"  # optional, lies beside the shards on purpose
_SHARD_OF = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".h5", ".incomplete", ".part")
NUMPY_DTYPES = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "BF16": np.uint16,
    "F32": np.float32, "F64": np.float64, "C64": np.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `shard` indexes `Checkpoint.shards`, `offset` is absolute in that file."""

    name: str
    dtype: str  # the safetensors name: 'U32', 'BF16', ...
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checked folder. Every tensor lies inside its shard; no two overlap; no name appears twice."""

    folder: Path
    config: Mapping[str, Any]
    shards: tuple[Path, ...]
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = field(default=())

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Read one small tensor into a private array (BF16 as uint16 bits). Touches disk.

        Raises:
            ReadError: the shard ended early or the system refused.
        """
        tensor = self.tensors[name]
        dtype = np.dtype(NUMPY_DTYPES.get(tensor.dtype, np.uint8)).newbyteorder("<")
        data = np.empty(tensor.nbytes, np.uint8)
        read_into(self.shards[tensor.shard], tensor.offset, data)
        values = data.view(dtype)
        return values.reshape(tensor.shape) if values.size == _numel(tensor.shape) else values


def read_into(path: Path, offset: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Fill a uint8 array from a file. Touches disk.

    Raises:
        ReadError: the file ended early or the system refused.
    """
    got = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            view = data.data
            while got < len(view):
                count = file.readinto(view[got:])
                if not count:
                    break
                got += count
    except OSError as error:
        raise ReadError.at(path, offset, data.nbytes, got, error.strerror) from error
    if got < data.nbytes:
        raise ReadError.at(path, offset, data.nbytes, got, "the file ends there")


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read config, index and shard headers of a folder, and check them. Touches disk: headers only.

    Raises:
        ModelNotFoundError: no such folder, or no config.json in it.
        CheckpointError: a file is missing, damaged or contradicts another.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"there is no model folder {folder}")
    config = read_config(folder)
    notes = _code_notes(folder, config)
    names, weight_map = _find_shards(folder, notes)
    shards = tuple(folder / name for name in names)
    tensors: dict[str, Tensor] = {}
    for shard, path in enumerate(shards):
        for entry in read_header(path):
            if entry.name in tensors:
                other = names[tensors[entry.name].shard]
                raise CheckpointError(
                    f"tensor {quote(entry.name)} is in two shards of {folder}: {other}, {path.name}"
                )
            tensors[entry.name] = Tensor(
                entry.name, entry.dtype, entry.shape, shard, entry.offset, entry.nbytes
            )
    _check_index(folder, names, weight_map, tensors)
    return Checkpoint(folder, MappingProxyType(config), shards, MappingProxyType(tensors), tuple(notes))


def check_folder(folder: Path) -> None:
    """Check that a folder can be a model at all.

    Raises:
        ModelNotFoundError: it has no config.json; the message lists what was looked for.
    """
    if not (folder / "config.json").exists():
        raise ModelNotFoundError(
            f"{folder} is not a model folder: looked for config.json, model.safetensors and {INDEX_NAME} "
            f"and found no config.json",
            _found_instead(folder),
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json as an object. NaN passes here, so that the key that holds it can be named later.

    Raises:
        ModelNotFoundError: there is none.
        CheckpointError: it cannot be read as a JSON object.
    """
    check_folder(folder)
    path = folder / "config.json"
    return read_json_object(path, largest_nbytes=LARGEST_CONFIG_NBYTES, allow_nan=True)


def read_json_object(path: Path, *, largest_nbytes: int, allow_nan: bool = False) -> dict[str, Any]:
    """Read a JSON file that has to hold an object.

    Raises:
        CheckpointError: it is unreadable, too large, not UTF-8, not JSON or not an object.
    """
    try:
        data = read_whole(path, largest_nbytes, CheckpointError)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not data.strip():
        raise CheckpointError(f"{path} is empty", "Is this an incomplete download? Download it again.")
    try:
        text = data.decode("utf-8-sig")
        if allow_nan:
            value = json.loads(text)
            check_text(text, value)
        else:
            value = strict_json(text)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: it is not UTF-8 text (byte {error.start:,})") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is damaged: it is nested too deeply") from error
    except ValueError as error:
        guess = " (it is a Git LFS pointer)" if data.startswith(b"version https://git-lfs") else ""
        raise CheckpointError(f"{path} is damaged: it is not valid JSON: {error}{guess}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it holds no JSON object")
    return value


def is_plain_name(name: str) -> bool:
    """Whether a file name from an index stays inside its folder, and is one that a file can have."""
    fits = len(name.encode("utf-8", "replace")) <= _LONGEST_NAME_NBYTES
    return fits and name not in ("", ".", "..") and not any(mark in name for mark in ("/", "\\", "\0", ":"))


def read_weight_map(path: Path) -> dict[str, str]:
    """Read an index file's map of tensor name to shard name.

    Raises:
        CheckpointError: it is damaged, empty, or names a file outside the folder.
    """
    weight_map = read_json_object(path, largest_nbytes=_LARGEST_INDEX_NBYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} is damaged: it has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not is_plain_name(name):
            raise CheckpointError(
                f"{path} puts tensor {quote(tensor)} in {quote(name)}: "
                "shards must be plain file names in the same folder"
            )
    return weight_map


def _find_shards(folder: Path, notes: list[str]) -> tuple[list[str], dict[str, str]]:
    """Decide which files are the shards; also the weight_map, empty where the index does not count."""
    present = _weight_files(folder)
    index = _find_index(folder)
    if index is None:
        return _shards_without_index(folder, present, notes), {}
    weight_map = read_weight_map(index)
    named = sorted(set(weight_map.values()))
    missing = [name for name in named if not (folder / name).is_file()]
    if not missing:
        _note_ignored(notes, present, named, f"not named by {index.name}")
        return named, weight_map
    if len(missing) == len(named) and "model.safetensors" in present:
        notes.append(
            f"{index.name} names {len(named)} files that are not there ({_listing(named)}); "
            f"it is ignored, model.safetensors is loaded"
        )
        _note_ignored(notes, present, ["model.safetensors"], "beside model.safetensors")
        return ["model.safetensors"], {}
    raise _incomplete(folder, missing, len(named))


def _find_index(folder: Path) -> Path | None:
    if (folder / INDEX_NAME).exists():
        return folder / INDEX_NAME
    others = sorted(folder.glob("*.safetensors.index.json"))
    if len(others) > 1:
        listing = _listing([path.name for path in others])
        raise CheckpointError(f"{folder} has several index files and none is {INDEX_NAME}: {listing}")
    return others[0] if others else None


def _shards_without_index(folder: Path, present: list[str], notes: list[str]) -> list[str]:
    if "model.safetensors" in present:
        _note_ignored(notes, present, ["model.safetensors"], "beside model.safetensors")
        return ["model.safetensors"]
    candidates = [name for name in present if name != FLASH_HEAD_NAME]
    if not candidates:
        raise CheckpointError(
            f"{folder} has no weights: looked for model.safetensors and {INDEX_NAME}", _found_instead(folder)
        )
    matches = [match for name in candidates if (match := _SHARD_OF.fullmatch(name))]
    series = {(match["stem"], match["count"]) for match in matches}
    if len(series) == 1 and len(matches) == len(candidates):
        stem, count = series.pop()
        wanted = [f"{stem}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
        if set(candidates) < set(wanted):
            raise _incomplete(folder, sorted(set(wanted) - set(candidates)), len(wanted))
        if set(candidates) == set(wanted):
            return wanted
    if len(candidates) == 1:
        return candidates
    raise CheckpointError(
        f"{folder} has {len(candidates)} safetensors files ({_listing(candidates)}) "
        f"and no {INDEX_NAME} that says which of them are the model"
    )


def _check_index(
    folder: Path, names: list[str], weight_map: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> None:
    for name, shard_name in weight_map.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"the index of {folder} puts tensor {quote(name)} in {shard_name}, which does not hold it",
                "The index and the shards are not of the same download; download both again.",
            )
        if names[tensor.shard] != shard_name:
            raise CheckpointError(
                f"the index of {folder} puts tensor {quote(name)} in {shard_name}, "
                f"but it is in {names[tensor.shard]}",
                "The index and the shards are not of the same download; download both again.",
            )


def _code_notes(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Say which code the folder offers; none of it is ever run."""
    notes = []
    if config.get("model_file") is not None:
        notes.append(
            f"config.json names model_file {quote(config['model_file'])}: "
            "ignored, spile runs only its own code"
        )
    sources = ["config.json"] if config.get("auto_map") else []
    tokenizer_config = folder / "tokenizer_config.json"
    if tokenizer_config.is_file():
        try:
            fields = read_json_object(tokenizer_config, largest_nbytes=_LARGEST_INDEX_NBYTES, allow_nan=True)
        except CheckpointError:
            fields = {}  # the tokenizer reports it, if one is wanted
        if fields.get("auto_map"):
            sources.append("tokenizer_config.json")
    if sources:
        verb = "have" if len(sources) > 1 else "has"
        notes.append(f"{' and '.join(sources)} {verb} auto_map: ignored, spile runs only its own code")
    return notes


def _weight_files(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".safetensors"))
    except OSError as error:
        raise CheckpointError(f"cannot read the folder {folder}: {error.strerror or error}") from error


def _note_ignored(notes: list[str], present: list[str], used: list[str], why: str) -> None:
    ignored = [name for name in present if name not in used and name != FLASH_HEAD_NAME]
    if ignored:
        notes.append(f"ignored {_listing(ignored)}: {why}")


def _incomplete(folder: Path, missing: list[str], count: int) -> CheckpointError:
    return CheckpointError(
        f"incomplete download: {folder} lacks {len(missing)} of {count} shards: "
        f"{', '.join(map(_printable, missing))}",
        "Download the missing files and try again.",
    )


def _found_instead(folder: Path) -> str | None:
    try:
        others = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(_OTHER_WEIGHTS))
    except OSError:
        return None
    return f"Found {_listing(others)}; spile reads safetensors only." if others else None


def _listing(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(_printable(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _printable(name: str) -> str:
    return name if name.isascii() and name.isprintable() else quote(name)


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
