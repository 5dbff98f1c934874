"""The one interface behind which an engine turns token ids into logits.

It knows nothing of text, sampling or files. An engine is used from one thread at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

# Index of the first token, and the logits [n, V] after it and the next ones: valid during the call.
OnLogits = Callable[[int, NDArray[np.float32]], None]


@dataclass(frozen=True)
class Counters:
    """What the expert store and its slots have done since the engine was opened. Cumulative."""

    bytes_read: int = 0
    reads: int = 0
    read_seconds: float = 0.0
    stall_seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    unwanted: int = 0  # experts read ahead that their layer did not ask for


class State(Protocol):
    """What one sequence has left behind: its keys and values."""

    @property
    def position(self) -> int:
        """Tokens held."""
        ...

    def can_rewind(self, position: int) -> bool:
        """Whether the state can forget all tokens from `position` on and be as if it never held them, bit for
        bit. True for its own position and for 0; in between it depends on what was overwritten.
        """
        ...

    def rewind(self, position: int) -> None:
        """Forget all tokens from `position` on. Only where `can_rewind` says so."""
        ...

    def close(self) -> None:
        """Give the memory back. May be called twice."""
        ...


LayerKind = Literal["full", "sliding"]  # layers that see all positions, and those that see a window of them


@runtime_checkable
class CopyableState(State, Protocol):
    """A state whose positions can be taken out and put back, bit for bit; what reuse of prompts is built on.

    A position's keys and values depend on the tokens up to it alone, or, where `step` is above 1, on the chunk in
    which they were computed too. An engine whose states are of the plain kind reuses nothing.
    """

    @property
    def step(self) -> int:
        """A later prompt can go on from multiples of it alone: 1 where any position will do."""
        ...

    @property
    def num_reusable(self) -> int:
        """Positions, from the first on, whose bits are those of a state that reads the same tokens in chunks of
        `step`; a multiple of it. Only they can be read.
        """
        ...

    @property
    def identity(self) -> Mapping[str, str | int]:
        """What the bits depend on besides the model and the tokens: engine, options, version of either."""
        ...

    @property
    def window(self) -> int | None:
        """One more than the positions of a sliding layer that have to be put back; None where no layer slides."""
        ...

    def row_nbytes(self, kind: LayerKind) -> tuple[int, ...]:
        """Bytes of one position, layer by layer."""
        ...

    def has(self, kind: LayerKind, start: int) -> bool:
        """Whether all positions from `start` to `num_reusable` are still there."""
        ...

    def read(self, kind: LayerKind, start: int, end: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the stored bits of positions [start, end), layer by layer, each [end - start, row]. Copies."""
        ...

    def write(self, kind: LayerKind, start: int, layers: Iterable[NDArray[np.uint8]]) -> None:
        """Store what `read` gave. The state holds it when `restore` has said so."""
        ...

    def restore(self, position: int, oldest: int) -> None:
        """Hold the tokens before `position`: all of them in full layers, those from `oldest` on in sliding
        ones.
        """
        ...


class Engine(Protocol):
    """A model that is ready to run.

    `context` is the number of tokens a state can hold; `exact` is False when the user asked for an
    approximate mode by name.
    """

    name: str
    exact: bool
    vocab_size: int
    context: int
    prefill_chunk: int  # tokens that `prefill` takes at a time

    @property
    def resident_expert_bytes(self) -> int:
        """Bytes of experts in memory now."""
        ...

    @property
    def kv_room_nbytes(self) -> int:
        """Bytes that the plan keeps for the keys and values of all states together."""
        ...

    def kv_nbytes(self, num_tokens: int) -> int:
        """Bytes of keys and values that one state of so many tokens takes."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What did not go as asked, one line each."""
        ...

    def new_state(self) -> State:
        """Make an empty state."""
        ...

    def prefill(
        self, state: State, token_ids: Sequence[int], on_progress: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float32]:
        """Append T tokens; return the logits [V] after the last. `on_progress(done, total)` in tokens."""
        ...

    def decode(self, state: State, token_id: int) -> NDArray[np.float32]:
        """Append one token; return the logits [V], valid until the next call."""
        ...

    def logits(self, state: State, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Append T tokens; return the logits after each, [T, V]."""
        ...

    def score(
        self,
        state: State,
        token_ids: Sequence[int],
        on_logits: OnLogits,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Append T tokens and hand over the logits after each, some positions at a time: far less than [T, V] is
        ever in memory, and a budget counts it.
        """
        ...

    def counters(self) -> Counters:
        """Say what was read and found since the engine was opened."""
        ...

    def resize(self, memory_bytes: int) -> None:
        """Keep to another budget from the next token on. Exact; memory that is given up goes to the system.

        Raises: BudgetError below what stays resident, OptionError where there is no pool.
        """
        ...

    def hold(self, owner: str, nbytes: int) -> None:
        """Leave so many bytes of the budget, from now on, to somebody else in this process: "prompts" for those that
        are kept, whose room is planned, or another name. Exact: the pool gives way, and has back what is held no more.

        Raises: BudgetError where less than the least would be left.
        """
        ...

    def lend(self, nbytes: int) -> None:
        """Hand this many bytes of pool memory back to the system until they are needed again."""
        ...

    def summary(self) -> str:
        """Say in one line what was planned."""
        ...

    def close(self) -> None:
        """Stop threads, close files, free memory. May be called twice."""
        ...
