"""A state that goes on from turn to turn gives the bits of one that read everything anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from fakes import FakeEngine
from spile.architectures import open_own
from spile.engines import open_engine
from spile.engines.base import Engine
from spile.files.checkpoint import open_checkpoint
from spile.generation.held import Held
from spile.options import EngineOptions

DEMO = Path(spile.__file__).parent / "demo" / "model"


@pytest.fixture(scope="module", params=["golden, window 16", "demo, window 128"])
def engine(request: pytest.FixtureRequest, golden: Path) -> Iterator[Engine]:
    """Chunks of 32 leave rings of 256 and 384 positions, which the sequences below go around."""
    folder = golden / "mlx-2bit" if request.param.startswith("golden") else DEMO
    model = open_own(open_checkpoint(folder))
    engine = open_engine(model, EngineOptions(context=900, prefill_chunk=32, threads=1))
    yield engine
    engine.close()


def sequence(engine: Engine, count: int, seed: int) -> list[int]:
    high = min(engine.vocab_size, 500)
    return np.random.default_rng(seed).integers(0, high, count).tolist()


def fresh_logits(engine: Engine, token_ids: list[int]) -> bytes:
    """The logits after the last token, read into a state of its own."""
    state = engine.new_state()
    try:
        return engine.prefill(state, token_ids).tobytes()
    finally:
        state.close()


@pytest.mark.parametrize("length", [40, 300, 700])
def test_every_rewind_that_is_allowed_is_exact(engine: Engine, length: int) -> None:
    """Read `length` tokens, cut back to p, read other ones: as if only those had ever been read."""
    first, other = sequence(engine, length, 1), sequence(engine, 40, 2)
    num_allowed = num_refused = 0
    for position in [1, length // 3, length // 2, length - 129, length - 17, length - 1, length]:
        if not 0 < position <= length:
            continue
        state = engine.new_state()
        engine.prefill(state, first)
        if state.can_rewind(position):
            num_allowed += 1
            state.rewind(position)
            assert state.position == position
            for count in (1, 33):  # by one token and by more than a chunk
                found = engine.prefill(state, other[:count]).tobytes()
                assert found == fresh_logits(engine, first[:position] + other[:count])
                state.rewind(position)
        else:
            num_refused += 1
        state.close()
    print(f"{length} tokens: {num_allowed} cuts allowed, {num_refused} refused")
    assert num_allowed >= 3
    assert num_refused if length == 700 else length == 300 or not num_refused


def test_cut_just_inside_of_what_the_ring_holds_is_allowed_and_exact_and_one_further_back_is_not(
    engine: Engine,
) -> None:
    """The edge itself: the oldest position that the next token sees is the oldest that still lies there."""
    first, other = sequence(engine, 700, 3), sequence(engine, 30, 4)
    state = engine.new_state()
    engine.prefill(state, first)
    edge = next(p for p in range(1, 701) if state.can_rewind(p))
    assert 1 < edge < 700
    assert not state.can_rewind(edge - 1)
    assert all(state.can_rewind(p) for p in range(edge, 701))
    state.rewind(edge)
    assert engine.prefill(state, other).tobytes() == fresh_logits(engine, first[:edge] + other)
    state.close()


def test_cut_one_too_far_would_be_wrong(engine: Engine) -> None:
    """That `can_rewind` refuses nothing in vain: beyond the edge, by a whole window, the bits do differ."""
    first, other = sequence(engine, 700, 3), sequence(engine, 30, 4)
    state: Any = engine.new_state()
    engine.prefill(state, first)
    edge = next(p for p in range(1, 701) if state.can_rewind(p))
    wrong = edge - 1 - state._window // 2
    state.cache.position = wrong  # as `rewind` would
    assert engine.prefill(state, other).tobytes() != fresh_logits(engine, first[:wrong] + other)
    state.close()


def test_repeated_cuts_never_forget_what_was_overwritten(engine: Engine) -> None:
    """A random walk of cuts and reads: every state it goes through is that of a fresh run."""
    random = np.random.default_rng(7)
    held = sequence(engine, 400, 5)
    state = engine.new_state()
    engine.prefill(state, held)
    for step in range(12):
        position = int(random.integers(max(1, len(held) - 200), len(held) + 1))
        if not state.can_rewind(position):
            continue
        state.rewind(position)
        added = sequence(engine, int(random.integers(1, 90)), 100 + step)
        held = held[:position] + added
        if len(held) > 800:
            break
        if step % 2:
            found = engine.prefill(state, added).tobytes()
        else:
            found = b"".join(engine.decode(state, i).tobytes() for i in added)[-engine.vocab_size * 4 :]
        assert found == fresh_logits(engine, held)
    state.close()


def test_interrupted_read_counts_what_it_overwrote(engine: Engine) -> None:
    """A chunk that did not end has stored positions that the state does not hold."""
    first = sequence(engine, 600, 8)

    def interrupt(done: int, total: int) -> None:
        if done >= 300:
            raise KeyboardInterrupt

    state = engine.new_state()
    with pytest.raises(KeyboardInterrupt):
        engine.prefill(state, first, interrupt)
    held = state.position
    assert 0 < held < 600
    rest = first[held : held + 40]
    assert engine.prefill(state, rest).tobytes() == fresh_logits(engine, first[: held + 40])
    state.close()


def test_rewind_to_nothing_is_a_fresh_state(engine: Engine) -> None:
    first, other = sequence(engine, 700, 9), sequence(engine, 700, 10)
    state = engine.new_state()
    engine.prefill(state, first)
    state.rewind(0)
    assert engine.prefill(state, other).tobytes() == fresh_logits(engine, other)
    assert not state.can_rewind(50)
    state.close()


def answer(held: Held, engine: FakeEngine, prompt: list[int], fed: list[int]) -> int:
    """Read a prompt and feed an answer; return how many tokens were held."""
    state, num_held = held.begin(engine, prompt)
    engine.prefill(state, prompt[num_held:])  # type: ignore[arg-type]
    for token_id in fed:
        held.note(token_id)
        engine.decode(state, token_id)  # type: ignore[arg-type]
    return num_held


def test_next_prompt_goes_on_from_what_it_has_in_common() -> None:
    engine, held = FakeEngine([1]), Held()
    assert answer(held, engine, [1, 2, 3], [4, 5]) == 0
    assert answer(held, engine, [1, 2, 3, 4, 5, 6, 7], [8]) == 5
    assert answer(held, engine, [1, 2, 9, 9], []) == 2
    assert [call for call in engine.calls if call[0] == "prefill"] == [
        ("prefill", [1, 2, 3]),
        ("prefill", [6, 7]),
        ("prefill", [9, 9]),
    ]
    assert engine.states[0].fed == [1, 2, 9, 9]
    assert len(engine.states) == 1


def test_same_prompt_again_still_reads_its_last_token() -> None:
    engine, held = FakeEngine([1]), Held()
    answer(held, engine, [1, 2, 3], [])
    assert answer(held, engine, [1, 2, 3], []) == 2
    assert answer(held, engine, [1, 2], []) == 1
    assert engine.states[0].fed == [1, 2]


def test_token_that_was_chosen_but_never_fed_is_read() -> None:
    engine, held = FakeEngine([1]), Held()
    answer(held, engine, [1, 2], [3])
    held.note(4)
    assert answer(held, engine, [1, 2, 3, 4, 5], []) == 3
    assert engine.states[0].fed == [1, 2, 3, 4, 5]


def test_state_that_cannot_be_cut_is_replaced() -> None:
    engine, held = FakeEngine([1]), Held()
    answer(held, engine, [1, 2, 3], [4])
    engine.states[0].refuses = True
    assert answer(held, engine, [1, 2, 9], []) == 0
    assert [state.is_closed for state in engine.states] == [True, False]
    held.close()
    held.close()
    assert engine.states[1].is_closed
    assert answer(held, engine, [1, 2, 9, 9], []) == 0


def test_conversation_that_goes_on_says_what_one_that_reads_everything_anew_says() -> None:
    """Greedy turns with the demo model; every prompt is also answered by a fresh state. One turn is taken
    back, one answer is abandoned half-way, one is cut by a stop text.
    """
    with spile.load(DEMO, context=700) as model:
        held = model.hold()
        messages: list[dict[str, str]] = []
        cached = []
        for number in range(6):
            messages.append({"role": "user", "content": f"Tell me story {number} about a bear."})
            options: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
            if number == 3:
                options["stop"] = ["."]
            if number == 2:
                stream = model.stream(messages, held=held, **options)
                text = "".join(next(stream).text for _ in range(20))
                stream.close()
                messages.append({"role": "assistant", "content": text})
                continue
            answer = model.generate(messages, held=held, **options)
            assert held.token_ids[: held.num_prompt] == model.encode(messages)
            fresh = model.generate(messages, **options)
            assert fresh.token_ids == answer.token_ids
            assert fresh.text == answer.text
            cached.append(answer.stats.cached_tokens)
            if number == 4:
                messages.pop()  # taken back
            else:
                messages.append({"role": "assistant", "content": answer.text})
    assert cached[0] == 0
    assert all(count > 20 for count in cached[1:])
    print(f"held tokens by turn: {cached}")
