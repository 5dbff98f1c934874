"""Turns a command line into calls of the library, and every error into one sentence and an exit code.

Codes: 0 done, 1 failed (a missing or unfit model included), 2 wrong usage, 130 interrupted. It knows nothing
of how models work: each command checks its flags, calls one function and prints what it gives. Whatever a
command needs is imported inside of it, so that `--help` is quick and a budget pays for no import that is not
used.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spile import __version__
from spile.errors import OptionError, SpileError
from spile.options import Sampling

if TYPE_CHECKING:
    from spile.model import Model


@dataclass
class _Door:
    """What the outermost door has to know about the command inside."""

    debug: bool = False


def _set_debug(context: typer.Context, value: bool) -> bool:
    door = context.find_root().obj
    if value and isinstance(door, _Door):
        door.debug = True
    return value


def _show_version(value: bool) -> None:
    if value:
        print(f"spile {__version__}")
        raise typer.Exit


def _option(*flags: str, help: str, **more: Any) -> Any:
    """Declare a flag; its variable is SPILE_ and the first flag's name, as the help's last line says."""
    name = flags[0].split("/")[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(*flags, envvar=f"SPILE_{name}", show_envvar=False, help=help, **more)


_DEFAULTS = Sampling()
_MODEL_HELP = "A folder or a hub id; the demo model when not given."
_EPILOG = "Every flag has a variable: SPILE_MODEL for --model, SPILE_MAX_TOKENS for --max-tokens."

_Model = Annotated[str | None, _option("--model", "-m", metavar="MODEL", help=_MODEL_HELP)]
_ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
_Json = Annotated[bool, _option("--json", help="Print one JSON object.")]
_Offline = Annotated[bool, _option("--offline", help="Download nothing.")]
_Debug = Annotated[
    bool, _option("--debug", callback=_set_debug, is_eager=True, help="Show the traceback of an error.")
]
_KvBits = Annotated[int, _option("--kv-bits", help="16 or 32, for keys and values.")]

app = typer.Typer(
    name="spile",
    help="Run a mixture-of-experts language model in far less memory than its weights need.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


@app.command(epilog=_EPILOG)
def generate(
    prompt_argument: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; - reads standard input.")
    ] = None,
    prompt: Annotated[str | None, _option("--prompt", help="The same, as a flag.")] = None,
    model: _Model = None,
    raw: Annotated[bool, _option("--raw", help="Go on from the prompt: no chat template.")] = False,
    system: Annotated[str | None, _option("--system", help="A system message before the prompt.")] = None,
    max_tokens: Annotated[int | None, _option("--max-tokens", help="Default: until the model ends.")] = None,
    temperature: Annotated[
        float | None,
        _option("--temp", help=f"0 is greedy. Default: the model's, else {_DEFAULTS.temperature}."),
    ] = None,
    top_p: Annotated[
        float | None, _option("--top-p", help=f"Default: the model's, else {_DEFAULTS.top_p}.")
    ] = None,
    top_k: Annotated[
        int | None, _option("--top-k", help=f"Default: the model's, else {_DEFAULTS.top_k}.")
    ] = None,
    min_p: Annotated[
        float | None, _option("--min-p", help=f"Default: the model's, else {_DEFAULTS.min_p}.")
    ] = None,
    seed: Annotated[int | None, _option("--seed", help="Same seed, same answer.")] = None,
    memory: Annotated[
        str, _option("--memory", metavar="SIZE", help="Bound of the whole process, such as 630MB.")
    ] = "auto",
    threads: Annotated[int | None, _option("--threads", help="Default: the physical cores.")] = None,
    io: Annotated[str, _option("--io", metavar="MODE", help="auto, buffered, direct or mapped.")] = "auto",
    kv_bits: _KvBits = 16,
    context: Annotated[
        int | None, _option("--context", help="Tokens of prompt and answer. Default: what has room.")
    ] = None,
    offline: _Offline = False,
    json: _Json = False,
    verbose: Annotated[bool, _option("--verbose", help="Say more on standard error.")] = False,
    debug: _Debug = False,
) -> None:
    """Answer a prompt."""
    text = _read_prompt(prompt_argument, prompt)
    changes: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "max_tokens": max_tokens,
    }
    _DEFAULTS.changed(changes)  # refuse what is out of range before a model is looked for
    from spile.model import load

    with load(
        model,
        memory=_size_or_auto(memory),
        threads=threads,
        io=io,
        kv_bits=kv_bits,
        context=context,
        offline=offline,
        on_note=_note,
    ) as loaded:
        _answer(loaded, text, raw, system, changes, json, verbose)


@app.command(epilog=_EPILOG)
def verify(
    model_argument: _ModelArgument = None,
    model: _Model = None,
    memories: Annotated[
        list[str] | None, _option("--memory", metavar="SIZE", help="A budget to try; may be repeated.")
    ] = None,
    threads: Annotated[
        list[int] | None, _option("--threads", help="Threads to try; may be repeated.")
    ] = None,
    chunks: Annotated[
        list[int] | None, _option("--prefill-chunk", help="A prefill chunk to try; may be repeated.")
    ] = None,
    tokens: Annotated[int | None, _option("--tokens", help="The length of the text.")] = None,
    kv_bits: _KvBits = 16,
    files: Annotated[bool, _option("--files/--no-files", help="Compare the files' digests.")] = True,
    manifest: Annotated[
        Path | None, _option("--manifest", help="Compare with the digests in this file; write it if absent.")
    ] = None,
    record: Annotated[bool, _option("--record", help="Record the files as they are now.")] = False,
    offline: _Offline = False,
    json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Prove that a model's answer does not depend on memory, threads or chunks."""
    source = _one_of("MODEL", model_argument, "--model", model)
    budgets = [nbytes for text in memories or () if (nbytes := _size_or_auto(text)) is not None]
    from spile import verify as certificate
    from spile.terminal import LiveLine, Stdout, bytes_text

    stdout, live = Stdout(sys.stdout), LiveLine(sys.stderr)
    if not json:
        stdout.write(certificate.heading() + "\n")

    def show_row(row: certificate.Row) -> None:
        live.clear()
        if not json:
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
            files=files,
            manifest=manifest,
            record=record,
            offline=offline,
            on_row=show_row,
            on_progress=show_progress,
        )
    finally:
        live.clear()
    if json:
        stdout.write(_json_line(report.as_dict()))
    else:
        if report.files is not None:
            from spile.digests import describe

            stdout.write("\n".join(describe(report.files)) + "\n")
        stdout.write(report.verdict() + "\n")
    if not report.ok:
        raise typer.Exit(1)


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
    return _option(flag, help=f"{field}.", rich_help_panel="Sizes, in place of the preset's")


@app.command(epilog=_EPILOG)
def synth(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
    preset: Annotated[str, _option("--preset", help="tiny or maple-20b (5.3 GB).")] = "tiny",
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
    seed: Annotated[int, _option("--seed", help="Same seed, same model.")] = 0,
    shards: Annotated[int | None, _option("--shards", help="Number of files.")] = None,
    group_scales: Annotated[
        bool, _option("--group-scales", help="Write scales and biases instead of row alphas.")
    ] = False,
    debug: _Debug = False,
) -> None:
    """Write a random model of a given shape, to measure with."""
    flags = locals()
    from dataclasses import replace

    from spile.synth import PRESETS, write_checkpoint

    if preset not in PRESETS:
        raise OptionError(f"there is no preset {preset!r}: there are {', '.join(sorted(PRESETS))}")
    sizes = {field: flags[name] for name, field in _SIZES.items() if flags[name] is not None}
    shape = replace(PRESETS[preset], **sizes)
    _with_progress(
        "writing",
        lambda progress: write_checkpoint(
            folder, shape, seed=seed, shards=shards, group_scales=group_scales, progress=progress
        ),
    )
    _note(f"wrote {folder}", word="")


@app.command(epilog=_EPILOG)
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The bf16 source: a folder or a hub id.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    offline: _Offline = False,
    debug: _Debug = False,
) -> None:
    """Pack a bf16 source into the 2-bit form that spile runs."""
    from spile.convert import convert_folder
    from spile.hub import resolve

    folder = resolve(source, offline=offline)
    _with_progress("packing", lambda progress: convert_folder(folder, destination, progress=progress))
    _note(f"wrote {destination}", word="")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit code. Every error of a command ends here."""
    from spile.terminal import StdoutClosedError, prepare_streams

    prepare_streams()
    # NumPy's BLAS would start a thread a core; nothing here uses it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    door = _Door()
    try:
        typer.main.get_command(app).main(args=arguments, prog_name="spile", obj=door)
        return 0
    except SystemExit as error:
        if error.code == 130:  # the command line library has swallowed a Ctrl-C
            raise KeyboardInterrupt from None
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except SpileError as error:
        if door.debug:
            traceback.print_exc()
        _note(str(error), word="error: ")
        if error.hint:
            _note(error.hint, word="hint: ")
        return 2 if isinstance(error, OptionError) else 1
    except StdoutClosedError:
        # What is still buffered must not fail again when Python flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # the outer door: anything else is a fault of ours
        if door.debug:
            traceback.print_exc()
        _note(f"unexpected {type(error).__name__}: {error}", word="error: ")
        _note("this is a fault in spile; --debug shows where.", word="hint: ")
        return 1


def main() -> int:
    """Run the command line of this process, as `python -m spile` does."""
    from spile.__main__ import main as guarded

    return guarded()


def _answer(
    loaded: Model,
    text: str,
    raw: bool,
    system: str | None,
    changes: dict[str, Any],
    json: bool,
    verbose: bool,
) -> None:
    """Stream one answer: its text to standard output, all else to standard error."""
    from spile.terminal import Progress, Stdout, summary_lines

    stdout = Stdout(sys.stdout)
    progress = Progress(sys.stderr, loaded.counters, shares_screen=stdout.is_terminal and not json)
    progress.load()
    try:
        stream = loaded.stream(text, raw=raw, system=system, on_prefill=progress.prefill, **changes)
    finally:
        progress.start()
    _note(loaded.summary or "", word="")
    if verbose:
        _note(
            f"model {loaded.folder}, context {loaded.context:,}, {loaded.sampling.changed(changes)}", word=""
        )
    texts: list[str] = []
    token_ids: list[int] = []
    chunk = None
    try:
        for chunk in stream:
            texts.append(chunk.text)
            if chunk.token_id is not None:
                token_ids.append(chunk.token_id)
                progress.token()
            if not json:
                stdout.write(chunk.text)
    except KeyboardInterrupt:
        progress.close()
        stdout.end_line()
        raise
    finally:
        progress.close()
    assert chunk is not None, "a stream ends with its reason"
    assert chunk.stats is not None, "and with its statistics"
    stats = chunk.stats.as_dict()
    answer = {"text": "".join(texts), "token_ids": token_ids, "finish_reason": chunk.finish_reason}
    stdout.write(_json_line({**answer, **stats}) if json else "\n")
    for line in summary_lines(chunk.stats):
        _note(line, word="")
    counters = loaded.counters()
    if verbose and counters is not None:
        _note(f"finish: {chunk.finish_reason}; since the start: {counters}", word="")


def _read_prompt(argument: str | None, option: str | None) -> str:
    """Return the prompt that the command line or standard input holds."""
    text = _one_of("PROMPT", argument, "--prompt", option)
    if text is None:
        raise OptionError("there is no prompt", "Give PROMPT, or - to read standard input.")
    if text != "-":
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise OptionError(f"the prompt is not valid UTF-8 at character {error.start:,}") from error
        return text
    data = sys.stdin.buffer.read() if sys.stdin is not None else b""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not valid UTF-8 at byte {error.start:,}") from error
    return text.removesuffix("\n").removesuffix("\r")  # the line's end is the shell's, not the prompt's


def _one_of(name: str, argument: str | None, flag: str, option: str | None) -> str | None:
    """Return what was given as argument or option; both is one too many, unless they agree."""
    if argument is not None and option is not None and argument != option:
        raise OptionError(f"{name} was given twice: {argument!r} and {flag} {option!r}")
    return option if argument is None else argument


def _size_or_auto(text: str) -> int | None:
    from spile.sizes import parse_size

    return None if text.strip().lower() == "auto" else parse_size(text, name="--memory")


def _with_progress(what: str, work: Callable[[Callable[[int, int], None]], None]) -> None:
    from spile.terminal import LiveLine, bytes_text

    live = LiveLine(sys.stderr)
    try:
        work(lambda done, total: live.show(lambda: bytes_text(what, done, total)))
    finally:
        live.clear()


def _json_line(value: dict[str, Any]) -> str:
    import json

    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    return json.dumps(value, ensure_ascii=encoding != "utf8", allow_nan=False) + "\n"


def _note(text: str, *, word: str = "note: ") -> None:
    """Write a line to standard error; where that is closed, to nobody."""
    with suppress(OSError):
        print(f"{word}{text}", file=sys.stderr, flush=True)
