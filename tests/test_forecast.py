from collections.abc import Callable
from pathlib import Path

from spile.architectures.maple import open_maple
from spile.engines import EngineOptions
from spile.files.checkpoint import open_checkpoint
from spile.residency.experts import ExpertTable
from spile.residency.forecast import Probe, forecast, layer_macs, probe_machine
from spile.residency.plan import make_plan

PROBE = Probe(macs=1e11, head_macs=6e10, cached_nbytes=2e10, disk_nbytes=1e9)


def test_multiplications_of_a_token_are_counted_from_the_shapes(tiny_checkpoint: Callable[..., Path]) -> None:
    config = open_maple(open_checkpoint(tiny_checkpoint())).config
    D, wide = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    experts = 3 * D * config.moe_intermediate_size * config.num_experts_per_tok
    assert layer_macs(config) == config.num_hidden_layers * (2 * D * wide + 2 * D * kv + experts)


def test_more_slots_are_never_slower_and_cold_is_never_faster(tiny_checkpoint: Callable[..., Path]) -> None:
    model = open_maple(open_checkpoint(tiny_checkpoint()))
    table, before = ExpertTable(model), 0.0
    for slots in (1, 2, 4, 8, 16):
        plan = make_plan(model, table, EngineOptions(slots=slots))
        expected = forecast(model, plan, PROBE)
        assert expected.decode_cold is not None
        assert before <= expected.decode_warm
        assert expected.decode_cold <= expected.decode_warm
        before = expected.decode_warm


def test_without_a_disk_probe_nothing_is_said_of_cold_runs(tiny_checkpoint: Callable[..., Path]) -> None:
    model = open_maple(open_checkpoint(tiny_checkpoint()))
    plan = make_plan(model, ExpertTable(model), EngineOptions(slots=4))
    expected = forecast(model, plan, Probe(1e11, 6e10, 2e10, None))
    assert expected.decode_cold is None
    assert expected.first_token_seconds(512, cold=True) is None
    assert (expected.first_token_seconds(512, cold=False) or 0) > 0


def test_probe_measures_something(tiny_checkpoint: Callable[..., Path]) -> None:
    probe = probe_machine(open_maple(open_checkpoint(tiny_checkpoint())), 1)
    assert probe.macs > 0
    assert probe.head_macs > 0
    assert probe.cached_nbytes > 0
    assert probe.disk_nbytes is None or probe.disk_nbytes > 0
