"""Digests: every kind of damage is named, every kind of reference is used, and nothing is claimed without
one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from spile.errors import CheckpointError, ReadError, WriteError
from spile.files import digests
from spile.files.checkpoint import open_checkpoint
from spile.files.digests import check_files, describe, record_files, records_folder
from spile.files.hub import resolve
from spile.making.convert import convert_folder
from spile.making.synth import SynthShape, write_checkpoint

EXPERT = "model.layers.1.mlp.switch_mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = SynthShape(num_hidden_layers=2, hidden_size=64, moe_intermediate_size=64, vocab_size=300)
    write_checkpoint(tmp_path / "model", shape, shards=2)
    return tmp_path / "model"


def flip(folder: Path, name: str, part: int = 0, parts: int = 1) -> None:
    """Flip one bit in the middle of a tensor, or of one of its parts."""
    checkpoint = open_checkpoint(folder)
    tensor = checkpoint.tensors[name]
    at = tensor.offset + (2 * part + 1) * tensor.nbytes // (2 * parts)
    with checkpoint.shards[tensor.shard].open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def test_first_check_records_and_says_that_it_compared_nothing(folder: Path, cache: Path) -> None:
    check = check_files(open_checkpoint(folder))
    assert check.ok
    assert check.compared_with == ()
    assert check.recorded_in is not None
    assert Path(check.recorded_in).is_relative_to(cache)
    assert "recorded, not compared" in describe(check)[0]


def test_second_check_compares(folder: Path) -> None:
    check_files(open_checkpoint(folder))
    seen: list[tuple[int, int]] = []
    check = check_files(open_checkpoint(folder), on_progress=lambda done, total: seen.append((done, total)))
    assert check.ok
    assert len(check.compared_with) == 1
    assert max(seen) == (check.nbytes, check.nbytes)


def test_one_bit_in_one_expert_is_found_and_named(folder: Path) -> None:
    record_files(open_checkpoint(folder))
    flip(folder, EXPERT, 5, 8)
    for _ in range(2):  # a damaged model is never recorded as a good one
        check = check_files(open_checkpoint(folder))
        assert not check.ok
        assert check.damaged == (f"{EXPERT}, expert 5",)
    assert any("--record" in line for line in describe(check))


@pytest.mark.parametrize(
    "name", ["lm_head.scales", "model.norm.weight", f"{EXPERT.removesuffix('weight')}row_alpha"]
)
def test_one_bit_in_any_other_tensor_is_found(name: str, folder: Path) -> None:
    record_files(open_checkpoint(folder))
    flip(folder, name)
    assert check_files(open_checkpoint(folder)).damaged == (name,)


def test_changed_config_is_found(folder: Path) -> None:
    record_files(open_checkpoint(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert check_files(open_checkpoint(folder)).damaged == ("config.json",)


def test_copy_is_compared_with_the_original(folder: Path, tmp_path: Path) -> None:
    record_files(open_checkpoint(folder))
    shutil.copytree(folder, tmp_path / "copy")
    assert check_files(open_checkpoint(tmp_path / "copy")).compared_with
    flip(tmp_path / "copy", EXPERT)
    assert not check_files(open_checkpoint(tmp_path / "copy")).ok
    assert check_files(open_checkpoint(folder)).ok


def test_other_model_of_the_same_shape_is_no_damage(folder: Path, tmp_path: Path) -> None:
    record_files(open_checkpoint(folder))
    shape = SynthShape(num_hidden_layers=2, hidden_size=64, moe_intermediate_size=64, vocab_size=300)
    write_checkpoint(tmp_path / "other", shape, seed=1)
    check = check_files(open_checkpoint(tmp_path / "other"))
    assert check.ok
    assert check.compared_with == ()
    assert check_files(open_checkpoint(tmp_path / "other")).compared_with
    assert check_files(open_checkpoint(folder)).compared_with


def test_other_model_in_the_recorded_folder_is_reported(folder: Path) -> None:
    record_files(open_checkpoint(folder))
    shutil.rmtree(folder)
    shape = SynthShape(num_hidden_layers=2, hidden_size=64, moe_intermediate_size=64, vocab_size=300)
    write_checkpoint(folder, shape, seed=1)
    assert not check_files(open_checkpoint(folder)).ok
    assert check_files(open_checkpoint(folder), record=True).ok
    assert check_files(open_checkpoint(folder)).compared_with


def test_manifest_travels_with_the_model(folder: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    assert check_files(open_checkpoint(folder), manifest=manifest).recorded_in == str(manifest)
    assert check_files(open_checkpoint(folder), manifest=manifest).compared_with
    flip(folder, EXPERT, 2, 8)
    assert check_files(open_checkpoint(folder), manifest=manifest).damaged == (f"{EXPERT}, expert 2",)
    assert not records_folder().exists()


def test_manifest_of_another_model_is_refused(folder: Path, golden: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    check_files(open_checkpoint(golden / "mlx-2bit"), manifest=manifest)
    with pytest.raises(CheckpointError, match="holds no digests"):
        check_files(open_checkpoint(folder), manifest=manifest)


def test_manifest_that_cannot_be_written_is_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot be written"):
        check_files(open_checkpoint(folder), manifest=tmp_path / "file" / "manifest.json")


def test_cache_that_cannot_be_written_is_only_noted(folder: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    check = check_files(open_checkpoint(folder))
    assert check.ok
    assert check.recorded_in is None
    assert "not recorded" in check.notes[0]


def test_hub_file_is_compared_with_the_hash_in_its_name(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "main"
    shutil.copytree(folder, snapshot)
    blobs.mkdir()
    for shard in snapshot.glob("*.safetensors"):
        name = hashlib.sha256(shard.read_bytes()).hexdigest()
        os.rename(shard, blobs / name)
        shard.symlink_to(Path("..", "..", "blobs", name))
    check = check_files(open_checkpoint(snapshot))
    assert check.ok
    assert "2 of 2 shards" in check.compared_with[0]
    shutil.rmtree(records_folder())
    flip(snapshot, EXPERT)
    check = check_files(open_checkpoint(snapshot))
    assert len(check.damaged) == 1
    assert "SHA-256" in check.damaged[0]
    assert check.recorded_in is None


def test_shipped_record_serves_like_one_of_ones_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_files(open_checkpoint(folder))
    os.rename(records_folder(), tmp_path / "shipped")
    monkeypatch.setattr(digests, "SHIPPED_RECORDS", tmp_path / "shipped")
    flip(folder, EXPERT)
    check = check_files(open_checkpoint(folder))
    assert not check.ok
    assert "shipped with spile" in check.compared_with[0]


def test_damaged_record_is_made_again_and_said(folder: Path) -> None:
    record_files(open_checkpoint(folder))
    (path,) = records_folder().iterdir()
    for text in (
        "",
        "[]",
        "{}",
        path.read_text()[:100],
        path.read_text().replace('"format":1', '"format":0'),
    ):
        path.write_text(text)
        check = check_files(open_checkpoint(folder))
        assert check.compared_with == ()
        assert "was made again" in check.notes[0]
        assert len(check.notes) == 1


def test_shard_cut_short_meanwhile_is_an_error(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    path = checkpoint.shards[1]
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(ReadError, match="wanted"):
        check_files(checkpoint)


def test_golden_model_is_the_recorded_one(golden: Path) -> None:
    check = check_files(open_checkpoint(golden / "mlx-2bit"))
    assert check.ok
    assert "shipped with spile" in check.compared_with[0]


def test_demo_model_is_the_recorded_one() -> None:
    check = check_files(open_checkpoint(resolve(None)))
    assert check.ok
    assert "shipped with spile" in check.compared_with[0]


def test_config_of_a_copy_may_differ_and_is_only_noted(folder: Path, tmp_path: Path) -> None:
    """Broke: `convert` of the golden source, then `verify`, said DAMAGED for a config.json written otherwise."""
    record_files(open_checkpoint(folder))
    shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config, indent=3))
    check = check_files(open_checkpoint(tmp_path / "copy"))
    assert check.ok
    assert "config.json differs" in check.notes[0]


def test_converted_golden_source_is_the_shipped_model(golden_bf16: Path, tmp_path: Path) -> None:
    convert_folder(golden_bf16, tmp_path / "packed")
    check = check_files(open_checkpoint(tmp_path / "packed"))
    assert check.ok
    assert "shipped with spile" in check.compared_with[0]
    record_files(open_checkpoint(tmp_path / "packed"))  # now its own config counts again
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    (tmp_path / "packed" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert check_files(open_checkpoint(tmp_path / "packed")).damaged == ("config.json",)


def test_manifest_that_is_no_file_is_refused(folder: Path, tmp_path: Path) -> None:
    """Broke: /dev/full was read without end, and --record would have replaced it."""
    os.mkfifo(tmp_path / "fifo")
    for path in (Path("/dev/full"), tmp_path / "fifo", tmp_path):
        for record in (False, True):
            with pytest.raises(CheckpointError, match="is not a regular file"):
                check_files(open_checkpoint(folder), manifest=path, record=record)


def test_manifest_of_absurd_size_is_refused(folder: Path, tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(digests.LARGEST_RECORD_NBYTES + 1)
    with pytest.raises(CheckpointError, match="is larger than"):
        check_files(open_checkpoint(folder), manifest=tmp_path / "manifest.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format":1,"key":"x","records":[{"folder":"","recorded":"","digests":[]}]}']
)
def test_damaged_manifest_is_refused(text: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest.json (is|holds)"):
        check_files(open_checkpoint(folder), manifest=tmp_path / "manifest.json")


def test_folder_of_a_manifest_is_not_made(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="there is no folder"):
        check_files(open_checkpoint(folder), manifest=tmp_path / "nope" / "x")
    assert not (tmp_path / "nope").exists()
