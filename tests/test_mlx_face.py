"""`spile.mlx` inside of somebody's own mlx-lm program: generate, batches and the server's classes go on as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)
mlx_lm = pytest.importorskip("mlx_lm", exc_type=ImportError)

from tokenizers import Tokenizer, models, pre_tokenizers

import spile.mlx
from mlx_architectures import Quantization, write_tiny
from spile.errors import BudgetError, UnsupportedModelError

PROMPT = [5, 17, 99, 3, 42, 8, 8, 120, 64, 7, 31]


def give_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 128 words, t0 to t127."""
    words = {f"t{number}": number for number in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t127"})
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mlx") / "m"
    write_tiny(folder, "qwen3_moe", quantization=Quantization())
    give_tokenizer(folder)
    return folder


def answer(model: Any, tokenizer: Any, **options: Any) -> list[tuple[int, bytes]]:
    """Return ids and the bits of the log-probabilities that mlx_lm's own loop gives."""
    return [
        (int(one.token), np.array(one.logprobs.astype(mx.float32)).tobytes())
        for one in mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=24, **options)
    ]


def test_mlx_lm_generates_the_same_from_a_streamed_model(folder: Path) -> None:
    model, tokenizer = mlx_lm.load(str(folder), lazy=True)
    expected = answer(model, tokenizer)
    text = mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=24)
    for slots in (2, 9):
        model, tokenizer = mlx_lm.load(str(folder), lazy=True)
        streaming = spile.mlx.stream_experts(model, folder, slots=slots)
        assert answer(model, tokenizer) == expected
        assert mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=24) == text
        counters = streaming.counters()
        assert counters.evictions > 50
        assert counters.bytes_read > 0
        streaming.close()


def test_a_batch_gives_the_same_from_a_streamed_model(folder: Path) -> None:
    prompts = [PROMPT, PROMPT[:4], [9] * 20]

    def batch(model: Any, tokenizer: Any) -> tuple[list[list[int]], list[list[float]]]:
        done = mlx_lm.batch_generate(
            model, tokenizer, prompts, max_tokens=12, return_token_ids=True, return_logprobs=True
        )
        return done.token_ids, done.logprobs

    model, tokenizer = mlx_lm.load(str(folder), lazy=True)
    expected = batch(model, tokenizer)
    model, tokenizer = mlx_lm.load(str(folder), lazy=True)
    with_slots = spile.mlx.stream_experts(model, folder, slots=3)
    assert batch(model, tokenizer) == expected
    with_slots.close()


def served(folder: Path, load: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what mlx_lm's server answers to three requests at once, with `load` in place of its loader."""
    import sys
    import threading
    from concurrent.futures import ThreadPoolExecutor
    from http.server import ThreadingHTTPServer
    from urllib.request import Request, urlopen

    from mlx_lm import server

    providers: list[Any] = []
    monkeypatch.setattr(server, "run", lambda host, port, provider: providers.append(provider))
    monkeypatch.setattr(server, "load", load)
    monkeypatch.setattr(server, "load_processor", lambda model, config: None)
    monkeypatch.setattr(sys, "argv", ["server", "--model", str(folder), "--log-level", "ERROR"])
    server.main()
    generator = server.ResponseGenerator(providers[0], server.LRUPromptCache(10))
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), lambda *a, **k: server.APIHandler(generator, *a, **k))
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{httpd.server_port}/v1/completions"

    def ask(number: int) -> Any:
        body = {"model": "default_model", "prompt": f"t{number} t2 t3 t4", "max_tokens": 12, "logprobs": True}
        request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as reply:
            return json.load(reply)["choices"][0]

    try:
        first = ask(9)  # alone: requests that come together are batched as they happen to come
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(ask, (1, 2, 3)))
        return [first, *(choice["text"] for choice in together)]
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
        generator.stop_and_join()


def test_the_server_of_mlx_lm_answers_from_a_streamed_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []

    def load(path: str, **options: Any) -> Any:
        model, *rest = mlx_lm.load(path, lazy=True, **options)
        kept.append(spile.mlx.stream_experts(model, path, slots=3))
        return model, *rest

    expected = served(folder, mlx_lm.load, monkeypatch)
    answers = served(folder, load, monkeypatch)
    assert answers[0] == expected[0], "token ids and log-probabilities"
    assert answers[1:] == expected[1:]
    assert kept[0].counters().evictions > 20
    kept[0].close()


def test_a_model_that_was_read_whole_gives_its_experts_memory_back(folder: Path) -> None:
    model, tokenizer = mlx_lm.load(str(folder))
    expected = answer(model, tokenizer)
    mx.clear_cache()
    before = mx.get_active_memory()
    streaming = spile.mlx.stream_experts(model, folder, slots=4)
    assert mx.get_active_memory() < before - 150_000, "28 of 32 experts are 215 kB"
    assert answer(model, tokenizer) == expected
    streaming.close()


def test_where_all_fits_the_model_stays_as_it_was(folder: Path) -> None:
    model, _ = mlx_lm.load(str(folder), lazy=True)
    kinds = {path: type(module) for path, module in model.named_modules()}
    streaming = spile.mlx.stream_experts(model, folder, memory="3GB")
    assert {path: type(module) for path, module in model.named_modules()} == kinds
    assert "all 32 experts resident" in streaming.summary()


def test_a_budget_that_is_too_small_leaves_the_model_as_it_was(folder: Path) -> None:
    model, tokenizer = mlx_lm.load(str(folder), lazy=True)
    expected = answer(model, tokenizer)
    with pytest.raises(BudgetError, match=r"needs \d+ MB"):
        spile.mlx.stream_experts(model, folder, memory="20MB")
    assert answer(model, tokenizer) == expected


def test_another_models_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", "olmoe", quantization=Quantization())
    model, _ = mlx_lm.load(str(folder), lazy=True)
    with pytest.raises(UnsupportedModelError, match=r"has shape \(8, 64, 8\) and its file \(8, 128, 8\)"):
        spile.mlx.stream_experts(model, tmp_path / "m", slots=4)


def test_a_registered_maple_loads_in_mlx_lm_without_its_code(golden: Path, tmp_path: Path) -> None:
    folder = tmp_path / "maple"
    folder.mkdir()
    for path in (golden / "mlx-2bit").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    marker = tmp_path / "marker"
    (folder / "maple.py").write_text(f"open({str(marker)!r}, 'w').close()")
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "maple.py"}))
    spile.mlx.register()
    spile.mlx.register()
    model, _ = mlx_lm.utils.load_model(folder, lazy=True)
    ids = mx.array([[1, 2, 3, 4, 5, 6, 7]])
    expected = np.array(model(ids).astype(mx.float32))
    model, _ = mlx_lm.utils.load_model(folder, lazy=True)
    streaming = spile.mlx.stream_experts(model, folder, slots=3)
    assert np.array_equal(np.array(model(ids).astype(mx.float32)), expected)
    assert streaming.counters().misses > 0
    assert not marker.exists()
    streaming.close()
