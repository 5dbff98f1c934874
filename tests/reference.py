"""A Maple folder in the 2-bit layout and token ids -> float64 logits at every position, by the plainest
NumPy.

This is the tests' second opinion on the engine: every weight is expanded to float64, every matrix product
is NumPy's, and nothing here comes from spile, its reading of safetensors included. It knows no slots,
budgets, chunks or caches: all positions are computed at once, so it is meant for tiny models and a few
hundred tokens.

Source: the model's description (forward pass, packing, clamps) as `src/spile/architectures/maple.py` gives
it too; its own check is the logits of an independent float32 implementation in `tests/golden`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DTYPES = {"BF16": np.uint16, "U32": np.uint32, "F32": np.float32, "F16": np.float16, "I32": np.int32}


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read one safetensors file: 8 bytes of header length, a JSON header, then the data. BF16 becomes
    float64 here."""
    blob = path.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    tensors: dict[str, NDArray[Any]] = {}
    for name, entry in json.loads(blob[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        raw = np.frombuffer(blob[8 + size + start : 8 + size + end], DTYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":  # the upper half of a float32
            raw = (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        tensors[name] = raw.reshape(entry["shape"])
    return tensors


def unpack(words: NDArray[np.uint32], bits: int) -> Array:
    """[.., n] words -> [.., n * 32 / bits] codes, lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], -1).astype(np.float64)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    return normed


def silu(x: Array) -> Array:
    result: Array = x / (1.0 + np.exp(-x))
    return result


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Array = e / e.sum(axis=-1, keepdims=True)
    return result


class Reference:
    """One model, fully expanded. `router_margin` is the smallest gap between the last chosen and the first
    unchosen expert's router logit in the latest call: where it is tiny, two correct implementations may
    choose differently."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors: dict[str, NDArray[Any]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self.tensors |= read_tensors(path)
        self.router_margin = np.inf

    def affine4(self, name: str) -> Array:
        """Expand a 4-bit matrix with one scale and one bias for every group of its row."""
        codes = unpack(self.tensors[f"{name}.weight"], 4)
        scales, biases = self.tensors[f"{name}.scales"], self.tensors[f"{name}.biases"]
        group = codes.shape[-1] // scales.shape[-1]
        result: Array = codes * np.repeat(scales, group, axis=-1) + np.repeat(biases, group, axis=-1)
        return result

    def ternary(self, name: str) -> Array:
        """Expand ternary rows [.., out, in], whichever of the two forms holds their alphas."""
        codes = unpack(self.tensors[f"{name}.weight"], 2)
        if f"{name}.row_alpha" in self.tensors:
            result: Array = (codes - 1.0) * self.tensors[f"{name}.row_alpha"][..., None]
            return result
        scales, biases = self.tensors[f"{name}.scales"], self.tensors[f"{name}.biases"]
        group = codes.shape[-1] // scales.shape[-1]
        result = codes * np.repeat(scales, group, axis=-1) + np.repeat(biases, group, axis=-1)
        return result

    def layer_is_sliding(self, layer: int) -> bool:
        kinds = self.config.get("layer_types")
        return kinds is not None and kinds[layer] == "sliding_attention"

    def attention(self, x: Array, layer: int) -> Array:
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        tokens, head_dim, eps = len(x), config["head_dim"], config["rms_norm_eps"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        q = (x @ self.ternary(f"{prefix}.q_proj").T).reshape(tokens, heads, head_dim)
        k = (x @ self.ternary(f"{prefix}.k_proj").T).reshape(tokens, kv_heads, head_dim)
        v = (x @ self.ternary(f"{prefix}.v_proj").T).reshape(tokens, kv_heads, head_dim)
        q = rms_norm(q, self.tensors[f"{prefix}.q_norm.weight"], eps)
        k = rms_norm(k, self.tensors[f"{prefix}.k_norm.weight"], eps)

        positions = np.arange(tokens)
        distance = positions[:, None] - positions[None, :]  # [T query, T key]
        seen = distance >= 0
        if self.layer_is_sliding(layer):
            seen &= distance < config["sliding_window"]
            rope_dims = int(head_dim * config.get("partial_rotary_factor", 1.0))
            half = rope_dims // 2
            angles = positions[:, None] * config["rope_theta"] ** (
                -2.0 * np.arange(half) / rope_dims
            )  # [T, R/2]
            cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
            for vectors in (q, k):
                first, second = vectors[..., :half].copy(), vectors[..., half:rope_dims].copy()
                vectors[..., :half] = first * cos - second * sin
                vectors[..., half:rope_dims] = second * cos + first * sin

        k, v = np.repeat(k, heads // kv_heads, axis=1), np.repeat(v, heads // kv_heads, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
        weights = softmax(np.where(seen, scores, -np.inf))
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(tokens, heads * head_dim)
        result: Array = mixed @ self.ternary(f"{prefix}.o_proj").T
        return result

    def dense_mlp(self, x: Array, layer: int) -> Array:
        prefix = f"model.layers.{layer}.mlp"
        gate, up = x @ self.ternary(f"{prefix}.gate_proj").T, x @ self.ternary(f"{prefix}.up_proj").T
        result: Array = (silu(gate) * up) @ self.ternary(f"{prefix}.down_proj").T
        return result

    def moe(self, x: Array, layer: int) -> Array:
        prefix, num_chosen = f"model.layers.{layer}.mlp", self.config["num_experts_per_tok"]
        logits = x @ self.tensors[f"{prefix}.gate.weight"].T  # [T, E]
        order = np.argsort(-logits, axis=-1, kind="stable")  # ties go to the lower id
        if num_chosen < logits.shape[1]:
            ranked = np.take_along_axis(logits, order, axis=-1)
            margin = float(np.min(ranked[:, num_chosen - 1] - ranked[:, num_chosen]))
            self.router_margin = min(self.router_margin, margin)
        chosen = order[:, :num_chosen]
        weights = np.take_along_axis(softmax(logits), chosen, axis=-1)
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        gate_w, up_w, down_w = (self.ternary(f"{prefix}.switch_mlp.{n}_proj") for n in ("gate", "up", "down"))
        result = np.zeros_like(x)
        for token, rank in np.ndindex(chosen.shape):
            expert = chosen[token, rank]
            gate, up = gate_w[expert] @ x[token], up_w[expert] @ x[token]
            inner = silu(np.minimum(gate, 7.0)) * np.clip(up, -7.0, 7.0)
            result[token] += weights[token, rank] * (down_w[expert] @ inner)
        return result

    def logits(self, token_ids: Sequence[int] | NDArray[Any]) -> Array:
        """Return logits [T, V] after every position."""
        config, eps = self.config, self.config["rms_norm_eps"]
        self.router_margin = np.inf
        words = "model.word_embeddings"
        words = words if f"{words}.weight" in self.tensors else "model.embed_tokens"
        h = self.affine4(words)[np.asarray(token_ids)]  # [T, D]
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            h = h + self.attention(rms_norm(h, self.tensors[f"{prefix}.input_layernorm.weight"], eps), layer)
            normed = rms_norm(h, self.tensors[f"{prefix}.post_attention_layernorm.weight"], eps)
            dense = layer < config.get("first_k_dense_replace", 0)
            h = h + (self.dense_mlp(normed, layer) if dense else self.moe(normed, layer))
        result: Array = rms_norm(h, self.tensors["model.norm.weight"], eps) @ self.affine4("lm_head").T
        return result
