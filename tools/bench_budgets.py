"""A full-size model and a list of budgets -> speed and memory of an answer at each, as a table and JSON.

    python tools/bench_budgets.py MODEL [--budgets 300MB,630MB,1GB,2GB,resident] [--modes cold,warm] [--tokens 64]
        [--prompt-tokens 512] [--context N] [--throttle 550MB]

A budget is a size, "resident", or a number of slots a layer, as "8active" (`--active-experts 8`).

What bounds it: a token of the full-size Maple wants 152 MB of experts; what of it is not resident comes from the disk
(cold) or from the page cache (warm). "cold" drops the page cache first and, where a budget is given, runs inside a
control group whose hard limit is the budget, page cache counted: the proof that nothing else is used. That needs root
and Linux, and so does `--throttle`, which holds the disk to so many bytes a second by a control group. "warm" reads all
files once before, in order, and has the page cache outside the budget. Every run starts with an empty cache folder of
its own (no tokenizer table of an earlier run) and reads a real text, this project's README.

`of ceiling` is the cold decode speed divided by what the disk allows: its rate at the read size used, measured just
before and after, divided by the bytes that a decoded token missed; what was read ahead in vain is not among them.

Prints one row a run; the last line is JSON, a list of objects with sizes in bytes and null for what is unknown.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from spile.sizes import format_size, parse_size

TEXT = Path(__file__).parents[1] / "README.md"
_CGROUPS = Path("/sys/fs/cgroup")
_SAMPLE_SECONDS = 0.005
_ANSWER = """
import json, sys, spile
import spile.cli, spile.commands.generate, spile.console.terminal  # what the command holds when it plans
model, options, num_tokens = json.loads(sys.argv[1])
text = sys.stdin.read()
notes = []
with spile.load(model, **options, on_note=notes.append) as loaded:
    loaded.encode("a", raw=loaded.chat_template is None)
    after_prompt = None
    for chunk in loaded.stream(text, raw=True, max_tokens=num_tokens, seed=1, ignore_eos=True):
        if after_prompt is None and chunk.token_id is not None:
            after_prompt = loaded.counters()
        stats = chunk.stats or {}
    end = loaded.counters()
    answer = stats.as_dict() | {"plan": loaded.summary, "notes": notes}
    steps = max(1, answer["completion_tokens"] - 1)
    answer["decode_bytes_per_token"] = (end.bytes_read - after_prompt.bytes_read) / steps
    expert_nbytes = getattr(loaded.open(), "expert_nbytes", 0)
    answer["decode_bytes_in_vain"] = (end.unwanted - after_prompt.unwanted) * expert_nbytes / steps
    hits, misses = end.hits - after_prompt.hits, end.misses - after_prompt.misses
    answer["decode_hit_rate"] = hits / max(1, hits + misses)
    print(json.dumps(answer))
"""
_DISK = """
import sys
from pathlib import Path
from spile.architectures import open_model
from spile.engines.cpu.trial_reads import stream_rate
from spile.files.checkpoint import open_checkpoint
from spile.residency.experts import ExpertTable
from spile.residency.store import Store
model = open_model(open_checkpoint(Path(sys.argv[1])))
print(stream_rate(ExpertTable(model), Store(model.checkpoint.shards, direct=True)))
"""


def main() -> None:
    parser = argument_parser(__doc__)
    arguments = parser.parse_args()
    prompt = prompt_of(arguments.model, arguments.prompt_tokens)
    heading = (
        "budget",
        "mode",
        "prompt tok/s",
        "decode tok/s",
        "VmHWM",
        "charged",
        "read",
        "hits",
        "of ceiling",
    )
    print("{:>9} {:>5} {:>13} {:>13} {:>8} {:>8} {:>8} {:>6} {:>10}".format(*heading))
    print_rows(arguments, lambda budget, mode: measure(arguments, budget, mode, prompt), _line)


def print_rows(
    arguments: argparse.Namespace,
    row_of: Callable[[str, str], dict[str, Any]],
    line_of: Callable[[dict[str, Any]], str],
) -> None:
    """Print a line for each budget and mode as its row is there, and all rows as JSON."""
    rows = []
    for budget in arguments.budgets.split(","):
        for mode in arguments.modes.split(","):
            rows.append(row_of(budget, mode))
            print(line_of(rows[-1]), flush=True)
    print(json.dumps(rows))


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--budgets", default="300MB,630MB,1GB,2GB,resident")
    parser.add_argument("--modes", default="cold,warm")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="about so many")
    parser.add_argument("--context", type=int, help="for prompts longer than a budget's own context")
    parser.add_argument("--throttle", type=parse_size, help="bytes a second that the disk may read")
    parser.add_argument("--python", default=sys.executable)
    return parser


def prompt_of(model: str, num_tokens: int) -> str:
    """Return the beginning of a real text, so many tokens of it."""
    from spile.files.hub import resolve
    from spile.text.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(resolve(model), config={}, keep=True)
    assert tokenizer is not None, "the model has a tokenizer"
    text = TEXT.read_text(encoding="utf-8")
    while len(tokenizer.encode(text)) < num_tokens:
        text += text
    return tokenizer.decode(tokenizer.encode(text)[:num_tokens])


def measure(arguments: argparse.Namespace, budget: str, mode: str, prompt: str) -> dict[str, Any]:
    """Run one answer; a run that fails is a row too."""
    options = options_of(budget, mode) | ({"context": arguments.context} if arguments.context else {})
    limit = options.get("memory")
    row: dict[str, Any] = {
        "budget": budget,
        "budget_bytes": limit,
        "mode": mode,
        "throttle": arguments.throttle,
    }
    rates = []
    if mode == "cold":
        rates.append(disk_rate(arguments))
    prepare(arguments.model, mode)
    group_limit = limit if mode == "cold" else None
    done, groups = run_inside(
        [arguments.python, "-c", _ANSWER, json.dumps([arguments.model, options, arguments.tokens])],
        prompt,
        Groups(arguments.model, group_limit, arguments.throttle),
    )
    row |= {"exit": done.returncode, **groups.found}
    if done.returncode != 0:
        return row | {"error": done.stderr.strip().rpartition("\n")[2]}
    row |= json.loads(done.stdout)
    del row["bytes_read"]
    row["bytes_read"] = json.loads(done.stdout)["bytes_read"]
    if mode == "cold":
        rates.append(disk_rate(arguments))
        row["disk_bytes_per_second"] = sum(rates) / len(rates)
        missed = row["decode_bytes_per_token"] - row["decode_bytes_in_vain"]
        speed = row["tokens_per_second"]
        row["of_ceiling"] = speed * missed / row["disk_bytes_per_second"] if missed and speed else None
    return row


def options_of(budget: str, mode: str) -> dict[str, Any]:
    """Return what `spile.load` takes for a budget. A pool of so many slots, which no group bounds, is cold by direct
    reads.
    """
    if budget == "resident":
        return {}
    if budget.endswith("active"):
        io = "direct" if mode == "cold" else "buffered"
        return {"active_experts": int(budget.removesuffix("active")), "io": io}
    return {"memory": parse_size(budget)}


def prepare(model: str, mode: str) -> None:
    """Drop the page cache, or read all files of the model into it."""
    if mode == "cold":
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return
    for path in sorted(Path(model).glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 22):
                pass


def disk_rate(arguments: argparse.Namespace) -> float:
    """Bytes a second of direct reads of random experts, under the same throttle."""
    command = [arguments.python, "-c", _DISK, arguments.model]
    done, _ = run_inside(command, "", Groups(arguments.model, None, arguments.throttle))
    done.check_returncode()
    return float(done.stdout)


def run_inside(
    command: list[str], text: str, groups: "Groups"
) -> tuple["subprocess.CompletedProcess[str]", "Groups"]:
    """Run a command in control groups, with an empty cache folder of its own."""
    with groups, tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            preexec_fn=groups.enter,
            env=os.environ | {"XDG_CACHE_HOME": cache},
        )
    return done, groups


class Groups:
    """Control groups of version 1 or 2: a hard memory limit without swap, and a throttled disk.

    `found` holds what was seen once they are left: the most bytes charged as the kernel counted them, the most that a
    sample every 5 ms saw, and the number of kills; None without a limit.
    """

    def __init__(self, model: str, limit: int | None, throttle: int | None) -> None:
        self._model, self._limit, self._throttle = Path(model), limit, throttle
        self._v1 = not (_CGROUPS / "cgroup.controllers").exists()
        self._folders: dict[str, Path] = {}
        self._cleanup = ExitStack()
        self.found: dict[str, Any] = dict.fromkeys(("charged_peak_bytes", "charged_sampled_bytes", "killed"))

    def __enter__(self) -> "Groups":
        if self._limit is not None:
            folder = self._make("memory")
            _write(folder / ("memory.limit_in_bytes" if self._v1 else "memory.max"), str(self._limit))
            if not self._v1:
                _write(folder / "memory.swap.max", "0")
            self._sampler = _Sampler(folder / ("memory.usage_in_bytes" if self._v1 else "memory.current"))
        if self._throttle is not None:
            folder = self._make("blkio")
            disk = _disk_of(self._model)
            if self._v1:
                _write(folder / "blkio.throttle.read_bps_device", f"{disk} {self._throttle}")
            else:
                _write(folder / "io.max", f"{disk} rbps={self._throttle}")
        return self

    def enter(self) -> None:
        for folder in self._folders.values():
            _write(folder / "cgroup.procs", str(os.getpid()))

    def __exit__(self, *_: object) -> None:
        if self._limit is not None:
            folder = self._folders["memory"]
            self.found["charged_sampled_bytes"] = self._sampler.stop()
            peak = folder / ("memory.max_usage_in_bytes" if self._v1 else "memory.peak")
            self.found["charged_peak_bytes"] = int(peak.read_text())
            events = (folder / ("memory.oom_control" if self._v1 else "memory.events")).read_text()
            kills = (int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))
            self.found["killed"] = sum(kills)
        for folder in set(self._folders.values()):
            folder.rmdir()

    def _make(self, controller: str) -> Path:
        folder = (_CGROUPS / controller if self._v1 else _CGROUPS) / f"spile-bench-{os.getpid()}"
        folder.mkdir(exist_ok=not self._v1)
        self._folders[controller] = folder
        return folder


class _Sampler:
    """Reads a number from a file again and again, and keeps the largest."""

    def __init__(self, path: Path) -> None:
        self._path, self._most, self._done = path, 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_SECONDS):
            self._most = max(self._most, int(self._path.read_text()))

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._most


def _disk_of(path: Path) -> str:
    """Return major:minor of the whole disk that holds a path."""
    device = path.stat().st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    return (folder / "dev").read_text().strip()


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _line(row: dict[str, Any]) -> str:
    if row["exit"] != 0:
        return (
            f"{row['budget']:>9} {row['mode']:>5} exit {row['exit']}, killed {row['killed']}: {row['error']}"
        )
    size: Callable[[Any], str] = lambda nbytes: "" if nbytes is None else format_size(nbytes)  # noqa: E731
    ceiling = row.get("of_ceiling")
    return (
        f"{row['budget']:>9} {row['mode']:>5} {row['prompt_tokens_per_second']:>13.1f} "
        f"{row['tokens_per_second'] or 0:>13.1f} {size(row['peak_memory_bytes']):>8} "
        f"{size(row['charged_peak_bytes']):>8} {size(row['bytes_read']):>8} {row['decode_hit_rate']:>6.1%} "
        f"{'' if ceiling is None else format(ceiling, '.2f'):>10}"
    )


if __name__ == "__main__":
    main()
