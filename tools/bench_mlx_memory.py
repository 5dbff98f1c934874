"""Turns a random Qwen3-MoE of several GB into peak memory: streamed at a budget against mlx-lm with all resident.

    python tools/bench_mlx_memory.py DIR --budgets 800MB,1500MB --tokens 8

writes the model into DIR (once; 4 bits, random), runs each way in a process of its own and prints a table: the
peak of MLX's allocations, the peak of the process, speed, and whether the logits are the resident model's, bit for
bit. The last line is JSON. Nothing here is fast: MLX's CPU backend is a reference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 512,
    "rms_norm_eps": 1e-6, "vocab_size": 32_000, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "max_position_embeddings": 4096, "norm_topk_prob": True, "quantization": {"bits": 4, "group_size": 64},
}  # fmt: skip
PROMPT = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budgets", default="800MB,1500MB")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(run(arguments.folder, arguments.run, arguments.tokens)))
        return
    if not (arguments.folder / "config.json").exists():
        write(arguments.folder)
    total = sum(path.stat().st_size for path in arguments.folder.glob("*.safetensors"))
    rows = []
    print(f"{'':>10} {'MLX peak':>10} {'process':>10} {'prompt':>9} {'decode':>9} {'read':>9}  logits")
    for way in ["resident", *arguments.budgets.split(",")]:
        command = [sys.executable, __file__, str(arguments.folder), "--run", way]
        done = subprocess.run(
            [*command, "--tokens", str(arguments.tokens)], stdout=subprocess.PIPE, check=True
        )
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        same = row["sha256"] == rows[0]["sha256"]
        print(
            f"{way:>10} {row['mlx_peak_bytes'] / 1e6:>7.0f} MB {row['process_peak_bytes'] / 1e6:>7.0f} MB "
            f"{row['prompt_tokens_per_second']:>7.2f}/s {row['tokens_per_second']:>7.2f}/s "
            f"{row['bytes_read'] / 1e9:>6.2f} GB  {'the same' if same else 'DIFFERENT'}",
            flush=True,
        )
    print(json.dumps({"model_bytes": total, "prompt": PROMPT, "tokens": arguments.tokens, "rows": rows}))


def run(folder: Path, way: str, num_tokens: int) -> dict[str, Any]:
    """Run the model one way; `way` is resident (mlx-lm's own loader and caches) or a budget."""
    import mlx.core as mx

    from spile.memory import peak_footprint_bytes

    ids = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], PROMPT + num_tokens).tolist()
    logits, times, read = [], [], 0
    if way == "resident":
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        model, _ = load_model(folder)
        caches = make_prompt_cache(model)

        def step(tokens: list[int]) -> Any:
            out = model(mx.array([tokens]), cache=caches)[0, -1].astype(mx.float32)
            mx.eval(out)
            return np.array(out)

        started = time.perf_counter()
        step(ids[: PROMPT - 1])
        logits.append(step(ids[PROMPT - 1 : PROMPT]))
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
        logits += [step([token]) for token in ids[PROMPT:]]
    else:
        from spile.architectures import open_model
        from spile.engines import open_engine
        from spile.files.checkpoint import open_checkpoint
        from spile.options import EngineOptions
        from spile.sizes import parse_size

        options = EngineOptions(engine="mlx", memory_bytes=parse_size(way), context=512)
        engine = open_engine(open_model(open_checkpoint(folder)), options)
        print(engine.summary(), file=sys.stderr)
        state = engine.new_state()
        started = time.perf_counter()
        logits.append(engine.prefill(state, ids[:PROMPT]))
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
        logits += [engine.decode(state, token) for token in ids[PROMPT:]]
        read = engine.counters().bytes_read
    times.append(time.perf_counter() - started)
    return {
        "way": way,
        "mlx_peak_bytes": mx.get_peak_memory(),
        "process_peak_bytes": peak_footprint_bytes(),
        "prompt_tokens_per_second": PROMPT / times[0],
        "tokens_per_second": num_tokens / times[1],
        "bytes_read": read,
        "sha256": hashlib.sha256(np.stack(logits).tobytes()).hexdigest(),
    }


def write(folder: Path) -> None:
    """Write the model, a shard for each layer: random words of 4 bits, scales that keep values near 1 / sqrt(D)."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.qwen3_moe import Model, ModelArgs

    folder.mkdir(parents=True, exist_ok=True)
    model = Model(ModelArgs.from_dict(CONFIG))
    shapes = {path: array.shape for path, array in tree_flatten(model.parameters())}
    groups: dict[str, dict[str, Any]] = {}
    rng = np.random.default_rng(1)
    for path, shape in shapes.items():
        shard = path.split(".")[2] if ".layers." in path else "rest"
        tensors = groups.setdefault(shard, {})
        if len(shape) == 1:
            tensors[path] = mx.ones(shape, mx.bfloat16)
            continue
        *lead, D = shape
        words = rng.integers(0, 2**32, (*lead, D // 8), np.uint32, endpoint=False)
        scale = mx.full((*lead, D // 64), 0.22 * D**-0.5, mx.bfloat16)
        base = path.removesuffix(".weight")
        tensors |= {path: mx.array(words), f"{base}.scales": scale, f"{base}.biases": -7.5 * scale}
        if len(lead) == 2 and "down_proj" in path:
            mx.save_safetensors(str(folder / f"model-{shard}.safetensors"), tensors)
            tensors = groups[shard] = {"saved": True}
    weight_map = {}
    for shard, tensors in groups.items():
        name = folder / f"model-{shard}.safetensors"
        if tensors.pop("saved", None):
            tensors = {**mx.load(str(name)), **tensors}
        mx.save_safetensors(str(name.with_name("new.safetensors")), tensors, metadata={"format": "mlx"})
        name.with_name("new.safetensors").rename(name)
        weight_map |= dict.fromkeys(tensors, name.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))


if __name__ == "__main__":
    main()
