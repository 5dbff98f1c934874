"""Turns a model in somebody's own mlx-lm program into one whose experts are streamed: `stream_experts`.

The model stays the object it was, so what mlx-lm does with models (`generate`, batches, its server's classes)
goes on as before. `register` makes mlx-lm load Maple. This file ties the mlx engine's parts together for such
programs and does none of their work; spile itself runs models through `spile.load`.

    import mlx_lm
    import spile.mlx

    model, tokenizer = mlx_lm.load("FOLDER", lazy=True)
    streaming = spile.mlx.stream_experts(model, "FOLDER", memory="8GB")
    print(mlx_lm.generate(model, tokenizer, "Why does sap run in spring?"), streaming.counters())
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spile.engines.mlx.streaming import Streaming

__all__ = ["register", "stream_experts"]


def stream_experts(
    model: Any, path: str | Path, *, memory: int | str | None = None, slots: int | None = None
) -> Streaming:
    """Stream the experts of a model that `mlx_lm.load(path, lazy=True)` made, in place, and read the rest of it.

    `memory` bounds the process (bytes, or a size such as "8GB"); None takes what the machine has. `slots` says
    how many experts the pool holds instead. Returns what counts, resizes and closes. A model that was loaded
    without `lazy=True` took its memory already; what the experts held is given back.

    Raises:
        BudgetError: the budget is below what the model needs.
        UnsupportedModelError: experts that cannot be read one by one; mlx-lm missing or of another version.
        ModelError, ReadError: files that are missing, damaged or not this model's.
        OptionError: a parameter out of range.
    """
    from spile.engines.mlx.adapter import require

    require()
    from spile.engines.mlx.streaming import Streaming

    return Streaming.begin(model, path, memory=memory, slots=slots)


def register() -> None:
    """Make mlx-lm itself load Maple checkpoints in this process, without running a line of their folder.

    Raises: UnsupportedModelError: mlx-lm is missing or of another version.
    """
    from spile.engines.mlx.adapter import add_own_models

    add_own_models()
