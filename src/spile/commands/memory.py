"""Turns the commands about memory (`plan`, `bench trace`, `bench replay`) into calls of the library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from spile.commands.flags import (
    MACHINE,
    ActiveExperts,
    Debug,
    FlashMoe,
    Io,
    Json,
    KvBits,
    KvRingBits,
    KvVBits,
    Model_,
    ModelArgument,
    Offline,
    SharedExperts,
    one_of,
    option,
)
from spile.commands.flags import size_or_auto as size_of
from spile.commands.help import HELP_FLAGS, HelpCommand, HelpGroup
from spile.errors import UnsupportedModelError

if TYPE_CHECKING:
    from spile.architectures.foreign import ForeignModel
    from spile.architectures.spec import OwnModel
    from spile.bench import Recorded
    from spile.console.terminal import Stdout
    from spile.model import Model
    from spile.options import EngineOptions
    from spile.residency.forecast import Probe, Routing
    from spile.residency.plan import Plan

_CHUNKS = (64, 512)  # to try besides the plan's own: a short and the longest one of other budgets

bench = typer.Typer(
    name="bench", cls=HelpGroup, help="Measure: traces of routing, and what a pool makes of them.",
    rich_markup_mode=None, context_settings=HELP_FLAGS,
)  # fmt: skip


def plan(
    model_argument: ModelArgument = None,
    model: Model_ = None,
    memory: Annotated[
        str, option("--memory", metavar="SIZE", help="The budget; auto: what is free.", panel=MACHINE)
    ] = "auto",
    context: Annotated[
        int | None, option("--context", help="Tokens that a conversation may have.", panel=MACHINE)
    ] = None,
    threads: Annotated[int | None, option("--threads", help="Compute threads.", panel=MACHINE)] = None,
    io: Io = "auto",
    kv_bits: KvBits = 16,
    kv_v_bits: KvVBits = None,
    kv_ring_bits: KvRingBits = None,
    flash_moe: FlashMoe = False,
    active_experts: ActiveExperts = None,
    shared_experts: SharedExperts = 0,
    sequences: Annotated[
        int, option("--sequences", help="Conversations at once that must have room.", panel=MACHINE)
    ] = 1,
    trace_file: Annotated[
        Path | None,
        option("--trace", metavar="FILE", help="Hit rates from a trace of `bench trace`.", panel=MACHINE),
    ] = None,
    probe: Annotated[bool, option("--probe/--no-probe", help="Measure this machine for seconds.")] = True,
    offline: Offline = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say whether a model fits a budget, where each byte goes, and how fast it will be."""
    source = one_of("MODEL", model_argument, "--model", model)
    from spile.architectures.foreign import foreign_types
    from spile.architectures.spec import OwnModel
    from spile.commands.plan_text import plan_dict, plan_lines
    from spile.console.terminal import Stdout, note
    from spile.engines import why_not_cpu
    from spile.options import EngineOptions
    from spile.residency.budgets import look_at_budgets
    from spile.residency.experts import ExpertTable
    from spile.residency.forecast import USUAL_ROUTING, forecast
    from spile.residency.plan import make_plan, memory_now
    from spile.text.renderer import reserved_nbytes

    stdout = Stdout(sys.stdout)
    options = EngineOptions(
        memory_bytes=size_of(memory), context=context, threads=threads, io=io, kv_bits=kv_bits,
        kv_v_bits=kv_v_bits, kv_ring_bits=kv_ring_bits, flash_moe=flash_moe, active_experts=active_experts,
        shared_experts=shared_experts, sequences=sequences,
    )  # fmt: skip
    with _opened_any(source, offline) as (own, files):
        options.check_context(own.spec.max_position_embeddings)
        why = why_not_cpu(own)
        if not isinstance(own, OwnModel) or (why is not None and foreign_types()):
            _plan_mlx(stdout, source, own, options, json)
            return
        if why is not None:
            note(f"{why}; this is what a pool of its experts would take")
        options.check_experts(own.spec.num_experts, own.spec.num_experts_per_tok)
        routing = USUAL_ROUTING if trace_file is None else _routing(trace_file, own)
        if why is None and _load_text(files.folder):
            options = replace(options, reserved_bytes=reserved_nbytes(options.memory_bytes))
        now = memory_now()
        made = make_plan(own, ExpertTable(own), options, now)
        measured = _probe(own, made, options, files) if probe and why is None else None
        expected = None if measured is None else forecast(own, made, measured, routing)
        outlook = look_at_budgets(own, options, now, measured, routing)
    name = source or str(own.checkpoint.folder)
    if json:
        from spile.commands.generate import json_line

        stdout.write(json_line(plan_dict(name, own, made, expected, outlook, measured)))
        return
    stdout.write("\n".join(plan_lines(name, own, made, expected, outlook)) + "\n")


@bench.command(cls=HelpCommand, context_settings=HELP_FLAGS)
def trace(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the trace (.npz).")],
    model: Model_ = None,
    tokens: Annotated[int, option("--tokens", help="Tokens to decode.")] = 256,
    prompt: Annotated[str, option("--prompt", help="What to begin with.")] = "Once upon a time",
    seed: Annotated[int, option("--seed", help="Of the sampling.")] = 0,
    offline: Offline = False,
    debug: Debug = False,
) -> None:
    """Record which experts the router chooses while a model writes."""
    from spile.bench import check_destination, record_trace
    from spile.console.terminal import LiveLine, Stdout

    stdout = Stdout(sys.stdout)
    check_destination(out)
    live = LiveLine(sys.stderr)
    recorded = record_trace(
        model, prompt, tokens, seed, offline=offline,
        on_token=lambda done: live.show(lambda: f"{done} of {tokens} tokens"),
    )  # fmt: skip
    live.clear()
    recorded.save(out)
    N, L, K = recorded.ids.shape
    stdout.write(f"{out}: {N} tokens, {L} layers, {K} of {recorded.num_experts} experts each\n")


@bench.command(cls=HelpCommand, context_settings=HELP_FLAGS)
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace that `bench trace` wrote.")],
    model: Annotated[
        str | None, option("--model", "-m", metavar="MODEL", help="Say speeds too: the model of the trace.")
    ] = None,
    offline: Offline = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare policies on a trace, and say what more memory would buy."""
    from spile.bench import Recorded, replay_rows
    from spile.console.terminal import Stdout

    stdout = Stdout(sys.stdout)
    recorded = Recorded.load(file)
    rows = replay_rows(recorded)
    if model is not None:
        _add_speeds(rows, model, recorded, file, offline)
    if json:
        from spile.commands.generate import json_line

        stdout.write(json_line({"trace": str(file), "rows": rows}))
        return
    from spile.commands.plan_text import replay_lines

    stdout.write("\n".join(replay_lines(rows)) + "\n")


def _add_speeds(
    rows: list[dict[str, Any]], source: str, recorded: Recorded, file: Path, offline: bool
) -> None:
    """Add to each pool the least budget that has so many slots, and how fast it will be."""
    from spile.options import EngineOptions
    from spile.residency.budgets import least_plan
    from spile.residency.experts import ExpertTable
    from spile.residency.forecast import forecast, routing_of
    from spile.residency.plan import memory_now
    from spile.text.renderer import reserved_nbytes

    with _opened(source, offline) as (own, files):
        hit_rates = {row["num_slots"]: row["spile"] for row in rows}
        routing = routing_of(recorded.ids, recorded.num_experts, own.spec, str(file), hit_rates)
        options = EngineOptions(reserved_bytes=reserved_nbytes(None) if _load_text(files.folder) else 0)
        now, table = memory_now(), ExpertTable(own)
        plans = [least_plan(own, table, options, now, row["num_slots"]) for row in rows]
        probe = _probe(own, plans[0], options, files)
        for row, made in zip(rows, plans, strict=True):
            expected = forecast(own, made, probe, routing)
            row["memory_nbytes"] = made.budget_nbytes
            row["decode_cold"], row["decode_warm"] = expected.decode_cold, expected.decode_warm


def _plan_mlx(
    stdout: Stdout,
    source: str | None,
    opened: OwnModel | ForeignModel,
    options: EngineOptions,
    json: bool,
) -> None:
    """Plan for the mlx engine. Nothing is foretold: what a GPU does with a model was never measured."""
    from spile.commands.plan_text import foreign_dict, foreign_lines
    from spile.engines.mlx.adapter import require

    require()
    from spile.engines.mlx.streaming import plan_checkpoint

    made = plan_checkpoint(
        opened.checkpoint,
        options,
        longest=opened.spec.max_position_embeddings,
        num_chosen=opened.spec.num_experts_per_tok,
    )
    name = source or str(opened.checkpoint.folder)
    if json:
        from spile.commands.generate import json_line

        stdout.write(json_line(foreign_dict(name, made)))
        return
    stdout.write("\n".join(foreign_lines(name, made)) + "\n")


@contextmanager
def _opened(source: str | None, offline: bool) -> Iterator[tuple[OwnModel, _Files]]:
    """As `_opened_any`, for what the cpu engine runs alone."""
    from spile.architectures.spec import OwnModel
    from spile.engines import why_not_cpu

    with _opened_any(source, offline) as (opened, files):
        why = why_not_cpu(opened)
        if why is not None or not isinstance(opened, OwnModel):
            raise UnsupportedModelError(
                f"the speed of {source or opened.checkpoint.folder} is not foretold: {why}"
            )
        yield opened, files


@contextmanager
def _opened_any(source: str | None, offline: bool) -> Iterator[tuple[OwnModel | ForeignModel, _Files]]:
    """Open a model by its headers alone; of a hub's model that is not here, only those are fetched."""
    from spile.architectures import open_model
    from spile.files.checkpoint import open_checkpoint
    from spile.files.hub import large_cached_file, resolve_headers
    from spile.making.convert import is_source

    with TemporaryDirectory(prefix="spile-") as room:
        folder, is_whole = resolve_headers(source, Path(room), offline=offline)
        own = open_model(open_checkpoint(folder))
        if is_source(own):
            raise UnsupportedModelError(
                f"{source or folder} holds bf16 weights: a plan is for the 2-bit form",
                f"Convert them once: spile convert {source or folder} NEW_FOLDER",
            )
        other = None if is_whole else large_cached_file()
        if not is_whole:  # named as the user named it
            own = replace(own, checkpoint=replace(own.checkpoint, folder=Path(source or "")))
        yield own, _Files(folder, is_whole, [] if other is None else [other])


class _Files(NamedTuple):
    """What can be read to measure a disk: the model's own shards, or another large file on the same disk."""

    folder: Path
    are_own: bool
    others: list[Path]


def _probe(own: OwnModel, made: Plan, options: EngineOptions, files: _Files) -> Probe:
    from spile.engines.cpu.probe import probe_machine
    from spile.generation.pace import Pace
    from spile.machine import physical_cores
    from spile.residency.experts import ExpertTable
    from spile.residency.kv import kv_format

    with _opened_text(files.folder) as model:
        tokenizer = model.tokenizer
        pace = Pace(
            model.sampling,
            num_entries=model.vocab_size if tokenizer is None else tokenizer.num_entries,
            decoder=None if tokenizer is None else tokenizer.decoder(),
        )
        probe = probe_machine(
            own.spec,
            ExpertTable(own),
            list(own.checkpoint.shards) if files.are_own else files.others,
            are_weights=files.are_own,
            threads=options.threads or physical_cores(),
            chunks={made.prefill_chunk, *(c for c in _CHUNKS if c <= own.spec.max_position_embeddings)},
            kv=kv_format(own.spec, options),
            cached=not made.is_direct,
            fresh_nbytes=made.parts.experts,
            between=pace.step,
        )
    return replace(probe, loop_seconds=pace.seconds)


def _routing(path: Path, own: OwnModel) -> Routing:
    from spile.bench import Recorded
    from spile.residency.forecast import routing_of

    recorded = Recorded.load(path)
    return routing_of(recorded.ids, recorded.num_experts, own.spec, str(path))


def _load_text(folder: Path) -> bool:
    """Hold what `generate` holds when it plans: what the process has by then is a part of the plan. Say whether there
    is a chat template.
    """
    import spile.commands.generate
    import spile.console.terminal
    import spile.engines.cpu.engine  # noqa: F401

    with _opened_text(folder) as model:
        if model.tokenizer is not None:
            model.encode("Once upon a time", raw=model.chat_template is None)
        return model.tokenizer is not None and model.chat_template is not None


def _opened_text(folder: Path) -> Model:
    """Open a model for its tokenizer and its defaults; its headers are all there may be of the rest."""
    from spile.loading import load

    return load(folder, memory=2**40, offline=True, on_note=lambda _: None)
