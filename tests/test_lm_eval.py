"""lm-eval's own client against a server of the demo model; where lm-eval is installed (LM_EVAL names its command)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import spile
from serving import running

LM_EVAL = os.environ.get("LM_EVAL") or shutil.which("lm_eval")
DEMO = Path(spile.__file__).parent / "demo" / "model"
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
"""
CHOICE = """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}]
"""
TEXT = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
QUESTION = {
    "question": "Once upon a time there was a little",
    "choices": ["girl", "dog", "“naïve 🦊”"],
    "gold": 0,
}
STORY = {"text": "Once upon a time there was a little girl named Lily. She saw a “naïve 🦊” in the park."}


def log_likelihood(model: spile.Model, ids: list[int], start: int) -> float:
    assert model.tokenizer is not None
    logits = model.logits(ids)[:, : model.tokenizer.num_entries].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return float(sum(logits[i - 1, ids[i]] for i in range(start, len(ids))))


@pytest.mark.slow
@pytest.mark.skipif(LM_EVAL is None, reason='needs pip install "lm-eval[api]" transformers')
def test_lm_evals_numbers_are_those_of_the_models_logits(tmp_path: Path) -> None:
    for name, kind, line in (("local_choice", CHOICE, QUESTION), ("local_text", TEXT, STORY)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, folder=tmp_path) + kind)
    with running(lambda: spile.load(DEMO, prefill_chunk=16)) as server:
        arguments = f"base_url={server.url}/v1/completions,model=tiny,tokenizer={DEMO},num_concurrent=2"
        command = [str(LM_EVAL), "--model", "local-completions", "--model_args", arguments]
        command += ["--tasks", "local_choice,local_text", "--include_path", str(tmp_path)]
        command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        done = subprocess.run(command, env=offline, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    samples = {
        path.name.split("_")[2]: json.loads(path.read_text().splitlines()[0])
        for path in (tmp_path / "out").rglob("samples_*.jsonl")
    }
    with spile.load(DEMO) as model:
        assert model.tokenizer is not None
        context = model.encode(QUESTION["question"], raw=True)  # type: ignore[arg-type]
        found = [float(one[0][0]) for one in samples["choice"]["resps"]]
        for number, choice in zip(found, QUESTION["choices"], strict=True):  # type: ignore[call-overload]
            ids = model.encode(f"{QUESTION['question']} {choice}", raw=True)
            assert number == pytest.approx(log_likelihood(model, ids, len(context)), abs=1e-5)
        ids = [max(model.tokenizer.eos_ids), *model.encode(STORY["text"], raw=True)]
        one = samples["text"]["resps"][0]
        number = float(one[0] if isinstance(one, list) else one)
        assert number == pytest.approx(log_likelihood(model, ids, 1), abs=1e-5)
