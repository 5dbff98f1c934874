"""Turns the commands about memory (`plan`, `bench trace`, `bench replay`) into calls of the library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spile.commands.flags import MACHINE, Debug, Json, KvBits, Model_, ModelArgument, Offline, one_of, option
from spile.commands.flags import size_or_auto as size_of
from spile.commands.help import HelpCommand, HelpGroup
from spile.errors import UnsupportedModelError

if TYPE_CHECKING:
    from spile.architectures.maple import MapleModel
    from spile.residency.forecast import Forecast
    from spile.residency.plan import Plan

_PARTS = {
    "process": "interpreter, libraries, text",
    "weights": "attention, routers, norms, row alphas",
    "head": "resident rows of the head, buffers for the others",
    "kv": "keys and values of a full context",
    "prompts": "keys and values of earlier prompts",
    "activations": "activations of a prefill chunk, logits",
    "experts": "experts",
    "margin": "what nobody counts",
}
_PROMPT_TOKENS = 512  # of the time to the first token

bench = typer.Typer(
    name="bench", cls=HelpGroup, help="Measure: traces of routing, and what a pool makes of them.",
    rich_markup_mode=None,
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
    kv_bits: KvBits = 16,
    probe: Annotated[bool, option("--probe/--no-probe", help="Measure this machine for a second.")] = True,
    offline: Offline = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say whether a model fits a budget, where each byte goes, and how fast it will be."""
    source = one_of("MODEL", model_argument, "--model", model)
    from spile.console.terminal import Stdout
    from spile.engines import EngineOptions
    from spile.machine import physical_cores
    from spile.residency.experts import ExpertTable
    from spile.residency.forecast import forecast, probe_machine
    from spile.residency.plan import make_plan

    stdout = Stdout(sys.stdout)
    options = EngineOptions(memory_bytes=size_of(memory), context=context, threads=threads, kv_bits=kv_bits)
    maple = _open(source, offline)
    options.check_context(maple.config.max_position_embeddings)
    _load_text(maple)
    made = make_plan(maple, ExpertTable(maple), options)
    measured = probe_machine(maple, options.threads or physical_cores()) if probe else None
    expected = None if measured is None else forecast(maple, made, measured)
    if json:
        from spile.commands.generate import json_line

        stdout.write(json_line(_as_dict(maple, made, expected)))
        return
    stdout.write("\n".join(_plan_lines(maple, made, expected)) + "\n")


@bench.command(cls=HelpCommand)
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


@bench.command(cls=HelpCommand)
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace that `bench trace` wrote.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare policies on a trace, and say what more memory would buy."""
    from spile.bench import Recorded, replay_rows
    from spile.console.terminal import Stdout

    stdout = Stdout(sys.stdout)
    rows = replay_rows(Recorded.load(file))
    if json:
        from spile.commands.generate import json_line

        stdout.write(json_line({"trace": str(file), "rows": rows}))
        return
    names = [name for name in rows[0] if name not in ("num_slots", "share")]
    lines = [f"{'slots':>7} {'share':>6} " + " ".join(f"{name:>14}" for name in names)]
    for row in rows:
        rates = " ".join(f"{row[name]:>14.1%}" for name in names)
        lines.append(f"{row['num_slots']:>7,} {row['share']:>6.1%} {rates}")
    stdout.write("\n".join(lines) + "\n")


def _open(source: str | None, offline: bool) -> MapleModel:
    from spile.architectures import open_model
    from spile.architectures.maple import Form
    from spile.files.checkpoint import open_checkpoint
    from spile.files.hub import resolve

    maple = open_model(open_checkpoint(resolve(source, offline=offline)))
    if maple.form is Form.BF16:
        raise UnsupportedModelError(
            f"{maple.checkpoint.folder} holds bf16 weights: a plan is for the 2-bit form",
            f"Convert them once: spile convert {maple.checkpoint.folder} NEW_FOLDER",
        )
    return maple


def _load_text(maple: MapleModel) -> None:
    """Hold what `generate` holds when it plans: what the process has by then is a part of the plan."""
    from spile.model import load

    with load(maple.checkpoint.folder, memory=2**40, offline=True, on_note=lambda _: None) as model:
        if model.tokenizer is not None:
            model.encode("Once upon a time", raw=True)


def _plan_lines(maple: MapleModel, made: Plan, expected: Forecast | None) -> list[str]:
    from spile.sizes import format_size

    config = maple.config
    total = config.num_routed_experts
    lines = [f"{maple.checkpoint.folder}"]
    for name, meaning in _PARTS.items():
        lines.append(f"  {format_size(getattr(made.parts, name)):>8}  {meaning}")
    budget = "" if made.budget_nbytes is None else f" of {format_size(made.budget_nbytes)}"
    lines.append(f"  {format_size(made.parts.total):>8}  together{budget}")
    if made.is_mapped:
        lines.append("everything fits: files are mapped and used in place")
    else:
        streamed = 1 - made.num_head_rows / config.vocab_size
        reads = "direct" if made.is_direct else "buffered"
        lines.append(
            f"{made.num_slots:,} of {total:,} experts resident, {streamed:.0%} of the head streamed, "
            f"reads {reads}"
        )
    lines.append(f"context {made.context:,} tokens, prefill chunk {made.prefill_chunk} tokens")
    if expected is not None:
        lines.append(f"expected hit rate {expected.hit_rate:.0%}")
        for word, cold, decode, prefill in (
            ("warm", False, expected.decode_warm, expected.prefill_warm),
            ("cold", True, expected.decode_cold, expected.prefill_cold),
        ):
            first = expected.first_token_seconds(_PROMPT_TOKENS, cold=cold)
            if decode is None or prefill is None or first is None:
                continue
            lines.append(
                f"expected {word}: {decode:.1f} tok/s, prompt {prefill:.0f} tok/s "
                f"(first token of {_PROMPT_TOKENS} after {first:.1f} s)"
            )
    return lines


def _as_dict(maple: MapleModel, made: Plan, expected: Forecast | None) -> dict[str, Any]:
    from dataclasses import asdict

    answer = {"model": str(maple.checkpoint.folder), **asdict(made), "total_nbytes": made.parts.total}
    answer["forecast"] = None if expected is None else asdict(expected)
    return answer
