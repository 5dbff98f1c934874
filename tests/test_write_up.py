"""The flags of the reference write-up (docs/write-up.md): its command line runs, its refusals are made in its
words, exact stays exact, and approximate says so.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import spile
from spile.architectures import open_own
from spile.cli import run
from spile.engines import open_engine
from spile.engines.cpu.engine import CpuEngine
from spile.errors import BudgetError, OptionError
from spile.files.checkpoint import open_checkpoint
from spile.making.synth import PRESETS, write_checkpoint
from spile.options import EngineOptions
from spile.residency.plan import MemoryNow, smallest_budget

PAGE = Path(__file__).parents[1] / "docs" / "write-up.md"
DEMO = Path(spile.__file__).parent / "demo" / "model"
COMMAND = (
    "generate --model ./maple-2bit-mlx --trust-remote-code --flash-moe --active-experts 8 --shared-experts 0 "
    '--kv-bits 8 --kv-v-bits 4 --prompt "Write a haiku about a grove." --temp 0.7 --top-p 0.9 --top-k 40'
)
PROMPT = np.random.default_rng(5).integers(0, 300, 40).tolist()
K, E, L = 2, 8, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of 8 experts, of which a token takes 2."""
    folder = tmp_path_factory.mktemp("write-up") / "model"
    shape = dataclasses.replace(
        PRESETS["tiny"], num_hidden_layers=L, num_experts=E, num_experts_per_tok=K, vocab_size=300
    )
    write_checkpoint(folder, shape, seed=3)
    return folder


def opened(folder: Path, **options: Any) -> CpuEngine:
    engine = open_engine(open_own(open_checkpoint(folder)), EngineOptions(**{"threads": 1, **options}))
    assert isinstance(engine, CpuEngine)
    return engine


def answer(engine: CpuEngine, num_tokens: int = 30) -> NDArray[np.float32]:
    """Return the logits of a prompt and of what greedy decoding makes of it [num_tokens + 1, V]."""
    state = engine.new_state()
    rows = [engine.prefill(state, PROMPT).copy()]
    for _ in range(num_tokens):
        rows.append(engine.decode(state, int(rows[-1].argmax())).copy())
    state.close()
    return np.stack(rows)


@pytest.fixture(scope="module")
def exact(folder: Path) -> NDArray[np.float32]:
    engine = opened(folder)
    try:
        return answer(engine)
    finally:
        engine.close()


def test_its_command_line_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DEMO, tmp_path / "maple-2bit-mlx")
    monkeypatch.chdir(tmp_path)
    assert run(shlex.split(COMMAND)) == 0
    out, err = capfd.readouterr()
    assert out.strip()
    assert "--trust-remote-code does nothing" in err
    assert "56 of 224 experts resident" in err  # 8 in each of 7 layers


def test_page_shows_that_command_line_and_makes_the_refusals_that_it_tells() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"spile {COMMAND}" in re.sub(r" \\\n\s*", " ", page)
    told = {
        (4, 0): "active experts must be >= top_k (8), and active_experts is 4",
        (8, 9): "shared experts must be <= active (8), and shared_experts is 9",
        (8, 1): "shared experts must be <= active - top_k (8 - 8 = 0), and shared_experts is 1",
        (300, 0): "active experts must be <= the model's 256 a layer, and active_experts is 300",
    }
    for (active, shared), message in told.items():
        assert f"`{message}`" in page
        with pytest.raises(OptionError) as caught:
            EngineOptions(active_experts=active, shared_experts=shared).check_experts(256, 8)
        assert str(caught.value) == message


@pytest.mark.parametrize(("active", "shared"), [(2, 0), (3, 1), (4, 1), (8, 0), (8, 6)])
def test_every_token_selected_is_exact_for_any_number_of_active_experts(
    active: int, shared: int, folder: Path, exact: NDArray[np.float32]
) -> None:
    engine = opened(folder, active_experts=active, shared_experts=shared)
    assert engine.plan.num_slots == active * L
    assert engine.exact
    np.testing.assert_array_equal(answer(engine), exact)
    engine.close()


def test_flash_moe_alone_streams_with_as_many_slots_as_a_token_takes(
    folder: Path, exact: NDArray[np.float32]
) -> None:
    engine = opened(folder, flash_moe=True, shared_experts=1)
    assert engine.plan.num_slots == (K + 1) * L
    np.testing.assert_array_equal(answer(engine), exact)
    assert engine.counters().evictions > 0
    engine.close()


def test_flash_moe_with_a_budget_has_a_pool_even_where_all_fits(folder: Path) -> None:
    engine = opened(folder, flash_moe=True, memory_bytes=1_000_000_000)
    assert not engine.plan.is_mapped
    assert engine.plan.num_slots == E * L
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active_experts": 1}, r"^active experts must be >= top_k \(2\), and active_experts is 1$"),
        (
            {"active_experts": 3, "shared_experts": 4},
            r"^shared experts must be <= active \(3\), and shared_experts is 4$",
        ),
        (
            {"active_experts": 4, "shared_experts": 3},
            r"^shared experts must be <= active - top_k \(4 - 2 = 2\), and shared_experts is 3$",
        ),
        (
            {"active_experts": 9},
            r"^active experts must be <= the model's 8 a layer, and active_experts is 9$",
        ),
        (
            {"shared_experts": 9},
            r"^shared experts must be <= the model's 8 a layer, and shared_experts is 9$",
        ),
    ],
)
def test_combinations_that_cannot_be_are_refused_before_anything_is_read(
    options: dict[str, int], message: str, folder: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        spile.load(folder, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reselect_every": 4}, "reselect_every is 4 without active_experts"),
        ({"reselect_every": -1}, "reselect_every is -1: it must be an integer from 0"),
        ({"shared_experts": -1}, "shared_experts is -1: it must be an integer from 0"),
        ({"active_experts": 0}, "active_experts is 0: it must be an integer from 1"),
        ({"io": "mapped", "active_experts": 4}, "io is 'mapped': .* active_experts asks for"),
        ({"io": "mapped", "flash_moe": True}, "io is 'mapped': .* flash_moe asks for"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        EngineOptions(**options)


def test_refusal_of_the_command_line_is_one_line_and_exit_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--active-experts", "3", "hello"]) == 2
    err = capfd.readouterr().err.strip()
    assert err.splitlines() == ["error: active experts must be >= top_k (4), and active_experts is 3"]


def test_active_experts_that_do_not_fit_the_budget_are_refused_with_the_sum(folder: Path) -> None:
    fits = opened(folder, active_experts=8)
    needed = fits.plan.parts.total
    slot_nbytes = fits.experts.slot_nbytes
    fits.close()
    with pytest.raises(BudgetError, match=r"8 active experts a layer.* and the budget is") as caught:
        opened(folder, active_experts=8, memory_bytes=needed - 4 * slot_nbytes - 20_000_000, context=512)
    assert "fewer --active-experts" in str(caught.value.hint)


# -- approximate --


def test_reselecting_less_often_is_approximate_and_says_so(folder: Path, exact: NDArray[np.float32]) -> None:
    engine = opened(folder, active_experts=4, reselect_every=5)
    assert not engine.exact
    told = "approximate: routers choose from 4 experts a layer, selected every 5 tokens (reselect_every 5)"
    assert told in engine.summary()
    assert told in engine.notes
    rows = answer(engine)
    engine.close()
    np.testing.assert_array_equal(rows[:2], exact[:2])  # the prompt, and the token that selects
    assert not np.array_equal(rows, exact)


@pytest.mark.parametrize("every", [0, 5])
def test_approximation_is_the_same_for_any_threads_budget_and_chunk(every: int, folder: Path) -> None:
    options = {"active_experts": 4, "shared_experts": 1, "reselect_every": every}
    rows = []
    for way in (
        {},
        {"threads": 2, "prefill_chunk": 7},
        {"memory_bytes": 900_000_000, "io": "direct"},
        {"prefill_chunk": 1},
    ):
        engine = opened(folder, **options, **way)
        rows.append(answer(engine))
        engine.close()
    for other in rows[1:]:
        np.testing.assert_array_equal(other, rows[0])


def test_between_selections_only_selected_experts_are_asked_for(folder: Path) -> None:
    engine = opened(folder, active_experts=3, reselect_every=0)
    asked: list[set[int]] = [set() for _ in range(L)]
    layers = iter(range(0))

    def record(ids: NDArray[np.int32]) -> None:
        asked[next(layers)].update(ids.tolist())

    engine.on_decode_route = record
    state = engine.new_state()
    token = int(engine.prefill(state, PROMPT).argmax())
    for _ in range(25):
        layers = iter(range(L))
        token = int(engine.decode(state, token).argmax())
    engine.close()
    assert max(map(len, asked)) <= 3
    counters = engine.counters()
    assert counters.misses < counters.hits


@pytest.mark.parametrize(("active", "every"), [(2, 2), (2, 4), (4, 4), (4, 16), (6, 0)])
def test_nothing_is_read_between_two_selections(active: int, every: int, folder: Path) -> None:
    """Regression: 16 tokens of full size read 174, 174, 174, 173 experts, and then none (every 16)."""
    engine = opened(folder, active_experts=active, reselect_every=every, shared_experts=active - K)
    state = engine.new_state()
    token = int(engine.prefill(state, PROMPT).argmax())
    for index in range(40):
        before = engine.counters().misses
        token = int(engine.decode(state, token).argmax())
        is_selection = index == 0 or (every and index % every == 0)
        assert is_selection or engine.counters().misses == before, f"token {index}"
    engine.close()


def test_selection_that_is_larger_than_the_pool_is_refused_with_both_numbers(folder: Path) -> None:
    told = r"^a selection of 4 experts a layer takes 12 slots, and the pool has 11$"
    with pytest.raises(OptionError, match=told):
        opened(folder, active_experts=4, reselect_every=2, slots=11)
    opened(folder, active_experts=4, slots=11).close()
    engine = opened(folder, active_experts=4, reselect_every=2, memory_bytes=500_000_000)
    smallest = smallest_budget(engine._model, engine._table, engine._options, process_of(engine))
    engine.resize(smallest)
    assert engine.experts.num_slots >= 12
    with pytest.raises(BudgetError, match="4 active experts a layer"):
        engine.resize(smallest - 1_500_000)
    engine.close()


def test_two_sequences_at_once_do_not_select_for_each_other(folder: Path) -> None:
    engine = opened(folder, active_experts=4, reselect_every=0)
    alone = answer(engine, 10)
    state, other = engine.new_state(), engine.new_state()
    rows = [engine.prefill(state, PROMPT).copy()]
    engine.prefill(other, PROMPT[::-1])
    for _ in range(10):
        rows.append(engine.decode(state, int(rows[-1].argmax())).copy())
        engine.decode(other, 7)
    engine.close()
    np.testing.assert_array_equal(np.stack(rows), alone)


def test_json_says_that_an_answer_is_not_exact(capfd: pytest.CaptureFixture[str]) -> None:
    line = "generate --flash-moe --active-experts 6 --reselect-every 4 --max-tokens 6 --seed 1 --json Once"
    assert run(shlex.split(line)) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["exact"] is False
    assert re.search(r"^note: approximate: routers choose from 6 experts", err, re.MULTILINE)


# -- shared experts --


def pinned(engine: CpuEngine, shared: int) -> bool:
    """Whether the first experts of each layer are resident, and in the first slots."""
    assert not engine.plan.is_mapped
    held = engine.experts._slot_to_key[: shared * L].tolist()
    return sorted(held) == [layer * E + expert for layer in range(L) for expert in range(shared)]


def test_shared_experts_stay_through_prompts_loans_and_a_smaller_pool(
    folder: Path, exact: NDArray[np.float32]
) -> None:
    engine = opened(folder, flash_moe=True, memory_bytes=500_000_000, shared_experts=2)
    assert not engine.plan.is_mapped
    assert pinned(engine, 2)
    np.testing.assert_array_equal(answer(engine), exact)
    assert pinned(engine, 2)
    engine.lend(10**9)
    assert pinned(engine, 2)
    assert engine.experts.num_resident == 2 * L
    np.testing.assert_array_equal(answer(engine), exact)
    least = engine.plan.least_slots
    smallest = smallest_budget(engine._model, engine._table, engine._options, process_of(engine))
    engine.resize(smallest)
    assert pinned(engine, 2)
    assert engine.experts.num_slots >= engine.plan.num_slots >= least == 2 * L + 2 * K
    np.testing.assert_array_equal(answer(engine), exact)
    with pytest.raises(BudgetError, match="and the budget is"):
        engine.resize(smallest - 1_500_000)
    assert pinned(engine, 2)
    np.testing.assert_array_equal(answer(engine), exact)
    engine.close()


def process_of(engine: CpuEngine) -> MemoryNow:
    """What the process held when an engine was opened."""
    return MemoryNow(engine.plan.parts.process, 10**12, None)


@pytest.mark.parametrize("name", ["flash_moe", "flash_head"])
def test_switch_that_is_neither_on_nor_off_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} is 'yes': it must be True or False"):
        EngineOptions(**{name: "yes"})
