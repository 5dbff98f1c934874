"""Whose turn it is: bookkeeping alone, with letters for answers."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import spile
from serving import running
from spile.architectures import open_model
from spile.engines import open_engine
from spile.files.checkpoint import open_checkpoint
from spile.model import Model
from spile.options import EngineOptions
from spile.server.schedule import Schedule
from spile.text.sidecar import read_sidecar
from spile.text.tokenizer import open_tokenizer


def of(*items: str, most: int = 8, room: int | None = None) -> Schedule[str]:
    schedule: Schedule[str] = Schedule(most, room)
    for item in items:
        schedule.add(item, 10)
    schedule.admit()
    return schedule


def answering(schedule: Schedule[str], *items: str) -> None:
    """Let these have read their prompts."""
    for item in items:
        schedule.note(item, 0.0, is_prompt=True, is_answering=True)
    for item in items:
        schedule.note(item, 0.0, is_prompt=False, is_answering=True)


def test_those_who_came_first_begin_first() -> None:
    schedule = of("a", "b", "c", most=2)
    assert schedule.running == ["a", "b"]
    assert schedule.waiting == ["c"]
    schedule.remove("a")
    assert schedule.admit() == ["c"]


def test_room_is_never_given_twice_and_nobody_overtakes() -> None:
    schedule: Schedule[str] = Schedule(8, 100)
    for item, nbytes in (("a", 60), ("b", 60), ("c", 10)):
        schedule.add(item, nbytes)
    assert schedule.admit() == ["a"]
    schedule.remove("a")
    assert schedule.admit() == ["b", "c"]


def test_answer_that_needs_more_than_there_is_runs_alone() -> None:
    schedule: Schedule[str] = Schedule(8, 100)
    for item, nbytes in (("a", 10), ("b", 500), ("c", 10)):
        schedule.add(item, nbytes)
    assert schedule.admit() == ["a"]
    schedule.remove("a")
    assert schedule.admit() == ["b"]
    schedule.remove("b")
    assert schedule.admit() == ["c"]


def test_tokens_are_chosen_in_turn() -> None:
    schedule = of("a", "b", "c")
    answering(schedule, "a", "b", "c")
    turns = []
    for _ in range(6):
        item = schedule.turn()
        assert item is not None
        schedule.note(item, 0.1, is_prompt=False, is_answering=True)
        turns.append(item)
    assert sorted(turns[:3]) == sorted(turns[3:]) == ["a", "b", "c"]


def test_chunk_of_a_prompt_holds_nobody_up_for_longer_than_itself() -> None:
    schedule = of("a", "b", "p")
    answering(schedule, "a", "b")
    turns = []
    for _ in range(20):
        item = schedule.turn()
        assert item is not None
        is_prompt = item == "p"
        schedule.note(item, 1.0 if is_prompt else 0.25, is_prompt=is_prompt, is_answering=not is_prompt)
        turns.append(item)
    between = "".join(turns).strip("ab").split("p")[1:-1]
    assert between
    assert all(len(part) == 4 and {"a", "b"} == set(part) for part in between)  # as long as the chunk took


def test_every_answer_has_a_turn_between_two_chunks_however_short_they_are() -> None:
    schedule = of("a", "b", "c", "p", "q")
    answering(schedule, "a", "b", "c")
    turns = ""
    for _ in range(40):
        item = schedule.turn()
        assert item is not None
        is_prompt = item in "pq"
        schedule.note(item, 0.001 if is_prompt else 0.1, is_prompt=is_prompt, is_answering=not is_prompt)
        turns += item
    parts = turns.replace("q", "p").strip("abc").split("p")[1:-1]
    assert parts
    assert all(sorted(part) == ["a", "b", "c"] for part in parts)
    assert set(turns) == set("abcpq")


def test_prompts_alone_take_turns() -> None:
    schedule = of("p", "q")
    turns = []
    for _ in range(4):
        item = schedule.turn()
        assert item is not None
        schedule.note(item, 1.0, is_prompt=True, is_answering=False)
        turns.append(item)
    assert turns == ["p", "q", "p", "q"]


def test_who_cannot_go_on_is_passed_over() -> None:
    schedule = of("a", "b")
    answering(schedule, "a", "b")
    assert [schedule.turn(lambda item: item == "b") for _ in range(3)] == ["b"] * 3
    assert schedule.turn(lambda item: False) is None


@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_and_goes_the_bounds_hold(seed: int) -> None:
    rng = random.Random(seed)
    schedule: Schedule[int] = Schedule(3, 100)
    needs: dict[int, int] = {}
    for step in range(500):
        if rng.random() < 0.3:
            needs[step] = rng.choice((5, 40, 90, 200))
            schedule.add(step, needs[step])
        schedule.admit()
        used = sum(needs[item] for item in schedule.running)
        assert len(schedule.running) <= 3
        assert used <= 100 or len(schedule.running) == 1
        assert bool(schedule.running) or not schedule.waiting
        item = schedule.turn()
        if item is not None and rng.random() < 0.3:
            schedule.remove(item)
        elif item is not None:
            schedule.note(item, rng.random(), is_prompt=rng.random() < 0.5, is_answering=rng.random() < 0.5)
    for item in [*schedule.running, *schedule.waiting]:
        schedule.remove(item)
    assert schedule.admit() == []
    assert schedule._used_nbytes == 0


def few_slots(folder: Path) -> Model:
    """The model with as few slots as it runs with, and chunks shorter than the prompts."""
    checkpoint = open_checkpoint(folder)
    maple = open_model(checkpoint)
    options = EngineOptions(slots=maple.spec.num_experts_per_tok, prefill_chunk=16, threads=1)
    tokenizer = open_tokenizer(folder, config=checkpoint.config, keep=True)
    return Model(
        open_engine=lambda: open_engine(maple, options),
        config=checkpoint.config,
        sidecar=read_sidecar(folder),
        tokenizer=tokenizer,
        plan_context=lambda: maple.spec.max_position_embeddings,
        vocab_size=maple.spec.vocab_size,
        folder=folder,
        on_note=lambda note: None,
    )


def test_answers_given_at_once_are_those_given_alone(golden: Path) -> None:
    """Long and short prompts, greedy and by seed, interleaved over one pool of few slots: text, log-probabilities
    to the last bit, and each answer's own counts.
    """
    from concurrent.futures import ThreadPoolExecutor

    rng = np.random.default_rng(0)
    bodies = [
        {
            "prompt": rng.integers(3, 200, length).tolist(),
            "max_tokens": 10,
            "logprobs": 3,
            "seed": 5,
            "temperature": temperature,
            "top_k": 0,
            "logit_bias": {"0": -100},
        }
        for length in (3, 50, 90)
        for temperature in (0, 1.5)
    ]
    with running(lambda: few_slots(golden / "mlx-2bit"), parallel=4, max_queue=8) as server:
        alone = [server.send("/v1/completions", body).body for body in bodies]
        with ThreadPoolExecutor(len(bodies)) as pool:
            together = list(pool.map(lambda body: server.send("/v1/completions", body).body, bodies))
        assert [reply["choices"] for reply in together] == [reply["choices"] for reply in alone]
        for one, other in zip(alone, together, strict=True):
            wanted, found = one["usage"]["spile"], other["usage"]["spile"]
            assert wanted["hits"] + wanted["misses"] == found["hits"] + found["misses"]
            assert found["bytes_read"] > 0


def test_prompt_that_was_read_before_is_not_read_again_and_the_answer_is_the_same(golden: Path) -> None:
    rng = np.random.default_rng(1)
    prompt = rng.integers(3, 200, 40).tolist()
    body = {"prompt": prompt, "max_tokens": 8, "logprobs": 2}
    load = partial(spile.load, golden / "mlx-2bit", prompt_cache_bytes=10_000_000, on_note=lambda note: None)
    with running(load) as server:
        replies = [server.send("/v1/completions", body).body for _ in range(3)]
        replies.append(server.send("/v1/completions", {**body, "n": 3}).body)
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert cached[0] == 0
    assert all(0 < count < 40 for count in cached[1:])
    assert {reply["usage"]["prompt_tokens"] for reply in replies} == {40}
    wanted = replies[0]["choices"][0]
    for choice in [choice for reply in replies for choice in reply["choices"]]:
        assert {**choice, "index": 0} == wanted
