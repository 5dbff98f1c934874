"""JSON schemas as people write them: kept to where a grammar can, and otherwise said to be left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spile.generation.grammar import json_grammar
from spile.generation.schemas import kept_schema

llguidance = pytest.importorskip("llguidance")


class _Letters:
    """A tokenizer of bytes, as llguidance asks for one."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return llguidance.LLTokenizer(_Letters(), eos_token=256, slices=[])


def takes(tokenizer: Any, schema: Any, text: str, *, is_closed: bool = False) -> bool:
    """Whether a text is an answer by a schema."""
    rules = "start: answer\n" + json_grammar(schema, is_closed=is_closed).rules
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(rules), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


FORMATS = (
    *("regex", "uri-reference", "iri", "iri-reference", "json-pointer", "password", "binary", "byte", "path"),
    *("color", "idn-email", "x"),
)
OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_that_cannot_be_kept_is_plain_text(tokenizer: Any, form: str) -> None:
    schema = {"type": "object", "properties": {"at": {"type": "string", "format": form}}, "required": ["at"]}
    assert takes(tokenizer, schema, '{"at": "any [text"}')
    assert not takes(tokenizer, schema, '{"at": 5}')
    assert json_grammar(schema).unkept == (f"format '{form}' (at /properties/at)",)


def test_formats_of_numbers_say_nothing(tokenizer: Any) -> None:
    assert takes(tokenizer, {"type": "integer", "format": "int64"}, "7")
    assert json_grammar({"type": "integer", "format": "int64"}).unkept == ()


def test_a_format_that_can_be_kept_is_kept(tokenizer: Any) -> None:
    schema = {"type": "string", "format": "date"}
    assert json_grammar(schema).unkept == ()
    assert takes(tokenizer, schema, '"2026-02-03"')
    assert not takes(tokenizer, schema, '"soon"')


@pytest.mark.parametrize(
    ("more", "left_out"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"contains": {"type": "integer"}, "minContains": 2}, "contains minContains"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": True}, "if then else"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
        ({"dependencies": {"a": ["b"]}}, "dependencies"),
        ({"not": {"required": ["b"]}}, "not"),
        ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"unevaluatedProperties": {"type": "string"}}, "unevaluatedProperties"),
        ({"$dynamicRef": "#x"}, "$dynamicRef"),
        ({"minProperties": 1, "maxProperties": 2}, "minProperties maxProperties"),
        ({"uniqueItems": False, "not": False, "then": {}, "minContains": 1, "dependencies": {}}, ""),
        ({"propertyNames": {"type": "string"}, "unevaluatedProperties": True}, ""),
    ],
)
def test_what_cannot_be_kept_is_left_out_and_said(
    tokenizer: Any, more: dict[str, Any], left_out: str
) -> None:
    schema = {**OBJECT, **more}
    assert takes(tokenizer, schema, '{"a": "x"}')
    assert not takes(tokenizer, schema, '{"a": 1}')
    assert [what.split(" ")[0] for what in json_grammar(schema).unkept] == left_out.split()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
            '{"b": null}',
            '{"c": null}',
        ),
        ({"type": "object", "propertyNames": {"type": "string", "pattern": "^a$"}}, '{"a": 1}', '{"b": 1}'),
        ({**OBJECT, "unevaluatedProperties": False}, '{"a": "x"}', '{"b": 1}'),
        ({"type": "object", "patternProperties": {"^x": {"type": "null"}}}, '{"xy": null}', '{"xy": 1}'),
        ({"prefixItems": [{"type": "null"}], "type": "array", "unevaluatedItems": False}, "[null]", "[null,1]"),
        ({"type": "object", "minProperties": 1}, '{"a": 1}', "{}"),
        ({**OBJECT, "required": ["a"], "maxProperties": 1}, '{"a": "x"}', '{"a": "x", "b": 1}'),
        ({"type": "object", "properties": {"not": {"type": "null"}}}, '{"not": null}', '{"not": 1}'),
        ({"enum": [{"not": {}, "format": "x"}]}, '{"not": {}, "format": "x"}', '{"format": "x"}'),
        ({"properties": {"a": {"not": {}}}, "type": "object"}, "{}", '{"a": 1}'),
    ],
)  # fmt: skip
def test_what_can_be_said_otherwise_is_kept(tokenizer: Any, schema: Any, right: str, wrong: str) -> None:
    assert json_grammar(schema).unkept == ()
    assert takes(tokenizer, schema, right)
    assert not takes(tokenizer, schema, wrong)


@pytest.mark.parametrize("pattern", ["^(?!\\.)[a-z]+$", "(?<=a)b", "^(a)\\1$", "\\bword\\b"])
def test_patterns_beyond_automata_are_left_out(tokenizer: Any, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert takes(tokenizer, schema, '"anything"')
    assert json_grammar(schema).unkept[0].startswith("pattern")
    assert json_grammar({"type": "string", "pattern": "\\\\b"}).unkept == ()


def test_names_by_such_patterns_may_have_any_value(tokenizer: Any) -> None:
    schema = {
        "type": "object",
        "patternProperties": {"^(?!x)": {"type": "string"}},
        "additionalProperties": False,
    }
    assert takes(tokenizer, schema, '{"a": 1}')
    assert len(json_grammar(schema).unkept) == 1


def test_alternatives_that_overlap_are_taken_as_any(tokenizer: Any) -> None:
    one, two = {"type": "object", "properties": {"a": {"type": "string"}}}, {"type": "object"}
    assert takes(tokenizer, {"oneOf": [one, two]}, '{"a": "x"}')


def test_closed_objects_have_only_what_they_name(tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {"ok": {"const": True}, "in": OBJECT}, "required": ["ok"]}
    for text in ('{"ok": true, "more": 1}', '{"ok": true, "in": {"b": 1}}'):
        assert takes(tokenizer, schema, text)
        assert not takes(tokenizer, schema, text, is_closed=True)
    assert takes(tokenizer, schema, '{"ok": true, "in": {"a": "x"}}', is_closed=True)
    assert takes(tokenizer, {"type": "object"}, '{"a": 1}', is_closed=True)
    assert not takes(tokenizer, {"type": "object", "properties": {}}, '{"a": 1}', is_closed=True)
    assert takes(tokenizer, {**OBJECT, "required": ["b"]}, '{"b": 1}', is_closed=True)
    assert takes(tokenizer, {**OBJECT, "additionalProperties": True}, '{"b": 1}', is_closed=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [OBJECT, {"properties": {"b": {"type": "null"}}, "required": ["b"]}]},
        {
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "null"}}}],
            "$defs": {"base": OBJECT},
        },
        {**OBJECT, "anyOf": [{"properties": {"b": {"type": "null"}}}]},
    ],
)
def test_parts_of_a_composition_do_not_close_each_other(tokenizer: Any, schema: Any) -> None:
    assert takes(tokenizer, schema, '{"a": "x", "b": null}', is_closed=True)


def test_what_was_left_out_is_named_once_and_not_without_end() -> None:
    schema = {"anyOf": [{"type": "string", "format": f"f{i}"} for i in range(100)]}
    _, left_out = kept_schema(schema)
    assert len(left_out) == 21
    assert left_out[-1] == "and 80 more"
    assert json.dumps(schema)  # what is given is not changed
