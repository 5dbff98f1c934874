"""Turns what a request says of its answer's form (response_format, tools) into a rule for each next token.

It does not know how the rule is kept: `generation/grammar.py` does. An answer is JSON where a schema was asked
for, a call where one is required, and otherwise text in which calls of strict tools keep to their parameters.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spile.errors import OptionError, TextError
from spile.generation.generate import Constraint
from spile.generation.grammar import JSON_SPACE, Grammar, json_rule, text_without
from spile.server.errors import RequestError
from spile.server.protocol import Request
from spile.server.tools import BEGIN, END

if TYPE_CHECKING:
    from spile.model import Model

_ANY_OBJECT = {"type": "object"}


def preload(model: Model) -> None:
    """Take the memory that constraints need, where it has a bound: before the engine is opened, so that its plan counts
    it. A pool that is as small as it can be could not give it up later.
    """
    if model.has_budget:
        with suppress(OptionError, TextError):  # told to the first request that needs them
            model.prepare_grammars()


def make_constraint(request: Request, model: Model, *, begins_inside: bool | None) -> Constraint | None:
    """Return the rule of one answer; None where any text will do. `begins_inside` is the encoded prompt's.

    Raises: RequestError naming the parameter for a schema that cannot be followed, or a missing library;
    BudgetError where there is no memory for it.
    """
    param = "tools" if request.response_format is None else "response_format"
    try:
        grammar = request_grammar(request)
        if grammar is None:
            return None
        constraint = model.constraint(grammar, begins_inside=begins_inside)
        constraint.allowed()  # what no text can follow is told before any work
        return constraint
    except (OptionError, TextError) as error:
        raise RequestError(error.message, param=param, code="unsupported_schema", hint=error.hint) from error


def request_grammar(request: Request) -> Grammar | None:
    """Return what an answer to this request may be; None for any text.

    Raises: OptionError for what is no schema.
    """
    tools = [tool["function"] for tool in request.tools or ()]
    choice = request.tool_choice
    if isinstance(choice, dict):
        tools = [tool for tool in tools if tool["name"] == choice["name"]]
    is_required = choice == "required" or isinstance(choice, dict)
    schema = _answer_schema(request.response_format)
    calls = "call" if request.one_call else "call (SPACE? call)*"
    if is_required:
        return Grammar(f"answer: {calls}\n{_call_rules(tools, all_strict=True)}")
    if schema is not None:
        if not tools:
            return Grammar(json_rule("answer", schema))
        rules = _call_rules(tools, all_strict=False)
        return Grammar(f"answer: json | {calls}\n{json_rule('json', schema)}{rules}")
    if not any(tool.get("strict") for tool in tools):
        return None
    text = text_without([BEGIN])
    more = "(lead body)? tail" if request.one_call else "(lead body)* tail"
    return Grammar(
        f"answer: {more}\nlead[lazy]: LEAD\nLEAD: {text_without([])} & /(?s:.*){BEGIN}/\ntail: TEXT\n"
        f"TEXT: {text}\n{_call_rules(tools, all_strict=False)}"
    )


def _answer_schema(response_format: dict[str, Any] | None) -> Any:
    if response_format is None:
        return None
    if response_format["type"] == "json_object":
        return _ANY_OBJECT
    return response_format["json_schema"]["schema"]


def _call_rules(tools: list[dict[str, Any]], *, all_strict: bool) -> str:
    """Return the rules `call`, with its markers, and `body`, without the first: one alternative a tool. Each tool's
    parameters are a JSON schema of their own, so that what they refer to is found in them.
    """
    rules = [
        f'call: "{BEGIN}" body\n',
        "body: " + " | ".join(f"body_{index}" for index in range(len(tools))) + "\n",
        f"GAP: /{JSON_SPACE}/\n",
    ]
    for index, tool in enumerate(tools):
        is_strict = all_strict or tool.get("strict")
        parameters = (tool.get("parameters") if is_strict else None) or _ANY_OBJECT
        parts = ["{", '"name"', ":", json.dumps(tool["name"], ensure_ascii=False), ",", '"arguments"', ":"]
        written = " GAP? ".join(json.dumps(part, ensure_ascii=False) for part in parts)
        rules.append(f'body_{index}: SPACE? {written} GAP? arguments_{index} GAP? "}}" SPACE? "{END}"\n')
        rules.append(json_rule(f"arguments_{index}", parameters))
    return "".join(rules)
