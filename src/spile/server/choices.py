"""Turns a request into the answers that it asks for, each a stream of the model that has not begun.

It does not know whose turn it is, nor what becomes of the answers. Runs on the model's thread: prompts are encoded
and checked here, so that whatever is wrong with a request is found before any work on it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any

from spile.generation.generate import Chunk
from spile.model import EncodedPrompt, Model
from spile.server.constrain import make_constraint
from spile.server.errors import RequestError
from spile.server.tasks import Choice, Task
from spile.server.tools import END, takes_tools

# Numbers of a request's prompts, a token's log-probability and its alternatives: until the answer is sent, all
# of them take at most some 30 MB (measured, client included).
MOST_SCORED = 65_536

OnPrefill = Callable[[Choice, int, int], None]  # the answer, tokens of its prompt done, and in all


def make_choices(task: Task, model: Model, defaults: Mapping[str, Any], on_prefill: OnPrefill) -> None:
    """Fill `task.choices`; `defaults` are sampling fields for requests that leave them out.

    Raises: SpileError for what the request cannot have.
    """
    request = task.request
    if request.kind == "chat" and model.chat_template is None:
        raise RequestError(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    if request.tools and not takes_tools(model.chat_template):
        raise RequestError(
            "this model's chat template takes no tools", param="tools", code="unsupported_parameter"
        )
    num_scored = 0
    for prompt_index, prompt in enumerate(request.prompts):
        encoded = model.encoded(
            prompt,
            raw=request.kind == "completion",
            tools=request.tools,
            template_arguments=request.template_arguments,
        )
        if request.scores_prompt:
            num_scored += request.n * len(encoded.token_ids) * (1 + request.sampling["logprobs"])
            if num_scored > MOST_SCORED:
                raise RequestError(
                    f"echo with logprobs asks for {num_scored:,} numbers or more, prompt tokens times "
                    f"(1 + logprobs): a request has {MOST_SCORED:,} at most; send fewer prompts at a time",
                    param="logprobs",
                )
        for index in range(request.n):
            choice = _make_choice(task, model, encoded, (prompt_index, index), defaults, on_prefill)
            task.choices.append(choice)


def _make_choice(
    task: Task,
    model: Model,
    encoded: EncodedPrompt,
    place: tuple[int, int],
    defaults: Mapping[str, Any],
    on_prefill: OnPrefill,
) -> Choice:
    """Make one answer; `place` is its prompt's index and its own among that prompt's."""
    request, (prompt_index, index) = task.request, place
    choice: Choice

    def note(done: int, total: int) -> None:
        on_prefill(choice, done, total)

    sampling = {**defaults, **request.choice_sampling(index)}
    if request.tools and request.one_call:
        given = sampling.get("stop", ())
        sampling["stop"] = [*([given] if isinstance(given, str) else given), END]
    stream = model.stream(
        encoded,
        pauses=True,
        on_prefill=note,
        constraint=make_constraint(request, model, begins_inside=encoded.begins_inside),
        prompt_logprobs=request.scores_prompt,
        **sampling,
    )
    if request.echo:
        stream = _after(_echo(request.prompts[prompt_index], encoded, model), stream)
    choice = Choice(task, prompt_index * request.n + index, len(encoded.token_ids), stream)
    return choice


def _echo(prompt: Any, encoded: EncodedPrompt, model: Model) -> str:
    """Return a prompt's text; of ids, special tokens too."""
    if isinstance(prompt, str):
        return prompt
    tokenizer = model.tokenizer
    data = b"" if tokenizer is None else b"".join(tokenizer.entry(i) for i in encoded.token_ids)
    return data.decode(errors="replace")


def _after(text: str, stream: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
    with closing(stream):
        yield Chunk(text)
        yield from stream


def entries_of(chunk: Chunk, model: Model | None) -> dict[int, bytes]:
    """Return what the tokens of a chunk's log-probabilities stand for."""
    tokenizer = None if model is None else model.tokenizer
    logprobs = chunk.prompt_logprobs if chunk.logprob is None else (*chunk.prompt_logprobs, chunk.logprob)
    token_ids = {i for one in logprobs for i in (one.token_id, *(other.token_id for other in one.top))}
    return {i: tokenizer.entry(i) if tokenizer is not None else b"" for i in token_ids}
