"""Keys and values in fewer bits on the mlx engine: what they cost in accuracy and in bytes, rings included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("mlx_lm", exc_type=ImportError)

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from mlx_architectures import Quantization, write_tiny
from spile.architectures import open_model
from spile.engines import open_engine
from spile.engines.mlx.adapter import load_lazily
from spile.engines.mlx.cache import QuantizedCache, QuantizedRing
from spile.engines.mlx.engine import MlxEngine
from spile.engines.mlx.streaming import plan_checkpoint
from spile.errors import OptionError
from spile.files.checkpoint import open_checkpoint
from spile.making.synth import SynthShape, write_checkpoint
from spile.options import EngineOptions
from spile.residency.kv import KvFormat

SHAPE = SynthShape(num_hidden_layers=4, full_attention_interval=2, tokenizer_entries=0)  # window 16
IDS = np.random.default_rng(3).integers(0, SHAPE.vocab_size, 70).tolist()
FORMATS = ((8, 8), (8, 4), (4, 4))
Bits = tuple[int, int]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Random Maples of several seeds."""
    root = tmp_path_factory.mktemp("maples")
    for seed in range(3):
        write_checkpoint(root / str(seed), SHAPE, seed=seed)
    return [root / str(seed) for seed in range(3)]


def opened(folder: Path, bits: Bits = (16, 16), **options: Any) -> MlxEngine:
    asked: dict[str, Any] = {"engine": "mlx", "kv_bits": bits[0], "kv_v_bits": bits[1], **options}
    engine = open_engine(open_model(open_checkpoint(folder)), EngineOptions(**asked))
    assert isinstance(engine, MlxEngine)
    return engine


def logits(folder: Path, bits: Bits, ids: Sequence[int], **options: Any) -> NDArray[np.float32]:
    """Logits of a prompt by chunks, and of its last six tokens one by one: [T, V]."""
    engine = opened(folder, bits, **options)
    state = engine.new_state()
    rows = [engine.logits(state, ids[:-6])]
    rows += [engine.decode(state, token)[None].copy() for token in ids[-6:]]
    engine.close()
    return np.concatenate(rows)


def errors(folders: list[Path], ids: Sequence[int]) -> dict[Bits, float]:
    """The mean difference from logits with float32 keys and values, in parts of their spread."""
    found = {}
    whole = [logits(folder, (16, 16), ids, activation_bytes=3) for folder in folders]
    for bits in FORMATS:
        each = [logits(folder, bits, ids, activation_bytes=3) for folder in folders]
        found[bits] = float(
            np.mean([np.abs(a - b).mean() / b.std() for a, b in zip(each, whole, strict=True)])
        )
    print({f"{k}/{v}": f"{error:.1e}" for (k, v), error in found.items()})
    return found


# -- accuracy --


@pytest.mark.parametrize("num_tokens", [14, 70])
def test_fewer_bits_cost_a_bounded_error_that_grows_as_bits_shrink(
    num_tokens: int, folders: list[Path]
) -> None:
    found = errors(folders, IDS[:num_tokens])
    assert 0 < found[8, 8] <= found[8, 4] <= found[4, 4]
    assert found[8, 8] < 0.05  # measured 9e-3
    assert found[4, 4] < 0.25  # measured 5e-2


def test_eight_bits_are_those_of_mlx_lms_own_quantized_cache(tmp_path: Path) -> None:
    shape = SynthShape(num_hidden_layers=3, full_attention_interval=1, tokenizer_entries=0)
    write_checkpoint(tmp_path / "m", shape)
    model = load_lazily(open_checkpoint(tmp_path / "m"))
    model.model.activation_dtype = mx.float32
    theirs = [QuantizedKVCache(group_size=64, bits=8) for _ in range(3)]
    ours = [QuantizedCache(KvFormat(8, 8)) for _ in range(3)]
    for ids in (IDS[:40], IDS[40:41], IDS[41:70]):
        found, wanted = (np.array(model(mx.array([ids]), cache=caches)) for caches in (ours, theirs))
        assert np.abs(found - wanted).max() < 1e-3 * wanted.std()
    codes, scales, biases = theirs[0].keys
    words = np.array(ours[0].keys)[:, :, :70]
    assert np.array_equal(words[..., : codes.shape[-1]], np.array(codes)[:, :, :70])
    rest = words[..., codes.shape[-1] :].view(np.float32)
    assert np.array_equal(rest, np.concatenate([np.array(scales), np.array(biases)], -1)[:, :, :70])


def test_chunks_change_nothing_but_the_order_of_sums(folders: list[Path]) -> None:
    one, other = (logits(folders[0], (8, 4), IDS, activation_bytes=3, prefill_chunk=c) for c in (7, 64))
    error = np.abs(other - logits(folders[0], (16, 16), IDS, activation_bytes=3, prefill_chunk=64)).mean()
    assert np.abs(one - other).mean() < 0.1 * error


@pytest.mark.parametrize("bits", [(8, 4), (4, 16), (16, 8)])
def test_streamed_equals_resident_with_any_bits(bits: Bits, folders: list[Path]) -> None:
    expected = logits(folders[1], bits, IDS, prefill_chunk=32)
    assert np.array_equal(logits(folders[1], bits, IDS, prefill_chunk=32, slots=5), expected)
    assert not np.array_equal(logits(folders[1], (16, 16), IDS, prefill_chunk=32), expected)


@pytest.mark.parametrize(("kind", "theirs"), [(QuantizedCache, KVCache), (QuantizedRing, RotatingKVCache)])
def test_a_cache_gives_back_each_position_quantized_where_the_plain_one_gives_it(
    kind: Any, theirs: Any
) -> None:
    more = {} if kind is QuantizedCache else {"max_size": 16, "keep": 2}
    cache, plain = kind(KvFormat(8, 16), **more), theirs(**more)
    mx.random.seed(0)
    for count in (5, 1, 20, 1, 1, 30, *[1] * 20, 3):
        keys, values = mx.random.normal((1, 2, count, 64)), mx.random.normal((1, 2, count, 32))
        assert str(cache.make_mask(count, return_array=False, window_size=None)) == str(
            plain.make_mask(count, return_array=False, window_size=None)
        )
        found, wanted = cache.update_and_fetch(keys, values), plain.update_and_fetch(keys, values)
        rounded = mx.dequantize(*mx.quantize(wanted[0], group_size=64, bits=8), group_size=64, bits=8)
        assert mx.array_equal(found[0], rounded)
        assert mx.array_equal(found[1], wanted[1])
        assert (cache.offset, cache.size()) == (plain.offset, plain.size())


# -- bytes --


@pytest.mark.parametrize(("itemsize", "activation_bytes"), [(2, 2), (4, 3)])
@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4), (16, 4)])
def test_caches_take_what_the_formula_says(
    bits: Bits, itemsize: int, activation_bytes: int, folders: list[Path]
) -> None:
    def position(key_bits: int, value_bits: int) -> int:
        D = SHAPE.head_dim
        each = [D * b // 8 + 2 * itemsize if b < 16 else D * itemsize for b in (key_bits, value_bits)]
        return SHAPE.num_key_value_heads * sum(each)

    rings = min(bits) if max(bits) < 16 else None
    engine = opened(folders[0], bits, kv_ring_bits=rings, activation_bytes=activation_bytes, prefill_chunk=32)
    state = engine.new_state()
    engine.read(state, IDS)
    full, ring = position(*bits), position(*(2 * [rings or 16]))
    held = [cache.nbytes for cache in state.caches]
    last_chunk = 70 % 32
    assert held == 2 * [ring * (SHAPE.sliding_window - 1 + last_chunk), full * 256]
    assert engine.kv_nbytes(70) == 2 * (ring * (SHAPE.sliding_window + 32) + full * 256)
    assert engine.kv_nbytes(512) - engine.kv_nbytes(256) == 2 * full * 256


def test_the_plan_counts_the_copy_that_attention_reads(folders: list[Path]) -> None:
    plain, engine = (opened(folders[0], bits, prefill_chunk=32, context=512) for bits in ((16, 16), (8, 4)))
    more = engine.plan.parts.activations - plain.plan.parts.activations
    assert more == 2 * 512 * SHAPE.num_key_value_heads * 2 * SHAPE.head_dim * 2, "two layers, BF16"
    checkpoint = open_checkpoint(folders[0])
    asked = EngineOptions(engine="mlx", kv_bits=8, kv_v_bits=4, prefill_chunk=32, context=512)
    assert plan_checkpoint(checkpoint, asked, longest=512, num_chosen=2).parts.kv == engine.plan.parts.kv


# -- what is said and refused --


def test_what_is_kept_is_said(folders: list[Path]) -> None:
    engine = opened(folders[0], (8, 4))
    assert "KV 8-bit keys and 4-bit values, FP16 in sliding layers," in engine.summary()
    assert engine.notes == ()
    engine = opened(folders[0], (8, 8), kv_ring_bits=8)
    assert "KV 8-bit, context" in engine.summary()
    assert engine.notes == ()


def test_attention_sinks_and_windows_of_other_models_go_on_working(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", "gpt_oss", quantization=Quantization())
    ids = [one % 128 for one in IDS]
    whole, expected, found = (
        logits(tmp_path / "m", bits, ids, prefill_chunk=32, slots=slots)
        for bits, slots in (((16, 16), 4), ((8, 8), 32), ((8, 8), 4))
    )
    assert np.array_equal(found, expected)
    assert 0 < np.abs(found - whole).mean() < 0.25 * whole.std()  # BF16, and random routers that flip


def test_layers_that_hold_something_else_are_named(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", "qwen3_next", quantization=Quantization())
    assert opened(tmp_path / "m", (8, 8)).notes == ("KV 8-bit: layers with ArraysCache keep 16 bits",)


@pytest.mark.parametrize("head_dim", [96, 128])
def test_heads_of_other_sizes_are_grouped(head_dim: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", SynthShape(num_hidden_layers=2, head_dim=head_dim, tokenizer_entries=0))
    whole = logits(tmp_path / "m", (16, 16), IDS)
    assert np.array_equal(logits(tmp_path / "m", (8, 8), IDS), whole)  # both layers slide
    assert np.abs(logits(tmp_path / "m", (8, 8), IDS, kv_ring_bits=8) - whole).mean() > 0
    cache = QuantizedCache(KvFormat(8, 4))
    cache.update_and_fetch(mx.zeros((1, 1, 3, head_dim)), mx.zeros((1, 1, 3, head_dim)))
    groups = head_dim // (32 if head_dim % 64 else 64)
    assert [cache.keys.shape[-1], cache.values.shape[-1]] == [
        head_dim // 4 + 2 * groups,
        head_dim // 8 + 2 * groups,
    ]


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        ((32, 32), "kv_bits is 32: .* as they are computed"),
        ((8, 32), "kv_v_bits is 32"),
        ((8, 16), "kv_bits is below 16: this model's heads have 80 dimensions, no multiple of 32"),
        ((16, 4), "kv_v_bits is below 16: this model's heads have 80 dimensions"),
    ],
)
def test_bits_that_cannot_be_are_refused_by_name(bits: Bits, words: str, tmp_path: Path) -> None:
    shape = SynthShape(num_hidden_layers=2, full_attention_interval=2, head_dim=80, tokenizer_entries=0)
    write_checkpoint(tmp_path / "m", shape)
    with pytest.raises(OptionError, match=words):
        opened(tmp_path / "m", bits)
    for rings, reason in ((8, "kv_ring_bits is below 16"), (32, "kv_ring_bits is 32")):
        with pytest.raises(OptionError, match=reason):
            opened(tmp_path / "m", kv_ring_bits=rings)
