"""Maple on the mlx engine: against independent logits, against the cpu engine, and streamed against resident."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("mlx_lm", exc_type=ImportError)

import mlx.core as mx

import spile
import spile.mlx
from reference import Reference
from spile.architectures import open_model
from spile.engines import open_engine
from spile.engines.base import Engine
from spile.engines.mlx.adapter import load_lazily, make_cache, switch_layers
from spile.errors import CheckpointError, ModelError, SpileError, UnsupportedModelError
from spile.files.checkpoint import open_checkpoint
from spile.making.synth import SynthShape, write_checkpoint
from spile.options import EngineOptions

# Measured 2.8e-5 with float32 activations; what the cpu engine is allowed, whose activations are 16-bit.
TOLERANCE = 8e-3
SHAPE = SynthShape(num_hidden_layers=3, full_attention_interval=3, tokenizer_entries=0)
IDS = np.random.default_rng(3).integers(0, SHAPE.vocab_size, 40).tolist()  # past the window of 16
Tiny = Callable[..., Path]


def opened(folder: Path, **options: Any) -> Engine:
    return open_engine(open_model(open_checkpoint(folder)), EngineOptions(**{"engine": "mlx", **options}))


def logits(
    folder: Path, ids: Sequence[int] = IDS, num_decoded: int = 6, **options: Any
) -> NDArray[np.float32]:
    """Logits of a prompt, a chunk at a time, and of the last tokens one by one: [T, V]."""
    engine = opened(folder, **options)
    state = engine.new_state()
    rows = [engine.logits(state, ids[: len(ids) - num_decoded])]
    rows += [engine.decode(state, token)[None].copy() for token in ids[len(ids) - num_decoded :]]
    engine.close()
    return np.concatenate(rows)


def report(name: str, found: NDArray[Any], wanted: NDArray[Any]) -> float:
    difference = np.abs(found - wanted)
    same = int((found.argmax(-1) == wanted.argmax(-1)).sum())
    print(
        f"{name}: largest difference {difference.max():.1e}, mean {difference.mean():.1e}, "
        f"same choice at {same} of {len(found)} positions"
    )
    return float(difference.max())


# -- the arithmetic --


@pytest.mark.parametrize("n", [5, 60])
def test_float32_activations_give_the_golden_logits(n: int, golden: Path) -> None:
    wanted, ids = np.load(golden / f"logits_{n}.npy"), np.load(golden / f"ids{n}.npy").tolist()
    for num_decoded, chunk in ((0, 64), (3, 7), (n - 1, 64)):
        found = logits(golden / "mlx-2bit", ids, num_decoded, activation_bytes=3, prefill_chunk=chunk)
        assert report(f"{n} tokens, {num_decoded} one by one, float32", found, wanted) < TOLERANCE
        np.testing.assert_array_equal(found.argmax(-1), wanted.argmax(-1))


def test_bf16_activations_differ_by_much_on_a_touchy_model_but_not_on_most_logits(golden: Path) -> None:
    wanted, ids = np.load(golden / "logits_60.npy"), np.load(golden / "ids60.npy").tolist()
    found = logits(golden / "mlx-2bit", ids, 0)
    report("60 tokens, BF16", found, wanted)  # 7.4, mean 0.25, when the logits spread by 2.3
    assert np.isfinite(found).all()
    assert np.abs(found - wanted).mean() < 0.5


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"first_k_dense_replace": 1, "intermediate_size": 192},
        {"full_attention_interval": 1},
        {"moe_intermediate_size": 64, "partial_rotary_factor": 0.25},
        {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 32},
    ],
)
def test_float32_activations_are_within_rounding_of_a_float64_reference(
    sizes: dict[str, Any], tiny_checkpoint: Tiny
) -> None:
    folder = tiny_checkpoint(**dataclasses.asdict(SHAPE) | sizes)
    found = logits(folder, activation_bytes=3)
    assert report(str(sizes), found, Reference(folder).logits(IDS)) < 1e-4


def test_group_scales_give_the_bits_of_row_alphas(tiny_checkpoint: Tiny) -> None:
    sizes = dataclasses.asdict(SHAPE)
    np.testing.assert_array_equal(
        logits(tiny_checkpoint(**sizes)), logits(tiny_checkpoint(**sizes, group_scales=True))
    )


def test_absent_layer_types_mean_full_attention_without_positions(tiny_checkpoint: Tiny) -> None:
    folder = tiny_checkpoint(**dataclasses.asdict(SHAPE))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"], config["sliding_window"]
    path.write_text(json.dumps(config))
    assert report("all full", logits(folder, activation_bytes=3), Reference(folder).logits(IDS)) < 1e-4


def test_both_engines_agree_on_the_demo_model() -> None:
    from spile.files.hub import resolve

    ids = np.random.default_rng(0).integers(0, 4096, 136).tolist()  # past the window of 128
    precise = logits(resolve(None), ids, 4, engine="cpu", kv_bits=32, activation_bytes=3)
    assert report("demo, float32", logits(resolve(None), ids, 4, activation_bytes=3), precise) < 1e-3
    found = logits(resolve(None), ids[:40], 0)
    report("demo, BF16", found, precise[:40])
    assert (found.argmax(-1) == precise[:40].argmax(-1)).mean() > 0.7


# -- streamed equals resident --


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("maple") / "model"
    write_checkpoint(folder, SHAPE, seed=1, shards=2)
    return folder


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_streamed_logits_are_the_resident_ones_at_the_same_chunks(chunk: int, model: Path) -> None:
    wanted = logits(model, prefill_chunk=chunk)
    for slots in (2, 5, 24):
        np.testing.assert_array_equal(logits(model, slots=slots, prefill_chunk=chunk), wanted)


def test_streamed_logits_are_those_of_the_plain_module(model: Path) -> None:
    whole = load_lazily(open_checkpoint(model))
    caches = make_cache(whole)
    rows = [np.array(whole(mx.array([IDS[:34]]), cache=caches).astype(mx.float32))[0]]
    rows += [np.array(whole(mx.array([[t]]), cache=caches).astype(mx.float32))[0] for t in IDS[34:]]
    np.testing.assert_array_equal(logits(model, slots=4, prefill_chunk=64), np.concatenate(rows))


def test_an_expert_layer_is_mlx_lms_own_with_clamps(model: Path) -> None:
    layer = load_lazily(open_checkpoint(model)).layers[0].mlp.switch_mlp
    assert type(layer) is switch_layers().SwitchGLU
    gate, up = mx.array([-9.0, 0.5, 9.0]), mx.array([9.0, -9.0, 2.0])
    low, middle, high = (np.float32(x / (1 + np.exp(-x))) for x in (-9.0, 0.5, 7.0))
    np.testing.assert_allclose(
        np.array(layer.activation(up, gate)), [low * 7, middle * -7, high * 2], rtol=1e-5
    )


# -- what it loads and what it refuses --


def test_code_in_the_folder_is_never_run(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "maple.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "maple.py"}))
    np.testing.assert_array_equal(logits(folder), logits(model))
    assert not (tmp_path / "ran").exists()


def test_mlx_lm_loads_a_maple_after_register(model: Path) -> None:
    from mlx_lm.utils import load_model

    spile.mlx.register()
    loaded, _ = load_model(model)
    found = np.array(loaded(mx.array([IDS[:34]])).astype(mx.float32))[0]
    np.testing.assert_array_equal(found, logits(model, prefill_chunk=64)[:34])


def test_the_unquantized_source_is_refused_with_what_to_do(golden_bf16: Path) -> None:
    with pytest.raises(SpileError) as refusal:
        logits(golden_bf16)
    assert "spile convert" in (refusal.value.hint or "")


def test_a_width_that_mlx_cannot_group_is_refused_by_name(tiny_checkpoint: Tiny) -> None:
    folder = tiny_checkpoint(**dataclasses.asdict(SHAPE) | {"moe_intermediate_size": 48})
    with pytest.raises(UnsupportedModelError, match="48 inputs") as refusal:
        logits(folder)
    assert "cpu engine" in (refusal.value.hint or "")


# -- the clustered head --


def test_the_clustered_head_gives_logits_to_the_tokens_that_the_cpu_engine_gives(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, vocab_size=1024)
    write_checkpoint(tmp_path / "model", shape, seed=2, flash_head=True)
    exact = logits(tmp_path / "model", activation_bytes=3)
    options = {"flash_head": True, "activation_bytes": 3}
    found = logits(tmp_path / "model", **options)
    wanted = logits(tmp_path / "model", engine="cpu", kv_bits=32, **options)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
    has_logit = np.isfinite(found)
    assert 0 < has_logit.sum(axis=1).max() < shape.vocab_size / 4
    np.testing.assert_array_equal(found[has_logit], exact[has_logit])
    np.testing.assert_array_equal(logits(tmp_path / "model", slots=4, **options), found)


def test_the_clustered_head_is_announced(tmp_path: Path, model: Path) -> None:
    write_checkpoint(tmp_path / "model", SHAPE, flash_head=True)
    engine = opened(tmp_path / "model", flash_head=True)
    assert not engine.exact
    assert any("best of 16 clusters" in note for note in engine.notes)
    assert "approximate" in engine.summary()
    engine.close()
    with pytest.raises(UnsupportedModelError, match="has no clustered head"):
        opened(model, flash_head=True)


def test_clusters_of_equal_scores_are_taken_in_order(tmp_path: Path) -> None:
    from spile.architectures.flash_head import open_flash_head
    from spile.engines.mlx.flash_head import use_flash_head

    write_checkpoint(tmp_path / "model", SHAPE, flash_head=True)
    checkpoint = open_checkpoint(tmp_path / "model")
    flash = open_flash_head(checkpoint, vocab_size=SHAPE.vocab_size, hidden_size=SHAPE.hidden_size)
    whole = load_lazily(checkpoint)
    use_flash_head(whole, dataclasses.replace(flash, num_probes=5))
    scores = np.zeros((1, flash.num_clusters), np.float32)
    scores[0, [9, 3]] = 1
    ids = np.array(whole.lm_head._choose(mx.array(scores))).reshape(5, -1)
    token_map = flash.read_token_map(SHAPE.vocab_size)
    np.testing.assert_array_equal(ids, token_map[[3, 9, 0, 1, 2]])


@pytest.mark.parametrize("slots", [None, 4])
@pytest.mark.parametrize("bits", [0x7FC0, 0x7F80, 0xFF80], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize(
    "name",
    [
        "model.word_embeddings.scales",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.self_attn.k_norm.weight",
        "model.layers.1.self_attn.q_proj.row_alpha",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.switch_mlp.gate_proj.row_alpha",
        "model.layers.1.mlp.switch_mlp.up_proj.row_alpha",
        "model.layers.1.mlp.switch_mlp.down_proj.row_alpha",
        "model.norm.weight",
        "lm_head.biases",
    ],
)
def test_a_value_that_is_not_finite_is_an_error_that_names_its_layer(
    name: str, bits: int, slots: int | None, golden: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(golden / "mlx-2bit", tmp_path / "model", copy_function=shutil.copyfile)
    tensor = open_checkpoint(folder).tensors[name]
    experts = tensor.shape[0] if "switch_mlp" in name else 1
    with (folder / "model.safetensors").open("r+b") as file:
        for expert in range(experts):
            file.seek(tensor.offset + 2 * (expert * tensor.shape[-1] + 1))
            file.write(bits.to_bytes(2, "little"))
    where = name.rsplit(".", 2)[0].replace("self_attn.q_proj", "self_attn.qkv_proj")
    with (
        pytest.raises(CheckpointError, match=rf"^{where}.* not finite$"),
        closing(opened(folder, slots=slots)) as engine,
    ):
        engine.decode(engine.new_state(), 3)


def test_values_that_overflow_are_an_error_on_the_way_to_the_logits(golden: Path, tmp_path: Path) -> None:
    """Finite weights whose products are not: a clamp, a norm or a softmax would make them finite again."""
    for kind in ("mlp.switch_mlp.gate_proj.row_alpha", "mlp.switch_mlp.up_proj.row_alpha", "mlp.gate.weight"):
        folder = shutil.copytree(golden / "mlx-2bit", tmp_path / kind, copy_function=shutil.copyfile)
        tensor = open_checkpoint(folder).tensors[f"model.layers.1.{kind}"]
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(tensor.offset)
            file.write(b"\x7f\x7f" * (tensor.nbytes // 2))
        with pytest.raises(ModelError, match="logits are not finite"), closing(opened(folder)) as engine:
            engine.decode(engine.new_state(), 3)
