"""Text to ids and back: whole characters only, the same as `tokenizers` says, in memory or not."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fakes import write_byte_tokenizer
from spile.errors import TextError
from spile.text.sidecar import eos_ids_of, read_sidecar
from spile.text.tokenizer import Tokenizer, open_tokenizer

SAMPLES = {
    "flag": "a flag \U0001f1e9\U0001f1ea!",
    "family": "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 at home",
    "skin tone": "\U0001f44d\U0001f3fd",
    "accents": "e\u0301a\u0308 cafe\u0301",
    "Hebrew": "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "CJK": "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "spaces": "   three before,  two inside\n\n\ttab ",
    "replacement": "a real \ufffd stays",
    "controls": "null \x00 and escape \x1b",
}


def opened(folder: Path, config: dict[str, Any] | None = None, *, keep: bool = True) -> Tokenizer:
    tokenizer = open_tokenizer(folder, config=config or {}, keep=keep)
    assert tokenizer is not None
    return tokenizer


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    decoder = tokenizer.decoder()
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.flush()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tokenizers.Tokenizer]:
    """A small byte-level BPE, with entries that end in the middle of characters."""
    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator(list(SAMPLES.values()) * 3, trainer)
    theirs.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    theirs.add_tokens(["<think>", "\u00e9t\u00e9"])
    folder = tmp_path_factory.mktemp("trained")
    theirs.save(str(folder / "tokenizer.json"))
    return folder, theirs


@pytest.mark.parametrize("name", SAMPLES)
def test_text_comes_back_whole_and_in_whole_characters(
    name: str, trained: tuple[Path, tokenizers.Tokenizer]
) -> None:
    folder, theirs = trained
    text = SAMPLES[name]
    tokenizer = opened(folder)
    token_ids = tokenizer.encode(text)
    assert token_ids == theirs.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(token_ids) == text == theirs.decode(token_ids)
    pieces = streamed(tokenizer, token_ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_some_entries_of_the_trained_tokenizer_split_characters(
    trained: tuple[Path, tokenizers.Tokenizer],
) -> None:
    """Else the test above would show nothing."""
    tokenizer = opened(trained[0])
    assert "" in streamed(tokenizer, tokenizer.encode(SAMPLES["family"]))[:-1]


def test_any_ids_decode_as_tokenizers_decodes_them(trained: tuple[Path, tokenizers.Tokenizer]) -> None:
    """Invalid bytes too: both replace the longest broken part by one U+FFFD."""
    folder, theirs = trained
    tokenizer = opened(folder)
    plain = theirs.token_to_id("a")
    literal = theirs.token_to_id(
        "\u00e9t\u00e9"
    )  # theirs reads an added token as bytes, ours as what it says
    choices = [token_id for token_id in range(tokenizer.num_entries) if token_id != literal]
    numbers = random.Random(7)
    for _ in range(500):
        token_ids = [*numbers.choices(choices, k=numbers.randrange(12)), plain]
        assert tokenizer.decode(token_ids) == theirs.decode(token_ids)


def test_half_a_character_at_the_end_is_dropped(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = opened(tmp_path)
    whole = list("ok \U0001f600".encode())
    for cut in (1, 2, 3):
        assert tokenizer.decode(whole[:-cut]) == "ok "
    assert tokenizer.decode(whole) == "ok \U0001f600"


def test_broken_bytes_are_replaced_once_they_are_certain(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    assert streamed(opened(tmp_path), [0xF0, 0x9F, ord("a")]) == ["", "", "\ufffda", ""]


def test_special_tokens_have_no_text_and_added_ones_are_literal(
    trained: tuple[Path, tokenizers.Tokenizer],
) -> None:
    folder, theirs = trained
    tokenizer = opened(folder)
    ids = [theirs.token_to_id(text) for text in ("<think>", "<|im_end|>", "\u00e9t\u00e9")]
    assert streamed(tokenizer, ids) == ["<think>", "", "\u00e9t\u00e9", ""]


def test_ids_outside_of_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    assert opened(tmp_path).decode([97, 5000, 98]) == "ab"


def test_decoding_needs_no_tokenizers_in_memory(trained: tuple[Path, tokenizers.Tokenizer]) -> None:
    tokenizer = opened(trained[0], keep=False)
    token_ids = tokenizer.encode("hello \U0001f600")
    assert not tokenizer.is_loaded
    assert tokenizer.decode(token_ids) == "hello \U0001f600"
    assert tokenizer.num_entries == 335
    assert tokenizer.eos_ids
    assert not tokenizer.is_loaded
    assert tokenizer.encode("again") == tokenizer.encode("again")
    assert not tokenizer.is_loaded


def test_numbers_asked_for_first_leave_nothing_loaded(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = opened(tmp_path, keep=False)
    assert not tokenizer.is_learned
    assert tokenizer.num_entries == 257
    assert tokenizer.is_learned
    assert not tokenizer.is_loaded


def test_kept_tokenizer_stays(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = opened(tmp_path, keep=True)
    tokenizer.encode("a")
    assert tokenizer.is_loaded
    tokenizer.release()
    assert not tokenizer.is_loaded


def test_decoder_that_joins_words_streams_what_it_says_as_a_whole(tmp_path: Path) -> None:
    """Metaspace: a word's text depends on its place. Such a tokenizer stays in memory."""
    words = [
        "\u2581Once",
        "\u2581upon",
        "\u2581a",
        "\u2581time",
        ",",
        "ly",
        "<0xF0>",
        "<0x9F>",
        "<0x98>",
        "<0x80>",
    ]
    vocab = {word: index for index, word in enumerate(["<unk>", *words])}
    theirs = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    theirs.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    theirs.add_special_tokens(["</s>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = opened(tmp_path, keep=False)
    token_ids = [1, 2, 11, 3, 4, 5, 7, 8, 9, 10, 6, 1]
    assert tokenizer.decode(token_ids) == theirs.decode(token_ids) == "Once upon a time,\U0001f600ly Once"
    pieces = streamed(tokenizer, token_ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert tokenizer.decode(token_ids[:8]) == "Once upon a time,"  # cut in the middle of the emoji
    tokenizer.release()
    assert tokenizer.is_loaded


BOS_PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
}


@pytest.mark.parametrize(
    ("config", "post_processor", "expected"),
    [
        ({}, None, []),
        ({"bos_token": "<s>"}, None, []),
        ({"bos_token": "<s>", "add_bos_token": True}, None, [256]),
        ({"bos_token": {"content": "<s>"}, "add_bos_token": True}, None, [256]),
        ({"bos_token": "<s>", "add_bos_token": True}, BOS_PROCESSOR, [256]),
        ({}, BOS_PROCESSOR, [256]),
        ({"add_bos_token": False}, BOS_PROCESSOR, []),
        ({"bos_token": "<absent>", "add_bos_token": True}, None, []),
    ],
)
def test_first_token_is_there_exactly_once_where_it_is_wanted(
    config: dict[str, Any], post_processor: dict[str, Any] | None, expected: list[int], tmp_path: Path
) -> None:
    write_byte_tokenizer(tmp_path, special=["<s>"], config=config, post_processor=post_processor)
    tokenizer = opened(tmp_path)
    assert tokenizer.bos_id == (expected[0] if expected else None)
    assert tokenizer.encode("hi") == [*expected, 104, 105]
    assert tokenizer.encode("hi", add_bos=False) == [104, 105]
    assert tokenizer.encode("<s>hi") == [256, 104, 105]  # the template has put it there already
    assert tokenizer.encode("") == expected


@pytest.mark.parametrize(
    ("special", "tokenizer_config", "config", "generation_config", "expected"),
    [
        (["<end>"], {"eos_token": "<end>"}, {}, {}, {256}),
        (["<end>"], {"eos_token": {"content": "<end>"}}, {}, {}, {256}),
        (["<end>"], {}, {"eos_token_id": 7}, {"eos_token_id": [8, 9]}, {7, 8, 9}),
        (["<end>"], {"eos_token": "<end>"}, {"eos_token_id": [7]}, {"eos_token_id": 8}, {7, 8, 256}),
        (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], {}, {}, {}, {257, 258}),
        (["<|endoftext|>"], {}, {}, {}, set()),  # no ChatML: the files alone decide
        (["<end>"], {"eos_token": "<absent>"}, {"eos_token_id": None}, {"eos_token_id": "x"}, set()),
    ],
)
def test_end_tokens_of_all_files_count(
    special: list[str],
    tokenizer_config: dict[str, Any],
    config: dict[str, Any],
    generation_config: dict[str, Any],
    expected: set[int],
    tmp_path: Path,
) -> None:
    write_byte_tokenizer(tmp_path, special=special, config=tokenizer_config)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert opened(tmp_path, config).eos_ids == expected


def test_entries_are_counted_to_the_last_id_across_gaps(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, special=["<|endoftext|>"])
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"] = {
        text: index + (10 if index > 200 else 0) for text, index in content["model"]["vocab"].items()
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = opened(tmp_path, {"vocab_size": 512})
    assert tokenizer.num_entries == 266
    assert tokenizer.decode([200, 211]) == "\ufffd"  # C8 alone and, after the gap, C9 alone: no character


def test_length_limit_in_the_file_cuts_no_prompt(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 32},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert opened(tmp_path).encode("eight by") == list(b"eight by")


def test_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert open_tokenizer(tmp_path, config={}) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"version https://git-lfs.github.com/spec/v1\n", b'{"model": 3}']
)
def test_damaged_tokenizer_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TextError, match=r"tokenizer\.json cannot be used as a tokenizer: .") as caught:
        opened(tmp_path).encode("a")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_damaged_tokenizer_config_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(TextError, match=r"tokenizer_config\.json") as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    with pytest.raises(TextError, match="character 1 is half of a surrogate pair"):
        opened(tmp_path).encode("a\ud800")


def test_code_named_by_the_tokenizer_config_is_told_and_not_run(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, config={"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}})
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    assert opened(tmp_path).encode("a") == [97]
    assert any("auto_map" in note and "never executed" in note for note in read_sidecar(tmp_path).notes)


def test_markers_that_an_answer_says_are_text_even_where_they_are_declared_special(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, special=("<e>", "<think>", "</think>", "<tool_call>"))
    tokenizer = open_tokenizer(tmp_path, config={})
    assert tokenizer is not None
    assert tokenizer.decode([256, 257, 97, 258, 259]) == "<think>a</think><tool_call>"
    assert tokenizer.entry(256) == b"<e>"
    assert tokenizer.entry(97) == b"a"


def test_tokenizer_that_is_no_file_says_what_it_is(tmp_path: Path) -> None:
    """Broke: a model with a pipe or a dangling link there was said to have no tokenizer.json."""
    path = tmp_path / "tokenizer.json"
    assert open_tokenizer(tmp_path, config={}) is None
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(TextError, match="is a link to a file that does not exist"):
        open_tokenizer(tmp_path, config={})
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TextError, match="is not a regular file"):
        open_tokenizer(tmp_path, config={})


def test_tokenizer_that_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    def refuse(path: Path, *arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(TextError, match=r"tokenizer\.json cannot be read: Permission denied") as caught:
        open_tokenizer(tmp_path, config={})
    assert caught.value.hint is None


def test_end_token_of_the_special_tokens_map_is_found(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    for value in ("<|endoftext|>", {"content": "<|endoftext|>", "lstrip": False}):
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": value}))
        tokenizer = opened(tmp_path)
        assert tokenizer.eos_ids == {256}
        assert tokenizer.sidecar.special_token("eos_token") == "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    assert opened(tmp_path).eos_ids == {ord("a")}


def test_end_token_of_a_configs_text_part_is_found() -> None:
    assert eos_ids_of({"text_config": {"eos_token_id": [1, 106]}, "eos_token_id": 2}) == {1, 2, 106}
    assert eos_ids_of({"text_config": None, "llm_config": [3], "eos_token_id": True}) == frozenset()


@pytest.mark.parametrize("change", [{"unk_token": "none of these"}, {"unk_token": "none", "vocab": {"a": 0}}])
def test_unknown_token_that_is_not_in_the_vocabulary_is_one_sentence(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    write_byte_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"].update(change)
    content["model"]["vocab"].pop("b", None)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TextError, match=r"tokenizer\.json cannot be used as a tokenizer"):
        opened(tmp_path).encode("b")
