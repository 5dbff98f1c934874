"""Turns a model's numbers into the native decoder that is made for them; it has no weights yet."""

from __future__ import annotations

from spile import _core
from spile.architectures.maple import MapleConfig
from spile.residency.kv import KvFormat


def make_decoder(
    config: MapleConfig,
    isa: str,
    threads: int,
    *,
    context: int,
    max_chunk: int,
    kv: KvFormat,
    activation_bytes: int,
) -> _core.Decoder:
    """Make a decoder whose layers wait for `set_layer`. Takes the memory of a chunk's activations."""
    return _core.Decoder(
        {
            "hidden_size": config.hidden_size,
            "num_layers": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "num_experts": config.num_experts,
            "num_chosen": config.num_experts_per_tok,
            "expert_size": config.moe_intermediate_size,
            "dense_size": config.intermediate_size,
            "rope_dims": config.rope_dims,
            "vocab_size": config.vocab_size,
            "window": min(config.sliding_window, context),
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_theta,
            "key_bits": kv.key_bits,
            "value_bits": kv.value_bits,
            "ring_key_bits": kv.ring.key_bits,
            "ring_value_bits": kv.ring.value_bits,
            "max_chunk": min(max_chunk, context),
            "activation_bytes": activation_bytes,
            "sliding": list(config.layer_is_sliding),
        },
        isa,
        threads,
    )
