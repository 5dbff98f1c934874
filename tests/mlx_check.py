"""Turns a checkpoint folder into whether its experts stream exactly: mlx-lm's own resident model against the
same model over a pool of slots, the same chunks, bit for bit.

The reference is `mlx_lm.utils.load_model`, which shares nothing with spile. Skips cleanly without mlx: import
it after `pytest.importorskip("mlx_lm")`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_architectures import NoTinyConfig, Quantization, write_tiny
from spile.engines.mlx.adapter import load_lazily, make_cache
from spile.engines.mlx.streaming import Streaming
from spile.errors import SpileError
from spile.files.checkpoint import open_checkpoint
from spile.options import EngineOptions

VOCABULARY = 128
IDS = np.random.default_rng(0).integers(0, VOCABULARY, 52).tolist()
# A chunk whose rows mlx-lm sorts (from 64 on, two experts a token), one whose rows it does not, then decode.
CHUNKS = [IDS[:36], IDS[36:42], *([token] for token in IDS[42:])]
NUM_PREFILL = 2


class Streamed(NamedTuple):
    """How one pool did: exact in prefill and decode, experts given up."""

    slots: int | str
    prefill: bool
    decode: bool
    evictions: int


def run(model: Any, chunks: Sequence[Sequence[int]] = CHUNKS) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Return the logits of every chunk, [T, V] each."""
    caches, out = make_cache(model), []
    for chunk in chunks:
        logits = model(mx.array([list(chunk)]), cache=caches).astype(mx.float32)
        mx.eval(logits, [cache.state for cache in caches])
        out.append(np.array(logits)[0])
    return out


def resident_logits(folder: Path, **options: Any) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Return what mlx-lm's own loader and model give, everything resident."""
    from mlx_lm.utils import load_model

    model, _ = load_model(folder, lazy=False)
    return run(model, **options)


def streamed_logits(
    folder: Path, *, slots: int | None, look: Callable[[Streaming], None] | None = None, **options: Any
) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Return what the same model gives over a pool of so many slots of each layout; None: a slot for each expert."""
    checkpoint = open_checkpoint(folder)
    model = load_lazily(checkpoint)
    made = EngineOptions(engine="mlx", slots=10**6 if slots is None else slots)
    streaming = Streaming(model, checkpoint, made, longest=512, num_chosen=0)
    try:
        logits = run(model, **options)
        if look is not None:
            look(streaming)
        return logits
    finally:
        streaming.close()


def check(folder: Path, pools: Sequence[int | None] = (3, None)) -> list[Streamed]:
    """Compare pools of a few slots and of all with the resident model."""
    expected, found = resident_logits(folder), []
    assert not any(np.isnan(logits).any() for logits in expected), "the tiny model gives no numbers"
    for slots in pools:
        evictions: list[int] = []
        got = streamed_logits(
            folder, slots=slots, look=lambda s, e=evictions: e.append(s.counters().evictions)
        )
        same = [np.array_equal(one, other) for one, other in zip(expected, got, strict=True)]
        found.append(Streamed(slots or "all", all(same[:NUM_PREFILL]), all(same[NUM_PREFILL:]), evictions[0]))
    return found


@cache
def check_architecture(name: str) -> list[Streamed] | str:
    """Compare pools for one architecture of mlx-lm's, 4-bit; a text is why it cannot be."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_tiny(Path(folder) / name, name, quantization=Quantization())
            return check(Path(folder) / name)
        except NoTinyConfig as error:
            return f"no tiny config: {error}"
        except SpileError as error:
            return error.message
        except RuntimeError as error:
            if "No Metal back-end" in str(error):
                return "needs a Metal kernel of its own: not run here"
            raise
