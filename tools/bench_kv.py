"""Bits of keys and values -> bytes a token, perplexity, logit error and decode speed by depth, as a table and JSON.

    python tools/bench_kv.py [MODEL] [--formats 32/32,8/4,4/4/4,...] [--depths 0,2048,8192] [--text FILE]

What bounds it: a decoded token reads every key and value that it sees once, and takes two multiply-adds an entry and
query head. On the full-size Maple at depth 8,192 that is 101 MB of FP16 in full layers and 9 MB in rings, and 0.24 G of
them; mul and add are not fused, so that every instruction set gives the same bits.

Bytes are those of a token in one layer of either kind, by the formula (`residency/kv.py`) and as the core allocates
them, in whole pages. Perplexity and the divergence from float32, in nats, are the demo model's on a text that it was
not trained on (tests/held_out.txt, or FILE); the logit error is the mean on the golden model, which magnifies small
changes; both with three bytes an activation, since two are as far off as keys of 8 bits. A third number of a format is
that of sliding layers. Speed is MODEL's, left out without one: the median of 24 tokens, at depths that are made by
storing the keys and values of 512 real tokens again and again.

Prints a line a format; the last line is JSON, a list of objects with null for what is unknown.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from spile.architectures import open_own
from spile.architectures.spec import OwnModel
from spile.engines.cpu.engine import CpuEngine
from spile.files.checkpoint import open_checkpoint
from spile.files.hub import DEMO_FOLDER
from spile.options import EngineOptions
from spile.residency.kv import BLOCK_POSITIONS, kv_position_nbytes
from spile.text.tokenizer import open_tokenizer

TESTS = Path(__file__).parents[1] / "tests"
SOURCE_TOKENS, MEASURED_TOKENS = 512, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="folder of the model whose speed is measured")
    parser.add_argument(
        "--formats", default="32/32,16/16,8/8,8/4,4/4,8/8/8,4/4/4", help="KEYS/VALUES[/RINGS], ..."
    )
    parser.add_argument("--depths", default="0,2048,8192", help="tokens before the measured ones")
    parser.add_argument("--text", type=Path, default=TESTS / "held_out.txt")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    depths = [int(depth) for depth in arguments.depths.split(",")]
    tokenizer = open_tokenizer(DEMO_FOLDER, config={}, keep=False)
    assert tokenizer is not None, "the demo model has a tokenizer"
    text_ids = tokenizer.encode(arguments.text.read_text(encoding="utf-8"))[
        : open_demo().spec.max_position_embeddings
    ]
    heading = " ".join(f"{f'@{depth:,}':>7}" for depth in depths)
    print(f"{'bits':>6} {'full: formula, measured':>24} {'sliding':>14} {'perplexity':>10} {'divergence':>10} "
          f"{'logit error':>11} tok/s {heading}")  # fmt: skip
    rows: list[dict[str, Any]] = []
    exact = None
    for name in arguments.formats.split(","):
        keys, values, *rings = (int(part) for part in name.split("/"))
        options = {"kv_bits": keys, "kv_v_bits": values, "kv_ring_bits": rings[0] if rings else None}
        row: dict[str, Any] = {
            "key_bits": keys,
            "value_bits": values,
            "ring_bits": rings[0] if rings else None,
        }
        options["threads"] = arguments.threads
        measured = (
            open_demo() if arguments.model is None else open_own(open_checkpoint(Path(arguments.model)))
        )
        row |= position_bytes(measured, options)
        log_probabilities = read(open_demo(), text_ids, options)
        exact = log_probabilities if exact is None else exact
        row["perplexity"] = float(
            np.exp(-log_probabilities[np.arange(len(text_ids) - 1), text_ids[1:]].mean())
        )
        row["divergence"] = float((np.exp(exact) * (exact - log_probabilities)).sum(-1).mean())
        row["logit_error"] = golden_error(options)
        row["tokens_per_second"] = dict.fromkeys(depths)
        if arguments.model is not None:
            row["tokens_per_second"] = {depth: speed(measured, depth, options) for depth in depths}
        rows.append(row)
        print(line(name, row), flush=True)
    print(json.dumps(rows))


def open_demo() -> OwnModel:
    return open_own(open_checkpoint(DEMO_FOLDER))


def position_bytes(model: OwnModel, options: dict[str, Any]) -> dict[str, int]:
    """Bytes of one token in one layer of either kind: by the formula, and what a block of the core takes a token."""
    engine = CpuEngine(model, EngineOptions(**options, prefill_chunk=16, context=BLOCK_POSITIONS))
    state, sizes = engine.new_state(), {}
    assert state.cache is not None
    for kind, is_sliding in (("full", False), ("sliding", True)):
        layers = [n for n, slides in enumerate(model.spec.layer_is_sliding) if slides == is_sliding]
        before, row = state.cache.nbytes, state.cache.nbytes_per_position(layers[0])
        state.cache.write(layers[0], 0, np.zeros((BLOCK_POSITIONS, row), np.uint8))
        sizes[f"{kind}_bytes"] = kv_position_nbytes(model.spec, engine.kv_format, is_sliding=is_sliding)
        sizes[f"{kind}_measured_bytes"] = (state.cache.nbytes - before) // BLOCK_POSITIONS
    engine.close()
    return sizes


def read(model: OwnModel, token_ids: list[int], options: dict[str, Any]) -> Any:
    """Return log-probabilities [T, V] after each token, float64."""
    engine = CpuEngine(model, EngineOptions(**options, activation_bytes=3))
    logits = engine.logits(engine.new_state(), token_ids).astype(np.float64)
    engine.close()
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def golden_error(options: dict[str, Any]) -> float:
    model = open_own(open_checkpoint(TESTS / "golden" / "mlx-2bit"))
    engine = CpuEngine(model, EngineOptions(**options, activation_bytes=3))
    found = engine.logits(engine.new_state(), np.load(TESTS / "golden" / "ids60.npy").tolist())
    engine.close()
    return float(np.abs(found - np.load(TESTS / "golden" / "logits_60.npy")).mean())


def speed(model: OwnModel, depth: int, options: dict[str, Any]) -> float:
    """Decoded tokens a second after `depth` tokens."""
    config = model.spec
    engine = CpuEngine(model, EngineOptions(**options, context=depth + SOURCE_TOKENS))
    ids = np.random.default_rng(0).integers(0, min(1000, config.vocab_size), SOURCE_TOKENS).tolist()
    source, state = engine.new_state(), engine.new_state()
    engine.prefill(source, ids)
    assert source.cache is not None
    assert state.cache is not None
    for layer, is_sliding in enumerate(config.layer_is_sliding):
        rows = source.cache.read(layer, 0, SOURCE_TOKENS)
        for start in range(0, depth, SOURCE_TOKENS):
            if not is_sliding or start + SOURCE_TOKENS + config.sliding_window > depth:
                state.cache.write(layer, start, rows[: depth - start])
    source.close()
    state.cache.position = state.written = depth
    seconds = []
    for token in ids[:MEASURED_TOKENS]:
        start_time = time.perf_counter()
        engine.decode(state, token)
        seconds.append(time.perf_counter() - start_time)
    engine.close()
    return 1 / float(np.median(seconds))


def line(name: str, row: dict[str, Any]) -> str:
    speeds = " ".join(
        "      -" if rate is None else f"{rate:7.1f}" for rate in row["tokens_per_second"].values()
    )
    full = f"{row['full_bytes']:,}, {row['full_measured_bytes']:,}"
    sliding = f"{row['sliding_bytes']:,}, {row['sliding_measured_bytes']:,}"
    return (
        f"{name:>6} {full:>24} {sliding:>14} {row['perplexity']:10.3f} {row['divergence']:10.1e} "
        f"{row['logit_error']:11.1e}       {speeds}"
    )


if __name__ == "__main__":
    main()
