"""Turns the bytes of a request into one checked, frozen `Request`: the only door that foreign JSON comes through.

It does not know sockets, models or answers. Shapes and ranges are the types of `wire.py`; what types cannot say
is checked here. Messages and tools go on to the chat template as they came.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from spile.errors import quote
from spile.server.errors import RequestError
from spile.server.wire import (
    ALIASES,
    NEUTRAL,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    MemoryBody,
    TokenizeBody,
    ToolChoice,
    ToolsChoice,
)

MOST_CHOICES = 128  # of one request: prompts times n
_TEMPLATE_OWN = ("messages", "add_generation_prompt", "tools")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "ignore_eos",
    "min_tokens",
)
_EFFORT_BUDGETS = {"none": 0, "minimal": 0, "low": 1_024, "medium": 8_192}  # tokens; more is without bound
_OF_TYPE = {"json_schema": "json_schema", "regex": "pattern", "choice": "choices", "grammar": "grammar"}
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")
_REQUIRED = re.compile(r"Object missing required field `(.*?)`")
_WHERE = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_PART_TYPE = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]\.type")

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True)
class Request:
    """What a client wants, whichever endpoint it used. `prompts` are lists of messages for chat, texts or token ids
    for completions; each is answered `n` times. `sampling` has the fields of `Sampling` that were given.
    """

    kind: Literal["chat", "completion"]
    prompts: tuple[Any, ...]
    model: str | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    counts_on: bool = False  # each chunk of a stream says what the answer took so far
    returns_ids: bool = False
    continues: bool = False  # the last message is the beginning of the answer
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None  # None too where tool_choice is "none"
    tool_choice: Any = "auto"  # "auto", "none", "required" or the name of a function as {"name": ...}
    echo: bool = False  # whether an answer begins with its prompt
    one_call: bool = False  # at most, where there are tools
    # None for plain text; else json_object, json_schema, regex (pattern), choice (choices) or grammar (grammar).
    response_format: dict[str, Any] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are wanted."""
        return self.echo and "logprobs" in self.sampling

    def choice_sampling(self, index: int) -> dict[str, Any]:
        """Return the sampling of one of a prompt's `n` answers: with a seed, each has the next one."""
        changes = dict(self.sampling)
        if "seed" in changes:
            changes["seed"] = (changes["seed"] + index) % 2**64
        return changes


def parse_chat(data: bytes | bytearray) -> Request:
    """Read the body of /v1/chat/completions.

    Raises: RequestError naming the parameter.
    """
    raw, body = _read(data, ChatBody)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: set it to true", param="top_logprobs")
    choice = _tool_choice(body)
    tools = raw.get("tools") or None if choice != "none" else None
    if isinstance(body.tool_choice, ToolsChoice):
        allowed = {tool.function.name for tool in body.tool_choice.allowed_tools.tools}
        tools = [tool for tool in tools or () if tool["function"]["name"] in allowed]
    sampling = _sampling(body, limit, (body.top_logprobs or 0) if body.logprobs else None)
    thinks, budget = _thinking(body)
    arguments = _template_arguments(
        body.chat_template_kwargs, thinks, reasoning_effort=_effort(body), verbosity=body.verbosity
    )
    if arguments.get("enable_thinking") is False:
        budget = 0
    if budget is not None:
        sampling["thinking_budget"] = budget
    return Request(
        kind="chat",
        prompts=([_with_known_role(message) for message in raw["messages"]],),
        sampling=sampling,
        tools=tools,
        tool_choice=choice,
        one_call=body.parallel_tool_calls is False,
        continues=_continues(body),
        template_arguments=arguments,
        **_common(raw, body, 1),
    )


def parse_completion(data: bytes | bytearray) -> Request:
    """Read the body of /v1/completions.

    Raises: RequestError naming the parameter.
    """
    raw, body = _read(data, CompletionBody)
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens is 0: without echo there would be no answer", param="max_tokens")
    prompts = _prompts(body.prompt)
    return Request(
        kind="completion",
        prompts=prompts,
        sampling=_sampling(body, body.max_tokens, body.logprobs),
        echo=bool(body.echo),
        **_common(raw, body, len(prompts)),
    )


def parse_tokenize(data: bytes | bytearray) -> tuple[Any, dict[str, Any], bool, str | None]:
    """Read the body of /tokenize: what to encode, how to render it, whether to begin as the tokenizer begins
    every text, and the model's name.

    Raises: RequestError naming the parameter.
    """
    raw, body = _read(data, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt, a text, or messages", param="prompt")
    if body.prompt is not None:
        for name in (
            "tools",
            "chat_template_kwargs",
            "enable_thinking",
            "add_generation_prompt",
            "continue_final_message",
        ):
            if getattr(body, name) is not None:
                raise RequestError(f"{name} goes with messages, not with prompt", param=name)
        return body.prompt, {"raw": True}, body.add_special_tokens is not False, body.model
    if body.add_special_tokens is not None:
        raise RequestError(
            "add_special_tokens goes with prompt, not with messages", param="add_special_tokens"
        )
    rendering = {
        "tools": raw.get("tools") or None,
        "continues": _continues(body),
        "template_arguments": _template_arguments(body.chat_template_kwargs, body.enable_thinking),
    }
    return [_with_known_role(message) for message in raw["messages"]], rendering, True, body.model


def parse_detokenize(data: bytes | bytearray) -> tuple[list[int], str | None]:
    """Read the body of /detokenize.

    Raises: RequestError naming the parameter.
    """
    _, body = _read(data, DetokenizeBody)
    return body.tokens, body.model


def parse_memory(data: bytes | bytearray) -> int | str:
    """Read the body of /memory.

    Raises: RequestError naming the parameter.
    """
    return _read(data, MemoryBody)[1].memory


def _read(data: bytes | bytearray, kind: type[T]) -> tuple[dict[str, Any], T]:
    """Return the body as it came, and checked."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(raw, dict):
        name = {list: "array", str: "string", type(None): "null"}.get(type(raw), type(raw).__name__)
        raise RequestError(f"the body is a JSON {name}: it must be an object")
    if kind in (ChatBody, CompletionBody):
        raw = _in_our_words(raw)
    try:
        return raw, msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _translated(str(error), raw) from None


def _in_our_words(raw: dict[str, Any]) -> dict[str, Any]:
    """Rename what neighbours call otherwise, and leave out what changes nothing."""
    found = dict(raw)
    for name in found.keys() & (ALIASES.keys() | NEUTRAL.keys()):
        value = found.pop(name)
        ours = ALIASES.get(name)
        if ours is None:
            neutral = NEUTRAL[name]
            is_known = neutral is None or any(  # false is no 0 in JSON
                value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral
            )
            if value is not None and not is_known:
                raise RequestError(
                    f"{name} {quote(value)} is not supported: leave it out",
                    param=name,
                    code="unsupported_parameter",
                )
        elif value is not None and not (name == "n_predict" and value == -1):
            if found.get(ours, value) != value:
                raise RequestError(f"{name} and {ours} are the same, and differ here", param=name)
            found[ours] = value
    return found


def _translated(text: str, raw: dict[str, Any]) -> RequestError:
    """Say what `msgspec` found wrong in the words of the API."""
    found = _WHERE.match(text)
    what, path = (found["what"], found["path"]) if found else (text, "")
    if unknown := _UNKNOWN.match(what):
        name = f"{path}.{unknown[1]}" if path else unknown[1]
        shown = quote(name)[1:-1]
        return RequestError(f"there is no parameter {shown}", param=shown, code="unknown_parameter")
    if required := _REQUIRED.match(what):
        name = f"{path}.{required[1]}" if path else required[1]
        return RequestError(f"{name} is missing", param=name, code="missing_required_parameter")
    param = path or None
    if part := _PART_TYPE.fullmatch(path):
        kind = raw["messages"][int(part[1])]["content"][int(part[2])]["type"]
        message = f"{path.removesuffix('.type')} is of type {quote(kind)}: the model reads only text"
        return RequestError(message, param=path.removesuffix(".type"), code="unsupported_content")
    if what.startswith("Expected `null`"):
        return RequestError(f"{path} is not supported", param=param, code="unsupported_parameter")
    what = what.replace("`", "")
    message = f"{path}: {what[:1].lower()}{what[1:]}" if path else what
    return RequestError(message, param=param, code="invalid_value")


def _common(raw: dict[str, Any], body: Body, num_prompts: int) -> dict[str, Any]:
    n = body.n or 1
    if n * num_prompts > MOST_CHOICES:
        raise RequestError(
            f"this asks for {n * num_prompts:,} answers at once: {MOST_CHOICES} is the most", param="n"
        )
    options = body.stream_options
    return {
        "model": body.model,
        "n": n,
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "counts_on": bool(options and options.continuous_usage_stats),
        "returns_ids": bool(body.return_token_ids),
        "response_format": _response_format(raw, body),
    }


def _response_format(raw: dict[str, Any], body: Body) -> dict[str, Any] | None:
    """Return the one form that was asked for, by whichever name."""
    found: dict[str, dict[str, Any]] = {}
    given = body.response_format
    if given is not None:
        for kind, name in _OF_TYPE.items():
            if (given.type == kind) != (getattr(given, name) is not None):
                raise RequestError(
                    f"response_format.{name} goes with the type {kind}, and only with it",
                    param=f"response_format.{name}",
                )
        if given.type != "text":
            found["response_format"] = raw["response_format"]
    outputs = body.structured_outputs
    others = {
        "structured_outputs.json": ("json", outputs and outputs.json),
        "structured_outputs.json_object": ("json_object", outputs and outputs.json_object),
        "structured_outputs.regex": ("regex", outputs and outputs.regex),
        "structured_outputs.choice": ("choice", outputs and outputs.choice),
        "structured_outputs.grammar": ("grammar", outputs and outputs.grammar),
        "guided_json": ("json", body.guided_json),
        "guided_regex": ("regex", body.guided_regex),
        "guided_choice": ("choice", body.guided_choice),
        "guided_grammar": ("grammar", body.guided_grammar),
        "json_schema": ("json", body.json_schema),
        "grammar": ("grammar", body.grammar or None),
    }
    for name, (kind, value) in others.items():
        if value is None or value is False:
            continue
        if kind == "json":
            schema = _schema_of(value, name)
            found[name] = {"type": "json_schema", "json_schema": {"schema": schema}}
        else:
            found[name] = {"type": kind, _OF_TYPE.get(kind, kind): value}
    if len(found) > 1:
        names = " and ".join(found)
        raise RequestError(f"{names} both say what the answer may be: give one", param=list(found)[1])
    return next(iter(found.values()), None)


def _schema_of(given: Any, name: str) -> Any:
    """Return a schema that may have come as text."""
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{name} is not valid JSON: {error}", param=name) from None


def _sampling(body: Body, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
    changes = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if changes.get("stop") == []:
        del changes["stop"]
    if changes.get("top_k") == -1:
        changes["top_k"] = 0
    if body.stop_token_ids:
        changes["stop_token_ids"] = tuple(body.stop_token_ids)
    least = body.min_tokens or 0
    if max_tokens is not None and least > max_tokens:
        raise RequestError(
            f"min_tokens is {least:,} and max_tokens {max_tokens:,}: it cannot be more", param="min_tokens"
        )
    if body.seed is not None:
        changes["seed"] = body.seed % 2**64
    if max_tokens is not None:
        changes["max_tokens"] = max_tokens
    if logprobs is not None:
        changes["logprobs"] = logprobs
    return changes


def _tool_choice(body: ChatBody) -> Any:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if not body.tools and choice not in ("none", "auto"):
        raise RequestError("tool_choice asks for a call, and there are no tools", param="tool_choice")
    names = [tool.function.name for tool in body.tools or ()]
    if isinstance(choice, ToolsChoice):
        for tool in choice.allowed_tools.tools:
            _check_known(tool.function.name, names)
        return choice.allowed_tools.mode
    if isinstance(choice, ToolChoice):
        _check_known(choice.function.name, names)
        return {"name": choice.function.name}
    return choice


def _check_known(name: str, names: list[str]) -> None:
    if name not in names:
        raise RequestError(f"tool_choice names {quote(name)}, none of the tools", param="tool_choice")


def _effort(body: ChatBody) -> str | None:
    return body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)


def _thinking(body: ChatBody) -> tuple[bool | None, int | None]:
    """Return whether the template is asked to think, and the most tokens of it; None where nothing was said. Where a
    template has no switch, a bound of none at all closes what it opens.
    """
    effort, thinks, budget = _effort(body), body.enable_thinking, body.thinking_budget
    if body.reasoning is not None:
        thinks = body.reasoning.enabled if thinks is None else thinks
        budget = body.reasoning.max_tokens if budget is None else budget
    if budget is None and effort is not None:
        budget = _EFFORT_BUDGETS.get(effort)
    if budget == 0 and thinks is None and "enable_thinking" not in (body.chat_template_kwargs or {}):
        thinks = False
    return thinks, budget


def _continues(body: ChatBody | TokenizeBody) -> bool:
    """Whether the answer goes on from the last message: where that is the assistant's, and nothing else is said."""
    assert body.messages, "a type says so"
    last = body.messages[-1]
    explicit = body.continue_final_message
    begins = body.add_generation_prompt
    if explicit is not None and begins is not None and explicit == begins:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: give one of them",
            param="continue_final_message",
        )
    if explicit is None and begins is not None:
        explicit = not begins
    can = last.role == "assistant" and not last.tool_calls
    if explicit and not can:
        name = "continue_final_message" if body.continue_final_message else "add_generation_prompt"
        what = "calls tools" if last.role == "assistant" else f"is of role {last.role}"
        raise RequestError(
            f"the last message {what}: only an assistant's text can be gone on from", param=name
        )
    return can if explicit is None else explicit


def _template_arguments(
    given: dict[str, Any] | None, thinks: bool | None, **more: str | None
) -> dict[str, Any]:
    arguments = {name: value for name, value in more.items() if value is not None} | dict(given or {})
    for name in _TEMPLATE_OWN:
        if name in arguments:
            raise RequestError(
                f"chat_template_kwargs.{name} comes from the request itself: it cannot be given",
                param="chat_template_kwargs",
            )
    if thinks is not None:
        if arguments.get("enable_thinking", thinks) != thinks:
            raise RequestError("enable_thinking was given twice, and differs", param="enable_thinking")
        arguments["enable_thinking"] = thinks
    return arguments


def _with_known_role(message: dict[str, Any]) -> dict[str, Any]:
    """Templates know no "developer": it is OpenAI's newer word for system."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _prompts(given: Any) -> tuple[Any, ...]:
    """Return one text or list of ids for each prompt.

    Raises: RequestError for a list of several kinds.
    """
    if isinstance(given, str):
        return (given,)
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise RequestError(
            "prompt mixes texts, token ids and lists: give a text, a list of texts, token ids, or lists of them",
            param="prompt",
        )
    return (given,) if kinds == {int} else tuple(given)
