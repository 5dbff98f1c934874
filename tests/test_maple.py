"""What makes a checkpoint a Maple: values, names, dtypes and shapes, each contradiction named."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spile.architectures import open_model, open_own
from spile.architectures.maple import spec as spec_of
from spile.architectures.spec import BF16, TERNARY, TERNARY_GROUPS, Format, OwnModel, Rope
from spile.errors import CheckpointError, ModelError, UnsupportedModelError
from spile.files.checkpoint import open_checkpoint
from spile.files.writer import ShardWriter, Spec
from spile.making.synth import PRESETS

Tiny = Callable[..., Path]
CONFIG = PRESETS["tiny"].config()


def edit(folder: Path, **values: Any) -> Path:
    """Change keys of a folder's config; None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def rewrite(folder: Path, change: Callable[[list[Spec]], list[Spec]]) -> Path:
    """Write the folder's single shard anew, zeros in it, with its tensors changed."""
    tensors = open_checkpoint(folder).tensors
    specs = change([Spec(each.name, each.dtype, each.shape) for each in tensors.values()])
    (folder / "model.safetensors").unlink()
    with ShardWriter(folder / "model.safetensors", specs) as shard:
        for spec in specs:
            shard.write(spec.name, 0, bytes(spec.nbytes))
    return folder


def open_folder(folder: Path) -> OwnModel:
    return open_own(open_checkpoint(folder))


def form_of(model: OwnModel) -> Format:
    return model.spec.attention.q.format


def refused(kind: type[ModelError], **values: Any) -> str:
    with pytest.raises(kind) as caught:
        spec_of(CONFIG | values)
    return str(caught.value)


# forms and names


def test_the_golden_models_open_in_their_forms(golden: Path, golden_bf16: Path) -> None:
    quantized, source = open_folder(golden / "mlx-2bit"), open_folder(golden_bf16)
    assert (form_of(quantized), quantized.spec.embedding.name) == (TERNARY, "model.word_embeddings")
    assert (form_of(source), source.spec.embedding.name) == (BF16, "model.embed_tokens")
    assert quantized.spec == spec_of(source.checkpoint.config)
    assert quantized.spec.layer_is_sliding == (True, True, True, False)
    ropes = [layer.attention.rope for layer in quantized.spec.layers]
    assert ropes == [Rope(32, 10000.0)] * 3 + [None]


def test_group_scales_are_a_form_of_their_own(tiny_checkpoint: Tiny) -> None:
    assert form_of(open_folder(tiny_checkpoint(group_scales=True))) == TERNARY_GROUPS


def test_the_full_size_model_has_the_tensors_and_bytes_of_the_real_one() -> None:
    tensors = list(PRESETS["maple-20b"].spec().tensors())
    assert len(tensors) == 463
    assert sum(Spec(*tensor).nbytes for tensor in tensors) == 5_308_186_624
    experts = sum(Spec(*tensor).nbytes for tensor in tensors if ".switch_mlp." in tensor.name)
    assert experts == 4_869_586_944


def test_embeddings_may_have_either_name(tiny_checkpoint: Tiny) -> None:
    def rename(specs: list[Spec]) -> list[Spec]:
        return [spec._replace(name=spec.name.replace("word_embeddings", "embed_tokens")) for spec in specs]

    folder = rewrite(tiny_checkpoint(), rename)
    quantization = CONFIG["quantization"] | {"model.embed_tokens": {"bits": 4, "group_size": 64}}
    del quantization["model.word_embeddings"]
    edit(folder, quantization=quantization, quantization_config=None)
    assert open_folder(folder).spec.embedding.name == "model.embed_tokens"


def test_dense_first_layers_have_plain_mlps(tiny_checkpoint: Tiny) -> None:
    model = open_folder(tiny_checkpoint(first_k_dense_replace=1, intermediate_size=384))
    assert [model.spec.is_moe(layer) for layer in range(4)] == [False, True, True, True]
    assert model.checkpoint.tensors["model.layers.0.mlp.up_proj.weight"].shape == (384, 8)


def test_absent_keys_have_the_values_that_maple_implies(tiny_checkpoint: Tiny) -> None:
    folder = edit(
        tiny_checkpoint(), model_type=None, layer_types=None, first_k_dense_replace=None,
        intermediate_size=None, use_qk_norm=None, use_bias=None, tie_word_embeddings=None, hidden_act=None,
        norm_topk_prob=None,
        num_shared_experts=None, nope_on_global_attention=None, attention_bias=None, sliding_window=None,
        eos_token_id=None,
    )  # fmt: skip
    model = open_folder(folder)
    assert not any(model.spec.layer_is_sliding)
    assert model.spec.num_moe_layers == 4


def test_optional_tensors_are_ignored(tiny_checkpoint: Tiny) -> None:
    extra = [
        Spec("lm_head_flash.centroids.weight", "U32", (4, 16)),
        Spec("lm_head_flash.token_map", "I32", (4, 32)),
        Spec("lm_head_flash.head.weight", "U32", (4, 16)),
    ]
    open_folder(rewrite(tiny_checkpoint(), lambda specs: specs + extra))


# refusals: architecture


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "no_such_type"}, "'no_such_type'"),
        ({"model_type": ["maple"]}, "['maple']"),
        ({"model_type": None, "architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"model_type": None, "architectures": None}, "neither model_type nor architectures"),
    ],
)
def test_another_architecture_is_refused_with_what_runs(
    tiny_checkpoint: Tiny, values: dict[str, Any], named: str
) -> None:
    checkpoint = open_checkpoint(edit(tiny_checkpoint(), **values))
    with pytest.raises(UnsupportedModelError, match="spile runs: maple") as caught:
        open_model(checkpoint)
    assert named in str(caught.value)


# refusals: values


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_qk_norm", False), ("use_bias", True), ("attention_bias", True), ("tie_word_embeddings", True),
        ("hidden_act", "gelu"), ("norm_topk_prob", False), ("num_shared_experts", 1),
        ("nope_on_global_attention", False), ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("use_bias", 0), ("num_shared_experts", False), ("use_qk_norm", "yes"),
        ("rope_parameters", {"rope_theta": 1e6}),
    ],
)  # fmt: skip
def test_a_value_that_maple_fixes_is_refused_by_name(key: str, value: Any) -> None:
    assert key in refused(UnsupportedModelError, **{key: value})


SIZES = [
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings", "vocab_size",
    "sliding_window",
]  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "128", math.nan, 2**62, [128]])
def test_a_size_that_is_none_is_refused_by_name(key: str, value: Any) -> None:
    message = refused(CheckpointError, **{key: value})
    assert f"config.json: {key} is" in message


@pytest.mark.parametrize("key", [*SIZES, "rms_norm_eps", "rope_theta", "partial_rotary_factor"])
def test_a_missing_value_is_named(key: str) -> None:
    assert refused(CheckpointError, **{key: None}) == f"config.json: {key} is missing"


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "partial_rotary_factor"])
@pytest.mark.parametrize("value", [0, -1.0, True, math.nan, math.inf, "1", 10**400])
def test_a_number_out_of_range_is_refused_by_name(key: str, value: Any) -> None:
    assert f"config.json: {key} is" in refused(CheckpointError, **{key: value})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_attention_heads": 3}, "num_key_value_heads"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds num_experts 8"),
        ({"first_k_dense_replace": 5}, "first_k_dense_replace 5"),
        ({"first_k_dense_replace": 1, "intermediate_size": None}, "intermediate_size is missing"),
        ({"partial_rotary_factor": 0.33}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 4"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": [512]}, "eos_token_id"),
        ({"eos_token_id": [True]}, "eos_token_id"),
    ],
)
def test_values_that_contradict_each_other_are_named(values: dict[str, Any], named: str) -> None:
    assert named in refused(CheckpointError, **values)


def test_an_unknown_kind_of_layer_is_refused_by_name() -> None:
    types = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    assert "layer_types[1] is 'linear_attention'" in refused(UnsupportedModelError, layer_types=types)


def test_a_width_that_does_not_pack_is_refused_by_name(tiny_checkpoint: Tiny) -> None:
    folder = tiny_checkpoint(moe_intermediate_size=144)  # 9 words: fine for row alphas, not for groups of 128
    assert open_folder(folder).spec.moe_intermediate_size == 144
    with pytest.raises(UnsupportedModelError, match="moe_intermediate_size is 136"):
        open_folder(edit(folder, moe_intermediate_size=136))
    with pytest.raises(UnsupportedModelError, match="hidden_size is 144"):
        open_folder(edit(folder, moe_intermediate_size=144, hidden_size=144))


# refusals: quantization


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"bits": 8}, "quantization.bits is 8"),
        ({"bits": True}, "quantization.bits is True"),
        ({"group_size": 64}, "quantization.group_size is 64"),
        ({"mode": "mxfp4"}, "quantization.mode is 'mxfp4'"),
        ({"lm_head": {"bits": 8, "group_size": 64}}, "quantization.lm_head.bits is 8"),
        ({"lm_head": {"bits": 4, "group_size": 32}}, "quantization.lm_head.group_size is 32"),
        ({"lm_head": None}, "quantization.lm_head is missing"),
        ({"model.word_embeddings": False}, "quantization.model.word_embeddings is missing"),
        (
            {"model.layers.1.mlp.gate": {"bits": 8, "group_size": 64}},
            "quantization.model.layers.1.mlp.gate.bits is 8",
        ),
    ],
)
def test_other_bits_and_groups_are_refused_by_key_and_value(
    tiny_checkpoint: Tiny, block: dict[str, Any], named: str
) -> None:
    folder = edit(tiny_checkpoint(), quantization=CONFIG["quantization"] | block, quantization_config=None)
    with pytest.raises(UnsupportedModelError) as caught:
        open_folder(folder)
    assert named in str(caught.value)


def test_bits_that_the_data_does_not_have_name_tensor_expected_and_found(tiny_checkpoint: Tiny) -> None:
    block = CONFIG["quantization"] | {"lm_head": {"bits": 8, "group_size": 64}}
    with pytest.raises(UnsupportedModelError) as caught:
        open_folder(edit(tiny_checkpoint(), quantization=block))
    assert "tensor lm_head.weight: 8 bits expect U32 [512, 32], found U32 [512, 16]" in str(caught.value)


def test_a_quantized_config_over_bf16_weights_is_a_contradiction(golden_bf16: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(golden_bf16 / "model.safetensors")
    (folder / "config.json").write_text((golden_bf16 / "config.json").read_text())
    open_folder(folder)
    with pytest.raises(CheckpointError, match="not quantized"):
        open_folder(edit(folder, quantization=CONFIG["quantization"]))


# refusals: tensors


def without(name: str) -> Callable[[list[Spec]], list[Spec]]:
    return lambda specs: [spec for spec in specs if spec.name != name]


def test_every_missing_tensor_is_named(tiny_checkpoint: Tiny) -> None:
    original = tiny_checkpoint(num_hidden_layers=1)
    specs = [Spec(each.name, each.dtype, each.shape) for each in open_checkpoint(original).tensors.values()]
    for spec in specs:
        folder = rewrite(original, lambda _, name=spec.name: without(name)(specs))
        with pytest.raises(CheckpointError) as caught:
            open_folder(folder)
        assert spec.name.rsplit(".", 1)[0] in str(caught.value)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "expected"),
    [
        ("lm_head.weight", "U32", (512, 32), "expected U32 [512, 16] from config.json, found U32 [512, 32]"),
        ("model.norm.weight", "F32", (128,), "expected BF16 [128] from config.json, found F32 [128]"),
        ("model.layers.0.mlp.switch_mlp.up_proj.weight", "U32", (4, 128, 8), "expected U32 [8, 128, 8]"),
        ("model.layers.2.self_attn.k_proj.row_alpha", "BF16", (64,), "expected BF16 [128]"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_names_tensor_expected_and_found(
    tiny_checkpoint: Tiny, name: str, dtype: str, shape: tuple[int, ...], expected: str
) -> None:
    folder = rewrite(tiny_checkpoint(), lambda specs: [*without(name)(specs), Spec(name, dtype, shape)])
    with pytest.raises(CheckpointError) as caught:
        open_folder(folder)
    assert f"tensor {name}: " in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_experts", "moe_intermediate_size", "head_dim", "vocab_size"]
)
def test_a_config_of_another_size_than_the_tensors_is_refused(tiny_checkpoint: Tiny, key: str) -> None:
    with pytest.raises(CheckpointError, match=r"tensor .*: expected .* found"):
        open_folder(edit(tiny_checkpoint(), **{key: CONFIG[key] * 2}))


@pytest.mark.parametrize("layers", [3, 5])
def test_a_config_of_more_or_fewer_layers_than_the_weights_is_refused(
    tiny_checkpoint: Tiny, layers: int
) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.[34]"):
        open_folder(edit(tiny_checkpoint(), num_hidden_layers=layers, layer_types=None))


def test_a_config_that_claims_billions_of_tensors_is_refused_at_once(
    golden_bf16: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(golden_bf16 / "model.safetensors")
    (folder / "config.json").write_text((golden_bf16 / "config.json").read_text())
    edit(folder, num_experts=65_536, num_hidden_layers=10_000, layer_types=None)
    started = time.process_time()
    with pytest.raises(CheckpointError, match=r"tensor .*: expected .* found"):
        open_folder(folder)
    assert time.process_time() - started < 5


def test_a_tensor_that_would_change_the_answer_is_not_dropped(tiny_checkpoint: Tiny) -> None:
    extra = Spec("model.layers.0.self_attn.q_proj.bias", "BF16", (256,))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        open_folder(rewrite(tiny_checkpoint(), lambda specs: [*specs, extra]))


def test_both_embedding_names_at_once_are_refused(tiny_checkpoint: Tiny) -> None:
    extra = Spec("model.embed_tokens.weight", "U32", (512, 16))
    with pytest.raises(CheckpointError, match="twice"):
        open_folder(rewrite(tiny_checkpoint(), lambda specs: [*specs, extra]))
