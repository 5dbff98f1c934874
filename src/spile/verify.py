"""A model folder -> a certificate: its logits, computed in many ways in fresh processes, are equal bit for
bit.

Each row of the certificate is one process that opens the model with one configuration (memory, threads,
prefill chunk, way of reading, instruction set), computes the logits of a fixed text at every position, goes
on greedily for a few tokens, and prints the SHA-256 of all those logits. The first row has no budget. What
is proved:

- rows equal: where the weights were (resident, or read from disk a moment ago, in whichever slot), how many
  threads and instructions computed, and how the prompt was cut, changed no bit of the answer;
- files equal (see `digests.py`): the weights themselves are what they were when recorded or published. Rows
  alone cannot show this, since all of them read the same file.

What is not proved: that the arithmetic is the model's (the tests compare with independent implementations),
or anything about texts other than this one. This file knows the engine's interface only; the parent process
holds no model.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spile import errors
from spile.errors import BudgetError, ModelError, OptionError, SpileError, UnsupportedModelError
from spile.sizes import format_size

TEXT = (
    "When the nights still freeze and the days begin to thaw, the sap of the maple starts to rise. A "
    "farmer drills a small hole on the sunny side of the trunk, taps in a spile, and hangs a bucket "
    "under it. One drop falls, then another; by evening the pail is full. It takes forty gallons of "
    'sap, boiled for hours over a wood fire, to make one gallon of syrup. "Why does it only run in '
    'spring?" asked the child. "Because," said the farmer, "the tree has been saving it all winter, and '
    '1 warm day in 1,234 cold ones is enough." '
)
SMALL_EXPERT_NBYTES = 10**9  # below it, rows that would take long on a large model are made too
LARGE_MODEL_TOKENS = 48  # at 8 of 256 experts a token, reaches about 3 of 4 experts of every layer
DEFAULT_BUDGETS = (630_000_000, 1_000_000_000, 2_000_000_000)
DECODED = 8


@dataclass(frozen=True)
class Configuration:
    """One way of running the model; None and "auto" leave the choice to the engine."""

    memory_bytes: int | None = None
    slots: int | None = None  # the pool in experts, where a budget would not bind because the model is small
    threads: int | None = None
    prefill_chunk: int | None = None
    io: str = "auto"
    isa: str | None = None


@dataclass(frozen=True)
class Row:
    """What one configuration gave. `state` is "ok", "different", "skipped" (it cannot run so) or "failed"."""

    configuration: Configuration
    state: str
    reason: str | None = None
    summary: str | None = None  # the engine's own line about its plan
    num_tokens: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int | None = None
    resident_expert_bytes: int | None = None
    bytes_read: int | None = None
    sha256: str | None = None
    token_ids: tuple[int, ...] = ()  # those decoded greedily

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Report:
    """The certificate. It holds when the files are undamaged and two rows or more were computed and are all
    equal."""

    model: str
    text: str  # where the ids came from
    num_tokens: int
    num_decoded: int
    kv_bits: int
    rows: tuple[Row, ...]
    files: Any | None = field(default=None)  # a digests.FileCheck, or None when the files were not looked at

    @property
    def ok(self) -> bool:
        states = [row.state for row in self.rows]
        return (
            states.count("ok") >= 2
            and "different" not in states
            and "failed" not in states
            and (self.files is None or self.files.ok)
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "model": self.model,
            "text": self.text,
            "num_tokens": self.num_tokens,
            "num_decoded": self.num_decoded,
            "kv_bits": self.kv_bits,
            "rows": [row.as_dict() for row in self.rows],
            "files": None if self.files is None else self.files.as_dict(),
        }

    def verdict(self) -> str:
        """Say in one sentence what was and what was not shown."""
        states = [row.state for row in self.rows]
        if self.files is not None and not self.files.ok:
            num = len(self.files.damaged)
            return f"DAMAGED: {num:,} piece{'s' if num > 1 else ''} of the files changed"
        if "different" in states:
            num = states.count("different")
            return f"DIFFERENT: {num} of {len(states)} runs gave other logits than the first"
        if "failed" in states:
            return f"FAILED: {states.count('failed')} of {len(states)} runs did not end well"
        if not self.ok:
            return "NOT SHOWN: fewer than two configurations could run, so nothing was compared"
        runs = f"{states.count('ok')} runs gave the same logits, bit for bit"
        skipped = f" ({states.count('skipped')} could not run so)" if "skipped" in states else ""
        if self.files is None:
            return f"OK: {runs}{skipped}; the files were not looked at"
        if not self.files.compared_with:
            return f"OK: {runs}{skipped}; the files were recorded now, not compared"
        return f"OK: {runs}{skipped}, from undamaged files"


def verify(
    source: str | Path | None = None,
    *,
    memories: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    chunks: Sequence[int] | None = None,
    tokens: int | None = None,
    decoded: int = DECODED,
    kv_bits: int = 16,
    files: bool = True,
    manifest: Path | None = None,
    record: bool = False,
    offline: bool = False,
    on_row: Callable[[Row], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Compute the certificate of a model: a folder, a hub id, or None for the demo model.

    `memories` (bytes), `threads` and `chunks` replace the built-in rows by their product. `tokens` is the
    length of the text; by default it passes the sliding window on a small model and is short on a large
    one. `on_row` gets every row as it is done, `on_progress` bytes digested and in all. Reads the whole
    checkpoint once, and runs the model once a row.

    Raises:
        ModelError: the model cannot be used.
        OptionError: a number out of range.
        ReadError, WriteError: see `digests.check_files`.
    """
    from spile.architectures.maple import Form, open_maple
    from spile.files.checkpoint import open_checkpoint
    from spile.files.digests import check_files
    from spile.files.hub import resolve
    from spile.residency.experts import ExpertTable

    for name, number in (("tokens", tokens), ("decoded", decoded), *_numbered("memory", memories)):
        if number is not None and number < 1:
            raise OptionError(f"{name} must be at least 1, not {number}")
    folder = resolve(source, offline=offline)
    model = open_maple(open_checkpoint(folder))
    if model.form is Form.BF16:
        raise UnsupportedModelError(
            f"{folder} is a bf16 source, which is not run as it is",
            "Turn it into a 2-bit folder with spile convert.",
        )
    table = ExpertTable(model)
    num_experts = sum(table.is_moe(layer) for layer in range(table.num_layers)) * table.num_experts
    expert_nbytes = num_experts * table.expert_nbytes
    small = expert_nbytes < SMALL_EXPERT_NBYTES

    room = model.config.max_position_embeddings - decoded
    if tokens is None:
        tokens = min((model.config.sliding_window or 128) + 32, 512) if small else LARGE_MODEL_TOKENS
        tokens = min(tokens, room)
    if tokens > room or room < 1:
        raise OptionError(
            f"{tokens} tokens and {decoded} decoded ones do not fit the model's context of "
            f"{model.config.max_position_embeddings}"
        )
    ids, text = _fixed_ids(folder, model.checkpoint.config, model.config.vocab_size, tokens)

    if memories or threads or chunks:
        configurations = [Configuration()] + [
            Configuration(memory_bytes=memory, threads=count, prefill_chunk=chunk)
            for memory in memories or (None,)
            for count in threads or (None,)
            for chunk in chunks or (None,)
        ]
    else:
        configurations = _default_configurations(
            num_experts, expert_nbytes, small, model.config.num_experts_per_tok
        )

    stamps = _stamps(model.checkpoint.shards)
    check = None
    if files:
        check = check_files(model.checkpoint, manifest=manifest, record=record, on_progress=on_progress)

    rows: list[Row] = []
    for configuration in configurations:
        job = {
            "folder": str(folder),
            "ids": ids,
            "decoded": decoded,
            "kv_bits": kv_bits,
            "configuration": asdict(configuration),
        }
        row = _run(configuration, job)
        reference = next((each.sha256 for each in rows if each.state == "ok"), None)
        if row.state == "ok" and reference is not None and row.sha256 != reference:
            row = replace(row, state="different")
        rows.append(row)
        if on_row is not None:
            on_row(row)
        if _stamps(model.checkpoint.shards) != stamps:
            rows[-1] = Row(configuration, "failed", "the model's files were written to meanwhile")
            break
    return Report(
        model=str(source) if source is not None else "the demo model",
        text=text,
        num_tokens=tokens,
        num_decoded=decoded,
        kv_bits=kv_bits,
        rows=tuple(rows),
        files=check,
    )


def heading() -> str:
    """Return the heading over `line`."""
    return f"{'memory':>9} {'threads':>7} {'chunk':>5} {'io':<8} {'isa':<7} {'peak':>8} {'resident':>8} " + (
        f"{'read':>8} {'seconds':>7} {'tokens':>6}  sha256"
    )


def line(row: Row) -> str:
    """Return one row of the table for a person."""
    c = row.configuration
    memory = "all" if c.memory_bytes is None else _size(c.memory_bytes)
    memory = f"{c.slots} slots" if c.slots is not None else memory
    cells = f"{memory:>9} {c.threads or 'auto':>7} {c.prefill_chunk or 'auto':>5} "
    cells += f"{c.io:<8} {c.isa or 'auto':<7} "
    if row.state in ("skipped", "failed"):
        return f"{cells} {row.state if row.state == 'skipped' else 'FAILED'}: {row.reason}"
    sizes = (row.peak_memory_bytes, row.resident_expert_bytes, row.bytes_read)
    cells += " ".join(f"{_size(nbytes):>8}" for nbytes in sizes)
    cells += f" {row.seconds:>7.1f} {row.num_tokens:>6}  {(row.sha256 or '')[:12]}"
    return f"{cells} {'ok' if row.state == 'ok' else 'DIFFERENT'}"


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_size(nbytes)


def _numbered(name: str, numbers: Sequence[int] | None) -> list[tuple[str, int]]:
    return [(name, number) for number in numbers or ()]


def _default_configurations(
    num_experts: int, expert_nbytes: int, small: bool, num_chosen: int
) -> list[Configuration]:
    """Return the rows made when the user names none: all resident first, then one thing changed at a time,
    then several.

    On the 20B model the ten rows took 77 s in all (two busy cores, files in the page cache, 2026-11-30).
    """
    rows = [
        Configuration(),
        Configuration(threads=1),
        Configuration(threads=3, prefill_chunk=7),
        Configuration(prefill_chunk=1),
    ]
    budgets = [memory for memory in DEFAULT_BUDGETS if memory < expert_nbytes]
    if budgets:
        smallest, *larger = (Configuration(memory_bytes=memory) for memory in budgets)
    else:  # a budget would hold everything: bound the pool itself
        smallest, *larger = (Configuration(slots=n) for n in _pool_sizes(num_experts, num_chosen))
    rows += [smallest, *larger]
    rows.append(replace(smallest, io="buffered", threads=1, prefill_chunk=7))
    rows.append(replace(smallest, io="direct", prefill_chunk=3))
    rows += [replace(smallest, isa=isa) for isa in _other_isas() if isa != "scalar" or small]
    return rows


def _pool_sizes(num_experts: int, num_chosen: int) -> list[int]:
    return sorted({1, min(num_chosen, num_experts), max(1, num_experts // 2)})


def _other_isas() -> list[str]:
    """Return the instruction sets of this machine other than the one the engine chooses by itself."""
    from spile import _core

    return list(_core.isas()[1:])  # best first


def _fixed_ids(folder: Path, config: Any, vocab_size: int, num_tokens: int) -> tuple[list[int], str]:
    """Return the ids of the fixed text: by the model's tokenizer, or one a byte where it has none."""
    from spile.text.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(folder, config=config)
    if tokenizer is None:
        data = TEXT.encode()
        return [data[i % len(data)] % vocab_size for i in range(num_tokens)], "fixed text, one token a byte"
    ids: list[int] = []
    while len(ids) < num_tokens:
        once = tokenizer.encode(TEXT, add_bos=not ids)
        ids += [token for token in once if token < vocab_size] or [0]
    return ids[:num_tokens], "fixed text, the model's tokenizer"


def _stamps(paths: Sequence[Path]) -> list[tuple[int, int]]:
    return [(os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]


def _run(configuration: Configuration, job: dict[str, Any]) -> Row:
    """Run one configuration in a process of its own."""
    env = {**os.environ, "PYTHONPATH": _python_path()}
    if configuration.isa is not None:
        env["SPILE_ISA"] = configuration.isa
    process = subprocess.run(
        [sys.executable, "-P", "-m", "spile.verify"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=env,
    )
    try:
        answer = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        code = process.returncode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        return Row(configuration, "failed", f"the process {how}: {last}")
    if "error" not in answer:
        return Row(configuration, "ok", **{**answer, "token_ids": tuple(answer["token_ids"])})
    kind = getattr(errors, answer["error"], SpileError)
    if issubclass(kind, (OptionError, ModelError)):  # not of this row only
        raise kind(answer["message"], answer["hint"])
    return Row(configuration, "skipped" if issubclass(kind, BudgetError) else "failed", answer["message"])


def _python_path() -> str:
    """Return PYTHONPATH for a process that must import this very package."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """Compute one row, in the process of its own."""
    from spile.architectures.maple import open_maple
    from spile.engines import EngineOptions, open_engine
    from spile.files.checkpoint import open_checkpoint
    from spile.memory import peak_memory_bytes

    start = time.perf_counter()
    settings = job["configuration"]
    ids, decoded = job["ids"], job["decoded"]
    options = EngineOptions(
        memory_bytes=settings["memory_bytes"],
        slots=settings["slots"],
        threads=settings["threads"],
        prefill_chunk=settings["prefill_chunk"],
        io=settings["io"],
        kv_bits=job["kv_bits"],
        context=len(ids) + decoded,
    )
    engine = open_engine(open_maple(open_checkpoint(Path(job["folder"]))), options)
    state = engine.new_state()
    sha, finite, logits = hashlib.sha256(), True, np.empty((0, 0), np.float32)
    # A chunk at a time: logits of all 48 tokens of the large model are 29 MB that no plan has counted.
    step = min(settings["prefill_chunk"] or len(ids), len(ids))
    for at in range(0, len(ids), step):
        del logits
        logits = engine.logits(state, ids[at : at + step])  # [T, V]
        sha.update(_bytes_of(logits))
        finite = finite and bool(np.isfinite(logits).all())
    token_ids = [int(np.argmax(logits[-1]))]
    del logits
    while len(token_ids) <= decoded:
        row = engine.decode(state, token_ids[-1])  # [V]
        sha.update(_bytes_of(row))
        finite = finite and bool(np.isfinite(row).all())
        token_ids.append(int(np.argmax(row)))
    if not finite:
        raise SpileError("the logits are not all finite numbers")
    return {
        "summary": engine.summary(),
        "num_tokens": len(ids) + decoded,
        "seconds": time.perf_counter() - start,
        "peak_memory_bytes": peak_memory_bytes(),
        "resident_expert_bytes": engine.resident_expert_bytes,
        "bytes_read": engine.counters().bytes_read,
        "sha256": sha.hexdigest(),
        "token_ids": token_ids,
    }


def _bytes_of(logits: NDArray[np.float32]) -> memoryview:
    return np.ascontiguousarray(logits, dtype="<f4").data.cast("B")


def _worker() -> None:
    """Read a job from standard input and print its row, or the error, as one line of JSON."""
    try:
        answer = _work(json.load(sys.stdin))
    except SpileError as error:
        answer = {"error": type(error).__name__, "message": str(error), "hint": error.hint}
    print(json.dumps(answer))


if __name__ == "__main__":
    _worker()
