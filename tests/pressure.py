"""Runs a model and tells what memory it took, as JSON: a program of test_pressure.py, in a process of its own.

python pressure.py FOLDER BUDGET SCENARIO
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import spile
from spile.engines.cpu.engine import CpuEngine


def status(*names: str) -> dict[str, int]:
    """Return fields of /proc/self/status, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1000 for words in lines if words[0][:-1] in names}


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


class Sampler(threading.Thread):
    """Notes the most anonymous memory, swap, and bytes of experts beyond the plan's."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.engine: Any = None
        self.most = {"RssAnon": 0, "VmSwap": 0}
        self.experts_over_plan = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.002):
            for name, nbytes in status(*self.most).items():
                self.most[name] = max(self.most[name], nbytes)
            if self.engine is not None:
                plan = self.engine.plan  # what is set aside for keys and prompts works for experts meanwhile
                over = self.engine.resident_expert_bytes - plan.parts.experts - plan.shared_nbytes
                self.experts_over_plan = max(self.experts_over_plan, over)


def answer(model: spile.Model, prompt: list[int], num_tokens: int = 12) -> list[int]:
    return list(model.generate(prompt, max_tokens=num_tokens, temperature=0.0).token_ids)


def disjoint_prompts(model: spile.Model, sampler: Sampler) -> dict[str, Any]:
    """Prompts of one repeated token each: each is routed to other experts."""
    engine = model.open()
    assert isinstance(engine, CpuEngine)
    sampler.engine = engine
    asked: list[set[tuple[int, int]]] = []
    fetch = engine.experts.fetch

    def record(layer: int, ids: Any, counts: Any, **how: Any) -> Any:
        asked[-1].update((layer, int(expert)) for expert in ids)
        return fetch(layer, ids, counts, **how)

    engine.experts.fetch = record  # type: ignore[method-assign]
    answers = []
    for token in (3, 150, 200):
        asked.append(set())
        answers.append(answer(model, [token] * 40))
    common = set.intersection(*asked)
    return {"answers": answers, "asked": [len(one) for one in asked], "common": len(common)}


def resized(model: spile.Model, sampler: Sampler) -> dict[str, Any]:
    """The pool shrinks and grows while an answer is being given."""
    engine = model.open()
    assert isinstance(engine, CpuEngine)
    plan, slot_nbytes = engine.plan, engine.experts.slot_nbytes
    assert plan.budget_nbytes is not None
    small = plan.budget_nbytes - (plan.num_slots - plan.least_slots - 4) * slot_nbytes
    answer(model, list(range(200)))  # fills the pool
    ids, anonymous = [], []
    for token, chunk in enumerate(model.stream(list(range(100, 140)), max_tokens=40, temperature=0.0)):
        if chunk.token_id is not None:
            ids.append(chunk.token_id)
        if token in (9, 29):
            gc.collect()
            anonymous.append(status("RssAnon")["RssAnon"])
            model.resize(small if token == 9 else plan.budget_nbytes)
            anonymous.append(status("RssAnon")["RssAnon"])
    freed = (plan.num_slots - plan.least_slots - 4) * slot_nbytes
    return {"ids": ids, "anonymous": anonymous, "to_free": freed, "slots": engine.plan.num_slots}


def waiting(model: spile.Model, sampler: Sampler) -> dict[str, Any]:
    """Give half an answer, wait for a line on standard input, give the other half."""
    ids = []
    for token, chunk in enumerate(model.stream(list(range(100, 140)), max_tokens=40, temperature=0.0)):
        if chunk.token_id is not None:
            ids.append(chunk.token_id)
        if token == 19:
            print("half", flush=True)
            sys.stdin.readline()
    return {"ids": ids}


def closed(model: spile.Model, sampler: Sampler) -> dict[str, Any]:
    """Load the model beside the one that runs, answer and close, again and again."""
    folder, budget, _ = sys.argv[1:]
    after, full = [], []
    for _ in range(3):
        with spile.load(folder, memory=2 * int(budget), flash_moe=True, threads=1, context=512) as other:
            answer(other, list(range(200)))
            full.append(status("RssAnon")["RssAnon"])
        after.append(status("RssAnon")["RssAnon"])
    return {"after": after, "full": full}


def main() -> None:
    folder, budget, scenario = sys.argv[1:]
    sampler = Sampler()
    sampler.start()
    before = bytes_from_disk()
    memory = None if budget == "all" else int(budget)
    with spile.load(folder, memory=memory, threads=1, context=512) as model:
        scenarios = {"disjoint": disjoint_prompts, "resized": resized, "waiting": waiting, "closed": closed}
        result = scenarios[scenario](model, sampler)
        summary = model.summary
    sampler.done.set()
    sampler.join()
    result |= {"from_disk": bytes_from_disk() - before, "summary": summary, **sampler.most, **status("VmHWM")}
    result["experts_over_plan"] = sampler.experts_over_plan
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
