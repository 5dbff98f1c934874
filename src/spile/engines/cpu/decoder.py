"""Turns a model's spec into the native decoder that is made for them; it has no weights yet."""

from __future__ import annotations

from spile import _core
from spile.architectures.spec import ModelSpec, Rope
from spile.residency.kv import KvFormat


def rope_of(spec: ModelSpec) -> Rope | None:
    """Return what turns heads, in the layers where something does."""
    return next((each for each in (layer.attention.rope for layer in spec.layers) if each is not None), None)


def make_decoder(
    spec: ModelSpec,
    isa: str,
    threads: int,
    *,
    context: int,
    max_chunk: int,
    kv: KvFormat,
    activation_bytes: int,
) -> _core.Decoder:
    """Make a decoder whose layers wait for `set_layer`. Takes the memory of a chunk's activations."""
    experts, rope = spec.first_experts, rope_of(spec)
    eps = None if experts is None else experts.router.renormalise_eps
    return _core.Decoder(
        {
            "hidden_size": spec.hidden_size,
            "num_layers": spec.num_hidden_layers,
            "num_heads": spec.num_attention_heads,
            "num_kv_heads": spec.num_key_value_heads,
            "head_dim": spec.head_dim,
            "num_experts": spec.num_experts,
            "num_chosen": spec.num_experts_per_tok,
            "expert_size": spec.moe_intermediate_size,
            "dense_size": spec.intermediate_size,
            "rope_dims": 0 if rope is None else rope.dims,
            "vocab_size": spec.vocab_size,
            "window": min(spec.sliding_window, context),
            "rms_norm_eps": spec.rms_norm_eps,
            "expert_limit": 0.0 if experts is None else experts.glu.limit,
            "dense_limit": 0.0 if spec.first_dense is None else spec.first_dense.limit,
            "renormalise": eps is not None,
            "router_eps": eps or 0.0,
            "key_bits": kv.key_bits,
            "value_bits": kv.value_bits,
            "ring_key_bits": kv.ring.key_bits,
            "ring_value_bits": kv.ring.value_bits,
            "max_chunk": min(max_chunk, context),
            "activation_bytes": activation_bytes,
            "sliding": list(spec.layer_is_sliding),
            "rotates": [layer.attention.rope is not None for layer in spec.layers],
        },
        isa,
        threads,
    )
