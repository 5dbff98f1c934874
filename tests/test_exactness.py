"""The promise: the same tokens give the same bits, wherever the weights lie and however the work is cut.

One number stands for a run: the SHA-256 of the logits [T, V] of a prompt and of some decoded tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reference import Reference
from spile import _core
from spile.architectures import open_own
from spile.engines import open_engine
from spile.errors import OptionError
from spile.files.checkpoint import open_checkpoint
from spile.making.synth import SynthShape, write_checkpoint
from spile.options import EngineOptions

WINDOW = 16
NUM_TOKENS = 5 * WINDOW
NUM_DECODED = 6

SHAPES = {
    # A window of 16 on two of three layers.
    "window": SynthShape(num_hidden_layers=3, full_attention_interval=3, sliding_window=WINDOW),
    # No width is a multiple of what one instruction takes; the first layer is dense.
    "tails": SynthShape(
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=48,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=80,
        intermediate_size=112,
        first_k_dense_replace=1,
        vocab_size=323,
        sliding_window=WINDOW,
        full_attention_interval=2,
    ),
    # More experts than some chunks want.
    # Longer than blocks and rings of the cache, by sizes that do not divide each other.
    "long": SynthShape(num_hidden_layers=2, sliding_window=100, full_attention_interval=2),
    "many": SynthShape(num_hidden_layers=2, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=64),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exactness")
    for name, shape in SHAPES.items():
        write_checkpoint(root / name, shape, seed=7)
    write_checkpoint(root / "groups", SHAPES["window"], seed=7, group_scales=True, shards=3)
    return {path.name: path for path in root.iterdir()}


def prompt(vocab_size: int, num_tokens: int = NUM_TOKENS, seed: int = 3) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, vocab_size, num_tokens).tolist()
    return ids


def run(folder: Path, **options: Any) -> str:
    """Return the hash of a prompt's logits and of those of some tokens decoded after it."""
    engine = open_engine(open_own(open_checkpoint(folder)), EngineOptions(**options))
    state = engine.new_state()
    logits = engine.logits(state, prompt(engine.vocab_size, 430 if folder.name == "long" else NUM_TOKENS))
    assert np.isfinite(logits).all()
    sha = hashlib.sha256(logits.tobytes())
    token = int(logits[-1].argmax())
    for _ in range(NUM_DECODED):
        row = engine.decode(state, token)
        sha.update(row.tobytes())
        token = int(row.argmax())
    state.close()
    engine.close()
    return sha.hexdigest()


def pool_sizes(folder: Path) -> list[int]:
    """Return numbers of slots from the smallest pool to one that holds everything."""
    config = open_own(open_checkpoint(folder)).spec
    everything = config.num_routed_experts
    return sorted({1, config.num_experts_per_tok, everything // 2, everything - 1, everything})


def ways(folder: Path) -> list[dict[str, Any]]:
    """Return the ways of holding the experts: mapped, and every size of pool read in both ways."""
    pools = itertools.product(pool_sizes(folder), ("buffered", "direct"))
    return [{"io": "mapped"}, *({"slots": slots, "io": io} for slots, io in pools)]


THREADS, CHUNKS = (1, 2, 4), (1, 7, 64, None)


@pytest.mark.parametrize("name", ["window", "tails", "many"])
def test_pool_threads_chunk_and_reading_change_no_bit(name: str, folders: dict[str, Path]) -> None:
    """Every way with every chunk; threads take turns so that each meets every way and every chunk."""
    wanted = run(folders[name])
    for (i, way), (j, chunk) in itertools.product(enumerate(ways(folders[name])), enumerate(CHUNKS)):
        options = {**way, "threads": THREADS[(i + j) % len(THREADS)], "prefill_chunk": chunk}
        assert run(folders[name], **options) == wanted, options


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "tails", "many", "groups"])
def test_whole_product_changes_no_bit(name: str, folders: dict[str, Path]) -> None:
    wanted, runs = run(folders[name]), 1
    for way, threads, chunk in itertools.product(ways(folders[name]), THREADS, CHUNKS):
        options = {**way, "threads": threads, "prefill_chunk": chunk}
        assert run(folders[name], **options) == wanted, options
        runs += 1
    print(f"{name}: {runs} runs gave {wanted[:16]}")


@pytest.mark.parametrize("name", ["window", "tails", "many", "groups", "long"])
def test_instruction_sets_change_no_bit(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(folders[name])
    for isa in _core.isas():
        monkeypatch.setenv("SPILE_ISA", isa)
        for options in ({"threads": 2}, {"slots": 3, "prefill_chunk": 7}):
            assert run(folders[name], **options) == wanted, (isa, options)


@pytest.mark.parametrize("name", ["tails", "long"])
@pytest.mark.parametrize(("kv_bits", "kv_v_bits"), [(32, 32), (8, 8), (8, 4), (4, 8)])
@pytest.mark.parametrize("kv_ring_bits", [None, 8, 4])
def test_instruction_sets_change_no_bit_of_quantized_keys_and_values(
    kv_bits: int,
    kv_v_bits: int,
    kv_ring_bits: int | None,
    name: str,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    common = {"kv_bits": kv_bits, "kv_v_bits": kv_v_bits, "kv_ring_bits": kv_ring_bits}
    wanted = run(folders[name], **common)
    for (i, isa), chunk in itertools.product(enumerate(_core.isas()), (17, 129)):
        monkeypatch.setenv("SPILE_ISA", isa)
        options = {"threads": THREADS[i % len(THREADS)], "prefill_chunk": chunk}
        assert run(folders[name], **common, **options) == wanted, (isa, options)


def test_unknown_instruction_set_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILE_ISA", "mmx")
    with pytest.raises(OptionError, match="mmx"):
        run(folders["window"])


@pytest.mark.parametrize(
    "options", [{"prefill_chunk": 50}, {"prefill_chunk": 128}, {"prefill_chunk": 129, "slots": 9}]
)
def test_long_prompt_across_blocks_of_the_cache_is_the_same(
    options: dict[str, Any], folders: dict[str, Path]
) -> None:
    """The cache has blocks of 128 positions, and a ring of them on sliding layers: cross both."""
    assert run(folders["long"], **options) == run(folders["long"])


def test_router_ties_go_to_the_lower_experts(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["window"], tmp_path / "ties")
    checkpoint = open_checkpoint(tmp_path / "ties")
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(".mlp.gate.weight"):
            with checkpoint.shards[tensor.shard].open("r+b") as file:
                file.seek(tensor.offset)
                file.write(bytes(tensor.nbytes))
    engine = open_engine(open_own(checkpoint), EngineOptions(kv_bits=32, activation_bytes=3))
    ids = prompt(engine.vocab_size)
    found = engine.logits(engine.new_state(), ids)
    engine.close()
    assert np.abs(found - Reference(tmp_path / "ties").logits(ids)).max() < 1e-4


@pytest.mark.parametrize(
    "kv",
    [
        {},
        {"kv_bits": 8},
        {"kv_bits": 8, "kv_v_bits": 4},
        {"kv_bits": 4, "kv_ring_bits": 4},
        {"kv_ring_bits": 8},
    ],
)
def test_prompt_of_five_windows_is_the_same_in_any_chunk(
    kv: dict[str, int], folders: dict[str, Path]
) -> None:
    wanted = run(folders["window"], prefill_chunk=1, **kv)
    for chunk in (8, 16, 17, 64, None):
        assert run(folders["window"], prefill_chunk=chunk, slots=3, **kv) == wanted, chunk


def test_group_scales_give_the_bits_of_row_alphas(folders: dict[str, Path]) -> None:
    for options in ({}, {"slots": 4, "prefill_chunk": 7}, {"slots": 24}):
        assert run(folders["groups"], **options) == run(folders["window"])


@pytest.mark.parametrize(
    ("kv_bits", "kv_v_bits"), [(16, None), (32, None), (8, None), (8, 4), (4, 4), (16, 4), (4, 32)]
)
@pytest.mark.parametrize("activation_bytes", [2, 3])
def test_other_arithmetic_keeps_the_promise(
    kv_bits: int, kv_v_bits: int | None, activation_bytes: int, folders: dict[str, Path]
) -> None:
    common: dict[str, Any] = {
        "kv_bits": kv_bits,
        "kv_v_bits": kv_v_bits,
        "activation_bytes": activation_bytes,
    }
    wanted = run(folders["window"], **common)
    for options in ({"slots": 2, "threads": 2, "prefill_chunk": 7}, {"slots": 12, "io": "direct"}):
        assert run(folders["window"], **common, **options) == wanted
    changed = (kv_bits, kv_v_bits, activation_bytes) != (16, None, 2)
    assert (wanted != run(folders["window"])) == changed  # the hash does see a small change


def test_200_greedy_tokens_of_5_prompts_are_the_same_in_every_pool(folders: dict[str, Path]) -> None:
    """Regression of a slot overwritten while it was in use: wrong only under small pools, and late."""
    folder = folders["window"]
    everything = pool_sizes(folder)[-1]
    results: list[list[tuple[list[int], str]]] = []
    for slots in (None, pool_sizes(folder)[0], everything // 2):
        engine = open_engine(open_own(open_checkpoint(folder)), EngineOptions(slots=slots, threads=1))
        results.append([])
        for seed in range(5):
            state = engine.new_state()
            row = engine.prefill(state, prompt(engine.vocab_size, 30, seed))
            ids, sha = [], hashlib.sha256()
            for _ in range(200):
                sha.update(row.tobytes())
                ids.append(int(row.argmax()))
                row = engine.decode(state, ids[-1])
            state.close()
            results[-1].append((ids, sha.hexdigest()))
        if slots == pool_sizes(folder)[0]:
            assert engine.counters().evictions > 1000  # the pool was too small, as intended
        engine.close()
    assert all(each == results[0] for each in results[1:])


def test_states_do_not_disturb_each_other_and_prompts_may_come_in_pieces(folders: dict[str, Path]) -> None:
    engine = open_engine(open_own(open_checkpoint(folders["window"])), EngineOptions(slots=5))
    ids = prompt(engine.vocab_size)
    one, other = engine.new_state(), engine.new_state()
    whole = engine.logits(one, ids).copy()
    pieces = [engine.logits(other, ids[:1]).copy(), engine.logits(other, ids[1:40]).copy()]
    engine.decode(one, 5)
    pieces += [engine.decode(other, ids[40]).copy()[None], engine.logits(other, ids[41:]).copy()]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert (one.position, other.position) == (NUM_TOKENS + 1, NUM_TOKENS)
    engine.close()


@pytest.mark.parametrize("name", [*SHAPES, "groups"])
def test_logits_are_those_of_float64(name: str, folders: dict[str, Path]) -> None:
    """Three bytes and 32-bit KV leave only float32 rounding; a near-tie of the router would be a jump."""
    options = EngineOptions(kv_bits=32, activation_bytes=3, slots=pool_sizes(folders[name])[0])
    engine = open_engine(open_own(open_checkpoint(folders[name])), options)
    ids = prompt(engine.vocab_size, 430 if name == "long" else NUM_TOKENS)
    found = engine.logits(engine.new_state(), ids)
    reference = Reference(folders[name])
    wanted: NDArray[np.float64] = reference.logits(ids)
    worst = float(np.abs(found - wanted).max())
    print(f"{name}: largest difference {worst:.1e}, closest routing {reference.router_margin:.1e}")
    assert worst < 5e-4
    engine.close()
