"""The token loop over an engine that says what it is told to: ends, limits, counts, rates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeEngine, write_byte_tokenizer
from spile.errors import ContextError, OptionError
from spile.generation.generate import Chunk, check_prompt, generate, join
from spile.generation.held import Held
from spile.generation.options import Sampling
from spile.text.reasoning import ReasoningSplitter
from spile.text.tokenizer import Tokenizer, open_tokenizer

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
    """A prompt of 3 and an answer of 5 in a context of 8."""
    engine = FakeEngine([10], context=8)
    chunks = run(engine)
    assert ids(chunks) == [10] * 5
    assert chunks[-1].finish_reason == "length"


def test_prompt_that_leaves_room_for_one_token_gives_it() -> None:
    chunks = run(FakeEngine([10], context=4))
    assert (ids(chunks), chunks[-1].finish_reason) == ([10], "length")
    assert run(FakeEngine([EOS], context=4))[-1].finish_reason == "stop"


def test_prompt_is_checked_with_both_numbers() -> None:
    with pytest.raises(ContextError, match="the prompt has 1,200 tokens and the context holds 128"):
        check_prompt(1200, 128)
    with pytest.raises(OptionError, match="the prompt is empty"):
        check_prompt(0, 128)
    check_prompt(128, 128)
    with pytest.raises(ContextError, match="has 128 tokens and fills the context: there is no room"):
        check_prompt(128, 128, num_answer=1)
    check_prompt(127, 128, num_answer=1)


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
    monkeypatch.setattr("spile.generation.generate.time.perf_counter", lambda: now)

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


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """One entry a byte, so that stop texts and markers always span tokens."""
    write_byte_tokenizer(tmp_path)
    found = open_tokenizer(tmp_path, config={})
    assert found is not None
    return found


def say(
    tokenizer: Tokenizer, text: str, *, splitter: ReasoningSplitter | None = None, **changes: Any
) -> tuple[list[Chunk], FakeEngine]:
    """Stream what an engine says that would go on with this text, then an end token."""
    engine = FakeEngine([*text.encode(), EOS])
    chunks = generate(
        engine,
        [1],
        sampling=Sampling(temperature=0).changed(changes),
        num_entries=257,
        eos_ids=frozenset([EOS]),
        decoder=tokenizer.decoder(),
        splitter=splitter,
    )
    return list(chunks), engine


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        ("pha be", "al", "pha be"),
        (["zeta", "ta ga", "eta", "nothing"], "alpha b", "eta"),
        (["gammas", "mma!"], "alpha beta gamma", None),
        (["alpha beta gamma"], "", "alpha beta gamma"),
        (["gamma"], "alpha beta ", "gamma"),
    ],
)
def test_answer_is_cut_before_a_stop_text(
    stop: Any, text: str, matched: str | None, tokenizer: Tokenizer
) -> None:
    chunks, engine = say(tokenizer, "alpha beta gamma", stop=stop)
    completion = join(chunks)
    assert (completion.text, completion.finish_reason, completion.stopped_by) == (text, "stop", matched)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    said = bytes(completion.token_ids).decode()
    assert said == ("alpha beta gamma" if matched is None else text + matched)
    assert completion.stats.completion_tokens == len(said)
    # It really ends: nothing is decoded after the token that completed the stop text.
    assert len([call for call in engine.calls if call[0] == "decode"]) == len(said) - (matched is not None)


def test_stop_text_of_several_bytes_a_character(tokenizer: Tokenizer) -> None:
    chunks, _ = say(tokenizer, "\u4f60\u597d\U0001f600 end", stop="\u597d\U0001f600")
    assert join(chunks).text == "\u4f60"
    assert not any("\ufffd" in chunk.text for chunk in chunks)


def test_tail_that_was_held_back_is_not_lost(tokenizer: Tokenizer) -> None:
    """At an end token, at a limit, and at the limit that a whole stop text just reaches."""
    chunks, _ = say(tokenizer, "abc<en", stop="<end>")
    assert (join(chunks).text, chunks[-1].text, chunks[-1].finish_reason) == ("abc<en", "<en", "stop")
    assert chunks[-1].stopped_by is None
    chunks, _ = say(tokenizer, "abc<end>", stop="<end>", max_tokens=6)
    assert (join(chunks).text, chunks[-1].finish_reason) == ("abc<en", "length")
    chunks, _ = say(tokenizer, "abc<end>", stop="<end>", max_tokens=8)
    assert (join(chunks).text, chunks[-1].finish_reason) == ("abc", "stop")


def test_stop_text_that_fills_the_context_is_stop() -> None:
    """The last token that the context has room for completes the stop text."""

    class Decoder:
        def push(self, token_id: int) -> str:
            return chr(token_id)

        def flush(self) -> str:
            return ""

    chunks = generate(
        FakeEngine([*b"ab"], context=3),
        [1],
        sampling=Sampling(temperature=0, stop="b"),
        num_entries=257,
        eos_ids=frozenset([EOS]),
        decoder=Decoder(),
    )
    assert join(chunks).finish_reason == "stop"


def test_end_tokens_can_be_ignored() -> None:
    """The end token is never chosen: of the other, equal logits the first is."""
    chunks = run(FakeEngine([10, EOS, 11, EOS]), max_tokens=6, ignore_eos=True)
    assert ids(chunks) == [10, 0, 11, 0, 0, 0]
    assert chunks[-1].finish_reason == "length"


def test_log_probabilities_come_with_each_token() -> None:
    engine = FakeEngine([10, 11, EOS], margin=3.0)
    chunks = run(engine, logprobs=2)
    logprobs = [chunk.logprob for chunk in chunks]
    expected = 3.0 - math.log(256 + math.exp(3.0))
    for token_id, logprob in zip([10, 11], logprobs, strict=False):
        assert logprob is not None
        assert logprob.token_id == token_id
        assert logprob.logprob == pytest.approx(expected, abs=1e-5)
        assert [one.token_id for one in logprob.top] == [token_id, 0]
    assert logprobs[-1] is None
    assert [one.token_id for one in join(chunks).logprobs] == [10, 11]
    assert run(engine)[0].logprob is None
    assert run(engine, logprobs=0)[0].logprob is not None


def test_log_probabilities_are_the_models_own() -> None:
    """Neither bias nor penalty nor temperature is in them."""
    plain = run(FakeEngine([10, 10, 10, EOS], margin=3.0), logprobs=1)
    changed = run(
        FakeEngine([10, 10, 10, EOS], margin=3.0),
        logprobs=1,
        presence_penalty=1.0,
        logit_bias={10: 2},
        seed=1,
    )
    assert [chunk.logprob for chunk in changed] == [chunk.logprob for chunk in plain]


def test_penalties_change_the_chain() -> None:
    """Margin 3 of 10 over all others: with 2 off each time the second 10 gives way to token 0."""
    assert ids(run(FakeEngine([10], margin=3.0), max_tokens=4, frequency_penalty=2.0)) == [10, 10, 0, 1]
    assert ids(run(FakeEngine([10], margin=3.0), max_tokens=3, presence_penalty=4.0)) == [10, 0, 1]


@pytest.mark.parametrize("has_begun", [False, True])
def test_reasoning_comes_apart_from_the_answer(has_begun: bool, tokenizer: Tokenizer) -> None:
    said = "think\u4f60 a bit\n</think>\n\nYes."
    text = said if has_begun else "<think>\n" + said
    chunks, _ = say(tokenizer, text, splitter=ReasoningSplitter(has_begun=has_begun))
    completion = join(chunks)
    assert (completion.reasoning, completion.text) == ("think\u4f60 a bit", "Yes.")
    assert bytes(completion.token_ids).decode() == text


def test_limit_inside_of_the_reasoning_is_length_without_text(tokenizer: Tokenizer) -> None:
    chunks, _ = say(tokenizer, "<think>abc</think>d", splitter=ReasoningSplitter(), max_tokens=12)
    completion = join(chunks)
    assert (completion.reasoning, completion.text, completion.finish_reason) == ("abc</", "", "length")


def test_stop_texts_are_looked_for_in_the_answer_alone(tokenizer: Tokenizer) -> None:
    chunks, _ = say(tokenizer, "<think>a\n\nb</think>c\n\nd", splitter=ReasoningSplitter(), stop="\n\n")
    completion = join(chunks)
    assert (completion.reasoning, completion.text, completion.stopped_by) == ("a\n\nb", "c", "\n\n")


def test_held_state_goes_on_and_counts_what_it_held() -> None:
    engine, held = FakeEngine([10, 11, EOS]), Held()

    def turn(prompt: list[int]) -> Chunk:
        return list(
            generate(
                engine,
                prompt,
                sampling=Sampling(temperature=0),
                num_entries=257,
                eos_ids=frozenset([EOS]),
                held=held,
            )
        )[-1]

    first = turn([1, 2, 3]).stats
    second = turn([1, 2, 3, 10, 11, 4, 5]).stats
    assert first is not None
    assert second is not None
    assert (first.prompt_tokens, first.cached_tokens) == (3, 0)
    assert (second.prompt_tokens, second.cached_tokens) == (7, 5)
    assert [call for call in engine.calls if call[0] == "prefill"] == [
        ("prefill", [1, 2, 3]),
        ("prefill", [4, 5]),
    ]
    assert [state.is_closed for state in engine.states] == [False]


def test_interrupted_answer_leaves_a_held_state_that_goes_on_where_it_can() -> None:
    engine, held = FakeEngine([10, 11, 12, 13, EOS]), Held()
    options: dict[str, Any] = {"sampling": Sampling(temperature=0), "num_entries": 257, "held": held}
    chunks = generate(engine, [1, 2], eos_ids=frozenset([EOS]), **options)
    assert [next(chunks).token_id for _ in range(3)] == [10, 11, 12]
    chunks.close()
    assert held.token_ids == [1, 2, 10, 11, 12]
    assert held.position == 4  # the last one was chosen, not fed
    list(generate(engine, [1, 2, 10, 11, 12, 9], eos_ids=frozenset([EOS]), **options))
    assert engine.calls[-5] == ("prefill", [12, 9])
