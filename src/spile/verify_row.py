"""One way of running a model -> its row of the certificate: the digest of its logits, from a process of its own.

The process opens the model with one configuration (engine, memory, threads, prefill chunk, way of reading,
instruction set), reads given tokens, computes the logits at the last of them (at all, where the text is short),
goes on greedily for a few, and prints the SHA-256 of all those logits. `run` starts it and is all that a caller
needs; `python -m spile.verify_row` is its other half. Which ways there are, and what their rows prove, is
`verify.py`'s.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spile import errors
from spile.errors import BudgetError, ModelError, OptionError, SpileError

_KEPT_STDERR = 4000  # characters
_MOST_LOGITS = 2_500_000  # computed at once, 10 MB: mlx has no fewer than those of a step


@dataclass(frozen=True)
class Configuration:
    """One way of running the model; None and "auto" leave the choice to the engine."""

    memory_bytes: int | None = None
    slots: int | None = None  # the pool in experts, where a budget would not bind because the model is small
    threads: int | None = None
    prefill_chunk: int | None = None
    io: str = "auto"
    isa: str | None = None
    last_step: int | None = None  # tokens at a time where logits are computed; None: as many as a chunk has
    num_tokens: int | None = None  # of the text: its first ones alone, where a row would take long
    engine: str = "cpu"
    is_precise: bool = (
        False  # as many digits as the engine has: float32 keys, values and activations, or more
    )

    @property
    def group(self) -> tuple[object, ...]:
        """What rows must have in common to be equal bit for bit. MLX's kernels depend on the chunk."""
        chunk = self.prefill_chunk if self.engine == "mlx" else None
        return self.engine, self.is_precise, chunk, self.num_tokens


@dataclass(frozen=True)
class Task:
    """What every row of a certificate computes."""

    folder: Path
    token_ids: tuple[int, ...]
    num_hashed: (
        int  # the last so many of them, whose logits are computed; what is before reaches them by attention
    )
    num_decoded: int  # tokens after them
    kv_bits: int
    kv_v_bits: int
    kv_ring_bits: int  # of sliding layers


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
    stderr: str | None = None  # the end of what a process said that did not end well

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(configuration: Configuration, task: Task, *, keep: Path | None = None) -> Row:
    """Run one configuration in a process of its own. `keep` is a file for the logits of the given tokens,
    float32 [T, V].

    Raises: OptionError, ModelError: what no configuration could run with.
    """
    job = {
        "task": {**asdict(task), "folder": str(task.folder)},
        "configuration": asdict(configuration),
        "keep": None if keep is None else str(keep),
    }
    if keep is not None:
        keep.unlink(missing_ok=True)  # of an equal row before
    env = {**os.environ, "PYTHONPATH": _python_path()}
    if configuration.isa is not None:
        env["SPILE_ISA"] = configuration.isa
    process = subprocess.run(
        [sys.executable, "-P", "-m", "spile.verify_row"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=env,
    )
    try:
        answer = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    code, said = process.returncode, process.stderr.strip()
    if answer is None or code:  # also after its answer: a process that dies at its end did not end well
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        last = (said.splitlines() or ["no message"])[-1]
        return Row(configuration, "failed", f"the process {how}: {last}", stderr=said[-_KEPT_STDERR:])
    if "error" not in answer:
        return Row(configuration, "ok", **{**answer, "token_ids": tuple(answer["token_ids"])})
    kind = getattr(errors, answer["error"], SpileError)
    if issubclass(kind, (OptionError, ModelError)):  # not of this row only
        raise kind(answer["message"], answer["hint"])
    return Row(configuration, "skipped" if issubclass(kind, BudgetError) else "failed", answer["message"])


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _python_path() -> str:
    """Return PYTHONPATH for a process that must import this very package."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """Compute one row, in the process of its own."""
    from spile.architectures import open_model
    from spile.engines import open_engine
    from spile.files.checkpoint import open_checkpoint
    from spile.memory import peak_memory_bytes
    from spile.options import EngineOptions

    start = time.perf_counter()
    settings, task = job["configuration"], job["task"]
    ids, decoded = task["token_ids"][: settings["num_tokens"]], task["num_decoded"]
    num_before = max(0, len(ids) - task["num_hashed"])
    needs_float32 = settings["is_precise"] and settings["engine"] == "cpu"
    options = EngineOptions(
        engine=settings["engine"],
        memory_bytes=settings["memory_bytes"],
        slots=settings["slots"],
        threads=settings["threads"],
        prefill_chunk=settings["prefill_chunk"],
        io=settings["io"],
        kv_bits=32 if needs_float32 else task["kv_bits"],
        kv_v_bits=None if needs_float32 else task["kv_v_bits"],
        kv_ring_bits=None if needs_float32 else task["kv_ring_bits"],
        activation_bytes=3 if settings["is_precise"] else 2,
        context=len(ids) + decoded,
    )
    engine = open_engine(open_model(open_checkpoint(Path(task["folder"]))), options)
    state = engine.new_state()
    sha, finite, likeliest = hashlib.sha256(), True, 0

    def take(_: int, logits: NDArray[np.float32]) -> None:  # [n, V]
        nonlocal finite, likeliest
        sha.update(_bytes_of(logits))
        finite = finite and bool(np.isfinite(logits).all())
        likeliest = int(np.argmax(logits[-1]))

    def take_and_keep(_: int, logits: NDArray[np.float32]) -> None:
        take(_, logits)
        with Path(job["keep"]).open("ab") as file:
            file.write(_bytes_of(logits))

    if num_before:
        engine.prefill(state, ids[:num_before])
    step = settings["last_step"] or min(
        settings["prefill_chunk"] or len(ids), max(1, _MOST_LOGITS // engine.vocab_size)
    )
    for at in range(num_before, len(ids), step):
        engine.score(state, ids[at : at + step], take if job["keep"] is None else take_and_keep)
    token_ids = [likeliest]
    for _ in range(decoded):
        take(0, engine.decode(state, likeliest)[None])
        token_ids.append(likeliest)
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
