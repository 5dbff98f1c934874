"""Turns a config of Qwen3's mixture of experts (Qwen3-30B-A3B, Qwen3-Coder-30B) into a spec.

MLX's files stack a layer's experts in one tensor a projection; the source has tensors of each expert. RoPE turns whole
heads, in all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spile.architectures import reading
from spile.architectures.spec import BF16, EXPERT, Experts, Format, LayerSpec, ModelSpec, Rope, Router
from spile.errors import CheckpointError, quote
from spile.files.checkpoint import Tensor

IGNORED = r".*\.rotary_emb\.inv_freq"
FIXED_VALUES: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "rope_scaling": None,
    "use_sliding_window": False,
}


def read(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelSpec:
    """Turn a checkpoint's config into its spec.

    Raises:
        UnsupportedModelError: a value that spile does not run.
        CheckpointError: a value makes no sense.
    """
    stacked = "model.layers.0.mlp.experts.0.gate_proj.weight" not in tensors
    return spec(raw, reading.plain_format(tensors, "model.norm.weight"), stacked=stacked)


def spec(raw: Mapping[str, Any], plain: Format = BF16, *, stacked: bool = True) -> ModelSpec:
    """Turn a config into the spec of a file with stacked experts, or of one with each by itself. Raises: as `read`."""
    reading.check_fixed(raw, FIXED_VALUES, "Qwen3-MoE")
    L, D, V = (reading.size(raw, key) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    (heads, kv_heads), (E, K) = reading.heads(raw), reading.experts(raw)
    F, head_dim = (
        reading.size(raw, "moe_intermediate_size"),
        reading.size(raw, "head_dim", default=D // heads),
    )
    rope = Rope(head_dim, reading.number(raw, "rope_theta", largest=1e12))
    step = reading.size(raw, "decoder_sparse_step", default=1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers is {quote(dense)}, expected a list of layers")
    reading.check_end_tokens(raw, V)
    names = reading.Names(D, reading.Quantization(raw, plain).of, plain)

    def layer(prefix: str, number: int) -> LayerSpec:
        attention = names.attention(f"{prefix}.self_attn", heads, kv_heads, head_dim, rope)
        if number in dense or (number + 1) % step:
            return names.layer(
                prefix, attention, names.glu(f"{prefix}.mlp", reading.size(raw, "intermediate_size"))
            )
        experts = f"{prefix}.mlp.switch_mlp" if stacked else f"{prefix}.mlp.experts.{EXPERT}"
        router = Router(names.linear(f"{prefix}.mlp.gate", E, D), K, renormalise_eps=0.0)
        return names.layer(prefix, attention, Experts(E, router, names.glu(experts, F, E)))

    embedding = names.linear("model.embed_tokens", V, D)
    is_tied = raw.get("tie_word_embeddings") is True
    made = ModelSpec(
        model_type="qwen3_moe",
        embedding=embedding,
        layers=tuple(layer(f"model.layers.{number}", number) for number in range(L)),
        norm=names.norm("model.norm"),
        head=embedding if is_tied else names.linear("lm_head", V, D),
        rms_norm_eps=reading.number(raw, "rms_norm_eps", largest=1.0),
        max_position_embeddings=reading.size(raw, "max_position_embeddings"),
    )
    reading.check_widths(
        {f"{each.name}'s input": (each.shape[-1], (each.format,)) for each in made.weights()}
    )
    return made
