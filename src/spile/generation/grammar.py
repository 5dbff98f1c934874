"""Turns a grammar (a JSON schema, say) into the ids that may come next in one answer.

The work is llguidance's: a parser that runs over the bytes of all entries at once. This file gives it the
entries, the end tokens and the reasoning that may come before the answer, and knows neither logits nor HTTP.
llguidance is imported with the first grammar.

Measured with 151,669 entries: 23 MB (6 of them the import) and 0.2 s for the table, once a model; 2 ms for a
grammar; 0.05 ms for the ids after a token, 0.9 ms at most. llguidance's own "slices", made to save such a
millisecond, take 50 MB more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spile import memory
from spile.errors import OptionError, TextError, quote
from spile.generation.schemas import kept_schema
from spile.text.reasoning import BEGIN, END
from spile.text.tokenizer import Tokenizer

_IMPORT_NBYTES = 6_000_000
_ENTRY_NBYTES = 115
_PARSERS_NBYTES = 4_000_000  # of a few answers at once: 0.3 MB was measured for one
# Between two parts of JSON any amount may stand, and a model that is kept from what it wants to say fills its answer
# with it. So: a space, or a line end and an indent.
JSON_SPACE = r"(?:\x20|\n[\x20\t]{0,24})"
_MOST_SPACE_AROUND = 8  # characters between reasoning, markers and JSON
# Of about 1 kB each, so that a pattern made to be costly fails instead of filling memory.
_MOST_LEXER_STATES = 20_000
# What a request could ask that takes seconds and hundreds of megabytes: 96,000 characters took 25 MB and 0.4 s,
# multiples of 99,991 took 47 MB and 2.8 s.
_MOST_CHARACTERS = 64_000
_LARGEST_MULTIPLE = 10_000
_SNIPPET = re.compile(r"^ *\d+ \| ")  # a line of the grammar that llguidance quotes in its reasons
_DEAD_END = "NoExtensionBias"  # llguidance's word for it
_WHERE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")


@dataclass(frozen=True)
class Grammar:
    """What an answer may be: rules in llguidance's form of Lark, of which `answer` is the whole. `unkept` names what
    was asked of it and is left out.
    """

    rules: str
    unkept: tuple[str, ...] = ()


def json_grammar(schema: Any, *, is_closed: bool = False) -> Grammar:
    """Return the grammar of JSON that follows a schema; of any object with `{"type": "object"}`.

    Raises: OptionError for what is no schema. What llguidance cannot do, it says when the grammar is used.
    """
    return json_rule("answer", schema, is_closed=is_closed)


def json_rule(name: str, schema: Any, *, is_closed: bool = False) -> Grammar:
    """Return one rule, of JSON that follows a schema; `is_closed` as in `kept_schema`.

    Raises: OptionError for what is no schema.
    """
    if not isinstance(schema, (dict, bool)):
        raise OptionError(f"the JSON schema is {quote(schema)}: it must be an object")
    schema, unkept = kept_schema(schema, is_closed=is_closed)
    if isinstance(schema, bool):
        if not schema:
            raise OptionError("the JSON schema allows nothing: no text can follow it")
        schema = {}
    _check_multiples(schema)
    # Of alternatives that overlap llguidance cannot exclude what follows two of them, and would refuse.
    guided = {**schema, "x-guidance": {"whitespace_pattern": JSON_SPACE, "coerce_one_of": True}}
    try:
        return Grammar(f"{name}: %json {json.dumps(guided, allow_nan=False)}\n", unkept)
    except (ValueError, TypeError, RecursionError) as error:
        raise OptionError(f"the JSON schema is no JSON: {error}") from error


def choice_grammar(choices: Collection[str]) -> Grammar:
    """Return the grammar of one of these texts."""
    return Grammar("answer: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices) + "\n")


def regex_grammar(pattern: str) -> Grammar:
    """Return the grammar of text that a pattern matches as a whole."""
    escaped = re.sub(r"(\\.)|/|\n", lambda found: found[1] or ("\\n" if found[0] == "\n" else "\\/"), pattern)
    return Grammar(f"answer: /{escaped}/\n")


def given_grammar(text: str) -> Grammar:
    """Return a grammar that was written elsewhere: llama.cpp's GBNF, with a rule `root`, or llguidance's Lark, with
    a rule `start`.

    Raises: OptionError for what is neither.
    """
    _import()
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    if len(text) > _MOST_CHARACTERS:
        raise OptionError(f"the grammar has {len(text):,} characters: {_MOST_CHARACTERS:,} is the most")
    try:
        lark = any_to_lark(text)
    except (GbnfToLarkError, ValueError, LookupError, RecursionError) as error:
        raise OptionError(f"the grammar is no GBNF: {quote(str(error))[1:-1]}") from error
    return Grammar(f"answer: %lark {{\n{lark.removeprefix('%llguidance {}')}\n}}\n")


def _check_multiples(schema: dict[str, Any]) -> None:
    """Check a schema's `multipleOf`, wherever it stands."""
    waiting: list[Any] = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            multiple = value.get("multipleOf")
            if isinstance(multiple, (int, float)) and abs(multiple) > _LARGEST_MULTIPLE:
                raise OptionError(
                    f"the JSON schema has multipleOf {multiple:,}: {_LARGEST_MULTIPLE:,} is the most"
                )
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


class GrammarTable:
    """The entries of one tokenizer, as llguidance wants them."""

    @staticmethod
    def nbytes(num_entries: int) -> int:
        """Bytes that so many entries take, with the import and the parsers of a few answers."""
        return _IMPORT_NBYTES + num_entries * _ENTRY_NBYTES + _PARSERS_NBYTES

    @staticmethod
    def check(tokenizer: Tokenizer) -> None:
        """Check that there can be a table, before any memory is taken for it.

        Raises: OptionError without llguidance; TextError for a tokenizer whose entries are no bytes.
        """
        _import()
        if not tokenizer.has_bytes:
            raise TextError(
                f"{tokenizer.path} has entries whose text depends on what stands beside them: "
                f"no grammar can be kept to with it"
            )

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Read all entries below `vocab_size`.

        Raises: as `check`.
        """
        self.check(tokenizer)
        llguidance = _import()
        self.num_entries = min(tokenizer.num_entries, vocab_size)
        eos_ids = sorted(token_id for token_id in tokenizer.eos_ids if token_id < self.num_entries)
        # A model without end tokens gets one that cannot be chosen.
        self._tokenizer = llguidance.LLTokenizer(
            _Source(tokenizer, self.num_entries, eos_ids or [self.num_entries]),
            eos_token=eos_ids or [self.num_entries],
            slices=[],
        )
        memory.trim()  # 3 MB

    def constraint(self, grammar: Grammar, *, begins_inside: bool | None = None) -> GrammarConstraint:
        """Make the constraint of one answer. `begins_inside`: whether the prompt ends inside of the answer's
        reasoning; None where there is none. Reasoning is free, and the grammar is about what follows it.

        Raises: OptionError with llguidance's reason for a grammar or schema that it cannot follow.
        """
        if len(grammar.rules) > _MOST_CHARACTERS:
            raise OptionError(
                f"the schema has {len(grammar.rules):,} characters: {_MOST_CHARACTERS:,} is the most",
                "Leave out descriptions, or ask for less at once.",
            )
        lark = _with_reasoning(grammar, begins_inside)
        return GrammarConstraint(self._tokenizer, lark, self.num_entries, grammar.unkept)


class GrammarConstraint:
    """Which ids may come next in one answer. Satisfies `spile.generation.generate.Constraint`. `unkept` names what was
    asked and cannot be kept to.
    """

    def __init__(self, tokenizer: Any, lark: str, num_entries: int, unkept: tuple[str, ...] = ()) -> None:
        llguidance = _import()
        limits = llguidance.LLParserLimits(max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False)
        self._num_entries = num_entries
        self._matcher = llguidance.LLMatcher(
            tokenizer, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits
        )
        self._mask = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)
        self._check()
        if any("oneOf" in warning for warning in self._matcher.get_grammar_warnings()):
            unkept += ("oneOf (taken as anyOf, as its alternatives overlap)",)
        self.unkept = unkept

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> NDArray[np.intp]:
        """Return the ids that may come next, ascending; end tokens where the answer may end.

        Raises: OptionError when the grammar became too complex to follow.
        """
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._mask)
        self._check()
        bits = np.unpackbits(self._mask[0].view(np.uint8), bitorder="little", count=self._num_entries)
        return np.flatnonzero(bits)

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take what the prompt has of the answer already.

        Raises: OptionError where no answer begins so.
        """
        if self._matcher.try_consume_tokens(list(token_ids)) < len(token_ids):
            raise OptionError(
                "the last message is gone on from, and no answer that was asked for begins with its text",
                "Send continue_final_message false to have a new answer.",
            )

    def accept(self, token_id: int) -> None:
        """Take note of the token that was chosen, one of those allowed."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise OptionError(
                f"the answer cannot be kept to the schema: {_reason(self._matcher.get_error())}"
            )


class _Source:
    """What llguidance asks a tokenizer for. Entries are made as it walks over them: a list would take 11 MB.

    It also asks how text is encoded: where a grammar leaves only one text, it allows that text's own ids alone.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, num_entries: int, eos_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0]
        self.tokens = _Entries(tokenizer, max(num_entries, eos_ids[-1] + 1))
        self.special_token_ids = sorted({i for i in tokenizer.special_ids if i < num_entries} | {*eos_ids})

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_bos=False)


class _Entries(Sequence[bytes]):
    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        self._tokenizer = tokenizer
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._tokenizer.entry(index)


def _with_reasoning(grammar: Grammar, begins_inside: bool | None) -> str:
    """Put before the answer what a reasoning model may write there."""
    space = f"SPACE: /\\s{{1,{_MOST_SPACE_AROUND}}}/\n"
    if begins_inside is None:
        return f"start: answer\n{grammar.rules}{space}"
    start, begin = ("reasoning SPACE? answer", "") if begins_inside else ("(reasoning SPACE?)? answer", BEGIN)
    end = END.replace("/", "\\/")
    return f"start: {start}\nreasoning[lazy]: /{begin}(?s:.*){end}/\n{grammar.rules}{space}"


def text_without(markers: Collection[str]) -> str:
    """Return a Lark expression of text in which none of these occurs, and which is no reasoning."""
    parts = [f"~/(?s:.*){re.escape(marker).replace('/', chr(92) + '/')}(?s:.*)/" for marker in markers]
    return " & ".join(["/(?s:.*)/", f"~/{BEGIN}(?s:.*)/", *parts])


def _reason(error: str) -> str:
    """Return llguidance's reason without the grammar that it quotes, on one line."""
    lines = []
    for line in error.splitlines():
        if _SNIPPET.match(line) or line.startswith("<state>"):
            break
        lines.append(line.strip())
    reason = _WHERE.sub("", " ".join(lines))
    return "no text can follow it" if reason.startswith(_DEAD_END) else quote(reason)[1:-1]


def _import() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise OptionError(
            "answers that follow a schema need llguidance, which is not installed",
            "Install it: pip install llguidance",
        ) from error
    return llguidance
