"""Experts in every form and under every naming: streamed equals resident, bit for bit, and nothing is guessed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)
pytest.importorskip("mlx_lm", exc_type=ImportError)

from mlx_architectures import Quantization, write_tiny
from mlx_check import VOCABULARY, check, resident_logits, run, streamed_logits
from spile.engines.mlx.adapter import load_lazily
from spile.engines.mlx.banks import Bank
from spile.engines.mlx.experts import find_experts
from spile.engines.mlx.streaming import Streaming
from spile.errors import CheckpointError, OptionError, ReadError, SpileError, UnsupportedModelError
from spile.files.checkpoint import open_checkpoint
from spile.options import EngineOptions
from spile.residency.policy import Policy
from spile.residency.pool import Pool
from spile.residency.store import Store

Weights = dict[str, Any]
FORMS = [
    *(Quantization(bits=bits) for bits in (2, 3, 4, 5, 6, 8)),
    Quantization(bits=4, group_size=64),
    Quantization("mxfp4"),
    Quantization("mxfp8", 8),
    Quantization("nvfp4", 4, 16),
    Quantization(mixed=True),
    None,
]


def assert_exact(name: str, folder: Path) -> None:
    for one in check(folder):
        assert (one.prefill, one.decode) == (True, True), f"{name}, {one.slots} slots"


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_experts_of_every_form_stream_exactly(form: Quantization | None, tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", "qwen3_moe", quantization=form)
    assert_exact(str(form), tmp_path / "m")


@pytest.mark.parametrize("form", [Quantization(), Quantization("mxfp4"), None], ids=str)
def test_experts_with_a_bias_stream_exactly(form: Quantization | None, tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", "gpt_oss", quantization=form)
    assert_exact("gpt_oss", tmp_path / "m")


def test_layers_of_mixed_bits_have_slots_of_their_own_sizes(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", "qwen3_moe", quantization=Quantization(mixed=True))
    checkpoint = open_checkpoint(tmp_path / "m")
    layers = find_experts(load_lazily(checkpoint), checkpoint)
    even, odd = (layer.expert_nbytes for layer in layers[:2])
    assert even < odd, "the odd layers have 8 bits"
    assert len({layer.layout for layer in layers}) == 2


def test_a_config_that_lies_about_the_bits_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_tiny(folder, "qwen3_moe", quantization=Quantization(mixed=True))
    config = json.loads((folder / "config.json").read_text())
    path = "model.layers.1.mlp.switch_mlp.up_proj"
    config["quantization"][path] = {"bits": 4, "group_size": 32, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=re.escape(path)):
        load_lazily(open_checkpoint(folder))


def _unstacked(pattern: str, names: dict[str, str]) -> Callable[[Weights], Weights]:
    """An expert a tensor: `pattern` has layer, expert and projection."""

    def convert(weights: Weights) -> Weights:
        out = {}
        for key, value in weights.items():
            match = re.fullmatch(r"model\.layers\.(\d+)\..*switch_mlp\.(\w+)\.weight", key)
            if match is None:
                out[key] = value
                continue
            for expert in range(value.shape[0]):
                out[pattern.format(layer=match[1], expert=expert, name=names[match[2]])] = value[expert]
        return out

    return convert


def _fused(gate_up: str, down: str, *, transposed: bool = False) -> Callable[[Weights], Weights]:
    """Gate and up in one tensor, [E, 2F, D] or [E, D, 2F]."""

    def convert(weights: Weights) -> Weights:
        out = dict(weights)
        for key in weights:
            match = re.fullmatch(r"(.*)\.(?:switch_mlp|switch_glu|experts)\.gate_proj\.weight", key)
            if match is None:
                continue
            gate = out.pop(key)
            both = mx.concatenate([gate, out.pop(key.replace("gate_proj", "up_proj"))], axis=1)
            last = out.pop(key.replace("gate_proj", "down_proj"))
            if transposed:
                both, last = both.swapaxes(1, 2), last.swapaxes(1, 2)
            out[match[1] + gate_up], out[match[1] + down] = mx.contiguous(both), mx.contiguous(last)
        return out

    return convert


def _interleaved(weights: Weights) -> Weights:
    """gpt-oss as it was published: mxfp4 in blocks of 16 bytes; rows of gate and up take turns, biases too."""
    out = {}
    for key, value in weights.items():
        match = re.fullmatch(r"(.*\.experts)\.(gate|up|down)_proj\.(weight|scales|bias)", key)
        if match is None:
            out[key] = value
            continue
        if match[2] == "up":
            continue
        if match[2] == "gate":
            up = weights[key.replace("gate_proj", "up_proj")]
            value = mx.flatten(mx.stack([value, up], axis=2), 1, 2)
        if match[3] == "weight":
            value = mx.unflatten(value.view(mx.uint8), -1, (-1, 16))
        name = "down_proj" if match[2] == "down" else "gate_up_proj"
        end = {"weight": "_blocks", "scales": "_scales", "bias": "_bias"}[match[3]]
        out[f"{match[1]}.{name}{end}"] = mx.contiguous(value)
    return out


LLAMA_NAMES = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
W_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
NAMINGS = {
    "qwen3_moe": _unstacked("model.layers.{layer}.mlp.experts.{expert}.{name}.weight", LLAMA_NAMES),
    "mixtral": _unstacked("model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight", W_NAMES),
    "jamba": _unstacked("model.layers.{layer}.feed_forward.experts.{expert}.{name}.weight", LLAMA_NAMES),
    "granitemoe": _fused(".input_linear.weight", ".output_linear.weight"),
    "gemma4_text": _fused(".gate_up_proj", ".down_proj"),
    "llama4": _fused(".experts.gate_up_proj", ".experts.down_proj", transposed=True),
    "qwen3_vl_moe": _fused(".experts.gate_up_proj", ".experts.down_proj", transposed=True),
    "gpt_oss": _interleaved,
}


def _rewrite(folder: Path, convert: Callable[[Weights], Weights]) -> list[str]:
    """Rename and reshape a checkpoint's tensors; return the names that it has then."""
    weights: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= mx.load(str(path))
    mx.eval(weights)
    shutil.rmtree(folder / "old", ignore_errors=True)
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    converted = convert(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), converted, metadata={"format": "pt"})
    return list(converted)


@pytest.mark.parametrize("name", NAMINGS)
def test_checkpoints_under_their_publishers_names_stream_exactly(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_tiny(folder, name, quantization=Quantization("mxfp4") if name == "gpt_oss" else None)
    before = set(open_checkpoint(folder).tensors)
    names = _rewrite(folder, NAMINGS[name])
    assert not any("switch_" in tensor for tensor in names)
    assert any(tensor not in before for tensor in names)
    assert_exact(name, folder)


def test_one_by_one_experts_are_read_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_tiny(folder, "qwen3_moe", quantization=None)
    _rewrite(folder, NAMINGS["qwen3_moe"])
    checkpoint = open_checkpoint(folder)
    layer = find_experts(load_lazily(checkpoint), checkpoint)[2]
    for piece in layer.pieces(5):
        tensor = piece.view.tensor
        assert ".2.mlp.experts.5." in tensor.name
        assert piece.place is None
        assert piece.extent[1:] == (tensor.offset, tensor.nbytes)


def test_experts_that_are_computed_at_load_are_refused_by_name(tmp_path: Path, monkeypatch: Any) -> None:
    from mlx_lm.models import qwen3_moe

    folder = tmp_path / "m"
    write_tiny(folder, "qwen3_moe", quantization=None)
    own = qwen3_moe.Model.sanitize

    def sanitize(model: Any, weights: Weights) -> Weights:
        weights = own(model, weights)
        key = "model.layers.1.mlp.switch_mlp.up_proj.weight"
        return {**weights, key: weights[key] * 2}

    monkeypatch.setattr(qwen3_moe.Model, "sanitize", sanitize)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.1\.mlp\.switch_mlp\.up_proj\.weight is computed"
    ):
        find_experts(load_lazily(checkpoint), checkpoint)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bytes_of_an_expert_reach_its_slot_as_they_are(dtype: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_tiny(folder, "qwen3_moe", quantization=None, dtype=dtype)
    checkpoint = open_checkpoint(folder)
    layers = find_experts(load_lazily(checkpoint), checkpoint)
    store = Store(checkpoint.shards, direct=False)
    bank = Bank(layers, 8)
    pool = Pool(bank, store, Policy(len(layers), 8), 3)
    for group, _ in pool.fetch(1, np.array([2, 6], np.int32), np.ones(2, np.int32), order="together"):
        assert list(group) == [2, 6]
    for expert, slot in zip((2, 6), pool.slots_of(1, np.array([2, 6])), strict=True):
        for part, (array, rows) in zip(layers[1].layout, bank.parts, strict=True):
            tensor = checkpoint.read(f"model.layers.1.mlp.switch_mlp.{part.name}")[expert]
            assert rows[slot].tobytes() == tensor.tobytes()
            assert mx.array_equal(
                array[int(slot)].view(mx.uint8).flatten(), mx.array(tensor).view(mx.uint8).flatten()
            )
    store.close()


@pytest.mark.parametrize("num_rows", [1, 80])
def test_a_gather_over_slots_equals_one_over_a_copy(num_rows: int) -> None:
    """Slices and strided views of weights gave wrong numbers in some versions of mlx."""
    weight = mx.random.normal((12, 64, 128)).astype(mx.bfloat16)
    packed, scales, biases = mx.quantize(weight, 32, 4)
    view = [mx.as_strided(array, (20, *array.shape[1:])) for array in (packed, scales, biases)]
    x = mx.random.normal((num_rows, 1, 128)).astype(mx.bfloat16)
    slots = mx.array(np.random.default_rng(0).integers(0, 12, num_rows).astype(np.uint32))
    for is_sorted in (False, True):
        rest = {
            "rhs_indices": slots,
            "transpose": True,
            "group_size": 32,
            "bits": 4,
            "sorted_indices": is_sorted,
        }
        straight = mx.gather_qmm(x, packed, scales, biases, **rest)
        assert mx.array_equal(straight, mx.gather_qmm(x, *view, **rest))


def test_long_decoding_stays_exact_with_slots_for_less_than_a_layer(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_tiny(folder, "qwen3_moe", quantization=Quantization(bits=8))
    ids = np.random.default_rng(7).integers(0, VOCABULARY, 220).tolist()
    chunks = [ids[:40], *([token] for token in ids[40:])]
    expected = resident_logits(folder, chunks=chunks)
    for slots in (1, 2, 16):
        got = streamed_logits(folder, slots=slots, chunks=chunks)
        assert all(map(np.array_equal, expected, got)), f"{slots} slots"


def test_a_failed_read_leaves_nothing_resident_and_the_next_one_works(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_tiny(folder, "qwen3_moe", quantization=Quantization())
    checkpoint = open_checkpoint(folder)
    expected = resident_logits(folder)
    model = load_lazily(checkpoint)
    streaming = Streaming(model, checkpoint, EngineOptions(slots=3), longest=512, num_chosen=2)
    shard = checkpoint.shards[1]
    whole = shard.read_bytes()
    with shard.open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ReadError, match=shard.name):
        run(model)
    with shard.open("r+b") as file:
        file.write(whole)
    assert all(map(np.array_equal, expected, run(model)))
    streaming.close()
    with pytest.raises(SpileError, match="closed"):
        run(model)


def test_a_pool_that_shrinks_and_grows_between_tokens_stays_exact(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_tiny(folder, "qwen3_moe", quantization=Quantization(mixed=True))
    checkpoint = open_checkpoint(folder)
    model = load_lazily(checkpoint)
    options = EngineOptions(memory_bytes=10**10, flash_moe=True, active_experts=4)
    streaming = Streaming(model, checkpoint, options, longest=512, num_chosen=2)
    total, expected = streaming.plan.parts.total, resident_logits(folder)
    for change in (-30_000, 10_000, 10_000_000):
        streaming.resize(total + change)
        assert all(map(np.array_equal, expected, run(model)))
    streaming.lend(50_000)
    assert all(map(np.array_equal, expected, run(model)))
    assert streaming.plan.num_slots == 32, "all of them fit by now"
    streaming.close()


def test_shared_experts_are_read_at_the_start_and_stay(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_tiny(folder, "qwen3_moe", quantization=Quantization())
    checkpoint = open_checkpoint(folder)
    model = load_lazily(checkpoint)
    options = EngineOptions(active_experts=4, shared_experts=2)
    streaming = Streaming(model, checkpoint, options, longest=512, num_chosen=2)
    assert all(map(np.array_equal, resident_logits(folder), run(model)))
    (pool,) = streaming._pools.values()
    for layer in range(4):
        assert (pool.slots_of(layer, np.array([0, 1])) >= 0).all()
    streaming.close()


def test_options_that_contradict_the_model_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_tiny(folder, "qwen3_moe", quantization=Quantization())
    checkpoint = open_checkpoint(folder)
    model = load_lazily(checkpoint)
    with pytest.raises(OptionError, match="active experts must be <= the model's 8"):
        Streaming(model, checkpoint, EngineOptions(active_experts=9), longest=512, num_chosen=2)
