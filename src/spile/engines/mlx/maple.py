"""Maple as an mlx-lm model: `Model` and `ModelArgs`, for MLX's own arrays, caches and loader.

It turns token ids into logits with the checkpoint's 2-bit weights as MLX's affine quantization has them. It
knows no disk, slots or budget: experts are a SwitchGLU, so they are streamed like those of every other
architecture. Where it follows Maple and not mlx-lm's habits:

- a ternary row is one BF16 alpha: code * alpha - alpha in MLX's terms, so scales repeat the alpha for each
  group and biases repeat its negative. BF16 is taken as it is, never cast;
- q, k and v are the rows of one matrix, so are a dense layer's gate and up;
- router and norms are float32, the norms round once; experts' outputs are weighted and summed in float32, in
  ascending expert id;
- the clamped SwiGLU is one compiled graph: separate operations round in between;
- only sliding layers rotate, and only the first `rope_dims` of a head;
- what is not finite stays so: norms, clamps and the router's softmax, where it would vanish, turn it into NaN, which
  reaches the logits, and those the engine looks at.

Activations are the checkpoint's BF16 unless `activation_dtype` of the inner model says otherwise.

Sizes: B batch, T tokens, D width, F expert width, E experts, K chosen, V vocabulary.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators, no-warn-return-any

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn

from spile.architectures.maple import EMBEDDING_NAMES, IGNORED, LIMIT
from spile.architectures.maple import spec as read_spec
from spile.architectures.spec import TERNARY, ModelSpec, Rope
from spile.engines.mlx.adapter import attention_module, cache_module, switch_layers
from spile.errors import UnsupportedModelError

nn: Any = mlx.nn  # it has no types

LARGEST_NORMED = 1e16  # the squares of 2^20 such dimensions still have a sum in float32
GROUPS = (128, 64, 32)  # codes that share a scale in MLX; a row is constant, so the largest that divides it
_EMBEDDING = "model.word_embeddings"


class ModelArgs:
    """Maple's spec, checked, in the form that mlx-lm's loader asks for."""

    model_type = "maple"

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    @classmethod
    def from_dict(cls, params: Mapping[str, Any]) -> ModelArgs:
        """Check a raw config.json.

        Raises: UnsupportedModelError, CheckpointError.
        """
        return cls(read_spec(params))


class RMSNorm(nn.Module):
    """Multiplies its weight in float32 and rounds once."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dims,))
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        normed = mx.fast.rms_norm(x.astype(mx.float32), self.weight.astype(mx.float32), self._eps)
        return _rounded(normed, x)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, *, rope: Rope | None) -> None:
        super().__init__()
        self._heads, self._kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        self._head_dim, D = spec.head_dim, spec.hidden_size
        self._attend = attention_module().scaled_dot_product_attention
        rows = (self._heads + 2 * self._kv_heads) * self._head_dim
        self.qkv_proj = nn.Linear(D, rows, bias=False)
        self.o_proj = nn.Linear(self._heads * self._head_dim, D, bias=False)
        self.q_norm = RMSNorm(self._head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(self._head_dim, spec.rms_norm_eps)
        if rope is not None:
            self.rope = nn.RoPE(rope.dims, traditional=False, base=rope.theta)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        B, T, _ = x.shape
        heads, kv_heads = self._heads, self._kv_heads
        qkv = self.qkv_proj(x).reshape(B, T, heads + 2 * kv_heads, self._head_dim)
        q, k, v = mx.split(qkv, (heads, heads + kv_heads), axis=2)
        q, k, v = (heads_of.transpose(0, 2, 1, 3) for heads_of in (self.q_norm(q), self.k_norm(k), v))
        if "rope" in self:
            offset = 0 if cache is None else cache.offset
            q, k = self.rope(q, offset=offset), self.rope(k, offset=offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        mixed = self._attend(q, k, v, cache=cache, scale=self._head_dim**-0.5, mask=mask)
        return self.o_proj(mixed.transpose(0, 2, 1, 3).reshape(B, T, -1))


class DenseMLP(nn.Module):
    """SwiGLU without clamps, as the layers below `first_k_dense_replace` have it."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(_swiglu(gate, up))


class ClampedSwiGLU(nn.Module):
    """The activation of an expert: silu(min(gate, 7)) * clip(up, -7, 7)."""

    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        return _clamped_swiglu(gate, up)


class Router(nn.Module):
    """Chooses K experts a token; float32 throughout."""

    def __init__(self, width: int, num_experts: int, num_chosen: int) -> None:
        super().__init__()
        self.weight = mx.zeros((num_experts, width))
        self._num_chosen = num_chosen

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return the ids [B, T, K], ascending, and their float32 weights."""
        logits = _or_nan(x.astype(mx.float32) @ self.weight.astype(mx.float32).T)  # [B, T, E]
        probabilities = mx.softmax(logits, axis=-1, precise=True)
        k = self._num_chosen
        chosen = mx.sort(mx.argpartition(-probabilities, kth=k - 1, axis=-1)[..., :k], axis=-1)
        weights = mx.take_along_axis(probabilities, chosen, axis=-1)
        return chosen, weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)


class SparseMLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        D, F, E = spec.hidden_size, spec.moe_intermediate_size, spec.num_experts
        self.gate = Router(D, E, spec.num_experts_per_tok)
        self.switch_mlp = switch_layers().SwitchGLU(D, F, E, activation=ClampedSwiGLU())

    def __call__(self, x: mx.array) -> mx.array:
        chosen, weights = self.gate(x)
        outputs = self.switch_mlp(x, chosen).astype(mx.float32)  # [B, T, K, D]
        return (outputs * weights[..., None]).sum(axis=-2).astype(x.dtype)


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        D, eps = spec.hidden_size, spec.rms_norm_eps
        self.is_sliding = spec.layer_is_sliding[layer]
        self.input_layernorm = RMSNorm(D, eps)
        self.self_attn = Attention(spec, rope=spec.layers[layer].attention.rope)
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.mlp = SparseMLP(spec) if spec.is_moe(layer) else DenseMLP(D, spec.intermediate_size)

    def __call__(self, h: mx.array, mask: Any, cache: Any) -> mx.array:
        h = h + self.self_attn(self.input_layernorm(h), mask, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class MapleModel(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = [DecoderLayer(spec, layer) for layer in range(spec.num_hidden_layers)]
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.activation_dtype: mx.Dtype | None = None  # None: what the embeddings give
        self._window = spec.sliding_window
        self._make_mask = attention_module().create_attention_mask
        kinds = spec.layer_is_sliding
        self._first_sliding = kinds.index(True) if True in kinds else None
        self._first_full = kinds.index(False) if False in kinds else None

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        h = self._embed(inputs) if input_embeddings is None else input_embeddings
        caches = cache or [None] * len(self.layers)
        full = sliding = None
        if self._first_full is not None:
            full = self._make_mask(h, caches[self._first_full])
        if self._first_sliding is not None:
            sliding = self._make_mask(h, caches[self._first_sliding], window_size=self._window)
        for layer, its_cache in zip(self.layers, caches, strict=True):
            h = layer(h, sliding if layer.is_sliding else full, its_cache)
        return self.norm(h)

    def _embed(self, inputs: mx.array) -> mx.array:
        table, dtype = self.word_embeddings, self.activation_dtype
        if dtype is None:
            return table(inputs)
        # Not the module's own rows made wider: those were rounded to BF16.
        scales, biases = (part[inputs].astype(dtype) for part in (table.scales, table.biases))
        return mx.dequantize(
            table.weight[inputs], scales, biases, group_size=table.group_size, bits=table.bits
        )


class Model(nn.Module):
    """Maple with its head, as mlx-lm calls it."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = MapleModel(args.spec)
        self.lm_head = nn.Linear(args.spec.hidden_size, args.spec.vocab_size, bias=False)

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        """Return logits [B, T, V]."""
        return self.lm_head(self.model(inputs, cache, input_embeddings))

    @property
    def layers(self) -> list[Any]:
        return list(self.model.layers)

    def make_cache(self) -> list[Any]:
        caches, window = cache_module(), self.args.spec.sliding_window
        return [
            caches.RotatingKVCache(max_size=window) if layer.is_sliding else caches.KVCache()
            for layer in self.layers
        ]

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Rename and join the checkpoint's tensors to this module's; lazy, nothing is read.

        Raises: UnsupportedModelError for the unquantized source.
        """
        found = {name: value for name, value in weights.items() if not re.fullmatch(IGNORED, name)}
        if any(name.endswith(".experts.0.gate_proj.weight") for name in found):
            raise UnsupportedModelError(
                "these are the bf16 weights of a Maple, which are not run as they are",
                "Turn them into a 2-bit folder with spile convert.",
            )
        for name in [name for name in found if name.startswith(EMBEDDING_NAMES)]:
            found[f"{_EMBEDDING}.{name.rsplit('.', 1)[1]}"] = found.pop(name)
        for name in [name for name in found if name.endswith(".row_alpha")]:
            prefix = name.removesuffix(".row_alpha")
            width = found[f"{prefix}.weight"].shape[-1] * (32 // TERNARY.bits)
            found[f"{prefix}.scales"], found[f"{prefix}.biases"] = expand_alpha(found.pop(name), width)
        for layer in range(self.args.spec.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            _join(found, f"{prefix}.self_attn", ("q_proj", "k_proj", "v_proj"), "qkv_proj")
            if not self.args.spec.is_moe(layer):
                _join(found, f"{prefix}.mlp", ("gate_proj", "up_proj"), "gate_up_proj")
        return found


def group_size(width: int) -> int:
    """Return how many codes of a ternary row of this width share a scale in MLX.

    Raises: UnsupportedModelError for a width that MLX cannot group.
    """
    for size in GROUPS:
        if width % size == 0:
            return size
    raise UnsupportedModelError(
        f"a ternary layer with {width} inputs does not run in MLX: not a multiple of {GROUPS[-1]}",
        "The cpu engine runs it.",
    )


def expand_alpha(alpha: mx.array, width: int) -> tuple[mx.array, mx.array]:
    """Turn row alphas [.., out] into scales and biases [.., out, groups] for rows of this width."""
    groups = width // group_size(width)
    # A broadcast array would be copied by every product that reads it.
    scales = mx.contiguous(mx.broadcast_to(alpha[..., None], (*alpha.shape, groups)))
    return scales, -scales


def _join(weights: dict[str, mx.array], prefix: str, parts: tuple[str, ...], whole: str) -> None:
    for kind in ("weight", "scales", "biases"):
        names = [f"{prefix}.{part}.{kind}" for part in parts]
        if all(name in weights for name in names):
            weights[f"{prefix}.{whole}.{kind}"] = mx.concatenate([weights.pop(name) for name in names])


@partial(mx.compile, shapeless=True)
def _clamped_swiglu(gate: mx.array, up: mx.array) -> mx.array:
    y = nn.silu(mx.minimum(gate, LIMIT)) * mx.clip(up, -LIMIT, LIMIT)
    return mx.where(mx.isfinite(gate) & mx.isfinite(up), y, mx.nan)


@partial(mx.compile, shapeless=True)
def _or_nan(x: mx.array) -> mx.array:
    return mx.where(mx.isfinite(x), x, mx.nan)


@partial(mx.compile, shapeless=True)
def _rounded(normed: mx.array, x: mx.array) -> mx.array:
    """Round a norm of x to its dtype; NaN where the square of an x is beyond float32, which made the norm nothing."""
    return mx.where(mx.abs(x) < LARGEST_NORMED, normed, mx.nan).astype(x.dtype)


@partial(mx.compile, shapeless=True)
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up
