"""Turns a checkpoint into a Maple: its config as checked numbers, its form, every tensor where it should
be.

All knowledge of Maple's names, shapes and fixed values is here. It does not read weights (headers have
said all that is needed) and knows nothing of memory or engines.

Sizes: V vocabulary, D width, E experts, F expert width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from spile.architectures import find_model_type
from spile.errors import CheckpointError, UnsupportedModelError, quote
from spile.files.checkpoint import Checkpoint, Tensor

EMBEDDING_NAMES = ("model.word_embeddings", "model.embed_tokens")
TERNARY_BITS, TERNARY_GROUP = 2, 128
TABLE_BITS, TABLE_GROUP = 4, 64  # embeddings and head
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
CODES_PER_WORD = 16  # ternary codes in a U32

# Values that Maple's forward pass is written for; absent means these.
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
# The largest value of each size: far above any model, and small enough that no sum in a kernel can overflow.
_LARGEST = {
    "num_hidden_layers": 10_000,
    "num_experts": 65_536,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**30,
}
_LARGEST_OTHER = 2**20
_IGNORED_PREFIXES = ("lm_head_flash.", "head.")
_IGNORED_PARTS = (".head.", ".rotary_emb.inv_freq")


class Form(Enum):
    """How the linear layers are stored."""

    ROW_ALPHA = "row alphas"  # 2-bit codes, one BF16 alpha a row
    GROUP_SCALES = "group scales"  # 2-bit codes, scales and biases that repeat the alpha every 128 codes
    BF16 = "bf16"  # the unquantized source


@dataclass(frozen=True)
class MapleConfig:
    """The numbers of config.json, checked."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    intermediate_size: int  # 0 where no layer is dense
    first_k_dense_replace: int
    rms_norm_eps: float
    rope_theta: float
    rope_dims: int  # R: the dimensions of a head that RoPE turns
    max_position_embeddings: int
    vocab_size: int
    sliding_window: int  # 0 where no layer slides
    layer_is_sliding: tuple[bool, ...]
    eos_token_ids: tuple[int, ...]

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def num_routed_experts(self) -> int:
        """Experts of all layers together."""
        return self.num_moe_layers * self.num_experts


@dataclass(frozen=True)
class MapleModel:
    """A Maple whose tensors are all there, with the dtypes and shapes that `config` asks for."""

    checkpoint: Checkpoint
    config: MapleConfig
    form: Form
    embedding_name: str  # one of EMBEDDING_NAMES


class Expected(NamedTuple):
    """One tensor that a Maple must have."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def open_maple(checkpoint: Checkpoint) -> MapleModel:
    """Check a checkpoint's config and every tensor's dtype and shape against each other. No disk access.

    Raises:
        UnsupportedModelError: another architecture, or a value that spile does not run.
        CheckpointError: a value is damaged, a tensor is missing or has another dtype or shape.
    """
    find_model_type(checkpoint.config)
    config = parse_config(checkpoint.config)
    tensors = checkpoint.tensors
    form = _find_form(tensors, config)
    embedding_name = _find_embedding(tensors)
    _check_quantization(checkpoint.config, form, embedding_name, tensors)
    check_widths(config, form)
    known = set()
    for expected in expected_tensors(config, form, embedding_name):
        _check_tensor(tensors, expected)
        known.add(expected.name)
    for name in tensors:
        if (
            name not in known
            and not name.startswith(_IGNORED_PREFIXES)
            and not any(p in name for p in _IGNORED_PARTS)
        ):
            raise CheckpointError(
                f"tensor {quote(name)} has no place in a Maple of {config.num_hidden_layers} layers and "
                f"{config.num_experts} experts in the form with {form.value}",
                "The config and the weights are not of the same model.",
            )
    return MapleModel(checkpoint, config, form, embedding_name)


def parse_config(raw: Mapping[str, Any]) -> MapleConfig:
    """Check the values of a raw config.

    Raises:
        UnsupportedModelError: a value that spile does not run.
        CheckpointError: a value that makes no sense, or a missing one.
    """
    for key, fixed in FIXED_VALUES.items():
        value = raw.get(key, fixed)
        if type(value) is not type(fixed) or value != fixed:
            raise UnsupportedModelError(
                f"config.json: {key} is {quote(value)}; spile runs Maple with {fixed!r} only"
            )
    if raw.get("rope_parameters") is not None:
        raise UnsupportedModelError(
            "config.json: rope_parameters is not supported; spile reads rope_theta and partial_rotary_factor"
        )
    layers = _size(raw, "num_hidden_layers")
    heads, kv_heads = _size(raw, "num_attention_heads"), _size(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    experts, chosen = _size(raw, "num_experts"), _size(raw, "num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(f"config.json: num_experts_per_tok {chosen} exceeds num_experts {experts}")
    dense = _size(raw, "first_k_dense_replace", default=0, least=0)
    if dense > layers:
        raise CheckpointError(
            f"config.json: first_k_dense_replace {dense} exceeds num_hidden_layers {layers}"
        )
    sliding = _layer_is_sliding(raw, layers)
    head_dim, vocab_size = _size(raw, "head_dim"), _size(raw, "vocab_size")
    return MapleConfig(
        hidden_size=_size(raw, "hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=_size(raw, "moe_intermediate_size"),
        intermediate_size=_size(raw, "intermediate_size") if dense else 0,
        first_k_dense_replace=dense,
        rms_norm_eps=_number(raw, "rms_norm_eps", largest=1.0),
        rope_theta=_number(raw, "rope_theta", largest=1e12),
        rope_dims=_rope_dims(raw, head_dim),
        max_position_embeddings=_size(raw, "max_position_embeddings"),
        vocab_size=vocab_size,
        sliding_window=_size(raw, "sliding_window", largest=2**30) if any(sliding) else 0,
        layer_is_sliding=sliding,
        eos_token_ids=_eos_token_ids(raw, vocab_size),
    )


def expected_tensors(config: MapleConfig, form: Form, embedding_name: str) -> Iterator[Expected]:
    """Yield every tensor that a Maple of this config and form has, in the order of the forward pass."""
    D, head_dim = config.hidden_size, config.head_dim
    yield from _table(embedding_name, config.vocab_size, D, form)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield Expected(f"{prefix}.input_layernorm.weight", "BF16", (D,))
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        yield from ternary(f"{prefix}.self_attn.q_proj", (q_size,), D, form)
        yield from ternary(f"{prefix}.self_attn.k_proj", (kv_size,), D, form)
        yield from ternary(f"{prefix}.self_attn.v_proj", (kv_size,), D, form)
        yield from ternary(f"{prefix}.self_attn.o_proj", (D,), q_size, form)
        yield Expected(f"{prefix}.self_attn.q_norm.weight", "BF16", (head_dim,))
        yield Expected(f"{prefix}.self_attn.k_norm.weight", "BF16", (head_dim,))
        yield Expected(f"{prefix}.post_attention_layernorm.weight", "BF16", (D,))
        if not config.is_moe(layer):
            yield from _mlp(f"{prefix}.mlp", (), D, config.intermediate_size, form)
            continue
        yield Expected(f"{prefix}.mlp.gate.weight", "BF16", (config.num_experts, D))
        width = config.moe_intermediate_size
        if form is Form.BF16:
            for expert in range(config.num_experts):
                yield from _mlp(f"{prefix}.mlp.experts.{expert}", (), D, width, form)
        else:
            yield from _mlp(f"{prefix}.mlp.switch_mlp", (config.num_experts,), D, width, form)
    yield Expected("model.norm.weight", "BF16", (D,))
    yield from _table("lm_head", config.vocab_size, D, form)


def ternary(prefix: str, rows: tuple[int, ...], width: int, form: Form) -> Iterator[Expected]:
    """Yield the tensors of a linear layer with `rows` outputs (experts first) and `width` inputs."""
    if form is Form.BF16:
        yield Expected(f"{prefix}.weight", "BF16", (*rows, width))
        return
    yield Expected(f"{prefix}.weight", "U32", (*rows, width // CODES_PER_WORD))
    if form is Form.ROW_ALPHA:
        yield Expected(f"{prefix}.row_alpha", "BF16", rows)
    else:
        yield Expected(f"{prefix}.scales", "BF16", (*rows, width // TERNARY_GROUP))
        yield Expected(f"{prefix}.biases", "BF16", (*rows, width // TERNARY_GROUP))


def _mlp(prefix: str, stack: tuple[int, ...], width: int, inner: int, form: Form) -> Iterator[Expected]:
    for projection in PROJECTIONS:
        rows, inputs = (width, inner) if projection == "down_proj" else (inner, width)
        yield from ternary(f"{prefix}.{projection}", (*stack, rows), inputs, form)


def _table(prefix: str, rows: int, width: int, form: Form) -> Iterator[Expected]:
    if form is Form.BF16:
        yield Expected(f"{prefix}.weight", "BF16", (rows, width))
        return
    yield Expected(f"{prefix}.weight", "U32", (rows, width * TABLE_BITS // 32))
    yield Expected(f"{prefix}.scales", "BF16", (rows, width // TABLE_GROUP))
    yield Expected(f"{prefix}.biases", "BF16", (rows, width // TABLE_GROUP))


def _check_tensor(tensors: Mapping[str, Tensor], expected: Expected) -> None:
    found = tensors.get(expected.name)
    wanted = f"{expected.dtype} {list(expected.shape)}"
    if found is None:
        raise CheckpointError(f"tensor {expected.name} is missing: config.json asks for {wanted}")
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise CheckpointError(
            f"tensor {expected.name}: expected {wanted} from config.json, "
            f"found {found.dtype} {list(found.shape)}"
        )


def _find_form(tensors: Mapping[str, Tensor], config: MapleConfig) -> Form:
    prefix = "model.layers.0.self_attn.q_proj"
    if f"{prefix}.row_alpha" in tensors:
        return Form.ROW_ALPHA
    if f"{prefix}.scales" in tensors:
        return Form.GROUP_SCALES
    weight = tensors.get(f"{prefix}.weight")
    if weight is None:
        raise CheckpointError(f"tensor {prefix}.weight is missing", "Are these the weights of a Maple?")
    if weight.dtype == "BF16":
        return Form.BF16
    raise CheckpointError(
        f"tensor {prefix}.weight is {weight.dtype} {list(weight.shape)}, "
        f"but neither {prefix}.row_alpha nor {prefix}.scales is there; expected one of them, or BF16 weights"
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


def check_widths(config: MapleConfig, form: Form) -> None:
    inputs = {
        "hidden_size": config.hidden_size,
        "num_attention_heads x head_dim": config.num_attention_heads * config.head_dim,
        "moe_intermediate_size": config.moe_intermediate_size,
        "intermediate_size": config.intermediate_size,
    }
    multiple = TERNARY_GROUP if form is Form.GROUP_SCALES else CODES_PER_WORD
    for key, width in inputs.items():
        least = max(multiple, TABLE_GROUP) if key == "hidden_size" else multiple
        if width % least:
            raise UnsupportedModelError(
                f"config.json: {key} is {width}; it does not pack: not a multiple of {least}"
            )


def _check_quantization(
    raw: Mapping[str, Any], form: Form, embedding_name: str, tensors: Mapping[str, Tensor]
) -> None:
    """Compare what the config says about bits and groups with the one layout that spile runs."""
    for block_key in ("quantization", "quantization_config"):
        block = raw.get(block_key)
        if block is None:
            continue
        if not isinstance(block, dict):
            raise CheckpointError(f"config.json: {block_key} is {quote(block)}, expected an object")
        if form is Form.BF16:
            raise CheckpointError(
                f"config.json has {block_key}, but the weights are not quantized: they are BF16"
            )
        tables = {"lm_head", embedding_name}
        _check_block(
            block, block_key, "model.layers.0.self_attn.q_proj", TERNARY_BITS, TERNARY_GROUP, tensors
        )
        for name, value in block.items():
            if isinstance(value, dict) and not name.startswith(_IGNORED_PREFIXES):
                bits, group = (TABLE_BITS, TABLE_GROUP) if name in tables else (TERNARY_BITS, TERNARY_GROUP)
                _check_block(value, f"{block_key}.{name}", name, bits, group, tensors)
        for name in sorted(tables):
            if not isinstance(block.get(name), dict):
                raise UnsupportedModelError(
                    f"config.json: {block_key}.{name} is missing; spile runs it with bits {TABLE_BITS}, "
                    f"group_size {TABLE_GROUP}"
                )


def _check_block(
    block: Mapping[str, Any], where: str, prefix: str, bits: int, group: int, tensors: Mapping[str, Tensor]
) -> None:
    mode = block.get("mode", "affine")
    if mode != "affine":
        raise UnsupportedModelError(f"config.json: {where}.mode is {quote(mode)}; spile runs 'affine' only")
    for key, expected in (("bits", bits), ("group_size", group)):
        value = block.get(key)
        if value == expected and not isinstance(value, (bool, float)):
            continue
        message = f"config.json: {where}.{key} is {quote(value)}; spile runs {expected} only"
        tensor = tensors.get(f"{prefix}.weight")
        if (
            key == "bits"
            and tensor is not None
            and isinstance(value, int)
            and 0 < value <= 32
            and tensor.shape
        ):
            claimed = [*tensor.shape[:-1], tensor.shape[-1] * value // bits]
            message += f" (tensor {prefix}.weight: {value} bits expect U32 {claimed}, found {tensor.dtype} "
            message += f"{list(tensor.shape)})"
        raise UnsupportedModelError(message)


def _size(
    raw: Mapping[str, Any],
    key: str,
    *,
    default: int | None = None,
    least: int = 1,
    largest: int | None = None,
) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing")
    largest = largest or _LARGEST.get(key, _LARGEST_OTHER)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
        raise CheckpointError(
            f"config.json: {key} is {quote(value)}, expected an integer from {least} to {largest:,}"
        )
    return value


def _number(raw: Mapping[str, Any], key: str, *, largest: float) -> float:
    value = raw.get(key)
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= largest:
        raise CheckpointError(
            f"config.json: {key} is {quote(value)}, expected a number above 0, at most {largest:g}"
        )
    return float(value)


def _rope_dims(raw: Mapping[str, Any], head_dim: int) -> int:
    dims = head_dim * _number(raw, "partial_rotary_factor", largest=1.0)
    if not math.isclose(dims, round(dims), abs_tol=1e-6) or round(dims) % 2 or round(dims) < 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {raw['partial_rotary_factor']} of head_dim {head_dim} "
            f"is {dims:g} dimensions, expected an even number"
        )
    return round(dims)


def _layer_is_sliding(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    types = raw.get("layer_types")
    if types is None:
        return (False,) * layers
    if not isinstance(types, list) or len(types) != layers:
        count = len(types) if isinstance(types, list) else quote(types)
        raise CheckpointError(f"config.json: layer_types has {count} entries, num_hidden_layers is {layers}")
    for layer, kind in enumerate(types):
        if kind not in ("sliding_attention", "full_attention"):
            raise UnsupportedModelError(
                f"config.json: layer_types[{layer}] is {quote(kind)}; "
                "spile runs sliding_attention and full_attention"
            )
    return tuple(kind == "sliding_attention" for kind in types)


def _eos_token_ids(raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise CheckpointError(
                f"config.json: eos_token_id has {quote(token)}, expected ids from 0 to {vocab_size - 1:,}"
            )
    return tuple(dict.fromkeys(ids))
