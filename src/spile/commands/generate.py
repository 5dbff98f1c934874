"""Turns `spile generate` into one answer: its text on standard output, all else on standard error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from spile.commands.flags import (
    ANSWER,
    PROMPT,
    Debug,
    EngineFlags,
    Json,
    PromptCacheFlags,
    SamplingFlags,
    TemplateFlags,
    command,
    one_of,
    option,
)
from spile.errors import OptionError
from spile.generation.options import check_text
from spile.text.sidecar import read_text

_LONGEST_PROMPT_NBYTES = 16_000_000  # of standard input: more than any context holds


@command
def generate(
    prompt_argument: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; - reads standard input.", rich_help_panel=PROMPT),
    ] = None,
    prompt: Annotated[
        str | None, option("--prompt", metavar="TEXT", help="The same, as a flag.", panel=PROMPT)
    ] = None,
    raw: Annotated[
        bool, option("--raw", help="Go on from the prompt: no chat template.", panel=PROMPT)
    ] = False,
    template: TemplateFlags = TemplateFlags(),  # noqa: B008  (frozen)
    save_prompt: Annotated[
        Path | None,
        option("--save-prompt", metavar="FILE", help="Write the prompt, once read.", panel=PROMPT),
    ] = None,
    load_prompt: Annotated[
        Path | None,
        option("--load-prompt", metavar="FILE", help="Go on from it: PROMPT is appended.", panel=PROMPT),
    ] = None,
    prompts: PromptCacheFlags = PromptCacheFlags(),  # noqa: B008
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008
    ignore_eos: Annotated[
        bool, option("--ignore-eos", help="Never end by itself, for benchmarks.", panel=ANSWER)
    ] = False,
    logprobs: Annotated[
        int | None,
        option("--logprobs", metavar="N", help="With --json: tell N likeliest tokens.", panel=ANSWER),
    ] = None,
    json_schema: Annotated[
        Path | None,
        option("--json-schema", metavar="FILE", help="The answer is JSON that follows it.", panel=ANSWER),
    ] = None,
    engine: EngineFlags = EngineFlags(),  # noqa: B008
    json: Json = False,
    verbose: Annotated[bool, option("--verbose", help="Say more on standard error.")] = False,
    debug: Debug = False,
) -> None:
    """Answer a prompt."""
    if prompt_argument and prompt is None and engine.model is None:
        _check_is_no_model(prompt_argument)
    text = _read_prompt(prompt_argument, prompt, is_needed=load_prompt is None)
    if not text and not raw and load_prompt is None:  # the chat template would hide it
        raise OptionError("the prompt is empty")
    check_text("--system", template.system or "")
    changes = sampling.changes(logprobs=logprobs, ignore_eos=ignore_eos or None)
    if logprobs is not None and not json:
        raise OptionError("--logprobs needs --json: they have no place in a text")
    arguments = template.arguments()
    schema = None if json_schema is None else _read_schema(json_schema)
    files = {"save_prompt": save_prompt, "load_prompt": load_prompt}
    rendering = {"raw": raw, "system": template.system, "think": template.think != "off"}
    with engine.load(template, prompts=prompts) as loaded:
        _answer(
            loaded,
            text,
            {**rendering, "template_arguments": arguments, "json_schema": schema, **files, **changes},
            template.think,
            json,
            verbose,
        )


def _answer(loaded: Any, text: str, options: dict[str, Any], think: str, json: bool, verbose: bool) -> None:
    """Stream one answer, then what it took."""
    from spile.commands.plan_text import parts_lines
    from spile.console.terminal import (
        AnswerWriter,
        Progress,
        Stdout,
        note,
        note_model,
        summary_lines,
        unanswered_note,
    )
    from spile.generation.generate import join

    stdout = Stdout(sys.stdout, wraps=not json)
    shows_reasoning = think == "show" and not json
    writer = AnswerWriter(stdout, sys.stderr, shows_reasoning=shows_reasoning)
    progress = Progress(
        sys.stderr,
        loaded.counters,
        shares_screen=not json and (stdout.is_terminal or (shows_reasoning and loaded.can_reason)),
    )
    progress.load()
    try:
        stream = loaded.stream(text, on_prefill=progress.prefill, **options)
    finally:
        progress.start()
    note_model(loaded)
    if verbose:
        plan = getattr(loaded.open(), "plan", None)
        for line in [] if plan is None else parts_lines(plan.parts, plan.budget_nbytes):
            note(line, word="")
        sampling = {name: value for name, value in options.items() if hasattr(loaded.sampling, name)}
        note(
            f"context {loaded.context:,}, {loaded.sampling.changed(sampling)}",
            word="",
        )
    chunks = []
    try:
        for chunk in stream:
            chunks.append(chunk)
            if chunk.token_id is not None:
                progress.token(chunk)
            if not json:
                writer.write(chunk)
    except KeyboardInterrupt:
        progress.close()
        writer.close()
        stdout.end_line()
        raise
    finally:
        progress.close()
        writer.close()
    completion = join(chunks)
    if json:
        stdout.write(json_line(_as_dict(completion, loaded)))
    else:
        stdout.write("\n")
    if completion.finish_reason == "length" and completion.reasoning and not completion.text:
        note(unanswered_note(completion.stats, loaded.context))
    for line in summary_lines(completion.stats):
        note(line, word="")
    counters = loaded.counters()
    if verbose and counters is not None:
        note(f"finish: {completion.finish_reason}; since the start: {counters}", word="")
        if allocated := getattr(loaded.open(), "memory_text", None):  # of an engine with its own allocator
            note(allocated, word="")


def _as_dict(completion: Any, loaded: Any) -> dict[str, Any]:
    """Return what `--json` prints."""
    answer: dict[str, Any] = {
        "text": completion.text,
        "reasoning": completion.reasoning,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stopped_by": completion.stopped_by,
    }
    if completion.logprobs:
        answer["logprobs"] = [
            {
                **_logprob_as_dict(one.token_id, one.logprob, loaded),
                "top": [_logprob_as_dict(other.token_id, other.logprob, loaded) for other in one.top],
            }
            for one in completion.logprobs
        ]
    return {**answer, **completion.stats.as_dict()}


def _logprob_as_dict(token_id: int, logprob: float, loaded: Any) -> dict[str, Any]:
    token = loaded.tokenizer.entry(token_id).decode(errors="replace") if loaded.tokenizer else None
    return {
        "token_id": token_id,
        "token": token,
        "logprob": logprob if logprob > float("-inf") else None,
    }


def _check_is_no_model(prompt: str) -> None:
    """Check that a prompt does not name a model's folder or file: to send such a name is hardly ever meant.

    Raises: OptionError.
    """
    try:
        path = Path(prompt).expanduser()
        is_model = path.is_dir() or (path.suffix in (".safetensors", ".gguf") and path.is_file())
    except (OSError, RuntimeError, ValueError):
        return
    if is_model:
        kind = "folder" if path.is_dir() else "file"
        raise OptionError(
            f"the prompt {prompt!r} is a {kind} here: is it meant as the model, or as a text?",
            f'As the model: spile generate -m {prompt} "a prompt". As a text: --prompt {prompt}',
        )


def _read_prompt(argument: str | None, flag: str | None, *, is_needed: bool) -> str:
    """Return the prompt that the command line or standard input holds; nothing where none is needed."""
    text = one_of("PROMPT", argument, "--prompt", flag)
    if text is None and not is_needed:
        return ""
    if text is None:
        raise OptionError("there is no prompt", "Give PROMPT, or - to read standard input.")
    if text != "-":
        check_text("the prompt", text)
        return text
    data = sys.stdin.buffer.read(_LONGEST_PROMPT_NBYTES + 1) if sys.stdin is not None else b""
    if len(data) > _LONGEST_PROMPT_NBYTES:
        raise OptionError(
            f"standard input is longer than the {_LONGEST_PROMPT_NBYTES:,} bytes that a prompt may have"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not valid UTF-8 at byte {error.start:,}") from error
    return text.removesuffix("\n").removesuffix("\r")  # the line's end is the shell's, not the prompt's


def _read_schema(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; whether it is a schema is told by who uses it."""
    import json

    text = read_text(path, hint="Save the schema as UTF-8.")
    if text is None:
        raise OptionError(f"--json-schema: there is no file {path}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--json-schema: {path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise OptionError(f"--json-schema: {path} holds a JSON {type(value).__name__}: it must be an object")
    return value


def json_line(value: dict[str, Any]) -> str:
    """Return one line of JSON, in ASCII where standard output has no more."""
    import json

    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    return json.dumps(value, ensure_ascii=encoding != "utf8", allow_nan=False) + "\n"
