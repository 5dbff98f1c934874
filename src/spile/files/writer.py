"""Turns tensors and their bytes into safetensors shards in a folder that appears complete or not at all.

A shard's header is written first, from names, dtypes and shapes alone; the bytes then come in any order
and in pieces of any size, so nothing has to be held. A folder is written under another name beside its
destination, renamed at the end, and removed on any error or interruption; what a killed process left is removed by the
next one that writes the same folder. It does not know what the
tensors mean.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spile.errors import WriteError
from spile.files.checkpoint import INDEX_NAME
from spile.files.safetensors import DTYPE_BITS

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RESERVE_NBYTES = 16_000_000  # for config, tokenizer and the file system's own tables


class Spec(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * DTYPE_BITS[self.dtype] // 8


class ShardWriter:
    """One shard being written. Tensors lie in the official writer's order: widest dtype first, then name."""

    def __init__(self, path: Path, specs: Sequence[Spec]) -> None:
        self.path = path
        fields: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        self._starts: dict[str, int] = {}
        self._missing = {spec.name: spec.nbytes for spec in specs}
        end = 0
        for spec in sorted(specs, key=lambda spec: (-DTYPE_BITS[spec.dtype], spec.name)):
            self._starts[spec.name] = end
            offsets = [end, end + spec.nbytes]
            fields[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
            end += spec.nbytes
        header = json.dumps(fields, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._data_start = 8 + len(header)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._pwrite(0, len(header).to_bytes(8, "little") + header)

    def write(self, name: str, start: int, data: bytes | NDArray[Any]) -> None:
        """Write bytes of a tensor, `start` bytes into it. Every byte is to be written once."""
        view = memoryview(data) if isinstance(data, bytes) else _as_bytes(data)
        self._missing[name] -= len(view)
        self._pwrite(self._data_start + self._starts[name] + start, view)

    def close(self) -> None:
        """Finish the shard: all bytes were written and are on the disk."""
        unwritten = {name: nbytes for name, nbytes in self._missing.items() if nbytes}
        assert not unwritten, f"bytes of these tensors were not written exactly once: {unwritten}"
        os.fsync(self._file)
        self.abandon()

    def abandon(self) -> None:
        """Close the file, whatever it holds."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _pwrite(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._file, view, offset)
            offset, view = offset + count, view[count:]


def split_shards(specs: Sequence[Spec], count: int) -> dict[str, list[Spec]]:
    """Cut a list of tensors into `count` runs of about the same size; the keys are the files' names.

    The tensors of one layer (`x.weight`, `x.row_alpha`) stay together, so `count_units` is the most shards.
    """
    units = _units(specs)
    assert 1 <= count <= len(units), f"{count} shards for {len(units)} units"
    if count == 1:
        return {"model.safetensors": list(specs)}
    total = sum(spec.nbytes for spec in specs)
    shards: list[list[Spec]] = [[]]
    done = 0
    for position, unit in enumerate(units):
        left = len(units) - position
        full = done >= total * len(shards) / count
        if shards[-1] and len(shards) < count and (full or left <= count - len(shards)):
            shards.append([])
        shards[-1].extend(unit)
        done += sum(spec.nbytes for spec in unit)
    return {f"model-{n:05d}-of-{count:05d}.safetensors": shard for n, shard in enumerate(shards, 1)}


def count_units(specs: Sequence[Spec]) -> int:
    """Count the runs of tensors that `split_shards` keeps together."""
    return len(_units(specs))


def _units(specs: Sequence[Spec]) -> list[list[Spec]]:
    return [list(unit) for _, unit in itertools.groupby(specs, lambda spec: spec.name.rpartition(".")[0])]


def write_index(folder: Path, shards: Mapping[str, Sequence[Spec]]) -> None:
    """Write the index of several shards; a single file needs none."""
    if len(shards) == 1:
        return
    total = sum(spec.nbytes for specs in shards.values() for spec in specs)
    weight_map = {spec.name: name for name, specs in shards.items() for spec in specs}
    write_json(
        folder / INDEX_NAME,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, indented by one space."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def atomic_folder(
    destination: Path, needed_nbytes: int, on_note: Callable[[str], None] | None = None
) -> Iterator[Path]:
    """Give a temporary folder beside `destination` that becomes it when the block ends without an error.
    Removes those of processes that were killed; `on_note` gets a sentence about each.

    Raises:
        WriteError: the destination is taken, the disk lacks room or fills up, or writing is refused.
    """
    try:
        target = Path(os.path.abspath(destination.expanduser())).resolve()
        _check_free(destination, target)
        made = _make_parents(target.parent)
    except OSError as error:
        raise _refused(destination, error) from error
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    lock = -1
    try:
        for leftover in _leftovers(target):
            _remove(leftover)
            if on_note is not None and not leftover.exists():
                on_note(f"removed {leftover}, which a run that was killed left behind")
        free = shutil.disk_usage(target.parent).free
        if free < needed_nbytes + _RESERVE_NBYTES:
            raise WriteError(
                f"not enough disk for {destination}: needs {needed_nbytes / 1e6:,.0f} MB, "
                f"{free / 1e6:,.0f} MB are free"
            )
        partial.mkdir()
        lock = _lock(partial)
        yield partial
        partial.rename(target)
    except BaseException as error:
        _remove(partial)
        for parent in made:
            try:
                parent.rmdir()
            except OSError:
                break
        if isinstance(error, OSError):
            raise _refused(destination, error) from error
        raise
    finally:
        if lock >= 0:
            os.close(lock)


def _leftovers(target: Path) -> Iterator[Path]:
    """Yield temporary folders of this destination that nobody writes any more: the process in their name is
    gone, and none holds their lock, as one in another container would.
    """
    start = f".{target.name}.partial-"
    try:
        names = sorted(os.listdir(target.parent))
    except OSError:
        return
    for name in names:
        folder, number = target.parent / name, name.removeprefix(start)
        is_ours = name.startswith(start) and number.isascii() and number.isdigit() and len(number) < 10
        if not is_ours or folder.is_symlink() or not folder.is_dir() or _is_alive(int(number)):
            continue
        with suppress(OSError):  # what cannot be locked stays
            os.close(_lock(folder))
            yield folder


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return False  # of an earlier process with our number
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is someone else's
    return True


def _lock(folder: Path) -> int:
    """Lock a folder for as long as the descriptor that is returned stays open, where the file system can.

    Raises: BlockingIOError when another process has it.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise
    except OSError:
        pass
    return file


def _remove(folder: Path) -> None:
    """Remove what was written; an impatient second Ctrl-C does not stop it."""
    for _ in range(10):
        try:
            shutil.rmtree(folder, ignore_errors=True)
            return
        except KeyboardInterrupt:
            continue


def _check_free(destination: Path, target: Path) -> None:
    if target.is_dir():
        if any(target.iterdir()):
            raise WriteError(
                f"{destination} exists and is not empty", "Name another folder or remove it first."
            )
    elif target.exists():
        raise WriteError(
            f"{destination} exists and is not a folder", "Name another folder or remove it first."
        )


def _make_parents(folder: Path) -> list[Path]:
    """Make a folder and its parents; return those that were made, innermost first."""
    made = []
    for parent in [folder, *folder.parents]:
        if parent.exists():
            break
        made.append(parent)
    folder.mkdir(parents=True, exist_ok=True)
    return made


def _refused(destination: Path, error: OSError) -> WriteError:
    if error.errno in FULL_DISK:
        return WriteError(f"the disk is full: {destination} could not be written; nothing was left behind")
    where = f" ({error.filename})" if error.filename else ""
    return WriteError(f"cannot write {destination}: {error.strerror or error}{where}")


def _as_bytes(data: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
