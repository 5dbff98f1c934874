"""What a folder must be before its weights are used: each damage with the smallest bytes that show it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.architectures import open_model
from spile.errors import CheckpointError, ModelNotFoundError, ReadError
from spile.files.checkpoint import INDEX_NAME, Checkpoint, open_checkpoint, read_weight_map
from spile.files.safetensors import read_header

ONE_BYTE = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}


def shard_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def make_folder(folder: Path, files: dict[str, bytes], weight_map: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if weight_map is not None:
        (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def open_shard(tmp_path: Path, content: bytes) -> Checkpoint:
    return open_checkpoint(make_folder(tmp_path / "model", {"model.safetensors": content}))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    text = f"{caught.value} {caught.value.hint or ''}"
    assert "\n" not in text
    return text


# one file


def test_a_file_of_the_official_writer_is_read_to_the_byte(tmp_path: Path) -> None:
    official = pytest.importorskip("safetensors.numpy")
    tensors = {
        "a": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "b": np.ones((3, 1, 2), np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "scalar": np.array(7, np.int64),
    }
    checkpoint = open_shard(tmp_path, official.save(tensors, {"format": "np"}))
    assert set(checkpoint.tensors) == set(tensors)
    for name, values in tensors.items():
        assert checkpoint.tensors[name].shape == values.shape
        np.testing.assert_array_equal(checkpoint.read(name), values)


def test_bf16_is_read_as_its_bits(tmp_path: Path) -> None:
    header = {"a": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 4]}}
    bits = open_shard(tmp_path, shard_bytes(header, b"\x80\x3f\x00\xc0")).read("a")
    assert bits.dtype == np.uint16
    assert bits.tolist() == [[0x3F80, 0xC000]]


def test_a_read_after_the_file_was_cut_is_refused_with_the_numbers(tmp_path: Path) -> None:
    checkpoint = open_shard(
        tmp_path, shard_bytes({"a": {**ONE_BYTE, "shape": [9], "data_offsets": [0, 9]}}, b"9" * 9)
    )
    os.truncate(checkpoint.shards[0], checkpoint.tensors["a"].offset + 4)
    with pytest.raises(ReadError, match="wanted 9 bytes, got 4"):
        checkpoint.read("a")


@pytest.mark.parametrize(
    ("content", "guess"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 130\n", "LFS"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"\n<html>" + b" " * 100, "web page"),
        (b"\xff" * 8, "header"),
        (b"\xff" * 4096, "blank"),
        (b"", "empty"),
        (b"\x00" * 64, "incomplete download"),
        (b"PK\x03\x04" + b"\x00" * 60, "zip"),
        (b"\x80\x02}q\x00." + b"\x00" * 20, "pickle"),
        (b"GGUF\x03\x00\x00\x00" + b"\x00" * 20, "GGUF"),
        (b'{"error": "Repository not found"}', "JSON"),
        (b"\x1f\x8b\x08\x00" + b"\x00" * 20, "gzip"),
        (b"\x10", "incomplete download"),
        (b"\x00" * 8 + b"{}", "not a safetensors file"),
    ],
)
def test_a_file_that_is_something_else_is_named_with_a_guess(
    tmp_path: Path, content: bytes, guess: str
) -> None:
    message = refused(make_folder(tmp_path / "model", {"model.safetensors": content}))
    assert "model.safetensors" in message
    assert guess.lower() in message.lower()


@pytest.mark.parametrize("claimed", [10**8 + 1, 2**40, 2**63, 2**64 - 1])
def test_a_claimed_header_length_is_never_allocated(tmp_path: Path, claimed: int) -> None:
    content = claimed.to_bytes(8, "little") + b'{"a":'
    assert "model.safetensors" in refused(make_folder(tmp_path / "model", {"model.safetensors": content}))


def test_a_file_cut_inside_its_header_is_an_incomplete_download(tmp_path: Path) -> None:
    content = shard_bytes({"a": ONE_BYTE}, b"x")
    for length in (8, 12, 30):
        message = refused(make_folder(tmp_path / "model", {"model.safetensors": content[:length]}))
        assert "incomplete download" in message, length


def test_a_file_shorter_than_its_header_says_is_refused_with_both_numbers(tmp_path: Path) -> None:
    content = shard_bytes({"a": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}, b"x" * 1000)
    message = refused(make_folder(tmp_path / "model", {"model.safetensors": content}))
    assert f"ends at {len(content):,} bytes" in message
    assert f"needs {len(content) + 3096:,}" in message
    assert "'a'" in message
    assert "incomplete download" in message


def test_a_file_longer_than_its_header_says_is_refused(tmp_path: Path) -> None:
    message = refused(
        make_folder(tmp_path / "model", {"model.safetensors": shard_bytes({"a": ONE_BYTE}, b"xy")})
    )
    assert "appended" in message


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b'{"a":\xff}', "UTF-8"),
        (b'{"a":1', "JSON"),
        (b"{" + b'"a":{' * 100_000, "JSON"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":' + b"1" * 5000 + b"}", "JSON"),
        (b'{"a":1,"a":1}', "twice"),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "twice"),
        ({"a": []}, "object"),
        ({"__metadata__": {"format": 1}, "a": ONE_BYTE}, "__metadata__"),
        ({"__metadata__": [], "a": ONE_BYTE}, "__metadata__"),
        ({"a": {**ONE_BYTE, "dtype": "U3"}}, "dtype 'U3'"),
        ({"a": {**ONE_BYTE, "dtype": 8}}, "dtype 8"),
        ({"a": {"shape": [1], "data_offsets": [0, 1]}}, "dtype None"),
        ({"a": {**ONE_BYTE, "shape": 1}}, "shape 1"),
        ({"a": {**ONE_BYTE, "shape": [-1]}}, "shape [-1]"),
        ({"a": {**ONE_BYTE, "shape": [True]}}, "shape [True]"),
        ({"a": {**ONE_BYTE, "shape": [1.0]}}, "shape [1.0]"),
        ({"a": {**ONE_BYTE, "shape": [2**63, 2**63]}}, "larger than any file"),
        ({"a": {**ONE_BYTE, "shape": [2**62] * 50_000}}, "larger than any file"),
        ({"a": {**ONE_BYTE, "shape": [2]}}, "needs 2 bytes but its range holds 1"),
        ({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}, "needs 1 bytes"),
        ({"a": {**ONE_BYTE, "data_offsets": [0]}}, "[begin, end]"),
        ({"a": {**ONE_BYTE, "data_offsets": [-1, 0]}}, "[begin, end]"),
        ({"a": {**ONE_BYTE, "data_offsets": [1, 0]}}, "before the beginning"),
        ({"a": ONE_BYTE, "b": ONE_BYTE}, "overlaps"),
        ({"a": ONE_BYTE, "b": {**ONE_BYTE, "data_offsets": [2, 3]}}, "hole after tensor 'a'"),
        ({"a": {**ONE_BYTE, "data_offsets": [1, 2]}}, "hole after the header"),
    ],
)
def test_each_broken_rule_of_the_format_is_named(tmp_path: Path, header: Any, reason: str) -> None:
    message = refused(make_folder(tmp_path / "model", {"model.safetensors": shard_bytes(header, b"xyz")}))
    assert "model.safetensors" in message
    assert reason in message
    assert len(message) < 600


def test_what_the_official_reader_refuses_is_refused(tmp_path: Path) -> None:
    """Two readers agree on every single-byte change of a small header."""
    official = pytest.importorskip("safetensors.numpy")
    content = shard_bytes({"ab": ONE_BYTE, "c": {**ONE_BYTE, "data_offsets": [1, 2]}}, b"xy")
    disagreements = []
    path = tmp_path / "changed.safetensors"
    path.write_bytes(content)
    for position in range(len(content) - 2):
        for value in (0, 32, 48, 50, 93, 125, 255):
            changed = content[:position] + bytes([value]) + content[position + 1 :]
            try:
                official.load(changed)
                theirs = True
            except Exception:
                theirs = False
            with path.open("r+b") as file:  # in place: cutting the file first makes some disks wait
                file.write(changed)
            try:
                read_header(path)
                ours = True
            except CheckpointError:
                ours = False
            if theirs != ours:
                disagreements.append((position, value, theirs))
    assert disagreements == []


def test_a_name_that_is_no_text_for_a_terminal_stays_printable(tmp_path: Path) -> None:
    header = {"\x1b[2J\ud800\n": {**ONE_BYTE, "dtype": "U3"}}
    message = refused(make_folder(tmp_path / "model", {"model.safetensors": shard_bytes(header, b"x")}))
    assert message.isascii()
    assert "\x1b" not in message


def test_a_pipe_in_place_of_a_shard_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", {})
    os.mkfifo(folder / "model.safetensors")
    assert "regular file" in refused(folder)


# which files are the shards

A, B = shard_bytes({"a": ONE_BYTE}, b"1"), shard_bytes({"b": ONE_BYTE}, b"2")


def test_shards_of_any_name_are_found_through_the_index(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "model",
        {"weights-a.safetensors": A, "part two.bin": B},
        {"a": "weights-a.safetensors", "b": "part two.bin"},
    )
    checkpoint = open_checkpoint(folder)
    assert checkpoint.read("a").tolist() == [ord("1")]
    assert checkpoint.read("b").tolist() == [ord("2")]
    assert checkpoint.notes == ()


def test_missing_shards_are_all_named_as_an_incomplete_download(tmp_path: Path) -> None:
    names = {letter: f"model-{letter}.safetensors" for letter in "abc"}
    message = refused(make_folder(tmp_path / "model", {"model-a.safetensors": A}, names))
    assert "incomplete download" in message
    assert "model-b.safetensors, model-c.safetensors" in message
    assert "2 of 3" in message


def test_missing_shards_are_noticed_without_an_index(tmp_path: Path) -> None:
    message = refused(make_folder(tmp_path / "model", {"model-00001-of-00003.safetensors": A}))
    assert "incomplete download" in message
    assert "model-00002-of-00003.safetensors, model-00003-of-00003.safetensors" in message


def test_numbered_shards_need_no_index(tmp_path: Path) -> None:
    files = {"model-00001-of-00002.safetensors": A, "model-00002-of-00002.safetensors": B}
    assert set(open_checkpoint(make_folder(tmp_path / "model", files)).tensors) == {"a", "b"}


def test_a_stale_index_beside_a_complete_file_is_ignored_with_one_note(tmp_path: Path) -> None:
    weight_map = {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}
    checkpoint = open_checkpoint(make_folder(tmp_path / "model", {"model.safetensors": A}, weight_map))
    assert set(checkpoint.tensors) == {"a"}
    assert len(checkpoint.notes) == 1
    assert "model-00001-of-00002.safetensors" in checkpoint.notes[0]


def test_a_file_that_the_index_does_not_name_is_ignored_with_a_note(tmp_path: Path) -> None:
    files = {"one.safetensors": A, "stray.safetensors": shard_bytes({"a": ONE_BYTE}, b"9")}
    checkpoint = open_checkpoint(make_folder(tmp_path / "model", files, {"a": "one.safetensors"}))
    assert checkpoint.read("a").tolist() == [ord("1")]
    assert len(checkpoint.notes) == 1
    assert "stray.safetensors" in checkpoint.notes[0]


def test_the_optional_approximate_head_beside_the_shards_needs_no_note(tmp_path: Path) -> None:
    files = {"model.safetensors": A, "model-flashhead.safetensors": B}
    checkpoint = open_checkpoint(make_folder(tmp_path / "model", files))
    assert set(checkpoint.tensors) == {"a"}
    assert checkpoint.notes == ()


def test_an_index_entry_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    message = refused(
        make_folder(
            tmp_path / "model", {"one.safetensors": A}, {"a": "one.safetensors", "lost": "one.safetensors"}
        )
    )
    assert "'lost'" in message
    assert "one.safetensors" in message


def test_an_index_entry_that_is_in_another_shard_is_named(tmp_path: Path) -> None:
    files = {"one.safetensors": A, "two.safetensors": B}
    weight_map = {"a": "two.safetensors", "b": "one.safetensors"}
    message = refused(make_folder(tmp_path / "model", files, weight_map))
    assert "'a' in two.safetensors" in message
    assert "one.safetensors" in message


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    files = {
        "one.safetensors": A,
        "two.safetensors": shard_bytes({"a": ONE_BYTE, "c": {**ONE_BYTE, "data_offsets": [1, 2]}}, b"12"),
    }
    message = refused(
        make_folder(tmp_path / "model", files, {"a": "one.safetensors", "c": "two.safetensors"})
    )
    assert "'a'" in message
    assert "one.safetensors" in message
    assert "two.safetensors" in message


@pytest.mark.parametrize(
    "name", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", "", "a\\b", 7]
)
def test_an_index_cannot_leave_the_folder(tmp_path: Path, name: Any) -> None:
    assert "plain file names" in refused(make_folder(tmp_path / "model", {"one.safetensors": A}, {"a": name}))


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": 1}', '{"a":1,"a":2}'],
)
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    folder = make_folder(tmp_path / "model", {"model.safetensors": A})
    (folder / INDEX_NAME).write_text(content)
    assert INDEX_NAME in refused(folder)


def test_several_files_that_nothing_orders_are_refused(tmp_path: Path) -> None:
    assert "2 safetensors files" in refused(
        make_folder(tmp_path / "model", {"a.safetensors": A, "b.safetensors": B})
    )


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    message = refused(make_folder(tmp_path / "model", {"pytorch_model.bin": b""}))
    assert "model.safetensors" in message
    assert "pytorch_model.bin" in message


# config.json


def test_a_missing_folder_or_config_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model folder"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"looked for config\.json"):
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    "content",
    [b"", b" \n", b"{", b"[]", b"null", b'"maple"', b"\xff\xfe", b"[" * 200_000, b"<html>",
     b"{} " + b" " * 10_000_001,  b'{"a": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_damaged_config_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    folder = make_folder(tmp_path / "model", {"model.safetensors": A})
    (folder / "config.json").write_bytes(content)
    message = refused(folder)
    assert "config.json" in message
    assert len(message) < 400


def test_a_config_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", {"model.safetensors": A})
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json" in refused(folder)


# code in the folder


def test_code_in_the_folder_is_ignored_with_one_note_each(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder, marker = tiny_checkpoint(), tmp_path / "marker"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_file": "evil.py", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()")
    checkpoint = open_checkpoint(folder)
    open_model(checkpoint)
    assert len(checkpoint.notes) == 2
    assert "model_file 'evil.py'" in checkpoint.notes[0]
    assert "config.json and tokenizer_config.json have auto_map" in checkpoint.notes[1]
    assert not marker.exists()


def test_shards_may_be_links_as_in_the_hubs_cache(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_checkpoint(shards=2)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in sorted(folder.iterdir()):
        shutil.move(path, blobs / path.name)
        path.symlink_to(blobs / path.name)
    assert len(open_checkpoint(folder).shards) == 2


def test_index_that_names_a_file_no_file_system_has_is_refused(tmp_path: Path) -> None:
    """Broke: OSError 36, reported as a fault in spile."""
    index = tmp_path / INDEX_NAME
    index.write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(CheckpointError, match="must be plain file names") as caught:
        read_weight_map(index)
    assert len(str(caught.value)) < 1000
