"""One budget turned into slots, head rows, chunk and context: within it always, and more is never less."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from spile.architectures.maple import MapleModel, open_maple
from spile.engines import EngineOptions, open_engine
from spile.errors import BudgetError
from spile.files.checkpoint import open_checkpoint
from spile.making.synth import SynthShape, write_checkpoint
from spile.residency import plan as plan_module
from spile.residency.experts import ExpertTable
from spile.residency.plan import CHUNKS, Plan, kv_nbytes, make_plan
from spile.residency.slots import Slots
from spile.sizes import parse_size

MB = 1_000_000
PROCESS = 60 * MB
AVAILABLE = 20_000 * MB
# 512 experts of 74 kB, a vocabulary that takes several pieces of the head.
SHAPE = SynthShape(
    hidden_size=256,
    num_hidden_layers=8,
    num_experts=64,
    num_experts_per_tok=4,
    moe_intermediate_size=384,
    vocab_size=8192,
    sliding_window=64,
    max_position_embeddings=20_000,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MapleModel:
    folder = tmp_path_factory.mktemp("plan") / "model"
    write_checkpoint(folder, SHAPE, shards=2)
    return open_maple(open_checkpoint(folder))


@pytest.fixture(autouse=True)
def fixed_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A process that holds 60 MB on a machine that has 20 GB available, unless the test says otherwise."""

    def set_available(nbytes: int) -> None:
        monkeypatch.setattr(plan_module, "available_memory_bytes", lambda: nbytes)

    monkeypatch.setattr(plan_module, "current_memory_bytes", lambda: PROCESS)
    set_available(AVAILABLE)
    return set_available


def plan_of(model: MapleModel, **options: Any) -> Plan:
    return make_plan(model, ExpertTable(model), EngineOptions(**options))


def floor_of(model: MapleModel, **options: Any) -> int:
    """Return what the refusal of a far too small budget says is the smallest one."""
    with pytest.raises(BudgetError) as caught:
        plan_of(model, memory_bytes=1, **options)
    assert caught.value.hint is not None
    found = re.search(r"--memory (\d+MB)", caught.value.hint)
    assert found is not None, caught.value.hint
    return parse_size(found[1])


def whole(model: MapleModel) -> int:
    return sum(path.stat().st_size for path in model.checkpoint.shards)


CHOICES: list[dict[str, Any]] = [
    {},
    {"context": 4096},
    {"prefill_chunk": 100},
    {"context": 700, "prefill_chunk": 512},
    {"kv_bits": 32},
    {"io": "direct"},
    {"io": "buffered", "context": 20_000},
]


@pytest.mark.parametrize("options", CHOICES)
def test_budget_below_the_floor_is_refused_and_the_floor_works(
    model: MapleModel, options: dict[str, Any]
) -> None:
    floor = floor_of(model, **options)
    plan = plan_of(model, memory_bytes=floor, **options)
    assert plan.parts.total <= floor
    assert plan.num_slots >= 2 * SHAPE.num_experts_per_tok
    with pytest.raises(BudgetError) as caught:
        plan_of(model, memory_bytes=floor - MB, **options)
    for part in (str(model.checkpoint.folder), "budget is", "needs"):
        assert part in caught.value.message
    assert parse_size((caught.value.hint or "").split()[2]) == floor  # the same floor from wherever one asks


def test_floor_is_more_than_the_process_already_holds(model: MapleModel) -> None:
    assert floor_of(model) > PROCESS


@pytest.mark.parametrize("options", CHOICES)
def test_every_budget_above_the_floor_is_kept(model: MapleModel, options: dict[str, Any]) -> None:
    floor = floor_of(model, **options)
    for budget in range(floor, floor + whole(model) + 40 * MB, 777_777):
        plan = plan_of(model, memory_bytes=budget, **options)
        assert plan.parts.total <= budget
        assert plan.budget_nbytes == budget
        assert plan.context == options.get("context", plan.context)
        assert plan.prefill_chunk == options.get("prefill_chunk", plan.prefill_chunk)


@pytest.mark.parametrize("io", ["auto", "direct"])
def test_more_budget_is_never_less_of_the_model(model: MapleModel, io: str) -> None:
    """With chunk and context named, nothing else competes: head rows first, then slots."""
    options: dict[str, Any] = {"context": 2048, "prefill_chunk": 64, "io": io}
    floor = floor_of(model, **options)
    last = (False, 0, 0)
    seen = set()
    for budget in range(floor, floor + whole(model) + 40 * MB, 100_003):
        plan = plan_of(model, memory_bytes=budget, **options)
        now = (plan.is_mapped, plan.num_head_rows, plan.num_slots)
        if now[:2] != last[:2]:
            assert now[:2] > last[:2], (budget, last, now)
        else:
            assert now[2] >= last[2], (budget, last, now)
        last = now
        seen.add(now)
    assert len(seen) > 50
    assert last[0] == (io == "auto")
    if io == "direct":
        assert last == (False, SHAPE.vocab_size, 512)  # everything, and no slot more


def test_more_budget_is_never_a_shorter_context_or_chunk(model: MapleModel) -> None:
    last = (0, 0)
    floor = floor_of(model)
    for budget in range(floor, floor + 300 * MB, 555_555):
        plan = plan_of(model, memory_bytes=budget, io="direct")
        assert plan.context >= last[0]
        last = (plan.context, plan.prefill_chunk)
        assert plan.prefill_chunk in CHUNKS
    assert last[0] > 512


def test_everything_is_mapped_where_it_fits(model: MapleModel, fixed_memory: Callable[[int], None]) -> None:
    plan = plan_of(model)
    assert plan.is_mapped
    assert plan.context == SHAPE.max_position_embeddings
    fixed_memory(2 * whole(model) + 200 * MB)
    assert plan_of(model).is_mapped


def test_machine_with_too_little_memory_gets_a_pool_without_being_asked(
    model: MapleModel, fixed_memory: Callable[[int], None]
) -> None:
    fixed_memory(50 * MB)  # the checkpoint has 44 MB, and there is all the rest
    plan = plan_of(model)
    assert not plan.is_mapped
    assert plan.parts.total <= PROCESS + 50 * MB
    assert plan.num_slots < 512


def test_machine_with_far_too_little_memory_is_told_so(
    model: MapleModel, fixed_memory: Callable[[int], None]
) -> None:
    fixed_memory(1 * MB)
    with pytest.raises(BudgetError, match="needs"):
        plan_of(model)


def test_reads_are_buffered_only_where_the_page_cache_could_hold_the_files(
    model: MapleModel, fixed_memory: Callable[[int], None]
) -> None:
    budget = floor_of(model) + 5 * MB
    assert not plan_of(model, memory_bytes=budget).is_direct
    fixed_memory(budget - PROCESS + whole(model) // 2)
    assert plan_of(model, memory_bytes=budget).is_direct
    assert not plan_of(model, memory_bytes=budget, io="buffered").is_direct
    fixed_memory(AVAILABLE)
    assert plan_of(model, memory_bytes=budget, io="direct").is_direct


@pytest.mark.parametrize("slots", [1, 7, 512, 100_000])
def test_number_of_slots_can_be_forced(model: MapleModel, slots: int) -> None:
    plan = plan_of(model, slots=slots)
    assert not plan.is_mapped
    assert plan.num_slots == min(slots, 512)


def test_parts_are_those_of_the_files(model: MapleModel) -> None:
    plan = plan_of(model, memory_bytes=floor_of(model) + 20 * MB, io="direct")
    assert plan.parts.process == PROCESS
    assert plan.parts.experts == plan.num_slots * Slots.nbytes_per_slot(ExpertTable(model))
    everything = dataclasses.replace(plan_of(model).parts, process=0, kv=0, activations=0, margin=0)
    assert everything.total <= whole(model)
    assert everything.total > 0.99 * whole(model)


def test_kv_of_sliding_layers_stops_growing_at_the_window(model: MapleModel) -> None:
    config = model.config
    sizes = [kv_nbytes(config, context, 64, 16) for context in (512, 1024, 2048)]
    full_layers = config.layer_is_sliding.count(False)
    head = 2 * config.head_dim * config.num_key_value_heads * 2
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0]) == full_layers * 1024 * head


@pytest.mark.parametrize("options", [{}, {"context": 300, "prefill_chunk": 32}])
def test_engine_opens_at_the_floor_and_runs(
    model: MapleModel, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # with the real memory of this process
    for _ in range(3):  # what the process holds may move a little between asking and opening
        try:
            floor = floor_of(model, **options)
            engine = open_engine(model, EngineOptions(memory_bytes=floor, **options))
            break
        except BudgetError:
            continue
    state = engine.new_state()
    row = engine.prefill(state, list(range(100)))
    assert row.shape == (SHAPE.vocab_size,)
    assert engine.resident_expert_bytes > 0
    engine.close()
