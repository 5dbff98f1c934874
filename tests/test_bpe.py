"""The compact table against `tokenizers`: the same ids for any text, and nothing believed of a file that is
damaged or foreign."""

from __future__ import annotations

import functools
import json
import os
import random
import struct
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from spile import _core
from spile.errors import TextError
from spile.making import synth_tokenizer
from spile.text import bpe, bpe_table, patterns
from spile.text import tokenizer as spile_tokenizer
from spile.text.bpe import HEADER, Table, open_table, source_digest, table_path, write_table
from spile.text.bpe_table import NoTableError, build_table
from spile.text.tokenizer import Tokenizer, open_tokenizer

DEMO = Path(spile_tokenizer.__file__).parents[1] / "demo" / "model" / "tokenizer.json"
QWEN2 = synth_tokenizer.tokenizer_files(600, 2000, 0)[0]["tokenizer.json"]["pre_tokenizer"]["pretokenizers"][
    0
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACES = "".join(
    map(chr, (9, 10, 11, 12, 13, 28, 31, 32, 133, 160, 5760, 6158, *range(8192, 8208), 8232, 8233))
)
SPACES += "\u202f\u205f\u2060\u3000\ufeff"

TEXTS = {
    "nothing": "",
    "English": "The quick brown fox doesn't jump; we'll see, it's I'VE IT'S don\u2019t 'tis 'llama.",
    "code": "def f(x: int) -> int:\n\treturn {x**2: [1_000, 0xff]}  # done\r\n\r\n   if (a && b) { c->d(); }\n",
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd\U0001f1e9\U0001f1ea\u2764\ufe0f!",
    "Hebrew": "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05b9\u05dc\u05b8\u05dd, \u0645\u0631\u062d\u0628\u0627",
    "CJK": "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093 \ud55c\uad6d \u1100\u1161\u11a8 \U0002f800",
    "accents": "e\u0301a\u0308\u0323 cafe\u0301 \u1e9b\u0323 \u212b \u0958 \ufb01 a\u0315\u0300\u05aeb",
    "long s": "'\u017f 'S '\u017fs 'LL 'Ll 're'RE\u212a",
    "digits": "1 12 123 1234 12345678901234567890 \u0967\u0968\u0969 \u00bd \u2167 \U0001d7d8\U0001d7d9 \u00b2",
    "spaces": f" a  b   c\t\td \n e\r\nf\r\r\n\n g   \n   h  {SPACES} x{SPACES}{SPACES}y    ",
    "controls": "".join(map(chr, range(32))) + "\x7f\x80\x9f\u200e\u202e",
    "added": "<|im_start|>user\nHi<|im_end|>\n <think> a</think><|im_start|<|im_end|><|endoftext|>",
    "long word": "x" * 5000 + "abcab" * 3000 + "\u00e9" * 900 + "=" * 3000,
    "long space": " " * 5000 + "a" + "\n" * 999 + " \t" * 700 + "b" + "\u3000" * 300,
}


MATCHED_BY, DIFFERING, BESIDE = bpe_table._matched_by, bpe_table._differing, bpe_table._beside
differing, beside = functools.cache(DIFFERING), functools.cache(BESIDE)
matched_by = functools.cache(lambda atom: MATCHED_BY([atom])[atom])


@pytest.fixture(autouse=True)
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `tokenizers` says of all characters is asked once for all tests: it takes a second."""
    monkeypatch.setattr(bpe_table, "_matched_by", lambda atoms: {atom: matched_by(atom) for atom in atoms})
    monkeypatch.setattr(bpe_table, "_differing", differing)
    monkeypatch.setattr(bpe_table, "_beside", beside)


def ids_of(theirs: tokenizers.Tokenizer, text: str) -> list[int]:
    ids: list[int] = theirs.encode(text, add_special_tokens=False).ids
    return ids


@functools.cache
def _characters(*ranges: tuple[int, int]) -> str:
    return "".join(chr(code) for first, end in ranges for code in range(first, end))


def random_texts(num: int, seed: int) -> Iterator[str]:
    """Short strings of characters of many kinds, and some of any characters at all."""
    source = random.Random(seed)
    kinds: list[Sequence[str]] = [
        "etaoin shrdlu",
        "abcXYZ'\u2019\u017fsStTdDmM",
        "0123456789.,-+*/()[]{}<>|_=#",
        SPACES,
        _characters((0x300, 0x370)),
        ["<|im_end|>", "<think>", "</think>", "<|endoftext|>", "<mask>", "\u00e9t\u00e9", "\u00e9"],
        _characters((0x80, 0x600), (0x900, 0xE00), (0x1100, 0x1200)),
        _characters((0x2000, 0x2100), (0x4E00, 0x4E80), (0xAC00, 0xAC80)),
        _characters((0x1F300, 0x1F650), (0x1D400, 0x1D800), (0x10000, 0x12000)),
        _characters((0, 0xD800), (0xE000, 0x110000)),
    ]
    for _ in range(num):
        chosen = source.sample(kinds, source.randrange(1, len(kinds)))
        yield "".join(source.choice(source.choice(chosen)) for _ in range(source.randrange(1, 40)))


def trained(*, vocab_size: int = 900, pattern: str | None = None, **model: Any) -> tokenizers.Tokenizer:
    """A small byte-level BPE of the texts above; without a pattern it is cut as GPT-2's."""
    theirs = tokenizers.Tokenizer.from_str(_trained(vocab_size, pattern))
    for name, value in model.items():
        setattr(theirs.model, name, value)
    return theirs


@functools.cache
def _trained(vocab_size: int, pattern: str | None) -> str:
    theirs = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    theirs.pre_tokenizer = byte_level
    if pattern is not None:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        theirs.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    theirs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator([*TEXTS.values(), *random_texts(300, 9)], trainer)
    theirs.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    theirs.add_tokens(["<think>", "</think>"])
    text: str = theirs.to_str()
    return text


def table_of(theirs: tokenizers.Tokenizer, folder: Path) -> Table:
    path = folder / "tokenizer.json"
    theirs.save(str(path))
    return Table(build_table(path, theirs, source_digest(path)))


def assert_same(table: Table, theirs: tokenizers.Tokenizer, *, num_random: int = 2000) -> None:
    for name, text in TEXTS.items():
        assert table.can_encode(text), name
        assert table.encode(text) == ids_of(theirs, text), name
    num_compared = 0
    for text in random_texts(num_random, 1):
        if table.can_encode(text):
            num_compared += 1
            assert table.encode(text) == ids_of(theirs, text), ascii(text)
    assert num_compared >= 0.9 * num_random


@pytest.mark.parametrize("pattern", [None, QWEN2["pattern"]["Regex"], LLAMA3, CL100K, O200K])
@pytest.mark.parametrize("nfc", [False, True])
def test_ids_are_those_of_tokenizers(pattern: str | None, nfc: bool, tmp_path: Path) -> None:
    theirs = trained(pattern=pattern)
    if nfc:
        theirs.normalizer = normalizers.NFC()
    assert_same(table_of(theirs, tmp_path), theirs)


def test_ids_of_the_demo_model_are_those_of_tokenizers() -> None:
    theirs = tokenizers.Tokenizer.from_file(str(DEMO))
    assert_same(Table(build_table(DEMO, theirs, source_digest(DEMO))), theirs, num_random=5000)


@pytest.mark.slow
def test_ids_of_a_vocabulary_of_full_size_are_those_of_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    files, _ = synth_tokenizer.tokenizer_files(151_643, 151_936, 0)
    synth_tokenizer.write_tokenizer_file(path, files["tokenizer.json"])
    theirs = tokenizers.Tokenizer.from_file(str(path))
    assert_same(Table(build_table(path, theirs, source_digest(path))), theirs, num_random=20_000)


@pytest.mark.slow
def test_every_character_alone_and_among_others_has_the_same_ids() -> None:
    theirs = tokenizers.Tokenizer.from_file(str(DEMO))
    table = Table(build_table(DEMO, theirs, source_digest(DEMO)))
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for start in range(0, len(codes), 4096):
        chars = [char for char in map(chr, codes[start : start + 4096]) if table.can_encode(char)]
        for write in (
            lambda c: f"{c}\n",
            lambda c: f"a{c}a 1{c}1 .{c}. {c}'{c}",
            lambda c: f"e{c}\u0323\u0301 {c}{c}",
        ):
            text = "".join(map(write, chars))
            assert table.encode(text) == ids_of(theirs, text)


@pytest.mark.parametrize(
    "flags",
    [
        {"single_word": True},
        {"lstrip": True},
        {"rstrip": True},
        {"lstrip": True, "rstrip": True, "single_word": True},
        {"normalized": True},
        {"normalized": True, "rstrip": True},
    ],
)
def test_added_tokens_are_found_where_tokenizers_finds_them(flags: dict[str, bool], tmp_path: Path) -> None:
    theirs = trained()
    theirs.normalizer = normalizers.NFC()
    flags = {"normalized": False, **flags}
    theirs.add_tokens(
        [AddedToken(text, **flags) for text in ("<mask>", "\u00e9t\u00e9", "<mask>s", "ab", " ab")]
    )
    table = table_of(theirs, tmp_path)
    assert_same(table, theirs, num_random=500)
    source = random.Random(2)
    pieces = [
        "<mask>",
        "<mask>s",
        "\u00e9t\u00e9",
        "e\u0301te\u0301",
        "ab",
        " ",
        "\n",
        "\u00a0",
        "x",
        "_",
        "1",
        ".",
        "\u0301",
        *SPACES,
    ]
    pieces += [
        "\u200d",
        "\u00aa",
        "\u0903",
        "\u203f",
        "\u2160",
        "\u2460",
        "\U0001f600",
        "<think>",
        "<|im_end|>",
    ]
    for _ in range(3000):
        text = "".join(source.choices(pieces, k=source.randrange(1, 9)))
        assert table.encode(text) == ids_of(theirs, text), ascii(text)


def test_word_that_is_an_entry_wins_over_merges_where_the_file_says_so(tmp_path: Path) -> None:
    theirs = trained(ignore_merges=True)
    described = json.loads(theirs.to_str())
    described["model"]["ignore_merges"] = True
    described["model"]["vocab"] |= {"zqzqz": 2000, "\u0120zqzqz": 2001}  # no merge leads to them
    theirs = tokenizers.Tokenizer.from_str(json.dumps(described))
    table = table_of(theirs, tmp_path)
    assert table.encode("zqzqz zqzqz") == [2000, 2001] == ids_of(theirs, "zqzqz zqzqz")
    assert_same(table, theirs)


def test_bytes_without_an_entry_are_left_out_as_tokenizers_does(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "\u0120": 3}
    theirs = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    table = table_of(theirs, tmp_path)
    for text in ("ab axb a\u00e9b", "xyz", "a b"):
        assert table.encode(text) == ids_of(theirs, text)


def test_space_is_put_before_a_text_that_has_none_where_the_file_says_so(tmp_path: Path) -> None:
    theirs = trained()
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert_same(table_of(theirs, tmp_path), theirs)


def test_later_of_two_equal_merges_counts(tmp_path: Path) -> None:
    described = json.loads(trained(vocab_size=400).to_str())
    merges = described["model"]["merges"]
    merges.append(merges[0])
    theirs = tokenizers.Tokenizer.from_str(json.dumps(described))
    assert_same(table_of(theirs, tmp_path), theirs, num_random=300)


def test_merges_written_as_one_text_each_are_read(tmp_path: Path) -> None:
    theirs = trained()
    described = json.loads(theirs.to_str())
    described["model"]["merges"] = [" ".join(pair) for pair in described["model"]["merges"]]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(described, indent=2, ensure_ascii=True))
    table = Table(build_table(path, tokenizers.Tokenizer.from_file(str(path)), source_digest(path)))
    assert_same(table, theirs, num_random=300)


def _without_bytes(theirs: tokenizers.Tokenizer) -> None:
    theirs.pre_tokenizer = pre_tokenizers.Whitespace()


def _lower_case(theirs: tokenizers.Tokenizer) -> None:
    theirs.normalizer = normalizers.Lowercase()


def _removing(theirs: tokenizers.Tokenizer) -> None:
    split = pre_tokenizers.Split(tokenizers.Regex(r"\s+"), "removed")
    theirs.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])


def _looking_back(theirs: tokenizers.Tokenizer) -> None:
    split = pre_tokenizers.Split(tokenizers.Regex(r"(?<=a)b|\s"), "isolated")
    theirs.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])


def _by_chance(theirs: tokenizers.Tokenizer) -> None:
    theirs.model.dropout = 0.1


@pytest.mark.parametrize("change", [_without_bytes, _lower_case, _removing, _looking_back, _by_chance])
def test_tokenizer_with_an_unknown_part_gets_no_table(
    change: Callable[[tokenizers.Tokenizer], None], tmp_path: Path
) -> None:
    theirs = trained(vocab_size=300)
    change(theirs)
    with pytest.raises(NoTableError):
        table_of(theirs, tmp_path)


@pytest.mark.parametrize(
    "pattern",
    ["", "a*", "a|", "(a", "a)", "[a", "a{,3}", "a{2}+", "^a", "a.b$", "(?i:x)", "(?i:st)", "(?<=a)b", "(?>a)",
     r"\bx", r"\h", "(?!a)+b"],
)  # fmt: skip
def test_pattern_beyond_what_both_read_alike_is_refused(pattern: str) -> None:
    with pytest.raises(patterns.PatternError):
        patterns.Pattern(pattern, lambda atom: [97, 97])


def test_very_long_word_takes_seconds_at_most(tmp_path: Path) -> None:
    theirs = trained()
    table = table_of(theirs, tmp_path)
    text = "".join(random.Random(3).choices("abcdeghinorstuxyz", k=200_000))
    assert table.encode(text) == ids_of(theirs, text)


# The file


@pytest.fixture
def written(tmp_path: Path) -> tuple[bytes, bytes]:
    """A digest and the table that was written for it."""
    path = tmp_path / "tokenizer.json"
    theirs = trained(vocab_size=400, ignore_merges=True)
    theirs.save(str(path))
    digest = source_digest(path)
    table = build_table(path, theirs, digest)
    assert write_table(digest, table)
    return digest, table


def test_table_is_found_again_and_is_the_users_alone(written: tuple[bytes, bytes]) -> None:
    digest, _ = written
    table = open_table(digest)
    assert table is not None
    assert table_path(digest).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in table_path(digest).parent.iterdir()] == [f"{digest.hex()}.bpe"]
    table.rest()
    assert table.encode("hello") == Table(written[1]).encode("hello")


def test_damaged_bytes_anywhere_are_refused(written: tuple[bytes, bytes]) -> None:
    digest, table = written
    source = random.Random(4)
    for at in [*range(0, HEADER.size, 3), *(source.randrange(HEADER.size, len(table)) for _ in range(50))]:
        damaged = bytearray(table)
        damaged[at] ^= 1 << source.randrange(8)
        assert write_table(digest, bytes(damaged))
        assert open_table(digest) is None
    for cut in (0, 7, HEADER.size - 1, HEADER.size, len(table) - 1):
        assert write_table(digest, table[:cut])
        assert open_table(digest) is None
    assert write_table(digest, table + b"\0")
    assert open_table(digest) is None


def test_numbers_out_of_bounds_are_refused_whatever_the_digest_says(written: tuple[bytes, bytes]) -> None:
    """The core reads only what it has checked itself."""
    table = written[1]
    source = random.Random(5)
    numbers_end = len(table) - HEADER.unpack_from(table)[6] - HEADER.unpack_from(table)[5]
    num_refused = 0
    for _ in range(2000):
        damaged = bytearray(table)
        at = source.randrange(2, numbers_end // 4) * 4
        struct.pack_into("<I", damaged, at, source.choice([0, 1, 399, 5000, 2**31, 2**32 - 2, 2**32 - 1]))
        try:
            core = _core.Bpe(np.frombuffer(bytes(damaged), np.uint8))
        except ValueError:
            num_refused += 1
            continue
        core.encode(["hello", "\u4f60\u597d", "x" * 200])
    assert num_refused > 500


@pytest.mark.parametrize("kind", ["writable by others", "link", "folder"])
def test_foreign_file_is_not_believed_and_is_replaced_where_it_can_be(
    kind: str, written: tuple[bytes, bytes], tmp_path: Path
) -> None:
    digest, table = written
    path = table_path(digest)
    if kind == "writable by others":
        path.chmod(0o666)
    elif kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        path.mkdir()
    assert open_table(digest) is None
    assert write_table(digest, table) is (kind != "folder")
    assert (open_table(digest) is None) is (kind == "folder")


def test_table_of_another_python_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = trained(vocab_size=300)
    theirs.normalizer = normalizers.NFC()
    path = tmp_path / "tokenizer.json"
    theirs.save(str(path))
    digest = source_digest(path)
    assert write_table(digest, build_table(path, theirs, digest))
    assert open_table(digest) is not None
    monkeypatch.setattr(unicodedata, "unidata_version", "99.0.0")
    assert open_table(digest) is None


# The tokenizer that uses it


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tokenizer]:
    """Opens a trained tokenizer with special tokens, whatever its size, as under a budget."""
    monkeypatch.setattr(spile_tokenizer, "TABLE_FROM_NBYTES", 0)
    theirs = trained(vocab_size=400)
    theirs.normalizer = normalizers.NFC()
    start = theirs.token_to_id("<|im_start|>")
    theirs.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))

    def open_it(*, keep: bool = False, table: bool = True) -> Tokenizer:
        tokenizer = open_tokenizer(tmp_path, config={}, keep=keep)
        assert tokenizer is not None
        if not table:
            tokenizer._digest = b""
        return tokenizer

    return open_it


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, nothing can be loaded by `tokenizers`."""

    class Unloadable:
        @staticmethod
        def from_file(path: str) -> None:
            raise AssertionError("it was loaded")

    return lambda: monkeypatch.setattr(tokenizers, "Tokenizer", Unloadable)


def test_answers_are_the_same_with_and_without_a_table(
    opened: Callable[..., Tokenizer], unloadable: Callable[[], None]
) -> None:
    kept = opened(keep=True, table=False)
    expected = {text: kept.encode(text) for text in TEXTS.values()}
    assert kept.is_loaded
    first = opened()
    assert {text: first.encode(text) for text in TEXTS.values()} == expected
    assert not first.is_loaded
    unloadable()
    for later in (opened(), opened(keep=True)):
        assert (later.num_entries, later.eos_ids, later.bos_id) == (
            kept.num_entries,
            kept.eos_ids,
            kept.bos_id,
        )
        assert {text: later.encode(text) for text in TEXTS.values()} == expected
        for text, token_ids in expected.items():
            assert later.decode(token_ids) == kept.decode(token_ids)
            assert text == TEXTS["added"] or later.decode(token_ids) == unicodedata.normalize("NFC", text)
        ids = range(-1, kept.num_entries + 2)
        assert list(map(later.entry, ids)) == list(map(kept.entry, ids))
        assert later.load_nbytes < 100_000
        with pytest.raises(TextError, match="surrogate"):
            later.encode("a\ud800")


def test_damaged_table_is_made_again(opened: Callable[..., Tokenizer], tmp_path: Path) -> None:
    expected = opened().encode("hello there")
    path = table_path(source_digest(tmp_path / "tokenizer.json"))
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"?")
    assert opened().encode("hello there") == expected
    assert path.read_bytes() == good


def test_table_needs_no_writable_cache(
    opened: Callable[..., Tokenizer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = opened(keep=True, table=False).encode("hello there")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    tokenizer = opened()
    assert tokenizer.encode("hello there") == expected
    assert tokenizer.encode("hello there") == expected
    assert not tokenizer.is_loaded


def test_characters_that_normalise_otherwise_are_left_to_tokenizers(opened: Callable[..., Tokenizer]) -> None:
    tokenizer = opened()
    kept = opened(keep=True, table=False)
    tokenizer.encode("a")
    table = tokenizer._table
    assert table is not None
    for code in table.meta.differing:
        text = f"a{chr(code)}\u0327b"
        assert not table.can_encode(text)
        assert tokenizer.encode(text) == kept.encode(text)
        assert tokenizer.encode_nbytes(text) > tokenizer.encode_nbytes("abcd")
        assert not tokenizer.is_loaded


def test_tokenizer_without_a_table_works_as_before(
    opened: Callable[..., Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = opened(keep=True, table=False).encode("hello there")

    def refuse(*args: Any, **keywords: Any) -> bytes:
        raise NoTableError("a test")

    monkeypatch.setattr("spile.text.bpe_table.build_table", refuse)
    tokenizer = opened()
    assert tokenizer.encode("hello there") == tokenizer.encode("hello there") == expected
    assert not tokenizer.is_loaded
    assert not bpe.tables_folder().exists()


def test_small_tokenizers_make_no_table(
    opened: Callable[..., Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spile_tokenizer, "TABLE_FROM_NBYTES", 10**9)
    opened().encode("hello there")
    assert not bpe.tables_folder().exists()


def test_tables_lie_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert bpe.tables_folder() == Path(os.environ["HOME"]) / ".cache" / "spile" / "tokenizers"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bpe.tables_folder() == tmp_path / "spile" / "tokenizers"
