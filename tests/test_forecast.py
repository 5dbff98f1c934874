"""Plans turned into speeds by hand-made probes, and what a probe of this machine must be."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spile.architectures import open_own
from spile.architectures.spec import OwnModel
from spile.engines.cpu.probe import probe_machine
from spile.errors import OptionError
from spile.files.checkpoint import open_checkpoint
from spile.options import EngineOptions
from spile.residency.budgets import look_at_budgets
from spile.residency.experts import ExpertTable
from spile.residency.forecast import ChunkSeconds, Probe, Routing, forecast, routing_of
from spile.residency.kv import kv_format
from spile.residency.plan import MemoryNow, Plan, make_plan

PROBE = Probe(
    begin_seconds=1e-4,
    pooled_begin_seconds=2e-4,
    row_seconds=0.0,
    attend_seconds=1e-3,
    resident_seconds=2e-3,
    pooled_seconds=3e-3,
    half_disk_seconds=8e-3,
    disk_seconds=13e-3,
    cached_seconds=5e-3,
    head_seconds=4e-3,
    mapped_head_seconds=6e-3,
    loop_seconds=3e-4,
    chunks={64: ChunkSeconds(0.1, 0.3), 512: ChunkSeconds(0.5, 2.0)},
    cached_miss_seconds=1e-6,
    cached_nbytes=1e10,
    disk_nbytes=1e9,
    touched_nbytes=5e8,
    overlap_loss=1.0,
    fresh_nbytes=float("inf"),
)


@pytest.fixture
def model(tiny_checkpoint: Callable[..., Path]) -> OwnModel:
    return open_own(open_checkpoint(tiny_checkpoint()))


def plan_of(model: OwnModel, slots: int | None) -> Plan:
    return make_plan(model, ExpertTable(model), EngineOptions(slots=slots))


def test_token_takes_its_layers_its_misses_and_the_head(model: OwnModel) -> None:
    plan = plan_of(model, 8)
    expected = forecast(model, plan, PROBE)
    h, L = expected.hit_rate, model.spec.num_hidden_layers
    rest = 2e-4 + 4e-3 + 3e-4
    assert 0 < h < 1
    assert expected.decode_cold == pytest.approx(1 / (L * (3e-3 + (1 - h) * 10e-3) + rest))
    assert expected.decode_warm == pytest.approx(1 / (L * (3e-3 + (1 - h) * 2e-3) + rest))


def test_token_is_never_faster_than_its_bytes_come_from_the_disk(model: OwnModel) -> None:
    expected = forecast(model, plan_of(model, 8), replace(PROBE, disk_nbytes=1000.0))
    assert expected.decode_cold == pytest.approx(1000 / expected.bytes_per_token)


def test_few_reads_at_a_time_take_more_than_their_part(model: OwnModel) -> None:
    plan = plan_of(model, 8)
    even, slow_start = (
        forecast(model, plan, replace(PROBE, half_disk_seconds=seconds)) for seconds in (8e-3, 12e-3)
    )
    assert slow_start.decode_cold is not None
    assert even.decode_cold is not None
    assert slow_start.decode_cold < even.decode_cold
    assert slow_start.decode_warm == even.decode_warm


def test_cold_prompt_is_slower_by_what_reading_and_computing_at_once_lose(model: OwnModel) -> None:
    lossy = forecast(model, plan_of(model, 8), replace(PROBE, overlap_loss=1.5))
    assert lossy.prefill_cold == pytest.approx(
        512 / (model.spec.num_hidden_layers * (0.5 + 1.5 * 2.0) + 4e-3)
    )


def test_mapped_token_takes_what_experts_in_place_take(model: OwnModel) -> None:
    expected = forecast(model, plan_of(model, None), PROBE)
    assert expected.hit_rate == 1
    rest = 1e-4 + 6e-3 + 3e-4
    assert expected.decode_warm == pytest.approx(1 / (model.spec.num_hidden_layers * 2e-3 + rest))


def test_cold_prompt_reads_while_experts_are_computed_and_not_during_attention(model: OwnModel) -> None:
    plan, L = plan_of(model, 8), model.spec.num_hidden_layers
    assert plan.prefill_chunk == 512
    fast = forecast(model, plan, PROBE)
    assert fast.prefill_cold == pytest.approx(512 / (L * 2.5 + 4e-3))
    slow_disk = forecast(model, plan, replace(PROBE, disk_nbytes=1000.0))
    used = model.spec.num_routed_experts * Routing().used(
        512, model.spec.num_experts_per_tok, model.spec.num_experts
    )
    reading = int(used) * ExpertTable(model).expert_nbytes / 1000
    assert slow_disk.prefill_cold == pytest.approx(512 / (L * 0.5 + reading + 4e-3))


def test_mapped_cold_prompt_computes_while_files_are_made_present(model: OwnModel) -> None:
    plan, L = plan_of(model, None), model.spec.num_hidden_layers
    computing = L * 2.5 + 6e-3
    nbytes = sum(tensor.nbytes for tensor in model.checkpoint.tensors.values())
    slow, fast = (forecast(model, plan, replace(PROBE, touched_nbytes=nbytes / s)) for s in (40.0, 1.0))
    assert slow.prefill_cold == pytest.approx(512 / 40)
    assert fast.prefill_cold == pytest.approx(512 / computing)
    slow_memory = forecast(model, plan, replace(PROBE, touched_nbytes=nbytes / 1.0, fresh_nbytes=2e9))
    assert slow_memory.prefill_cold == pytest.approx(512 / (computing + nbytes * 0.25e-9))


def test_memory_that_comes_slowly_slows_the_first_prompt_by_the_pool(model: OwnModel) -> None:
    plan = plan_of(model, 8)
    slow, fast = (forecast(model, plan, replace(PROBE, fresh_nbytes=rate)) for rate in (1e5, float("inf")))
    assert slow.prefill_warm is not None
    assert fast.prefill_warm is not None
    more = 512 / slow.prefill_warm - 512 / fast.prefill_warm
    assert more == pytest.approx(8 * ExpertTable(model).expert_nbytes / 1e5)


def test_more_slots_are_never_slower_and_cold_is_never_faster(model: OwnModel) -> None:
    before = 0.0
    for slots in (1, 2, 4, 8, 16):
        expected = forecast(model, plan_of(model, slots), PROBE)
        assert expected.decode_cold is not None
        assert expected.decode_warm is not None
        assert before <= expected.decode_warm
        assert expected.decode_cold <= expected.decode_warm
        before = expected.decode_warm


def test_without_a_disk_nothing_is_said_of_cold_runs(model: OwnModel) -> None:
    expected = forecast(model, plan_of(model, 4), replace(PROBE, disk_seconds=None, disk_nbytes=None))
    assert expected.decode_cold is None
    assert expected.first_token_seconds(512, cold=True) is None
    assert (expected.first_token_seconds(512, cold=False) or 0) > 0


def test_direct_reads_have_no_warm_runs(model: OwnModel) -> None:
    expected = forecast(model, replace(plan_of(model, 4), is_direct=True), PROBE)
    assert expected.decode_warm is None
    assert expected.decode_cold is not None


def test_trace_says_hit_rates_and_how_many_experts_a_chunk_wants(model: OwnModel) -> None:
    config = model.spec
    L, K, E = config.num_moe_layers, config.num_experts_per_tok, config.num_experts
    always = np.tile(np.arange(K, dtype=np.int32), (40, L, 1))  # the same experts at every token
    routing = routing_of(always, E, config, "it")
    assert routing.hit_rate(K / E) > 0.8
    assert routing.used(40, K, E) == pytest.approx(K / E)
    with pytest.raises(OptionError, match="it is of another model: it has"):
        routing_of(always[:, :1], E, config, "it")


def test_outlook_goes_from_the_smallest_budget_to_the_whole(model: OwnModel) -> None:
    memory = MemoryNow(60_000_000, 20_000_000_000, None)
    outlook = look_at_budgets(model, EngineOptions(memory_bytes=80_000_000), memory, PROBE)
    budgets = [row.budget_nbytes for row in outlook.rows]
    assert budgets == sorted(budgets)
    assert outlook.smallest.budget_nbytes == budgets[0]
    assert outlook.rows[-1].plan.is_mapped
    assert not outlook.rows[0].plan.is_mapped
    assert outlook.enough_warm_nbytes is not None
    assert outlook.mapped_nbytes is not None
    assert budgets[0] <= outlook.enough_warm_nbytes <= outlook.mapped_nbytes
    group = MemoryNow(60_000_000, 20_000_000, 80_000_000)
    assert all(
        row.budget_nbytes <= 80_000_000 for row in look_at_budgets(model, EngineOptions(), group, None).rows
    )


def test_outlook_of_a_pool_that_was_asked_for_maps_nothing(model: OwnModel) -> None:
    memory = MemoryNow(60_000_000, 20_000_000_000, None)
    active = EngineOptions(active_experts=model.spec.num_experts_per_tok)
    outlook = look_at_budgets(model, active, memory, PROBE)
    assert outlook.mapped_nbytes is None
    assert not any(row.plan.is_mapped for row in outlook.rows)


def test_outlook_of_mapped_files_begins_where_all_is_mapped(model: OwnModel) -> None:
    memory = MemoryNow(60_000_000, 20_000_000_000, None)
    outlook = look_at_budgets(model, EngineOptions(io="mapped"), memory, PROBE)
    assert all(row.plan.is_mapped for row in outlook.rows)
    assert outlook.smallest.budget_nbytes == outlook.mapped_nbytes


def test_smallest_budget_of_a_flash_moe_is_a_pools(model: OwnModel) -> None:
    memory = MemoryNow(60_000_000, 20_000_000_000, None)
    plain, flash = (
        look_at_budgets(model, EngineOptions(flash_moe=flash), memory, None) for flash in (False, True)
    )
    assert flash.smallest.budget_nbytes == plain.smallest.budget_nbytes


def test_model_without_experts_has_a_forecast_and_no_way_to_read_them(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    dense = open_own(open_checkpoint(tiny_checkpoint(first_k_dense_replace=4)))
    config, table = dense.spec, ExpertTable(dense)
    assert config.num_moe_layers == 0
    kv = kv_format(config, EngineOptions())
    probe = probe_machine(config, table, list(dense.checkpoint.shards), threads=1, chunks=[16], kv=kv)
    plan = make_plan(dense, table, EngineOptions())
    assert (forecast(dense, plan, probe).decode_warm or 0) > 0
    with pytest.raises(OptionError, match="no experts to read"):
        make_plan(dense, table, EngineOptions(io="direct"))


def test_probe_measures_something(model: OwnModel) -> None:
    config, table = model.spec, ExpertTable(model)
    kv = kv_format(config, EngineOptions())
    probe = probe_machine(config, table, list(model.checkpoint.shards), threads=1, chunks=[16, 64], kv=kv)
    assert probe.resident_seconds > 0
    assert probe.pooled_seconds > 0
    assert probe.head_seconds > 0
    assert sorted(probe.chunks) == [16, 64]
    assert probe.cached_seconds is not None
    assert probe.cached_seconds >= probe.pooled_seconds
    assert probe.disk_seconds is None or (probe.disk_nbytes or 0) > 0


def test_probe_without_files_knows_no_disk(model: OwnModel) -> None:
    config, table = model.spec, ExpertTable(model)
    probe = probe_machine(config, table, [], threads=1, chunks=[16], kv=kv_format(config, EngineOptions()))
    assert probe.disk_seconds is None
    assert probe.cached_seconds is not None


def test_probe_reads_another_file_where_there_are_no_weights(model: OwnModel, tmp_path: Path) -> None:
    other = tmp_path / "large"
    other.write_bytes(bytes(1_000_000))
    config, table = model.spec, ExpertTable(model)
    probe = probe_machine(
        config,
        table,
        [other],
        are_weights=False,
        threads=1,
        chunks=[16],
        kv=kv_format(config, EngineOptions()),
    )
    assert probe.cached_seconds is not None
