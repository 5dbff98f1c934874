"""Turns the commands about model folders (`verify`, `synth`, `convert`) into calls of the library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from spile.commands.flags import (
    Debug,
    Json,
    KvBits,
    KvRingBits,
    KvVBits,
    Model_,
    ModelArgument,
    Offline,
    one_of,
    option,
    size_or_auto,
)
from spile.console.terminal import note
from spile.errors import OptionError


def verify(
    model_argument: ModelArgument = None,
    model: Model_ = None,
    memories: Annotated[
        list[str] | None, option("--memory", metavar="SIZE", help="A budget to try; may be repeated.")
    ] = None,
    threads: Annotated[list[int] | None, option("--threads", help="Threads to try; may be repeated.")] = None,
    chunks: Annotated[
        list[int] | None, option("--prefill-chunk", help="A prefill chunk to try; may be repeated.")
    ] = None,
    tokens: Annotated[int | None, option("--tokens", help="The length of the text.")] = None,
    engine: Annotated[
        str, option("--engine", metavar="NAME", help="auto, cpu, mlx, or both and compare; default auto.")
    ] = "auto",
    kv_bits: KvBits = 16,
    kv_v_bits: KvVBits = None,
    kv_ring_bits: KvRingBits = None,
    files: Annotated[bool, option("--files/--no-files", help="Compare the files' digests.")] = True,
    manifest: Annotated[
        Path | None, option("--manifest", help="Compare with the digests in this file; write it if absent.")
    ] = None,
    record: Annotated[bool, option("--record", help="Record the files as they are now.")] = False,
    offline: Offline = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Prove that a model's answer does not depend on memory, threads or chunks."""
    source = one_of("MODEL", model_argument, "--model", model)
    budgets = [nbytes for text in memories or () if (nbytes := size_or_auto(text)) is not None]
    if not files and (manifest is not None or record):
        flag = "--record" if manifest is None else "--manifest"
        raise OptionError(f"--no-files and {flag} contradict each other: give one of the two")
    from spile import verify as certificate
    from spile.commands.generate import json_line
    from spile.console.terminal import LiveLine, Stdout, bytes_text
    from spile.verify_row import Row

    stdout, live = Stdout(sys.stdout), LiveLine(sys.stderr)
    has_heading = False

    def show_row(row: Row) -> None:
        nonlocal has_heading
        live.clear()
        if json:
            return
        if not has_heading:  # with the first row, so that no error comes under it
            stdout.write(certificate.heading() + "\n")
        has_heading = True
        stdout.write(certificate.line(row) + "\n")

    def show_progress(done: int, total: int) -> None:
        live.show(lambda: bytes_text("comparing the files", done, total))

    try:
        report = certificate.verify(
            source,
            memories=budgets or None,
            threads=threads or None,
            chunks=chunks or None,
            tokens=tokens,
            kv_bits=kv_bits,
            kv_v_bits=kv_v_bits,
            kv_ring_bits=kv_ring_bits,
            files=files,
            manifest=manifest,
            record=record,
            offline=offline,
            engine=engine,
            on_row=show_row,
            on_progress=show_progress,
        )
    finally:
        live.clear()
    if json:
        stdout.write(json_line(report.as_dict()))
    else:
        if report.files is not None:
            from spile.files.digests import describe

            stdout.write("\n".join(describe(report.files)) + "\n")
        stdout.write("".join(f"{agreement}\n" for agreement in report.agreements))
        stdout.write(report.verdict() + "\n")
    if not report.ok:
        raise typer.Exit(1)


_Result = TypeVar("_Result")
_SIZES = {  # flag -> field of SynthShape
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "dense_layers": "first_k_dense_replace",
    "dense_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "tokenizer_entries": "tokenizer_entries",
    "window": "sliding_window",
    "context": "max_position_embeddings",
    "full_attention_interval": "full_attention_interval",
}


def _size(flag: str) -> Any:
    field = _SIZES[flag.removeprefix("--").replace("-", "_")]
    return option(flag, help=f"{field}.", panel="Sizes, in place of the preset's")


def synth(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
    preset: Annotated[
        str, option("--preset", help="tiny, maple-20b (5.3 GB) or qwen3-30b-a3b-4bit (17 GB).")
    ] = "tiny",
    layers: Annotated[int | None, _size("--layers")] = None,
    width: Annotated[int | None, _size("--width")] = None,
    heads: Annotated[int | None, _size("--heads")] = None,
    kv_heads: Annotated[int | None, _size("--kv-heads")] = None,
    head_dim: Annotated[int | None, _size("--head-dim")] = None,
    experts: Annotated[int | None, _size("--experts")] = None,
    experts_per_token: Annotated[int | None, _size("--experts-per-token")] = None,
    expert_width: Annotated[int | None, _size("--expert-width")] = None,
    dense_layers: Annotated[int | None, _size("--dense-layers")] = None,
    dense_width: Annotated[int | None, _size("--dense-width")] = None,
    vocab_size: Annotated[int | None, _size("--vocab-size")] = None,
    tokenizer_entries: Annotated[int | None, _size("--tokenizer-entries")] = None,
    window: Annotated[int | None, _size("--window")] = None,
    context: Annotated[int | None, _size("--context")] = None,
    full_attention_interval: Annotated[int | None, _size("--full-attention-interval")] = None,
    seed: Annotated[int, option("--seed", help="Same seed, same model.")] = 0,
    shards: Annotated[int | None, option("--shards", help="Number of files.")] = None,
    group_scales: Annotated[
        bool, option("--group-scales", help="Write scales and biases instead of row alphas.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write a random model of a given shape, to measure with."""
    flags = locals()
    from dataclasses import replace

    from spile.making.synth import PRESETS, write_checkpoint

    if preset not in PRESETS:
        raise OptionError(f"there is no preset {preset!r}: there are {', '.join(sorted(PRESETS))}")
    sizes = {field: flags[name] for name, field in _SIZES.items() if flags[name] is not None}
    shape = replace(PRESETS[preset], **sizes)
    _with_progress(
        "writing",
        lambda progress: write_checkpoint(
            folder,
            shape,
            seed=seed,
            shards=shards,
            group_scales=group_scales,
            progress=progress,
            on_note=note,
        ),
    )
    _record(folder)


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The bf16 source: a folder or a hub id.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    offline: Offline = False,
    debug: Debug = False,
) -> None:
    """Pack a bf16 source into the 2-bit form that spile runs."""
    from spile.files.hub import resolve
    from spile.making.convert import convert_folder

    folder = resolve(source, offline=offline)
    _with_progress(
        "packing", lambda progress: convert_folder(folder, destination, progress=progress, on_note=note)
    )
    _record(destination)


def _record(folder: Path) -> None:
    """Record the digests of a folder that was just written, so that `verify` finds later damage."""
    from spile.files.checkpoint import open_checkpoint
    from spile.files.digests import record_files

    checkpoint = open_checkpoint(folder)
    notes = _with_progress(
        "recording digests", lambda progress: record_files(checkpoint, on_progress=progress)
    )
    for text in notes:
        note(text)
    note(f"wrote {folder}", word="")


def _with_progress(what: str, work: Callable[[Callable[[int, int], None]], _Result]) -> _Result:
    from spile.console.terminal import LiveLine, bytes_text

    live = LiveLine(sys.stderr)
    try:
        return work(lambda done, total: live.show(lambda: bytes_text(what, done, total)))
    finally:
        live.clear()
