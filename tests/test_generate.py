"""The token loop over an engine that says what it is told to: ends, limits, counts, rates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeEngine, write_byte_tokenizer
from spile.errors import ContextError, OptionError
from spile.generate import Chunk, check_prompt, generate
from spile.options import Sampling
from spile.tokenizer import open_tokenizer

EOS = 256


def run(engine: FakeEngine, prompt: list[int] | None = None, **changes: Any) -> list[Chunk]:
    sampling = Sampling(temperature=0).changed(changes)
    return list(
        generate(
            engine,
            [1, 2, 3] if prompt is None else prompt,
            sampling=sampling,
            num_entries=257,
            eos_ids=frozenset([EOS]),
        )
    )


def ids(chunks: list[Chunk]) -> list[int]:
    return [chunk.token_id for chunk in chunks if chunk.token_id is not None]


def test_end_token_stops_and_is_no_part_of_the_answer() -> None:
    engine = FakeEngine([10, 11, EOS, 12])
    chunks = run(engine)
    assert ids(chunks) == [10, 11]
    assert chunks[-1].finish_reason == "stop"
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None, None]
    assert engine.calls == [("prefill", [1, 2, 3]), ("decode", 10), ("decode", 11)]


def test_limit_ends_with_length_and_decodes_nothing_in_vain() -> None:
    engine = FakeEngine([10, 11, 12, 13])
    chunks = run(engine, max_tokens=2)
    assert ids(chunks) == [10, 11]
    assert chunks[-1].finish_reason == "length"
    assert engine.calls[1:] == [("decode", 10)]


def test_limit_that_the_answer_just_reaches_is_length() -> None:
    """Whether an end token would have come next was not computed."""
    assert run(FakeEngine([10, 11, EOS]), max_tokens=2)[-1].finish_reason == "length"
    assert run(FakeEngine([10, 11, EOS]), max_tokens=3)[-1].finish_reason == "stop"


def test_there_is_no_hidden_limit() -> None:
    chunks = run(FakeEngine([*range(20, 95)] * 20 + [EOS]))
    assert len(ids(chunks)) == 1500
    assert chunks[-1].finish_reason == "stop"


def test_full_context_ends_with_length() -> None:
    """A prompt of 3 in a context of 8: five tokens are held, and the sixth is known without being held."""
    engine = FakeEngine([10], context=8)
    chunks = run(engine)
    assert ids(chunks) == [10] * 6
    assert chunks[-1].finish_reason == "length"


def test_prompt_that_fills_the_context_still_gives_its_next_token() -> None:
    chunks = run(FakeEngine([10], context=3))
    assert (ids(chunks), chunks[-1].finish_reason) == ([10], "length")
    assert run(FakeEngine([EOS], context=3))[-1].finish_reason == "stop"


def test_prompt_is_checked_with_both_numbers() -> None:
    with pytest.raises(ContextError, match="the prompt has 1,200 tokens and the context holds 128"):
        check_prompt(1200, 128)
    with pytest.raises(OptionError, match="the prompt is empty"):
        check_prompt(0, 128)
    check_prompt(128, 128)


def test_counts_are_of_this_answer_alone() -> None:
    engine = FakeEngine([10, 11, 12, EOS])
    run(engine)
    stats = run(engine)[-1].stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.completion_tokens) == (3, 3)
    assert (stats.bytes_read, stats.expert_hits, stats.expert_misses) == (300, 9, 3)
    assert stats.hit_rate == 0.75
    assert (stats.engine, stats.exact, stats.resident_expert_bytes) == ("fake", True, 1000)
    assert stats.peak_memory_bytes > 10_000_000


@pytest.mark.parametrize("script", [[EOS], [10, EOS]])
def test_answers_of_no_and_one_token_have_no_rate_and_no_infinity(script: list[int]) -> None:
    stats = run(FakeEngine(script))[-1].stats
    assert stats is not None
    assert stats.completion_tokens == len(script) - 1
    assert stats.tokens_per_second is None
    assert (stats.time_to_first_token_seconds is None) == (len(script) == 1)
    assert stats.prompt_tokens_per_second is not None
    assert all(math.isfinite(value) for value in stats.as_dict().values() if isinstance(value, float))


def test_decode_rate_leaves_the_prompt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the engine moves: 2 s of prefill, then 0.5 s a token, the end token's included."""
    now = 100.0
    monkeypatch.setattr("spile.generate.time.perf_counter", lambda: now)

    class TimedEngine(FakeEngine):
        def prefill(self, *arguments: Any) -> Any:
            nonlocal now
            now += 2
            return super().prefill(*arguments)

        def decode(self, *arguments: Any) -> Any:
            nonlocal now
            now += 0.5
            return super().decode(*arguments)

    stats = run(TimedEngine([10] * 6 + [EOS]))[-1].stats
    assert stats is not None
    assert stats.completion_tokens == 6
    assert stats.tokens_per_second == 2.0
    assert stats.prompt_tokens_per_second == 1.5
    assert stats.time_to_first_token_seconds == 2.0


def test_progress_of_the_prompt_is_told() -> None:
    seen: list[tuple[int, int]] = []
    list(
        generate(
            FakeEngine([EOS]),
            [1, 2, 3, 4],
            sampling=Sampling(temperature=0),
            num_entries=257,
            eos_ids=frozenset([EOS]),
            on_prefill=lambda done, total: seen.append((done, total)),
        )
    )
    assert seen == [(2, 4), (4, 4)]


def test_state_is_closed_at_the_end_and_when_the_answer_is_abandoned() -> None:
    engine = FakeEngine([10])
    run(engine, max_tokens=1)
    chunks = generate(
        engine, [1], sampling=Sampling(temperature=0), num_entries=257, eos_ids=frozenset([EOS])
    )
    next(chunks)
    chunks.close()
    assert [state.is_closed for state in engine.states] == [True, True]


def test_interrupted_answer_leaves_the_engine_as_good_as_before() -> None:
    class Interrupted(FakeEngine):
        def decode(self, *arguments: Any) -> Any:
            if len(self.states) == 1:
                raise KeyboardInterrupt
            return super().decode(*arguments)

    engine = Interrupted([10, 11, EOS])
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert engine.states[0].is_closed
    assert ids(run(engine)) == [10, 11]


@pytest.mark.parametrize(
    "text", ["\U0001f1e9\U0001f1ea\U0001f468\u200d\U0001f467 e\u0301 \u4f60 \u05e9 x", "  two"]
)
def test_chunks_join_to_the_text_in_whole_characters(text: str, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = open_tokenizer(tmp_path, config={})
    assert tokenizer is not None
    chunks = list(
        generate(
            FakeEngine([*text.encode(), EOS]),
            [1],
            sampling=Sampling(temperature=0),
            num_entries=257,
            eos_ids=frozenset([EOS]),
            decoder=tokenizer.decoder(),
        )
    )
    assert "".join(chunk.text for chunk in chunks) == text
    assert not any("\ufffd" in chunk.text for chunk in chunks)
    assert len(chunks) == len(text.encode()) + 1
