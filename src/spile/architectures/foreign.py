"""Turns the config of a model that only mlx-lm knows into what every part of spile asks of one.

It knows the names that configs of other architectures give to a few numbers, and nothing of how such a model
computes: that is mlx-lm's.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spile.errors import CheckpointError

if TYPE_CHECKING:
    from spile.files.checkpoint import Checkpoint

_VOCAB_SIZE = ("vocab_size", "num_vocab", "padded_vocab_size")
_CONTEXT = ("max_position_embeddings", "model_max_length", "max_seq_len", "max_sequence_length", "seq_length")
CHOSEN_NAMES = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k",
    "experts_per_token", "num_selected_experts",
)  # fmt: skip
_EMBEDDINGS = (
    "embed_tokens.weight",
    "word_embeddings.weight",
    "embeddings.weight",
    "wte.weight",
    "embedding.weight",
)
DEFAULT_CONTEXT = 32_768  # of a config that names none


@dataclass(frozen=True)
class ForeignSpec:
    """What spile has to know of a model before it is built."""

    vocab_size: int
    max_position_embeddings: int
    num_experts_per_tok: int  # 0 where the config does not say


@dataclass(frozen=True)
class ForeignModel:
    """A checkpoint of an architecture that the mlx engine alone runs."""

    checkpoint: Checkpoint
    spec: ForeignSpec


@cache
def foreign_types() -> frozenset[str]:
    """Return every model_type that the installed mlx-lm can build; nothing where there is none. Imports nothing:
    the names are those of its modules, and of the table in its utils.py.
    """
    found = importlib.util.find_spec("mlx_lm")
    if found is None or not found.submodule_search_locations:
        return frozenset()
    folder = Path(next(iter(found.submodule_search_locations)))
    types = {path.stem for path in (folder / "models").glob("[!_]*.py")}
    try:
        statements = ast.parse((folder / "utils.py").read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return frozenset(types)
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            if names == ["MODEL_REMAPPING"]:
                keys = (key.value for key in statement.value.keys if isinstance(key, ast.Constant))
                types |= {key for key in keys if isinstance(key, str)}
    return frozenset(types)


def open_foreign(checkpoint: Checkpoint) -> ForeignModel:
    """Open a checkpoint whose model_type is none of spile's own.

    Raises: CheckpointError for a config without a vocabulary.
    """
    raw = checkpoint.config
    vocab_size = _number(raw, _VOCAB_SIZE)
    if vocab_size is None:
        rows = [tensor.shape[0] for name, tensor in checkpoint.tensors.items() if name.endswith(_EMBEDDINGS)]
        if len(set(rows)) != 1:
            raise CheckpointError(f"config.json of {checkpoint.folder} names no vocab_size")
        vocab_size = rows[0]
    spec = ForeignSpec(vocab_size, _number(raw, _CONTEXT) or DEFAULT_CONTEXT, _number(raw, CHOSEN_NAMES) or 0)
    return ForeignModel(checkpoint, spec)


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Find a positive whole number by its usual names, in the config or the text part of it."""
    nested = config.get("text_config"), config.get("language_config"), config.get("llm_config")
    for part in (config, *nested):
        if not isinstance(part, Mapping):
            continue
        for name in names:
            value = part.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40:
                return value
    return None
