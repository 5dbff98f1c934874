"""A run's master weights -> the model folder, in the layout of Maple's 2-bit checkpoint.

Does not know how the weights were trained. What is written is read back from the packed bytes and run:
the model card holds the held-out loss of the files, which must be the loss of the trained weights.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from demo import data, model
from demo.card import model_card
from demo.train import Run, held_out_loss

SAMPLING = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 400,
}
SAMPLE_PROMPTS = ("Once upon a time", "Tell me a story about a dog and a red ball.", "Hello!")
PARITY_NATS = 1e-4  # the losses of files and trained weights may differ by this: the order of float32 sums


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [.., n] -> U32 [.., n * bits / 32], lowest bits first."""
    words = codes.numpy().astype(np.uint32).reshape(*codes.shape[:-1], -1, 32 // bits)
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    return torch.from_numpy(np.bitwise_or.reduce(words << shifts, axis=-1))


def unpack(words: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = (words.numpy()[..., None] >> shifts) & np.uint32(2**bits - 1)
    return torch.from_numpy(codes.astype(np.uint8).reshape(*words.shape[:-1], -1))


def _parts(shape: model.Shape) -> dict[str, list[tuple[str, int]]]:
    """Of each stacked ternary master: the checkpoint's names of its parts and their rows, in order."""
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    D, width = shape.hidden_size, shape.moe_intermediate_size
    return {
        "qkv": [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)],
        "o": [("self_attn.o_proj", D)],
        "gate_up": [("mlp.switch_mlp.gate_proj", width), ("mlp.switch_mlp.up_proj", width)],
        "down": [("mlp.switch_mlp.down_proj", D)],
    }


_PLAIN = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "router": "mlp.gate",
}


def to_tensors(masters: dict[str, Tensor], shape: model.Shape) -> dict[str, Tensor]:
    """Masters -> the checkpoint's tensors by name: codes in U32, all else BF16."""
    tensors: dict[str, Tensor] = {}
    for name, w in masters.items():
        layer, _, leaf = name.rpartition(".")
        if model.is_four_bit(name):
            prefix = "model.word_embeddings" if name == "word_embeddings" else name
            codes, tensors[f"{prefix}.scales"], tensors[f"{prefix}.biases"] = model.affine_codes(w)
            tensors[f"{prefix}.weight"] = pack(codes, 4)
        elif model.is_ternary(name):
            parts = _parts(shape)[leaf]
            for (part, _), rows in zip(parts, w.split([n for _, n in parts], -2), strict=True):
                codes, alpha = model.ternary_codes(rows)
                tensors[f"model.layers.{layer}.{part}.weight"] = pack(codes, 2)
                tensors[f"model.layers.{layer}.{part}.row_alpha"] = alpha
        else:
            full = f"model.layers.{layer}.{_PLAIN[leaf]}.weight" if layer else "model.norm.weight"
            tensors[full] = w.bfloat16()
    return {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}


def from_folder(folder: Path) -> tuple[dict[str, Tensor], model.Shape]:
    """Read a model folder in this layout (one shard) into weights that `model.forward` takes."""
    config = json.loads((folder / "config.json").read_text())
    shape = model.Shape(**{name: config[name] for name in model.Shape.__dataclass_fields__})
    with safe_open(folder / "model.safetensors", "pt") as shard:
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 (not a dict)

    def ternary(prefix: str) -> Tensor:
        signs = unpack(tensors[f"{prefix}.weight"], 2).bfloat16() - 1
        return signs * tensors[f"{prefix}.row_alpha"][..., None]

    def four_bit(prefix: str) -> Tensor:
        codes = unpack(tensors[f"{prefix}.weight"], 4)
        return model.affine_values(codes, tensors[f"{prefix}.scales"], tensors[f"{prefix}.biases"])

    weights = {"word_embeddings": four_bit("model.word_embeddings"), "lm_head": four_bit("lm_head")}
    weights["norm"] = tensors["model.norm.weight"].float()
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for leaf, full in _PLAIN.items():
            weights[f"{layer}.{leaf}"] = tensors[f"{prefix}.{full}.weight"].float()
        for leaf, parts in _parts(shape).items():
            weights[f"{layer}.{leaf}"] = torch.cat([ternary(f"{prefix}.{part}") for part, _ in parts], -2)
    return weights, shape


def config_of(shape: model.Shape) -> dict:
    """config.json, with the keys of Maple's own."""
    four_bit = {"group_size": 64, "bits": 4}
    quantization = {"group_size": 128, "bits": 2, "mode": "affine", "lm_head": four_bit}
    quantization["model.word_embeddings"] = four_bit
    return {
        "architectures": ["MapleForCausalLM"],
        "model_type": "maple",
        "hidden_size": shape.hidden_size,
        "intermediate_size": 2 * shape.hidden_size,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "first_k_dense_replace": 0,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "num_shared_experts": 0,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "use_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "sliding_window": shape.sliding_window,
        "layer_types": shape.layer_types(),
        "rope_scaling": None,
        "nope_on_global_attention": True,
        "partial_rotary_factor": shape.partial_rotary_factor,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "quantization": quantization,
        "quantization_config": quantization,
    }


@torch.no_grad()
def sample(
    weights: dict[str, Tensor], shape: model.Shape, ids: list[int], ends: list[int], seed: int
) -> list[int]:
    """Continue ids by SAMPLING until an end id; slow (no KV cache: this is for the model card)."""
    generator = torch.Generator().manual_seed(seed)
    new: list[int] = []
    while len(new) < SAMPLING["max_new_tokens"]:
        row = torch.tensor([ids + new])
        row = F.pad(row, (0, -row.shape[1] % shape.sliding_window))  # whole windows; the padding is not seen
        hidden, _, _ = model.forward(weights, shape, row, torch.float32)
        logits = model.logits_of(weights, hidden[0, len(ids) + len(new) - 1], torch.float32)
        seen = torch.tensor(sorted(set(new)), dtype=torch.long)
        penalty = SAMPLING["repetition_penalty"]
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        p, token = (logits / SAMPLING["temperature"]).softmax(-1).topk(SAMPLING["top_k"])
        keep = (p.cumsum(0) - p < SAMPLING["top_p"]) & (p >= SAMPLING["min_p"] * p[0])
        drawn = int(token[(p * keep).multinomial(1, generator=generator)])
        if drawn in ends:
            break
        new.append(drawn)
    return new


def export(run: Run, documents: data.Documents, out: Path) -> None:
    """Write the model folder: the files, the check of what was written, the model card.

    Cost: runs the model in float32 over all held-out stories, three times.
    """
    out.mkdir(parents=True, exist_ok=True)
    shape, tokenizer = run.shape, documents.tokenizer
    write_files(run, out)

    weights, read_shape = from_folder(out)
    assert read_shape == shape, "config.json does not hold the shape that was trained"
    differing = [name for name, w in run.weights.items() if not torch.equal(w.float(), weights[name].float())]
    assert not differing, f"the files do not hold the trained weights: {differing}"
    text_rows = documents.held_out_rows(run.options.row_tokens, chat=False)
    chat_rows = documents.held_out_rows(run.options.row_tokens, chat=True)
    trained, _ = held_out_loss(run.weights, shape, text_rows, torch.float32)
    text, counts = held_out_loss(weights, shape, text_rows, torch.float32)
    chat, _ = held_out_loss(weights, shape, chat_rows, torch.float32)
    print(f"held-out loss: trained {trained:.6f}, files {text:.6f}, as chat answers {chat:.6f}", flush=True)
    assert abs(text - trained) < PARITY_NATS, f"the files' loss is {text}, the trained weights' {trained}"

    ends = [tokenizer.token_to_id(token) for token in (data.END, data.END_OF_TEXT)]
    samples = []
    for prompt in SAMPLE_PROMPTS:
        start = f"{data.START}user\n{prompt}{data.END}\n{data.START}assistant\n"
        answer = tokenizer.decode(sample(weights, shape, tokenizer.encode(start).ids, ends, seed=0))
        samples.append((prompt, answer))
        print(f"--- {prompt}\n{answer}", flush=True)
    losses = {"text": text, "trained": trained, "chat": chat}
    nbytes = sum(path.stat().st_size for path in out.iterdir() if path.name != "README.md")
    card = model_card(run, documents, losses, counts, SAMPLING, samples, nbytes)
    (out / "README.md").write_text(card)


def write_files(run: Run, out: Path) -> None:
    """Write every file but the model card; the weights replace the old ones at once."""
    tokenizer_json = (run.folder / "tokenizer.json").read_text()
    (out / "tokenizer.json").write_text(tokenizer_json)
    partial = out / "model.safetensors.part"
    save_file(to_tensors(run.masters, run.shape), partial, metadata={"format": "mlx"})
    partial.chmod(0o644)
    os.replace(partial, out / "model.safetensors")
    specials = {token["content"]: token["id"] for token in json.loads(tokenizer_json)["added_tokens"]}
    end, end_of_text = specials[data.END], specials[data.END_OF_TEXT]
    generation = {"eos_token_id": [end, end_of_text], "pad_token_id": end_of_text}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": data.END,
        "pad_token": data.END_OF_TEXT,
        "additional_special_tokens": [data.START, data.END],
        "added_tokens_decoder": {
            str(token_id): {"content": token, "special": True} | plain for token, token_id in specials.items()
        },
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": run.shape.max_position_embeddings,
        "chat_template": data.CHAT_TEMPLATE,
    }
    for name, content in (
        ("config.json", config_of(run.shape) | generation),
        ("generation_config.json", generation | SAMPLING),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (out / name).write_text(json.dumps(content, indent=1) + "\n")
    (out / "chat_template.jinja").write_text(data.CHAT_TEMPLATE)
