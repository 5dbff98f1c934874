"""No value that is not finite goes unnoticed: whatever an answer depends on ends in an error that names it.

Each kind of tensor gets NaN and both infinities, under each residency and instruction set, in a chunk and token by
token. Such values vanish in clamps, in fixed point and in FP16 before any logit shows them.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile import _core
from spile.architectures import open_own
from spile.engines.cpu import engine as engine_module
from spile.engines.cpu.engine import CpuEngine
from spile.errors import CheckpointError, ModelError
from spile.files.checkpoint import open_checkpoint
from spile.making.synth import SynthShape, write_checkpoint
from spile.options import EngineOptions

NAN, INF, MINUS_INF = 0x7FC0, 0x7F80, 0xFF80  # BF16
SHAPE = SynthShape(
    num_hidden_layers=3, first_k_dense_replace=1, num_experts=8, sliding_window=16, full_attention_interval=2
)
IDS = [5, 17, 100, 3, 42, 8]
LAYER, EXPERTS = "model.layers.1.", "model.layers.1.mlp.switch_mlp."
# A tensor of each kind, and the value of it that is damaged: an entry of every expert, of rows that are used.
KINDS = {
    "embedding scales": ("model.word_embeddings.scales", "token"),
    "embedding biases": ("model.word_embeddings.biases", "token"),
    "input norm": (f"{LAYER}input_layernorm.weight", "one"),
    "post norm": (f"{LAYER}post_attention_layernorm.weight", "one"),
    "query norm": (f"{LAYER}self_attn.q_norm.weight", "one"),
    "key norm": (f"{LAYER}self_attn.k_norm.weight", "one"),
    "query alpha": (f"{LAYER}self_attn.q_proj.row_alpha", "one"),
    "key alpha": (f"{LAYER}self_attn.k_proj.row_alpha", "one"),
    "value alpha": (f"{LAYER}self_attn.v_proj.row_alpha", "one"),
    "output alpha": (f"{LAYER}self_attn.o_proj.row_alpha", "one"),
    "router": (f"{LAYER}mlp.gate.weight", "one"),
    "expert gate": (f"{EXPERTS}gate_proj.row_alpha", "expert"),
    "expert up": (f"{EXPERTS}up_proj.row_alpha", "expert"),
    "expert down": (f"{EXPERTS}down_proj.row_alpha", "expert"),
    "dense gate": ("model.layers.0.mlp.gate_proj.row_alpha", "one"),
    "dense up": ("model.layers.0.mlp.up_proj.row_alpha", "one"),
    "dense down": ("model.layers.0.mlp.down_proj.row_alpha", "one"),
    "final norm": ("model.norm.weight", "one"),
    "head scales": ("lm_head.scales", "one"),
    "head biases": ("lm_head.biases", "one"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finite") / "model"
    write_checkpoint(folder, SHAPE, seed=4, flash_head=True)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "model")


def poke(path: Path, name: str, kind: str, bits: int) -> None:
    """Put a BF16 value into a tensor of a shard: one, one of each expert, or one of token 42's row."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    entry = json.loads(data[8 : 8 + size])[name]
    shape, start = entry["shape"], 8 + size + entry["data_offsets"][0]
    if kind == "expert":
        places = [expert * shape[1] + 3 for expert in range(shape[0])]
    else:
        places = [42 * shape[1]] if kind == "token" else [3]
    with path.open("r+b") as file:
        for place in places:
            file.seek(start + 2 * place)
            file.write(bits.to_bytes(2, "little"))


def opened(folder: Path, **options: Any) -> CpuEngine:
    return CpuEngine(open_own(open_checkpoint(folder)), EngineOptions(**options))


def compute(folder: Path, *, chunk: int, **options: Any) -> None:
    engine = opened(folder, prefill_chunk=chunk, **options)
    try:
        state = engine.new_state()
        engine.prefill(state, IDS[:-1])
        engine.decode(state, IDS[-1])
    finally:
        engine.close()


def stream_head(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Plan as if so many rows of the head fit."""
    made_plan = engine_module.make_plan
    monkeypatch.setattr(
        engine_module,
        "make_plan",
        lambda *arguments: engine_module.replace(made_plan(*arguments), num_head_rows=rows),
    )


@pytest.mark.parametrize("bits", [NAN, INF, MINUS_INF], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_value_is_an_error_that_names_its_tensor(
    kind: str, bits: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, where = KINDS[kind]
    poke(folder / "model.safetensors", name, where, bits)
    for options in ({}, {"slots": 4}):
        for chunk in (1, 5):
            for isa in _core.isas():
                monkeypatch.setenv("SPILE_ISA", isa)
                with pytest.raises(CheckpointError, match=rf"{re.escape(name)}.* not finite"):
                    compute(folder, chunk=chunk, **options)


def test_a_sound_model_has_none(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in _core.isas():
        monkeypatch.setenv("SPILE_ISA", isa)
        for options in ({}, {"slots": 4}, {"flash_head": True}, {"kv_bits": 4}, {"kv_bits": 32}):
            compute(made, chunk=5, **options)


@pytest.mark.parametrize("bits", [NAN, INF, MINUS_INF], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("kind", ["scales", "biases"])
def test_a_streamed_head_is_looked_at_too(
    kind: str, bits: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream_head(monkeypatch, 0)
    poke(folder / "model.safetensors", f"lm_head.{kind}", "token", bits)
    with pytest.raises(CheckpointError, match=rf"lm_head\.{kind}' .* not finite at \[42, 0\]"):
        compute(folder, chunk=5, slots=4)


@pytest.mark.parametrize("slots", [None, 4])
@pytest.mark.parametrize("bits", [NAN, INF, MINUS_INF], ids=["nan", "inf", "minus-inf"])
def test_a_centroid_of_the_flash_head_is_named(bits: int, slots: int | None, folder: Path) -> None:
    poke(folder / "model-flashhead.safetensors", "lm_head_flash.centroids.scales", "one", bits)
    compute(folder, chunk=5, slots=slots)
    with pytest.raises(
        CheckpointError, match=r"centroids\.scales' of model-flashhead\.safetensors .* not finite"
    ):
        compute(folder, chunk=5, slots=slots, flash_head=True)


@pytest.mark.parametrize("bits", [NAN, INF, MINUS_INF], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("kv_bits", [32, 16, 8, 4])
def test_keys_and_values_of_any_bits_hide_nothing(
    kv_bits: int, bits: int, made: Path, tmp_path: Path
) -> None:
    for kind in ("key norm", "query norm", "value alpha"):
        folder = shutil.copytree(made, tmp_path / kind)
        name, where = KINDS[kind]
        poke(folder / "model.safetensors", name, where, bits)
        with pytest.raises(CheckpointError, match=re.escape(name)):
            compute(folder, chunk=5, kv_bits=kv_bits)


def test_the_expert_that_was_used_is_named_and_one_that_was_not_is_none_of_the_answers(folder: Path) -> None:
    engine = opened(folder)
    routes: list[list[int]] = []
    engine.on_decode_route = lambda ids: routes.append(ids.tolist())
    state = engine.new_state()
    engine.decode(state, IDS[0])
    first = engine.decode(state, IDS[1]).copy()
    engine.close()
    used = set(routes[0]) | set(routes[2])  # of layer 1
    unused = next(expert for expert in range(8) if expert not in used)
    tensor = open_checkpoint(folder).tensors[f"{EXPERTS}up_proj.row_alpha"]

    def damage(expert: int) -> None:
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(tensor.offset + 2 * (expert * tensor.shape[1] + 9))
            file.write(NAN.to_bytes(2, "little"))

    damage(unused)
    engine = opened(folder)
    state = engine.new_state()
    engine.decode(state, IDS[0])
    np.testing.assert_array_equal(engine.decode(state, IDS[1]), first)
    engine.close()
    damage(max(routes[0]))
    engine = opened(folder)
    with pytest.raises(CheckpointError, match=rf"up_proj\.row_alpha' .* at \[{max(routes[0])}, 9\]"):
        engine.decode(engine.new_state(), IDS[0])
    engine.close()


def test_the_first_token_that_meets_it_ends_and_the_state_is_as_before(folder: Path) -> None:
    poke(folder / "model.safetensors", "model.word_embeddings.scales", "token", NAN)
    engine = opened(folder)
    state = engine.new_state()
    engine.prefill(state, IDS[:4])
    with pytest.raises(CheckpointError, match=r"word_embeddings\.scales' .* at \[42, 0\]"):
        engine.decode(state, 42)
    assert state.position == 4
    found = engine.decode(state, 8).copy()  # the engine is as good as before
    other = engine.new_state()
    engine.prefill(other, IDS[:4])
    np.testing.assert_array_equal(found, engine.decode(other, 8))
    engine.close()


HUGE, LARGE = 0x7F7F, 0x6000  # finite: 3.4e38, 3.7e19


@pytest.mark.parametrize(
    ("kind", "bits", "where"),
    [
        (
            "embedding biases",
            LARGE,
            "layer 0's attention",
        ),  # its square overflows: a norm would make it nothing
        ("query norm", HUGE, "layer 1's attention"),  # a score of minus infinity would count as not seen
        ("expert gate", HUGE, r"layer 1's expert \d"),  # the clamps would hide it
        ("expert up", HUGE, r"layer 1's expert \d"),
        ("expert down", HUGE, r"layer 1's expert \d"),
        ("output alpha", HUGE, "layer 1's attention"),
        ("value alpha", HUGE, "layer 1's attention"),
        ("dense down", HUGE, "layer 0's MLP"),
        ("router", HUGE, "layer 1's router"),
    ],
)
def test_finite_weights_whose_values_overflow_are_an_error_that_names_the_layer(
    kind: str, bits: int, where: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, place = KINDS[kind]
    for sign in (0, 0x8000):
        poke(folder / "model.safetensors", name, place, bits | sign)
        for isa in _core.isas():
            monkeypatch.setenv("SPILE_ISA", isa)
            for chunk in (1, 5):
                with pytest.raises(ModelError, match=rf"^{where} gave a value that is not finite, though"):
                    compute(folder, chunk=chunk)
