"""Reads of extents: every byte exact however the system cuts a read up, or one error that says where."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spile import _core
from spile.errors import ReadError
from spile.residency import store
from spile.residency.experts import Extent
from spile.residency.mapped import Touch
from spile.residency.store import ENDED, PAGE_NBYTES, Store, aligned_buffer

FILE_NBYTES = 5 * PAGE_NBYTES + 1234  # the end is inside a page
# Offset and length: odd ones, a byte, within a page, across pages, whole pages, up to the end, everything.
RANGES = [
    (0, 1),
    (0, 7),
    (1, 1),
    (4095, 1),
    (4095, 2),
    (4096, 4096),
    (8192, 1),
    (5, 4096),
    (3333, 9999),
    (4096, 8192),
    (FILE_NBYTES - 1, 1),
    (FILE_NBYTES - 1234, 1234),
    (FILE_NBYTES - 1235, 1235),
    (FILE_NBYTES - 9000, 9000),
    (0, FILE_NBYTES),
]
EXTENTS = [Extent(shard, offset, nbytes) for shard in (0, 1) for offset, nbytes in RANGES]


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    for path in paths:
        path.write_bytes(rng.bytes(FILE_NBYTES))
    return paths


@pytest.fixture(params=["buffered", "direct"])
def opened(request: pytest.FixtureRequest, shards: list[Path]) -> Any:
    opened = Store(shards, direct=request.param == "direct")
    if request.param == "direct" and not opened.is_direct:
        opened.close()
        pytest.skip(str(opened.note))
    yield opened
    opened.close()


def wanted(shards: list[Path], extent: Extent) -> bytes:
    return shards[extent.shard].read_bytes()[extent.offset : extent.offset + extent.nbytes]


def faults(opened: Store, **kinds: int) -> None:
    assert opened._reader is not None
    opened._reader.set_faults(**kinds)


def check_all(opened: Store, shards: list[Path], extents: list[Extent]) -> None:
    for extent, got in zip(extents, opened.read(extents), strict=True):
        assert got.tobytes() == wanted(shards, extent), extent


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))


def test_bytes_are_those_of_the_file(opened: Store, shards: list[Path]) -> None:
    check_all(opened, shards, EXTENTS)
    for extent in EXTENTS:
        assert opened.read([extent])[0].tobytes() == wanted(shards, extent)
    assert opened.read([]) == []


def test_random_extents_are_those_of_the_file(opened: Store, shards: list[Path]) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        offsets = rng.integers(0, FILE_NBYTES, 40)
        lengths = rng.integers(1, FILE_NBYTES - offsets + 1)
        shard = rng.integers(0, 2, 40)
        extents = [Extent(*map(int, row)) for row in zip(shard, offsets, lengths, strict=True)]
        check_all(opened, shards, extents)


def test_bytes_lie_at_the_same_place_in_either_mode(opened: Store, shards: list[Path]) -> None:
    """`delta` behind the buffer's start, and nothing is written outside the room."""
    for extent in EXTENTS:
        room = opened.room(extent)
        assert room % PAGE_NBYTES == 0
        buffer = aligned_buffer(room + 2 * PAGE_NBYTES)
        assert buffer.ctypes.data % PAGE_NBYTES == 0
        buffer[:] = 0xEE
        opened.wait(opened.submit([extent], [buffer.ctypes.data + PAGE_NBYTES]))
        start = PAGE_NBYTES + opened.delta(extent)
        assert buffer[start : start + extent.nbytes].tobytes() == wanted(shards, extent)
        assert (buffer[:PAGE_NBYTES] == 0xEE).all()
        assert (buffer[PAGE_NBYTES + room :] == 0xEE).all()


def test_seven_bytes_at_a_time_with_interrupts_lose_nothing(shards: list[Path]) -> None:
    opened = Store(shards, direct=False)
    faults(opened, max_bytes=7, interrupt_every=3)
    check_all(opened, shards, EXTENTS)
    _, reads, _ = opened.counters()
    assert reads >= sum(-(-extent.nbytes // 7) for extent in EXTENTS) * 3 // 2 - len(EXTENTS)
    opened.close()


@pytest.mark.parametrize("max_bytes", [PAGE_NBYTES, 3 * PAGE_NBYTES])
def test_short_direct_reads_lose_nothing(max_bytes: int, opened: Store, shards: list[Path]) -> None:
    faults(opened, max_bytes=max_bytes, interrupt_every=2)
    check_all(opened, shards, EXTENTS)


def test_direct_read_that_stops_inside_a_page_goes_on_from_the_page(shards: list[Path]) -> None:
    """A file system may refuse to go on where it stopped; the page is read again from its start."""
    opened = Store(shards, direct=False)
    faults(opened, max_bytes=5000, page=PAGE_NBYTES)
    extents = [Extent(0, 0, FILE_NBYTES), Extent(1, PAGE_NBYTES, 9000)]
    check_all(opened, shards, extents)
    faults(opened, max_bytes=100, page=PAGE_NBYTES)  # no call gets any further: that is an end
    with pytest.raises(ReadError, match=r"at offset 4,096 wanted 9,000 bytes, got 100: the file ends there"):
        opened.read(extents[1:])
    opened.close()


def test_reads_beyond_2_gib_are_split(shards: list[Path]) -> None:
    """No call asks for more than 1 GiB: Linux and macOS cut or refuse larger ones. A small fake of it."""
    opened = Store(shards, direct=False)
    faults(opened, max_bytes=2**12)
    before = opened.counters()[1]
    check_all(opened, shards, [Extent(0, 0, FILE_NBYTES)])
    assert opened.counters()[1] - before == -(-FILE_NBYTES // 2**12)
    opened.close()


@pytest.mark.slow
def test_one_read_of_more_than_2_gib_is_exact(tmp_path: Path) -> None:
    nbytes = 2**31 + 4097
    path = tmp_path / "large"
    with path.open("wb") as file:  # sparse
        file.truncate(nbytes)
        for offset in (0, 2**30 - 1, 2**31 - 4097, nbytes - 1):
            file.seek(offset)
            file.write(b"\x5a")
    opened = Store([path], direct=False)
    got = opened.read([Extent(0, 0, nbytes)])[0]
    assert opened.counters()[:2] == (nbytes, 3)
    assert np.flatnonzero(got).tolist() == [0, 2**30 - 1, 2**31 - 4097, nbytes - 1]
    opened.close()


@pytest.mark.parametrize("offset", [0, 1, 4096, 7000, FILE_NBYTES - 3])
def test_early_end_of_file_names_file_offset_wanted_and_got(
    offset: int, opened: Store, shards: list[Path]
) -> None:
    nbytes = FILE_NBYTES - offset + 5
    message = (
        rf"model-2\.safetensors: at offset {offset:,} wanted {nbytes:,} bytes, got {nbytes - 5:,}: the file"
    )
    with pytest.raises(ReadError, match=message):
        opened.read([Extent(0, 0, 3), Extent(1, offset, nbytes)])
    check_all(opened, shards, EXTENTS)  # a failed read spoils nothing else


def test_extent_behind_the_end_got_nothing(opened: Store) -> None:
    with pytest.raises(ReadError, match=r"at offset 1,000,000 wanted 10 bytes, got 0: the file ends there"):
        opened.read([Extent(0, 1_000_000, 10)])


def test_file_cut_short_after_opening_is_an_error(opened: Store, shards: list[Path]) -> None:
    extent = Extent(0, 4000, 9000)
    check_all(opened, shards, [extent])
    os.truncate(shards[0], 5001)
    with pytest.raises(
        ReadError, match=r"at offset 4,000 wanted 9,000 bytes, got 1,001: the file ends there"
    ):
        opened.read([extent])
    os.truncate(shards[0], 0)
    with pytest.raises(ReadError, match=r"wanted 9,000 bytes, got 0"):
        opened.read([extent])
    check_all(opened, shards, [Extent(1, offset, nbytes) for offset, nbytes in RANGES])


def test_device_error_is_told_in_words_and_passes(opened: Store, shards: list[Path]) -> None:
    faults(opened, fail_at=3, fail_with=errno.EIO, max_bytes=PAGE_NBYTES)
    with pytest.raises(ReadError, match=rf"wanted 16,384 bytes, got 8,192: {os.strerror(errno.EIO)}"):
        opened.read([Extent(0, 0, 4 * PAGE_NBYTES)])
    faults(opened)
    check_all(opened, shards, EXTENTS)


def test_only_the_tickets_that_failed_fail(opened: Store, shards: list[Path]) -> None:
    good, bad = Extent(0, 17, 5000), Extent(1, 17, 10**6)
    buffers = [aligned_buffer(opened.room(extent)) for extent in (good, bad, good)]
    tickets = [
        opened.submit([extent], [buffer.ctypes.data])
        for extent, buffer in zip((good, bad, good), buffers, strict=True)
    ]
    assert len(set(tickets)) == 3
    opened.wait(tickets[2])
    with pytest.raises(ReadError):
        opened.wait(tickets[1])
    opened.wait(tickets[0])
    for buffer in (buffers[0], buffers[2]):
        start = opened.delta(good)
        assert buffer[start : start + good.nbytes].tobytes() == wanted(shards, good)


def test_many_tickets_end_each_for_itself(opened: Store, shards: list[Path]) -> None:
    rng = np.random.default_rng(2)
    extents = [EXTENTS[i] for i in rng.integers(0, len(EXTENTS), 500)]
    buffers = [aligned_buffer(opened.room(extent)) for extent in extents]
    tickets = [
        opened.submit([extent], [buffer.ctypes.data]) for extent, buffer in zip(extents, buffers, strict=True)
    ]
    for i in rng.permutation(len(extents)):
        opened.wait(tickets[i])
        assert opened.is_done(tickets[i])
        start = opened.delta(extents[i])
        assert buffers[i][start : start + extents[i].nbytes].tobytes() == wanted(shards, extents[i])
    assert not opened._extents


@pytest.mark.parametrize("cached", ["none", "all", "some"])
def test_groups_of_reads_are_exact_whatever_the_page_cache_holds(
    cached: str, opened: Store, shards: list[Path]
) -> None:
    """n groups of three extents, as the pool asks for experts; the others of a group are read as ever."""
    rng = np.random.default_rng(4)
    asked: list[int] = []

    def read_cached(requests: NDArray[np.uint64], done: NDArray[np.uint8]) -> None:
        asked.append(len(requests))
        for row, (fd, offset, wanted, _, address) in enumerate(requests.tolist()):
            if cached == "all" or (cached == "some" and rng.random() < 0.5):
                done[row] = 1
                data = os.pread(fd, wanted, offset)
                ctypes.memmove(address, data, wanted)

    opened.read_cached = None if cached == "none" else read_cached
    groups = [[EXTENTS[i] for i in rng.integers(0, len(EXTENTS), 3)] for _ in range(40)]
    room = max(opened.room(extent) for extent in EXTENTS)
    buffer = aligned_buffer(40 * 3 * room)
    addresses = buffer.ctypes.data + room * np.arange(120).reshape(40, 3)
    fields = (np.array([[extent[n] for extent in group] for group in groups]) for n in range(3))
    before = opened.counters()
    tickets = opened.submit_groups(*fields, addresses)
    for group, ticket, starts in zip(groups, tickets, addresses, strict=True):
        opened.wait(ticket)
        assert opened.is_done(ticket)
        for extent, start in zip(group, starts.tolist(), strict=True):
            got = ctypes.string_at(start + opened.delta(extent), extent.nbytes)
            assert got == wanted(shards, extent)
    nbytes, reads, _ = opened.counters()
    assert reads - before[1] >= 120
    assert nbytes - before[0] >= sum(extent.nbytes for group in groups for extent in group)
    assert asked == ([120] if cached != "none" and not opened.is_direct else [])
    if cached == "all" and not opened.is_direct:
        assert set(tickets) == {ENDED}


def test_group_with_a_read_that_fails_names_that_read(opened: Store) -> None:
    """Of a group whose other reads the page cache held: the numbers are those of the one that failed."""

    def all_but_one(requests: NDArray[np.uint64], done: NDArray[np.uint8]) -> None:
        done[:] = 1
        done[4] = 0

    opened.read_cached = all_but_one
    buffer = aligned_buffer(6 * 2 * PAGE_NBYTES)
    addresses = buffer.ctypes.data + 2 * PAGE_NBYTES * np.arange(6).reshape(2, 3)
    offsets = np.array([[0, 10, 20], [30, FILE_NBYTES - 5, 40]])
    tickets = opened.submit_groups(np.ones((2, 3), int), offsets, np.full((2, 3), 9), addresses)
    opened.wait(tickets[0])
    with pytest.raises(ReadError, match=rf"model-2.*at offset {FILE_NBYTES - 5:,} wanted 9 bytes, got 5"):
        opened.wait(tickets[1])


def test_counters_tell_bytes_calls_and_seconds(shards: list[Path]) -> None:
    opened = Store(shards, direct=False)
    assert opened.counters() == (0, 0, 0.0)
    opened.read([Extent(0, 10, 1000), Extent(1, 0, 5000)])
    nbytes, reads, seconds = opened.counters()
    assert (nbytes, reads) == (6000, 2)
    assert 0 < seconds < 10
    with pytest.raises(ReadError):
        opened.read([Extent(0, FILE_NBYTES - 100, 200)])
    assert opened.counters()[:2] == (6100, 4)  # what arrived, and the call that found the end
    assert opened.stall_seconds > 0
    opened.close()


def test_file_system_without_direct_reads_is_read_buffered_and_says_so(
    shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems whose open() refuses O_DIRECT with EINVAL."""
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real(path, flags, *rest, **more)

    before = num_open_files()
    monkeypatch.setattr(os, "open", refuse)
    opened = Store(shards, direct=True)
    if getattr(os, "O_DIRECT", 0):
        assert not opened.is_direct
        assert opened.note is not None
        assert "refused by the file system" in opened.note
        assert "buffered" in opened.note
    check_all(opened, shards, EXTENTS)
    opened.close()
    assert num_open_files() == before


def test_direct_reads_that_fail_when_tried_are_buffered_and_said(
    shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems whose open() takes O_DIRECT and whose first read fails."""

    def refuse(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EINVAL, "no such luck")

    monkeypatch.setattr(os, "preadv", refuse, raising=False)
    opened = Store(shards, direct=True)
    assert not opened.is_direct
    assert opened.note is not None
    assert "buffered" in opened.note
    check_all(opened, shards, EXTENTS)
    opened.close()


def test_direct_reads_that_work_have_no_note(opened: Store) -> None:
    assert opened.note is None


def test_shard_that_cannot_be_opened_is_named_and_leaves_no_file_open(shards: list[Path]) -> None:
    """Regression: the shards opened before the one that failed stayed open."""
    before = num_open_files()
    for direct in (False, True):
        with pytest.raises(ReadError, match=r"missing\.safetensors: No such file"):
            Store([*shards, shards[0].with_name("missing.safetensors")], direct=direct)
    assert num_open_files() == before


def test_descriptors_go_with_the_store_and_close_may_come_twice(shards: list[Path]) -> None:
    before = num_open_files()
    for _ in range(3):
        opened = Store(shards, direct=False)
        assert num_open_files() == before + 2
        check_all(opened, shards, EXTENTS)
        opened.close()
        opened.close()
    assert num_open_files() == before


def test_close_with_reads_in_flight_ends_them_first(shards: list[Path]) -> None:
    opened = Store(shards, direct=False, num_threads=2)
    faults(opened, max_bytes=1)
    extent = Extent(0, 0, FILE_NBYTES)
    buffers = [aligned_buffer(opened.room(extent)) for _ in range(50)]
    for buffer in buffers:
        opened.submit([extent], [buffer.ctypes.data])
    opened.close()
    held = [buffer.copy() for buffer in buffers]
    for buffer, copy in zip(buffers, held, strict=True):  # nobody writes any more
        np.testing.assert_array_equal(buffer, copy)


def test_drain_forgets_every_ticket_and_the_store_goes_on(opened: Store, shards: list[Path]) -> None:
    extent = Extent(0, 0, FILE_NBYTES)
    buffer = aligned_buffer(200 * opened.room(extent))
    for i in range(200):
        opened.submit([extent], [buffer.ctypes.data + i * opened.room(extent)])
    opened.drain()
    assert not opened._extents
    check_all(opened, shards, EXTENTS)


def test_store_dropped_without_close_does_not_hang(shards: list[Path]) -> None:
    opened = Store(shards, direct=False)
    opened.submit([Extent(0, 0, 100)], [aligned_buffer(PAGE_NBYTES).ctypes.data])
    opened.drain()
    reader = opened._reader
    opened._reader = None
    del reader  # joins its threads
    opened.close()


def linux_release() -> tuple[int, ...]:
    numbers = platform.release().split("-")[0].split(".")[:2]
    return tuple(map(int, numbers)) if sys.platform.startswith("linux") else (0,)


@pytest.mark.skipif(linux_release() < (5, 14), reason="only Linux 5.14 and later can be asked")
def test_mapped_file_that_became_shorter_is_an_error_not_a_crash(tmp_path: Path) -> None:
    """Pages behind the end of a mapped file kill the process that touches them (SIGBUS)."""
    path = tmp_path / "mapped"
    path.write_bytes(bytes(8 * PAGE_NBYTES))
    view = np.memmap(path, np.uint8, "r")
    reader = _core.Reader(1)
    request = np.array([[2**64 - 1, 0, len(view), 0, view.ctypes.data]], np.uint64)
    assert reader.wait(reader.submit(request))[0] == -1
    os.truncate(path, 100)
    index, *_, error = reader.wait(reader.submit(request))
    assert (index, error) == (0, errno.EFAULT)


def test_threads_that_make_pages_present_stop_when_nobody_closed_them() -> None:
    """Regression: a program that ended in an error died once more, of pages that were being unmapped."""
    buffer = aligned_buffer(64 * PAGE_NBYTES)
    touch = Touch([(buffer.ctypes.data, len(buffer))], buffer)
    end = touch._end
    assert end.alive
    assert end.atexit
    del touch
    gc.collect()
    assert not end.alive


def test_private_memory_is_aligned_and_zero() -> None:
    for nbytes in (1, 4096, 5000):
        buffer = aligned_buffer(nbytes)
        assert len(buffer) == nbytes
        assert buffer.ctypes.data % PAGE_NBYTES == 0
        assert not buffer.any()
        buffer[-1] = 1
    assert len(store.private_memory(1 << 26)) == 1 << 26
