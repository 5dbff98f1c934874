"""Turns the installed mlx-lm into a list of its mixture-of-experts architectures, each with a tiny config,
and a tiny config into a checkpoint folder as mlx-lm would write it.

The list comes from mlx-lm's own sources: every module of `mlx_lm.models` that makes a SwitchGLU or SwitchMLP,
or imports such a module. A config comes from the fields of the architecture's own dataclass, filled by name
from TINY, with what is particular to one architecture in PARTICULAR. So a new architecture appears by itself,
mostly with a config that works; one with a field that nobody filled yet is `without_tiny_config`.

This file knows nothing of spile. `python tests/mlx_architectures.py` prints the table.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

LAYERS, EXPERTS, CHOSEN, VOCABULARY, WIDTH = 4, 8, 2, 128, 64

FULL, SLIDING = "full_attention", "sliding_attention"
# Values by field name, for every architecture that has the field.
TINY: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_vocab": VOCABULARY,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 256,
    "model_max_length": 512,
    "hidden_size": WIDTH,
    "model_dim": WIDTH,
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "dense_intermediate_size": 128,
    "shared_intermediate_size": 64,
    "ffn_hidden_size": 128,
    "moe_intermediate_size": 64,
    "moe_hidden_size": 64,
    "expert_ffn_hidden_size": 64,
    "share_expert_dim": 64,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_attention_groups": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 32,
    "v_head_dim": 32,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 48,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "index_head_dim": 64,
    "index_n_heads": 2,
    "index_topk": 8,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "num_experts_per_token": CHOSEN,
    "top_k_experts": CHOSEN,
    "moe_topk": CHOSEN,
    "moe_top_k": CHOSEN,
    "moe_k": CHOSEN,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "moe_layer_freq": 1,
    "moe_layer_interval": 1,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
    "norm_eps": 1e-6,
    "layernorm_epsilon": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "post_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "swa_rope_theta": 10000.0,
    "rope_scaling": None,
    "rotary_dim": 16,
    "partial_rotary_factor": 0.5,
    "sliding_window": 16,
    "sliding_window_size": 16,
    "attention_bias": False,
    "attention_chunk_size": 16,
    "use_bias": False,
    "mlp_bias": False,
    "conv_bias": False,
    "use_qk_norm": True,
    "use_expert_bias": True,
    "tie_word_embeddings": False,
    "layer_types": [SLIDING, FULL] * (LAYERS // 2),
    "layer_group_size": 2,
    "group_norm_size": 2,
    "conv_L_cache": 3,
    "short_conv_kernel_size": 4,
    "logits_scaling": 1.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_conv_bias": True,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 0,
    "expert_layer_period": 2,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "interleave_moe_layer_step": 1,
    "is_moe_layer": [False, True, True, True],
    "moe_layers_enum": "1,2,3",
    "swiglu_limits": [0.0, 7.0, 7.0, 0.0],
}
# What one architecture needs beside, or in place of, TINY; `text_config` holds that of the nested config.
_YARN = {
    "type": "yarn",
    "factor": 2.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
}
_MISTRAL4 = {"rope_parameters": _YARN | {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}}
_GEMMA4 = {
    "enable_moe_block": True,
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 32,
}
PARTICULAR: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"rope_scaling": _YARN},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "glm_moe_dsa": {"rope_parameters": {"type": "default", "rope_theta": 10000.0}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": False,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "llama4": {"text_config": {"num_experts_per_tok": 1}},  # it routes to one
    "mellum": {
        "rope_parameters": {
            kind: {"rope_type": "default", "type": "default", "rope_theta": 10000.0}
            for kind in (FULL, SLIDING)
        }
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1] * (LAYERS // 2),
        "moe_layer_freq": [0] + [1] * (LAYERS - 1),
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "minimax_m3_vl": {
        "text_config": {
            "moe_layer_freq": [0] + [1] * (LAYERS - 1),
            "index_block_size": 8,
            "index_topk_blocks": 2,
        }
    },
    "mistral3": {"text_config": _MISTRAL4 | {"model_type": "mistral4"}},
    "mistral4": _MISTRAL4,
    "muse_spark": {
        "text_config": {
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0] * LAYERS,
            "num_shared_experts": 0,  # it has none
            "final_logit_softcapping": 20.0,
            "output_multiplier": 1.0,
        }
    },
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "moe"], "layer_types": None},
}
# Wrappers whose `text_config` is an untyped dict: the module and the class that read it.
TEXT_ARGS: Mapping[str, tuple[str, str]] = {
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "mistral3": ("mistral4", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}


class NoTinyConfig(Exception):
    """A field that this file has no value for, or a config that mlx-lm refuses."""


class Quantization(NamedTuple):
    """How the weights are packed. `mixed` gives the odd layers and every down projection other bits."""

    mode: str = "affine"
    bits: int = 4
    group_size: int = 32
    mixed: bool = False


def find_architectures() -> list[str]:
    """Return the modules of mlx_lm.models that make a SwitchGLU or SwitchMLP, or import one that does."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None, "mlx_lm is not installed"
    assert spec.submodule_search_locations, "mlx_lm is not a package"
    folder = Path(spec.submodule_search_locations[0]) / "models"
    texts = {path.stem: path.read_text() for path in sorted(folder.glob("*.py"))}
    del texts["switch_layers"]
    found = {name for name, text in texts.items() if re.search(r"\bSwitch(GLU|MLP)\(", text)}
    imports = {name: _imported_modules(text) & texts.keys() for name, text in texts.items()}
    while more := {name for name in texts.keys() - found if imports[name] & found}:
        found |= more
    return sorted(found)


def tiny_config(name: str) -> dict[str, Any]:
    """Return a config.json's content for one architecture.

    Raises: NoTinyConfig naming the fields without a value.
    """
    module = importlib.import_module(f"mlx_lm.models.{name}")
    if not hasattr(module, "ModelArgs") or not hasattr(module, "Model"):
        raise NoTinyConfig("it has no Model of its own")
    particular = PARTICULAR.get(name, {})
    config = _fill(module.ModelArgs, particular) | {"model_type": name}
    text_args = getattr(module, "TextArgs", None) or getattr(module, "TextConfig", None)
    if name in TEXT_ARGS:
        text_module, text_class = TEXT_ARGS[name]
        text_args = getattr(importlib.import_module(f"mlx_lm.models.{text_module}"), text_class)
    if "text_config" in inspect.signature(module.ModelArgs).parameters:
        if text_args is None:
            raise NoTinyConfig("text_config is read by a class that is not known here")
        config["text_config"] = _fill(text_args, particular.get("text_config", {}))
        config["text_config"].setdefault("model_type", name)
    return config


def make_model(config: Mapping[str, Any]) -> Any:
    """Make the mlx-lm model of a config, with mlx-lm's own initial weights.

    Raises: NoTinyConfig with mlx-lm's reason.
    """
    import mlx.core as mx
    from mlx_lm.utils import _get_classes

    mx.random.seed(0)
    try:
        model_class, args_class = _get_classes(dict(config))
        return model_class(args_class.from_dict(dict(config)))
    except Exception as error:  # whatever a foreign constructor raises is the answer
        raise NoTinyConfig(f"{type(error).__name__}: {error}") from error


def write_tiny(
    folder: Path, name: str, *, quantization: Quantization | None = None, dtype: str = "", seed: int = 0
) -> dict[str, Any]:
    """Write a tiny checkpoint: random weights in two shards, their index, config.json; return the config.

    `dtype` is of what is not quantized: bfloat16, but float32 where the experts are not quantized, since
    MLX's CPU backend has no gather_mm of 16 bits.

    Raises: NoTinyConfig.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import save_config

    config = tiny_config(name)
    model = make_model(config)
    randomize(model, dtype=dtype or ("bfloat16" if quantization else "float32"), seed=seed)
    if quantization is not None:
        model, config = quantize(model, config, quantization)
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    names = sorted(weights)
    index: dict[str, str] = {}
    for shard in range(2):
        file = f"model-{shard + 1:05d}-of-00002.safetensors"
        part = {key: weights[key] for key in names[shard::2]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
        index |= dict.fromkeys(part, file)
    total = sum(weight.nbytes for weight in weights.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))})
    )
    save_config(dict(config), folder / "config.json")
    return config


def randomize(model: Any, *, dtype: str = "float32", seed: int = 0) -> None:
    """Give every floating parameter seeded noise: what mlx-lm leaves constant (norms, biases) must differ by
    place, or a test would not see it exchanged."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    cast = getattr(model, "cast_predicate", lambda _: True)
    changed = []
    for number, (path, value) in enumerate(tree_flatten(model.parameters())):
        if not mx.issubdtype(value.dtype, mx.floating):
            continue
        key = mx.random.key(seed * 100_003 + number)
        if value.ndim < 2 or path.endswith((".bias", "_bias")):
            value = value + 0.1 * mx.random.normal(value.shape, key=key)
        else:
            value = mx.random.normal(value.shape, key=key) * value.shape[-1] ** -0.5
        changed.append((path, value.astype(getattr(mx, dtype)) if cast(path) else value))
    model.update(tree_unflatten(changed))
    mx.eval(model.parameters())


def quantize(model: Any, config: dict[str, Any], quantization: Quantization) -> tuple[Any, dict[str, Any]]:
    """Quantize as `mlx_lm.convert` does, the model's own exceptions kept."""
    from mlx_lm.utils import quantize_model

    own: Callable[[str, Any], Any] = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def mixed(path: str, module: Any) -> Any:
        if not own(path, module) or module.weight.shape[-1] % quantization.group_size:
            return False
        layer = re.search(r"\.layers\.(\d+)\.", f".{path}.")
        odd = layer is not None and int(layer[1]) % 2
        bits = 3 if path.endswith(("down_proj", "fc2")) else 8 if odd else quantization.bits
        return {"bits": bits, "group_size": quantization.group_size, "mode": "affine"}

    with contextlib.redirect_stdout(io.StringIO()):
        return quantize_model(
            model,
            config,
            quantization.group_size,
            quantization.bits,
            mode=quantization.mode,
            quant_predicate=mixed if quantization.mixed else None,
        )


def find_experts(model: Any) -> list[str]:
    """Return the paths of the modules that hold routed experts, by type."""
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

    return [path for path, module in model.named_modules() if isinstance(module, (SwitchGLU, SwitchMLP))]


def _imported_modules(text: str) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            modules |= {node.module} if node.module else {alias.name for alias in node.names}
    return modules


def _fill(args: Any, particular: Mapping[str, Any]) -> dict[str, Any]:
    """Give every field of a config dataclass its value: the architecture's own, TINY's, or its default."""
    config: dict[str, Any] = {}
    missing = []
    for field in dataclasses.fields(args):
        if field.name in particular:
            config[field.name] = particular[field.name]
        elif field.name in TINY:
            config[field.name] = TINY[field.name]
        elif field.name not in ("model_type", "text_config") and _is_required(field):
            missing.append(field.name)
    if missing:
        raise NoTinyConfig(f"no tiny value for {', '.join(missing)}")
    return config


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _describe(name: str) -> str:
    """Say in one line whether a tiny model of an architecture builds and runs."""
    import mlx.core as mx

    try:
        model = make_model(tiny_config(name))
    except NoTinyConfig as reason:
        return f"no tiny configuration yet: {reason}"
    paths = find_experts(model)
    if not paths:
        return "no routed experts"
    try:
        randomize(model)
        cache = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model)
        for ids in ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], [[11]]):
            logits = model(mx.array(ids), cache=cache)
            mx.eval(logits)
        finite = bool(mx.all(mx.isfinite(logits)))
    except Exception as error:  # whatever a foreign model raises is the answer
        return f"does not run: {type(error).__name__}: {error}"
    return f"runs, {len(paths)} expert layers, e.g. {paths[0]}" + ("" if finite else ", NOT FINITE")


if __name__ == "__main__":
    for architecture in find_architectures():
        print(f"{architecture:<22} {_describe(architecture)}", flush=True)
