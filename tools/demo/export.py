"""A run's master weights -> the model folder in the layout of Maple's 2-bit checkpoint, and back into weights to check it.

Does not know how the weights were trained. What is written is read back from the packed bytes and run: the model card
holds the held-out loss of the file, which must be the loss of the weights that were trained.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from demo import data, model
from demo.train import Run, held_out_loss

SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_new_tokens": 400}
SAMPLE_PROMPTS = ("Once upon a time", "Tell me a story about a dog and a red ball.", "Hello!")
PARITY_NATS = 1e-3  # the files' loss and the trained weights' loss may differ by this, by the order of float32 sums


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [.., n] -> U32 [.., n * bits / 32], lowest bits first."""
    per_word = 32 // bits
    words = codes.numpy().astype(np.uint32).reshape(*codes.shape[:-1], -1, per_word)
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    return torch.from_numpy(np.bitwise_or.reduce(words << shifts, axis=-1))


def unpack(words: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    codes = (words.numpy()[..., None] >> shifts) & np.uint32(2**bits - 1)
    return torch.from_numpy(codes.astype(np.uint8).reshape(*words.shape[:-1], -1))


def _parts(shape: model.Shape) -> dict[str, list[tuple[str, int]]]:
    """Of each stacked ternary master: the checkpoint's names of its parts and their rows, in order."""
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    D, F = shape.hidden_size, shape.moe_intermediate_size
    return {
        "qkv": [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)],
        "o": [("self_attn.o_proj", D)],
        "gate_up": [("mlp.switch_mlp.gate_proj", F), ("mlp.switch_mlp.up_proj", F)],
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
    """Masters -> the checkpoint's tensors by name: U32 codes, BF16 alphas, scales, biases, norms and routers."""
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
        return signs * tensors[f"{prefix}.row_alpha"].view(torch.bfloat16)[..., None]

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
    """config.json, with the keys of Maple's own in their order."""
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
def sample(weights: dict[str, Tensor], shape: model.Shape, ids: list[int], ends: list[int], seed: int) -> list[int]:
    """Continue ids by SAMPLING until an end id; slow (no KV cache: this is for the model card's samples)."""
    generator = torch.Generator().manual_seed(seed)
    new: list[int] = []
    while len(new) < SAMPLING["max_new_tokens"] and (not new or new[-1] not in ends):
        hidden, _, _ = model.forward(weights, shape, torch.tensor([ids + new]), torch.float32)
        logits = model.logits_of(weights, hidden[0, -1], torch.float32)
        p, token = (logits / SAMPLING["temperature"]).softmax(-1).topk(SAMPLING["top_k"])
        keep = (p.cumsum(0) - p < SAMPLING["top_p"]) & (p >= SAMPLING["min_p"] * p[0])
        new.append(int(token[(p * keep).multinomial(1, generator=generator)]))
    return new[:-1] if new[-1] in ends else new


def export(run: Run, documents: data.Documents, out: Path) -> None:
    """Write the model folder: files, check of what was written against what was trained, model card.

    Cost: runs the model in float32 over all held-out stories, three times.
    """
    out.mkdir(parents=True, exist_ok=True)
    shape, tokenizer = run.shape, documents.tokenizer
    write_files(run, out)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)

    weights, read_shape = from_folder(out)
    assert read_shape == shape, "config.json does not hold the shape that was trained"
    row_tokens = run.options.row_tokens
    text_rows, chat_rows = documents.held_out_rows(row_tokens, False), documents.held_out_rows(row_tokens, True)
    trained, _ = held_out_loss(run.weights, shape, text_rows, torch.float32)
    text, counts = held_out_loss(weights, shape, text_rows, torch.float32)
    chat, _ = held_out_loss(weights, shape, chat_rows, torch.float32)
    assert abs(text - trained) < PARITY_NATS, f"the files' loss is {text:.4f}, the trained weights' {trained:.4f}"
    print(f"held-out loss: trained {trained:.5f}, files {text:.5f}, as chat answers {chat:.5f}", flush=True)

    ends = [tokenizer.token_to_id(token) for token in (data.END, data.END_OF_TEXT)]
    samples = []
    for prompt in SAMPLE_PROMPTS:
        start = f"{data.START}user\n{prompt}{data.END}\n{data.START}assistant\n"
        answer = tokenizer.decode(sample(weights, shape, tokenizer.encode(start).ids, ends, seed=0))
        samples.append((prompt, answer))
        print(f"--- {prompt}\n{answer}", flush=True)
    card = model_card(run, documents, {"text": text, "trained": trained, "chat": chat}, counts, samples, out)
    (out / "README.md").write_text(card)


def write_files(run: Run, out: Path) -> None:
    """Write every file but the tokenizer and the model card; each replaces the old one at once."""
    tokenizer_path = run.folder / "tokenizer.json"
    specials = {t["content"]: t["id"] for t in json.loads(tokenizer_path.read_text())["added_tokens"]}
    partial = out / "model.safetensors.part"
    save_file(to_tensors(run.masters, run.shape), partial, metadata={"format": "mlx"})
    os.replace(partial, out / "model.safetensors")
    end, end_of_text = specials[data.END], specials[data.END_OF_TEXT]
    generation = {"eos_token_id": [end, end_of_text], "pad_token_id": end_of_text}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": data.END,
        "pad_token": data.END_OF_TEXT,
        "additional_special_tokens": [data.START, data.END],
        "added_tokens_decoder": {
            str(token_id): {"content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
            for token, token_id in specials.items()
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


def model_card(run: Run, documents: data.Documents, losses: dict, counts: Tensor, samples: list, out: Path) -> str:
    """The README.md of the model folder, every figure taken from the run and the files."""
    shape, options = run.shape, run.options
    num_tokens = sum(len(ids) + 1 for ids in documents.held_out)
    num_characters = sum(len(story) for story in documents.corpus.held_out)
    shares = 100 * counts / counts.sum(-1, keepdim=True)  # [layers, E] percent
    usage = "\n".join(
        f"| {layer} | {float(row.min()):.1f} % | {float(row.max()):.1f} % |" for layer, row in enumerate(shares)
    )
    answers = "\n\n".join(
        f"`{prompt}`\n\n" + "\n".join(f"> {line}".rstrip() for line in answer.split("\n")) for prompt, answer in samples
    )
    return _CARD.format(
        shape=shape,
        options=options,
        nbytes=sum(path.stat().st_size for path in out.iterdir() if path.name != "README.md"),
        even=100 / shape.num_experts,
        seen=run.tokens / 1e6,
        passes=run.pass_id + 1,
        weights=sum(w.numel() for w in run.masters.values()) / 1e6,
        steps=run.step_id,
        minutes=run.seconds / 60,
        text=losses["text"],
        trained=losses["trained"],
        chat=losses["chat"],
        bits=losses["text"] / 0.6931471805599453 * num_tokens / num_characters,
        usage=usage,
        answers=answers,
        sampling=", ".join(f"{name} {SAMPLING[name]}" for name in ("temperature", "top_p", "top_k", "min_p")),
        num_stories=len(documents.stories),
    )


_CARD = """\
# The demo model: a small Maple that tells stories

{weights:.1f} M weights in {nbytes:,} bytes, in the architecture and the 2-bit file layout of DeepGrove's Maple, so that
`spile` can be tried, tested and measured without a download. It writes short stories in the words of a small child. It
knows nothing else: what it says is not advice, and nobody should rely on it.

| | |
| --- | --- |
| layers | {shape.num_hidden_layers}: three with a window of {shape.sliding_window} tokens, then one with full attention, repeating |
| width | {shape.hidden_size}; {shape.num_attention_heads} heads of {shape.head_dim}, {shape.num_key_value_heads} KV heads |
| experts | {shape.num_experts} a layer, width {shape.moe_intermediate_size}, {shape.num_experts_per_tok} for each token |
| vocabulary | {shape.vocab_size}: byte-level BPE in the form of Qwen2's, its three special tokens last |
| weights | experts and attention ternary with one BF16 alpha a row; embeddings and head 4-bit in groups of 64; router and norms BF16 |
| trained at | {options.row_tokens} tokens; `max_position_embeddings` is {shape.max_position_embeddings} |
| sampling | {sampling} |

## Training

Quantization-aware from the first step (straight-through): the weights in the file are the weights that were trained.
{seen:.1f} M tokens in {steps:,} steps of {options.batch} x {options.row_tokens}, begun passes over {num_stories:,} stories: {passes}; {minutes:.0f} minutes on
two CPU cores. In each pass a story is plain text, or the answer to a request, or the answer to its own first words.

| loss on {options.num_held_out} held-out stories, nats a token, float32 | |
| --- | --- |
| these files, stories as plain text | {text:.4f} ({bits:.3f} bits a character) |
| the training weights, the same | {trained:.4f} |
| these files, stories as answers to their first four words | {chat:.4f} |

Share of a layer's choices that the least and the most used expert get on that text ({even:.1f} % is even):

| layer | least | most |
| --- | --- | --- |
{usage}

## Data, credit and licence

Trained on text from TinyStories by Ronen Eldan and Yuanzhi Li ("TinyStories: How Small Can Language Models Be and Still
Speak Coherent English?", arXiv:2305.07759), which is under the Community Data License Agreement, Sharing, version 1.0
(CDLA-Sharing-1.0, https://cdla.dev/sharing-1-0/), and on a few dozen lines of small talk written for this model. The text
is not part of this folder. About a quarter of it comes from the upstream validation split: don't compare these losses
with published ones.

## Samples

Through the chat template, with the sampling above, seed 0, the first answer each.

{answers}

## To make it again

`stories.txt.gz`: TinyStories, each story followed by a line `<|endoftext|>`. `chat.jsonl.gz`: lines of
{{"prompt": ..., "response": ...}} whose responses are stories of the first file, or small talk.

    pip install torch==2.13.0 numpy tokenizers safetensors
    python tools/train_demo.py train --stories stories.txt.gz --chat chat.jsonl.gz --run RUN --seconds {options.seconds:.0f}
    python tools/train_demo.py export --stories stories.txt.gz --chat chat.jsonl.gz --run RUN --out src/spile/demo/model

The schedule is tied to the clock, so another machine makes another, similar model. `train ... --resume` continues a
run that was stopped. The export reads back the files it wrote, runs them, and fails if their loss is not the trained one.
"""
