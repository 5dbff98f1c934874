"""Turns a plan, its forecast and the table of budgets into lines for people, and into JSON.

It decides and measures nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from spile.errors import clean
from spile.sizes import format_size

if TYPE_CHECKING:
    from spile.architectures.spec import OwnModel
    from spile.engines.mlx.plan import MlxPlan
    from spile.residency.budgets import Outlook, Row
    from spile.residency.forecast import Forecast, Probe
    from spile.residency.plan import Parts, Plan

_PARTS = {
    "process": "interpreter, libraries, text",
    "reserved": "what the chat template's process and requests may take",
    "weights": "attention, routers, norms, row alphas",
    "head": "resident rows of the head, buffers for the others",
    "kv": "keys and values of a full context",
    "prompts": "keys and values of earlier prompts",
    "activations": "activations of a prefill chunk, logits",
    "experts": "experts",
    "margin": "what nobody counts",
}
_PROMPT_TOKENS = 512  # of the time to the first token


def parts_lines(parts: Parts, budget_nbytes: int | None) -> list[str]:
    """Say where each byte goes."""
    lines = [
        f"  {format_size(nbytes):>8}  {meaning}"
        for name, meaning in _PARTS.items()
        if (nbytes := getattr(parts, name))
    ]
    budget = "" if budget_nbytes is None else f" of {format_size(budget_nbytes)}"
    return [*lines, f"  {format_size(parts.total):>8}  together{budget}"]


def plan_lines(
    name: str, own: OwnModel, made: Plan, expected: Forecast | None, outlook: Outlook
) -> list[str]:
    """Say all that `spile plan` says."""
    total = own.spec.num_routed_experts
    lines = [clean(name), *parts_lines(made.parts, made.budget_nbytes)]
    if made.is_mapped:
        lines.append("everything fits: files are mapped and used in place")
    else:
        streamed = 1 - made.num_head_rows / own.spec.vocab_size
        reads = "direct" if made.is_direct else "buffered"
        lines.append(
            f"fits: {made.num_slots:,} of {total:,} experts resident, {streamed:.0%} of the head streamed, "
            f"reads {reads}"
        )
    lines.append(f"context {made.context:,} tokens, prefill chunk {made.prefill_chunk} tokens")
    if expected is not None:
        lines += _expected_lines(made, expected)
    return [*lines, *_outlook_lines(outlook, total)]


def foreign_lines(name: str, made: MlxPlan) -> list[str]:
    """Say what `spile plan` says of a model that the mlx engine runs."""
    if not made.num_experts:
        experts = "no experts: all of it is resident, nothing is streamed"
    elif made.is_resident:
        experts = "everything fits: all experts resident"
    else:
        experts = f"fits: {made.num_slots:,} of {made.num_experts:,} experts resident, reads buffered"
    size = f"context {made.context:,} tokens, prefill chunk {made.prefill_chunk} tokens, mlx engine"
    return [clean(name), *parts_lines(made.parts, made.budget_nbytes), experts, size]


def foreign_dict(name: str, made: MlxPlan) -> dict[str, Any]:
    """Return what `spile plan --json` prints of it."""
    budget = made.budget_nbytes
    return {
        "model": name,
        "engine": "mlx",
        "is_resident": made.is_resident,
        "num_slots": made.num_slots,
        "num_experts": made.num_experts,
        "prefill_chunk": made.prefill_chunk,
        "context": made.context,
        "budget_nbytes": budget,
        "parts": asdict(made.parts),
        "total_nbytes": made.parts.total,
        "left_nbytes": None if budget is None else budget - made.parts.total,
    }


def plan_dict(
    name: str, own: OwnModel, made: Plan, expected: Forecast | None, outlook: Outlook, probe: Probe | None
) -> dict[str, Any]:
    """Return what `spile plan --json` prints."""
    budget = made.budget_nbytes
    return {
        "model": name,
        **asdict(made),
        "total_nbytes": made.parts.total,
        "left_nbytes": None if budget is None else budget - made.parts.total,
        "num_experts": own.spec.num_routed_experts,
        "forecast": None if expected is None else _forecast_dict(expected),
        "probe": None if probe is None else _probe_dict(probe),
        "smallest": _row_dict(outlook.smallest),
        "mapped_nbytes": outlook.mapped_nbytes,
        "enough_warm_nbytes": outlook.enough_warm_nbytes,
        "enough_cold_nbytes": outlook.enough_cold_nbytes,
        "by_budget": [_row_dict(row) for row in outlook.rows],
    }


def replay_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Show hit rates by pool and policy, and speeds where they are known."""
    apart = ("num_slots", "share", "memory_nbytes", "decode_cold", "decode_warm")
    names = [name for name in rows[0] if name not in apart]
    has_speeds = "memory_nbytes" in rows[0]
    heading = f"{'slots':>7} {'share':>6} " + " ".join(f"{name:>13}" for name in names)
    lines = [heading + (f" {'memory':>8} {'cold tok/s':>11} {'warm tok/s':>11}" if has_speeds else "")]
    for row in rows:
        line = f"{row['num_slots']:>7,} {row['share']:>6.1%} " + " ".join(
            f"{row[name]:>13.1%}" for name in names
        )
        if has_speeds:
            speeds = (row["decode_cold"], row["decode_warm"])
            cold, warm = ("-" if speed is None else f"{speed:.1f}" for speed in speeds)
            line += f" {format_size(row['memory_nbytes']):>8} {cold:>11} {warm:>11}"
        lines.append(line)
    return lines


def _expected_lines(made: Plan, expected: Forecast) -> list[str]:
    lines = []
    if not made.is_mapped:
        missed = format_size(expected.bytes_per_token)
        lines.append(f"expected hit rate {expected.hit_rate:.0%}, a token reads {missed}")
    unknown = []
    for word, cold, decode, prefill in (
        ("warm", False, expected.decode_warm, expected.prefill_warm),
        ("cold", True, expected.decode_cold, expected.prefill_cold),
    ):
        first = expected.first_token_seconds(_PROMPT_TOKENS, cold=cold)
        if decode is None or prefill is None or first is None:
            unknown.append(word)
            continue
        lines.append(
            f"expected {word}: {decode:.1f} tok/s, prompt {prefill:.0f} tok/s "
            f"(first token of {_PROMPT_TOKENS} after {first:.1f} s)"
        )
    if "warm" in unknown and made.is_direct:
        lines.append("every run is a cold one: reads go past the page cache")
        unknown.remove("warm")
    if unknown:
        lines.append(f"expected {' and '.join(unknown)}: unknown, no file to try is here")
    return lines


def _outlook_lines(outlook: Outlook, num_experts: int) -> list[str]:
    lines = [f"{'memory':>8} {'slots':>7} {'hits':>5} {'cold tok/s':>11} {'warm tok/s':>11} {'context':>8}"]
    for row in outlook.rows:
        speeds = (
            (None, None) if row.forecast is None else (row.forecast.decode_cold, row.forecast.decode_warm)
        )
        cold, warm = ("-" if speed is None else f"{speed:.1f}" for speed in speeds)
        slots = f"{num_experts if row.plan.is_mapped else row.plan.num_slots:,}"
        lines.append(
            f"{format_size(row.budget_nbytes):>8} {slots:>7} {row.hit_rate:>5.0%} {cold:>11} {warm:>11} "
            f"{row.plan.context:>8,}"
        )
    smallest, mapped = format_size(outlook.smallest.budget_nbytes), outlook.mapped_nbytes
    lines.append(
        f"smallest budget {smallest}"
        + (f"; from {format_size(mapped)} on everything is mapped" if mapped is not None else "")
    )
    enough = [
        f"{format_size(nbytes)} {word}"
        for word, nbytes in (("cold", outlook.enough_cold_nbytes), ("warm", outlook.enough_warm_nbytes))
        if nbytes is not None
    ]
    if enough:
        lines.append(f"within a tenth of the best speed from {', '.join(enough)}")
    return lines


def _forecast_dict(expected: Forecast) -> dict[str, Any]:
    return {
        **asdict(expected),
        "first_token_tokens": _PROMPT_TOKENS,
        "first_token_seconds_warm": expected.first_token_seconds(_PROMPT_TOKENS, cold=False),
        "first_token_seconds_cold": expected.first_token_seconds(_PROMPT_TOKENS, cold=True),
    }


def _probe_dict(probe: Probe) -> dict[str, Any]:
    values = asdict(probe)
    values["chunks"] = {str(tokens): list(seconds) for tokens, seconds in probe.chunks.items()}
    return {name: None if value == float("inf") else value for name, value in values.items()}


def _row_dict(row: Row) -> dict[str, Any]:
    expected = row.forecast
    return {
        "budget_nbytes": row.budget_nbytes,
        "is_mapped": row.plan.is_mapped,
        "num_slots": row.plan.num_slots,
        "hit_rate": row.hit_rate,
        "context": row.plan.context,
        "prefill_chunk": row.plan.prefill_chunk,
        "decode_cold": None if expected is None else expected.decode_cold,
        "decode_warm": None if expected is None else expected.decode_warm,
        "prefill_cold": None if expected is None else expected.prefill_cold,
        "prefill_warm": None if expected is None else expected.prefill_warm,
    }
