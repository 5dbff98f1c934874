"""Turns a model folder and token ids into the one binary file that `forward.cpp` reads, and its hash.

python tests/native/dump.py FOLDER      writes the dumps of `write_all` into FOLDER
"""

from __future__ import annotations

import shutil
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spile.architectures import open_own
from spile.architectures.spec import Experts, Weight
from spile.engines.cpu.decoder import rope_of
from spile.engines.cpu.rope import RopeTable
from spile.files.checkpoint import open_checkpoint
from spile.making.synth import SynthShape, write_checkpoint
from spile.options import EngineOptions
from spile.residency.experts import read_row_alpha
from spile.residency.kv import kv_format

GOLDEN = Path(__file__).parent.parent / "golden"
# No width is a multiple of what one instruction takes; the first layer is dense; several blocks of the cache.
TAILS = SynthShape(
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
    sliding_window=100,
    full_attention_interval=2,
)


def write_dump(
    folder: Path,
    path: Path,
    token_ids: Sequence[int],
    *,
    kv_bits: int = 16,
    kv_v_bits: int | None = None,
    kv_ring_bits: int | None = None,
    activation_bytes: int = 2,
) -> None:
    """Write the dump of a model with row alphas or group scales."""
    model = open_own(open_checkpoint(folder))
    spec, checkpoint = model.spec, model.checkpoint
    experts, rope = spec.first_experts, rope_of(spec)
    assert experts is not None
    assert rope is not None
    kv = kv_format(spec, EngineOptions(kv_bits=kv_bits, kv_v_bits=kv_v_bits, kv_ring_bits=kv_ring_bits))
    header = struct.pack(
        "<8s18i4f",
        b"SPILEFW3",
        spec.hidden_size,
        spec.num_hidden_layers,
        spec.num_attention_heads,
        spec.num_key_value_heads,
        spec.head_dim,
        spec.num_experts,
        spec.num_experts_per_tok,
        spec.moe_intermediate_size,
        spec.intermediate_size,
        rope.dims,
        spec.vocab_size,
        spec.sliding_window,
        kv.key_bits,
        kv.value_bits,
        kv.ring.key_bits,
        kv.ring.value_bits,
        activation_bytes,
        spec.num_hidden_layers - spec.num_moe_layers,  # the first ones
        spec.rms_norm_eps,
        experts.glu.limit,
        spec.first_dense.limit if spec.first_dense else 0.0,
        experts.router.renormalise_eps,
    )

    with path.open("wb") as file:

        def blob(data: Any) -> None:
            content = np.ascontiguousarray(data).tobytes()
            file.write(struct.pack("<Q", len(content)) + content)

        def tensor(name: str) -> None:
            blob(checkpoint.read(name))

        def linear(weight: Weight) -> None:
            tensor(f"{weight.name}.weight")
            name = f"{weight.name}.row_alpha"  # unchecked, where it lies in the file
            blob(checkpoint.read(name) if name in checkpoint.tensors else read_row_alpha(model, weight))

        file.write(header + bytes(spec.layer_is_sliding))
        file.write(bytes(layer.attention.rope is not None for layer in spec.layers))
        blob(RopeTable(rope).rows(0, len(token_ids)))
        for each in spec.embedding.tensors():
            tensor(each.name)
        for layer in spec.layers:
            attention, ffn = layer.attention, layer.ffn
            assert attention.q_norm is not None
            assert attention.k_norm is not None
            for norm in (layer.input_norm, layer.post_norm, attention.q_norm, attention.k_norm):
                tensor(f"{norm.name}.weight")
            for weight in (attention.q, attention.k, attention.v, attention.o):
                linear(weight)
            if isinstance(ffn, Experts):
                tensor(f"{ffn.router.weight.name}.weight")
            for weight in (ffn.glu if isinstance(ffn, Experts) else ffn).weights():
                linear(weight)
        tensor(f"{spec.norm.name}.weight")
        for each in spec.head.tensors():
            tensor(each.name)
        blob(np.asarray(token_ids, np.int64))


# By what forward prints of them (stage and layer): a tensor that holds nothing but this BF16 value.
FAULTS = {
    "fault-2-0": ("model.layers.0.self_attn.k_norm.weight", 0x7F80),
    "fault-3-1": ("model.layers.1.mlp.gate.weight", 0xFF80),
    "fault-4-2": ("model.layers.2.mlp.switch_mlp.gate_proj.row_alpha", 0x7FC0),
    "fault-4-1": ("model.layers.1.mlp.switch_mlp.up_proj.row_alpha", 0x7F80),
    "fault-6-3": ("lm_head.biases", 0xFF80),
}


def fnv1a(data: bytes) -> str:
    """Return FNV-1a, 64 bits, as forward prints it."""
    value = 14695981039346656037
    for byte in data:
        value = ((value ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def write_all(folder: Path) -> dict[str, tuple[Path, list[int], dict[str, int]]]:
    """Write the dumps; return for each its model, token ids and engine options."""
    golden_ids = np.load(GOLDEN / "ids60.npy").tolist()
    tails_ids = np.random.default_rng(3).integers(0, TAILS.vocab_size, 150).tolist()
    if not (folder / "tails").exists():
        write_checkpoint(folder / "tails", TAILS, seed=7)
    dumps: dict[str, tuple[Path, list[int], dict[str, int]]] = {
        "golden": (GOLDEN / "mlx-2bit", golden_ids, {}),
        "golden32": (GOLDEN / "mlx-2bit", golden_ids, {"kv_bits": 32, "activation_bytes": 3}),
        "golden8": (GOLDEN / "mlx-2bit", golden_ids, {"kv_bits": 8, "kv_v_bits": 4, "kv_ring_bits": 8}),
        "tails": (folder / "tails", tails_ids, {}),
        "tails4": (folder / "tails", tails_ids, {"kv_bits": 4, "kv_ring_bits": 4}),
    }
    for name, (model, ids, options) in dumps.items():
        write_dump(model, folder / f"{name}.dump", ids, **options)
    for name, (tensor_name, bits) in FAULTS.items():
        damaged = shutil.copytree(folder / "tails", folder / name, dirs_exist_ok=True)
        tensor = open_checkpoint(damaged).tensors[tensor_name]
        with (damaged / "model.safetensors").open("r+b") as file:
            file.seek(tensor.offset)
            file.write(bits.to_bytes(2, "little") * (tensor.nbytes // 2))
        write_dump(damaged, folder / f"{name}.dump", tails_ids)
    return dumps


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python tests/native/dump.py FOLDER")
    write_all(Path(sys.argv[1]))
