"""Keys and values in 32, 16, 8 and 4 bits: what they take, how far from float32 they are, and that nothing else
about the work changes a bit of them.

The layout is read here by NumPy alone, from what `KvCache.read` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import spile
from spile.architectures import open_own
from spile.architectures.spec import ModelSpec
from spile.engines.cpu.engine import CpuEngine
from spile.errors import ContextError, OptionError
from spile.files.checkpoint import open_checkpoint
from spile.files.hub import DEMO_FOLDER
from spile.options import EngineOptions
from spile.residency.kv import KvFormat, group_size, kv_position_nbytes

FORMATS = [(32, 32), (16, 16), (8, 8), (8, 4), (4, 4)]
HELD_OUT = Path(__file__).parent / "held_out.txt"


def opened(folder: Path, bits: tuple[int, int] = (16, 16), **options: Any) -> CpuEngine:
    return CpuEngine(
        open_own(open_checkpoint(folder)), EngineOptions(kv_bits=bits[0], kv_v_bits=bits[1], **options)
    )


def ids_of(engine: CpuEngine, num: int, seed: int = 1) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, engine.vocab_size, num).tolist()
    return ids


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# ---- bytes ----


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 128, 192])
def test_formula_is_what_the_core_allocates(head_dim: int, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(head_dim=head_dim, num_hidden_layers=2, full_attention_interval=2)
    for bits, rings in [*((bits, None) for bits in FORMATS), ((16, 4), 8), ((4, 32), 4), ((8, 8), 32)]:
        engine = opened(folder, bits, prefill_chunk=33, kv_ring_bits=rings)
        config: ModelSpec = engine._spec
        state = engine.new_state()
        for num in (1, 127, 1, 250):
            engine.logits(state, ids_of(engine, num))
            assert state.cache is not None
            assert state.cache.nbytes == engine.kv_nbytes(state.position)
        for layer, is_sliding in enumerate(config.layer_is_sliding):
            wanted = kv_position_nbytes(
                config, KvFormat(*bits, rings or max(16, *bits)), is_sliding=is_sliding
            )
            assert state.cache.nbytes_per_position(layer) == wanted
        engine.close()


def test_bytes_of_a_position_worked_out_by_hand(golden: Path) -> None:
    """Heads of 64, two of them: keys and values of 64 dimensions, and four bytes a group of 64."""
    config = open_own(open_checkpoint(golden / "mlx-2bit")).spec
    by_hand = {
        (32, 32, 32): (2 * (256 + 256),) * 2,
        (16, 16, 16): (2 * (128 + 128),) * 2,
        (8, 8, 16): (2 * (68 + 68), 2 * (128 + 128)),
        (8, 4, 8): (2 * (68 + 36), 2 * (68 + 68)),
        (4, 4, 4): (2 * (36 + 36),) * 2,
        (16, 4, 32): (2 * (128 + 36), 2 * (256 + 256)),
    }
    for bits, (full, sliding) in by_hand.items():
        assert kv_position_nbytes(config, KvFormat(*bits), is_sliding=False) == full
        assert kv_position_nbytes(config, KvFormat(*bits), is_sliding=True) == sliding


def test_groups_are_64_or_the_nearest_multiple_of_16_that_divides_the_head() -> None:
    sizes = {16: 16, 32: 32, 48: 48, 64: 64, 80: 80, 96: 48, 128: 64, 160: 80, 192: 64, 256: 64, 112: 16}
    assert {head_dim: group_size(head_dim) for head_dim in sizes} == sizes


def test_plan_and_summary_follow_the_bits_and_never_the_budget(golden: Path) -> None:
    rooms = []
    for bits, words in (
        ((32, 32), "KV float32,"),
        ((16, 16), "KV FP16,"),
        ((8, 8), "KV 8-bit in groups of 64, FP16 in sliding layers,"),
        ((8, 4), "KV 8-bit keys and 4-bit values in groups of 64, FP16 in sliding layers,"),
        ((4, 4), "KV 4-bit in groups of 64, FP16 in sliding layers,"),
    ):
        engine, small = (
            opened(golden / "mlx-2bit", bits, context=256),
            opened(golden / "mlx-2bit", bits, slots=2),
        )
        assert words in engine.summary()
        assert words in small.summary()
        assert engine.kv_room_nbytes == engine.kv_nbytes(256) == engine.plan.parts.kv
        rooms.append(engine.kv_room_nbytes)
        engine.close()
        small.close()
    assert rooms == sorted(rooms, reverse=True)
    assert len(set(rooms)) == len(rooms)
    engine = opened(golden / "mlx-2bit", (16, 16), kv_ring_bits=4, context=256)
    assert "KV FP16, 4-bit in groups of 64 in sliding layers," in engine.summary()
    assert engine.kv_room_nbytes < rooms[1]
    engine.close()


def test_cache_grows_by_blocks_and_a_ring_stops(tiny_checkpoint: Callable[..., Path]) -> None:
    engine = opened(tiny_checkpoint(num_hidden_layers=2, full_attention_interval=2), (8, 4), prefill_chunk=16)
    sizes = [engine.kv_nbytes(num) for num in (1, 128, 129, 256, 257, 384, 512)]
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3] < sizes[4] == sizes[5] < sizes[6]
    assert sizes[4] - sizes[2] == sizes[6] - sizes[4] < sizes[2] - sizes[0]  # the ring has two blocks
    engine.close()


# ---- the bits themselves ----


def dequantized(rows: NDArray[np.uint8], head_dim: int, bits: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows [n, head_dim * bits / 8 + 4 * groups] -> entries and half a step of each, [n, head_dim]."""
    group = group_size(head_dim)
    codes = rows[:, : head_dim * bits // 8]
    scales, biases = np.ascontiguousarray(rows[:, codes.shape[1] :]).view(np.float16).reshape(
        len(rows), -1, 2
    ).astype(np.float64).transpose(2, 0, 1)  # fmt: skip
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(rows), -1)
    steps = np.repeat(scales, group, 1)
    return codes * steps + np.repeat(biases, group, 1), steps / 2


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192])
@pytest.mark.parametrize("bits", [8, 4])
def test_stored_entries_are_within_half_a_step(
    bits: int, head_dim: int, tiny_checkpoint: Callable[..., Path]
) -> None:
    """The first layer's keys and values do not depend on attention, so a float32 cache holds what was quantized."""
    folder = tiny_checkpoint(
        head_dim=head_dim, num_hidden_layers=1, full_attention_interval=1, num_key_value_heads=1
    )
    found = []
    for each in (32, bits):
        engine = opened(folder, (each, each))
        state = engine.new_state()
        engine.logits(state, ids_of(engine, 150))
        assert state.cache is not None
        found.append(state.cache.read(0, 0, 150))
        engine.close()
    exact = np.ascontiguousarray(found[0]).view(np.float32).reshape(150, 2, head_dim).astype(np.float64)
    key_nbytes = found[1].shape[1] // 2
    keys, key_steps = dequantized(found[1][:, :key_nbytes], head_dim, bits)
    codes = found[1][:, key_nbytes:].copy()
    if bits == 4:  # values: sixteen dimensions make eight bytes, i beside i + 8
        chunks = codes[:, : head_dim // 2].reshape(150, -1, 8)
        ordered = np.concatenate([chunks & 15, chunks >> 4], -1).reshape(150, -1)
        codes[:, : head_dim // 2] = ordered[:, ::2] | ordered[:, 1::2] << 4
    values, value_steps = dequantized(codes, head_dim, bits)
    size = head_dim & -head_dim
    hadamard = np.array([[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)])
    factor = 0.5 ** ((size.bit_length() - 1) // 2)
    rotated = (exact[:, 0].reshape(150, -1, size) @ hadamard).reshape(150, head_dim) * factor
    for name, wanted, kept, steps in (
        ("keys", rotated, keys, key_steps),
        ("values", exact[:, 1], values, value_steps),
    ):
        worst = float((np.abs(wanted - kept) / steps).max())
        print(f"{bits}-bit {name} of {head_dim}: largest error {worst:.4f} of half a step")
        assert worst < 1.001
        assert np.abs(wanted - kept).mean() > 0.3 * steps.mean()  # the codes do span the entries


@pytest.mark.parametrize("bits", [*FORMATS, (16, 4), (4, 16)])
def test_positions_can_be_taken_out_and_put_back(bits: tuple[int, int], golden: Path) -> None:
    engine = opened(golden / "mlx-2bit", bits, kv_ring_bits=min(bits), prefill_chunk=32)
    one, other = engine.new_state(), engine.new_state()
    ids = ids_of(engine, 150)
    engine.prefill(one, ids)
    assert one.cache is not None
    assert other.cache is not None
    for layer, is_sliding in enumerate(engine._spec.layer_is_sliding):
        start = 130 if is_sliding else 0
        rows = one.cache.read(layer, start, 150)
        assert rows.shape == (150 - start, one.cache.nbytes_per_position(layer))
        other.cache.write(layer, start, rows)
        np.testing.assert_array_equal(other.cache.read(layer, start, 150), rows)
    other.cache.position = other.written = 150
    np.testing.assert_array_equal(engine.decode(one, 7).copy(), engine.decode(other, 7))
    engine.close()


def test_attention_reads_what_is_stored(golden: Path) -> None:
    """A code that is changed in the cache changes what comes out: no other copy of keys and values exists."""
    engine = opened(golden / "mlx-2bit", (8, 4))
    for half in (slice(0, 8), slice(-44, -36)):  # a head's first keys, another's last values
        state = engine.new_state()
        engine.prefill(state, ids_of(engine, 20))
        wanted = engine.decode(state, 3).copy()
        state.rewind(20)
        assert state.cache is not None
        rows = state.cache.read(3, 0, 20)
        rows[4, half] ^= 0xFF
        state.cache.write(3, 0, rows)
        assert (engine.decode(state, 3) != wanted).any()
    engine.close()


def test_cache_refuses_what_it_cannot_hold(golden: Path) -> None:
    engine = opened(golden / "mlx-2bit", prefill_chunk=16)
    state = engine.new_state()
    engine.prefill(state, ids_of(engine, 20))
    cache = state.cache
    assert cache is not None
    for layer, start, end in (
        (0, 5, 4),
        (0, -1, 3),
        (9, 0, 1),
        (-1, 0, 1),
        (0, 0, 10**12),
        (3, 0, 10**12),
        (3, 128, 129),
    ):
        with pytest.raises(ValueError, match=r"position|layer"):
            cache.read(layer, start, end)
    row = cache.nbytes_per_position(0)
    with pytest.raises(ValueError, match="length"):
        cache.write(0, 0, np.zeros((1, row + 1), np.uint8))
    with pytest.raises(ValueError, match="ring"):
        cache.write(0, 0, np.zeros((500, row), np.uint8))
    with pytest.raises(ValueError, match="layer"):
        cache.nbytes_per_position(4)
    engine.close()


# ---- quality ----


def test_perplexity_of_held_out_text_is_ordered_and_bounded() -> None:
    """Of the demo model, on text that it was not trained on. The divergence from float32 at the median position orders
    formats that perplexity, whose differences go either way, cannot; nor can the mean, since one position whose router
    chooses another expert at 16 bits outweighs the 8 bits of all others.
    """
    with spile.load(DEMO_FOLDER) as model:
        ids = list(model.tokenizer.encode(HELD_OUT.read_text()))
    exact, divergences, perplexities = None, [], []
    medians: list[float] = []
    for bits in FORMATS:
        engine = opened(DEMO_FOLDER, bits, activation_bytes=3)  # two bytes are as far off as 8-bit keys
        rows = log_probabilities(engine.logits(engine.new_state(), ids))
        engine.close()
        exact = rows if exact is None else exact
        each = (np.exp(exact) * (exact - rows)).sum(-1)
        divergences.append(float(each.mean()))
        medians.append(float(np.median(each)))
        perplexities.append(float(np.exp(-rows[np.arange(len(ids) - 1), ids[1:]].mean())))
        print(
            f"{bits}: perplexity {perplexities[-1]:.4f}, divergence {divergences[-1]:.2e}, {medians[-1]:.2e}"
        )
    assert medians == sorted(set(medians))
    for found, most in zip(divergences, (0.0, 5e-5, 6e-5, 2e-4, 3e-4), strict=True):
        assert found <= most  # measured 2e-5, 2e-5, 9e-5, 2e-4
    for found, most in zip(perplexities, (0, 1e-4, 2e-3, 4e-3, 4e-3), strict=True):
        assert abs(found / perplexities[0] - 1) <= most


def test_logit_error_on_the_golden_model_is_ordered_and_bounded(golden: Path) -> None:
    """This model magnifies small changes (BF16 activations: 5.5): the errors are those of a hard case."""
    ids, wanted = np.load(golden / "ids60.npy").tolist(), np.load(golden / "logits_60.npy")
    errors = []
    for bits in FORMATS:
        engine = opened(golden / "mlx-2bit", bits, activation_bytes=3)
        errors.append(float(np.abs(engine.logits(engine.new_state(), ids) - wanted).mean()))
        engine.close()
        print(f"{bits}: mean logit error {errors[-1]:.1e}")
    assert errors == sorted(errors)
    for found, most in zip(errors, (1e-5, 3e-3, 1e-2, 0.1, 0.15), strict=True):
        assert found <= most  # measured 2e-6, 1e-3, 4e-3, 0.05, 0.08; logits have a standard deviation of 2.3


@pytest.mark.parametrize("name", ["golden", "groups", "random", "demo"])
def test_error_against_32_bits_is_ordered_on_every_model_and_rings_of_fewer_bits_are_worse(
    name: str, golden: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Root mean square over all logits at 800 positions, most of them behind several windows."""
    folder = {
        "golden": lambda: golden / "mlx-2bit",
        "groups": lambda: tiny_checkpoint(seed=1, group_scales=True, full_attention_interval=2),
        "random": lambda: tiny_checkpoint(seed=2),
        "demo": lambda: DEMO_FOLDER,
    }[name]()

    def logits(bits: tuple[int, int], rings: int | None = None) -> NDArray[np.float64]:
        engine = opened(folder, bits, kv_ring_bits=rings, activation_bytes=3, context=200)
        rows = [engine.logits(engine.new_state(), ids_of(engine, 200, seed)) for seed in range(4)]
        engine.close()
        return np.concatenate(rows).astype(np.float64)

    exact = logits((32, 32))
    errors = [float(np.sqrt(((logits(bits) - exact) ** 2).mean())) for bits in FORMATS[1:]]
    rings = [float(np.sqrt(((logits((8, 8), bits) - exact) ** 2).mean())) for bits in (8, 4)]
    print(f"{name}: {', '.join(f'{error:.2g}' for error in errors)}; 8/8 with rings of 8 and 4 {rings}")
    assert errors[0] > 0
    assert errors == sorted(set(errors))
    assert errors[1] < rings[0] < rings[1]


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4)])
def test_an_early_word_still_matters(bits: tuple[int, int], golden: Path) -> None:
    engine = opened(golden / "mlx-2bit", bits)
    ids = ids_of(engine, 60)
    other = [ids[0], (ids[1] + 1) % engine.vocab_size, *ids[2:]]
    first, second = (engine.prefill(engine.new_state(), each).copy() for each in (ids, other))
    assert np.abs(first - second).max() > 1e-3
    engine.close()


# ---- windows and chunks ----


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4)])
@pytest.mark.parametrize("num_tokens", [9, 80])
def test_prompt_shorter_or_longer_than_the_window_gives_the_same_64_tokens_in_any_chunk(
    num_tokens: int, bits: tuple[int, int], golden: Path
) -> None:
    written = []
    for chunk in (8, 16, 17, 64, None):
        engine = opened(golden / "mlx-2bit", bits, kv_ring_bits=min(bits), prefill_chunk=chunk)
        state = engine.new_state()
        row, ids = engine.prefill(state, ids_of(engine, num_tokens)), []
        for _ in range(64):
            assert np.isfinite(row).all()
            ids.append((int(row.argmax()), row.tobytes()))
            row = engine.decode(state, ids[-1][0])
        written.append(ids)
        engine.close()
    assert all(each == written[0] for each in written)


def test_rewound_state_forgets_quantized_positions(golden: Path) -> None:
    engine = opened(golden / "mlx-2bit", (4, 4))
    ids = ids_of(engine, 40)
    state = engine.new_state()
    engine.prefill(state, ids)
    engine.prefill(state, ids_of(engine, 10, seed=2))
    state.rewind(40)
    again = engine.decode(state, 5).copy()
    other = engine.new_state()
    engine.prefill(other, ids)
    np.testing.assert_array_equal(engine.decode(other, 5), again)
    engine.close()


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_bits": 3}, "kv_bits is 3: it must be one of 32, 16, 8, 4"),
        ({"kv_bits": 2}, "kv_bits is 2"),
        ({"kv_v_bits": 12}, "kv_v_bits is 12: it must be one of 32, 16, 8, 4"),
        ({"kv_bits": 8.0}, "kv_bits is 8.0"),
        ({"kv_v_bits": True}, "kv_v_bits is True"),
        ({"kv_ring_bits": 2}, "kv_ring_bits is 2: it must be one of 32, 16, 8, 4"),
    ],
)
def test_bits_that_do_not_exist_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        EngineOptions(**options)


def test_heads_that_no_group_divides_are_refused_by_name(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(head_dim=24, num_hidden_layers=1)
    for bits, name in (((8, 16), "kv_bits is 8"), ((16, 4), "kv_v_bits is 4")):
        with pytest.raises(OptionError, match=f"{name}: this model's heads have 24 dimensions"):
            opened(folder, bits)
    with pytest.raises(OptionError, match="kv_ring_bits is 8: this model's heads have 24 dimensions"):
        opened(folder, kv_ring_bits=8)
    opened(folder, (16, 32)).close()


def test_prompt_longer_than_the_context_is_refused_with_both_numbers_before_any_work(golden: Path) -> None:
    engine = opened(golden / "mlx-2bit", (8, 4), context=100)
    state = engine.new_state()
    with pytest.raises(ContextError, match=r"101 tokens do not fit the context of 100"):
        engine.prefill(state, ids_of(engine, 101))
    assert state.position == 0
    assert state.cache is not None
    assert state.cache.nbytes == 0
    engine.close()
