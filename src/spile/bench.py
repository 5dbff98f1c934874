"""Turns a model's own writing into a trace of its routing, and a trace into a table of hit rates.

Benchmarks that need the whole package live in `tools/`; this file is what `spile bench` runs.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from spile.errors import CheckpointError, OptionError, WriteError
from spile.generation.generate import check_prompt
from spile.residency.replay import POLICIES, replay, sizes_to_try

_NO_TRACE = "is not a trace that `spile bench trace` wrote"
_NUMPY_ERRORS = (  # of np.load, for what is no archive of arrays
    ValueError, KeyError, EOFError, TypeError, AttributeError, RuntimeError, OverflowError, struct.error,
    zlib.error, BadZipFile,
)  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """Which experts were chosen: ids int32 [N, L, K], of E experts a layer."""

    ids: NDArray[np.int32]
    num_experts: int

    def save(self, path: Path) -> None:
        """Write an .npz of two arrays, whole or not at all.

        Raises: WriteError.
        """
        check_destination(path)
        try:
            target = path.resolve()  # a link stays one
            partial = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                with partial.open("wb") as file:
                    np.savez_compressed(file, ids=self.ids, num_experts=self.num_experts)
                os.replace(partial, target)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise WriteError(f"cannot write {path}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path) -> Recorded:
        """Read what `save` wrote.

        Raises: CheckpointError when it is no trace.
        """
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                raise CheckpointError(f"{path} is not a regular file")
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                ids, num_experts = arrays["ids"], int(arrays["num_experts"])
        except OSError as error:
            if error.strerror:
                raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
            raise CheckpointError(f"{path} {_NO_TRACE}") from error
        except _NUMPY_ERRORS as error:
            raise CheckpointError(f"{path} {_NO_TRACE}") from error
        if ids.ndim != 3 or ids.dtype != np.int32 or ids.size == 0:
            raise CheckpointError(f"{path} {_NO_TRACE}: its ids are {ids.dtype} {list(ids.shape)}")
        if ids.min() < 0 or ids.max() >= num_experts:
            raise CheckpointError(f"{path} {_NO_TRACE}: it names expert {ids.max()} of {num_experts}")
        return cls(ids, num_experts)


def check_destination(path: Path) -> None:
    """Check that a trace can be written there, before a model is run for it.

    Raises: WriteError.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise WriteError(f"cannot write {path}: it is not a regular file")
    if not os.path.isdir(path.parent):
        raise WriteError(f"cannot write {path}: there is no folder {path.parent}")


def record_trace(
    source: str | None,
    prompt: str,
    num_tokens: int,
    seed: int,
    *,
    offline: bool = False,
    on_token: Callable[[int], None] | None = None,
) -> Recorded:
    """Let a model write `num_tokens` tokens and record its routing, prompt excluded. Everything resident.

    Raises: as `spile.load` and `Model.stream`; OptionError for fewer than two tokens, or more than the context
    holds with the prompt.
    """
    from spile.engines.cpu.engine import CpuEngine
    from spile.loading import load

    if num_tokens < 2:
        raise OptionError(f"tokens is {num_tokens}: a trace needs two at least")
    if not 0 <= seed < 2**64:
        raise OptionError(f"seed is {seed}: it must be a whole number from 0 to {2**64 - 1:,}")
    if not prompt:
        raise OptionError("the prompt is empty: there is no token to go on from")
    with load(source, engine="cpu", offline=offline) as model:
        ids = model.encode(prompt, raw=True)
        check_prompt(len(ids), model.context)
        if len(ids) + num_tokens > model.context:
            raise OptionError(
                f"tokens is {num_tokens:,}: the context holds {model.context:,} and the prompt takes {len(ids):,}"
            )
        engine = model.open()
        assert isinstance(engine, CpuEngine)
        chosen: list[NDArray[np.int32]] = []
        state = engine.new_state()
        logits = engine.prefill(state, ids)
        engine.on_decode_route = chosen.append
        rng = np.random.default_rng(seed)
        for done in range(num_tokens):
            odds = np.exp((logits - logits.max()).astype(np.float64) / 0.8)
            logits = engine.decode(state, int(rng.choice(len(odds), p=odds / odds.sum())))
            if on_token is not None:
                on_token(done + 1)
        K = len(chosen[0])
        rows = np.stack(chosen).reshape(done + 1, -1, K)
        return Recorded(rows, engine.num_experts)


def replay_rows(recorded: Recorded) -> list[dict[str, Any]]:
    """Return hit rates of every policy for pools from a sliver to everything."""
    _, L, _ = recorded.ids.shape
    rows = []
    for num_slots in sizes_to_try(recorded.ids, recorded.num_experts):
        row: dict[str, Any] = {"num_slots": num_slots, "share": num_slots / (L * recorded.num_experts)}
        for policy in POLICIES:
            row[policy] = replay(recorded.ids, recorded.num_experts, num_slots, policy).hit_rate
        rows.append(row)
    return rows
