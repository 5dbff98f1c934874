"""BF16 -> 2 bits: the rule for a row, the rule for a group, and a folder that is complete or not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from spile.architectures import open_own
from spile.architectures.spec import TERNARY
from spile.errors import CheckpointError, UnsupportedModelError, WriteError
from spile.files import writer
from spile.files.checkpoint import open_checkpoint
from spile.making import convert
from spile.making.convert import convert_folder, pack, quantize_affine4, ternarize
from spile.residency.experts import decode_bf16, encode_bf16


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def dequantize4(words: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> np.ndarray:
    codes = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    codes = codes.reshape(*scales.shape, 64).astype(np.float32)
    return (codes * decode_bf16(scales)[..., None] + decode_bf16(biases)[..., None]).reshape(
        scales.shape[0], -1
    )


# a ternary row


def test_weights_above_the_threshold_keep_their_sign_and_alpha_is_their_mean() -> None:
    # mean |w| = 1.0, threshold 0.7: 0.75, -1.25 and 2.0 survive, their mean is 4/3
    codes, alpha = ternarize(row(0.75, -1.25, 2.0, 0.0, 0.0, 2.0, -0.5, -1.5))
    assert codes.tolist() == [[2, 0, 2, 1, 1, 2, 1, 0]]
    assert decode_bf16(alpha).tolist() == [1.5]


def test_a_weight_at_the_threshold_does_not_survive() -> None:
    weights = np.full((1, 10), 0.7, np.float32)
    weights[0, 0] = np.float32(0.7) * 10 - np.float32(0.7) * 8.3
    mean = np.float32(np.abs(weights).sum(dtype=np.float64) / 10)
    weights[0, 1] = np.float32(0.7) * mean
    codes, _ = ternarize(weights)
    threshold = np.float32(0.7) * np.float32(np.abs(weights).sum(dtype=np.float64) / 10)
    assert (codes[0] == np.where(weights[0] > threshold, 2, 1)).all()


def test_alpha_is_rounded_once_to_bf16() -> None:
    _, alpha = ternarize(row(1.0, 1.0078125))  # their mean lies halfway between two BF16 values: to even
    assert decode_bf16(alpha).tolist() == [1.0]


def test_a_row_of_zeros_has_alpha_zero() -> None:
    codes, alpha = ternarize(np.zeros((2, 16), np.float32))
    assert (codes == 1).all()
    assert alpha.tolist() == [0, 0]


def test_a_ternary_row_is_kept_exactly() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, (64, 2048), dtype=np.uint8)
    alpha = encode_bf16(rng.uniform(0.01, 2, 64).astype(np.float32))
    rows = (codes.astype(np.float32) - 1) * decode_bf16(alpha)[:, None]
    found_codes, found_alpha = ternarize(rows)
    np.testing.assert_array_equal(found_codes, codes)
    np.testing.assert_array_equal(found_alpha, alpha)


def test_codes_are_packed_lowest_bits_first() -> None:
    assert pack(np.array([[2, 0, 1] + [0] * 12 + [2]], np.uint8), 2).tolist() == [[0x80000012]]
    assert pack(np.array([[1, 2, 3, 4, 5, 6, 7, 15]], np.uint8), 4).tolist() == [[0xF7654321]]


# a 4-bit group


def mlx_group(group: np.ndarray) -> tuple[list[int], float, float]:
    """MLX's algorithm for one group, a value at a time, in float32. Source: mlx/backend/cpu/quantized.cpp."""
    f = np.float32
    low, high = f(group.min()), f(group.max())
    scale = max(f((high - low) / f(15)), f(1e-7))
    scale = scale if abs(low) > abs(high) else f(-scale)
    edge = low if abs(low) > abs(high) else high
    steps, bias = f(np.rint(f(edge / scale))), f(0)
    if steps != 0:
        scale, bias = f(edge / steps), edge
    codes = [int(min(max(np.rint(f(f(w - bias) / scale)), 0), 15)) for w in group]
    return codes, float(scale), float(bias)


def test_groups_are_quantized_as_mlx_does() -> None:
    rng = np.random.default_rng(1)
    rows = decode_bf16(encode_bf16(rng.normal(0, 0.02, (8, 192)).astype(np.float32)))
    rows[0] += 1  # far from zero
    rows[1] *= 1e-6
    rows[2, :64] = 0.0
    rows[3, :64] = 0.5
    words, scales, biases = quantize_affine4(rows)
    for group in range(24):
        codes, scale, bias = mlx_group(rows.reshape(24, 64)[group])
        assert scales.reshape(24)[group] == encode_bf16(np.array([scale], np.float32))[0]
        assert biases.reshape(24)[group] == encode_bf16(np.array([bias], np.float32))[0]
        assert words.reshape(24, 8)[group].tolist() == pack(np.array([codes], np.uint8), 4)[0].tolist()


@pytest.mark.parametrize(("step", "low"), [(0.25, -2.0), (0.0625, -0.3125), (0.37109375, 0.0), (-0.75, 3.0)])
@pytest.mark.parametrize("num_levels", [2, 3, 12, 15, 16])
def test_a_group_on_sixteen_levels_keeps_its_numbers(step: float, low: float, num_levels: int) -> None:
    levels = np.random.default_rng(2).integers(0, num_levels, (4, 64))
    levels[:, :2] = [0, num_levels - 1]
    rows = decode_bf16(encode_bf16((low + step * levels).astype(np.float32)))
    if step != 0.37109375 or num_levels < 4:  # else these levels are no BF16 numbers, so no even steps
        assert (rows == low + step * levels).all()
        np.testing.assert_array_equal(dequantize4(*quantize_affine4(rows)), rows)


# a folder


def test_the_golden_source_becomes_the_golden_model_byte_for_byte(
    golden: Path, golden_bf16: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    convert_folder(golden_bf16, tmp_path / "made", progress=lambda done, total: seen.append((done, total)))
    assert (tmp_path / "made" / "model.safetensors").read_bytes() == (
        golden / "mlx-2bit" / "model.safetensors"
    ).read_bytes()
    made, wanted = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "made", golden / "mlx-2bit")
    )
    assert made == wanted
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (golden_bf16 / name).read_bytes()
    done, totals = [one for one, _ in seen], {total for _, total in seen}
    assert done == sorted(done)
    assert totals == {done[-1]}


def test_pieces_of_rows_and_several_shards_give_the_same_numbers(
    golden: Path, golden_bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_PIECE_VALUES", 1000)
    monkeypatch.setattr(convert, "_LARGEST_SHARD_NBYTES", 250_000)  # cuts between weights and their alphas
    convert_folder(golden_bf16, tmp_path / "made")
    made, wanted = open_checkpoint(tmp_path / "made"), open_checkpoint(golden / "mlx-2bit")
    assert len(made.shards) == 3
    for name in wanted.tensors:
        np.testing.assert_array_equal(made.read(name), wanted.read(name))


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def test_a_source_that_names_no_model_type_gets_one_and_no_code_is_copied(
    golden_bf16: Path, tmp_path: Path
) -> None:
    source = copy(golden_bf16, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["model_type"]
    config |= {"auto_map": {"AutoModel": "evil.Model"}, "model_file": "evil.py"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "evil.py").write_text("raise SystemExit")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    convert_folder(source, tmp_path / "made")
    model = open_own(open_checkpoint(tmp_path / "made"))
    assert model.spec.attention.q.format == TERNARY
    assert model.checkpoint.config["model_type"] == "maple"
    assert model.checkpoint.notes == ()
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


def test_a_quantized_source_is_refused(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        convert_folder(golden / "mlx-2bit", tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bits", [b"\x80\x7f", b"\xc0\xff", b"\x7f\x7f"])
def test_a_weight_that_is_not_finite_is_refused_and_leaves_nothing(
    golden_bf16: Path, tmp_path: Path, bits: bytes
) -> None:
    source = copy(golden_bf16, tmp_path / "source")
    tensor = open_checkpoint(source).tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(tensor.offset + 2 * 128 * 7)
        file.write(bits)
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight of .*: row 7 is not finite"):
        convert_folder(source, tmp_path / "made")
    assert list(tmp_path.iterdir()) == [source]


def test_an_existing_destination_is_refused_and_kept(golden_bf16: Path, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").write_text("mine")
    with pytest.raises(WriteError, match="not empty"):
        convert_folder(golden_bf16, tmp_path / "made")
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "mine"]


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_nothing(
    golden_bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    pwrite = writer.os.pwrite

    def full(file: int, data: memoryview, offset: int) -> int:
        nonlocal written
        if written > 300_000:
            raise OSError(28, "No space left on device")
        written += len(data)
        return pwrite(file, data, offset)

    monkeypatch.setattr(writer.os, "pwrite", full)
    with pytest.raises(WriteError, match="the disk is full"):
        convert_folder(golden_bf16, tmp_path / "parent" / "made")
    assert list(tmp_path.iterdir()) == []
