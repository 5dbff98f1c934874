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

from spile.architectures import MODEL_TYPES, maple, qwen3_moe
from spile.architectures.spec import AFFINE4, TERNARY, TERNARY_GROUPS, ModelSpec, Weight
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
_CODE_SPREAD = {4: 4.61, 8: 73.9}  # standard deviation of the codes 0..15 and 0..255
_OWN_FIELDS = ("full_attention_interval", "tokenizer_entries", "num_shards")  # of a shape, not of config.json


@dataclass(frozen=True)
class SynthShape:
    """The sizes of a model to be written, by the names of config.json. Not every architecture reads all of them."""

    model_type: str = "maple"
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
        config = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name not in _OWN_FIELDS
        }
        layers = range(self.num_hidden_layers)
        if self.model_type == "qwen3_moe":
            for name in ("partial_rotary_factor", "sliding_window", "first_k_dense_replace"):
                del config[name]
            block = {"group_size": AFFINE4.group, "bits": AFFINE4.bits}
            quantization = block | {f"model.layers.{n}.mlp.gate": {**block, "bits": 8} for n in layers}
            config |= qwen3_moe.FIXED_VALUES
            dense = list(range(self.first_k_dense_replace))
            config |= {"decoder_sparse_step": 1, "mlp_only_layers": dense, "tie_word_embeddings": False}
        else:
            interval, quantization = self.full_attention_interval, maple.quantization()
            kinds = ["sliding_attention" if (n + 1) % interval else "full_attention" for n in layers]
            config |= {**maple.FIXED_VALUES, "layer_types": kinds}
        return {
            "architectures": [MODEL_TYPES[self.model_type]],
            **config,
            "torch_dtype": "bfloat16",
            "quantization": quantization,
            "quantization_config": quantization,
        }

    def spec(self, *, group_scales: bool = False) -> ModelSpec:
        """Return the spec of what is written. Raises: ModelError for sizes that the architecture does not have."""
        if self.model_type == "qwen3_moe":
            return qwen3_moe.spec(self.config())
        return maple.spec(self.config(), TERNARY_GROUPS if group_scales else TERNARY)


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
    # mlx-community/Qwen3-30B-A3B-4bit
    "qwen3-30b-a3b-4bit": SynthShape(
        model_type="qwen3_moe",
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        intermediate_size=6144,
        rope_theta=1000000.0,
        max_position_embeddings=40960,
        vocab_size=151936,
        tokenizer_entries=151643,
        num_shards=4,
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
    spec = _spec(shape, group_scales)
    specs = [Spec(*each) for each in spec.tensors()]
    count = shape.num_shards if shards is None else shards
    if not 1 <= count <= count_units(specs):
        raise OptionError(f"{count} shards are not possible: this shape can fill 1 to {count_units(specs)}")
    beside = _flash_specs(shape) if flash_head else []
    weights = {
        each.name: weight for weight in (*spec.weights(), _centroids(shape)) for each in weight.tensors()
    }
    total, done = sum(spec.nbytes for spec in [*specs, *beside]), 0
    with atomic_folder(folder, total, on_note) as partial:
        parts = split_shards(specs, count)
        for name, part in {**parts, **({FLASH_HEAD_NAME: beside} if beside else {})}.items():
            with ShardWriter(partial / name, part) as shard:
                for tensor in part:
                    start = 0
                    for piece in _pieces(tensor, weights.get(tensor.name), seed):
                        shard.write(tensor.name, start, piece)
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


def _spec(shape: SynthShape, group_scales: bool) -> ModelSpec:
    """Check the shape by the rules that a reader applies."""
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
        return shape.spec(group_scales=group_scales)
    except (CheckpointError, UnsupportedModelError) as error:
        raise OptionError(
            f"no {shape.model_type} has this shape: {error.message.removeprefix('config.json: ')}"
        ) from error


def _centroids(shape: SynthShape) -> Weight:
    return Weight(_CENTROIDS, AFFINE4, (shape.vocab_size // _CLUSTER_SIZE, shape.hidden_size))


def _flash_specs(shape: SynthShape) -> list[Spec]:
    """List the tensors of a clustered head."""
    if shape.vocab_size % _CLUSTER_SIZE:
        raise OptionError(
            f"vocab_size is {shape.vocab_size:,}; a clustered head needs a multiple of {_CLUSTER_SIZE}"
        )
    specs = [Spec(*each) for each in _centroids(shape).tensors()]
    return [
        *specs,
        Spec("lm_head_flash.token_map", "I32", (shape.vocab_size // _CLUSTER_SIZE, _CLUSTER_SIZE)),
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
        "bits": AFFINE4.bits,
        "group_size": AFFINE4.group,
    }


def _pieces(tensor: Spec, weight: Weight | None, seed: int) -> Iterator[bytes | NDArray[Any]]:
    """Yield a tensor's bytes, some MB at a time; one of no weight holds ids, each once. Streams are seeded by the
    layer's name, so forms agree.
    """
    prefix, kind = tensor.name.rsplit(".", 1)
    stream = "alpha" if kind in ("row_alpha", "scales", "biases") else kind
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(f"{prefix}.{stream}".encode())]))
    if weight is None:
        yield rng.permutation(math.prod(tensor.shape)).astype("<i4")
        return
    form, is_ternary = weight.format, weight.format.kind == TERNARY.kind
    if tensor.dtype == "U32":
        for nbytes in _cut(tensor.nbytes, _PIECE_NBYTES):
            codes = rng.bytes(nbytes)
            yield codes.translate(_TERNARY_BYTES) if is_ternary else codes
        return
    name, n = prefix.rsplit(".", 1)[-1], weight.shape[-1]
    repeats = tensor.shape[-1] if is_ternary and form.group else 1
    for count in _cut(tensor.nbytes // 2 // repeats, _PIECE_NBYTES // (4 * repeats)):
        if is_ternary:
            alpha = _GAINS[name] * math.sqrt(1.5 / n)
            bits = encode_bf16(rng.uniform(0.8 * alpha, 1.2 * alpha, count).astype(np.float32))
            if kind == "biases":
                bits ^= np.uint16(0x8000)
            bits = np.repeat(bits, repeats)
        elif form.is_coded:
            scale = np.float32(_spread(name, n) / _CODE_SPREAD[form.bits])
            bits = encode_bf16(rng.uniform(0.75, 1.25, count).astype(np.float32) * scale)
            if kind == "biases":
                middle = np.float32(-(2**form.bits - 1) / 2)
                bits = encode_bf16(decode_bf16(bits) * middle)
        else:
            mean, deviation = (1.0, 0.1) if len(tensor.shape) == 1 else (0.0, _spread(name, n))
            bits = encode_bf16(rng.normal(mean, deviation, count).astype(np.float32))
        yield bits


def _spread(name: str, n: int) -> float:
    """Return the standard deviation of a matrix's numbers, by the last part of its name and its inputs."""
    if name in _GAINS:
        return _GAINS[name] / math.sqrt(n)
    of_output = {"gate": _ROUTER_SPREAD, "lm_head": _LOGIT_SPREAD, "centroids": _LOGIT_SPREAD}
    return of_output[name] / math.sqrt(n) if name in of_output else 1.0


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
