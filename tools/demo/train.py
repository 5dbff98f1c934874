"""A corpus and a time -> trained master weights, in a run folder that a killed run continues from.

Does not know the files of the model that is shipped (export.py does). The run folder holds `tokenizer.json`,
`checkpoint.pt` (replaced atomically), `log` and `pid`. The learning rate is tied to the seconds trained, so the
run ends when it should on a machine of any speed. A step counts for ten seconds at most: time in which the
process was stopped (`kill -STOP`) or the machine slept is not training time.

AdamW learns all weights. Muon was tried for the ternary ones: after 150 s of training its loss was 0.3 nats
higher, at a fifth fewer tokens a second (batch 16 x 512, two learning rates).
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo import data, model

STEP_SECONDS_CAP = 10.0


@dataclass(frozen=True)
class Options:
    """How to train; kept in the checkpoint, and only `seconds` may differ when a run is resumed."""

    seconds: float = 5400.0
    batch: int = 12
    row_tokens: int = 512
    lr: float = 2.5e-3
    weight_decay: float = 0.05  # of matrices; norms, embeddings and head have none
    balance: float = 0.03
    warmup_steps: int = 100
    num_held_out: int = 480
    seed: int = 1


@torch.no_grad()
def held_out_loss(
    weights: dict[str, Tensor], shape: model.Shape, rows: tuple, dtype: torch.dtype
) -> tuple[float, Tensor]:
    """Loss in nats a token over rows (ids, labels int32 [n, T]), and choices per layer and expert."""
    total, tokens, counts = 0.0, 0, torch.zeros(shape.num_hidden_layers, shape.num_experts, dtype=torch.long)
    ids, labels = (torch.from_numpy(part).long() for part in rows)
    lengths = ((labels != data.IGNORED) * torch.arange(1, labels.shape[1] + 1)).amax(-1)  # to the last label
    for batch in lengths.argsort().split(16):  # rows of like length, cut to whole windows
        end = -(-int(lengths[batch].max()) // shape.sliding_window) * shape.sliding_window
        part = labels[batch, :end]
        n = int((part != data.IGNORED).sum())
        hidden, _, count = model.forward(weights, shape, ids[batch, :end], dtype)
        total += float(model.cross_entropy(weights, hidden, part, dtype)) * n
        tokens += n
        counts += count
    return total / tokens, counts


def _decays(name: str) -> bool:
    return model.is_ternary(name) or name.endswith("router")


class Run:
    """The state of a run: masters, optimizer, the position in the data. `save` and `load` are exact."""

    def __init__(self, folder: Path, shape: model.Shape, options: Options) -> None:
        self.folder, self.shape, self.options = folder, shape, options
        self.masters = model.init_masters(shape, options.seed)
        self.weights = model.quantize(self.masters)
        self.step_id, self.seconds, self.tokens, self.pass_id, self.row = 0, 0.0, 0, 0, 0
        self.parameters = {name: torch.nn.Parameter(w) for name, w in self.masters.items()}  # the same memory
        groups = [
            {"params": [w for n, w in self.parameters.items() if _decays(n) == decays], "weight_decay": decay}
            for decays, decay in ((True, options.weight_decay), (False, 0.0))
        ]
        self.adamw = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)

    def save(self) -> None:
        state = {
            "shape": asdict(self.shape),
            "options": asdict(self.options),
            "masters": self.masters,
            "adamw": self.adamw.state_dict(),
            "position": (self.step_id, self.seconds, self.tokens, self.pass_id, self.row),
        }
        partial = self.folder / "checkpoint.pt.part"
        torch.save(state, partial)
        os.replace(partial, self.folder / "checkpoint.pt")

    @classmethod
    def load(cls, folder: Path, seconds: float | None = None) -> "Run":
        """Open the run where its checkpoint left it, with another length in `seconds` if given."""
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
        options = Options(**(state["options"] | ({"seconds": seconds} if seconds else {})))
        run = cls(folder, model.Shape(**state["shape"]), options)
        for name, w in state["masters"].items():
            run.masters[name].copy_(w)
        run.adamw.load_state_dict(state["adamw"])
        run.step_id, run.seconds, run.tokens, run.pass_id, run.row = state["position"]
        model.quantize(run.masters, run.weights)
        return run

    def lr_share(self) -> float:
        """Warm-up, then linear to zero over the run's seconds."""
        warm = min(1.0, (self.step_id + 1) / self.options.warmup_steps)
        return warm * max(0.0, 1 - self.seconds / self.options.seconds)

    def step(self, ids: Tensor, labels: Tensor) -> tuple[float, float]:
        """One optimizer step on ids, labels [B, T]: its loss and its balance loss."""
        hidden, balance, _ = model.forward(self.weights, self.shape, ids, torch.bfloat16)
        loss = model.cross_entropy(self.weights, hidden, labels, torch.bfloat16)
        (loss + self.options.balance * balance).backward()
        for name, parameter in self.parameters.items():
            parameter.grad = self.weights[name].grad.float()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr_share() * self.options.lr
        self.adamw.step()
        for weight in self.weights.values():
            weight.grad = None
        model.quantize(self.masters, self.weights)
        return float(loss.detach()), float(balance.detach())


def prepare(folder: Path, corpus: data.Corpus, vocab_size: int, seed: int) -> data.Documents:
    """Train the run's tokenizer, or read it if it is there, and encode the corpus."""
    path = folder / "tokenizer.json"
    if not path.exists():
        data.train_tokenizer(corpus.train, vocab_size).save(str(path), pretty=False)
    return data.Documents(corpus, Tokenizer.from_file(str(path)), seed)


def train(run: Run, documents: data.Documents, eval_seconds: float = 300, save_seconds: float = 180) -> None:
    """Train until the run's seconds are over; logs each 20 steps, saves and evaluates by the clock.

    Cost: writes a checkpoint of about 12 bytes a weight every `save_seconds`.
    """
    (run.folder / "pid").write_text(f"{os.getpid()}\n")
    log = (run.folder / "log").open("a")

    def report(**figures: float) -> None:
        line = json.dumps({"time": time.strftime("%H:%M:%S"), "step": run.step_id} | figures)
        print(line, flush=True)
        print(line, file=log, flush=True)

    options = run.options
    plain, chat = (documents.held_out_rows(options.row_tokens, as_chat) for as_chat in (False, True))
    plain, chat = tuple(part[:96] for part in plain), tuple(part[:96] for part in chat)
    report(story_tokens=documents.num_story_tokens, weights=sum(w.numel() for w in run.masters.values()))
    next_eval, next_save = run.seconds + eval_seconds, run.seconds + save_seconds
    source = data.batches(documents, options.row_tokens, options.batch, run.pass_id, run.row)
    losses, balances, since, tokens_before = [], [], time.monotonic(), run.tokens
    at = time.monotonic()
    while run.seconds < options.seconds:
        ids, labels, position = next(source)
        loss, balance = run.step(torch.from_numpy(ids).long(), torch.from_numpy(labels).long())
        run.pass_id, run.row = position
        run.step_id += 1
        run.tokens += ids.size
        now = time.monotonic()
        run.seconds += min(now - at, STEP_SECONDS_CAP)
        at = now
        losses.append(loss)
        balances.append(balance)
        if run.step_id % 20 == 0:
            speed = (run.tokens - tokens_before) / (now - since)
            report(
                seconds=round(run.seconds),
                tokens=run.tokens,
                story_pass=run.pass_id,
                loss=round(sum(losses) / len(losses), 4),
                balance=round(sum(balances) / len(balances), 4),
                tokens_per_second=round(speed),
            )
            losses, balances, since, tokens_before = [], [], now, run.tokens
        if run.seconds >= next_save or run.seconds >= options.seconds:
            run.save()
            next_save = run.seconds + save_seconds
        if run.seconds >= next_eval or run.seconds >= options.seconds:
            text, counts = held_out_loss(run.weights, run.shape, plain, torch.bfloat16)
            answer, _ = held_out_loss(run.weights, run.shape, chat, torch.bfloat16)
            shares = counts / counts.sum(-1, keepdim=True)
            report(
                held_out_text=round(text, 4),
                held_out_chat=round(answer, 4),
                least_used=round(float(shares.min()), 4),
                most_used=round(float(shares.max()), 4),
            )
            next_eval = run.seconds + eval_seconds
