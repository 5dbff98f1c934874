"""Says which blocks the native decoder has: what of a model's spec the cpu engine cannot compute, by name.

It computes nothing and imports nothing that does.
"""

from __future__ import annotations

from spile.architectures.spec import (
    AFFINE4,
    BF16,
    EXPERT,
    TERNARY,
    Experts,
    Glu,
    LayerSpec,
    ModelSpec,
    Weight,
)


def missing_blocks(spec: ModelSpec) -> tuple[str, ...]:
    """Name what the decoder has no block for; nothing where it computes all of the model."""
    found = [f"embeddings in {spec.embedding.format}"] if spec.embedding.format != AFFINE4 else []
    found += [f"a head in {spec.head.format}"] if spec.head.format != AFFINE4 else []
    ropes = {layer.attention.rope for layer in spec.layers} - {None}
    windows = {layer.attention.window for layer in spec.layers} - {None}
    sizes = {
        (each.heads, each.kv_heads, each.head_dim) for each in (layer.attention for layer in spec.layers)
    }
    if max(len(ropes), len(windows), len(sizes)) > 1:
        found.append("layers of several kinds of heads, windows or rotations")
    if {each.format for each in spec.weights() if len(each.shape) == 1} != {BF16}:
        found.append("norms in other numbers than BF16")
    for layer in spec.layers:
        found += _of_layer(layer, spec)
    return tuple(dict.fromkeys(found))


def _of_layer(layer: LayerSpec, spec: ModelSpec) -> list[str]:
    attention, ffn = layer.attention, layer.ffn
    found = []
    for weight in (attention.q, attention.k, attention.v, attention.o):
        found += _of_linear(weight, "linear layers")
    norms = [None if norm is None else norm.shape for norm in (attention.q_norm, attention.k_norm)]
    if norms != [(attention.head_dim,)] * 2:
        found.append("heads without a norm of their own for queries and keys")
    if attention.sinks is not None:
        found.append("attention sinks")
    if isinstance(ffn, Experts):
        first = spec.first_experts
        router = ffn.router
        if router.weight.format != BF16 or router.weight.has_bias:
            found.append(f"routers in {router.weight.format}" + (" with biases" * router.weight.has_bias))
        if router.is_of_chosen:
            found.append("routers that weigh the chosen experts alone")
        if ffn.shared is not None:
            found.append("shared experts")
        if first is not None and _numbers(ffn) != _numbers(first):
            found.append("layers of several kinds of experts")
    glu = ffn if isinstance(ffn, Glu) else ffn.glu
    if glu.activation != "swiglu":
        found.append(f"the activation {glu.activation}")
    for weight in glu.weights():
        found += _of_linear(weight, "linear layers" if isinstance(ffn, Glu) else "experts")
    return found


def _numbers(ffn: Experts) -> tuple[object, ...]:
    return ffn.num, ffn.router.num_chosen, ffn.router.renormalise_eps, ffn.glu.width, ffn.glu.limit


def _of_linear(weight: Weight, what: str) -> list[str]:
    found = [] if weight.format.kind == TERNARY.kind else [f"{what} in {weight.format}"]
    if weight.has_bias:
        found.append(f"{what} with biases")
    if weight.slice is not None or EXPERT in weight.name:
        found.append(f"{what} in fused or separate tensors")
    return found
