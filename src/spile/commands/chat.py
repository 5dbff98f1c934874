"""Turns the flags of `spile chat` into a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from spile.commands.flags import (
    PROMPT,
    Debug,
    EngineFlags,
    ModelArgument,
    PromptCacheFlags,
    SamplingFlags,
    TemplateFlags,
    check_choice,
    command,
    one_of,
    option,
    size_or_auto,
)
from spile.errors import TextError
from spile.generation.options import check_text

_OVERFLOW = ("stop", "drop-oldest")


@command
def chat(
    model_argument: ModelArgument = None,
    template: TemplateFlags = TemplateFlags(),  # noqa: B008  (frozen)
    overflow: Annotated[
        str,
        option("--overflow", metavar="MODE", help="At a full context: stop or drop-oldest.", panel=PROMPT),
    ] = "stop",
    history: Annotated[
        Path | None,
        option("--history", metavar="FILE", help="What the arrow keys recall; none: nothing.", panel=PROMPT),
    ] = None,
    prompts: PromptCacheFlags = PromptCacheFlags(),  # noqa: B008
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008
    engine: EngineFlags = EngineFlags(),  # noqa: B008
    debug: Debug = False,
) -> None:
    """Talk to a model."""
    source = one_of("MODEL", model_argument, "--model", engine.model)
    changes, arguments = sampling.changes(), template.arguments()
    check_choice("--overflow", overflow, _OVERFLOW)
    check_text("--system", template.system or "")
    from spile.console.chat import Chat, ChatOptions, commands
    from spile.console.lines import default_history, open_lines
    from spile.generation.prompt_reuse import default_cache_nbytes

    if history is None:
        history = default_history()
    elif str(history) == "none":
        history = None
    cache_nbytes = 0
    if engine.reselect_every == 1 and engine.engine != "mlx":  # where states can be copied
        cache_nbytes = default_cache_nbytes(size_or_auto(engine.memory), is_held=True)
    with engine.load(template, model=source, prompt_cache_bytes=cache_nbytes, prompts=prompts) as model:
        if model.tokenizer is None or model.chat_template is None:
            what = "tokenizer" if model.tokenizer is None else "chat template"
            raise TextError(
                f"{model.folder} has no {what}, and a conversation needs one",
                None
                if model.tokenizer is None
                else "Give one by --chat-template, or use spile generate --raw.",
            )
        options = ChatOptions(model.sampling.changed(changes), arguments, template.think, overflow)
        lines, is_interactive = open_lines(history, commands())
        Chat(model, options, lines, system=template.system, is_interactive=is_interactive).run()
