"""One budget turned into slots, head rows, chunk and context: within it always, and more is never less."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spile import machine
from spile.architectures import open_own
from spile.architectures.spec import OwnModel
from spile.engines import open_engine
from spile.errors import BudgetError
from spile.files.checkpoint import open_checkpoint
from spile.making.synth import SynthShape, write_checkpoint
from spile.options import EngineOptions
from spile.residency import plan as plan_module
from spile.residency.experts import ExpertTable
from spile.residency.kv import KvFormat, kv_nbytes
from spile.residency.pages import Pages
from spile.residency.plan import CHUNKS, Plan, make_plan, mapped_budget, smallest_budget
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
def model(tmp_path_factory: pytest.TempPathFactory) -> OwnModel:
    folder = tmp_path_factory.mktemp("plan") / "model"
    write_checkpoint(folder, SHAPE, shards=2)
    return open_own(open_checkpoint(folder))


@pytest.fixture(autouse=True)
def fixed_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A process that holds 60 MB on a machine that has 20 GB available, unless the test says otherwise."""

    def set_available(nbytes: int) -> None:
        monkeypatch.setattr(plan_module, "available_memory_bytes", lambda: nbytes)

    monkeypatch.setattr(plan_module, "current_memory_bytes", lambda: PROCESS)
    monkeypatch.setattr(plan_module, "memory_limit_bytes", lambda: None)
    set_available(AVAILABLE)
    return set_available


def plan_of(model: OwnModel, **options: Any) -> Plan:
    return make_plan(model, ExpertTable(model), EngineOptions(**options))


def test_what_others_reserve_is_a_part_of_the_plan(model: OwnModel) -> None:
    floor, more = floor_of(model), floor_of(model, reserved_bytes=24_000_000)
    assert more - floor == 24_000_000
    made = plan_of(model, memory_bytes=more, reserved_bytes=24_000_000)
    assert made.parts.reserved == 24_000_000
    assert made.parts.total <= more


def floor_of(model: OwnModel, **options: Any) -> int:
    """Return what the refusal of a far too small budget says is the smallest one."""
    with pytest.raises(BudgetError) as caught:
        plan_of(model, memory_bytes=1, **options)
    assert caught.value.hint is not None
    found = re.search(r"--memory (\d+MB)", caught.value.hint)
    assert found is not None, caught.value.hint
    return parse_size(found[1])


def whole(model: OwnModel) -> int:
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
    model: OwnModel, options: dict[str, Any]
) -> None:
    floor = floor_of(model, **options)
    plan = plan_of(model, memory_bytes=floor, **options)
    assert plan.parts.total <= floor
    assert plan.num_slots >= 2 * SHAPE.num_experts_per_tok
    with pytest.raises(BudgetError) as caught:
        plan_of(model, memory_bytes=floor - 2 * MB, **options)  # a part of one is for what varies
    for part in (str(model.checkpoint.folder), "budget is", "needs"):
        assert part in caught.value.message
    assert parse_size((caught.value.hint or "").split()[2]) == floor  # the same floor from wherever one asks


def test_floor_is_more_than_the_process_already_holds(model: OwnModel) -> None:
    assert floor_of(model) > PROCESS


@pytest.mark.parametrize("options", CHOICES)
def test_every_budget_above_the_floor_is_kept(model: OwnModel, options: dict[str, Any]) -> None:
    floor = floor_of(model, **options)
    for budget in range(floor, floor + whole(model) + 40 * MB, 777_777):
        plan = plan_of(model, memory_bytes=budget, **options)
        assert plan.parts.total <= budget
        assert plan.budget_nbytes == budget
        assert plan.context == options.get("context", plan.context)
        assert plan.prefill_chunk == options.get("prefill_chunk", plan.prefill_chunk)


@pytest.mark.parametrize("io", ["auto", "direct"])
def test_more_budget_is_never_less_of_the_model(model: OwnModel, io: str) -> None:
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


@pytest.mark.parametrize("sequences", [1, 4])
def test_more_budget_is_never_less_of_anything(model: OwnModel, sequences: int) -> None:
    """Regression: where the default context or chunk stepped up, slots went down."""
    names = ("context", "prefill_chunk", "num_head_rows", "num_slots")
    last = dict.fromkeys(names, 0)
    floor = floor_of(model, sequences=sequences)
    for budget in range(floor, floor + 300 * MB, 333_333):
        plan = plan_of(model, memory_bytes=budget, io="direct", sequences=sequences)
        now = {name: getattr(plan, name) for name in names}
        assert all(now[name] >= last[name] for name in names), (budget, last, now)
        assert plan.parts.total <= budget
        last = now
    assert last == {
        "context": SHAPE.max_position_embeddings,
        "prefill_chunk": CHUNKS[0],
        "num_head_rows": SHAPE.vocab_size,
        "num_slots": 512,
    }


def test_what_is_set_aside_and_not_used_is_little(model: OwnModel) -> None:
    floor = floor_of(model)
    for budget in range(floor + MB, floor + 100 * MB, 1_234_567):
        plan = plan_of(model, memory_bytes=budget, io="direct")
        if plan.num_slots < 512:
            assert budget - plan.parts.total < 3 * MB


def test_keys_and_values_that_cannot_fit_are_refused_with_the_sum(model: OwnModel) -> None:
    with pytest.raises(BudgetError) as caught:
        plan_of(model, memory_bytes=floor_of(model) + 5 * MB, context=20_000, sequences=8)
    message = caught.value.message
    assert "a context of 20,000 tokens, 8 sequences at once" in message
    parts = re.findall(r"(\w+) ([\d.]+) (kB|MB)", message.partition(": process")[2])
    added = PROCESS / MB + sum(float(number) / (1000 if unit == "kB" else 1) for _, number, unit in parts)
    needed = parse_size(re.search(r"needs ([\d.]+ MB)", message)[1])  # type: ignore[index]
    assert added == pytest.approx(needed / MB, rel=0.01)
    assert "kv" in {name for name, _, _ in parts}


def test_smallest_and_mapped_budgets_are_those_that_plans_say(model: OwnModel) -> None:
    table, memory = ExpertTable(model), plan_module.memory_now()
    least = smallest_budget(model, table, EngineOptions(), memory)
    assert least == floor_of(model)
    mapped = mapped_budget(model, table, EngineOptions(), memory)
    assert plan_of(model, memory_bytes=mapped).is_mapped
    assert not plan_of(model, memory_bytes=mapped - 2 * MB).is_mapped


def test_budget_equal_to_a_group_s_limit_is_kept(model: OwnModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group counts a few MB that the process does not: page tables, kernel memory; the margin is for those."""
    limit = floor_of(model) + 10 * MB
    monkeypatch.setattr(plan_module, "memory_limit_bytes", lambda: limit)
    monkeypatch.setattr(plan_module, "available_memory_bytes", lambda: limit - PROCESS - 5 * MB)
    plan = plan_of(model, memory_bytes=limit)
    assert plan.is_direct
    with pytest.raises(BudgetError, match="the control group, which allows"):
        plan_of(model, memory_bytes=limit + 30 * MB)


def test_budget_that_nobody_names_is_made_from_the_group_s_limit(
    model: OwnModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Case B2: a limit of which most is file cache leaves nearly all of it."""
    GIB = 1 << 30
    for name, value in (("CGROUPS", tmp_path), ("OWN_CGROUPS", tmp_path / "own")):
        monkeypatch.setattr(machine, name, value)
    (tmp_path / "own").write_text("0::/job\n")
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    group = tmp_path / "job"
    group.mkdir()
    (group / "memory.max").write_text(f"{GIB}\n")
    (group / "memory.current").write_text(f"{GIB - MB}\n")
    (group / "memory.stat").write_text(f"active_file {GIB // 2}\ninactive_file {GIB // 2 - 20 * MB}\n")
    monkeypatch.setattr(plan_module, "available_memory_bytes", machine.available_memory_bytes)
    monkeypatch.setattr(plan_module, "memory_limit_bytes", machine.memory_limit_bytes)
    assert plan_of(model).is_mapped  # 44 MB of it
    (group / "memory.stat").write_text("active_file 0\ninactive_file 0\n")
    with pytest.raises(BudgetError, match="the control group, which allows"):
        plan_of(model)


def test_everything_is_mapped_where_it_fits(model: OwnModel, fixed_memory: Callable[[int], None]) -> None:
    plan = plan_of(model)
    assert plan.is_mapped
    assert plan.context == SHAPE.max_position_embeddings
    fixed_memory(2 * whole(model) + 200 * MB)
    assert plan_of(model).is_mapped


def test_machine_with_too_little_memory_gets_a_pool_without_being_asked(
    model: OwnModel, fixed_memory: Callable[[int], None]
) -> None:
    fixed_memory(50 * MB)  # the checkpoint has 44 MB, and there is all the rest
    plan = plan_of(model)
    assert not plan.is_mapped
    assert plan.parts.total <= PROCESS + 50 * MB
    assert plan.num_slots < 512


def test_machine_with_far_too_little_memory_is_told_so(
    model: OwnModel, fixed_memory: Callable[[int], None]
) -> None:
    fixed_memory(1 * MB)
    with pytest.raises(BudgetError, match="needs"):
        plan_of(model)


def test_reads_are_buffered_only_where_the_page_cache_could_hold_the_files(
    model: OwnModel, fixed_memory: Callable[[int], None]
) -> None:
    budget = floor_of(model) + 5 * MB
    assert not plan_of(model, memory_bytes=budget).is_direct
    fixed_memory(budget - PROCESS + whole(model) // 2)
    assert plan_of(model, memory_bytes=budget).is_direct
    assert not plan_of(model, memory_bytes=budget, io="buffered").is_direct
    fixed_memory(AVAILABLE)
    assert plan_of(model, memory_bytes=budget, io="direct").is_direct


@pytest.mark.parametrize("slots", [1, 7, 512, 100_000])
def test_number_of_slots_can_be_forced(model: OwnModel, slots: int) -> None:
    plan = plan_of(model, slots=slots)
    assert not plan.is_mapped
    assert plan.num_slots == min(slots, 512)


def test_parts_are_those_of_the_files(model: OwnModel) -> None:
    plan = plan_of(model, memory_bytes=floor_of(model) + 20 * MB, io="direct")
    assert plan.parts.process == PROCESS
    assert plan.parts.experts == plan.num_slots * Pages.nbytes_per_slot(ExpertTable(model))
    everything = dataclasses.replace(plan_of(model).parts, process=0, kv=0, activations=0, margin=0)
    assert everything.total <= whole(model)
    assert everything.total > 0.99 * whole(model)


def test_kv_of_sliding_layers_stops_growing_at_the_window(model: OwnModel) -> None:
    config = model.spec
    sizes = [kv_nbytes(config, context, 64, KvFormat(16, 16)) for context in (512, 1024, 2048)]
    full_layers = config.layer_is_sliding.count(False)
    head = 2 * config.head_dim * config.num_key_value_heads * 2
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0]) == full_layers * 1024 * head


@pytest.mark.parametrize("options", [{}, {"context": 300, "prefill_chunk": 32}])
def test_engine_opens_at_the_floor_and_runs(
    model: OwnModel, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
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


def test_what_others_reserve_is_a_part_of_the_plan_and_leaves_less_for_experts(model: OwnModel) -> None:
    budget = floor_of(model) + 20 * MB
    free = plan_of(model, memory_bytes=budget, io="direct")
    made = plan_of(model, memory_bytes=budget, io="direct", reserved_bytes=10 * MB)
    assert (free.parts.reserved, made.parts.reserved) == (0, 10 * MB)
    assert made.num_slots < free.num_slots
    assert made.parts.total <= budget
    assert floor_of(model, reserved_bytes=10 * MB) - floor_of(model) == 10 * MB


@pytest.mark.parametrize(
    ("asked", "way"),
    [
        ({"prefill_chunk": 8192}, "a smaller --prefill-step-size"),
        ({"context": 20_000, "sequences": 30}, "a smaller --context"),
        ({"context": 20_000, "sequences": 30}, "room for fewer answers at once"),
        ({"context": 20_000, "sequences": 9, "kv_bits": 32}, "fewer KV bits"),
        ({"shared_experts": 60}, "fewer --shared-experts"),
        ({"active_experts": 64}, "fewer --active-experts"),
    ],
)
@pytest.mark.parametrize("limit", [None, 400 * MB])
def test_a_refusal_names_what_was_asked_for_and_could_be_less(
    asked: dict[str, Any], way: str, limit: int | None, model: OwnModel, monkeypatch: pytest.MonkeyPatch,
    fixed_memory: Callable[[int], None],
) -> None:  # fmt: skip
    """Regression: a prompt step of 8,192 tokens with 400 MB was told to raise the control group's limit."""
    budget = smallest_budget(model, ExpertTable(model), EngineOptions(), plan_module.memory_now()) + 2 * MB
    table = ExpertTable(model)
    make_plan(model, table, EngineOptions(memory_bytes=budget))
    monkeypatch.setattr(plan_module, "memory_limit_bytes", lambda: limit)
    if limit is not None:
        fixed_memory(budget - PROCESS)
    for memory in (budget, None):
        if memory is None and limit is None:
            continue
        with pytest.raises(BudgetError) as caught:
            make_plan(model, table, EngineOptions(memory_bytes=memory, io="buffered", **asked))
        assert way in str(caught.value.hint)
        if memory is not None:
            assert str(caught.value.hint).startswith("Give --memory ")
