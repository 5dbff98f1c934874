"""Turns what a request says of its answer's form (response_format, tools) into a rule for each next token.

It does not know how the rule is kept: `generation/grammar.py` does. An answer is JSON where a schema was asked
for, a call where one is required, and otherwise text in which calls of strict tools keep to their parameters.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spile.errors import OptionError, TextError, quote
from spile.generation.grammar import (
    JSON_SPACE,
    Grammar,
    GrammarConstraint,
    choice_grammar,
    given_grammar,
    json_grammar,
    json_rule,
    regex_grammar,
    text_without,
)
from spile.server.errors import RequestError
from spile.server.protocol import Request
from spile.server.tools import BEGIN, END

if TYPE_CHECKING:
    from spile.model import EncodedPrompt, Model

_ANY_OBJECT = {"type": "object"}
_MOST_CALLS = 4  # of a forced answer: a weak model would go on for ever


def preload(model: Model) -> None:
    """Take the memory that constraints need, where it has a bound: before the engine is opened, so that its plan counts
    it. A pool that is as small as it can be could not give it up later.
    """
    if model.has_budget:
        with suppress(OptionError, TextError):  # told to the first request that needs them
            model.prepare_grammars()


def make_constraint(request: Request, model: Model, encoded: EncodedPrompt) -> GrammarConstraint | None:
    """Return the rule of one answer; None where any text will do.

    Raises: RequestError naming the parameter for a schema that cannot be followed, or a missing library;
    BudgetError where there is no memory for it.
    """
    param = "tools" if request.response_format is None else "response_format"
    try:
        grammar = request_grammar(request)
        if grammar is None:
            return None
        constraint = model.constraint(grammar, begins_inside=encoded.begins_inside, prefill=encoded.prefill)
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
    # A function that is named is called once.
    is_single = request.one_call or isinstance(choice, dict)
    calls = "call" if is_single else f"call (SPACE? call){{0,{_MOST_CALLS - 1}}}"
    if is_required:
        found = _call_rules(tools, all_strict=True)
        return Grammar(f"answer: {calls}\n{found.rules}", found.unkept)
    form = _answer_form(request.response_format)
    if form is not None:
        if not tools:
            return form
        found = _call_rules(tools, all_strict=False)
        rules = form.rules.removeprefix("answer: ")
        return Grammar(f"answer: form | {calls}\nform: {rules}{found.rules}", form.unkept + found.unkept)
    if not any(tool.get("strict") for tool in tools):
        return None
    text = text_without([BEGIN])
    more = "(lead body)? tail" if request.one_call else "(lead body)* tail"
    found = _call_rules(tools, all_strict=False)
    return Grammar(
        f"answer: {more}\nlead[lazy]: LEAD\nLEAD: {text_without([])} & /(?s:.*){BEGIN}/\ntail: TEXT\n"
        f"TEXT: {text}\n{found.rules}",
        found.unkept,
    )


def _answer_form(form: dict[str, Any] | None) -> Grammar | None:
    if form is None:
        return None
    kind = form["type"]
    if kind == "json_object":
        return json_grammar(_ANY_OBJECT)
    if kind == "json_schema":
        given = form["json_schema"]
        return json_grammar(given["schema"], is_closed=bool(given.get("strict")))
    if kind == "regex":
        return regex_grammar(form["pattern"])
    return choice_grammar(form["choices"]) if kind == "choice" else given_grammar(form["grammar"])


def _call_rules(tools: list[dict[str, Any]], *, all_strict: bool) -> Grammar:
    """Return the rules `call`, with its markers, and `body`, without the first: one alternative a tool. Each tool's
    parameters are a JSON schema of their own, so that what they refer to is found in them. Objects in them have no
    keys that they do not name.
    """
    rules = [
        f'call: "{BEGIN}" body\n',
        "body: " + " | ".join(f"body_{index}" for index in range(len(tools))) + "\n",
        f"GAP: /{JSON_SPACE}/\n",
    ]
    unkept: tuple[str, ...] = ()
    for index, tool in enumerate(tools):
        is_strict = all_strict or tool.get("strict")
        parameters = (tool.get("parameters") if is_strict else None) or _ANY_OBJECT
        parts = ["{", '"name"', ":", json.dumps(tool["name"], ensure_ascii=False), ",", '"arguments"', ":"]
        written = " GAP? ".join(json.dumps(part, ensure_ascii=False) for part in parts)
        rules.append(f'body_{index}: SPACE? {written} GAP? arguments_{index} GAP? "}}" SPACE? "{END}"\n')
        arguments = json_rule(f"arguments_{index}", parameters, is_closed=True)
        rules.append(arguments.rules)
        unkept += tuple(f"{what} of tool {quote(tool['name'])}" for what in arguments.unkept)
    return Grammar("".join(rules), unkept)
