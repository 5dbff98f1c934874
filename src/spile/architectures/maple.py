"""Turns a config of DeepGrove's Maple into a spec: its names, shapes, fixed values and forms.

Three forms hold the same model: 2-bit codes with an alpha a row; the same with scales and biases that repeat it for
every 128 codes; and the BF16 source, which `spile convert` packs. Layers with a window rotate the first part of each
head, the others have no position encoding. Experts clamp, dense layers do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spile.architectures import reading
from spile.architectures.spec import (
    AFFINE4,
    BF16,
    EXPERT,
    TERNARY,
    TERNARY_GROUPS,
    Experts,
    Format,
    LayerSpec,
    ModelSpec,
    Rope,
    Router,
    Weight,
)
from spile.errors import CheckpointError, UnsupportedModelError, quote
from spile.files.checkpoint import Tensor

EMBEDDING_NAMES = ("model.word_embeddings", "model.embed_tokens")  # quantized, and the source
IGNORED = (
    r"(lm_head_flash|head)\..*|.*\.head\..*|.*\.rotary_emb\.inv_freq.*"  # tensors that no forward pass reads
)
LIMIT = 7.0  # of an expert's GLU
FIXED_VALUES: Mapping[str, Any] = {
    "use_qk_norm": True,
    "use_bias": False,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "num_shared_experts": 0,
    "nope_on_global_attention": True,
    "rope_scaling": None,
}
_FIRST = "model.layers.0.self_attn.q_proj"  # by whose tensors the form is known


def read(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelSpec:
    """Turn a checkpoint's config into its spec.

    Raises:
        UnsupportedModelError: a value that spile does not run.
        CheckpointError: a value makes no sense, or a weight that says the form is missing.
    """
    form, embedding = _find_form(tensors), _find_embedding(tensors)
    _check_quantization(raw, form, embedding, tensors)
    return spec(raw, form, embedding)


def spec(raw: Mapping[str, Any], form: Format = TERNARY, embedding: str = EMBEDDING_NAMES[0]) -> ModelSpec:
    """Turn a config into the spec of one form. Raises: as `read`."""
    reading.check_fixed(raw, FIXED_VALUES, "Maple")
    if raw.get("rope_parameters") is not None:
        raise UnsupportedModelError(
            "config.json: rope_parameters is not supported; spile reads rope_theta and partial_rotary_factor"
        )
    L, D, V = (reading.size(raw, key) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    (heads, kv_heads), (E, K) = reading.heads(raw), reading.experts(raw)
    num_dense = reading.size(raw, "first_k_dense_replace", default=0, least=0)
    if num_dense > L:
        raise CheckpointError(f"config.json: first_k_dense_replace {num_dense} exceeds num_hidden_layers {L}")
    sliding, head_dim = reading.layer_is_sliding(raw, L), reading.size(raw, "head_dim")
    window = reading.size(raw, "sliding_window", largest=2**30) if any(sliding) else None
    F = reading.size(raw, "moe_intermediate_size")
    dense = reading.size(raw, "intermediate_size") if num_dense else 0
    rope = Rope(reading.rope_dims(raw, head_dim), reading.number(raw, "rope_theta", largest=1e12))
    table = BF16 if form == BF16 else AFFINE4
    reading.check_end_tokens(raw, V)
    reading.check_widths({
        "hidden_size": (D, (TERNARY, form, AFFINE4)),
        "num_attention_heads x head_dim": (heads * head_dim, (TERNARY, form)),
        "moe_intermediate_size": (F, (TERNARY, form)),
        "intermediate_size": (dense, (TERNARY, form)),
    })  # fmt: skip

    names = reading.Names(D, lambda name: form)

    def layer(prefix: str, number: int) -> LayerSpec:
        rotation = (rope, window) if sliding[number] else (None, None)
        attention = names.attention(f"{prefix}.self_attn", heads, kv_heads, head_dim, *rotation)
        if number < num_dense:
            return names.layer(prefix, attention, names.glu(f"{prefix}.mlp", dense))
        experts = f"{prefix}.mlp.experts.{EXPERT}" if form == BF16 else f"{prefix}.mlp.switch_mlp"
        router = Router(Weight(f"{prefix}.mlp.gate", BF16, (E, D)), K, renormalise_eps=1e-20)
        return names.layer(prefix, attention, Experts(E, router, names.glu(experts, F, E, LIMIT)))

    return ModelSpec(
        model_type="maple",
        embedding=Weight(embedding, table, (V, D)),
        layers=tuple(layer(f"model.layers.{number}", number) for number in range(L)),
        norm=names.norm("model.norm"),
        head=Weight("lm_head", table, (V, D)),
        rms_norm_eps=reading.number(raw, "rms_norm_eps", largest=1.0),
        max_position_embeddings=reading.size(raw, "max_position_embeddings"),
    )


def _find_form(tensors: Mapping[str, Tensor]) -> Format:
    if f"{_FIRST}.row_alpha" in tensors:
        return TERNARY
    if f"{_FIRST}.scales" in tensors:
        return TERNARY_GROUPS
    weight = tensors.get(f"{_FIRST}.weight")
    if weight is None:
        raise CheckpointError(f"tensor {_FIRST}.weight is missing", "Are these the weights of a Maple?")
    if weight.dtype == "BF16":
        return BF16
    raise CheckpointError(
        f"tensor {_FIRST}.weight is {weight.dtype} {list(weight.shape)}, "
        f"but neither {_FIRST}.row_alpha nor {_FIRST}.scales is there; expected one of them, or BF16 weights"
    )


def _find_embedding(tensors: Mapping[str, Tensor]) -> str:
    found = [name for name in EMBEDDING_NAMES if f"{name}.weight" in tensors]
    if not found:
        raise CheckpointError(
            f"the embeddings are missing: neither {' nor '.join(EMBEDDING_NAMES)} has a weight"
        )
    if len(found) == 2:
        raise CheckpointError(f"the embeddings are there twice: {' and '.join(EMBEDDING_NAMES)}")
    return found[0]


def quantization(embedding: str = EMBEDDING_NAMES[0]) -> dict[str, Any]:
    """Return what config.json says of the 2-bit form."""
    table = {"group_size": AFFINE4.group, "bits": AFFINE4.bits}
    block = {"group_size": TERNARY_GROUPS.group, "bits": TERNARY.bits, "mode": "affine"}
    return {**block, "lm_head": table, embedding: table}


def _check_quantization(
    raw: Mapping[str, Any], form: Format, embedding: str, tensors: Mapping[str, Tensor]
) -> None:
    """Compare what the config says about bits and groups with the one layout that there is."""
    for block_key in ("quantization", "quantization_config"):
        block = raw.get(block_key)
        if block is None:
            continue
        if not isinstance(block, dict):
            raise CheckpointError(f"config.json: {block_key} is {quote(block)}, expected an object")
        if form == BF16:
            raise CheckpointError(
                f"config.json has {block_key}, but the weights are not quantized: they are BF16"
            )
        tables = {"lm_head", embedding}
        reading.check_block(block, block_key, _FIRST, TERNARY_GROUPS, tensors)
        for name, value in block.items():
            if isinstance(value, dict) and not name.startswith(("lm_head_flash.", "head.")):
                expected = AFFINE4 if name in tables else TERNARY_GROUPS
                reading.check_block(value, f"{block_key}.{name}", name, expected, tensors)
        for name in sorted(tables):
            if not isinstance(block.get(name), dict):
                raise UnsupportedModelError(
                    f"config.json: {block_key}.{name} is missing; spile runs it with bits {AFFINE4.bits}, "
                    f"group_size {AFFINE4.group}"
                )
