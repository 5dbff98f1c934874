"""A run, its losses and its samples -> the model card, README.md of the model folder.

Does not know how any of the figures was found.
"""

from torch import Tensor

from demo.data import Documents
from demo.train import Run

LN_2 = 0.6931471805599453


def model_card(
    run: Run,
    documents: Documents,
    losses: dict[str, float],
    counts: Tensor,
    sampling: dict[str, float],
    samples: list[tuple[str, str]],
    nbytes: int,
) -> str:
    """The card's text; every figure comes from the run and the files.

    `losses`: nats a token of "text", "trained" and "chat". `counts` [layers, E]: choices of each expert on
    the held-out text. `samples`: prompts and answers. `nbytes`: the size of the folder without the card.
    """
    shape, options = run.shape, run.options
    num_tokens = sum(len(ids) + 1 for ids in documents.held_out)
    num_characters = sum(len(story) for story in documents.corpus.held_out)
    shares = 100 * counts / counts.sum(-1, keepdim=True)  # [layers, E] percent
    usage = "\n".join(
        f"| {layer} | {float(row.min()):.1f} % | {float(row.max()):.1f} % |"
        for layer, row in enumerate(shares)
    )
    answers = "\n\n".join(f"`{prompt}`\n\n{_quoted(answer)}" for prompt, answer in samples)
    window = f"three with a window of {shape.sliding_window} tokens, then one with full attention, repeating"
    return _CARD.format(
        shape=shape,
        options=options,
        nbytes=nbytes,
        window=window,
        even=100 / shape.num_experts,
        seen=run.tokens / 1e6,
        passes=run.tokens / documents.tokens_per_pass(options.row_tokens),
        chosen=shape.num_experts_per_tok,
        weights=sum(w.numel() for w in run.masters.values()) / 1e6,
        steps=run.step_id,
        minutes=run.seconds / 60,
        text=losses["text"],
        trained=losses["trained"],
        chat=losses["chat"],
        bits=losses["text"] / LN_2 * num_tokens / num_characters,
        usage=usage,
        answers=answers,
        sampling=", ".join(
            f"{name} {sampling[name]}"
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        ),
        num_stories=len(documents.stories),
    )


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.split("\n"))


_CARD = """\
# The demo model: a small Maple that tells stories

{weights:.1f} M weights in {nbytes:,} bytes, in the architecture and the 2-bit file layout of DeepGrove's
Maple, so that `spile` can be tried, tested and measured without a download. It writes short stories in the
words of a small child. It knows nothing else: what it says is not advice, and nobody should rely on it.

| | |
| --- | --- |
| layers | {shape.num_hidden_layers}: {window} |
| width | {shape.hidden_size} |
| attention | {shape.num_attention_heads} heads of {shape.head_dim}, {shape.num_key_value_heads} KV heads |
| experts | {shape.num_experts} a layer, of width {shape.moe_intermediate_size}; {chosen} for each token |
| vocabulary | {shape.vocab_size}: byte-level BPE in the form of Qwen2's, three special tokens last |
| experts, attention | ternary, one BF16 alpha a row |
| embeddings, head | 4-bit, groups of 64 |
| router, norms | BF16 |
| context | trained on {options.row_tokens} tokens; the config allows {shape.max_position_embeddings} |
| sampling | {sampling} |

## Training

Quantization-aware from the first step (straight-through): the weights in the files are the weights that were
trained. {seen:.1f} M tokens in {steps:,} steps of {options.batch} x {options.row_tokens}, {passes:.1f} \
passes over
{num_stories:,} stories; {minutes:.0f} minutes on a CPU. In each pass a story is plain text, or the answer to a
request, or the answer to its own first words.

| loss on {options.num_held_out} held-out stories, nats a token, in float32 | |
| --- | --- |
| these files, stories as plain text | {text:.4f} ({bits:.3f} bits a character) |
| the training weights, the same | {trained:.4f} |
| these files, stories as answers to their first four words | {chat:.4f} |

Share of a layer's choices that its least and most used experts get on that text ({even:.1f} % is even):

| layer | least | most |
| --- | --- | --- |
{usage}

## Data, credit and licence

Trained on text from TinyStories by Ronen Eldan and Yuanzhi Li ("TinyStories: How Small Can Language Models
Be and Still Speak Coherent English?", arXiv:2305.07759), which is under the Community Data License
Agreement, Sharing, version 1.0 (CDLA-Sharing-1.0, https://cdla.dev/sharing-1-0/), and on a few dozen lines
of small talk. The text is not part of this folder. About a quarter of it comes from the upstream validation
split: don't compare these losses with published ones.

## Samples

Through the chat template, with the sampling above, seed 0, the first answer each.

{answers}

## To make it again

`stories.txt.gz`: TinyStories, each story followed by a line `<|endoftext|>`. `chat.jsonl.gz`: lines of
{{"prompt": ..., "response": ...}} whose responses are stories of the first file, or small talk.

    pip install torch==2.13.0 numpy tokenizers safetensors
    python tools/train_demo.py train --stories stories.txt.gz --chat chat.jsonl.gz --run RUN \\
        --seconds {options.seconds:.0f}
    python tools/train_demo.py export --stories stories.txt.gz --chat chat.jsonl.gz --run RUN \\
        --out src/spile/demo/model

The schedule is tied to the clock, so another machine makes another, similar model. `train ... --resume`
continues a run that was stopped. The export reads back the files it wrote, runs them, and fails if their
loss is not the trained one.
"""
