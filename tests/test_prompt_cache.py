"""What was read of earlier prompts and is not read again gives the bits of a fresh run, and keeps to its bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from fakes import FakeEngine
from spile import memory
from spile.architectures import open_own
from spile.engines import open_engine
from spile.engines.base import Engine
from spile.errors import OptionError
from spile.files.checkpoint import open_checkpoint
from spile.generation.generate import generate
from spile.generation.held import Held
from spile.generation.options import Sampling
from spile.generation.prompt_blocks import PromptBlocks
from spile.generation.prompt_cache import PromptCache, turn_cut
from spile.generation.prompt_folder import PromptFolder
from spile.generation.prompt_reuse import default_cache_nbytes
from spile.options import EngineOptions

DEMO = Path(spile.__file__).parent / "demo" / "model"
CHUNK = 32
MODELS = ["golden, window 16", "demo, window 128"]


def opened(golden: Path, name: str, **options: Any) -> Engine:
    folder = golden / "mlx-2bit" if name.startswith("golden") else DEMO
    options = {"context": 900, "prefill_chunk": CHUNK, "threads": 1, **options}
    return open_engine(open_own(open_checkpoint(folder)), EngineOptions(**options))


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, golden: Path) -> Iterator[Engine]:
    engine = opened(golden, request.param)
    yield engine
    engine.close()


class Reader:
    """Reads prompts and answers as `generate` does, with one cache, and compares with fresh states."""

    def __init__(self, engine: Engine, cache: PromptCache | None) -> None:
        self.engine = engine
        self.cache = cache
        self.num_reused: list[int] = []

    def read(
        self, prompt: Sequence[int], answer: Sequence[int] = (), *, held: Held | None = None, cut: int = 0
    ) -> bytes:
        """Return the logits after the prompt and each token of the answer, equal to those of a fresh state."""
        kept = held or Held(is_lasting=False)
        state, position = kept.begin(self.engine, prompt, self.cache)
        self.num_reused.append(position)
        for start in range(position, len(prompt), CHUNK):
            end = min(start + CHUNK, len(prompt))
            logits = self.engine.prefill(state, prompt[start:end])
            if end < len(prompt):
                kept.keep((cut,) if start < cut <= end else ())
        found = [logits.tobytes()]
        kept.keep((len(prompt), cut))
        for token_id in answer:
            kept.note(token_id)
            found.append(self.engine.decode(state, token_id).tobytes())
        kept.keep_answer(cut)
        if held is None:
            kept.close()
        assert b"".join(found) == self.fresh(prompt, answer), f"{position} of {len(prompt)} reused"
        return found[0]

    def fresh(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> bytes:
        state = self.engine.new_state()
        found = [self.engine.prefill(state, prompt).tobytes()]
        found += [self.engine.decode(state, token_id).tobytes() for token_id in answer]
        state.close()
        return b"".join(found)


def ids(engine: Engine, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, min(engine.vocab_size, 500), count).tolist()


def in_folder(folder: Path, limit_nbytes: int = 1 << 30, notes: list[str] | None = None) -> PromptCache:
    said = [] if notes is None else notes
    return PromptCache(0, lambda identity: PromptFolder(folder, limit_nbytes, identity, said.append))


def check_bytes(blocks: PromptBlocks | None) -> None:
    """What is counted is what is held, and is within the budget."""
    if blocks is None:
        return
    found, left = 0, list(blocks._root.children)
    while left:
        block = left.pop()
        left += block.children
        found += 2048 + sum(part.nbytes for part in (block.full, block.sliding) if part is not None)
        assert block.full or block.sliding or block.children, "a block that holds nothing"
    assert found == blocks.nbytes <= blocks.budget_nbytes


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_longest_beginning_is_not_read_again_whatever_came_between(
    engine: Engine, place: str, tmp_path: Path
) -> None:
    """P+Q, P, P+R, P+Q again: prompts that wind the window several times around."""
    cache = PromptCache(64_000_000) if place == "memory" else in_folder(tmp_path)
    reader = Reader(engine, cache)
    P, Q, R = ids(engine, 500, 1), ids(engine, 200, 2), ids(engine, 70, 3)
    for prompt in (P + Q, P, P + R, P + Q, P + Q):
        reader.read(prompt, ids(engine, 5, 4), cut=len(P))
    assert reader.num_reused[0] == 0
    assert reader.num_reused[1] == len(P) - 1, "the last token is always computed"
    assert reader.num_reused[2] == len(P)
    assert reader.num_reused[3:] == [len(P + Q) - 1] * 2


def test_prompt_that_leaves_another_anywhere_is_exact(engine: Engine) -> None:
    """Every depth: inside of a block, at its edge, one token in, and all but one."""
    reader = Reader(engine, PromptCache(64_000_000))
    whole = ids(engine, 420, 5)
    reader.read(whole)
    for depth in (1, 17, 127, 128, 129, 255, 256, 300, 384, 419):
        reader.read(whole[:depth] + ids(engine, 40, depth))
        assert reader.num_reused[-1] == depth


@pytest.mark.parametrize("budget", [20_000, 1_500_000, 6_000_000])
@pytest.mark.parametrize("lasting", [False, True], ids=["states that go", "states that stay"])
def test_walk_over_conversations_is_exact_within_any_bytes(
    engine: Engine, budget: int, lasting: bool
) -> None:
    random = np.random.default_rng(budget)
    reader = Reader(engine, PromptCache(budget))
    helds = [Held(), Held()]
    past: list[list[int]] = []
    for step in range(10):
        prompt = ids(engine, int(random.integers(1, 300)), 100 + step)
        if past and random.random() < 0.8:  # goes on from an earlier one, or leaves it somewhere
            base = past[int(random.integers(len(past)))]
            depth = len(base) if random.random() < 0.5 else int(random.integers(1, len(base) + 1))
            prompt = (base[:depth] + prompt[:80])[:800]
        answer = ids(engine, int(random.integers(0, 30)), 200 + step)
        reader.read(prompt, answer, held=helds[step % 2] if lasting else None, cut=len(prompt) // 2)
        past.append(prompt + answer)
        assert reader.cache is not None
        check_bytes(reader.cache._blocks)
    for held in helds:
        held.close()
    print(f"reused of {sum(map(len, past))} tokens: {sum(reader.num_reused)}")


def test_walk_over_conversations_is_exact_in_a_folder_that_is_too_small(
    engine: Engine, tmp_path: Path
) -> None:
    random = np.random.default_rng(11)
    limit = 3_000_000
    past: list[list[int]] = []
    reader = Reader(engine, None)
    for step in range(10):
        reader.cache = in_folder(tmp_path, limit)  # as another process would
        prompt = ids(engine, int(random.integers(1, 300)), 300 + step)
        if past and random.random() < 0.8:
            base = past[int(random.integers(len(past)))]
            prompt = (base[: int(random.integers(1, len(base) + 1))] + prompt[:80])[:800]
        reader.read(prompt, ids(engine, 3, step), cut=len(prompt) // 2)
        past.append(prompt)
        assert sum(entry.stat().st_size for entry in os.scandir(tmp_path)) <= limit
    assert sum(reader.num_reused) > 0


@pytest.mark.parametrize("bits", [(4, 4), (8, 4), (8, 8), (16, 16), (32, 32)], ids=str)
def test_every_width_of_keys_and_values_is_put_back_bit_for_bit(
    golden: Path, tmp_path: Path, bits: tuple[int, int]
) -> None:
    """Also into an engine with another budget, chunk and number of threads; never into one of other widths."""
    try:
        first = opened(golden, MODELS[1], kv_bits=bits[0], kv_v_bits=bits[1], kv_ring_bits=min(bits))
    except OptionError:
        pytest.skip(f"this engine has no {bits}")
    prompt = ids(first, 400, 6)
    expected = Reader(first, in_folder(tmp_path)).read(prompt)
    first.close()
    second = opened(
        golden,
        MODELS[1],
        kv_bits=bits[0],
        kv_v_bits=bits[1],
        kv_ring_bits=min(bits),
        prefill_chunk=64,
        threads=2,
        slots=40,
    )
    reader = Reader(second, in_folder(tmp_path))
    assert reader.read(prompt) == expected
    assert reader.num_reused == [399]
    second.close()
    other = opened(golden, MODELS[1], kv_bits=32 if bits[0] == 16 else 16)
    reader = Reader(other, in_folder(tmp_path))
    reader.read(prompt)
    assert reader.num_reused == [0]
    other.close()


def test_same_request_three_times_gives_one_answer() -> None:
    with spile.load(DEMO, context=700, prompt_cache_bytes=8_000_000) as model:
        answers = [
            model.generate("Tell me a story about a bear.", temperature=0, max_tokens=40) for _ in range(3)
        ]
    assert answers[0].text
    assert {answer.token_ids for answer in answers} == {answers[0].token_ids}
    assert {answer.stats.prompt_tokens for answer in answers} == {answers[0].stats.prompt_tokens}
    assert [answer.stats.cached_tokens for answer in answers] == [
        0,
        *[answers[0].stats.prompt_tokens - 1] * 2,
    ]


def test_edited_last_turn_shares_all_before_it() -> None:
    first = [
        {"role": "system", "content": "You tell stories. " * 30},
        {"role": "user", "content": "One about a bear. " * 40},
    ]
    second = [first[0], {"role": "user", "content": "One about a fox."}]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 5}
    with spile.load(DEMO, context=900, prefill_chunk=CHUNK, prompt_cache_bytes=8_000_000) as model:
        system = model.encode([first[0], {"role": "user", "content": ""}])
        model.generate(first, **options)
        reused = model.generate(second, **options)
    with spile.load(DEMO, context=900) as model:
        assert model.generate(second, **options).token_ids == reused.token_ids
    assert reused.stats.cached_tokens > len(system) - 15


def test_conversation_is_not_read_again_after_an_answer_that_is_longer_than_a_ring() -> None:
    """Reasoning is not sent back, so the next prompt leaves this one where the answer begins; the rings have
    gone around since. What regressed: the whole conversation was read again.
    """
    message = {"role": "user", "content": "Tell me a story about a bear. " * 8}
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    with spile.load(DEMO, context=1000, prefill_chunk=CHUNK, prompt_cache_bytes=1_600_000) as model:
        held = model.hold()
        answer = model.generate([message], held=held, max_tokens=600, **options)
        assert not held._state.can_rewind(answer.stats.prompt_tokens - 3)  # type: ignore[union-attr]
        turns = [message, {"role": "assistant", "content": "No."}, message]
        reused = model.generate(turns, held=held, max_tokens=20, **options)
        assert reused.stats.cached_tokens >= answer.stats.prompt_tokens - 3
        fresh = model.generate(turns, max_tokens=20, **options)
        assert fresh.token_ids == reused.token_ids
        held.close()


def test_streams_that_run_at_once_share_what_was_read() -> None:
    prompts = [
        f"Once upon a time there was a bear, a fox and a bird. {'They ran. ' * 30}{i}" for i in range(3)
    ]
    options: dict[str, Any] = {"raw": True, "temperature": 0, "max_tokens": 12}
    with spile.load(DEMO, context=700, prefill_chunk=CHUNK) as model:
        expected = [model.generate(prompt, **options).token_ids for prompt in prompts]
    with spile.load(
        DEMO, context=700, prefill_chunk=CHUNK, sequences=4, prompt_cache_bytes=3_000_000
    ) as model:
        for _ in range(2):
            streams = [model.stream(prompt, pauses=True, **options) for prompt in prompts]
            found: list[list[int]] = [[] for _ in streams]
            cached = [0] * len(streams)
            left = dict(enumerate(streams))
            while left:
                for index, stream in list(left.items()):
                    chunk = next(stream, None)
                    if chunk is None:
                        del left[index]
                    elif chunk.stats is not None:
                        cached[index] = chunk.stats.cached_tokens
                    elif chunk.token_id is not None:
                        found[index].append(chunk.token_id)
            assert [tuple(one) for one in found] == expected
            assert model._prompts.cache is not None
            check_bytes(model._prompts.cache._blocks)
        assert all(cached), "the second time all of them find a beginning"


def test_stream_that_is_closed_half_way_leaves_what_it_has_read() -> None:
    prompt = "The bear and the fox went home. " * 20
    with spile.load(DEMO, context=700, prefill_chunk=CHUNK, prompt_cache_bytes=8_000_000) as model:
        stream = model.stream(prompt, raw=True, pauses=True, temperature=0, max_tokens=5)
        for _ in range(3):
            next(stream)
        stream.close()
        again = model.generate(prompt, raw=True, temperature=0, max_tokens=5)
        assert again.stats.cached_tokens == 3 * CHUNK
    with spile.load(DEMO, context=700) as model:
        assert model.generate(prompt, raw=True, temperature=0, max_tokens=5).token_ids == again.token_ids


class BareState:
    """A state of so many bytes a position: full layers and sliding ones with a window of 100."""

    window = 100
    step = 1

    def __init__(self, nbytes: int) -> None:
        self.position = 0
        self._row = nbytes

    @property
    def num_reusable(self) -> int:
        return self.position

    def row_nbytes(self, kind: str) -> tuple[int, ...]:
        return (self._row, self._row)

    def has(self, kind: str, start: int) -> bool:
        return kind == "full" or start > self.position - 300

    def read(self, kind: str, start: int, end: int) -> Iterator[np.ndarray]:
        for _ in range(2):
            yield np.ones((end - start, self._row), np.uint8)


def test_memory_goes_back_to_the_system_and_never_exceeds_the_budget() -> None:
    state: Any = BareState(10_000)
    blocks = PromptBlocks(60_000_000)
    memory.trim()
    before = memory.current_memory_bytes()
    for number in range(12):
        tokens = np.random.default_rng(number).integers(0, 500, 2000).astype(np.int32)
        for position in range(250, 2001, 250):
            state.position = position
            blocks.store(tokens[:position], state, (position,), is_held=False)
            check_bytes(blocks)
            assert memory.current_memory_bytes() - before < 60_000_000 + 8_000_000
    assert blocks.nbytes > 45_000_000
    blocks.clear()
    assert memory.current_memory_bytes() - before < 8_000_000


def test_prompt_that_is_larger_than_the_bytes_keeps_a_beginning_that_can_be_used() -> None:
    state: Any = BareState(1000)
    blocks = PromptBlocks(2_000_000)  # of 8 MB
    tokens = np.arange(2000, dtype=np.int32)
    for position in range(250, 2001, 250):
        state.position = position
        blocks.store(tokens[:position], state, (position,) if position == 2000 else (), is_held=False)
    cut = blocks.find(tokens[:1999], state.window)
    assert 400 <= cut.position < 1000
    assert blocks.nbytes <= 2_000_000


def test_least_lately_used_goes_first() -> None:
    state: Any = BareState(1000)
    blocks = PromptBlocks(1_900_000)  # three prompts of 128 tokens
    prompts = [np.full(129, number, np.int32) for number in range(4)]
    state.position = 128
    for prompt in prompts[:3]:
        blocks.store(prompt[:128], state, (128,), is_held=False)
    blocks.store(prompts[0][:128], state, (128,), is_held=False)
    blocks.store(prompts[3][:128], state, (128,), is_held=False)
    assert [blocks.find(prompt, state.window).position for prompt in prompts] == [128, 0, 128, 128]


def test_engine_whose_states_cannot_be_copied_reuses_nothing_and_says_so_once(tmp_path: Path) -> None:
    notes: list[str] = []
    engine: Any = FakeEngine([1])
    cache = in_folder(tmp_path)
    cache._on_note = notes.append
    for _ in range(2):
        held = Held(is_lasting=False)
        state, position = held.begin(engine, [1, 2, 3], cache)
        engine.prefill(state, [1, 2, 3])
        held.keep((3,))
        assert position == 0
    assert notes == ["the fake engine reads every prompt anew: nothing is kept of earlier ones"]


@pytest.mark.parametrize("value", [-1, True, 1.5, "1MB", 2**60])
def test_bytes_that_are_no_whole_number_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="prompt_cache_bytes"):
        spile.load(DEMO, prompt_cache_bytes=value)


def test_memory_that_the_system_does_not_give_ends_the_keeping_and_not_the_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no memory")

    notes: list[str] = []
    monkeypatch.setattr("spile.generation.prompt_blocks.Part", refuse)
    reader = Reader(engine, PromptCache(8_000_000, on_note=notes.append))
    for _ in range(2):
        reader.read(ids(engine, 200, 1), [1, 2])
    assert reader.num_reused == [0, 0]
    assert notes == ["prompts are no longer kept in memory: no memory"]


@pytest.mark.parametrize(
    ("prompt", "cut"), [([], 0), ([1, 2], 0), ([1, 9], 0), ([1, 9, 2, 9, 3], 2), ([9, 1, 9, 2, 9, 3, 3], 3)]
)
def test_last_message_begins_after_the_last_but_one_end(prompt: list[int], cut: int) -> None:
    assert turn_cut(prompt, frozenset({9})) == cut


@pytest.mark.parametrize(
    ("memory_bytes", "held", "expected"),
    [
        (300_000_000, False, 0),
        (640_000_000, False, 40_000_000),
        (1_600_000_000, False, 200_000_000),
        (640_000_000, True, 40_000_000),
        (1 << 40, False, 1_000_000_000),
    ],
)
def test_default_is_a_part_of_the_budget(memory_bytes: int, held: bool, expected: int) -> None:
    assert default_cache_nbytes(memory_bytes, is_held=held) == expected


def test_default_without_a_budget_comes_from_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spile.generation.prompt_reuse.available_memory_bytes", lambda: 8_000_000_000)
    assert default_cache_nbytes(None) == 1_000_000_000


def test_answers_in_an_approximate_mode_are_never_reused() -> None:
    notes: list[str] = []
    with spile.load(
        DEMO, prompt_cache_bytes=1_000_000, active_experts=4, reselect_every=4, on_note=notes.append
    ) as model:
        for _ in range(2):
            answer = model.generate("Once", raw=True, max_tokens=3)
        assert answer.stats.cached_tokens == 0
    assert any("nothing is kept of earlier prompts" in note for note in notes)


def test_bits_of_a_state_are_those_that_its_version_stands_for(golden: Path) -> None:
    """When this digest changes, so must ARITHMETIC: what was saved before is then refused."""
    import hashlib

    from spile.engines.cpu.state import ARITHMETIC

    engine: Any = opened(golden, MODELS[0])
    state = engine.new_state()
    engine.prefill(state, list(range(40)))
    digest = hashlib.sha256()
    for kind in ("full", "sliding"):
        for rows in state.read(kind, 20, 40):
            digest.update(rows.data)
    engine.close()
    assert (ARITHMETIC, digest.hexdigest()[:16]) == (1, "6d18018357df8864")


def test_part_of_a_prompt_that_is_new_is_read_in_no_more_pieces_than_it_needs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece may cost a pass over all experts. What regressed: pieces ended at multiples of the chunk,
    so a short one was split in two.
    """
    sizes: list[int] = []

    def spied(real: Any) -> Any:
        def call(state: Any, token_ids: Any, *more: Any) -> Any:
            sizes.append(len(token_ids))
            return real(state, token_ids, *more)

        return call

    for name in ("read", "prefill"):
        monkeypatch.setattr(engine, name, spied(getattr(engine, name)))
    cache = PromptCache(8_000_000)
    prompt = ids(engine, 140, 1)
    for count in (90, 110, 140):  # 32-token chunks: 96 and 128 lie between
        options: dict[str, Any] = {"sampling": Sampling(temperature=0, max_tokens=1), "num_entries": 200}
        list(generate(engine, prompt[:count], eos_ids=frozenset(), cache=cache, **options))
    assert sizes == [32, 32, 26, 20, 30]
