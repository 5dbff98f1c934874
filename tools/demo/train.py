"""A corpus and a time -> trained master weights, in a run folder that a killed run continues from.

Does not know the files of the model that is shipped (export.py does). The run folder holds
`tokenizer.json`, `checkpoint.pt` (replaced atomically), `log` and `pid`. The learning rate is tied to the
seconds trained, so the run ends when it should on a machine of any speed. A step counts for 30 seconds at
most: time in which the process was stopped (`kill -STOP`) or the machine slept is not training time. At
SIGTERM the run saves itself and ends.

One process for each core, each with one thread and its share of a batch's rows; masters, weights, moments
and gradients lie in shared memory. A step is: gradients of the own rows, (all wait) the sum and norm of the
own weights' gradients, (all wait) AdamW and `quantize` for the own weights, (all wait). Two threads in one
process wait for each other in every operation instead: beside two other busy processes they fell from 4,300
to 870 tokens/s.

AdamW learns all weights. Muon was tried for the ternary ones, 150 s at each of two learning rates on a busy
machine: 0.3 and 0.8 nats behind AdamW, at a fifth fewer tokens a second.
"""

import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
from tokenizers import Tokenizer
from torch import Tensor

from demo import data, model

STEP_SECONDS_CAP = 30.0


@dataclass(frozen=True)
class Options:
    """How to train; kept in the checkpoint, and only `seconds` may differ when a run is resumed."""

    seconds: float = 5400.0
    batch: int = 8
    row_tokens: int = 512
    lr: float = 2e-3
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
    """The state of a run: masters, moments, the position in the data. `save` and `load` are exact."""

    def __init__(self, folder: Path, shape: model.Shape, options: Options) -> None:
        self.folder, self.shape, self.options = folder, shape, options
        self.masters = model.init_masters(shape, options.seed)
        self.weights = {name: w.detach() for name, w in model.quantize(self.masters).items()}
        self.first = {name: torch.zeros_like(w) for name, w in self.masters.items()}  # AdamW's moments
        self.second = {name: torch.zeros_like(w) for name, w in self.masters.items()}
        self.step_id, self.seconds, self.tokens, self.pass_id, self.row = 0, 0.0, 0, 0, 0

    def save(self) -> None:
        state = {
            "shape": asdict(self.shape),
            "options": asdict(self.options),
            "masters": self.masters,
            "first": self.first,
            "second": self.second,
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
        for mine, saved in ((run.masters, "masters"), (run.first, "first"), (run.second, "second")):
            for name, tensor in state[saved].items():
                mine[name].copy_(tensor)
        run.step_id, run.seconds, run.tokens, run.pass_id, run.row = state["position"]
        model.quantize(run.masters, run.weights)
        return run

    def lr(self) -> float:
        """Warm-up, then linear to zero over the run's seconds."""
        warm = min(1.0, (self.step_id + 1) / self.options.warmup_steps)
        return self.options.lr * warm * max(0.0, 1 - self.seconds / self.options.seconds)


@dataclass(frozen=True)
class _Shared:
    """What the workers have in common: tensors in shared memory and a barrier. Lists: one entry a worker."""

    shape: model.Shape
    options: Options
    masters: dict[str, Tensor]
    weights: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    gradients: list[dict[str, Tensor]]
    ids: Tensor  # [B, T]
    labels: Tensor  # [B, T]
    control: Tensor  # float64: learning rate, step, 1 to go on or 0 to end
    figures: Tensor  # float64 [workers, 3]: loss, balance loss, squared norm of the owned gradients
    barrier: Barrier


class _Worker:
    """Worker `rank` of a run: computes the gradients of its rows, then updates the weights that it owns."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.shared = rank, shared
        self.num_workers = len(shared.gradients)
        self.leaves = {name: w.detach().requires_grad_() for name, w in shared.weights.items()}
        owned, loads = {}, [0] * self.num_workers
        for name in sorted(shared.masters, key=lambda n: -shared.masters[n].numel()):
            least = loads.index(min(loads))
            loads[least] += shared.masters[name].numel()
            if least == rank:
                owned[name] = torch.nn.Parameter(shared.masters[name])  # the same memory
        self.owned = owned
        groups = [
            {"params": [w for n, w in owned.items() if _decays(n) == decays], "weight_decay": decay}
            for decays, decay in ((True, shared.options.weight_decay), (False, 0.0))
        ]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        for name, w in owned.items():
            step = torch.tensor(shared.control[1].item())
            self.adamw.state[w] = {
                "step": step,
                "exp_avg": shared.first[name],
                "exp_avg_sq": shared.second[name],
            }

    def step(self) -> None:
        """One optimizer step, together with the other workers."""
        shared, mine = self.shared, slice(self.rank, None, self.num_workers)
        labels = shared.labels[mine]
        hidden, balance, _ = model.forward(self.leaves, shared.shape, shared.ids[mine], torch.bfloat16)
        loss = model.cross_entropy(self.leaves, hidden, labels, torch.bfloat16)
        part = float((labels != data.IGNORED).sum() / (shared.labels != data.IGNORED).sum())
        (loss * part + balance * (shared.options.balance / self.num_workers)).backward()
        for name, leaf in self.leaves.items():
            shared.gradients[self.rank][name].copy_(leaf.grad)
            leaf.grad = None
        shared.barrier.wait()
        for name, w in self.owned.items():
            w.grad = shared.gradients[0][name].float()
            for gradients in shared.gradients[1:]:
                w.grad += gradients[name]
        norms = torch.stack([w.grad.norm() for w in self.owned.values()])
        figures = [
            float(loss.detach()) * part,
            float(balance.detach()) / self.num_workers,
            float(norms.norm() ** 2),
        ]
        shared.figures[self.rank] = torch.tensor(figures)
        shared.barrier.wait()
        clip = min(1.0, 1.0 / (float(shared.figures[:, 2].sum()) ** 0.5 + 1e-6))
        for w in self.owned.values():
            w.grad.mul_(clip)
        for group in self.adamw.param_groups:
            group["lr"] = float(shared.control[0])
        self.adamw.step()
        model.quantize({name: w.detach() for name, w in self.owned.items()}, shared.weights)
        shared.barrier.wait()


def _work(rank: int, shared: _Shared, parent: int) -> None:
    """The life of a worker but the first, which is the run's own process: step when told, end when told."""
    torch.set_num_threads(1)
    # Linux shares cores between sessions first (autogroup): two workers of one get half a share each.
    os.setsid()

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(2)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    worker = _Worker(rank, shared)
    while True:
        shared.barrier.wait()
        if not shared.control[2]:
            return
        worker.step()


class _Team:
    """All workers of a run; this process is the first."""

    def __init__(self, run: Run, num_workers: int) -> None:
        self.run = run
        for tensors in (run.masters, run.weights, run.first, run.second):
            for tensor in tensors.values():
                tensor.share_memory_()
        context = mp.get_context("spawn")
        batch = torch.zeros(run.options.batch, run.options.row_tokens, dtype=torch.long)
        gradients = [
            {name: torch.zeros_like(w).share_memory_() for name, w in run.weights.items()}
            for _ in range(num_workers)
        ]
        self.shared = _Shared(
            shape=run.shape,
            options=run.options,
            masters=run.masters,
            weights=run.weights,
            first=run.first,
            second=run.second,
            gradients=gradients,
            ids=batch.share_memory_(),
            labels=batch.clone().share_memory_(),
            control=torch.tensor([0.0, run.step_id, 1.0], dtype=torch.float64).share_memory_(),
            figures=torch.zeros(num_workers, 3, dtype=torch.float64).share_memory_(),
            barrier=context.Barrier(num_workers),
        )
        for rank in range(1, num_workers):
            context.Process(target=_work, args=(rank, self.shared, os.getpid()), daemon=True).start()
        self.worker = _Worker(0, self.shared)

    def step(self, ids: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
        """One optimizer step on ids, labels [B, T]: its loss and its balance loss."""
        self.shared.ids.copy_(torch.from_numpy(ids))
        self.shared.labels.copy_(torch.from_numpy(labels))
        self.shared.control[0] = self.run.lr()
        self.shared.barrier.wait()
        self.worker.step()
        loss, balance, _ = self.shared.figures.sum(0).tolist()
        return loss, balance

    def close(self) -> None:
        self.shared.control[2] = 0.0
        self.shared.barrier.wait()


def prepare(folder: Path, corpus: data.Corpus, vocab_size: int, seed: int) -> data.Documents:
    """Train the run's tokenizer, or read it if it is there, and encode the corpus."""
    path = folder / "tokenizer.json"
    if not path.exists():
        data.train_tokenizer(corpus.train, vocab_size).save(str(path), pretty=False)
    return data.Documents(corpus, Tokenizer.from_file(str(path)), seed)


def train(
    run: Run,
    documents: data.Documents,
    num_workers: int,
    eval_seconds: float = 300.0,
    save_seconds: float = 180.0,
) -> None:
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
    team = _Team(run, num_workers)
    source = data.batches(documents, options.row_tokens, options.batch, run.pass_id, run.row)
    losses, balances, since, tokens_before = [], [], time.monotonic(), run.tokens
    at = time.monotonic()
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    while run.seconds < options.seconds:
        ids, labels, position = next(source)
        loss, balance = team.step(ids, labels)
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
        if run.seconds >= next_save or run.seconds >= options.seconds or told_to_end.is_set():
            run.save()
            next_save = run.seconds + save_seconds
        if told_to_end.is_set():
            break
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
    team.close()
