"""A model as data: tensors of every format, what the decoder has no block for, and a second architecture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from spile import cli
from spile.architectures import MODEL_TYPES, foreign, open_model, open_own, qwen3_moe
from spile.architectures.spec import (
    AFFINE4,
    BF16,
    EXPERT,
    TERNARY,
    TERNARY_GROUPS,
    Experts,
    Format,
    Glu,
    OwnModel,
    Slice,
    Weight,
)
from spile.engines import choose_engine
from spile.engines.cpu.blocks import missing_blocks
from spile.errors import CheckpointError, ModelError, UnsupportedModelError
from spile.files.checkpoint import open_checkpoint
from spile.making.convert import convert_folder
from spile.making.synth import PRESETS, write_checkpoint
from spile.options import EngineOptions
from spile.residency.experts import ExpertTable
from spile.residency.plan import make_plan

QWEN3 = dataclasses.replace(
    PRESETS["qwen3-30b-a3b-4bit"],
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    intermediate_size=192,
    vocab_size=512,
    tokenizer_entries=256,
    num_shards=1,
)
CONFIG = QWEN3.config()


@pytest.fixture
def qwen3(tmp_path: Path) -> OwnModel:
    write_checkpoint(tmp_path / "qwen3", QWEN3)
    return open_own(open_checkpoint(tmp_path / "qwen3"))


# formats


@pytest.mark.parametrize(
    ("form", "tensors"),
    [
        (TERNARY, {"weight": ("U32", (4, 16)), "row_alpha": ("BF16", (4,))}),
        (TERNARY_GROUPS, {"weight": ("U32", (4, 16)), "scales": ("BF16", (4, 2)), "biases": ("BF16", (4, 2))}),
        (AFFINE4, {"weight": ("U32", (4, 32)), "scales": ("BF16", (4, 4)), "biases": ("BF16", (4, 4))}),
        (Format("affine", 6, 64), {"weight": ("U32", (4, 48)), "scales": ("BF16", (4, 4)), "biases": ("BF16", (4, 4))}),
        (Format("mxfp4", 4, 32), {"weight": ("U32", (4, 32)), "scales": ("U8", (4, 8))}),
        (BF16, {"weight": ("BF16", (4, 256))}),
    ],
)  # fmt: skip
def test_a_format_says_its_tensors(form: Format, tensors: dict[str, Any]) -> None:
    found = {each.name: (each.dtype, each.shape) for each in Weight("w", form, (4, 256)).tensors()}
    assert found == {f"w.{ending}": value for ending, value in tensors.items()}


def test_a_weight_of_a_fused_tensor_asks_for_all_its_rows() -> None:
    (tensor,) = Weight("qkv", BF16, (4, 64), Slice(4, 1, 12)).tensors()
    assert tensor.shape == (12, 64)


def test_experts_by_themselves_have_tensors_each_and_biases_are_tensors() -> None:
    weight = Weight(f"mlp.{EXPERT}.up", BF16, (2, 8, 64), has_bias=True)
    assert [each.name for each in weight.tensors()] == [
        "mlp.0.up.weight", "mlp.0.up.bias", "mlp.1.up.weight", "mlp.1.up.bias",
    ]  # fmt: skip


# what the decoder has


def test_decoder_has_all_blocks_of_a_packed_maple_and_not_of_its_source() -> None:
    spec = PRESETS["tiny"].spec()
    assert missing_blocks(spec) == ()
    assert missing_blocks(PRESETS["tiny"].spec(group_scales=True)) == ()


def changed(**values: Any) -> tuple[str, ...]:
    """Return what is missing when values of the second layer's attention, experts or router are others."""
    spec = PRESETS["tiny"].spec()
    layer = spec.layers[1]
    ffn = layer.ffn
    assert isinstance(ffn, Experts)
    parts: dict[str, Any] = {"attention": layer.attention, "router": ffn.router, "glu": ffn.glu, "ffn": ffn}
    for key, value in values.items():
        part, field = key.split("__")
        parts[part] = dataclasses.replace(parts[part], **{field: value})
    ffn = dataclasses.replace(parts["ffn"], router=parts["router"], glu=parts["glu"])
    other = dataclasses.replace(layer, attention=parts["attention"], ffn=ffn)
    return missing_blocks(dataclasses.replace(spec, layers=(spec.layers[0], other, *spec.layers[2:])))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"attention__sinks": Weight("s", BF16, (4,))}, "attention sinks"),
        ({"attention__q_norm": None}, "heads without a norm"),
        ({"attention__q_norm": Weight("n", BF16, (256,))}, "heads without a norm"),
        ({"attention__heads": 8}, "several kinds of heads"),
        ({"attention__window": 99}, "several kinds of heads"),
        ({"attention__q": Weight("q", AFFINE4, (256, 128))}, "linear layers in 4-bit affine"),
        ({"attention__q": Weight("q", TERNARY, (256, 128), has_bias=True)}, "linear layers with biases"),
        ({"attention__q": Weight("q", TERNARY, (256, 128), Slice(0, 2, 512))}, "fused"),
        ({"router__is_of_chosen": True}, "routers that weigh the chosen"),
        ({"router__renormalise_eps": None}, "several kinds of experts"),
        ({"glu__limit": 0.0}, "several kinds of experts"),
        ({"glu__activation": "geglu"}, "the activation geglu"),
        ({"ffn__shared": Glu(*[Weight("s", TERNARY, (128, 128))] * 3)}, "shared experts"),
    ],
)
def test_what_the_decoder_lacks_is_named(values: dict[str, Any], named: str) -> None:
    assert named in ", ".join(changed(**values))


def test_other_numbers_than_bf16_are_read_and_not_computed() -> None:
    spec = qwen3_moe.spec(CONFIG, Format("F16"))
    tensors = {each.name: each.dtype for each in spec.tensors()}
    assert tensors["model.norm.weight"] == tensors["lm_head.scales"] == "F16"
    assert {"norms in other numbers than BF16", "a head in 4-bit affine in groups of 64 with F16"} <= {
        *missing_blocks(spec)
    }


# qwen3_moe: one file and one line


def test_real_sizes_of_qwen3_are_those_of_its_files() -> None:
    tensors = list(PRESETS["qwen3-30b-a3b-4bit"].spec().tensors())
    by_name = {each.name: each for each in tensors}
    assert by_name["model.layers.47.mlp.switch_mlp.down_proj.scales"].shape == (128, 2048, 12)
    assert by_name["model.layers.0.mlp.gate.weight"].shape == (128, 512)  # 8 bits
    assert by_name["model.layers.0.self_attn.k_norm.weight"].shape == (128,)


def test_qwen3_is_opened_planned_and_placed_from_its_spec(qwen3: OwnModel) -> None:
    spec, table = qwen3.spec, ExpertTable(qwen3)
    assert spec.model_type in MODEL_TYPES
    assert (spec.num_experts, spec.num_experts_per_tok, spec.num_routed_experts) == (8, 2, 24)
    assert len(table.extents(1, 3)) == 9  # codes, scales and biases of three projections
    assert table.expert_nbytes == 3 * 128 * 64 * 9 // 16  # 4 bits, and two BF16 for 64 of them
    plan = make_plan(qwen3, table, EngineOptions(slots=5))
    assert plan.num_slots == 5
    mapped = make_plan(qwen3, table, EngineOptions())
    assert mapped.parts.experts == 24 * table.expert_nbytes


def test_dense_layers_of_qwen3_are_those_that_the_config_lists_or_steps_over() -> None:
    listed = qwen3_moe.spec(CONFIG | {"mlp_only_layers": [1]})
    assert [listed.is_moe(layer) for layer in range(3)] == [True, False, True]
    stepped = qwen3_moe.spec(CONFIG | {"decoder_sparse_step": 2})
    assert [stepped.is_moe(layer) for layer in range(3)] == [False, True, False]


def test_tied_head_of_qwen3_is_the_embedding(qwen3: OwnModel) -> None:
    tied = qwen3_moe.spec(CONFIG | {"tie_word_embeddings": True})
    assert tied.head == tied.embedding
    assert len(list(tied.tensors())) == len(list(qwen3.spec.tensors())) - 3


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (UnsupportedModelError, {"attention_bias": True}, "attention_bias is True"),
        (UnsupportedModelError, {"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        (UnsupportedModelError, {"norm_topk_prob": False}, "norm_topk_prob"),
        (UnsupportedModelError, {"quantization": {"bits": 7, "group_size": 64}}, "quantization.bits is 7"),
        (UnsupportedModelError, {"quantization": {"bits": 4, "group_size": 48}}, "group_size is 48"),
        (UnsupportedModelError, {"quantization": {"bits": 4, "group_size": 64, "mode": "x"}}, "mode is 'x'"),
        (UnsupportedModelError, {"moe_intermediate_size": 96}, "not a multiple of 64"),
        (CheckpointError, {"quantization": [4]}, "quantization is [4]"),
        (CheckpointError, {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        (CheckpointError, {"mlp_only_layers": [True]}, "mlp_only_layers is [True]"),
        (CheckpointError, {"num_experts_per_tok": 9}, "exceeds num_experts 8"),
    ],
)
def test_a_value_that_qwen3_cannot_have_is_refused_by_name(
    kind: type[ModelError], values: dict[str, Any], named: str
) -> None:
    with pytest.raises(kind) as caught:
        qwen3_moe.spec(CONFIG | values)
    assert named in str(caught.value)


def test_cpu_engine_refuses_qwen3_in_a_sentence_that_says_what_it_lacks(
    qwen3: OwnModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "foreign_types", lambda: frozenset({"qwen3_moe"}))
    assert choose_engine(qwen3, EngineOptions()) == "mlx"
    with pytest.raises(UnsupportedModelError) as caught:
        choose_engine(qwen3, EngineOptions(engine="cpu"))
    assert "'qwen3_moe' yet: it has linear layers in 4-bit affine in groups of 64" in str(caught.value)
    monkeypatch.setattr(foreign, "foreign_types", lambda: frozenset[str]())
    with pytest.raises(UnsupportedModelError, match="does not compute") as caught:
        choose_engine(qwen3, EngineOptions())
    assert "spile[mlx]" in (caught.value.hint or "")


def test_what_the_spec_refuses_goes_to_mlx_lm_where_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "made", QWEN3)
    path = tmp_path / "made" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"norm_topk_prob": False}))
    checkpoint = open_checkpoint(tmp_path / "made")
    monkeypatch.setattr(foreign, "foreign_types", lambda: frozenset({"qwen3_moe"}))
    assert isinstance(open_model(checkpoint), foreign.ForeignModel)
    monkeypatch.setattr(foreign, "foreign_types", lambda: frozenset[str]())
    with pytest.raises(UnsupportedModelError, match="norm_topk_prob is False"):
        open_model(checkpoint)


def test_synth_and_plan_know_the_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--layers 2 --width 128 --heads 4 --head-dim 32 --experts 8 --expert-width 64 --vocab-size 512"
    made = [
        str(tmp_path / "made"),
        "--preset",
        "qwen3-30b-a3b-4bit",
        "--tokenizer-entries",
        "0",
        "--shards",
        "1",
    ]
    assert cli.run(["synth", *made, *sizes.split()]) == 0
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("qwen3_moe", 2)
    monkeypatch.setattr(
        foreign, "foreign_types", lambda: frozenset[str]()
    )  # as where mlx-lm is not installed
    assert cli.run(["plan", made[0]]) == 0
    shown = capsys.readouterr()
    assert "everything fits" in shown.out
    assert "does not compute model_type 'qwen3_moe' yet" in shown.err


def test_source_of_qwen3_is_not_converted(tmp_path: Path) -> None:
    source = {key: value for key, value in CONFIG.items() if not key.startswith("quantization")}
    assert {weight.format for weight in qwen3_moe.spec(source, stacked=False).weights()} == {BF16}
    write_checkpoint(tmp_path / "made", QWEN3)
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        convert_folder(tmp_path / "made", tmp_path / "other")
