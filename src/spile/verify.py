"""A model folder -> a certificate: its logits, computed in many ways in fresh processes, are equal bit for
bit.

Each row of the certificate is one process (`verify_row.py`) that computes the logits of a fixed text with one
configuration. The first row of each engine has no budget. What is proved:

- rows equal: where the weights were (resident, or read from disk a moment ago, in whichever slot), how many
  threads and instructions computed, and how the prompt was cut, changed no bit of the answer. MLX's kernels
  depend on how the prompt is cut, so on the mlx engine rows are compared at the same chunk;
- engines agree: two implementations, each with all the digits it has, give the same logits up to rounding;
- files equal (see `digests.py`): the weights themselves are what they were when recorded or published. Rows
  alone cannot show this, since all of them read the same file.

What is not proved: that the arithmetic is the model's (the tests compare with independent implementations),
or anything about texts other than this one. This file knows the engine's interface only; the parent process
holds no model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from spile import __version__
from spile.agreement import Agreement, compare
from spile.errors import OptionError, UnsupportedModelError, quote
from spile.machine import describe_machine
from spile.sizes import format_size
from spile.verify_row import Configuration, Row, Task, run

if TYPE_CHECKING:
    from spile.architectures.foreign import ForeignModel
    from spile.architectures.spec import OwnModel

ENGINES = ("auto", "cpu", "mlx", "both")
TEXT = (
    "When the nights still freeze and the days begin to thaw, the sap of the maple starts to rise. A "
    "farmer drills a small hole on the sunny side of the trunk, taps in a spile, and hangs a bucket "
    "under it. One drop falls, then another; by evening the pail is full. It takes forty gallons of "
    'sap, boiled for hours over a wood fire, to make one gallon of syrup. "Why does it only run in '
    'spring?" asked the child. "Because," said the farmer, "the tree has been saving it all winter, and '
    '1 warm day in 1,234 cold ones is enough." '
)
SMALL_EXPERT_NBYTES = 10**9  # below it, rows that would take long on a large model are made too
# Of a large model: longer than its window, than a chunk, and than the ring of a row with chunks of 64 (768 positions).
LARGE_MODEL_TOKENS = 800
LARGE_MODEL_HASHED = 48  # at 8 of 256 experts a token, reaches about 3 of 4 experts of every layer
SCALAR_TOKENS = 4  # of a large model
DEFAULT_BUDGETS = (630_000_000, 1_000_000_000, 2_000_000_000)
DECODED = 8


MLX_CHUNKS = (32, 7)  # prefill chunks at which the mlx engine is compared with itself


@dataclass(frozen=True)
class Report:
    """The certificate. It holds when the files are undamaged, two rows or more were computed and are all
    equal, and engines that were compared agree."""

    model: str
    text: str  # where the ids came from
    num_tokens: int
    num_hashed: int  # the last so many, whose logits were compared
    num_decoded: int
    kv_bits: int
    kv_v_bits: int
    kv_ring_bits: int
    rows: tuple[Row, ...]
    files: Any | None = field(default=None)  # a digests.FileCheck, or None when the files were not looked at
    is_across_engines: bool = False  # both engines were asked for
    machine: Mapping[str, str | int] = field(default_factory=describe_machine)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    agreements: tuple[Agreement, ...] = ()

    @property
    def ok(self) -> bool:
        states = [row.state for row in self.rows]
        return (
            self.num_compared >= 2
            and "different" not in states
            and "failed" not in states
            and (self.files is None or self.files.ok)
            and all(agreement.ok for agreement in self.agreements)
            and (not self.is_across_engines or any(agreement.is_judged for agreement in self.agreements))
        )

    @property
    def num_compared(self) -> int:
        """Rows that had another to be equal to."""
        groups = [row.configuration.group for row in self.rows if row.state == "ok"]
        return sum(groups.count(group) > 1 for group in groups)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "verdict": self.verdict(),
            "model": self.model,
            "version": __version__,
            "machine": dict(self.machine),
            "date": self.date,
            "text": self.text,
            "num_tokens": self.num_tokens,
            "num_hashed": self.num_hashed,
            "num_decoded": self.num_decoded,
            "kv_bits": self.kv_bits,
            "kv_v_bits": self.kv_v_bits,
            "kv_ring_bits": self.kv_ring_bits,
            "rows": [row.as_dict() for row in self.rows],
            "files": None if self.files is None else self.files.as_dict(),
            "agreements": [{**asdict(each), "ok": each.ok} for each in self.agreements],
        }

    def verdict(self) -> str:
        """Say in one sentence what was and what was not shown."""
        states = [row.state for row in self.rows]
        if self.files is not None and not self.files.ok:
            num = len(self.files.damaged)
            return f"DAMAGED: {num:,} piece{'s' if num > 1 else ''} of the files changed"
        if "different" in states:
            num = states.count("different")
            return f"DIFFERENT: {num} of {len(states)} runs gave other logits than the first of their kind"
        if "failed" in states:
            return f"FAILED: {states.count('failed')} of {len(states)} runs did not end well"
        if not all(agreement.ok for agreement in self.agreements):
            return "DIFFERENT: the engines do not agree"
        if self.is_across_engines and not any(agreement.is_judged for agreement in self.agreements):
            return "NOT SHOWN: the engines could not both run, so they were not compared"
        if not self.ok:
            return "NOT SHOWN: fewer than two configurations could run, so nothing was compared"
        runs = f"{self.num_compared} runs gave the same logits, bit for bit"
        if self.agreements:
            runs += " within each engine, and the engines agree"
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
    kv_v_bits: int | None = None,
    kv_ring_bits: int | None = None,
    files: bool = True,
    manifest: Path | None = None,
    record: bool = False,
    offline: bool = False,
    engine: str = "auto",
    on_row: Callable[[Row], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Compute the certificate of a model: a folder, a hub id, or None for the demo model.

    `memories` (bytes), `threads` and `chunks` replace the built-in rows by their product. `tokens` is the
    length of the text; by default it passes the sliding window. Logits are computed at all of its positions, of a
    large model at the last 48. `engine` is auto (the one that runs the model by default), cpu, mlx, or both, which
    compares them too. `on_row` gets every row as it is done, `on_progress` bytes digested and in all. Reads the whole
    checkpoint once, and runs the model once a row.

    Raises:
        ModelError: the model cannot be used.
        OptionError: a number out of range.
        ReadError, WriteError: see `digests.check_files`.
    """
    from spile.architectures import open_model
    from spile.engines import choose_engine
    from spile.files.checkpoint import open_checkpoint
    from spile.files.digests import check_files
    from spile.files.hub import resolve
    from spile.making.convert import is_source
    from spile.options import EngineOptions
    from spile.residency.kv import asked_format

    if engine not in ENGINES:
        raise OptionError(f"engine is {quote(engine)}: it must be one of {', '.join(ENGINES)}")
    for name, number in (("tokens", tokens), ("decoded", decoded), *_numbered("memory", memories)):
        if number is not None and number < 1:
            raise OptionError(f"{name} must be at least 1, not {number}")
    folder = resolve(source, offline=offline)
    model = open_model(open_checkpoint(folder))
    if is_source(model):
        raise UnsupportedModelError(
            f"{folder} is a bf16 source, which is not run as it is",
            "Turn it into a 2-bit folder with spile convert.",
        )
    if engine == "both":
        engines: tuple[str, ...] = tuple(
            choose_engine(model, EngineOptions(engine=name)) for name in ("cpu", "mlx")
        )
    else:
        engines = (choose_engine(model, EngineOptions(engine=engine)),)
    num_experts, expert_nbytes, window = _sizes(model)
    small = expert_nbytes < SMALL_EXPERT_NBYTES

    room = model.spec.max_position_embeddings - decoded
    if tokens is None:
        # On MLX's CPU backend a token of a large model takes a minute.
        large = LARGE_MODEL_TOKENS if engines == ("cpu",) else LARGE_MODEL_HASHED
        tokens = min(window + 32, 512) if small else large
        tokens = min(tokens, room)
    if tokens > room or room < 1:
        raise OptionError(
            f"{tokens} tokens and {decoded} decoded ones do not fit the model's context of "
            f"{model.spec.max_position_embeddings}"
        )
    ids, text = _fixed_ids(folder, model.checkpoint.config, model.spec.vocab_size, tokens)

    num_hashed = tokens if small else min(tokens, LARGE_MODEL_HASHED)
    configurations: list[Configuration] = []
    for name in engines:
        if memories or threads or chunks:
            configurations += _listed_configurations(name, memories, threads, chunks)
        elif name == "cpu":
            configurations += _default_configurations(
                num_experts, expert_nbytes, small, model.spec.num_experts_per_tok
            )
        else:
            configurations += _mlx_configurations(num_experts, expert_nbytes, model.spec.num_experts_per_tok)

    stamps = _stamps(model.checkpoint.shards)
    check = None
    if files:
        check = check_files(model.checkpoint, manifest=manifest, record=record, on_progress=on_progress)

    kv = asked_format(EngineOptions(kv_bits=kv_bits, kv_v_bits=kv_v_bits, kv_ring_bits=kv_ring_bits))
    task = Task(folder, tuple(ids), num_hashed, decoded, kv.key_bits, kv.value_bits, kv.ring_bits)
    rows: list[Row] = []

    def add(configuration: Configuration, keep: Path | None) -> bool:
        """Make one row; say whether the next may follow."""
        row = run(configuration, task, keep=keep)
        reference = next(
            (r.sha256 for r in rows if r.state == "ok" and r.configuration.group == configuration.group), None
        )
        if row.state == "ok" and reference is not None and row.sha256 != reference:
            row = replace(row, state="different")
        rows.append(row)
        if on_row is not None:
            on_row(row)
        if _stamps(model.checkpoint.shards) == stamps:
            return True
        rows[-1] = Row(configuration, "failed", "the model's files were written to meanwhile")
        return False

    agreements: tuple[Agreement, ...] = ()
    with TemporaryDirectory(prefix="spile-verify-") as temporary:
        kept: dict[Configuration, Path] = {}
        if engine == "both":
            precise = [
                Configuration(engine=name, is_precise=True, prefill_chunk=MLX_CHUNKS[0]) for name in engines
            ]
            configurations += precise
            firsts = [next(each for each in configurations if each.engine == name) for name in engines]
            kept = {each: Path(temporary) / str(n) for n, each in enumerate([*precise, *firsts])}
        if all(add(each, kept.get(each)) for each in configurations) and kept:
            agreements = tuple(compare(kept, model.spec.vocab_size))
    return Report(
        model=str(source) if source is not None else "the demo model",
        text=text,
        num_tokens=tokens,
        num_hashed=num_hashed,
        num_decoded=decoded,
        kv_bits=kv.key_bits,
        kv_v_bits=kv.value_bits,
        kv_ring_bits=kv.ring_bits,
        rows=tuple(rows),
        files=check,
        is_across_engines=engine == "both",
        agreements=agreements,
    )


def _sizes(model: OwnModel | ForeignModel) -> tuple[int, int, int]:
    """Return how many experts a model has, their bytes, and its window. Of a foreign model spile knows none of
    them: a few experts for each that is chosen, and the bytes of all its files, are close enough to choose rows by.
    """
    from spile.architectures.spec import OwnModel
    from spile.residency.experts import ExpertTable

    if not isinstance(model, OwnModel):
        nbytes = sum(os.stat(path).st_size for path in model.checkpoint.shards)
        return 8 * max(1, model.spec.num_experts_per_tok), nbytes, 128
    table = ExpertTable(model)
    num_experts = sum(table.is_moe(layer) for layer in range(table.num_layers)) * table.num_experts
    return num_experts, num_experts * table.expert_nbytes, model.spec.sliding_window or 128


def heading() -> str:
    """Return the heading over `line`."""
    return f"{'memory':>9} {'threads':>7} {'chunk':>6} {'io':<8} {'by':<7} {'peak':>8} {'resident':>8} " + (
        f"{'read':>8} {'seconds':>7} {'tokens':>6}  sha256"
    )


def line(row: Row) -> str:
    """Return one row of the table for a person."""
    c = row.configuration
    memory = "all" if c.memory_bytes is None else _size(c.memory_bytes)
    memory = f"{c.slots} slots" if c.slots is not None else memory
    chunk = f"{c.prefill_chunk or 'auto'}" + (f"/{c.last_step}" if c.last_step else "")
    cells = f"{memory:>9} {c.threads or 'auto':>7} {chunk:>6} "
    by = c.isa or ("auto" if c.engine == "cpu" else c.engine)
    cells += f"{c.io:<8} {by + '+' if c.is_precise else by:<7} "
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

    A large model reads the beginning of the text in chunks, and only the tokens whose logits count singly or seven at
    a time. On the 20B model the twelve rows took 94 s of CPU time (2026-12-01).
    """

    def in_steps(row: Configuration, step: int) -> Configuration:
        return replace(row, prefill_chunk=step) if small else replace(row, last_step=step)

    first = Configuration()
    rows = [
        first,
        Configuration(threads=1),
        in_steps(Configuration(threads=3, prefill_chunk=64), 7),
        in_steps(first, 1),
    ]
    budgets = [memory for memory in DEFAULT_BUDGETS if memory < expert_nbytes]
    if budgets:
        smallest, *larger = (Configuration(memory_bytes=memory) for memory in budgets)
    else:  # a budget would hold everything: bound the pool itself
        smallest, *larger = (Configuration(slots=n) for n in _pool_sizes(num_experts, num_chosen))
    rows += [smallest, *larger]
    rows.append(in_steps(replace(smallest, io="buffered", threads=1), 7))
    rows.append(in_steps(replace(smallest, io="direct"), 1))  # token by token, so that it reads ahead
    rows += [replace(smallest, isa=isa) for isa in _other_isas() if isa != "scalar" or small]
    if not small:
        rows += [
            replace(first, num_tokens=SCALAR_TOKENS),
            replace(first, num_tokens=SCALAR_TOKENS, isa="scalar"),
        ]
    return rows


def _listed_configurations(
    engine: str, memories: Sequence[int] | None, threads: Sequence[int] | None, chunks: Sequence[int] | None
) -> list[Configuration]:
    """Return the rows that the user named, after one to compare them with; on mlx after one a chunk, and at
    the same chunk everywhere where none is named."""
    if engine == "cpu":
        firsts = [Configuration()]
    else:
        chunks = chunks or MLX_CHUNKS[:1]
        firsts = [Configuration(engine="mlx", prefill_chunk=chunk) for chunk in chunks]
    return firsts + [
        Configuration(memory_bytes=memory, threads=count, prefill_chunk=chunk, engine=engine)
        for memory in memories or (None,)
        for count in threads or (None,)
        for chunk in chunks or (None,)
    ]


def _mlx_configurations(num_experts: int, expert_nbytes: int, num_chosen: int) -> list[Configuration]:
    """Return the rows of the mlx engine when the user names none: at each chunk all resident, then streamed."""
    budgets = [memory for memory in DEFAULT_BUDGETS if memory < expert_nbytes]
    rows = []
    for chunk in MLX_CHUNKS if not budgets else MLX_CHUNKS[:1]:
        first = Configuration(engine="mlx", prefill_chunk=chunk)
        rows.append(first)
        if budgets:
            rows += [replace(first, memory_bytes=memory) for memory in budgets]
        else:
            rows += [replace(first, slots=n) for n in _pool_sizes(num_experts, num_chosen)[1:]]
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
