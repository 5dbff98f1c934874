"""Turns a model's headers into the bytes that an engine takes for its weights, its head and its activations.

It reads no weights, and knows no budget: `plan.py` adds the parts up. `engines/cpu/weights.py` and `head.py` allocate
what is counted here.
"""

from __future__ import annotations

from spile.architectures.flash_head import open_flash_head
from spile.architectures.maple import PROJECTIONS, MapleConfig, MapleModel
from spile.options import EngineOptions

FLASH_PIECE_ROWS = 4096  # of a clustered head, gathered at a time: enough for many threads
HEAD_PIECE_ROWS, HEAD_RING_PIECES = 1024, 4  # of a streamed head: 1.2 MB a piece of a full-size one


def activation_nbytes(config: MapleConfig, chunk: int) -> int:
    """Bytes of the decoder's buffers for chunks of T tokens, and of the logits that sampling copies."""
    D, F, K = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    token = 4 * (2 * D + 2 * q_size + 2 * kv_size + 2 * config.num_experts) + 3 * (D + q_size + 512)
    pair = 4 * (2 * F + D) + 3 * (F + 256)
    dense = (4 * 2 + 3) * config.intermediate_size
    return chunk * (token + dense) + max(chunk, 4 * K) * pair + config.vocab_size * 24


def head_nbytes(model: MapleModel, num_rows: int) -> int:
    """Bytes of so many resident rows of the head, and of the ring that the others pass through."""
    V = model.config.vocab_size
    total = sum(model.checkpoint.tensors[f"lm_head.{part}"].nbytes for part in ("weight", "scales", "biases"))
    row = total // V
    ring = HEAD_RING_PIECES * (HEAD_PIECE_ROWS * row + 6 * 4096) if num_rows < V else 0
    return num_rows * row + ring


def flash_head_nbytes(model: MapleModel, options: EngineOptions) -> int:
    """Bytes that a clustered head takes beside the head's rows; 0 unless asked for. Touches disk: a header.

    Raises: UnsupportedModelError where the checkpoint has none.
    """
    if not options.flash_head:
        return 0
    config = model.config
    flash = open_flash_head(model.checkpoint, vocab_size=config.vocab_size, hidden_size=config.hidden_size)
    row = flash.centroid_nbytes // flash.num_clusters
    passing = (
        2 * FLASH_PIECE_ROWS * row + 5 * config.vocab_size
    )  # rows gathered and read, logits, what is wanted
    return flash.centroid_nbytes + 3 * flash.token_map.nbytes + passing


def resident_weight_nbytes(model: MapleModel) -> int:
    """Bytes of the weights that a pool's engine reads at the start: all but experts' codes, embeddings and
    head.
    """
    config = model.config
    apart = ("lm_head", "head.", model.embedding_name)  # the clustered head's tensors among them
    nbytes = sum(
        tensor.nbytes
        for name, tensor in model.checkpoint.tensors.items()
        if not name.startswith(apart) and ".switch_mlp." not in name
    )
    rows = (len(PROJECTIONS) - 1) * config.moe_intermediate_size + config.hidden_size
    return nbytes + 2 * config.num_routed_experts * rows  # row alphas, BF16
