"""A checkpoint's bytes -> one digest for every tensor and every expert in it, and what changed since they
were recorded.

Running a model twice from the same damaged file gives the same wrong answer twice, so `verify` has to
compare the bytes with something older than the run. Three things can serve, and `FileCheck` says which did:

- a record: the digests of an earlier `verify` (or of `synth` and `convert`, which record what they have
  written), kept in the user's cache folder, or shipped with spile for the models it knows. Records are
  found by the names, types and shapes of the tensors, so a copy of a model is compared with the record of
  the original;
- a manifest: the same thing in a file that the user names and may carry along with the model;
- the hub: a downloaded shard's file in the hub's cache is named by the SHA-256 that the hub published for it.

With none of them the digests are recorded and nothing is proved. Digests detect damage, not a forger who
can write records too. This file knows nothing of engines or of what a tensor means, except that the first
axis of a tensor with three axes counts experts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spile.errors import CheckpointError, ReadError, WriteError, clean
from spile.files.checkpoint import LARGEST_CONFIG_NBYTES, Checkpoint, read_json_object
from spile.files.whole import read_whole

FORMAT = 1
READ_NBYTES = 4 << 20  # one pread; larger ones are no faster here
DIGEST_NBYTES = 16  # SHA-256, cut: a record of the 20B model is 0.7 MB instead of 1.3
LARGEST_RECORD_NBYTES = 100_000_000
SHIPPED_RECORDS = Path(__file__).parents[1] / "records"  # made by `spile verify MODEL --manifest FILE`

Digests = Mapping[str, tuple[str, ...]]  # tensor name, or "config.json" -> one digest, or one an expert


@dataclass(frozen=True)
class FileCheck:
    """What comparing a checkpoint's files with older digests gave.

    `compared_with` is empty exactly when there was nothing to compare with; `damaged` names what differs.
    """

    compared_with: tuple[str, ...]
    damaged: tuple[str, ...]
    recorded_in: str | None  # the file that now holds this checkpoint's digests, if this check wrote it
    notes: tuple[str, ...]
    num_digests: int
    nbytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.damaged

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


@dataclass(frozen=True)
class _Piece:
    """What one digest covers: a whole tensor, or one expert's part of it."""

    tensor: str
    index: int
    shard: int
    offset: int
    nbytes: int


def records_folder() -> Path:
    """Return the folder of the user's records, whether or not it exists."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "spile" / "records"


def check_files(
    checkpoint: Checkpoint,
    *,
    manifest: Path | None = None,
    record: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> FileCheck:
    """Digest every tensor and compare with the manifest, or else with the records and the hub.

    A manifest that does not exist yet is written, into a folder that exists. `record` takes the files as they
    are now for good and replaces what was recorded of them. `on_progress` gets bytes done and in all, from
    any thread. Reads the whole checkpoint.

    Raises:
        ReadError: a file ends early or cannot be read.
        CheckpointError: the manifest is not one of this model, or is no regular file.
        WriteError: the manifest cannot be written.
    """
    start = time.perf_counter()
    older = None if manifest is None else _read_manifest(manifest, checkpoint, record=record)
    meter = _Meter(checkpoint, on_progress)
    digests = _digest(checkpoint, meter)
    compared_with: list[str] = []
    damaged: list[str] = []
    notes: list[str] = []
    recorded_in: str | None = None

    if manifest is not None:
        if older:
            compared_with.append(f"the manifest {manifest}")
            candidates: list[list[str]] = [_differences(each["digests"], digests) for each in older]
            fewest: list[str] = min(candidates, key=len)
            damaged += fewest
        else:
            record_of_copies = {
                **_record_of(checkpoint, digests),
                "folder": "",
            }  # it travels: no path of ours
            _write_records(manifest, _key(checkpoint), [record_of_copies])
            recorded_in = str(manifest)
    else:
        found, unusable = (None, {}) if record else _compare_with_records(checkpoint, digests)
        if found is not None:
            compared_with.append(found.where)
            damaged += found.differences
            notes += [found.note] if found.note else []
        hub_shards = [(path, name) for path in checkpoint.shards if (name := _hub_sha256(path))]
        if hub_shards:
            compared_with.append(f"the hub's SHA-256 of {len(hub_shards)} of {len(checkpoint.shards)} shards")
            damaged += _compare_with_hub(hub_shards)
        if found is None and not damaged:
            recorded_in, more = _add_record(checkpoint, digests)
            notes += more
            unusable.pop(_record_path(checkpoint), None)  # it was said that this was made again
        notes += [f"a record of earlier digests was not used: {why}" for why in unusable.values()]

    return FileCheck(
        compared_with=tuple(compared_with),
        damaged=tuple(damaged),
        recorded_in=recorded_in,
        notes=tuple(notes),
        num_digests=sum(map(len, digests.values())),
        nbytes=meter.total,
        seconds=time.perf_counter() - start,
    )


def describe(check: FileCheck) -> list[str]:
    """Return the check as lines for a person. Names in it are foreign."""
    lines = []
    size = f"{check.num_digests:,} digests over {check.nbytes / 1e6:,.0f} MB in {check.seconds:.1f} s"
    if check.damaged:
        lines.append(f"files: DIFFERENT from {' and '.join(check.compared_with)} ({size})")
        lines += [f"  {name}" for name in check.damaged[:8]]
        if len(check.damaged) > 8:
            lines.append(f"  and {len(check.damaged) - 8:,} more")
        lines.append("  Get the model again; if it was changed on purpose, run once with --record.")
    elif check.compared_with:
        lines.append(f"files: equal to {' and '.join(check.compared_with)} ({size})")
    else:
        lines.append(f"files: recorded, not compared: no older digests of this model were found ({size})")
    if check.recorded_in is not None:
        lines.append(f"  recorded in {check.recorded_in}")
    return [clean(line) for line in (*lines, *(f"  {note}" for note in check.notes))]


class _Meter:
    """Counts bytes digested by several threads."""

    def __init__(self, checkpoint: Checkpoint, on_progress: Callable[[int, int], None] | None) -> None:
        self.total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        self.done = 0
        self.lock = threading.Lock()
        self.on_progress = on_progress

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes
            if self.on_progress is not None:
                self.on_progress(self.done, self.total)


def _key(checkpoint: Checkpoint) -> str:
    """Name the kind of model: the digest of every tensor's name, type and shape, however they are split
    over shards."""
    lines = sorted(f"{name} {t.dtype} {list(t.shape)}\n" for name, t in checkpoint.tensors.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _pieces(checkpoint: Checkpoint) -> Iterator[_Piece]:
    """Yield pieces in file order."""
    for name, tensor in sorted(checkpoint.tensors.items(), key=lambda item: (item[1].shard, item[1].offset)):
        parts = tensor.shape[0] if len(tensor.shape) == 3 else 1
        nbytes = tensor.nbytes // parts
        for index in range(parts):
            yield _Piece(name, index, tensor.shard, tensor.offset + index * nbytes, nbytes)


def _digest(checkpoint: Checkpoint, meter: _Meter) -> Digests:
    """Digest all pieces on a few threads; hashlib lets go of the GIL."""
    batches: list[list[_Piece]] = []
    room = 0
    for piece in _pieces(checkpoint):
        if room <= 0:
            batches.append([])
            room = READ_NBYTES
        batches[-1].append(piece)
        room -= piece.nbytes

    files = [path.open("rb", buffering=0) for path in checkpoint.shards]
    try:

        def digest_batch(batch: list[_Piece]) -> list[str]:
            result = []
            for piece in batch:
                sha = hashlib.sha256()
                path, fd = checkpoint.shards[piece.shard], files[piece.shard].fileno()
                for block in _blocks(path, fd, piece.offset, piece.nbytes):
                    sha.update(block)
                    meter.add(len(block))
                result.append(sha.hexdigest()[: 2 * DIGEST_NBYTES])
            return result

        digests: dict[str, list[str]] = {}
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            for batch, hexes in zip(batches, pool.map(digest_batch, batches), strict=True):
                for piece, text in zip(batch, hexes, strict=True):
                    digests.setdefault(piece.tensor, []).append(text)
    finally:
        for file in files:
            file.close()
    config = read_whole(checkpoint.folder / "config.json", LARGEST_CONFIG_NBYTES, CheckpointError)
    digests["config.json"] = [hashlib.sha256(config).hexdigest()[: 2 * DIGEST_NBYTES]]
    return {name: tuple(values) for name, values in digests.items()}


def _blocks(path: Path, fd: int, offset: int, nbytes: int) -> Iterator[bytes]:
    """Yield a range of a file in reads of at most READ_NBYTES."""
    end = offset + nbytes
    while offset < end:
        try:
            block = os.pread(fd, min(READ_NBYTES, end - offset), offset)
        except OSError as error:
            raise ReadError.at(path, offset, end - offset, 0, error.strerror) from error
        if not block:
            raise ReadError.at(path, offset, end - offset, 0, "the file ends there")
        offset += len(block)
        yield block


def _differences(older: Mapping[str, Any], newer: Digests) -> list[str]:
    """Name every piece whose digest differs."""
    names = []
    for name, values in newer.items():
        before = older.get(name, ())
        for index, value in enumerate(values):
            if index >= len(before) or before[index] != value:
                names.append(f"{name}, expert {index}" if len(values) > 1 else name)
    return names


@dataclass(frozen=True)
class _Comparison:
    """What one record says of a checkpoint."""

    where: str
    differences: list[str]
    note: str | None


def _compare_with_records(
    checkpoint: Checkpoint, digests: Digests
) -> tuple[_Comparison | None, dict[Path, str]]:
    """Compare with the record that fits best, None when this model was not seen before; also say which files
    of records could not be used, and why.

    A copy with the same kind of tensors of which most differ is another model and not a damaged one, unless
    it lies in the very folder that was recorded. Only the weights of a copy have to be the same: two ways to
    the same weights, such as a download and `convert`, write config.json in two ways.
    """
    key, folder = _key(checkpoint), str(checkpoint.folder.resolve())
    best: tuple[tuple[int, bool], _Comparison] | None = None
    unusable: dict[Path, str] = {}
    sources = [("shipped with spile", path) for path in sorted(SHIPPED_RECORDS.glob("*.json"))]
    for source, path in [*sources, ("in your cache", _record_path(checkpoint))]:
        try:
            records = _read_records(path, key)
        except CheckpointError as error:
            unusable[path] = str(error)
            continue
        for each in records:
            names = _differences(each["digests"], digests)
            weights = [name for name in names if name != "config.json"]
            same_folder = each["folder"] == folder
            if not same_folder and 2 * len(weights) >= sum(map(len, digests.values())):
                continue
            rank = len(weights), not same_folder
            if best is None or rank < best[0]:
                of = "" if same_folder or not each["folder"] else f" of {each['folder']}"
                where = f"the record{of} {source}, made {each['recorded']}"
                note = (
                    None if same_folder or names == weights else f"config.json differs from that of {where}"
                )
                best = rank, _Comparison(where, names if same_folder else weights, note)
    return (best[1] if best else None), unusable


def _hub_sha256(path: Path) -> str | None:
    """Return the SHA-256 in the name of the hub cache's file behind a shard, or None for any other file.

    Source: the hub's cache keeps a large file as `blobs/<SHA-256>` and links to it from `snapshots/`
    (https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
    """
    real = path.resolve()
    return real.name if real.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", real.name) else None


def _compare_with_hub(shards: list[tuple[Path, str]]) -> list[str]:
    def compare(item: tuple[Path, str]) -> str | None:
        path, wanted = item
        sha = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            for block in _blocks(path, file.fileno(), 0, os.fstat(file.fileno()).st_size):
                sha.update(block)
        found = sha.hexdigest()
        return None if found == wanted else f"{path.name}: SHA-256 is {found}, the hub's is {wanted}"

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return [text for text in pool.map(compare, shards) if text is not None]


def _record_of(checkpoint: Checkpoint, digests: Digests) -> dict[str, Any]:
    recorded = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"folder": str(checkpoint.folder.resolve()), "recorded": recorded, "digests": digests}


def _record_path(checkpoint: Checkpoint) -> Path:
    return records_folder() / f"{_key(checkpoint)}.json"


def _read_manifest(path: Path, checkpoint: Checkpoint, *, record: bool) -> list[dict[str, Any]] | None:
    """Return the records to compare with, or None for a manifest that is to be written. Looks at all that can
    be wrong with it before the weights are read.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"the manifest {path} is not a regular file")
    if record or not os.path.exists(path):
        if not os.path.isdir(path.parent):
            raise WriteError(f"the manifest {path} cannot be written: there is no folder {path.parent}")
        return None
    older = _read_records(path, _key(checkpoint))
    if not older:
        raise CheckpointError(
            f"{path} holds no digests of a model with the tensors of {checkpoint.folder}",
            "Name the manifest of this model, or a file that does not exist, which is then written.",
        )
    return older


def _read_records(path: Path, key: str) -> list[dict[str, Any]]:
    """Return the records in a file; none when it does not exist or is about another kind of model.

    Raises: CheckpointError when it cannot be read as a file of records.
    """
    if not os.path.exists(path):
        return []
    content = read_json_object(path, largest_nbytes=LARGEST_RECORD_NBYTES)
    records = content.get("records")
    if content.get("format") != FORMAT or not isinstance(records, list) or not all(map(_is_record, records)):
        raise CheckpointError(f"{path} is not a file of digests that this version of spile wrote")
    return records if content.get("key") == key else []


def _is_record(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("folder"), str)
        and isinstance(value.get("recorded"), str)
        and isinstance(value.get("digests"), dict)
        and all(isinstance(hexes, list) for hexes in value["digests"].values())
    )


def _write_records(path: Path, key: str, records: list[dict[str, Any]]) -> None:
    """Write a file of records, whole or not at all, into a folder that exists."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with partial.open("w") as file:
                json.dump({"format": FORMAT, "key": key, "records": records}, file, separators=(",", ":"))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror}") from error


def _add_record(checkpoint: Checkpoint, digests: Digests) -> tuple[str | None, list[str]]:
    """Record in the user's cache, in place of this folder's older record; return the file, or None, and what
    did not go as it should.
    """
    path, new, notes = _record_path(checkpoint), _record_of(checkpoint, digests), []
    try:
        kept = [each for each in _read_records(path, _key(checkpoint)) if each["folder"] != new["folder"]]
    except CheckpointError as error:
        kept = []
        notes.append(f"the record of earlier digests is damaged and was made again: {error}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_records(path, _key(checkpoint), [*kept, new])
    except (OSError, WriteError) as error:
        return None, [f"not recorded: {error}"]
    return str(path), notes


def record_files(
    checkpoint: Checkpoint, *, on_progress: Callable[[int, int], None] | None = None
) -> tuple[str, ...]:
    """Record a checkpoint that was just written, so that later damage is found; return notes. Reads it whole;
    never fails for a full or read-only cache folder.
    """
    _, notes = _add_record(checkpoint, _digest(checkpoint, _Meter(checkpoint, on_progress)))
    return tuple(notes)
