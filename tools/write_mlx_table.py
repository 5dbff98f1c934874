"""Turns what the mlx engine does with every architecture of the installed mlx-lm into docs/mlx.md.

    python tools/write_mlx_table.py

Takes about a minute. The test of the same architectures compares the page with what it finds.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
for folder in ("src", "tests"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))

HEAD = """# The mlx engine

spile runs every mixture of experts that mlx-lm has, with its experts streamed:
`spile generate -m FOLDER --memory 8GB "..."` (`pip install 'spile[mlx]'`; on macOS with Apple silicon it comes by
itself). The model is mlx-lm's own code; spile takes the place of its layers of experts, by type, before a weight is
read. Where an expert's bytes lie is found by letting mlx-lm load the model from stand-ins without data and following
the graph of what it did: stacked, fused, interleaved, transposed and one-by-one namings are read as they are, and a
tensor that is computed at load is refused by name.

**What is promised**: streamed equals resident, bit for bit, at the same chunk boundaries, on the same build of mlx.
(Not: equal for every chunk. MLX's kernels depend on the number of rows.) Prompts are read in chunks that end at
multiples of the chunk, the last token in a pass of its own, as mlx-lm does. Experts may have affine 2 to 8 bits, mxfp4,
mxfp8, nvfp4, mixed bits or none, with and without `bias`.

**In a program of your own**:

```python
import mlx_lm
import spile.mlx

model, tokenizer = mlx_lm.load("FOLDER", lazy=True)
streaming = spile.mlx.stream_experts(model, "FOLDER", memory="8GB")
print(mlx_lm.generate(model, tokenizer, "Why does sap run in spring?"), streaming.counters())
```

`spile.mlx.register()` lets `mlx_lm` itself load Maple checkpoints. [docs/metal.md](metal.md) says what is
expected on Apple GPUs and how to measure it.

**Keys and values in fewer bits**: `--kv-bits 8 --kv-v-bits 4` gives keys and values 16, 8 or 4 bits each, in layers
that keep every position; rings of a sliding window keep 16 unless `--kv-ring-bits` says otherwise. What is kept
is MLX's affine quantization along the head, in groups of 64 dimensions, of 32 where 64 does not divide the head; any
other head is refused by name. Attention reads what is kept, also for the chunk's own tokens: a layer's keys and
values are dequantized, attended to by the ordinary kernel (so attention sinks and masks work) and given back. The
plan counts two such copies. A position takes, in one layer, `heads * (bits * head / 8 + 2 * size * head / group)`
bytes for keys and for values, `size` being 2 for BF16 and FP16 models. On random Maples with float32 activations the
mean difference of logits, in parts of their spread, is:

| keys / values | 14 tokens | 70 tokens (window 16) |
| --- | --- | --- |
| 8 / 8 | 0.4 % | 0.9 % |
| 8 / 4 | 4.5 % | 4.1 % |
| 4 / 4 | 4.9 % | 4.2 % |

Layers that keep something else than keys and values (states of linear attention, indexers, chunked attention) stay at
16 bits and are named.

**Earlier prompts** are not read again where a later one begins alike (in memory, in a folder, in a saved file): up to
the last multiple of the prefill chunk, and from what was computed in whole chunks alone, so the answer has the bits
of a fresh run. Models whose layers keep something else than keys and values (ArraysCache, CacheList,
ChunkedKVCache) are read anew, and say so.

**What it does not do**: `--reselect-every`, `--kv-bits 32`, `--io direct` and `--io mapped` are refused by name.
Unquantized experts in 16 bits are refused without a GPU: MLX's CPU backend multiplies
experts of float32 and quantized ones only.

## Architectures

"""
TAIL = """
Each is a model of the architecture at a tiny size (4 layers, 8 experts, 2 chosen, 4 bits, random weights), read in a
chunk of 36 tokens and one of 6, then 10 tokens one at a time, on MLX's CPU backend, with {few} slots for all layers
(so experts are given up all the time) and with a slot for each. exact: every logit equals that of mlx-lm's own loader
and model with everything resident.
"""


def page() -> str:
    """Return the page. Cost: about a minute, unless the architectures were checked in this process before."""
    from mlx_architectures import find_architectures
    from mlx_check import check_architecture

    rows, exact, few = [], 0, 0
    for name in find_architectures():
        found = check_architecture(name)
        if isinstance(found, str):
            rows.append(f"| {name} | | | {found} |")
            continue
        few = int(found[0].slots)
        prefill, decode = (
            "exact" if all(getattr(one, what) for one in found) else "differs"
            for what in ("prefill", "decode")
        )
        exact += prefill == decode == "exact"
        rows.append(f"| {name} | {prefill} | {decode} | |")
    head = (
        f"{exact} of {len(rows)} architectures with experts that mlx-lm {version('mlx-lm')} has stream exactly "
        f"(mlx {version('mlx')}).\n\n| model_type | prefill | decode | why not |\n| --- | --- | --- | --- |\n"
    )
    return HEAD + head + "\n".join(rows) + "\n" + TAIL.format(few=few)


def main() -> None:
    path = ROOT / "docs/mlx.md"
    path.write_text(page())
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
