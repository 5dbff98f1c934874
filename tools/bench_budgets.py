"""A full-size model and a list of budgets -> speed and memory of `spile generate` at each, as a table and
JSON.

    python tools/bench_budgets.py MODEL [--budgets 300MB,630MB,1GB,2GB,resident] [--modes cold,warm] [--tokens
    64]

What bounds it: a token of the full-size Maple wants 152 MB of experts; what of it is not resident comes from
the disk (cold) or from the page cache (warm). "cold" drops the page cache first and, where a budget is given,
runs inside a control group whose hard limit is the budget, page cache counted: the proof that nothing else is
used. That needs root and Linux; "warm" needs neither, and has the page cache outside the budget.

Prints one row a run; the last line is JSON, a list of objects with sizes in bytes and null for what is
unknown.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from spile.sizes import format_size, parse_size

_SENTENCE = "The sugar maker walked from tree to tree, and from every spile the sap fell a drop at a time. "
_MEMORY_V1, _MEMORY_V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--budgets", default="300MB,630MB,1GB,2GB,resident")
    parser.add_argument("--modes", default="cold,warm")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="about so many")
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    prompt = _prompt(arguments.model, arguments.prompt_tokens)
    rows = []
    heading = ("budget", "mode", "prompt tok/s", "decode tok/s", "peak", "charged", "read", "hits")
    print("{:>9} {:>5} {:>13} {:>13} {:>8} {:>8} {:>8} {:>6}".format(*heading))
    for budget in arguments.budgets.split(","):
        for mode in arguments.modes.split(","):
            row = _run(arguments, budget, mode, prompt)
            rows.append(row)
            print(_line(row), flush=True)
    print(json.dumps(rows))


def _prompt(model: str, num_tokens: int) -> str:
    from spile.files.hub import resolve
    from spile.text.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(resolve(model), config={}, keep=True)
    assert tokenizer is not None, "the model has a tokenizer"
    text = _SENTENCE
    while len(tokenizer.encode(text)) < num_tokens:
        text += f"{len(text)}. {_SENTENCE}"
    ids = tokenizer.encode(text)[:num_tokens]
    return tokenizer.decode(ids)


def _run(arguments: argparse.Namespace, budget: str, mode: str, prompt: str) -> dict[str, Any]:
    command = [arguments.python, "-m", "spile", "generate", "-m", arguments.model, "--raw", "--json"]
    command += ["--max-tokens", str(arguments.tokens), "--seed", "1", "-"]
    limit = None if budget == "resident" else parse_size(budget)
    if limit is not None:
        command += ["--memory", str(limit)]
    if mode == "cold":
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    group = _Group(limit) if mode == "cold" and limit is not None else None
    with tempfile.TemporaryFile("w+") as errors:
        enter = group.enter if group else None
        done = subprocess.run(
            command, input=prompt, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=enter
        )
        charged, killed = group.leave() if group else (None, None)
        errors.seek(0)
        said = errors.read().strip()
    row: dict[str, Any] = {"budget": budget, "budget_bytes": limit, "mode": mode, "exit": done.returncode}
    row |= {"charged_peak_bytes": charged, "killed": killed, "plan": said.partition("\n")[0]}
    if done.returncode == 0:
        answer = json.loads(done.stdout)
        del answer["text"], answer["token_ids"]
        row |= answer
    else:
        row["error"] = said.rpartition("\n")[2]
    return row


def _line(row: dict[str, Any]) -> str:
    if row["exit"] != 0:
        outcome = f"exit {row['exit']}, killed {row['killed']}: {row['error']}"
        return f"{row['budget']:>9} {row['mode']:>5} {outcome}"
    wanted = row["expert_hits"] + row["expert_misses"]
    charged = "" if row["charged_peak_bytes"] is None else format_size(row["charged_peak_bytes"])
    return (
        f"{row['budget']:>9} {row['mode']:>5} {row['prompt_tokens_per_second']:>13.1f} "
        f"{row['tokens_per_second'] or 0:>13.1f} {format_size(row['peak_memory_bytes']):>8} {charged:>8} "
        f"{format_size(row['bytes_read']):>8} {row['expert_hits'] / max(1, wanted):>6.1%}"
    )


class _Group:
    """A memory control group with a hard limit, version 1 or 2; swap is not allowed to help."""

    def __init__(self, limit: int) -> None:
        self._v1 = (_MEMORY_V1 / "memory.limit_in_bytes").exists()
        self._folder = (_MEMORY_V1 if self._v1 else _MEMORY_V2) / f"spile-bench-{os.getpid()}"
        self._folder.mkdir()
        self._set("memory.limit_in_bytes" if self._v1 else "memory.max", str(limit))
        if not self._v1:
            self._set("memory.swap.max", "0")

    def enter(self) -> None:
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def leave(self) -> tuple[int, int]:
        """Return the most bytes charged and the number of kills; remove the group."""
        peak = int((self._folder / ("memory.max_usage_in_bytes" if self._v1 else "memory.peak")).read_text())
        events = (self._folder / ("memory.oom_control" if self._v1 else "memory.events")).read_text()
        kills = [int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill ")]
        self._folder.rmdir()
        return peak, sum(kills)

    def _set(self, name: str, value: str) -> None:
        (self._folder / name).write_text(value)


if __name__ == "__main__":
    main()
