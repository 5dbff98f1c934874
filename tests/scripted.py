"""A real checkpoint whose greedy answer is known word for word: the real engine walks a table of next tokens.

Attention and experts are multiplied by zero, so that a token's hidden state stays its embedding: a random
vector of signs. The head's row of a token is the embedding of the token before it in the script, so its logit
there is the width, and any other is a random walk far below. An entry may occur only once in a script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fakes import write_byte_tokenizer
from spile.files.checkpoint import Checkpoint, open_checkpoint

WIDTH = 128
PROMPT = "x"  # its token is the one before the script's first
EOS = "<|endoftext|>"
_ONE, _TWO, _MINUS_ONE = 0x3F80, 0x4000, 0xBF80  # BF16


def write_scripted(
    tiny_checkpoint: Callable[..., Path],
    script: Sequence[bytes],
    *,
    ends: bool = True,
    template: str | None = None,
    context: int = 2048,
    **shape: Any,
) -> tuple[Path, list[int]]:
    """Write a model that goes on from `PROMPT` with these entries, one a token, then ends; return its folder
    and the ids it will choose.
    """
    assert len(set(script)) == len(script), "an entry has one successor"
    entries = [piece for piece in script if len(piece) > 1]
    config = {"eos_token": EOS} | ({"chat_template": template} if template else {})
    end = 256 + len(entries)
    vocab_size = (end + 1 + 63) // 64 * 64
    folder = tiny_checkpoint(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        max_position_embeddings=context,
        tokenizer_entries=0,
        **shape,
    )
    write_byte_tokenizer(folder, special=(EOS,), entries=entries, config=config)
    token_ids = [piece[0] if len(piece) == 1 else 256 + entries.index(piece) for piece in script]
    assert ord(PROMPT) not in token_ids, "the prompt's token has one successor"
    signs = np.random.default_rng(1).integers(0, 2, (vocab_size, WIDTH), np.uint32)
    head, weight = np.zeros_like(signs), np.zeros(vocab_size, bool)
    for before, after in zip([ord(PROMPT), *token_ids], [*token_ids, *([end] if ends else [])], strict=False):
        head[after], weight[after] = signs[before], True
    checkpoint = open_checkpoint(folder)
    _write_table(checkpoint, "model.word_embeddings", signs, np.ones(vocab_size, bool))
    _write_table(checkpoint, "lm_head", head, weight)
    for name in checkpoint.tensors:
        if name.endswith(("o_proj.row_alpha", "down_proj.row_alpha")):
            _write(checkpoint, name, np.zeros(checkpoint.tensors[name].shape, np.uint16))
    _write(checkpoint, "model.norm.weight", np.full(WIDTH, _ONE, np.uint16))
    return folder, token_ids


def _write_table(
    checkpoint: Checkpoint, name: str, signs: NDArray[np.uint32], weight: NDArray[np.bool_]
) -> None:
    """Write a 4-bit table of +1 (code 1) and -1 (code 0), and rows of zeros where there is no weight."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    codes = (signs.reshape(len(signs), -1, 8) << shifts).sum(axis=2, dtype=np.uint32)
    _write(checkpoint, f"{name}.weight", codes)
    groups = checkpoint.tensors[f"{name}.scales"].shape
    rows = np.broadcast_to(weight[:, None], groups)
    _write(checkpoint, f"{name}.scales", np.where(rows, _TWO, 0).astype(np.uint16))
    _write(checkpoint, f"{name}.biases", np.where(rows, _MINUS_ONE, 0).astype(np.uint16))


def _write(checkpoint: Checkpoint, name: str, values: NDArray[Any]) -> None:
    tensor = checkpoint.tensors[name]
    assert values.nbytes == tensor.nbytes, name
    with open(checkpoint.shards[tensor.shard], "r+b") as file:
        file.seek(tensor.offset)
        file.write(np.ascontiguousarray(values).tobytes())
