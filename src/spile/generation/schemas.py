"""Turns a JSON schema as people write it into one that a grammar can keep, and says what was left out of it.

It does not know llguidance, tokens or HTTP. `format` and whatever else cannot be kept is an annotation: left out
where it stands, and named by its place. A schema that says nothing wrong is answered, whatever it asks.
"""

from __future__ import annotations

import re
from typing import Any

from spile.errors import OptionError, quote

_MOST_NAMED = 20  # of what was left out
# What llguidance 1.9 keeps to; any other format is plain text.
_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
# Keywords that it knows and refuses.
_UNKEPT = (
    frozenset(
        (
            "uniqueItems",
            "propertyNames",
            "contains",
            "minContains",
            "maxContains",
            "if",
            "then",
            "else",
            "not",
        )
    )
    | frozenset(
        ("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems")
    )
    | frozenset(("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"))
)
_AMONG = frozenset(("properties", "patternProperties", "$defs", "definitions"))  # names to schemas
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_SINGLE = frozenset(("items", "additionalProperties", "additionalItems"))
# Around and back references, and word boundaries: right as ECMA's patterns go, but no automaton has them.
_PATTERN_BEYOND = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[bB1-9]|\\k<)")


def kept_schema(schema: Any, *, is_closed: bool = False) -> tuple[Any, tuple[str, ...]]:
    """Return the schema that can be kept, and what was left out, as "keyword (at place)". With `is_closed` an object
    with properties that says nothing of others has no others.

    Raises: OptionError for what is no schema, or nested too deeply.
    """
    found = _Walk(_in_composition(schema) if is_closed else None)
    try:
        kept = found.schema(schema, "", is_open=False)
    except RecursionError:
        raise OptionError("the JSON schema is nested too deeply") from None
    left_out = list(dict.fromkeys(found.left_out))
    if len(left_out) > _MOST_NAMED:
        left_out[_MOST_NAMED:] = [f"and {len(left_out) - _MOST_NAMED:,} more"]
    return kept, tuple(left_out)


class _Walk:
    """`open_refs`: what is one part of several that hold together, and stays open; None: all stays as it is."""

    def __init__(self, open_refs: frozenset[str] | None) -> None:
        self.left_out: list[str] = []
        self._open_refs = open_refs

    def schema(self, schema: Any, place: str, *, is_open: bool) -> Any:
        if not isinstance(schema, dict):
            return schema
        if _is_true(schema.get("not")):  # nothing is right
            return False
        is_open = is_open or f"#{place}" in (self._open_refs or ())
        is_part = _is_composed(schema)
        kept: dict[str, Any] = {}
        # Those that are said in other words last, as these words may be there already.
        for name, value in sorted(schema.items(), key=lambda item: item[0] in _UNKEPT):
            at = f"{place}/{name}"
            if name in _AMONG and isinstance(value, dict):
                kept[name] = {
                    key: self.schema(one, f"{at}/{key}", is_open=False) for key, one in value.items()
                }
            elif name in _LISTS and isinstance(value, list):
                opens = is_part and name != "prefixItems"
                kept[name] = [
                    self.schema(one, f"{at}/{index}", is_open=opens) for index, one in enumerate(value)
                ]
            elif name == "items" and isinstance(value, list):
                kept[name] = [
                    self.schema(one, f"{at}/{index}", is_open=False) for index, one in enumerate(value)
                ]
            elif name in _SINGLE:
                kept[name] = self.schema(value, at, is_open=False)
            elif not self._is_left_out(name, value, schema, place, kept):
                kept[name] = value
        beyond = [pattern for pattern in _names(schema.get("patternProperties")) if _is_beyond(pattern)]
        if beyond:  # what has such a name may be anything
            for pattern in beyond:
                del kept["patternProperties"][pattern]
                self._note(f"patternProperties {quote(pattern)}", place)
            kept["additionalProperties"] = True
        closes = self._open_refs is not None and not is_open and not is_part
        named = schema.get("properties")
        if closes and isinstance(named, dict) and named.keys() >= set(_names(schema.get("required"))):
            kept.setdefault("additionalProperties", False)
        return kept

    def _is_left_out(
        self, name: str, value: Any, schema: dict[str, Any], place: str, kept: dict[str, Any]
    ) -> bool:
        """Whether a keyword does not go into the grammar; what it can say otherwise is put into `kept`."""
        if name == "format":
            if isinstance(value, str) and value in _FORMATS:
                return False
            if _speaks_of(schema, "string"):
                self._note(f"format {quote(value)}", place)
            return True
        if name == "pattern" and isinstance(value, str) and _is_beyond(value):
            self._note(f"pattern {quote(value)}", place)
            return True
        if name in ("minProperties", "maxProperties"):
            # llguidance counts only where every property that is named has to be there.
            if set(_names(schema.get("properties"))) <= set(_names(schema.get("required"))):
                return False
            self._note(name, place)
            return True
        if name not in _UNKEPT:
            return False
        if not _means_nothing(name, value, schema) and not _said_otherwise(name, value, schema, kept):
            self._note(name, place)
        return True

    def _note(self, what: str, place: str) -> None:
        self.left_out.append(f"{what} (at {quote(place or '/')[1:-1]})")


def _names(given: Any) -> list[str]:
    return [name for name in given if isinstance(name, str)] if isinstance(given, (dict, list)) else []


def _is_beyond(pattern: str) -> bool:
    return _PATTERN_BEYOND.search(pattern) is not None


def _is_true(schema: Any) -> bool:
    return schema is True or schema == {}


def _speaks_of(schema: dict[str, Any], kind: str) -> bool:
    """Whether values of a type can be meant: `format` says something of text alone."""
    given = schema.get("type", kind)
    return given == kind or (isinstance(given, list) and kind in given)


def _means_nothing(name: str, value: Any, schema: dict[str, Any]) -> bool:
    """Whether a keyword excludes nothing as it stands."""
    if name in ("then", "else"):
        return "if" not in schema
    if name == "if":
        return "then" not in schema and "else" not in schema
    if name in ("minContains", "maxContains"):
        return "contains" not in schema
    if name == "propertyNames":
        return value is True or value in ({}, {"type": "string"})
    if name == "not":
        return value is False
    if name in ("$dynamicAnchor", "$recursiveAnchor"):
        return True
    return value is False if name == "uniqueItems" else value in (True, {}) and value is not False


def _said_otherwise(name: str, value: Any, schema: dict[str, Any], kept: dict[str, Any]) -> bool:
    """Say the same in keywords that can be kept, where that is simple; return whether it was."""
    composes = any(word in schema for word in (*_LISTS - {"prefixItems"}, "$ref", "if", "dependentSchemas"))
    if name == "unevaluatedProperties" and value is False and not composes:
        kept["additionalProperties"] = False
        return True
    if name == "unevaluatedItems" and value is False and not composes and "prefixItems" in schema:
        kept["items"] = False
        return True
    if name == "propertyNames" and isinstance(value, dict):
        rest = {"additionalProperties", "properties", "patternProperties", "$ref", "allOf"} & set(schema)
        of_text = {key: one for key, one in value.items() if (key, one) != ("type", "string")}
        others = schema.get("additionalProperties", True)
        if rest <= {"additionalProperties"} and isinstance(others, (bool, dict)):
            if set(of_text) == {"enum"} and all(isinstance(one, str) for one in of_text["enum"]):
                kept["properties"] = dict.fromkeys(of_text["enum"], others)
            elif set(of_text) == {"pattern"} and not _is_beyond(str(of_text["pattern"])):
                kept["patternProperties"] = {of_text["pattern"]: others}
            else:
                return False
            kept["additionalProperties"] = False
            return True
    return False


def _is_composed(schema: dict[str, Any]) -> bool:
    """Whether an object's properties come from several places, none of which may exclude the others'."""
    of_all = schema.get("allOf")
    if isinstance(of_all, list) and (len(of_all) > 1 or "properties" in schema):
        return True
    if "properties" not in schema:
        return False
    if "$ref" in schema:
        return True
    either = [one for name in ("anyOf", "oneOf") for one in schema.get(name) or () if isinstance(one, dict)]
    return any("properties" in one or "$ref" in one or "allOf" in one for one in either)


def _in_composition(schema: Any) -> frozenset[str]:
    """Return the places that are referred to from parts of a composition, in JSON pointers."""
    found: set[str] = set()
    waiting: list[tuple[Any, bool]] = [(schema, False)]
    while waiting:
        value, is_part = waiting.pop()
        if isinstance(value, dict):
            composed = _is_composed(value)
            if (is_part or composed) and isinstance(value.get("$ref"), str):
                found.add(value["$ref"])
            for name, one in value.items():
                waiting.append((one, composed and name in ("allOf", "anyOf", "oneOf")))
        elif isinstance(value, list):
            waiting.extend((one, is_part) for one in value)
    return frozenset(found)
