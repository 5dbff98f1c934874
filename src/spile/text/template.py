"""Turns a list of messages into the one text that a model was trained to answer.

It does not know tokens or models. A chat template is a foreign program, so it runs in Jinja's immutable
sandbox: it can read what it is given and compute, nothing else.
Source: the environment that templates are written for is the one of transformers'
`utils/chat_template_utils.py` (v4.57): block trimming, loop controls, `raise_exception`, `strftime_now`, a
`tojson` that escapes nothing, `{% generation %}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from spile.errors import OptionError, TextError, quote
from spile.text.messages import Message

_OURS = ("messages", "add_generation_prompt")  # arguments that no caller can give
# What a template, being a program, can do wrong.
_PROGRAM_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,  # of the Python that Jinja makes of it
    TypeError,
    ValueError,
)
_MOST_CHARACTERS = 64_000_000  # of what a template makes: more than any context holds
_MOST_BITS = 100_000  # of a power
_MOST_STEPS = 10_000_000  # of all ranges of one run


def render(
    template: str,
    messages: Sequence[Message],
    *,
    special_tokens: Mapping[str, str] | None = None,
    add_generation_prompt: bool = True,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Run a template over messages. `special_tokens` has bos_token and its like, `arguments` whatever else it
    takes, such as tools or enable_thinking.

    Raises:
        OptionError: an argument that is not for callers.
        TextError: the template refuses the messages (with its own words), is damaged, or does what the
        sandbox forbids.
    """
    import jinja2

    for name in _OURS:
        if name in (arguments or {}):
            raise OptionError(f"the template argument {name!r} comes from the messages: it cannot be given")
    variables: dict[str, Any] = {"tools": None, "documents": None}
    variables |= {**(special_tokens or {}), **(arguments or {})}
    try:
        compiled = _environment().from_string(template)
        plain = [_with_arguments(message) for message in messages]
        return _joined(
            compiled.generate(messages=plain, add_generation_prompt=add_generation_prompt, **variables)
        )
    except _Refusal as error:
        raise TextError(f"the chat template refuses the messages: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise TextError(f"the chat template is damaged: line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, *_PROGRAM_ERRORS) as error:
        reason = quote(str(error))[1:-1] or type(error).__name__
        raise TextError(f"the chat template failed: {reason}") from error


class _Refusal(Exception):
    """What a template raises by `raise_exception`."""


class _Arguments(dict[str, Any]):
    """A call's arguments. Some templates go through them and some write them down: to these they are their JSON."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _with_arguments(message: Message) -> Message:
    """Return a message whose calls have arguments that templates of either kind can use."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_as_arguments(call) for call in calls]} if calls else message


def _as_arguments(call: Any) -> Any:
    found = dict(call)
    if isinstance(found.get("function"), Mapping):
        found["function"] = _as_arguments(found["function"])
    if isinstance(found.get("arguments"), dict):
        found["arguments"] = _Arguments(found["arguments"])
    return found


def _joined(pieces: Iterable[str]) -> str:
    kept, num_characters = [], 0
    for piece in pieces:
        num_characters += len(piece)
        _check_size(num_characters, _MOST_CHARACTERS)
        kept.append(piece)
    return "".join(kept)


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise OverflowError("it makes something larger than any model can read")


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses products and powers that would fill the memory, and loops that would not end."""

        intercepted_binops = frozenset(("*", "**"))
        num_steps = 0

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for one, other in ((left, right), (right, left)):
                if operator == "*" and isinstance(one, (str, list, tuple)) and isinstance(other, int):
                    _check_size(len(one) * other, _MOST_CHARACTERS)
            if operator == "**" and isinstance(left, int) and isinstance(right, int):
                _check_size(left.bit_length() * right, _MOST_BITS)
            return super().call_binop(context, operator, left, right)

        def count_range(self, *bounds: int) -> range:
            found = safe_range(*bounds)
            self.num_steps += len(found)
            if self.num_steps > _MOST_STEPS:
                raise OverflowError(f"its loops take more than {_MOST_STEPS:,} steps")
            return found

    class Generation(Extension):
        """Marks what the assistant said, for training; here the block is just its content."""

        tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.globals["range"] = environment.count_range
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: object) -> None:
    raise _Refusal(" ".join(str(message).split()))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
