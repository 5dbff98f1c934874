"""Turns a list of messages into the one text that a model was trained to answer.

It does not know tokens or models. A chat template is a foreign program, so it runs in Jinja's immutable
sandbox: it can read what it is given and compute, nothing else.
Source: the environment that templates are written for is the one of transformers'
`utils/chat_template_utils.py` (v4.57): block trimming, loop controls, `raise_exception`, `strftime_now`, a
`tojson` that escapes nothing, `{% generation %}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from spile.errors import OptionError, TextError, quote
from spile.messages import Message

_OURS = ("messages", "add_generation_prompt")  # arguments that no caller can give
# What a template, being a program, can do wrong.
_PROGRAM_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


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
        text: str = compiled.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **variables
        )
        return text
    except _Refusal as error:
        raise TextError(f"the chat template refuses the messages: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise TextError(f"the chat template is damaged: line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, *_PROGRAM_ERRORS) as error:
        raise TextError(f"the chat template failed: {quote(str(error))[1:-1]}") from error


class _Refusal(Exception):
    """What a template raises by `raise_exception`."""


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks what the assistant said, for training; here the block is just its content."""

        tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
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
