"""Turns token ids into logits with a model of mlx-lm's, its experts streamed through a pool of slots.

It decides the order of work: a prompt in chunks that end at fixed positions, its last token alone, then a
token at a time, each evaluated before the next is asked for. (mlx-lm's own loop runs one token ahead, which a
streamed model pays for twice.) It does not know an architecture, nor who sits in which slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from spile.architectures import find_model_type, open_own
from spile.architectures.spec import ModelSpec
from spile.engines.base import Counters, OnLogits, State
from spile.engines.mlx import adapter
from spile.engines.mlx.cache import WHOLE, WHOLE_BITS, QuantizedCache, kv_format, make_caches, ring_cache
from spile.engines.mlx.plan import MlxPlan
from spile.engines.mlx.state import CopyableMlxState, MlxState
from spile.engines.mlx.streaming import Streaming, check_io
from spile.errors import ContextError, ModelError, OptionError, UnsupportedModelError
from spile.files.checkpoint import Checkpoint
from spile.memory import peak_footprint_bytes
from spile.options import EngineOptions
from spile.sizes import format_size

# Goes up when any bit of what a state holds for the same model, tokens, options and versions changes.
ARITHMETIC = 1
# Of quantized weights, a second, on MLX's CPU backend, and from how many seconds a token on a user is told. Source: our
# measurement on the full-size Maple, 0.02 tokens of 1.2 G products a second (mlx 0.32.4, two cores, 2026-11-30).
CPU_PRODUCTS = 2.4e7
SLOW_SECONDS = 2.0


class MlxEngine:
    """A model of mlx-lm's, ready to run. One thread at a time may use it."""

    name = "mlx"

    def __init__(
        self, checkpoint: Checkpoint, options: EngineOptions, *, vocab_size: int, longest: int, num_chosen: int = 0
    ) -> None:  # fmt: skip
        """Build the model, plan, open files, read what stays resident. `longest` is the most tokens that the
        model was made for; `num_chosen` the experts that a token takes, 0 where nobody knows.

        Raises: BudgetError, OptionError, UnsupportedModelError, CheckpointError.
        """
        is_own = find_model_type(checkpoint.config) in adapter.OWN_MODULES
        _check_options(options, is_own=is_own)
        self.vocab_size, self._options = vocab_size, options
        self.exact = not options.flash_head
        self._approximation: str | None = None
        self._closed = False
        self._held_nbytes: dict[str, int] = {}
        is_slow = is_own and _device() == "CPU"
        self._seconds_per_token = (
            products_per_token(open_own(checkpoint).spec) / CPU_PRODUCTS if is_slow else 0.0
        )
        self._model = adapter.load_lazily(checkpoint)
        if options.activation_bytes == 3:
            self._model.model.activation_dtype = mx.float32
        if options.flash_head:
            self._approximation = use_clustered_head(self._model, checkpoint, vocab_size)
        self._kv = kv_format(options)
        self._has_rings = any(isinstance(cache, ring_cache()) for cache in self._new_caches())
        self._check_caches()
        self._streaming = Streaming(
            self._model,
            checkpoint,
            options,
            longest=longest,
            num_chosen=num_chosen,
        )
        self.context, self.prefill_chunk = self.plan.context, self.plan.prefill_chunk
        self._identity: dict[str, str | int] = {
            "engine": "mlx",
            "arithmetic": ARITHMETIC,
            "prefill chunk": self.prefill_chunk,
            "kv_bits": self._kv.key_bits,
            "kv_v_bits": self._kv.value_bits,
            **({"kv_ring_bits": self._kv.ring_bits} if self._has_rings else {}),
            "activation bytes": options.activation_bytes,
            "versions": adapter.versions(),
            "device": f"{_device()}, {mx.device_info().get('device_name', 'unknown')}",
        }

    @property
    def plan(self) -> MlxPlan:
        return self._streaming.plan

    @property
    def resident_expert_bytes(self) -> int:
        return self._streaming.resident_expert_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """What did not go as asked, one line each."""
        notes = [] if self._approximation is None else [self._approximation]
        if self._seconds_per_token > SLOW_SECONDS:
            notes.append(
                f"MLX has no GPU here, and its CPU backend runs this model at about "
                f"{1 / self._seconds_per_token:.1g} tokens a second: use --engine cpu, which is made for that"
            )
        if not self.plan.num_experts:
            notes.append("this model has no experts: all of it is resident, nothing is streamed")
        if self._options.threads is not None:
            notes.append("threads does nothing on the mlx engine: MLX has threads of its own")
        if self._options.prompt_cache_bytes and not isinstance(self.new_state(), CopyableMlxState):
            notes.append(f"every prompt is read anew: {self._obstacle()}")
        if min(self._kv.key_bits, self._kv.value_bits) < WHOLE_BITS:
            kinds = {type(cache) for cache in self._new_caches() if not isinstance(cache, ring_cache())}
            kept = sorted(kind.__name__ for kind in kinds - {QuantizedCache})
            if kept:
                notes.append(f"KV {self._kv_text}: layers with {' or '.join(kept)} keep 16 bits")
        return tuple(notes)

    @property
    def _kv_text(self) -> str:
        return self._kv.describe(has_rings=self._has_rings)

    @property
    def memory_text(self) -> str:
        """The most that MLX allocated, beside the most that the system charged to the process."""
        allocated, process = format_size(mx.get_peak_memory()), format_size(peak_footprint_bytes())
        return f"most memory: {allocated} of MLX's arrays, {process} of the process"

    @property
    def kv_room_nbytes(self) -> int:
        """Bytes that the plan keeps for the keys and values of all states."""
        return self.plan.parts.kv

    def kv_nbytes(self, num_tokens: int) -> int:
        """Bytes of one state's caches with so many tokens."""
        return self.plan.caches.nbytes(num_tokens, self.prefill_chunk)

    def new_state(self) -> MlxState:
        if self.plan.layers is None or self.prefill_chunk == 1:
            return MlxState(self._new_caches)
        return CopyableMlxState(
            self._new_caches, self.plan.layers, step=self.prefill_chunk, identity=self._identity
        )

    def prefill(
        self, state: State, token_ids: Sequence[int], on_progress: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float32]:
        """Append T tokens, the last in a pass of its own, as mlx-lm does: only there the head is computed.
        Returns the logits [V] after it.
        """
        total = len(token_ids)
        if total > 1:
            self.read(state, token_ids[:-1], on_progress and (lambda done, _: on_progress(done, total)))
        logits = self.decode(state, token_ids[-1])
        if on_progress is not None and total > 1:
            on_progress(total, total)
        return logits

    def read(
        self, state: State, token_ids: Sequence[int], on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Append T tokens whose logits nobody wants: the beginning of a prompt."""
        assert isinstance(state, MlxState), "a state of this engine"
        self._begin(state, len(token_ids))
        for _, end, _ in self._chunks(state, token_ids):
            mx.eval([cache.state for cache in state.caches])
            if on_progress is not None:
                on_progress(end, len(token_ids))

    def decode(self, state: State, token_id: int) -> NDArray[np.float32]:
        assert isinstance(state, MlxState), "a state of this engine"
        self._begin(state, 1)
        logits: NDArray[np.float32] = self._numpy(self._forward(state, [token_id])[0], state)[0]
        return logits

    def logits(self, state: State, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Append T tokens; return the logits after each, [T, V], as their chunks give them."""
        assert isinstance(state, MlxState), "a state of this engine"
        self._begin(state, len(token_ids))
        out = np.empty((len(token_ids), self.vocab_size), np.float32)
        for start, end, logits in self._chunks(state, token_ids):
            out[start:end] = self._numpy(logits[0], state)
        return out

    def score(
        self,
        state: State,
        token_ids: Sequence[int],
        on_logits: OnLogits,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Append T tokens and hand over the logits after each, a chunk's at a time: mlx-lm's models compute those
        of a whole chunk.
        """
        assert isinstance(state, MlxState), "a state of this engine"
        self._begin(state, len(token_ids))
        for start, end, logits in self._chunks(state, token_ids):
            on_logits(start, self._numpy(logits[0], state))
            if on_progress is not None:
                on_progress(end, len(token_ids))

    def counters(self) -> Counters:
        return self._streaming.counters()

    def resize(self, memory_bytes: int) -> None:
        self._streaming.resize(memory_bytes - sum(self._held_nbytes.values()))

    def hold(self, owner: str, nbytes: int) -> None:
        """Leave bytes to somebody else. What prompts take is set aside for good."""
        budget = self.plan.budget_nbytes
        if owner == "prompts" or budget is None or self.plan.is_resident:
            return
        more = nbytes - self._held_nbytes.get(owner, 0)
        self._streaming.resize(budget - more)
        self._held_nbytes[owner] = nbytes

    def lend(self, nbytes: int) -> None:
        """Shrink the pool until the next token."""
        self._streaming.lend(nbytes)

    def summary(self) -> str:
        more = f", {self._approximation}" if self._approximation else ""
        return (
            f"{self._streaming.summary()}, KV {self._kv_text}, context {self.context:,}, prefill chunk "
            f"{self.prefill_chunk}, mlx {_device()}{more}"
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._streaming.close()
        self._model = None

    def _begin(self, state: MlxState, num_tokens: int) -> None:
        assert not self._closed, "the engine was closed"
        assert state.caches, "the state was closed"
        assert num_tokens > 0, "no tokens"
        if state.position + num_tokens > self.context:
            raise ContextError(
                f"{state.position + num_tokens:,} tokens do not fit the context of {self.context:,}",
                "Give a larger --context, or a shorter prompt.",
            )

    def _chunks(self, state: MlxState, token_ids: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        """Append tokens chunk by chunk; yield where each begins and ends in `token_ids`, and its lazy logits.

        Chunks end at multiples of the chunk, wherever a prompt begins: the same tokens, the same kernels.
        """
        start, total = 0, len(token_ids)
        while start < total:
            end = min(start + self.prefill_chunk - state.position % self.prefill_chunk, total)
            yield start, end, self._forward(state, token_ids[start:end])
            start = end

    def _forward(self, state: MlxState, token_ids: Sequence[int]) -> Any:
        try:
            logits = self._model(mx.array([list(token_ids)]), cache=state.caches)
            state.advance(len(token_ids))
        except BaseException:
            state.spoil()
            raise
        return logits

    def _numpy(self, logits: Any, state: MlxState) -> NDArray[np.float32]:
        """Evaluate logits [T, ...] and the caches; return [T, V]."""
        logits = logits.astype(mx.float32)
        mx.eval(logits, [cache.state for cache in state.caches])
        if logits.shape[-1] < self.vocab_size:
            raise UnsupportedModelError(
                f"config.json says vocab_size {self.vocab_size:,} and the model gives {logits.shape[-1]:,} logits"
            )
        array: NDArray[np.float32] = np.array(logits)
        # A clustered head gives minus infinity to tokens that it does not score.
        if np.isnan(array.max()) or (not self._options.flash_head and not np.isfinite(array).all()):
            raise ModelError(
                "the model's logits are not finite, though its resident weights and the experts' scales are",
                "The weights are damaged, or not those of this config; 'spile verify' compares them with a record.",
            )
        return array[:, : self.vocab_size]

    def _new_caches(self) -> list[Any]:
        return make_caches(self._model, self._kv)

    def _obstacle(self) -> str:
        """Say why no state can be copied."""
        if self.plan.layers is not None:
            return "a prefill chunk of 1 cannot be gone on from"
        kinds = ", ".join(sorted({type(cache).__name__ for cache in self._new_caches()}))
        return f"what this model's layers keep ({kinds}) cannot be put back"

    def _check_caches(self) -> None:
        """Let a pass without data find out whether the model takes keys and values of ours.

        Raises: OptionError.
        """
        if self._kv == WHOLE:
            return
        try:
            self._model(mx.zeros((1, 2), mx.int32), cache=self._new_caches())
        except (ValueError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            raise OptionError(
                f"KV {self._kv_text}: mlx-lm's model of this architecture takes 16 bits only: {reason}",
                "Leave out --kv-bits, --kv-v-bits and --kv-ring-bits.",
            ) from error


def products_per_token(spec: ModelSpec) -> int:
    """Count the multiplications of one token's linear layers."""
    D, heads = spec.hidden_size, spec.num_attention_heads + spec.num_key_value_heads
    attention = 2 * D * heads * spec.head_dim
    experts = spec.num_moe_layers * spec.num_experts_per_tok * 3 * D * spec.moe_intermediate_size
    dense = (spec.num_hidden_layers - spec.num_moe_layers) * 3 * D * spec.intermediate_size
    return spec.num_hidden_layers * attention + experts + dense + spec.vocab_size * D


def _check_options(options: EngineOptions, *, is_own: bool) -> None:
    """Refuse what this engine cannot follow.

    Raises: OptionError.
    """
    if options.reselect_every != 1:
        raise OptionError(
            f"reselect_every is {options.reselect_every}: the mlx engine always chooses from all experts",
            "Leave it out, or use --engine cpu with a Maple.",
        )
    if not is_own and options.activation_bytes != 2:
        raise OptionError(f"activation_bytes is {options.activation_bytes}: only a Maple has the choice")
    if not is_own and options.flash_head:
        raise OptionError("flash_head is asked for: only a Maple has a clustered head")
    check_io(options)


def use_clustered_head(model: Any, checkpoint: Checkpoint, vocab_size: int) -> str:
    """Give a Maple its clustered head; return what that changes, in a few words.

    Raises: UnsupportedModelError where the checkpoint has none.
    """
    from spile.architectures.flash_head import open_flash_head
    from spile.engines.mlx.flash_head import use_flash_head

    hidden_size = int(checkpoint.config["hidden_size"])
    flash = open_flash_head(checkpoint, vocab_size=vocab_size, hidden_size=hidden_size)
    use_flash_head(model, flash)
    return f"approximate: {flash.approximation}"


def _device() -> str:
    return "GPU" if mx.default_device() == mx.Device(mx.gpu) else "CPU"
