"""The mlx engine behind spile's one interface: chunks, states, budgets, refusals; and what it must not do."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)
pytest.importorskip("mlx_lm", exc_type=ImportError)

import spile
from mlx_architectures import Quantization, write_tiny
from spile.architectures import open_model
from spile.architectures.foreign import foreign_types, open_foreign
from spile.architectures.spec import OwnModel
from spile.engines import open_engine
from spile.engines.mlx import adapter
from spile.engines.mlx.engine import MlxEngine, products_per_token
from spile.errors import (
    BudgetError,
    CheckpointError,
    ContextError,
    OptionError,
    SpileError,
    UnsupportedModelError,
)
from spile.files.checkpoint import open_checkpoint
from spile.making.synth import PRESETS
from spile.options import EngineOptions
from spile.sizes import format_size

IDS = np.random.default_rng(5).integers(0, 128, 150).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny checkpoints by architecture, each written once."""
    root = tmp_path_factory.mktemp("mlx")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            write_tiny(root / name, name, quantization=Quantization())
        return root / name

    return folder


def test_the_summary_names_what_will_be_used_not_what_is_free(folders: Callable[[str], Path]) -> None:
    for options in ({"slots": 4}, {"flash_moe": True}, {"active_experts": 3}):
        engine = opened(folders("qwen3_moe"), **options)
        assert engine.plan.budget_nbytes == engine.plan.parts.total
        assert engine.summary().startswith(f"memory {format_size(engine.plan.parts.total)}: ")
        engine.close()
    engine = opened(folders("qwen3_moe"), memory_bytes=2 * 10**9, slots=4)
    assert engine.summary().startswith("memory 2.00 GB: ")
    engine.close()


def test_a_maple_that_is_hopeless_without_a_gpu_says_so_with_the_figure_and_what_to_do(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = PRESETS["maple-20b"].spec()
    assert products_per_token(large) == 1_166_802_944  # worked out by hand: 251.7 + 604.0 + 311.2 M
    for slow, words in ((False, ()), (True, ("CPU backend", "about 0.02 tokens a second", "--engine cpu"))):
        if slow:
            own = OwnModel(open_checkpoint(golden / "mlx-2bit"), large)
            monkeypatch.setattr("spile.engines.mlx.engine.open_own", lambda checkpoint, own=own: own)
        engine = open_engine(open_model(open_checkpoint(golden / "mlx-2bit")), EngineOptions(engine="mlx"))
        notes = " ".join(engine.notes)
        assert all(word in notes for word in words)
        assert ("tokens a second" in notes) == slow
        engine.close()


def opened(folder: Path, **options: Any) -> MlxEngine:
    engine = open_engine(open_foreign(open_checkpoint(folder)), EngineOptions(**options))
    assert isinstance(engine, MlxEngine)
    return engine


def written(engine: MlxEngine, num_tokens: int = 16) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the logits of a prompt and of a greedy answer to it."""
    state = engine.new_state()
    rows = [engine.prefill(state, IDS)]
    while len(rows) < num_tokens:
        rows.append(engine.decode(state, int(rows[-1].argmax())))
    return np.stack(rows)


def test_answers_do_not_depend_on_the_pool(folders: Callable[[str], Path]) -> None:
    expected = None
    for options in (
        {},
        {"slots": 1},
        {"slots": 5},
        {"slots": 32},
        {"active_experts": 3},
        {"flash_moe": True},
    ):
        engine = opened(folders("qwen3_moe"), prefill_chunk=48, **options)
        got = written(engine)
        assert expected is None or np.array_equal(got, expected), options
        assert engine.counters().misses > 0 or not options
        expected = got
        engine.close()
        engine.close()


def test_a_prompt_in_pieces_and_whole_gives_the_same_bits(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_moe"), prefill_chunk=48, slots=5)
    state, done = engine.new_state(), []
    expected = engine.prefill(state, IDS, lambda *at: done.append(at))
    assert done == [(48, 150), (96, 150), (144, 150), (149, 150), (150, 150)]
    state = engine.new_state()
    for start in (0, 48, 96):
        engine.read(state, IDS[start : start + 48])
    assert np.array_equal(engine.prefill(state, IDS[144:]), expected)
    state = engine.new_state()
    engine.read(state, IDS[:30])  # chunks end at multiples of the chunk, wherever a piece begins
    engine.read(state, IDS[30:48])
    assert state.can_rewind(30)


def test_logits_at_every_position_are_those_of_their_chunks(folders: Callable[[str], Path]) -> None:
    few, every = (opened(folders("gpt_oss"), prefill_chunk=32, slots=slots) for slots in (4, 32))
    expected = every.logits(every.new_state(), IDS)
    assert expected.shape == (150, 128)
    assert np.array_equal(few.logits(few.new_state(), IDS), expected)


def test_a_state_goes_back_to_where_a_computation_ended(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_moe"), prefill_chunk=48, slots=9)
    state = engine.new_state()
    engine.prefill(state, IDS[:60])
    expected = [engine.decode(state, token) for token in IDS[60:70]]
    for position in (60, 48, 0):
        assert state.can_rewind(position)
        state.rewind(position)
        assert state.position == position
        if position < 60:
            engine.prefill(state, IDS[position:60])
        assert all(map(np.array_equal, expected, [engine.decode(state, token) for token in IDS[60:70]]))
    assert not state.can_rewind(30)
    assert not state.can_rewind(71)
    state.close()
    state.close()


def test_a_state_that_cannot_forget_goes_back_to_its_start_alone(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("nemotron_h"), slots=5)
    state = engine.new_state()
    expected = engine.prefill(state, IDS[:20])
    assert not state.can_rewind(19)
    state.rewind(0)
    assert np.array_equal(engine.prefill(state, IDS[:20]), expected)


def test_what_broke_off_is_not_gone_on_from(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(folders("qwen3_moe"), slots=5)
    state = engine.new_state()
    expected = engine.prefill(state, IDS[:20])
    own = type(engine._model.layers[2].mlp).__call__

    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(engine._model.layers[2].mlp), "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.decode(state, 1)
    monkeypatch.setattr(type(engine._model.layers[2].mlp), "__call__", own)
    assert not state.can_rewind(20)
    state.rewind(0)
    assert np.array_equal(engine.prefill(state, IDS[:20]), expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "gemma4_text"])
def test_the_plan_knows_what_a_state_takes(name: str, folders: Callable[[str], Path]) -> None:
    engine = opened(folders(name), slots=5, prefill_chunk=32)
    for num_tokens in (10, 150, 300):
        state = engine.new_state()
        engine.prefill(state, (IDS * 2)[:num_tokens])
        held = sum(cache.nbytes for cache in state.caches)
        assert held <= engine.kv_nbytes(num_tokens) <= 1.35 * held + 16_384
    assert engine.kv_room_nbytes == engine.kv_nbytes(engine.context)


def test_the_smallest_budget_that_is_named_works(folders: Callable[[str], Path]) -> None:
    with pytest.raises(BudgetError) as caught:
        opened(folders("qwen3_moe"), memory_bytes=10_000_000)
    found = re.search(r"--memory (\d+)MB", caught.value.hint or "")
    assert found is not None
    assert re.search(r"needs \d+ MB .* budget is 10", caught.value.message)
    engine = opened(folders("qwen3_moe"), memory_bytes=(int(found[1]) + 8) * 10**6)
    engine.close()


def test_a_budget_can_change_between_tokens(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_moe"), memory_bytes=3 * 10**9, active_experts=4, prefill_chunk=48)
    expected = written(engine)
    assert engine.plan.num_slots == 16
    engine.resize(engine.plan.parts.total - 60_000)
    assert engine.plan.num_slots < 16
    assert np.array_equal(written(engine), expected)
    with pytest.raises(BudgetError, match=r"cannot shrink to 9\.0 MB"):
        engine.resize(9_000_000)
    before = engine.resident_expert_bytes
    engine.lend(50_000)
    assert engine.resident_expert_bytes < before
    assert np.array_equal(written(engine), expected)
    resident = opened(folders("qwen3_moe"))
    with pytest.raises(OptionError, match="no pool to resize"):
        resident.resize(10**9)


def test_a_longer_prompt_than_the_context_is_refused(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_moe"), context=100, slots=5)
    with pytest.raises(ContextError, match="150 tokens do not fit the context of 100"):
        engine.logits(engine.new_state(), IDS)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"reselect_every": 4, "active_experts": 4}, "reselect_every"),
        ({"activation_bytes": 3}, "activation_bytes"),
        ({"flash_head": True}, "flash_head"),
        ({"io": "direct"}, "io"),
        ({"io": "mapped"}, "io"),
        ({"kv_bits": 32}, "kv_bits"),
        ({"active_experts": 1}, "top_k"),
    ],
)
def test_what_this_engine_cannot_do_is_refused_by_name(
    options: dict[str, Any], word: str, folders: Callable[[str], Path]
) -> None:
    with pytest.raises(OptionError, match=word):
        opened(folders("qwen3_moe"), **options)


def test_what_does_nothing_is_said(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_moe"), threads=2, slots=5)
    assert engine.notes == ("threads does nothing on the mlx engine: MLX has threads of its own",)


def test_a_model_without_experts_runs_and_says_that_nothing_is_streamed(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", "llama", quantization=Quantization())
    notes: list[str] = []
    with spile.load(tmp_path / "m", on_note=notes.append) as model:
        ids = [chunk.token_id for chunk in model.stream([1, 2, 3], max_tokens=5, temperature=0.0)]
        assert len(ids) >= 5
        assert "nothing streamed" in (model.summary or "")
    assert any("no experts" in note for note in notes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("quantization", [None, Quantization()])
def test_every_dtype_generates_or_is_refused_in_one_line(
    dtype: str, quantization: Quantization | None, tmp_path: Path
) -> None:
    for name in ("llama", "olmoe"):
        folder = tmp_path / name
        write_tiny(folder, name, dtype=dtype, quantization=quantization)
        refused = name == "olmoe" and quantization is None and dtype != "float32"
        expected: Any = contextlib.nullcontext()
        if refused and not mx.metal.is_available():
            expected = pytest.raises(
                UnsupportedModelError, match=rf"weight is unquantized {dtype}: MLX's CPU"
            )
        notes: list[str] = []
        with expected, spile.load(folder, flash_moe=True, on_note=notes.append) as model:
            assert len(model.generate([1, 2, 3], max_tokens=4, temperature=0.0).token_ids) == 4


@pytest.mark.filterwarnings("ignore:.*no end token")
def test_load_streams_a_foreign_model_and_says_so(folders: Callable[[str], Path]) -> None:
    answers = []
    for options in ({}, {"active_experts": 2, "flash_moe": True}):
        with spile.load(folders("olmoe"), **options) as model:
            done = model.generate(IDS[:30], max_tokens=40, temperature=0.0, logprobs=2)
            answers.append((done.token_ids, done.logprobs))
            assert done.stats.engine == "mlx"
            assert done.stats.exact
            streamed = "8 of 32 experts resident" in (model.summary or "")
            assert streamed == bool(options)
            assert (done.stats.expert_misses > 50) == bool(options)
    assert answers[0] == answers[1]


@pytest.mark.filterwarnings("ignore:.*no end token")
def test_pauses_change_nothing(folders: Callable[[str], Path]) -> None:
    with spile.load(folders("olmoe"), prefill_chunk=32, active_experts=2) as model:
        whole = model.generate(IDS, max_tokens=8, temperature=0.0, logprobs=1)
        chunks = list(model.stream(IDS, max_tokens=8, temperature=0.0, logprobs=1, pauses=True))
    assert sum(chunk.token_id is None and not chunk.finish_reason for chunk in chunks) == 4
    told = [chunk.logprob for chunk in chunks if chunk.token_id is not None]
    assert told == list(whole.logprobs or ())


def test_the_cpu_engine_refuses_a_foreign_model_at_once(folders: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="cpu engine does not run model_type 'olmoe'"):
        spile.load(folders("olmoe"), engine="cpu")


def test_nothing_of_a_folder_is_run(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder, marker = tmp_path / "m", tmp_path / "marker"
    write_tiny(folder, "qwen3_moe", quantization=Quantization())
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text())
    code = {"model_file": "evil.py", "auto_map": {"AutoModel": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps({**config, **code}))
    notes: list[str] = []
    with spile.load(folder, on_note=notes.append) as model:
        assert model.logits([1, 2, 3]).shape == (3, 128)
    assert not marker.exists()
    assert sum("ignored" in note for note in notes) == 2
    (folder / "config.json").write_text(json.dumps({**config, **code, "model_type": "evil"}))
    with pytest.raises(UnsupportedModelError, match="model_type 'evil' is not supported"):
        spile.load(folder)
    (folder / "config.json").write_text(json.dumps({**config, **code, "model_type": "../evil"}))
    with pytest.raises(UnsupportedModelError, match="evil"):
        spile.load(folder)
    assert not marker.exists()


def test_only_the_shards_that_count_are_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_tiny(folder, "qwen3_moe", quantization=Quantization())
    expected = written(opened(folder, slots=4), 3)
    stray = {
        name: array * 0 for name, array in mx.load(str(folder / "model-00001-of-00002.safetensors")).items()
    }
    mx.save_safetensors(str(folder / "model-stray.safetensors"), stray)
    index = folder / "model.safetensors.index.json"
    for name, letter in (("model-00001-of-00002", "a"), ("model-00002-of-00002", "b")):
        (folder / f"{name}.safetensors").rename(folder / f"weights-{letter}.safetensors")
        index.write_text(index.read_text().replace(name, f"weights-{letter}"))
    assert np.array_equal(written(opened(folder, slots=4), 3), expected)


def test_weights_that_contradict_the_config_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_tiny(folder, "qwen3_moe", quantization=Quantization())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts": 16}))
    with pytest.raises(CheckpointError, match="mlx-lm cannot load"):
        opened(folder)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"mlx": None}, "needs mlx, which is not installed"),
        ({"mlx-lm": None}, "needs mlx-lm, which is not installed"),
        ({"mlx": "0.33.0"}, "mlx is 0.33.0 and spile was tested with 0.32.4 up to below 0.33"),
        ({"mlx": "0.31.9"}, "mlx is 0.31.9"),
        ({"mlx-lm": "0.31.3"}, "mlx-lm is 0.31.3"),
    ],
)
def test_another_mlx_is_refused_with_the_command_that_helps(
    found: dict[str, str | None], words: str, monkeypatch: pytest.MonkeyPatch, folders: Callable[[str], Path]
) -> None:
    own = importlib.metadata.version

    def version(package: str) -> str:
        if package in found:
            if found[package] is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return str(found[package])
        return own(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UnsupportedModelError, match=re.escape(words)) as caught:
        spile.load(folders("olmoe"))
    assert caught.value.hint is not None
    assert "pip install 'spile[mlx]'" in caught.value.hint


@pytest.mark.parametrize("module", adapter.NAMES)
def test_mlx_lm_still_has_every_name_that_is_used(module: str) -> None:
    found = importlib.import_module(module)
    for name in adapter.NAMES[module]:
        assert hasattr(found, name), f"mlx-lm has no {module}.{name} any more: look where the adapter uses it"


def test_a_name_that_mlx_lm_lost_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models import cache

    monkeypatch.delattr(cache, "trim_prompt_cache")
    with pytest.raises(UnsupportedModelError, match=r"no mlx_lm\.models\.cache\.trim_prompt_cache any more"):
        adapter.require()


def test_model_types_are_those_that_mlx_lm_can_build() -> None:
    from mlx_lm.utils import MODEL_REMAPPING

    assert set(MODEL_REMAPPING) < foreign_types()
    assert {"qwen3_moe", "llama", "gpt_oss"} < foreign_types()


def test_importing_mlx_lm_leaves_the_limit_of_open_files() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 3000));"
        "from spile.engines.mlx import adapter; adapter.require(); import mlx_lm.utils;"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (3000, 3000);"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 3000))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["generate", "--max-tokens", "2", "--engine", "cpu", "Once"]]
)
def test_help_and_the_cpu_engine_import_no_mlx(arguments: list[str]) -> None:
    code = (
        "import sys; from spile.__main__ import main; sys.argv = ['spile', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit as error:\n    assert not error.code, error.code\n"
        "heavy = [name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm', 'transformers')]\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


def test_mlx_lm_is_imported_in_one_file() -> None:
    source = Path(spile.__file__).parent
    pattern = re.compile(r"^\s*(?:from mlx_lm|import mlx_lm)|[\"']mlx_lm\.", re.MULTILINE)
    users = {
        str(path.relative_to(source)) for path in source.rglob("*.py") if pattern.search(path.read_text())
    }
    assert users <= {"engines/mlx/adapter.py", "mlx.py"}, "mlx.py shows it in its docstring"


def test_plan_tells_where_a_foreign_models_bytes_go(
    folders: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from spile.cli import run

    assert run(["plan", str(folders("qwen3_moe")), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["engine"] == "mlx"
    assert planned["num_experts"] == 32
    assert planned["parts"]["experts"] == 32 * 7680


def test_verbose_tells_mlx_peak_beside_the_processs(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_moe"), slots=4)
    written(engine, 2)
    assert re.fullmatch(r"most memory: .*B of MLX's arrays, .*B of the process", engine.memory_text)


def test_an_engine_that_was_closed_is_not_used(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_moe"), slots=4)
    state = engine.new_state()
    engine.close()
    with pytest.raises((AssertionError, SpileError)):
        engine.decode(state, 1)
