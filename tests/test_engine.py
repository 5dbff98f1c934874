"""What an engine does when something goes wrong in the middle of its work, and that it goes on unharmed.

Unharmed is exact: the logits afterwards are those of a run that nothing disturbed.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import spile
from spile import _core
from spile.architectures import open_own
from spile.engines import open_engine
from spile.engines.cpu.engine import CpuEngine
from spile.errors import BudgetError, ContextError, OptionError, ReadError
from spile.files.checkpoint import open_checkpoint
from spile.machine import physical_cores
from spile.making.synth import SynthShape, write_checkpoint
from spile.memory import current_memory_bytes
from spile.options import EngineOptions
from spile.residency import mapped
from spile.residency.plan import LEAST_CONTEXT, MemoryNow, make_plan, smallest_budget
from spile.sizes import parse_size

SHAPE = SynthShape(
    num_hidden_layers=3, sliding_window=16, full_attention_interval=3, max_position_embeddings=300
)
PROMPT = np.random.default_rng(5).integers(0, SHAPE.vocab_size, 45).tolist()
CHUNK = 20  # the prompt takes three

# Every place that experts can be in. A plan's pool is never this small; the engine's may be.
WAYS: list[dict[str, Any]] = [
    {"slots": 3, "io": "buffered"},
    {"slots": 3, "io": "direct"},
    {"slots": 24, "io": "buffered"},
    {"io": "mapped"},
]
POOLS = WAYS[:3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "model"
    write_checkpoint(folder, SHAPE, seed=3, shards=2)
    return folder


def opened(folder: Path, **options: Any) -> CpuEngine:
    options = {"prefill_chunk": CHUNK, "threads": 1, **options}
    engine = open_engine(open_own(open_checkpoint(folder)), EngineOptions(**options))
    assert isinstance(engine, CpuEngine)
    return engine


def fault(engine: CpuEngine, **kinds: int) -> None:
    for store in (engine._store, engine._rows_store):
        assert store is not None
        assert store._reader is not None
        store.read_cached = None  # the faults are in the reader threads; all here is in the page cache
        store._reader.set_faults(**kinds)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[NDArray[np.float32]]:
    """Logits after the prompt, and after each of six greedy tokens."""
    engine = opened(folder)
    state = engine.new_state()
    rows = [engine.prefill(state, PROMPT).copy()]
    for _ in range(6):
        rows.append(engine.decode(state, int(rows[-1].argmax())).copy())
    engine.close()
    return rows


def check_same(engine: CpuEngine, state: Any, undisturbed: list[NDArray[np.float32]]) -> None:
    """Take up a prompt where the state stands; then decode. Every bit must be that of the undisturbed run."""
    rest = PROMPT[state.position :]
    row = engine.prefill(state, rest).copy() if rest else None
    if row is not None:
        np.testing.assert_array_equal(row, undisturbed[0])
    for before, after in pairwise(undisturbed):
        np.testing.assert_array_equal(engine.decode(state, int(before.argmax())), after)


# -- reads --


@pytest.mark.parametrize("way", POOLS)
@pytest.mark.parametrize("error", [0, errno.EIO])
def test_read_error_in_any_read_is_told_and_the_engine_goes_on(
    way: dict[str, Any], error: int, folder: Path, undisturbed: list[NDArray[np.float32]]
) -> None:
    """The nth read fails, for n from the first on: rows, experts of each layer, each chunk, and decoding."""
    engine = opened(folder, **way)
    messages: list[str] = []
    for fail_at in (1, 2, 7, 40, 150, 400):
        state = engine.new_state()
        fault(engine, fail_at=fail_at, fail_with=error)
        try:
            row = engine.prefill(state, PROMPT)
            for _ in range(6):
                row = engine.decode(state, int(row.argmax()))
        except ReadError as failure:
            messages.append(failure.message)
        fault(engine)
        if state.position <= len(PROMPT):
            check_same(engine, state, undisturbed)
        check_same(engine, engine.new_state(), undisturbed)
        state.close()
    for message in messages:
        assert "safetensors: at offset" in message
        assert ("the file ends there" if error == 0 else os.strerror(error)) in message
    assert len(messages) >= (3 if way["slots"] == 3 else 1)
    engine.close()


@pytest.mark.parametrize("way", POOLS[:2])
def test_read_error_in_the_middle_of_decoding_leaves_the_state_as_it_was(
    way: dict[str, Any], folder: Path, undisturbed: list[NDArray[np.float32]]
) -> None:
    engine = opened(folder, **way)
    state = engine.new_state()
    engine.prefill(state, PROMPT)
    for before, after in pairwise(undisturbed):
        for fail_at in (1, 2, 5, 9):
            position = state.position
            fault(engine, fail_at=fail_at, fail_with=errno.EIO)
            with pytest.raises(ReadError):
                engine.decode(state, int(before.argmax()))
            assert state.position == position
            fault(engine)
        np.testing.assert_array_equal(engine.decode(state, int(before.argmax())), after)
    engine.close()


@pytest.mark.parametrize("way", POOLS)
def test_short_reads_and_interrupted_calls_change_no_bit(
    way: dict[str, Any], folder: Path, undisturbed: list[NDArray[np.float32]]
) -> None:
    engine = opened(folder, **way)
    fault(engine, max_bytes=4096, interrupt_every=3)
    check_same(engine, engine.new_state(), undisturbed)
    engine.close()


@pytest.mark.parametrize("way", WAYS)
def test_shard_cut_short_while_in_use_is_an_error_and_no_crash(
    way: dict[str, Any], folder: Path, tmp_path: Path, undisturbed: list[NDArray[np.float32]]
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    engine = opened(copy, **way)
    state = engine.new_state()
    np.testing.assert_array_equal(engine.prefill(state, PROMPT), undisturbed[0])
    shards = sorted(copy.glob("*.safetensors"))
    contents = [shard.read_bytes() for shard in shards]
    for shard in shards:
        os.truncate(shard, 5000)
    with pytest.raises(ReadError, match=r"model-0000\d-of-00002\.safetensors.*wanted"):
        engine.prefill(engine.new_state(), PROMPT[::-1])
    for shard, content in zip(shards, contents, strict=True):
        shard.write_bytes(content)  # whole again, but nobody knows what was read in between
    with pytest.raises(ReadError, match=r"model-0000\d-of-00002\.safetensors was changed while in use"):
        engine.decode(state, 1)
    engine.close()
    engine = opened(copy, **way)
    check_same(engine, engine.new_state(), undisturbed)
    engine.close()


@pytest.mark.parametrize("way", WAYS)
def test_shard_overwritten_in_place_is_noticed_before_the_next_token(
    way: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    engine = opened(copy, **way)
    state = engine.new_state()
    engine.prefill(state, PROMPT)
    shard = sorted(copy.glob("*.safetensors"))[-1]
    with shard.open("r+b") as file:  # as long as it was
        file.seek(-3, os.SEEK_END)
        file.write(b"new")
    for call in (lambda: engine.decode(state, 1), lambda: engine.prefill(engine.new_state(), PROMPT)):
        with pytest.raises(ReadError, match=rf"{shard.name} was changed while in use"):
            call()
    engine.close()


@pytest.mark.parametrize("way", WAYS)
def test_shard_that_is_replaced_by_another_file_disturbs_nothing(
    way: dict[str, Any], folder: Path, tmp_path: Path, undisturbed: list[NDArray[np.float32]]
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    engine = opened(copy, **way)
    for shard in copy.glob("*.safetensors"):
        other = shard.with_suffix(".new")
        other.write_bytes(b"something else")
        os.replace(other, shard)
    check_same(engine, engine.new_state(), undisturbed)
    engine.close()


@pytest.mark.parametrize("way", WAYS)
def test_deleted_shards_stay_readable(
    way: dict[str, Any], folder: Path, tmp_path: Path, undisturbed: list[NDArray[np.float32]]
) -> None:
    """Files that are open live on; nothing is opened again in the middle of an answer."""
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    engine = opened(copy, **way)
    shutil.rmtree(copy)
    check_same(engine, engine.new_state(), undisturbed)
    engine.close()


def test_model_announces_that_direct_reads_were_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse, raising=False)
    notes: list[str] = []
    with spile.load(
        folder, memory=current_memory_bytes() + 40_000_000, io="direct", on_note=notes.append
    ) as model:
        model.logits(PROMPT[:3])
        assert "reads buffered" in (model.summary or "")
    assert [note for note in notes if "direct reads are refused" in note]


# -- interrupts --


@pytest.mark.parametrize("way", WAYS)
def test_interrupt_inside_a_chunk_leaves_the_state_at_the_chunks_start(
    way: dict[str, Any], folder: Path, undisturbed: list[NDArray[np.float32]]
) -> None:
    engine = opened(folder, **way)
    reports: list[tuple[int, int]] = []
    engine.prefill(engine.new_state(), PROMPT, lambda done, total: reports.append((done, total)))
    assert len(reports) == 3 * SHAPE.num_hidden_layers
    assert reports == sorted(reports)
    assert reports[-1] == (45, 45)
    for stop_at in range(len(reports)):
        calls = iter(range(len(reports)))

        def stop(done: int, total: int, calls: Iterator[int] = calls, stop_at: int = stop_at) -> None:
            if next(calls) == stop_at:
                raise KeyboardInterrupt

        state = engine.new_state()
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(state, PROMPT, stop)
        assert state.position == stop_at // SHAPE.num_hidden_layers * CHUNK
        check_same(engine, state, undisturbed)
        state.close()
    engine.close()


class Interrupt:
    """Raises KeyboardInterrupt before the nth line that runs of spile's own Python, or of one file of it."""

    def __init__(self, n: int, name: str = "") -> None:
        self.left, self.name = n, name

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(os.path.dirname(spile.__file__)) or not path.endswith(self.name):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]])
def test_interrupt_at_any_line_leaves_an_engine_that_goes_on(
    way: dict[str, Any], folder: Path, undisturbed: list[NDArray[np.float32]]
) -> None:
    engine = opened(folder, **way)
    before = sys.gettrace()
    for n in range(1, 900, 41):
        state = engine.new_state()
        sys.settrace(Interrupt(n))
        try:
            engine.prefill(state, PROMPT)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if state.position < len(PROMPT):
            np.testing.assert_array_equal(engine.prefill(state, PROMPT[state.position :]), undisturbed[0])
        state.close()
    check_same(engine, engine.new_state(), undisturbed)
    engine.close()


def test_close_after_an_interrupt_and_twice(folder: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for way in WAYS:
        engine = opened(folder, **way)
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(engine.new_state(), PROMPT, stop)
        engine.close()
        engine.close()


# -- limits, options, memory --


@pytest.mark.parametrize("way", WAYS)
def test_tokens_beyond_the_context_are_refused_before_any_work(way: dict[str, Any], folder: Path) -> None:
    engine = opened(folder, context=50, **way)
    state = engine.new_state()
    row = engine.prefill(state, PROMPT).copy()
    with pytest.raises(ContextError, match="51 tokens do not fit the context of 50"):
        engine.prefill(state, PROMPT[:6])
    assert state.position == 45
    for _ in range(5):
        row = engine.decode(state, int(row.argmax())).copy()
    assert state.position == engine.context == 50
    with pytest.raises(ContextError, match="51 tokens do not fit the context of 50"):
        engine.decode(state, 0)
    with pytest.raises(ContextError, match="51 tokens"):
        engine.logits(engine.new_state(), [0] * 51)
    engine.close()


def test_full_context_gives_the_bits_of_a_larger_one(folder: Path) -> None:
    results = []
    for options in ({"context": 64}, {"context": 64, "slots": 3}, {"context": 300}):
        engine = opened(folder, **options)
        results.append(engine.logits(engine.new_state(), [*PROMPT, *PROMPT[:19]]))
        engine.close()
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_unknown_instruction_set_is_an_option_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILE_ISA", "sse9")
    with pytest.raises(OptionError, match=r"SPILE_ISA is 'sse9': this machine runs .*scalar"):
        opened(folder)
    for isa in _core.isas():
        monkeypatch.setenv("SPILE_ISA", isa)
        engine = opened(folder)
        assert isa in engine.summary()
        engine.close()


def test_threads_are_the_physical_cores_unless_said(folder: Path) -> None:
    for threads in (None, 1, 3):
        engine = opened(folder, threads=threads)
        count = threads or physical_cores()
        assert f"{count} thread{'s' if count > 1 else ''}," in engine.summary()
        engine.close()


def test_memory_of_closed_states_is_given_back(folder: Path) -> None:
    """Each full state takes some 8 MB; thirty of them one after the other take no more than one."""
    shape = SynthShape(num_hidden_layers=2, full_attention_interval=1, max_position_embeddings=8192)
    long = folder.parent / "long"
    write_checkpoint(long, shape)
    engine = opened(long, prefill_chunk=512)

    def fill() -> int:
        state = engine.new_state()
        assert state.cache is not None
        for layer in range(2):
            state.cache.position = 8000
            engine._decoder.attend(state.cache, layer)  # makes room for all positions
        nbytes = state.cache.nbytes
        state.close()
        state.close()
        assert state.position == 0
        return nbytes

    engine.prefill(engine.new_state(), [1])
    nbytes = fill()
    before = current_memory_bytes()
    for _ in range(30):
        fill()
    grown = current_memory_bytes() - before
    print(f"a state of {nbytes:,} bytes; 30 of them left {grown:,}")
    assert nbytes > 8_000_000
    assert grown < 2 * nbytes
    engine.close()


def test_engines_leave_no_thread_file_or_memory_behind(folder: Path) -> None:
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("needs /proc")

    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    before = held()
    for way in (*WAYS, *WAYS):
        engine = opened(folder, threads=2, **way)
        engine.prefill(engine.new_state(), PROMPT[:4])
        engine.close()
        del engine
    threads, files = held()
    assert threads <= before[0]
    assert files <= before[1]


# -- a head that does not fit --


def test_streamed_head_gives_the_same_bits_after_errors_and_interrupts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spile.residency.plan.current_memory_bytes", lambda: 60_000_000)
    shape = SynthShape(
        num_hidden_layers=2, vocab_size=60_000, max_position_embeddings=300, tokenizer_entries=0
    )
    write_checkpoint(tmp_path / "model", shape)
    engine = opened(tmp_path / "model")
    wanted = engine.logits(engine.new_state(), PROMPT)
    engine.close()
    with pytest.raises(BudgetError) as caught:
        opened(tmp_path / "model", memory_bytes=1, context=300)
    floor = parse_size((caught.value.hint or "").split()[2])
    for io in ("buffered", "direct"):
        engine = opened(tmp_path / "model", memory_bytes=floor + 2_000_000, context=300, io=io)
        assert "of the head streamed" in engine.summary()
        np.testing.assert_array_equal(engine.logits(engine.new_state(), PROMPT), wanted)
        messages: list[str] = []
        for fail_at in range(100, 300, 25):
            fault(engine, fail_at=fail_at, fail_with=errno.EIO)
            try:
                engine.logits(engine.new_state(), PROMPT)
            except ReadError as failure:
                messages.append(failure.message)
            fault(engine)
            np.testing.assert_array_equal(engine.logits(engine.new_state(), PROMPT[:9]), wanted[:9])
        assert len(messages) > 3
        assert all(os.strerror(errno.EIO) in message for message in messages)
        before = sys.gettrace()
        for n in range(1, 200, 31):
            state = engine.new_state()
            engine.prefill(state, PROMPT[:8])
            sys.settrace(Interrupt(n, "head.py"))
            try:
                engine.decode(state, PROMPT[8])
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            if state.position == 8:
                np.testing.assert_array_equal(engine.decode(state, PROMPT[8]), wanted[8])
        engine.close()


# -- tensors at odd addresses --


def shift_data(folder: Path, by: int) -> None:
    """Let the data of every shard begin `by` bytes later: headers may end in spaces."""
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + length].rstrip(b" ")
        assert isinstance(json.loads(header), dict)
        padded = header + b" " * (length - len(header) + by)
        path.write_bytes(len(padded).to_bytes(8, "little") + padded + content[8 + length :])


@pytest.mark.parametrize("group_scales", [False, True])
@pytest.mark.parametrize("by", [1, 2, 3])
def test_tensors_may_lie_at_any_address(
    by: int, group_scales: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format aligns nothing: BF16 may begin at an odd byte, codes in the middle of their words."""
    shape = SynthShape(num_hidden_layers=3, first_k_dense_replace=1, full_attention_interval=3)
    write_checkpoint(tmp_path / "even", shape, shards=2, group_scales=group_scales)
    shutil.copytree(tmp_path / "even", tmp_path / "odd")
    shift_data(tmp_path / "odd", by)
    offsets = {tensor.offset % 4 for tensor in open_checkpoint(tmp_path / "odd").tensors.values()}
    assert offsets >= {by} or offsets >= {by, (by + 2) % 4}

    def run(folder: Path, **options: Any) -> NDArray[np.float32]:
        engine = opened(folder, **options)
        state = engine.new_state()
        rows = [engine.logits(state, PROMPT), engine.decode(state, 7)[None].copy()]
        engine.close()
        return np.concatenate(rows)

    wanted = run(tmp_path / "even")
    for isa in _core.isas():
        monkeypatch.setenv("SPILE_ISA", isa)
        for way in WAYS:
            np.testing.assert_array_equal(run(tmp_path / "odd", **way), wanted)


# -- resizing --


@pytest.mark.parametrize("flash_moe", [True, False])
def test_resized_engine_goes_on_with_the_same_bits(
    flash_moe: bool, folder: Path, undisturbed: list[NDArray[np.float32]]
) -> None:
    """Down to the least, also from everything mapped; pool, head, chunk and context follow."""
    engine = opened(folder, flash_moe=flash_moe, memory_bytes=10**9, prefill_chunk=None)
    state = engine.new_state()
    np.testing.assert_array_equal(engine.prefill(state, PROMPT), undisturbed[0])
    then = MemoryNow(engine.plan.parts.process, 10**12, None)
    least = smallest_budget(engine._model, engine._table, engine._options, then)
    seen = set()
    budgets = (least, least + 400_000, 10**9, least + 2_000_000, least, 10**9)
    for before, after, budget in zip(undisturbed, undisturbed[1:], budgets, strict=False):
        engine.resize(budget)
        fresh = make_plan(engine._model, engine._table, replace(engine._options, memory_bytes=budget), then)
        assert replace(engine.plan, is_direct=fresh.is_direct) == fresh
        seen.add((fresh.is_mapped, fresh.prefill_chunk, fresh.num_head_rows))
        np.testing.assert_array_equal(engine.decode(state, int(before.argmax())), after)
        if not fresh.is_mapped:
            assert engine.experts.num_slots <= engine.plan.slots_beside(state.cache.nbytes)
    assert len(seen) > 1
    assert {is_mapped for is_mapped, _, _ in seen} == ({False} if flash_moe else {False, True})
    with pytest.raises(BudgetError, match="and the budget is"):
        engine.resize(least - 1_500_000)
    other = engine.new_state()
    np.testing.assert_array_equal(engine.prefill(other, PROMPT), undisturbed[0])
    engine.close()


def test_engine_does_not_shrink_below_a_conversation_that_goes_on(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    wide = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}  # 24 kB a token
    folder = tiny_checkpoint(max_position_embeddings=4000, **wide)
    engine = opened(folder, memory_bytes=10**9, flash_moe=True, prefill_chunk=256)
    then = MemoryNow(engine.plan.parts.process, 10**12, None)
    least = smallest_budget(engine._model, engine._table, engine._options, then)
    state = engine.new_state()
    engine.prefill(state, [7] * (2 * LEAST_CONTEXT))
    before = engine.plan
    with pytest.raises(BudgetError, match=rf"a conversation of {2 * LEAST_CONTEXT:,} is going on"):
        engine.resize(least)
    assert engine.plan == before
    state.close()
    engine.resize(least)
    engine.close()


def test_room_for_keys_and_prompts_works_for_experts_until_it_is_needed(folder: Path) -> None:
    engine = opened(folder, memory_bytes=10**9, flash_moe=True)
    plan = engine.plan
    shared = 40 * plan.slot_nbytes
    # as a plan would be that has little but this room
    engine.plan = replace(plan, num_slots=plan.least_slots, most_slots=500, shared_nbytes=shared)
    state = engine.new_state()
    engine.decode(state, 1)
    used = state.cache.nbytes
    assert used > 0
    assert engine.experts.num_slots == plan.least_slots + (shared - used) // plan.slot_nbytes
    engine.hold("prompts", shared - used)
    assert engine.experts.num_slots == plan.least_slots
    engine.decode(state, 1)
    with pytest.raises(BudgetError, match="a table would take"):
        engine.hold("a table", 2 * plan.slot_nbytes)
    engine.hold("prompts", 0)
    state.close()
    other = engine.new_state()
    engine.decode(other, 1)
    assert engine.experts.num_slots == plan.least_slots + (shared - other.cache.nbytes) // plan.slot_nbytes
    engine.close()


def test_closed_engine_gives_its_memory_back(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(hidden_size=512, moe_intermediate_size=1024, num_experts=64, num_hidden_layers=4)
    held = []
    for _ in range(4):
        engine = opened(folder, memory_bytes=10**9, flash_moe=True)
        state = engine.new_state()
        engine.prefill(state, [1, 2, 3, 4] * 40)
        peak = current_memory_bytes()
        engine.close()
        held.append(current_memory_bytes())
    assert peak - held[0] > 8_000_000  # or there was nothing to give back
    assert max(held[1:]) - held[0] < 3_000_000


def test_mapped_weights_outlive_the_threads_that_touch_them_where_nobody_closed(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an engine was dropped while its pages were still being touched; the weights went first, and the
    process ended by SIGSEGV, once in hundreds under load.
    """
    alive: list[bool] = []
    end = mapped._end

    def watched(*arguments: Any) -> None:
        alive.append(weights() is not None)
        end(*arguments)

    monkeypatch.setattr(mapped, "_end", watched)
    engine = opened(golden / "mlx-2bit")
    weights = weakref.ref(engine._weights)
    engine.prefill(engine.new_state(), [1, 2, 3])
    del engine
    gc.collect()
    assert alive == [True]
    assert weights() is None
