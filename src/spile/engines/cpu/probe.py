"""Turns a few seconds of this machine into the times that a forecast is made of: the engine's own steps, tried on
made-up weights of a model's shapes, and its reads of the model's files or of any large file.

It does not know budgets or plans, and reads no weights but experts' bytes, which it forgets. A token is tried in five
ways: every expert in place; every expert in the pool; half of them missing, and all, and read from the disk; all
missing and copied from the page cache. Attention, router and pool are as many bytes as a processor's cache does not
hold, as in a model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from spile.architectures.spec import ModelSpec
from spile.engines.cpu.trial import Trial
from spile.engines.cpu.trial_reads import touch_rate
from spile.errors import SpileError
from spile.residency.experts import ExpertTable, Extent
from spile.residency.forecast import Probe
from spile.residency.kv import KvFormat
from spile.residency.store import PAGE_NBYTES, private_memory

_TEMPORARY_NBYTES = 1 << 26  # to copy from, where no file is here
_FRESH_NBYTES, _FRESH_SECONDS = 1 << 31, 0.25


class FileTable(ExpertTable):
    """Experts of a model's sizes at places all over one file that holds something else."""

    def __init__(self, like: ExpertTable, file_nbytes: int) -> None:
        self.num_layers, self.num_experts = like.num_layers, like.num_experts
        self.expert_nbytes = like.expert_nbytes
        self._like = like
        self._span = max(1, (file_nbytes - like.expert_nbytes) // PAGE_NBYTES)

    def is_moe(self, layer: int) -> bool:
        return self._like.is_moe(layer)

    def extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        key = layer * self.num_experts + expert
        return tuple(
            Extent(0, (key * 3 + part) * 1_000_003 % self._span * PAGE_NBYTES, extent.nbytes)
            for part, extent in enumerate(self._like.extents(layer, expert))
        )


def probe_machine(
    spec: ModelSpec,
    table: ExpertTable,
    files: list[Path],
    *,
    threads: int,
    chunks: Iterable[int],
    kv: KvFormat,
    are_weights: bool = True,
    cached: bool = True,
    fresh_nbytes: int = 0,
    between: Callable[[], None] = lambda: None,
) -> Probe:
    """Measure for some four seconds. Takes 150 MB while it does, or `fresh_nbytes` where those are more, and touches
    disk: some 1.5 GB are read.

    `files` are the shards that `table` points into or, where not `are_weights`, any large file; without one, or where
    it cannot be read directly, the disk is unknown. `chunks` are the prefill chunks to try; `cached` says whether to
    try the page cache; of `fresh_nbytes` some are taken from the system to see how
    fast it gives them. `between` is called between two tokens and not counted: what else a token loop does.
    """
    trial = Trial(
        spec,
        table,
        threads,
        sorted(set(chunks)),
        kv,
        files if are_weights else [],
        mapped=cached and are_weights and bool(files),
        between=between,
    )
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(trial.close)
        probe = _resident(trial, spec.vocab_size, min(fresh_nbytes, _FRESH_NBYTES))
        if not table.expert_nbytes:
            return probe
        # files that cannot be read: the forecast says less
        if files:
            with contextlib.suppress(SpileError, OSError):
                probe = _from_disk(probe, trial, _table_of(table, files, are_weights), files)
            with contextlib.suppress(SpileError, OSError):
                probe = replace(probe, touched_nbytes=touch_rate(files[0]))
        if cached:
            with contextlib.suppress(SpileError, OSError):
                if not files:
                    files, are_weights = [cleanup.enter_context(_temporary_file())], False
                probe = _from_cache(probe, trial, _table_of(table, files, are_weights), files)
        return replace(probe, pooled_begin_seconds=trial.begin(pooled=True))


def _resident(trial: Trial, vocab_size: int, fresh_nbytes: int) -> Probe:
    """Try what needs no pool."""
    chunk_seconds = {chunk: trial.chunk(chunk) for chunk in trial.chunks}
    attend, resident = trial.resident()
    fresh_rate = _fresh_rate(fresh_nbytes)
    trial.drop_weights_of_experts()
    head = trial.head(vocab_size)
    mapped_head = trial.head(vocab_size, in_files=True)
    begin = trial.begin(pooled=False)
    return Probe(
        begin_seconds=begin,
        pooled_begin_seconds=begin,
        row_seconds=trial.row_seconds(),
        attend_seconds=attend,
        resident_seconds=resident,
        pooled_seconds=resident,
        half_disk_seconds=None,
        disk_seconds=None,
        cached_seconds=None,
        head_seconds=head,
        mapped_head_seconds=mapped_head,
        loop_seconds=0.0,
        chunks=chunk_seconds,
        cached_miss_seconds=None,
        cached_nbytes=None,
        disk_nbytes=None,
        touched_nbytes=None,
        overlap_loss=1.0,
        fresh_nbytes=fresh_rate,
    )


def _from_disk(probe: Probe, trial: Trial, table: ExpertTable, files: list[Path]) -> Probe:
    found = trial.disk(table, files)
    return replace(
        probe,
        pooled_seconds=found.pooled_seconds,
        half_disk_seconds=found.half_seconds,
        disk_seconds=found.missing_seconds,
        disk_nbytes=found.nbytes,
        overlap_loss=found.loss,
    )


def _from_cache(probe: Probe, trial: Trial, table: ExpertTable, files: list[Path]) -> Probe:
    found = trial.cached(table, files)
    is_first = probe.disk_seconds is None
    return replace(
        probe,
        pooled_seconds=found.pooled_seconds if is_first else min(probe.pooled_seconds, found.pooled_seconds),
        cached_seconds=found.missing_seconds,
        cached_miss_seconds=found.chunk_miss_seconds,
        cached_nbytes=found.nbytes,
    )


def _table_of(table: ExpertTable, files: list[Path], are_weights: bool) -> ExpertTable:
    return table if are_weights else FileTable(table, files[0].stat().st_size)


@contextlib.contextmanager
def _temporary_file() -> Iterator[Path]:
    with NamedTemporaryFile(prefix="spile-") as file:
        file.write(bytes(_TEMPORARY_NBYTES))
        file.flush()
        yield Path(file.name)


def _fresh_rate(nbytes: int) -> float:
    """Bytes a second at which the system gives so much memory. What was free just before comes first and may be fast;
    what there is no time to take comes as fast as the later half of what was taken.
    """
    piece_nbytes = 1 << 24
    if nbytes < 4 * piece_nbytes:
        return float("inf")
    memory = np.frombuffer(private_memory(nbytes), np.uint8)
    times = [time.perf_counter()]
    while len(times) <= nbytes // piece_nbytes and times[-1] - times[0] < _FRESH_SECONDS:
        first = (len(times) - 1) * piece_nbytes
        memory[first : first + piece_nbytes : PAGE_NBYTES] = 0
        times.append(time.perf_counter())
    count, half = len(times) - 1, len(times) // 2
    late_rate = (count - half) * piece_nbytes / max(1e-9, times[-1] - times[half])
    return nbytes / (times[-1] - times[0] + (nbytes - count * piece_nbytes) / late_rate)
