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
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    ToolChoice,
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
)
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
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None  # None too where tool_choice is "none"
    tool_choice: Any = "auto"  # "auto", "none", "required" or the name of a function as {"name": ...}
    echo: bool = False  # whether an answer begins with its prompt
    one_call: bool = False  # at most, where there are tools
    response_format: dict[str, Any] | None = None  # None for plain text
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


def parse_chat(data: bytes) -> Request:
    """Read the body of /v1/chat/completions.

    Raises: RequestError naming the parameter.
    """
    raw, body = _read(data, ChatBody)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: set it to true", param="top_logprobs")
    if body.store:
        raise RequestError(
            "store is not supported: nothing is kept", param="store", code="unsupported_parameter"
        )
    choice = _tool_choice(body)
    return Request(
        kind="chat",
        prompts=([_with_known_role(message) for message in raw["messages"]],),
        sampling=_sampling(body, limit, (body.top_logprobs or 0) if body.logprobs else None),
        tools=raw.get("tools") or None if choice != "none" else None,
        tool_choice=choice,
        one_call=body.parallel_tool_calls is False,
        template_arguments=_template_arguments(body.chat_template_kwargs, body.enable_thinking),
        **_common(raw, body, 1),
    )


def parse_completion(data: bytes) -> Request:
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


def parse_tokenize(data: bytes) -> tuple[Any, dict[str, Any], bool, str | None]:
    """Read the body of /tokenize: what to encode, how to render it, whether to begin as the tokenizer begins
    every text, and the model's name.

    Raises: RequestError naming the parameter.
    """
    raw, body = _read(data, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt, a text, or messages", param="prompt")
    if body.prompt is not None:
        for name in ("tools", "chat_template_kwargs", "enable_thinking"):
            if getattr(body, name) is not None:
                raise RequestError(f"{name} goes with messages, not with prompt", param=name)
        return body.prompt, {"raw": True}, body.add_special_tokens is not False, body.model
    if body.add_special_tokens is not None:
        raise RequestError(
            "add_special_tokens goes with prompt, not with messages", param="add_special_tokens"
        )
    rendering = {
        "tools": raw.get("tools") or None,
        "template_arguments": _template_arguments(body.chat_template_kwargs, body.enable_thinking),
    }
    return [_with_known_role(message) for message in raw["messages"]], rendering, True, body.model


def parse_detokenize(data: bytes) -> tuple[list[int], str | None]:
    """Read the body of /detokenize.

    Raises: RequestError naming the parameter.
    """
    _, body = _read(data, DetokenizeBody)
    return body.tokens, body.model


def _read(data: bytes, kind: type[T]) -> tuple[dict[str, Any], T]:
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
    try:
        return raw, msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _translated(str(error), raw) from None


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
    return {
        "model": body.model,
        "n": n,
        "stream": bool(body.stream),
        "include_usage": bool(body.stream_options and body.stream_options.include_usage),
        "response_format": _response_format(raw, body),
    }


def _response_format(raw: dict[str, Any], body: Body) -> dict[str, Any] | None:
    given = body.response_format
    if given is None or given.type == "text":
        return None
    if (given.type == "json_schema") != (given.json_schema is not None):
        raise RequestError(
            "response_format.json_schema goes with the type json_schema, and only with it",
            param="response_format.json_schema",
        )
    found: dict[str, Any] = raw["response_format"]
    return found


def _sampling(body: Body, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
    changes = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if changes.get("stop") == []:
        del changes["stop"]
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
    if isinstance(choice, ToolChoice):
        names = [tool.function.name for tool in body.tools or ()]
        if choice.function.name not in names:
            raise RequestError(
                f"tool_choice names {quote(choice.function.name)}, none of the tools", param="tool_choice"
            )
        return {"name": choice.function.name}
    return choice


def _template_arguments(given: dict[str, Any] | None, thinks: bool | None) -> dict[str, Any]:
    arguments = dict(given or {})
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
