"""Turns a model's headers into the bytes that an engine takes for its weights, its head and its activations.

It reads no weights, and knows no budget: `plan.py` adds the parts up. `engines/cpu/weights.py` and `head.py` allocate
what is counted here.
"""

from __future__ import annotations

from spile.architectures.flash_head import open_flash_head
from spile.architectures.spec import TERNARY, Experts, ModelSpec, OwnModel
from spile.options import EngineOptions

FLASH_PIECE_ROWS = 4096  # of a clustered head, gathered at a time: enough for many threads
HEAD_PIECE_ROWS, HEAD_RING_PIECES = 1024, 4  # of a streamed head: 1.2 MB a piece of a full-size one


def activation_nbytes(spec: ModelSpec, chunk: int) -> int:
    """Bytes of the decoder's buffers for chunks of T tokens, and of the logits that sampling copies."""
    D, F, K = spec.hidden_size, spec.moe_intermediate_size, spec.num_experts_per_tok
    q_size = spec.num_attention_heads * spec.head_dim
    kv_size = spec.num_key_value_heads * spec.head_dim
    token = 4 * (2 * D + 2 * q_size + 2 * kv_size + 2 * spec.num_experts) + 3 * (D + q_size + 512)
    pair = 4 * (2 * F + D) + 3 * (F + 256)
    dense = (4 * 2 + 3) * spec.intermediate_size
    return chunk * (token + dense) + max(chunk, 4 * K) * pair + spec.vocab_size * 24


def head_nbytes(model: OwnModel, num_rows: int) -> int:
    """Bytes of so many resident rows of the head, and of the ring that the others pass through."""
    V = model.spec.vocab_size
    total = sum(tensor.nbytes for tensor in model.tensors(model.spec.head))
    row = total // V
    ring = HEAD_RING_PIECES * (HEAD_PIECE_ROWS * row + 6 * 4096) if num_rows < V else 0
    return num_rows * row + ring


def flash_head_nbytes(model: OwnModel, options: EngineOptions) -> int:
    """Bytes that a clustered head takes beside the head's rows; 0 unless asked for. Touches disk: a header.

    Raises: UnsupportedModelError where the checkpoint has none.
    """
    if not options.flash_head:
        return 0
    spec = model.spec
    flash = open_flash_head(model.checkpoint, vocab_size=spec.vocab_size, hidden_size=spec.hidden_size)
    row = flash.centroid_nbytes // flash.num_clusters
    passing = (
        2 * FLASH_PIECE_ROWS * row + 5 * spec.vocab_size
    )  # rows gathered and read, logits, what is wanted
    return flash.centroid_nbytes + 3 * flash.token_map.nbytes + passing


def resident_weight_nbytes(model: OwnModel) -> int:
    """Bytes of the weights that a pool's engine reads at the start: all but experts' codes, embeddings and
    head.
    """
    spec, rows = model.spec, 0
    stacks = [layer.ffn.glu.weights() for layer in spec.layers if isinstance(layer.ffn, Experts)]
    apart = {spec.embedding.name, spec.head.name}
    for weight in (weight for stack in stacks for weight in stack):
        apart.add(weight.name)
        if weight.format.kind == TERNARY.kind:
            rows += spec.num_experts * weight.shape[-2]
    kept = (weight for weight in spec.weights() if weight.name not in apart)
    return (
        sum(tensor.nbytes for weight in kept for tensor in model.tensors(weight)) + 2 * rows
    )  # BF16 row alphas
