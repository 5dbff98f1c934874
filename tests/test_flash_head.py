"""The clustered head: which tokens get a logit is compared with a float64 reference, the logits with the exact
head's, bit for bit, wherever the rows lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import spile
from reference import Reference
from spile import _core
from spile.architectures import open_own
from spile.architectures.flash_head import FlashHead, open_flash_head
from spile.engines import open_engine
from spile.engines.base import Engine
from spile.engines.cpu import flash_head as gathering
from spile.errors import CheckpointError, OptionError, UnsupportedModelError
from spile.files.checkpoint import FLASH_HEAD_NAME, INDEX_NAME, open_checkpoint
from spile.files.writer import ShardWriter, Spec
from spile.making.synth import SynthShape, write_checkpoint
from spile.options import EngineOptions
from spile.residency import plan as planning
from spile.residency import weights as counting

SHAPE = SynthShape(num_hidden_layers=3, full_attention_interval=3, vocab_size=1024, tokenizer_entries=0)
CLUSTERS, PROBES, FORCED = 32, 5, [3, 900]
IDS = np.random.default_rng(1).integers(0, SHAPE.vocab_size, 12).tolist()


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["flash_head"] |= values
    path.write_text(json.dumps(config))


def write_beside(folder: Path, tensors: dict[str, tuple[str, NDArray[Any]]]) -> None:
    """Replace the file with the clustered head."""
    path = folder / FLASH_HEAD_NAME
    path.unlink()
    specs = [Spec(name, dtype, data.shape) for name, (dtype, data) in tensors.items()]
    with ShardWriter(path, specs) as shard:
        for name, (_, data) in tensors.items():
            shard.write(name, 0, np.ascontiguousarray(data))


def raw_tensors(path: Path) -> dict[str, tuple[str, NDArray[Any]]]:
    """Read a safetensors file, BF16 as bits."""
    blob = path.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    dtypes = {"U32": np.uint32, "BF16": np.uint16, "I32": np.int32}
    found = {}
    for name, entry in json.loads(blob[8 : 8 + size]).items():
        if name != "__metadata__":
            start, end = (8 + size + at for at in entry["data_offsets"])
            data = np.frombuffer(blob[start:end], dtypes[entry["dtype"]]).reshape(entry["shape"])
            found[name] = entry["dtype"], data
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flash") / "model"
    write_checkpoint(folder, SHAPE, seed=2, flash_head=True)
    edit_config(folder, n_probes=PROBES, force_tokens=FORCED)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(made, tmp_path / "model")


def opened(folder: Path, **options: Any) -> Engine:
    return open_engine(open_own(open_checkpoint(folder)), EngineOptions(**{"flash_head": True, **options}))


def logits(folder: Path, **options: Any) -> NDArray[np.float32]:
    """Logits of a prompt's positions in one chunk, and of a token after it."""
    engine = opened(folder, **options)
    state = engine.new_state()
    rows = engine.logits(state, IDS[:-1])
    rows = np.concatenate([rows, engine.decode(state, IDS[-1])[None]])
    engine.close()
    return rows


@pytest.fixture(scope="module")
def exact(made: Path) -> NDArray[np.float32]:
    return logits(made, flash_head=False)


def reference_tokens(folder: Path) -> list[set[int]]:
    """Which tokens have logits at each position, by float64 scores of the centroids; where the last chosen and
    the first unchosen cluster are so close that two correct computations may differ, all of both."""
    reference = Reference(folder)
    for part in ("weight", "scales", "biases"):
        reference.tensors[f"lm_head.{part}"] = reference.tensors[f"lm_head_flash.centroids.{part}"]
    scores = reference.logits(IDS)  # of the centroids, in the head's place
    token_map = reference.tensors["lm_head_flash.token_map"]
    best = np.argsort(-scores, axis=-1, kind="stable")
    margins = np.take_along_axis(scores, best, axis=-1)
    assert np.abs(margins[:, PROBES - 1] - margins[:, PROBES]).min() > 1e-3
    return [set(FORCED) | set(token_map[row[:PROBES]].reshape(-1).tolist()) for row in best]


def test_only_tokens_of_the_best_clusters_have_logits_and_those_are_exact(
    made: Path, exact: NDArray[np.float32]
) -> None:
    found = logits(made)
    assert found.shape == exact.shape
    for row, wanted, tokens in zip(found, exact, reference_tokens(made), strict=True):
        assert set(np.flatnonzero(np.isfinite(row)).tolist()) == tokens
        ids = sorted(tokens)
        np.testing.assert_array_equal(row[ids], wanted[ids])
        assert np.all(np.delete(row, ids) == -np.inf)


def with_rows(folder: Path) -> None:
    """Add the head's rows in the clusters' order, as some files have them."""
    head, flash = raw_tensors(folder / "model.safetensors"), raw_tensors(folder / FLASH_HEAD_NAME)
    order = flash["lm_head_flash.token_map"][1].reshape(-1)
    for part in ("weight", "scales", "biases"):
        dtype, data = head[f"lm_head.{part}"]
        flash[f"lm_head_flash.head.{part}"] = dtype, data[order]
    write_beside(folder, flash)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("head_rows", [0, 256, SHAPE.vocab_size])
def test_rows_in_memory_and_rows_from_disk_give_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, in_order: bool, head_rows: int
) -> None:
    if in_order:
        with_rows(folder)
    wanted = logits(folder)
    made_plan = planning.make_plan

    def plan(*arguments: Any) -> Any:
        return planning.replace(made_plan(*arguments), num_head_rows=head_rows)

    monkeypatch.setattr("spile.engines.cpu.engine.make_plan", plan)
    monkeypatch.setattr(gathering, "FLASH_PIECE_ROWS", 48)  # several pieces
    for io in ("buffered", "direct"):
        np.testing.assert_array_equal(logits(folder, slots=8, prefill_chunk=4, io=io), wanted)


def test_bits_do_not_depend_on_threads_or_instructions(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = logits(made, threads=1)
    np.testing.assert_array_equal(logits(made, threads=3), wanted)
    for isa in _core.isas():
        monkeypatch.setenv("SPILE_ISA", isa)
        np.testing.assert_array_equal(logits(made), wanted)


def test_an_index_may_name_the_file(folder: Path) -> None:
    wanted = logits(folder)
    weight_map = {
        name: file for file in ("model.safetensors", FLASH_HEAD_NAME) for name in raw_tensors(folder / file)
    }
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    assert len(open_checkpoint(folder).shards) == 2
    np.testing.assert_array_equal(logits(folder), wanted)


def test_the_default_is_the_exact_head(made: Path, exact: NDArray[np.float32]) -> None:
    assert np.isfinite(exact).all()
    engine = opened(made, flash_head=False)
    assert engine.exact
    engine.close()


@pytest.mark.filterwarnings("ignore:.*no end token")
def test_an_approximate_head_is_announced_and_marked_in_the_statistics(made: Path) -> None:
    engine = opened(made)
    assert not engine.exact
    assert "only tokens of the 5 best of 32 clusters" in engine.summary()
    assert any(note.startswith("approximate:") for note in engine.notes)
    engine.close()
    with spile.load(made, flash_head=True) as model, pytest.warns(UserWarning, match="approximate: only"):
        assert model.generate([1, 2, 3], max_tokens=2).stats.exact is False
    with spile.load(made) as model:
        assert model.generate([1, 2, 3], max_tokens=2).stats.exact is True


def test_clusters_of_equal_scores_are_taken_in_order() -> None:
    some = FlashHead((), (), None, None, 4, 1, 2, ())  # type: ignore[arg-type]
    assert some.choose(np.array([1, 2, 2, 2], np.float32)).tolist() == [1, 2]
    assert some.choose(np.array([0, 0, 0, 0], np.float32)).tolist() == [0, 1]


def test_a_checkpoint_without_one_says_what_was_looked_for(folder: Path) -> None:
    (folder / FLASH_HEAD_NAME).unlink()
    with pytest.raises(UnsupportedModelError, match=FLASH_HEAD_NAME) as refusal:
        opened(folder)
    assert "--flash-head" in (refusal.value.hint or "")
    assert "\n" not in str(refusal.value)
    opened(folder, flash_head=False).close()


@pytest.mark.parametrize(
    ("values", "named", "kind"),
    [
        ({"n_probes": 0}, "flash_head.n_probes is 0, expected an integer from 1 to 32", CheckpointError),
        ({"n_probes": 33}, "n_probes is 33", CheckpointError),
        ({"n_clusters": 31}, "expected U32 \\[31, 16\\]", CheckpointError),
        ({"cluster_size": 16}, "token_map: expected I32 \\[32, 16\\]", CheckpointError),
        ({"force_tokens": [1024]}, "force_tokens has 1024, expected ids from 0 to 1,023", CheckpointError),
        ({"bits": 8}, "flash_head.bits is 8; spile runs 4 only", UnsupportedModelError),
        ({"scaled_centroids": False}, "scaled_centroids is False", UnsupportedModelError),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_named(
    folder: Path, values: dict[str, Any], named: str, kind: type[Exception]
) -> None:
    edit_config(folder, **values)
    with pytest.raises(kind, match=named):
        open_flash_head(open_checkpoint(folder), vocab_size=SHAPE.vocab_size, hidden_size=SHAPE.hidden_size)


def test_a_config_without_the_block_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["flash_head"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="flash_head is None, expected an object"):
        opened(folder)


def test_a_map_with_an_id_outside_of_the_vocabulary_is_named(folder: Path) -> None:
    tensors = raw_tensors(folder / FLASH_HEAD_NAME)
    dtype, ids = tensors["lm_head_flash.token_map"]
    ids = ids.copy()
    ids[7, 2] = SHAPE.vocab_size
    write_beside(folder, tensors | {"lm_head_flash.token_map": (dtype, ids)})
    with pytest.raises(CheckpointError, match="cluster 7 holds id 1024, expected 0 to 1,023"):
        opened(folder)


def test_a_vocabulary_that_does_not_cut_into_clusters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="vocab_size is 1,000"):
        write_checkpoint(tmp_path / "model", SynthShape(vocab_size=1000), flash_head=True)


def test_the_plan_counts_what_it_takes(made: Path) -> None:
    model = open_own(open_checkpoint(made))
    nbytes = counting.flash_head_nbytes(model, EngineOptions(flash_head=True))
    centroids = sum(
        data.nbytes for name, (_, data) in raw_tensors(made / FLASH_HEAD_NAME).items() if "centroids" in name
    )
    assert nbytes > centroids
    assert counting.flash_head_nbytes(model, EngineOptions()) == 0
