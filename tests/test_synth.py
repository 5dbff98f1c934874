"""Random checkpoints: same seed, same bytes; sane numbers; a working tokenizer; complete or not there."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from reference import Reference
from spile.architectures import open_own
from spile.errors import OptionError, WriteError
from spile.files import writer
from spile.files.checkpoint import open_checkpoint
from spile.making.synth import PRESETS, SynthShape, write_checkpoint
from spile.making.synth_tokenizer import NUM_ADDED, tokenizer_files, write_tokenizer_file

Tiny = Callable[..., Path]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def numbers(folder: Path) -> dict[str, bytes]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name).tobytes() for name in checkpoint.tensors}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tiny_checkpoint: Tiny) -> None:
    first = contents(tiny_checkpoint(seed=3))
    assert contents(tiny_checkpoint(seed=3)) == first
    assert contents(tiny_checkpoint(seed=4))["model.safetensors"] != first["model.safetensors"]


def test_the_number_of_shards_does_not_change_the_model(tiny_checkpoint: Tiny) -> None:
    one, three = tiny_checkpoint(), tiny_checkpoint(shards=3)
    assert numbers(one) == numbers(three)
    assert {path.name for path in three.glob("*.safetensors")} == {
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    }
    sizes = [path.stat().st_size for path in three.glob("*.safetensors")]
    assert max(sizes) < 2 * min(sizes)


def test_every_layer_of_a_model_may_have_a_shard_of_its_own(tiny_checkpoint: Tiny) -> None:
    folder = tiny_checkpoint(num_hidden_layers=1, shards=15)  # a norm, a projection, the embeddings, ...
    assert len(open_checkpoint(folder).shards) == 15
    with pytest.raises(OptionError, match="1 to 15"):
        tiny_checkpoint(num_hidden_layers=1, shards=16)


def test_the_official_reader_reads_what_was_written(tiny_checkpoint: Tiny) -> None:
    safetensors = pytest.importorskip("safetensors")
    folder = tiny_checkpoint()
    ours = open_checkpoint(folder)
    with safetensors.safe_open(folder / "model.safetensors", "np") as official:
        assert set(official.keys()) == set(ours.tensors)
        for name in official.keys():  # noqa: SIM118
            if ours.tensors[name].dtype == "U32":
                np.testing.assert_array_equal(official.get_tensor(name), ours.read(name))


def test_both_forms_hold_the_same_model(tiny_checkpoint: Tiny) -> None:
    ids = np.arange(40) * 7 % 300
    logits = [
        Reference(tiny_checkpoint(group_scales=form, hidden_size=256)).logits(ids) for form in (False, True)
    ]
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-9)


def test_no_code_is_three_and_codes_average_to_zero(tiny_checkpoint: Tiny) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(num_experts=64))
    words = checkpoint.read("model.layers.0.mlp.switch_mlp.up_proj.weight")
    codes = (words[..., None] >> np.arange(0, 32, 2, dtype=np.uint32)) & 3
    shares = np.bincount(codes.reshape(-1), minlength=4) / codes.size
    assert shares[3] == 0
    np.testing.assert_allclose(shares[:3], 1 / 3, atol=0.01)


def test_activations_stay_sane_and_all_experts_are_used(tiny_checkpoint: Tiny) -> None:
    """Twelve layers: logits spread by about 2, no expert left alone."""
    folder = tiny_checkpoint(num_hidden_layers=12, num_experts=16, num_experts_per_tok=4)
    reference = Reference(folder)
    used = np.zeros(16, int)
    moe = reference.moe

    def count(x: np.ndarray, layer: int) -> np.ndarray:
        router = x @ reference.tensors[f"model.layers.{layer}.mlp.gate.weight"].T
        np.add.at(used, np.argsort(-router, axis=-1)[:, :4], 1)
        result = moe(x, layer)
        assert 0.05 < result.std() < 2
        return result

    reference.moe = count  # type: ignore[method-assign]
    logits = reference.logits(np.random.default_rng(0).integers(0, 512, 64))
    assert 1 < logits.std() < 3
    assert used.min() > used.mean() / 4
    assert used.max() < used.mean() * 3


@pytest.mark.parametrize(
    "sizes",
    [
        {"first_k_dense_replace": 2, "intermediate_size": 144},
        {"full_attention_interval": 1},
        {"hidden_size": 192, "moe_intermediate_size": 48, "head_dim": 32},
        {"vocab_size": 70, "num_experts": 2, "num_experts_per_tok": 2},
    ],
)
def test_any_shape_that_packs_is_written(tiny_checkpoint: Tiny, sizes: dict[str, int]) -> None:
    config = open_own(open_checkpoint(tiny_checkpoint(**sizes))).spec
    for name, value in sizes.items():
        assert getattr(config, name, value) == value


# tokenizer


def load_tokenizer(num_entries: int, vocab_size: int, folder: Path) -> tokenizers.Tokenizer:
    files, _ = tokenizer_files(num_entries, vocab_size, 0)
    write_tokenizer_file(folder / "tokenizer.json", files["tokenizer.json"])
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_the_full_size_tokenizer_has_the_real_number_of_entries_and_encodes_english(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(151_643, 151_936, tmp_path)
    assert tokenizer.get_vocab_size(with_added_tokens=False) == 151_643
    assert tokenizer.get_vocab_size() == 151_669
    assert tokenizer.token_to_id("<|endoftext|>") == 151_643
    assert tokenizer.token_to_id("<|im_end|>") == 151_645
    assert tokenizer.token_to_id("<think>") == 151_667
    text = "The river was high after the rain, and the children of the village walked to see the bridge."
    ids = tokenizer.encode(text).ids
    assert 3 < len(text) / len(ids) < 6
    for sample in (text, "naïve café — 日本語 👩\u200d👩\u200d👧 שלום\r\n\n  x=1", "I'll say: <b>it's</b>"):
        assert tokenizer.decode(tokenizer.encode(sample).ids) == sample


def test_every_merge_joins_earlier_entries_and_makes_the_next_one() -> None:
    model = tokenizer_files(5_000, 6_000, 1)[0]["tokenizer.json"]["model"]
    vocab = model["vocab"]
    assert list(vocab.values()) == list(range(5_000))
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ")
        assert vocab[left + right] == 256 + rank
        assert max(vocab[left], vocab[right]) < 256 + rank


def test_the_tiny_tokenizer_is_bytes_and_the_end_of_turn_is_in_both_configs(tiny_checkpoint: Tiny) -> None:
    folder = tiny_checkpoint()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 256 + NUM_ADDED
    assert len(tokenizer.encode("héllo").ids) == 6
    config, generation = (
        json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    assert config["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
    assert generation["eos_token_id"] == [config["eos_token_id"], tokenizer.token_to_id("<|endoftext|>")]


def test_a_vocabulary_without_room_for_bytes_gets_no_tokenizer(tiny_checkpoint: Tiny) -> None:
    for folder in (tiny_checkpoint(vocab_size=256), tiny_checkpoint(tokenizer_entries=0)):
        assert set(contents(folder)) == {"config.json", "model.safetensors"}
        assert open_own(open_checkpoint(folder)).checkpoint.config.get("eos_token_id") is None


def test_a_vocabulary_with_less_room_gets_fewer_entries(tiny_checkpoint: Tiny) -> None:
    folder = tiny_checkpoint(vocab_size=320, tokenizer_entries=10_000)
    assert tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == 320


# refusals; complete or not there


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 100}, {"hidden_size": 0}, {"num_experts": -1}, {"num_experts_per_tok": 9},
        {"head_dim": 2**40}, {"moe_intermediate_size": 24}, {"num_key_value_heads": 3},
        {"full_attention_interval": 0}, {"num_hidden_layers": 10**9}, {"tokenizer_entries": 5},
        {"tokenizer_entries": -1}, {"vocab_size": 0},
    ],
)  # fmt: skip
def test_a_shape_that_no_maple_has_is_an_option_error_by_name(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=next(iter(sizes))):
        write_checkpoint(tmp_path / "made", dataclasses.replace(PRESETS["tiny"], **sizes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("option", "value"), [("seed", -1), ("shards", 0), ("shards", 10_000)])
def test_options_out_of_range_are_refused(tmp_path: Path, option: str, value: int) -> None:
    with pytest.raises(OptionError, match=str(value)):
        write_checkpoint(tmp_path / "made", SynthShape(), **{option: value})  # type: ignore[arg-type]


def test_group_scales_need_whole_groups(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="moe_intermediate_size is 144"):
        write_checkpoint(tmp_path / "made", SynthShape(moe_intermediate_size=144), group_scales=True)


def test_an_existing_folder_is_refused_unless_it_is_empty(tmp_path: Path) -> None:
    taken, empty, file = tmp_path / "taken", tmp_path / "empty", tmp_path / "file"
    taken.mkdir()
    (taken / "mine").touch()
    empty.mkdir()
    file.touch()
    for path in (taken, file):
        with pytest.raises(WriteError, match="exists"):
            write_checkpoint(path, SynthShape())
    write_checkpoint(empty, SynthShape())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "taken"]
    open_checkpoint(empty)


def test_missing_parents_are_made(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a" / "b" / "made", SynthShape())
    open_checkpoint(tmp_path / "a" / "b" / "made")


def test_too_little_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage._replace(free=5_000_000_000))
    with pytest.raises(WriteError, match="needs 5,308 MB, 5,000 MB are free"):
        write_checkpoint(tmp_path / "made", PRESETS["maple-20b"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(5, "Input/output error")])
def test_an_interruption_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise error

    expected = WriteError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        write_checkpoint(tmp_path / "parent" / "made", SynthShape(), progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_second_interruption_does_not_stop_the_cleaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree, impatient = shutil.rmtree, [KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupted(path: Path, ignore_errors: bool = False) -> None:
        if impatient:
            raise impatient.pop()
        rmtree(path, ignore_errors)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer.shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "made", SynthShape(), progress=interrupt)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        target = Path("/proc/nowhere/made")
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        target = tmp_path / "locked" / "made"
    with pytest.raises(WriteError, match="cannot write"):
        write_checkpoint(target, SynthShape())


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_checkpoint(tmp_path / "made", SynthShape(), progress=lambda done, total: seen.append((done, total)))
    done, totals = [one for one, _ in seen], {total for _, total in seen}
    assert done == sorted(done)
    assert totals == {done[-1]}


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    """A run that was killed cannot remove its partial folder; the next one does."""
    child = subprocess.Popen(["true"])
    child.wait()
    gone = tmp_path / f".model.partial-{child.pid}"
    living = tmp_path / f".model.partial-{os.getppid()}"
    others = [tmp_path / f".other.partial-{child.pid}", tmp_path / ".model.partial-x"]
    for folder in (gone, living, *others):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    notes: list[str] = []
    write_checkpoint(tmp_path / "model", PRESETS["tiny"], on_note=notes.append)
    assert notes == [f"removed {gone}, which a run that was killed left behind"]
    assert not gone.exists()
    assert all(folder.exists() for folder in (living, *others))
