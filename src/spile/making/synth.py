"""Turns a shape and a seed into a random checkpoint that looks in every byte range like a real one.

Streaming: no tensor is ever held whole. Every tensor has its own random stream, seeded by its name, so
the same shape and seed give the same model whatever the number of shards, and the same numbers with row
alphas and group scales. Weights are scaled so that hidden states neither explode nor vanish, logits
spread by about 2, and the router's choice is spread over all experts. The text such a model writes means
nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spile.architectures.maple import (
    FIXED_VALUES,
    TABLE_BITS,
    TABLE_GROUP,
    TERNARY_BITS,
    TERNARY_GROUP,
    Form,
    check_widths,
    expected_tensors,
    parse_config,
)
from spile.errors import CheckpointError, OptionError, UnsupportedModelError
from spile.files.checkpoint import FLASH_HEAD_NAME
from spile.files.writer import (
    ShardWriter,
    Spec,
    atomic_folder,
    count_units,
    split_shards,
    write_index,
    write_json,
)
from spile.making.synth_tokenizer import NUM_BYTES, tokenizer_files, write_tokenizer_file
from spile.residency.experts import decode_bf16, encode_bf16

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_PIECE_NBYTES = 4_000_000
_EMBEDDING_NAME = "model.word_embeddings"
_ROUTER_SPREAD = 1.5  # standard deviation of the router's logits
_LOGIT_SPREAD = 2.0
# What each linear layer multiplies a typical input by; the residual about doubles in 24 layers.
_GAINS = {
    "q_proj": 1.0,
    "k_proj": 1.0,
    "v_proj": 1.0,
    "o_proj": 0.6,
    "gate_proj": 1.2,
    "up_proj": 1.2,
    "down_proj": 0.7,
}
_CENTROIDS, _CLUSTER_SIZE = "lm_head_flash.centroids", 32
_MIDDLE_CODE = (2**TABLE_BITS - 1) / 2
_CODE_SPREAD = 4.61  # standard deviation of the codes 0..15


@dataclass(frozen=True)
class SynthShape:
    """The sizes of a model to be written, by the names of config.json."""

    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    intermediate_size: int = 256
    first_k_dense_replace: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5
    max_position_embeddings: int = 512
    vocab_size: int = 512
    sliding_window: int = 16
    full_attention_interval: int = 4  # every fourth layer sees everything; 1: all layers do
    tokenizer_entries: int = 256  # at most, besides the special tokens; 256: a byte each; 0: no tokenizer
    num_shards: int = 1

    def config(self) -> dict[str, Any]:
        """Return config.json as the real checkpoint has it."""
        skipped = ("full_attention_interval", "tokenizer_entries", "num_shards")
        sizes = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in skipped}
        interval = self.full_attention_interval
        kinds = [
            "sliding_attention" if (n + 1) % interval else "full_attention"
            for n in range(self.num_hidden_layers)
        ]
        table = {"group_size": TABLE_GROUP, "bits": TABLE_BITS}
        block = {"group_size": TERNARY_GROUP, "bits": TERNARY_BITS, "mode": "affine"}
        quantization = {**block, "lm_head": table, _EMBEDDING_NAME: table}
        return {
            "architectures": ["MapleForCausalLM"],
            "model_type": "maple",
            **sizes,
            **FIXED_VALUES,
            "layer_types": kinds,
            "torch_dtype": "bfloat16",
            "quantization": quantization,
            "quantization_config": quantization,
        }


PRESETS = {
    "tiny": SynthShape(),
    # deepgrove/maple-2bit-mlx
    "maple-20b": SynthShape(
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        intermediate_size=5120,
        max_position_embeddings=128000,
        vocab_size=151936,
        sliding_window=512,
        tokenizer_entries=151643,
        num_shards=3,
    ),
}


def write_checkpoint(
    folder: Path,
    shape: SynthShape,
    *,
    seed: int = 0,
    shards: int | None = None,
    group_scales: bool = False,
    flash_head: bool = False,
    progress: Progress | None = None,
    on_note: Callable[[str], None] | None = None,
) -> None:
    """Write a random checkpoint; the folder appears when it is complete. With `flash_head`, a clustered head
    lies beside the shards in a file of its own: random clusters, which choose no better than chance.

    Memory: some tens of MB, and the tokenizer's text. Disk: free space is checked first.

    Raises:
        OptionError: a size that Maple does not have, a negative seed, more shards than tensors, a vocabulary
            that does not cut into clusters.
        WriteError: the folder is taken or the disk is full.
    """
    if seed < 0:
        raise OptionError(f"seed {seed} is negative")
    specs = _specs(shape, Form.GROUP_SCALES if group_scales else Form.ROW_ALPHA)
    count = shape.num_shards if shards is None else shards
    if not 1 <= count <= count_units(specs):
        raise OptionError(f"{count} shards are not possible: this shape can fill 1 to {count_units(specs)}")
    beside = _flash_specs(shape) if flash_head else []
    total, done = sum(spec.nbytes for spec in [*specs, *beside]), 0
    with atomic_folder(folder, total, on_note) as partial:
        parts = split_shards(specs, count)
        for name, part in {**parts, **({FLASH_HEAD_NAME: beside} if beside else {})}.items():
            with ShardWriter(partial / name, part) as shard:
                for spec in part:
                    start = 0
                    for piece in _pieces(spec, seed, shape):
                        shard.write(spec.name, start, piece)
                        start += len(piece) if isinstance(piece, bytes) else piece.nbytes
                        if progress is not None:
                            progress(done + start, total)
                    done += start
        write_index(partial, parts)
        files, eos_token = tokenizer_files(shape.tokenizer_entries, shape.vocab_size, seed)
        for name, value in files.items():
            write_tokenizer_file(partial / name, value)
        eos = {} if eos_token is None else {"eos_token_id": eos_token}
        flash = {"flash_head": _flash_config(shape)} if flash_head else {}
        write_json(partial / "config.json", {**shape.config(), **eos, **flash})


def _specs(shape: SynthShape, form: Form) -> list[Spec]:
    """Check the shape by the rules that a reader applies, and list its tensors."""
    limits = {"full_attention_interval": (1, 2**20), "num_hidden_layers": (1, 10_000)}
    limits["tokenizer_entries"] = (0, 2**24)
    for name, (least, largest) in limits.items():
        if not least <= getattr(shape, name) <= largest:
            raise OptionError(f"{name} is {getattr(shape, name)}, expected {least} to {largest:,}")
    if 0 < shape.tokenizer_entries < NUM_BYTES:
        raise OptionError(
            f"tokenizer_entries is {shape.tokenizer_entries}, expected 0 or {NUM_BYTES} and more"
        )
    try:
        config = parse_config(shape.config())
        check_widths(config, form)
    except (CheckpointError, UnsupportedModelError) as error:
        raise OptionError(
            f"no Maple has this shape: {error.message.removeprefix('config.json: ')}"
        ) from error
    return [Spec(*expected) for expected in expected_tensors(config, form, _EMBEDDING_NAME)]


def _flash_specs(shape: SynthShape) -> list[Spec]:
    """List the tensors of a clustered head."""
    if shape.vocab_size % _CLUSTER_SIZE:
        raise OptionError(
            f"vocab_size is {shape.vocab_size:,}; a clustered head needs a multiple of {_CLUSTER_SIZE}"
        )
    C, D = shape.vocab_size // _CLUSTER_SIZE, shape.hidden_size
    return [
        Spec(f"{_CENTROIDS}.weight", "U32", (C, D * TABLE_BITS // 32)),
        Spec(f"{_CENTROIDS}.scales", "BF16", (C, D // TABLE_GROUP)),
        Spec(f"{_CENTROIDS}.biases", "BF16", (C, D // TABLE_GROUP)),
        Spec("lm_head_flash.token_map", "I32", (C, _CLUSTER_SIZE)),
    ]


def _flash_config(shape: SynthShape) -> dict[str, Any]:
    """Return config.json's block about a clustered head; a ninth of the clusters is probed, as in the real one."""
    C = shape.vocab_size // _CLUSTER_SIZE
    return {
        "n_clusters": C,
        "cluster_size": _CLUSTER_SIZE,
        "n_probes": max(1, round(C * 512 / 4748)),
        "force_tokens": [],
        "scaled_centroids": True,
        "bits": TABLE_BITS,
        "group_size": TABLE_GROUP,
    }


def _pieces(spec: Spec, seed: int, shape: SynthShape) -> Iterator[bytes | NDArray[Any]]:
    """Yield a tensor's bytes, some MB at a time. Streams are seeded by the layer's name, so forms agree."""
    prefix, kind = spec.name.rsplit(".", 1)
    is_table = prefix in ("lm_head", _EMBEDDING_NAME, _CENTROIDS)
    stream = "alpha" if kind in ("row_alpha", "scales", "biases") else kind
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(f"{prefix}.{stream}".encode())]))
    if spec.dtype == "I32":
        yield rng.permutation(shape.vocab_size).astype("<i4")
        return
    if spec.dtype == "U32":
        for nbytes in _cut(spec.nbytes, _PIECE_NBYTES):
            codes = rng.bytes(nbytes)
            yield codes if is_table else codes.translate(_TERNARY_BYTES)
        return
    spread = _LOGIT_SPREAD / math.sqrt(shape.hidden_size) if prefix in ("lm_head", _CENTROIDS) else 1.0
    repeats = 1 if is_table or kind not in ("scales", "biases") else spec.shape[-1]
    for count in _cut(spec.nbytes // 2 // repeats, _PIECE_NBYTES // (4 * repeats)):
        if is_table:
            bits = encode_bf16(
                rng.uniform(0.75, 1.25, count).astype(np.float32) * np.float32(spread / _CODE_SPREAD)
            )
            if kind == "biases":
                bits = encode_bf16(decode_bf16(bits) * np.float32(-_MIDDLE_CODE))
        elif kind == "weight":
            mean, deviation = (
                (0.0, _ROUTER_SPREAD / math.sqrt(shape.hidden_size)) if _is_router(prefix) else (1.0, 0.1)
            )
            bits = encode_bf16(rng.normal(mean, deviation, count).astype(np.float32))
        else:
            alpha = _GAINS[prefix.rsplit(".", 1)[1]] * math.sqrt(1.5 / _width(prefix, shape))
            bits = encode_bf16(rng.uniform(0.8 * alpha, 1.2 * alpha, count).astype(np.float32))
            if kind == "biases":
                bits ^= np.uint16(0x8000)
            bits = np.repeat(bits, repeats)
        yield bits


def _width(prefix: str, shape: SynthShape) -> int:
    """Return the number of inputs of a ternary layer."""
    if prefix.endswith("o_proj"):
        return shape.num_attention_heads * shape.head_dim
    if prefix.endswith("down_proj"):
        return shape.moe_intermediate_size if ".switch_mlp." in prefix else shape.intermediate_size
    return shape.hidden_size


def _is_router(prefix: str) -> bool:
    return prefix.endswith(".mlp.gate")


def _cut(total: int, piece: int) -> Iterator[int]:
    for start in range(0, total, max(piece, 1)):
        yield min(max(piece, 1), total - start)


def _ternary_bytes() -> bytes:
    """Map any byte to one of the 81 bytes that hold no code 3, about evenly and with mean zero."""
    patterns = [
        a | b << 2 | c << 4 | d << 6 for a in range(3) for b in range(3) for c in range(3) for d in range(3)
    ]
    spare = 256 - 3 * len(patterns)  # 13: six pairs of opposites and the pattern that is zero
    opposites = patterns[: spare // 2] + patterns[-(spare // 2) :] + [patterns[len(patterns) // 2]]
    return bytes(patterns * 3 + opposites)


_TERNARY_BYTES = _ternary_bytes()
