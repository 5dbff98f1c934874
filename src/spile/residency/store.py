"""Turns extents of shards into bytes in given buffers: the only reader of expert bytes.

Reads are positional and run on native threads that hold no GIL. Direct reads go round the page cache in whole
pages, so a buffer starts on a page and an extent begins `delta` bytes behind it, in buffered mode too: where
an expert's bytes lie does not depend on how they came. It knows nothing of layers, slots or policies.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spile import _core
from spile.errors import ReadError
from spile.residency.experts import Extent

_HUGE_PAGE_NBYTES = 1 << 21
ENDED = 0  # the ticket of reads that ended before anybody could wait; real ones count from 1
PAGE_NBYTES = 4096  # of direct reads: every file system in use takes this alignment
# Queue depth: beyond it random reads of 262 kB got no faster (measured, virtio disk, 2026-11-30).
NUM_THREADS = 8


class Store:
    """Open shards and the threads that read them.

    `is_direct` says how reads go; `note`, where not None, why they do not go as asked.
    """

    def __init__(self, shards: Sequence[Path], *, direct: bool, num_threads: int = NUM_THREADS) -> None:
        """Open the shards.

        Raises: ReadError when one cannot be opened.
        """
        self._shards = tuple(shards)
        self._fds: list[int] = []
        self._extents: dict[int, Sequence[Extent]] = {}  # of each ticket in flight, for its error message
        self.note: str | None = None
        self.stall_seconds = 0.0
        self.num_drains = 0  # how often all tickets were forgotten
        self.is_direct = direct
        # Reads requests [n, 5] that the page cache holds, marking them in done [n]; None: nobody does.
        self.read_cached: Callable[[NDArray[np.uint64], NDArray[np.uint8]], None] | None = None
        self._num_cached_reads = self._cached_nbytes = 0
        self._reader: _core.Reader | None = None
        self._unfinished: NDArray[np.uint8] | None = None  # what an interrupted `read` may still write to
        try:
            self._open_files(direct)
            reason = _refusal(self._fds) if direct else None
            if reason:
                self.note = f"direct reads are refused by the file system ({reason}): reading buffered"
                self.is_direct = False
                self._close_files()
                self._open_files(direct=False)
        except OSError as error:
            self._close_files()
            raise ReadError(f"cannot open {error.filename}: {error.strerror}") from error
        self._reader = _core.Reader(num_threads)

    @staticmethod
    def delta(extent: Extent) -> int:
        """Bytes between the start of a buffer and the extent's first byte."""
        return extent.offset % PAGE_NBYTES

    @staticmethod
    def room(extent: Extent) -> int:
        """Bytes that a buffer for the extent must have: whole pages."""
        return -(-(extent.offset % PAGE_NBYTES + extent.nbytes) // PAGE_NBYTES) * PAGE_NBYTES

    def submit(self, extents: Sequence[Extent], addresses: Sequence[int]) -> int:
        """Start reading each extent into the page-aligned buffer at its address. Returns a ticket at once."""
        shards, offsets, nbytes = np.array(extents, np.int64).reshape(-1, 3).T
        requests = self._requests(shards, offsets, nbytes, np.array(addresses, np.int64))
        ticket = self._open_reader().submit(requests)
        self._extents[ticket] = extents
        return ticket

    def submit_groups(
        self,
        shards: NDArray[np.int64],
        offsets: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        addresses: NDArray[np.int64],
    ) -> list[int]:
        """Start n groups of m reads, [n, m] each: as n calls of `submit`, at the cost of one.

        What the page cache holds is copied before this returns, by `read_cached`: those threads would only
        wait for it, and a reader thread beside them would take their cores.
        """
        n, m = offsets.shape
        requests = self._requests(shards, offsets, nbytes, addresses)
        done = np.zeros(n * m, np.uint8)
        if self.read_cached is not None and not self.is_direct:
            self.read_cached(requests.reshape(-1, 5), done)
            self._num_cached_reads += int(np.count_nonzero(done))
            self._cached_nbytes += int(done @ nbytes.reshape(-1))
            if done.all():
                return [ENDED] * n
        tickets = []
        reader = self._open_reader()
        for row, missing in enumerate(done.reshape(n, m) == 0):
            if not missing.any():
                tickets.append(ENDED)
                continue
            ticket = reader.submit(requests[row][missing])
            self._extents[ticket] = [
                Extent(int(shards[row, part]), int(offsets[row, part]), int(nbytes[row, part]))
                for part in np.flatnonzero(missing)
            ]
            tickets.append(ticket)
        return tickets

    def is_done(self, ticket: int) -> bool:
        """Say whether every read of the ticket has ended, well or badly. Does not block."""
        return ticket == ENDED or self._open_reader().is_done(ticket)

    def wait(self, ticket: int) -> None:
        """Block until every read of the ticket has ended.

        Raises: ReadError for the first one that failed; its buffers then hold nothing of use.
        """
        if ticket == ENDED:
            return
        started = time.perf_counter()
        index, _offset, _wanted, got, error = self._open_reader().wait(ticket)
        self.stall_seconds += time.perf_counter() - started
        extents = self._extents.pop(ticket)
        if index < 0:
            return
        extent = extents[index]
        got = max(0, got - (self.delta(extent) if self.is_direct else 0))
        reason = os.strerror(error) if error else "the file ends there"
        raise ReadError.at(self._shards[extent.shard], extent.offset, extent.nbytes, got, reason)

    def read(self, extents: Sequence[Extent]) -> list[NDArray[np.uint8]]:
        """Read small extents into arrays of their own. Blocks.

        Raises: ReadError.
        """
        if self._unfinished is not None:
            self.drain()
        rooms = [self.room(extent) for extent in extents]
        buffer = self._unfinished = aligned_buffer(sum(rooms))
        starts = list(accumulate(rooms, initial=0))[:-1]
        base = buffer.ctypes.data
        self.wait(self.submit(extents, [base + start for start in starts]))
        self._unfinished = None
        return [
            buffer[start + self.delta(extent) : start + self.delta(extent) + extent.nbytes]
            for start, extent in zip(starts, extents, strict=True)
        ]

    def read_if_cached(self, extents: Sequence[Extent]) -> list[NDArray[np.uint8]] | None:
        """Read small extents on this thread if the page cache holds them all, which for a few is quicker than to
        wake the readers; else return None. Does not block.
        """
        if self.is_direct or not hasattr(os, "RWF_NOWAIT"):
            return None
        found = []
        for extent in extents:
            data = np.empty(extent.nbytes, np.uint8)
            try:
                got = os.preadv(self._fds[extent.shard], [data.data], extent.offset, os.RWF_NOWAIT)
            except OSError:  # not cached, or a file system that cannot say
                return None
            if got < extent.nbytes:
                return None
            found.append(data)
        self._num_cached_reads += len(found)
        self._cached_nbytes += sum(extent.nbytes for extent in extents)
        return found

    def counters(self) -> tuple[int, int, float]:
        """Return bytes read, reads made and seconds spent inside reads (summed over threads)."""
        nbytes, reads, seconds = self._open_reader().counters()
        return nbytes + self._cached_nbytes, reads + self._num_cached_reads, seconds

    def drain(self) -> None:
        """Drop reads that have not begun, block until the others have ended, and forget every ticket.

        Nothing is written to any buffer after that. What the buffers of forgotten tickets hold is unknown.
        """
        self.num_drains += 1
        reader = self._open_reader()
        reader.cancel()
        reader.drain()
        for ticket in self._extents:
            reader.wait(ticket)
        self._extents.clear()
        self._unfinished = None

    def close(self) -> None:
        """End reads in flight, stop the threads, close the files. May be called twice."""
        if self._reader is not None:
            self.drain()
            self._reader = None
        self._close_files()

    def _requests(
        self,
        shards: NDArray[np.int64],
        offsets: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        addresses: NDArray[np.int64],
    ) -> NDArray[np.uint64]:
        """Return what the reader takes, [..., 5]: fd, offset, bytes wanted, bytes of room, address."""
        deltas = offsets % PAGE_NBYTES
        requests = np.empty((*offsets.shape, 5), np.uint64)
        requests[..., 0] = self._fd_table[shards]
        if self.is_direct:
            requests[..., 1], requests[..., 4] = offsets - deltas, addresses
            requests[..., 2] = deltas + nbytes
            requests[..., 3] = -(-(deltas + nbytes) // PAGE_NBYTES) * PAGE_NBYTES
        else:
            requests[..., 1], requests[..., 4] = offsets, addresses + deltas
            requests[..., 2] = requests[..., 3] = nbytes
        return requests

    def _open_reader(self) -> _core.Reader:
        assert self._reader is not None, "the store was closed"
        return self._reader

    def _open_files(self, direct: bool) -> None:
        for path in self._shards:
            self._fds.append(_open(path, direct))
        self._fd_table = np.array(self._fds, np.uint64)

    def _close_files(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


class ShardWatch:
    """Notices that a shard was overwritten or cut short since the watch began. A file that was replaced whole is
    another file: what was opened before stays as it was.
    """

    def __init__(self, shards: Sequence[Path]) -> None:
        """Open the shards once more, and note their sizes and times.

        Raises: ReadError when one cannot be opened.
        """
        self._shards = tuple(shards)
        self._fds: list[int] = []
        try:
            for path in self._shards:
                self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.close()
            raise ReadError(f"cannot open {error.filename}: {error.strerror}") from error
        self._marks = [_mark(fd) for fd in self._fds]

    def check(self) -> None:
        """Look whether every shard is as it was. Cost: a system call each.

        Raises: ReadError naming one that is not.
        """
        for path, fd, mark in zip(self._shards, self._fds, self._marks, strict=True):
            now = _mark(fd)
            if now == mark:
                continue
            if now[0] < mark[0]:
                raise ReadError.at(path, 0, mark[0], now[0], "it became shorter while in use")
            raise ReadError(
                f"{path} was changed while in use: it had {mark[0]:,} bytes and has {now[0]:,}, "
                f"written {(now[1] - mark[1]) / 1e9:.3f} s later",
                "Load the model again; replace a file by renaming, not by writing into it.",
            )

    def close(self) -> None:
        """Close the files. May be called twice."""
        while self._fds:
            os.close(self._fds.pop())


def _mark(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_size, stat.st_mtime_ns


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Return a uint8 array of its own whose first byte starts a page."""
    return np.frombuffer(private_memory(max(nbytes, 1)), np.uint8)[:nbytes]


def private_memory(nbytes: int) -> mmap.mmap:
    """Reserve anonymous pages; they are taken when first written, and go with the object.

    Huge ones where the system has them: a direct read into small pages, each its own piece of the request, ran at 1.15
    GB/s, and into huge ones at 2.4 (256 kB reads, 8 at a time, virtual disk, 2026-11-30).
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _open(path: Path, direct: bool) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC
    if direct and sys.platform.startswith("linux"):
        flags |= os.O_DIRECT
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if not direct or error.errno != 22:  # EINVAL: no direct reads here; found out again by _refusal
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if direct and sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
    elif not direct and hasattr(os, "posix_fadvise"):
        # Experts are asked for at random and whole: the kernel's read-ahead (8 MB on some disks) would read
        # thirty times what is wanted.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd


def _refusal(fds: Sequence[int]) -> str | None:
    """Try a direct read on each file; return why the first that fails does."""
    page = private_memory(PAGE_NBYTES)
    for fd in fds:
        if sys.platform.startswith("linux") and not _is_direct(fd):
            return "open refused it"
        try:
            os.preadv(fd, [page], 0)
        except OSError as error:
            return str(error.strerror)
    return None


def _is_direct(fd: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
