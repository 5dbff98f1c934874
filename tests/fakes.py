"""Fakes small enough to read: an engine that says what it is told to, and a tokenizer folder to say it in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spile.engines.base import Counters


class FakeState:
    """Remembers the tokens it was fed; `can_rewind` can be told to refuse."""

    def __init__(self) -> None:
        self.fed: list[int] = []
        self.is_closed = False
        self.refuses = False

    @property
    def position(self) -> int:
        return len(self.fed)

    def can_rewind(self, position: int) -> bool:
        return 0 <= position <= len(self.fed) and (not self.refuses or position == len(self.fed))

    def rewind(self, position: int) -> None:
        assert self.can_rewind(position)
        del self.fed[position:]

    def close(self) -> None:
        self.is_closed = True


class FakeEngine:
    """Makes `script[i]` the most probable token after the prompt and i more; past its end, the last of it
    again.

    `calls` is what was asked of it, in order. Every decode counts one miss of 100 bytes and three hits.
    """

    name = "fake"
    exact = True
    prefill_chunk = 512
    resident_expert_bytes = 1000
    notes: tuple[str, ...] = ()

    def __init__(
        self, script: Sequence[int], *, vocab_size: int = 300, context: int = 4096, margin: float = 50.0
    ) -> None:
        self.script = list(script)
        self.vocab_size = vocab_size
        self.context = context
        self.margin = margin
        self.calls: list[tuple[Any, ...]] = []
        self.states: list[FakeState] = []
        self.is_closed = False
        self._num_prompt = 0
        self._counters = Counters()

    def new_state(self) -> FakeState:
        self.states.append(FakeState())
        return self.states[-1]

    def prefill(
        self,
        state: FakeState,
        token_ids: Sequence[int],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> NDArray[np.float32]:
        self.calls.append(("prefill", list(token_ids)))
        state.fed += token_ids
        self._num_prompt = state.position
        if on_progress is not None:
            on_progress(len(token_ids) // 2, len(token_ids))
            on_progress(len(token_ids), len(token_ids))
        return self._row(state)

    def decode(self, state: FakeState, token_id: int) -> NDArray[np.float32]:
        assert state.position < self.context, "decoded past the context"
        assert not state.is_closed, "decoded with a closed state"
        self.calls.append(("decode", token_id))
        state.fed.append(token_id)
        before = self._counters
        self._counters = Counters(
            bytes_read=before.bytes_read + 100, hits=before.hits + 3, misses=before.misses + 1
        )
        return self._row(state)

    def logits(self, state: FakeState, token_ids: Sequence[int]) -> NDArray[np.float32]:
        self.calls.append(("logits", list(token_ids)))
        state.fed += token_ids
        return np.zeros((len(token_ids), self.vocab_size), np.float32)

    def score(
        self,
        state: FakeState,
        token_ids: Sequence[int],
        on_logits: Callable[[int, NDArray[np.float32]], None],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        for index, token_id in enumerate(token_ids):
            on_logits(index, self.prefill(state, [token_id])[None])
        if on_progress is not None:
            on_progress(len(token_ids), len(token_ids))

    def counters(self) -> Counters:
        return self._counters

    def resize(self, memory_bytes: int) -> None:
        self.calls.append(("resize", memory_bytes))

    def hold(self, owner: str, nbytes: int) -> None:
        self.calls.append(("hold", (owner, nbytes)))

    def lend(self, nbytes: int) -> None:
        self.calls.append(("lend", nbytes))

    @property
    def kv_room_nbytes(self) -> int:
        return self.kv_nbytes(self.context)

    def kv_nbytes(self, num_tokens: int) -> int:
        return 100 * num_tokens

    def summary(self) -> str:
        return "memory auto: everything resident (fake)"

    def close(self) -> None:
        self.is_closed = True

    def _row(self, state: FakeState) -> NDArray[np.float32]:
        row = np.zeros(self.vocab_size, np.float32)
        row[self.script[min(state.position - self._num_prompt, len(self.script) - 1)]] = self.margin
        return row


def write_byte_tokenizer(
    folder: Path,
    *,
    special: Sequence[str] = ("<|endoftext|>",),
    added: Sequence[str] = (),
    config: dict[str, Any] | None = None,
    post_processor: dict[str, Any] | None = None,
    merges: Iterable[tuple[str, str]] = (),
    entries: Sequence[bytes] = (),
) -> None:
    """Write tokenizer.json with one entry a byte (its id is the byte), then merges, then `entries` that no
    text is ever encoded to, then `special` and `added` tokens.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocab = {alphabet[byte]: byte for byte in range(256)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    for entry in entries:
        vocab["".join(alphabet[byte] for byte in entry)] = len(vocab)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [
        {"id": len(vocab) + index, "content": text, **flags, "special": text in special}
        for index, text in enumerate([*special, *added])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    bpe: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
    }
    bpe |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": post_processor,
        "decoder": byte_level,
        "model": {**bpe, "vocab": vocab, "merges": [list(pair) for pair in merges]},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
