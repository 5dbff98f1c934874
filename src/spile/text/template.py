"""Turns a chat template and what it is given into the one text that a model was trained to answer.

It does not know tokens or models. A chat template is a foreign program, so it runs in Jinja's immutable sandbox:
it can read what it is given and compute, nothing else. How long it computes and what memory it takes has no bound
here: that is `renderer.py`'s matter, which runs this file in a process of its own. Nobody else imports it, so that
no other process pays for Jinja.
Source: the environment that templates are written for is the one of transformers'
`utils/chat_template_utils.py` (v4.57): block trimming, loop controls, `raise_exception`, `strftime_now`, a
`tojson` that escapes nothing, `{% generation %}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What a template, being a program, can do wrong.
_PROGRAM_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,  # of the Python that Jinja makes of it
    TypeError,
    ValueError,
)


class TemplateFault(Exception):
    """What a template did wrong, in a sentence's end; nothing in it is clean."""


class Templates:
    """Runs templates; the last one stays compiled."""

    def __init__(self) -> None:
        self._environment = _environment()
        self._source: str | None = None
        self._compiled: Any = None

    def run(self, source: str, variables: Mapping[str, Any]) -> str:
        """Return what a template makes of its variables.

        Raises: TemplateFault; MemoryError.
        """
        try:
            if self._source != source:
                self._source = self._compiled = None
                self._compiled = self._environment.from_string(source)
                self._source = source
            text: str = self._compiled.render(variables)
        except _Refusal as error:
            raise TemplateFault(f"refuses the messages: {error}") from error
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFault(f"is damaged: line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, *_PROGRAM_ERRORS) as error:
            raise TemplateFault(f"failed: {str(error) or type(error).__name__}") from error
        return text


class _Refusal(Exception):
    """What a template raises by `raise_exception`."""


class _Generation(Extension):
    """Marks what the assistant said, for training; here the block is just its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _environment() -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: object) -> NoReturn:
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
