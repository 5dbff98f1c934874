"""What was read of earlier prompts on the mlx engine is not read again, and the bits are those of a fresh run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", exc_type=ImportError)
pytest.importorskip("mlx_lm", exc_type=ImportError)

import spile
from mlx_architectures import Quantization, write_tiny
from serving import running
from spile.architectures import open_model
from spile.engines import open_engine
from spile.engines.base import CopyableState
from spile.engines.mlx.engine import MlxEngine
from spile.errors import OptionError, PromptFileError
from spile.files.checkpoint import open_checkpoint
from spile.generation.generate import generate
from spile.generation.held import Held
from spile.generation.options import Sampling
from spile.generation.prompt_cache import PromptCache
from spile.generation.prompt_folder import PromptFolder
from spile.making.synth import SynthShape, write_checkpoint
from spile.options import EngineOptions

CHUNK = 32
DEMO = Path(spile.__file__).parent / "demo" / "model"
MAPLE = SynthShape(
    num_hidden_layers=4, full_attention_interval=2, sliding_window=16, head_dim=64, tokenizer_entries=0
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny checkpoints by architecture, each written once."""
    root = tmp_path_factory.mktemp("mlx")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            if name == "maple":
                write_checkpoint(root / name, MAPLE)
            else:
                write_tiny(root / name, name, quantization=Quantization())
        return root / name

    return folder


def opened(folder: Path, **options: Any) -> MlxEngine:
    asked = {"engine": "mlx", "prefill_chunk": CHUNK, **options}
    engine = open_engine(open_model(open_checkpoint(folder)), EngineOptions(**asked))
    assert isinstance(engine, MlxEngine)
    return engine


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 128, count).tolist()


class Recorder:
    """An engine that remembers the bits of every logit it gave."""

    def __init__(self, engine: MlxEngine) -> None:
        self._engine = engine
        self.given: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, *arguments: Any) -> Any:
        logits = self._engine.prefill(*arguments)
        self.given.append(logits.tobytes())
        return logits

    def decode(self, *arguments: Any) -> Any:
        logits = self._engine.decode(*arguments)
        self.given.append(logits.tobytes())
        return logits


def told(engine: MlxEngine, prompt: Sequence[int], **more: Any) -> tuple[int, list[bytes]]:
    """Return how many tokens were read before, and the bits of all logits of a greedy answer."""
    recorder: Any = Recorder(engine)
    sampling = Sampling(temperature=0.0, max_tokens=6)
    *_, last = generate(recorder, prompt, sampling=sampling, num_entries=128, eos_ids=frozenset((1,)), **more)
    assert last.stats is not None
    return last.stats.cached_tokens, recorder.given


def in_folder(folder: Path) -> PromptCache:
    notes: list[str] = []
    cache = PromptCache(
        0, lambda identity: PromptFolder(folder, 1 << 30, identity, notes.append), on_note=notes.append
    )
    return cache


@pytest.mark.parametrize(
    ("name", "bits", "place"),
    [
        ("qwen3_moe", 16, "memory"),
        ("gpt_oss", 16, "memory"),
        ("gpt_oss", 8, "folder"),
        ("maple", 8, "memory"),
        ("deepseek_v3", 16, "folder"),
    ],
)
def test_longest_run_of_chunks_is_not_read_again_whatever_came_between(
    name: str, bits: int, place: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """P+Q, P, P+R, P+Q again: prompts that go several times around a window."""
    engine = opened(folders(name), kv_bits=bits)
    cache = PromptCache(64_000_000) if place == "memory" else in_folder(tmp_path)
    P, Q, R = ids(150, 1), ids(75, 2), ids(40, 3)
    reused = []
    for prompt in (P + Q, P, P + R, P + Q, P[:129]):
        found, expected = told(engine, prompt, cache=cache), told(engine, prompt)
        assert len(found[1]) > 1
        assert found[1] == expected[1], f"{found[0]} of {len(prompt)}"
        reused.append(found[0])
    # A folder keeps windows where prompts ended alone: P is read anew once, and then leaves its end.
    first = 0 if place == "folder" and engine.new_state().window else 128
    assert reused == [0, first, 128, 224, 128]


def test_prompt_of_whole_chunks_leaves_its_last_token_to_be_computed(folders: Callable[[str], Path]) -> None:
    engine, cache = opened(folders("qwen3_moe")), PromptCache(64_000_000)
    for count, expected in ((128, 0), (128, 96), (129, 96), (129, 128), (32, 0), (33, 32)):
        found = told(engine, ids(200, 1)[:count], cache=cache)
        assert found == (expected, told(engine, ids(200, 1)[:count])[1])


def test_conversation_that_goes_on_keeps_only_whole_chunks(folders: Callable[[str], Path]) -> None:
    """A state that lives on holds an answer's keys too, which nobody else may go on from."""
    engine, cache, held = opened(folders("maple")), PromptCache(64_000_000), Held()
    first = ids(70, 1)
    told(engine, first, cache=cache, held=held)
    answer = held.token_ids[70:]
    state = held._state
    assert isinstance(state, CopyableState)
    assert (state.num_reusable, state.position > 70) == (64, True)
    second = [*first, *answer, *ids(60, 2)]
    told(engine, second, cache=cache, held=held)
    held.close()
    for prompt in (second, first, [*first[:64], *ids(40, 3)]):
        assert told(engine, prompt, cache=cache)[1] == told(engine, prompt)[1]


def test_what_broke_off_is_not_kept(folders: Callable[[str], Path]) -> None:
    state = opened(folders("qwen3_moe")).new_state()
    assert isinstance(state, CopyableState)
    state.advance(CHUNK)
    assert state.num_reusable == CHUNK
    state.spoil()
    assert state.num_reusable == 0


def test_other_kinds_of_layers_are_read_anew_and_say_so(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    notes: list[str] = []
    with spile.load(
        folders("qwen3_next"), prompt_cache_bytes=10**7, prefill_chunk=16, on_note=notes.append
    ) as model:
        for _ in range(2):
            assert model.generate(ids(60, 1), max_tokens=2).stats.cached_tokens == 0
        assert [note for note in notes if "anew" in note] == [
            "every prompt is read anew: what this model's layers keep (ArraysCache, KVCache) cannot be put back"
        ]
        stream = pytest.raises(OptionError, match="the mlx engine cannot copy this model's states")
        with stream:
            model.stream(ids(60, 1), save_prompt=tmp_path / "p.kv")
    assert not (tmp_path / "p.kv").exists()


def test_plan_counts_what_earlier_prompts_may_take(folders: Callable[[str], Path]) -> None:
    assert opened(folders("gpt_oss"), prompt_cache_bytes=10**7).plan.parts.prompts == 10**7
    assert opened(folders("qwen3_next"), prompt_cache_bytes=10**7).plan.parts.prompts == 0


# -- the demo model, in files and behind a server --

TEXT = "Sap runs in spring because of the cold nights and of the warm days that come after them. " * 3


def demo(**options: Any) -> Any:
    return spile.load(DEMO, engine="mlx", prefill_chunk=16, on_note=lambda note: None, **options)


def test_saved_prompt_is_gone_on_from_as_if_read(tmp_path: Path) -> None:
    path, asked = tmp_path / "p.kv", {"raw": True, "temperature": 0, "max_tokens": 8, "logprobs": 5}
    with demo() as model:
        model.generate(TEXT, save_prompt=path, **asked)
        found = model.generate("And then?", load_prompt=path, **asked)
        expected = model.generate(TEXT + "And then?", **asked)
        assert found.stats.cached_tokens >= 16
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
        given = [*model.encode(TEXT, raw=True), 5, 6, 7]
        (tmp_path / "q.kv").unlink(missing_ok=True)
        model.generate(given[:-3], save_prompt=tmp_path / "q.kv", max_tokens=1)
        more = {"temperature": 0, "max_tokens": 8, "logprobs": 5}
        found = model.generate([5, 6, 7], load_prompt=tmp_path / "q.kv", **more)
        assert found.stats.prompt_tokens == len(given), "what follows the last whole chunk too"
        assert found.logprobs == model.generate(given, **more).logprobs
        with pytest.raises(OptionError, match=r"save_prompt needs more than 16 tokens .* has 16"):
            model.stream(given[:16], save_prompt=tmp_path / "r.kv")
    with (
        spile.load(DEMO, engine="mlx", prefill_chunk=32) as model,
        pytest.raises(PromptFileError, match="saved with prefill chunk 16, and this is 32"),
    ):
        model.generate("And then?", load_prompt=path, **asked)


def test_server_does_not_read_the_same_request_again() -> None:
    with running(lambda: demo(prompt_cache_bytes=32_000_000, context=512)) as server:
        body = {"model": "tiny", "prompt": TEXT, "max_tokens": 8}
        replies = [server.send("/v1/completions", body) for _ in range(3)]
    assert [reply.status for reply in replies] == [200] * 3
    cached = [reply.body["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert cached[0] == 0
    assert cached[1] == cached[2] > 0
    assert len({reply.body["choices"][0]["text"] for reply in replies}) == 1
