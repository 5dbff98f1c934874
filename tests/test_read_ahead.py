"""Experts that are read before their layer asks: what is right is not read twice, what is wrong harms nobody."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from fake_pool import CheckedPool, MakePool
from spile.errors import ReadError
from spile.residency.pool import Order
from test_pool import ORDERS, Interrupt

E, L = 8, 4  # experts of a layer, layers


@pytest.mark.parametrize("in_order_every", [0, 7])
@pytest.mark.parametrize("num_slots", [1, 3, 4, 8, 9, 16, 31, 32])
def test_any_guess_serves_every_layer_right(make_pool: MakePool, num_slots: int, in_order_every: int) -> None:
    pool, rng = make_pool(num_slots, seed=num_slots), np.random.default_rng(num_slots)
    wanted = 0
    for step in range(200):
        experts = rng.choice(E, rng.integers(1, E + 1), replace=False).tolist()
        guess = rng.choice(E, rng.integers(1, E + 1), replace=False).tolist()
        wanted += len(experts)
        order: Order = "ascending" if in_order_every and step % in_order_every == 0 else "ready"
        pool.policy.step(1)
        has_guess = order == "ready" and step % L < L - 1
        pool.run(step % L, experts, order, guess if has_guess else None)
    assert pool.slots.hits + pool.slots.misses == wanted


def test_what_was_guessed_right_is_read_once_and_counts_as_a_miss(make_pool: MakePool) -> None:
    pool = make_pool(16)
    pool.run(0, [0, 1], guess=[2, 3, 4, 5])  # three of the four are likely enough
    assert pool.store.num_submitted == 5
    pool.run(1, [2, 3, 4])
    assert pool.store.num_submitted == 5
    assert (pool.slots.hits, pool.slots.misses, pool.slots.unwanted) == (0, 5, 0)


def test_expert_that_is_guessed_twice_takes_one_slot(make_pool: MakePool) -> None:
    pool = make_pool(16)
    pool.run(0, [0, 1], guess=[3, 3, 3, 3])
    assert pool.store.num_submitted == 3
    pool.run(1, [3])


def test_wrong_guess_stays_in_the_pool_and_is_counted(make_pool: MakePool) -> None:
    pool = make_pool(16)
    pool.run(0, [0, 1], guess=[7])
    pool.run(1, [2])
    assert pool.slots.unwanted == 1
    for layer in (2, 3, 0):
        pool.run(layer, [0])
    pool.run(1, [7])
    assert pool.store.num_submitted == 6  # not read again


def test_residents_are_not_read_ahead_and_small_pools_read_nothing_ahead(make_pool: MakePool) -> None:
    pool = make_pool(16)
    pool.run(1, [2, 3])
    pool.run(0, [0], guess=[2, 3])
    assert pool.store.num_submitted == 3
    small = make_pool(3)
    small.run(0, [0], guess=[1, 2, 3, 4])
    assert small.store.num_submitted == 1


def test_failed_read_of_a_wrong_guess_is_nobodys_error(make_pool: MakePool) -> None:
    pool = make_pool(16)
    pool.store.failing.update(pool.table.extents(1, 7))
    pool.run(0, [0], guess=[7])
    for layer in (1, 2, 3, 0):
        pool.run(layer, [0, 1])
    pool.run(1, [0], order="ascending")  # waits for what is in flight
    assert 7 not in pool.resident(1)
    assert not pool.slots._strays


def test_failed_read_of_a_right_guess_is_an_error_and_loses_no_slot(make_pool: MakePool) -> None:
    pool = make_pool(16)
    pool.store.failing.update(pool.table.extents(1, 7))
    pool.run(0, [0], guess=[7])
    with pytest.raises(ReadError):
        pool.run(1, [7])
    pool.store.failing.clear()
    pool.check_idle()
    pool.run(1, [7])


@pytest.mark.parametrize("change", ["grow", "shrink", "lend"])
def test_pool_may_change_its_size_with_reads_in_flight(make_pool: MakePool, change: str) -> None:
    pool = make_pool(16)
    pool.run(0, [0, 1], guess=[2, 3, 4, 5])
    if change == "lend":
        pool.slots.lend(8 * pool.slots.slot_nbytes)
    else:
        pool.slots.resize(20 if change == "grow" else 5)
    assert not pool.store.pending
    pool.check_idle()
    pool.run(1, [2, 3, 4])


@pytest.mark.parametrize("change", ["lend", "resize"])
def test_change_that_is_broken_off_while_reads_are_dropped_admits_nothing(
    make_pool: MakePool, change: str
) -> None:
    for seed in range(20):
        pool = make_pool(16, seed)
        pool.run(0, [0, 1], guess=[2, 3, 4, 5])
        pool.store.is_drain_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            pool.slots.lend(pool.slots.slot_nbytes) if change == "lend" else pool.slots.resize(12)
        pool.run(1, [2, 3, 4], guess=[1])
        pool.run(2, [1, 2])


@pytest.mark.parametrize("order", ORDERS)
def test_reads_that_somebody_else_dropped_are_made_again(make_pool: MakePool, order: Order) -> None:
    for seed in range(20):
        pool = make_pool(16, seed)
        pool.run(0, [0, 1], guess=[2, 3, 4, 5])
        pool.store.drain()  # as a streamed head does after an error
        pool.run(1, [2, 3, 4], order)


def test_interrupt_at_any_line_of_a_change_of_size_breaks_nothing(make_pool: MakePool) -> None:
    for change in ("grow", "shrink", "lend"):
        interrupted, n, before = True, 0, sys.gettrace()
        while interrupted:
            n += 1
            pool = make_pool(9, seed=n)
            pool.run(0, [1, 5])
            pool.run(1, [0, 1, 2, 3], guess=[4, 6])
            interrupted = False
            sys.settrace(Interrupt(n))
            try:
                if change == "lend":
                    pool.slots.lend(3 * pool.slots.slot_nbytes)
                else:
                    pool.slots.resize(14 if change == "grow" else 5)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.settrace(before)
            pool.run(0, [0, 1, 2, 3, 5])
            pool.slots.resize(11)
            pool.run(1, range(8))
            pool.check_idle()
        assert n > 20


def test_pinned_experts_leave_their_layer_the_slots_that_it_needs(make_pool: MakePool) -> None:
    pool = make_pool(8, seed=3)
    for layer in range(2):
        pool.slots.pin(layer, np.arange(3, dtype=np.int32))
    for step in range(60):
        pool.run(2 + step % 2, [step % 8, (step + 3) % 8], guess=[(step + 1) % 8, (step + 5) % 8])


def _one_token(pool: CheckedPool, wanted: Sequence[Sequence[int]]) -> None:
    for layer, experts in enumerate(wanted):
        guess = None if layer == len(wanted) - 1 else [*wanted[layer + 1][1:], 7]
        with closing(pool.fetch(layer, experts, "ready", guess)) as fetched:  # type: ignore[type-var]
            for _ in fetched:
                pool.store.end_some()


def test_interrupt_before_any_line_of_a_token_breaks_nothing(make_pool: MakePool) -> None:
    interrupted, n, before = True, 0, sys.gettrace()
    while interrupted:
        n += 3
        pool = make_pool(9, seed=n)
        pool.run(0, [1, 5])
        interrupted = False
        sys.settrace(Interrupt(n))
        try:
            _one_token(pool, [[0, 1, 5], [2, 3, 4], [0, 6, 7]])
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        pool.run(0, [0, 1, 2, 3, 5])
        pool.run(1, [2, 7])
    assert n > 300


def test_router_foretells_its_own_choice_of_the_same_values(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint()
    K = json.loads((folder / "config.json").read_text())["num_experts_per_tok"]

    class Asked:
        """A decoder that is asked to foretell what it has just chosen, and all later layers."""

        def __init__(self, decoder: Any) -> None:
            self._decoder = decoder

        def __getattr__(self, name: str) -> Any:
            return getattr(self._decoder, name)

        def route(self, layer: int, ids: Any, counts: Any) -> int:
            num: int = self._decoder.route(layer, ids, counts)
            if counts[:num].sum() == K:  # one token
                for later in range(layer, num_layers):
                    foretold = np.empty(K, np.int32)
                    self._decoder.foretell(later, foretold)
                    assert len(set(foretold.tolist())) == K
                    if later == layer:
                        assert sorted(foretold.tolist()) == ids[:num].tolist()
            return num

    with spile.load(folder, engine="cpu", memory="1GB") as model:
        engine: Any = model.open()
        num_layers = engine._spec.num_hidden_layers
        alone = model.logits([1, 2, 3])
        state = engine.new_state()
        engine._decoder = Asked(engine._decoder)
        rows = [engine.decode(state, token_id).copy() for token_id in (1, 2, 3)]
        assert np.array_equal(np.stack(rows), alone)  # and it changed nothing


def test_router_foretells_different_experts_of_what_is_no_number(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    with spile.load(tiny_checkpoint(), engine="cpu", memory="1GB") as model:
        engine: Any = model.open()
        config, decoder = engine._spec, engine._decoder
        codes = np.zeros((1, config.hidden_size // 2), np.uint8)
        scales = np.full((1, config.hidden_size // 64), 0x7FC0, np.uint16)  # BF16's "not a number"
        addresses = codes.ctypes.data, scales.ctypes.data, scales.ctypes.data
        decoder.begin(*addresses, np.zeros(1, np.int64), engine._rope.rows(0, 1))
        decoder.attend(engine.new_state().cache, 0)
        foretold = np.full(config.num_experts_per_tok, -1, np.int32)
        decoder.foretell(1, foretold)
        assert len(set(foretold.tolist())) == len(foretold)
        assert min(foretold) >= 0


def test_answer_from_the_disk_is_read_ahead_and_the_same(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint()
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    with spile.load(folder, engine="cpu", memory="1GB") as model:
        wanted = model.logits(ids)
    with spile.load(folder, engine="cpu", active_experts=2, io="direct") as model:
        engine: Any = model.open()
        if not engine._store.is_direct:
            pytest.skip("this file system takes no direct reads")
        state = engine.new_state()
        rows = [engine.decode(state, token_id).copy() for token_id in ids]
        assert np.array_equal(np.stack(rows), wanted)
        counters = engine.counters()
        assert counters.reads > 3 * counters.misses or counters.unwanted == 0
