"""Turns values of a raw config.json into checked numbers, layouts and weights by their usual names.

What several architectures' modules share; it knows none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spile.architectures.spec import BF16, Attention, Expected, Experts, Format, Glu, LayerSpec, Rope, Weight
from spile.errors import CheckpointError, UnsupportedModelError, quote
from spile.files.checkpoint import Tensor

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# The largest value of each size: far above any model, and small enough that no sum in a kernel can overflow.
_LARGEST = {
    "num_hidden_layers": 10_000,
    "num_experts": 65_536,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**30,
}
_LARGEST_OTHER = 2**20
_MODES = {"affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128)), "mxfp4": ((4,), (32,))}  # bits and groups


def size(
    raw: Mapping[str, Any],
    key: str,
    *,
    default: int | None = None,
    least: int = 1,
    largest: int | None = None,
) -> int:
    """Return a whole number. Raises: CheckpointError."""
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


def number(raw: Mapping[str, Any], key: str, *, largest: float) -> float:
    """Return a number above 0. Raises: CheckpointError."""
    value = raw.get(key)
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= largest:
        raise CheckpointError(
            f"config.json: {key} is {quote(value)}, expected a number above 0, at most {largest:g}"
        )
    return float(value)


def check_fixed(raw: Mapping[str, Any], fixed_values: Mapping[str, Any], name: str) -> None:
    """Check values that a forward pass is written for; absent means these. Raises: UnsupportedModelError."""
    for key, fixed in fixed_values.items():
        value = raw.get(key, fixed)
        if type(value) is not type(fixed) or value != fixed:
            raise UnsupportedModelError(
                f"config.json: {key} is {quote(value)}; spile runs {name} with {fixed!r} only"
            )


def heads(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Return the heads of queries, and of keys and values. Raises: CheckpointError."""
    num, kv = size(raw, "num_attention_heads"), size(raw, "num_key_value_heads")
    if num % kv:
        raise CheckpointError(
            f"config.json: num_attention_heads {num} is not a multiple of num_key_value_heads {kv}"
        )
    return num, kv


def experts(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Return the experts of a layer, and of a token. Raises: CheckpointError."""
    num, chosen = size(raw, "num_experts"), size(raw, "num_experts_per_tok")
    if chosen > num:
        raise CheckpointError(f"config.json: num_experts_per_tok {chosen} exceeds num_experts {num}")
    return num, chosen


def layer_is_sliding(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return which layers have a window; none where the config does not say. Raises: ModelError."""
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


def check_end_tokens(raw: Mapping[str, Any], vocab_size: int) -> None:
    """Check the ids that end an answer. Raises: CheckpointError."""
    value = raw.get("eos_token_id")
    for token in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise CheckpointError(
                f"config.json: eos_token_id has {quote(token)}, expected ids from 0 to {vocab_size - 1:,}"
            )


def check_widths(widths: Mapping[str, tuple[int, Sequence[Format]]]) -> None:
    """Check that rows of these lengths pack into these formats. Raises: UnsupportedModelError."""
    for key, (width, formats) in widths.items():
        multiple = max(each.multiple for each in formats)
        if width % multiple:
            raise UnsupportedModelError(
                f"config.json: {key} is {width}; it does not pack: not a multiple of {multiple}"
            )


def rope_dims(raw: Mapping[str, Any], head_dim: int) -> int:
    """Return how many dimensions of a head RoPE turns. Raises: CheckpointError."""
    dims = head_dim * number(raw, "partial_rotary_factor", largest=1.0)
    if not math.isclose(dims, round(dims), abs_tol=1e-6) or round(dims) % 2 or round(dims) < 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {raw['partial_rotary_factor']} of head_dim {head_dim} "
            f"is {dims:g} dimensions, expected an even number"
        )
    return round(dims)


def check_block(
    block: Mapping[str, Any], where: str, name: str, expected: Format, tensors: Mapping[str, Tensor]
) -> None:
    """Compare a block of config.json's quantization with the format that spile runs `name` in.

    Raises: UnsupportedModelError.
    """
    mode = block.get("mode", "affine")
    if mode != "affine":
        raise UnsupportedModelError(f"config.json: {where}.mode is {quote(mode)}; spile runs 'affine' only")
    for key, wanted in (("bits", expected.bits), ("group_size", expected.group)):
        value = block.get(key)
        if value == wanted and not isinstance(value, (bool, float)):
            continue
        message = f"config.json: {where}.{key} is {quote(value)}; spile runs {wanted} only"
        tensor = tensors.get(f"{name}.weight")
        if (
            key == "bits"
            and tensor is not None
            and isinstance(value, int)
            and 0 < value <= 32
            and tensor.shape
        ):
            claimed = [*tensor.shape[:-1], tensor.shape[-1] * value // wanted]
            message += f" (tensor {name}.weight: {value} bits expect U32 {claimed}, found {tensor.dtype} "
            message += f"{list(tensor.shape)})"
        raise UnsupportedModelError(message)


def check_tensor(
    tensors: Mapping[str, Tensor], expected: Expected, source: str = "config.json", hint: str | None = None
) -> Tensor:
    """Return a tensor that has the dtype and shape that `source` asks for. Raises: CheckpointError."""
    name, dtype, shape = expected
    tensor, wanted = tensors.get(name), f"{dtype} {list(shape)}"
    if tensor is None:
        raise CheckpointError(f"tensor {name} is missing: {source} asks for {wanted}", hint)
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise CheckpointError(f"tensor {name}: expected {wanted} from {source}, found {found}", hint)
    return tensor


class Names:
    """Weights by the names that most checkpoints use, for models of one width."""

    def __init__(self, width: int, format_of: Callable[[str], Format], plain: Format = BF16) -> None:
        """`format_of` says how a matrix is stored, `plain` how vectors are."""
        self._width, self._format_of, self._plain = width, format_of, plain

    def linear(self, name: str, *shape: int) -> Weight:
        return Weight(name, self._format_of(name), shape)

    def norm(self, name: str, length: int | None = None) -> Weight:
        return Weight(name, self._plain, (length or self._width,))

    def attention(
        self,
        prefix: str,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope | None,
        window: int | None = None,
    ) -> Attention:
        """Return attention whose queries and keys are normalised head by head."""
        D, wide, narrow = self._width, heads * head_dim, kv_heads * head_dim
        shapes = {"q": (wide, D), "k": (narrow, D), "v": (narrow, D), "o": (D, wide)}
        q, k, v, o = (self.linear(f"{prefix}.{name}_proj", *shape) for name, shape in shapes.items())
        q_norm, k_norm = (self.norm(f"{prefix}.{name}_norm", head_dim) for name in "qk")
        return Attention(heads, kv_heads, head_dim, q, k, v, o, q_norm, k_norm, window, rope)

    def glu(self, prefix: str, inner: int, num_experts: int | None = None, limit: float = 0.0) -> Glu:
        """Return a GLU, or the stack of those of so many experts."""
        stack = () if num_experts is None else (num_experts,)
        shapes = (inner, self._width), (inner, self._width), (self._width, inner)
        gate, up, down = (
            self.linear(f"{prefix}.{name}", *stack, *shape)
            for name, shape in zip(PROJECTIONS, shapes, strict=True)
        )
        return Glu(gate, up, down, limit)

    def layer(self, prefix: str, attention: Attention, ffn: Glu | Experts) -> LayerSpec:
        before, between = (self.norm(f"{prefix}.{name}_layernorm") for name in ("input", "post_attention"))
        return LayerSpec(before, attention, between, ffn)


class Quantization:
    """What config.json says about the format of each weight, as MLX's files say it: `plain` where it says nothing."""

    def __init__(self, raw: Mapping[str, Any], plain: Format) -> None:
        """Raises: CheckpointError."""
        self._plain = plain
        block = raw.get("quantization", raw.get("quantization_config"))
        if block is not None and not isinstance(block, Mapping):
            raise CheckpointError(f"config.json: quantization is {quote(block)}, expected an object")
        self._block = block

    def of(self, name: str) -> Format:
        """Return a weight's format. Raises: UnsupportedModelError for another than spile reads, CheckpointError."""
        block: Any = self._block
        where = "quantization"
        if block is not None and name in block:
            block, where = block[name], f"quantization.{name}"
        if block is None or block is False:
            return self._plain
        if not isinstance(block, Mapping):
            raise CheckpointError(f"config.json: {where} is {quote(block)}, expected an object or false")
        mode = block.get("mode", "affine")
        if not isinstance(mode, str) or mode not in _MODES:
            raise UnsupportedModelError(
                f"config.json: {where}.mode is {quote(mode)}; spile reads {' and '.join(_MODES)}"
            )
        for key, known in zip(("bits", "group_size"), _MODES[mode], strict=True):
            value = block.get(key)
            if isinstance(value, (bool, float)) or value not in known:
                raise UnsupportedModelError(
                    f"config.json: {where}.{key} is {quote(value)}; spile reads {', '.join(map(str, known))}"
                )
        return Format(mode, block["bits"], block["group_size"], self._plain.kind)


def plain_format(tensors: Mapping[str, Tensor], name: str) -> Format:
    """Return the format of what is not coded, by that of one tensor; BF16 where it is not there."""
    tensor = tensors.get(name)
    return Format(tensor.dtype) if tensor is not None and tensor.dtype in ("F16", "F32") else BF16
