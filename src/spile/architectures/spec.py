"""What a model is, as data: layers, what mixes tokens in them, experts and their router, and every weight by name.

An architecture's module turns a config into a `ModelSpec`; everything else reads it and knows no architecture. It says
what a model is, not who can compute it: an engine refuses what it has no block for.

Sizes: V vocabulary, D width, E experts, F expert width, K chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from spile.files.checkpoint import Checkpoint, Tensor

EXPERT = "{expert}"  # in the name of a weight whose experts have tensors of their own


class Expected(NamedTuple):
    """One tensor that a checkpoint must have."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Format:
    """How a matrix is stored: as numbers of a dtype (BF16, F16, F32), or as codes of some bits.

    ternary: value = (code - 1) * alpha of the row; in groups, scales repeat the alpha and biases its negative.
    affine: value = code * scale + bias of the group. mxfp4: a 4-bit float times a power of two of the group.
    """

    kind: str
    bits: int = 16
    group: int = 0  # codes that share a scale; 0: a row does, or nothing is scaled
    numbers: str = "BF16"  # the dtype of what scales codes

    def tensors(self, name: str, shape: tuple[int, ...]) -> Iterator[Expected]:
        """Yield the tensors of a weight of this shape, the codes first."""
        *rows, n = shape
        if not self.is_coded:
            yield Expected(f"{name}.weight", self.kind, shape)
            return
        yield Expected(f"{name}.weight", "U32", (*rows, n * self.bits // 32))
        if self.kind == "mxfp4":
            yield Expected(f"{name}.scales", "U8", (*rows, n // self.group))
        elif self.group:
            yield Expected(f"{name}.scales", self.numbers, (*rows, n // self.group))
            yield Expected(f"{name}.biases", self.numbers, (*rows, n // self.group))
        else:
            yield Expected(f"{name}.row_alpha", self.numbers, tuple(rows))

    @property
    def is_coded(self) -> bool:
        return self.kind not in ("BF16", "F16", "F32")

    @property
    def multiple(self) -> int:
        """What a row's length must be a multiple of."""
        return max(32 // self.bits, self.group) if self.is_coded else 1

    def __str__(self) -> str:
        if not self.is_coded:
            return self.kind
        text = f"{self.bits}-bit {self.kind}" + (f" in groups of {self.group}" if self.group else "")
        return text if self.numbers == "BF16" else f"{text} with {self.numbers}"


TERNARY = Format("ternary", 2)
TERNARY_GROUPS = Format("ternary", 2, 128)
AFFINE4 = Format("affine", 4, 64)
BF16 = Format("BF16")


class Slice(NamedTuple):
    """The rows first, first + step, .. of a tensor of `num` rows: a part of a fused or interleaved one."""

    first: int
    step: int
    num: int


@dataclass(frozen=True)
class Weight:
    """One matrix or vector. `name` lacks the endings of its tensors; `shape` is [out, in], experts before it."""

    name: str
    format: Format
    shape: tuple[int, ...]
    slice: Slice | None = None  # None: the whole tensor
    has_bias: bool = False  # one number a row is added

    def tensors(self) -> Iterator[Expected]:
        shape = self.shape
        if self.slice is not None:
            shape = (*shape[:-2], self.slice.num, shape[-1])
        if EXPERT not in self.name:
            yield from self._of(self.name, shape)
            return
        for expert in range(shape[0]):
            yield from self._of(self.name.replace(EXPERT, str(expert)), shape[1:])

    def _of(self, name: str, shape: tuple[int, ...]) -> Iterator[Expected]:
        yield from self.format.tensors(name, shape)
        if self.has_bias:
            yield Expected(
                f"{name}.bias", self.format.numbers if self.format.is_coded else self.format.kind, shape[:-1]
            )


@dataclass(frozen=True)
class Rope:
    """Pairs (i, i + dims/2) of a head's first `dims` dimensions turn by position * theta^(-2i/dims)."""

    dims: int
    theta: float


@dataclass(frozen=True)
class Attention:
    """Softmax attention with grouped queries, scaled by head_dim^-0.5."""

    heads: int
    kv_heads: int
    head_dim: int
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    q_norm: Weight | None = None  # [head_dim]: of each head; longer: of all heads together
    k_norm: Weight | None = None
    window: int | None = None  # positions that a token sees, itself among them; None: all before it
    rope: Rope | None = None
    sinks: Weight | None = None  # [heads]: logits of a key that has no value

    def weights(self) -> Iterator[Weight]:
        each = self.q, self.k, self.v, self.o, self.q_norm, self.k_norm, self.sinks
        return (weight for weight in each if weight is not None)


@dataclass(frozen=True)
class Glu:
    """down( silu(min(gate x, limit)) * clip(up x, -limit, limit) ), or another activation by name."""

    gate: Weight
    up: Weight
    down: Weight
    limit: float = 0.0  # 0: nothing is clamped
    activation: str = "swiglu"

    def weights(self) -> Iterator[Weight]:
        return iter((self.gate, self.up, self.down))

    @property
    def width(self) -> int:
        return self.gate.shape[-2]


@dataclass(frozen=True)
class Router:
    """Chooses K experts by a softmax of all logits, or of the chosen ones."""

    weight: Weight  # [E, D]
    num_chosen: int
    renormalise_eps: float | None = (
        None  # the chosen weights are divided by their sum + this; None: they are not
    )
    is_of_chosen: bool = False


@dataclass(frozen=True)
class Experts:
    """Routed experts, whose weights are stacked [E, out, in], and one that every token takes."""

    num: int
    router: Router
    glu: Glu
    shared: Glu | None = None
    shared_gate: Weight | None = None  # its sigmoid weighs the shared expert

    def weights(self) -> Iterator[Weight]:
        yield self.router.weight
        yield from self.glu.weights()
        if self.shared is not None:
            yield from self.shared.weights()
        if self.shared_gate is not None:
            yield self.shared_gate


@dataclass(frozen=True)
class LayerSpec:
    """h = h + attention(norm(h)); h = h + ffn(norm(h))."""

    input_norm: Weight
    attention: Attention
    post_norm: Weight
    ffn: Glu | Experts

    def weights(self) -> Iterator[Weight]:
        yield self.input_norm
        yield from self.attention.weights()
        yield self.post_norm
        yield from self.ffn.weights()


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of RMS norms, residuals and one head. Names of sizes are those of config.json.

    Sizes that layers might not share (heads, windows, experts) are the first layer's that has them.
    """

    model_type: str
    embedding: Weight  # [V, D]
    layers: tuple[LayerSpec, ...]
    norm: Weight
    head: Weight  # the embedding where they are tied
    rms_norm_eps: float
    max_position_embeddings: int

    def weights(self) -> Iterator[Weight]:
        """Yield every weight, in the order of the forward pass."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.weights()
        yield self.norm
        yield self.head

    def tensors(self) -> Iterator[Expected]:
        """Yield every tensor once, in the order of the forward pass. Lazy: a config can claim billions."""
        seen = set()
        for weight in self.weights():
            for each in weight.tensors():
                if each.name not in seen:
                    seen.add(each.name)
                    yield each

    def is_moe(self, layer: int) -> bool:
        return isinstance(self.layers[layer].ffn, Experts)

    @cached_property
    def first_experts(self) -> Experts | None:
        return next((ffn for ffn in (layer.ffn for layer in self.layers) if isinstance(ffn, Experts)), None)

    @cached_property
    def first_dense(self) -> Glu | None:
        return next((ffn for ffn in (layer.ffn for layer in self.layers) if isinstance(ffn, Glu)), None)

    @property
    def attention(self) -> Attention:
        return self.layers[0].attention

    @property
    def num_attention_heads(self) -> int:
        return self.attention.heads

    @property
    def num_key_value_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def num_moe_layers(self) -> int:
        return sum(self.is_moe(layer) for layer in range(len(self.layers)))

    @property
    def num_experts(self) -> int:
        return 0 if self.first_experts is None else self.first_experts.num

    @property
    def num_routed_experts(self) -> int:
        """Experts of all layers together."""
        return self.num_moe_layers * self.num_experts

    @property
    def num_experts_per_tok(self) -> int:
        return 0 if self.first_experts is None else self.first_experts.router.num_chosen

    @property
    def moe_intermediate_size(self) -> int:
        return 0 if self.first_experts is None else self.first_experts.glu.width

    @property
    def intermediate_size(self) -> int:
        """The width of dense layers; 0 where there are none."""
        return 0 if self.first_dense is None else self.first_dense.width

    @cached_property
    def layer_is_sliding(self) -> tuple[bool, ...]:
        return tuple(layer.attention.window is not None for layer in self.layers)

    @cached_property
    def sliding_window(self) -> int:
        """0 where no layer slides."""
        return next((w for w in (layer.attention.window for layer in self.layers) if w is not None), 0)


@dataclass(frozen=True)
class OwnModel:
    """A checkpoint whose tensors are all there, with the dtypes and shapes that its spec asks for."""

    checkpoint: Checkpoint
    spec: ModelSpec

    def tensors(self, weight: Weight) -> list[Tensor]:
        """Return where a weight lies, its codes first."""
        return [self.checkpoint.tensors[each.name] for each in weight.tensors()]
