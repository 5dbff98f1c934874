import errno
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from spile.bench import Recorded, record_trace, replay_rows
from spile.cli import run
from spile.errors import CheckpointError, OptionError, WriteError
from spile.files import hub


def test_trace_is_recorded_saved_read_and_replayed(golden: Path, tmp_path: Path) -> None:
    done: list[int] = []
    recorded = record_trace(str(golden / "mlx-2bit"), "once", 12, 0, on_token=done.append)
    assert recorded.ids.shape == (12, 4, 2)
    assert recorded.num_experts == 8
    assert done == list(range(1, 13))
    assert (np.diff(recorded.ids, axis=2) > 0).all()  # ascending, each once
    recorded.save(tmp_path / "trace.npz")
    again = Recorded.load(tmp_path / "trace.npz")
    np.testing.assert_array_equal(again.ids, recorded.ids)
    rows = replay_rows(again)
    assert rows[-1]["num_slots"] == 32
    assert all(0 <= row["spile"] <= 1 for row in rows)


@pytest.mark.parametrize("content", [b"", b"not a trace", b"PK\x03\x04" + bytes(40)])
def test_file_that_is_no_trace_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is not a trace that `spile bench trace` wrote$"):
        Recorded.load(tmp_path / "x.npz")


def test_trace_of_experts_that_do_not_exist_is_refused(tmp_path: Path) -> None:
    Recorded(np.full((2, 1, 1), 9, np.int32), 4).save(tmp_path / "x.npz")
    with pytest.raises(CheckpointError, match="expert 9 of 4"):
        Recorded.load(tmp_path / "x.npz")


def test_a_single_token_is_no_trace(golden: Path) -> None:
    with pytest.raises(OptionError, match="two at least"):
        record_trace(str(golden / "mlx-2bit"), "once", 1, 0)


def test_plan_says_where_each_byte_goes(
    tiny_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_checkpoint()
    assert run(["plan", str(folder), "--no-probe"]) == 0
    shown = capsys.readouterr().out
    assert "everything fits" in shown
    assert run(["plan", str(folder), "--no-probe", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["total_nbytes"] == sum(plan["parts"].values())
    assert plan["forecast"] is None


def test_plan_of_a_budget_that_cannot_be_is_exit_code_1(
    tiny_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(tiny_checkpoint()), "--memory", "1MB", "--no-probe"]) == 1
    captured = capsys.readouterr()
    assert "and the budget is 1.0 MB" in captured.err
    assert "hint: Give --memory" in captured.err


def test_bench_commands_make_a_table(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.npz"
    assert run(["bench", "trace", str(trace), "-m", str(golden / "mlx-2bit"), "--tokens", "8"]) == 0
    assert "8 tokens, 4 layers, 2 of 8 experts each" in capsys.readouterr().out
    assert run(["bench", "replay", str(trace)]) == 0
    assert "optimal" in capsys.readouterr().out
    assert run(["bench", "replay", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][-1]["share"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "99999"], "tokens is 99,999: the context holds"),
        (["--prompt", ""], "the prompt is empty"),
        (["--seed", "-1"], "seed is -1"),
    ],
)
def test_numbers_out_of_range_are_usage_errors(
    arguments: list[str], message: str, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.npz"
    assert run(["bench", "trace", str(out), "-m", str(golden / "mlx-2bit"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broke: a full disk left a file of no bytes, in place of an older trace."""
    (tmp_path / "x.npz").write_bytes(b"older")

    def fail(file: object, **arrays: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(WriteError, match="No space left"):
        Recorded(np.zeros((2, 1, 1), np.int32), 4).save(tmp_path / "x.npz")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"older"]


def test_place_of_a_trace_is_checked_before_the_model_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, why in ((tmp_path, "not a regular file"), (tmp_path / "nope" / "x", "there is no folder")):
        assert run(["bench", "trace", str(out), "-m", "no/model"]) == 1
        assert why in capsys.readouterr().err


def test_plan_of_a_context_beyond_the_model_is_refused(
    tiny_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_checkpoint(max_position_embeddings=256)
    assert run(["plan", str(folder), "--no-probe", "--context", "257"]) == 2
    assert "context is 257: this model can have at most 256 tokens" in capsys.readouterr().err


def test_plan_shows_speeds_by_budget_and_their_ends(
    tiny_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_checkpoint()
    assert run(["plan", str(folder)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "smallest budget",
        "everything is mapped",
        "expected warm",
        "cold tok/s",
        "of the best speed",
    ):
        assert part in shown
    assert run(["plan", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["by_budget"][0] == answer["smallest"]
    assert answer["by_budget"][-1]["is_mapped"]
    assert answer["by_budget"][-1]["budget_nbytes"] == answer["mapped_nbytes"]
    assert answer["forecast"]["first_token_seconds_warm"] > 0
    assert answer["probe"]["resident_seconds"] > 0


def test_plan_of_a_hub_model_reads_headers_alone(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    repository, cache = tiny_checkpoint(), tmp_path / "cache"

    class FakeHub(hub.Hub):
        def sizes(self, hub_id: str) -> dict[str, int]:
            return {path.name: path.stat().st_size for path in repository.iterdir()}

        def cached(self, hub_id: str, name: str) -> Path | None:
            return None

        def download(self, hub_id: str, names: Iterable[str]) -> Path:
            cache.mkdir(exist_ok=True)
            for name in names:
                assert not name.endswith(".safetensors")
                shutil.copyfile(repository / name, cache / name)
            return cache

        def read_range(self, hub_id: str, name: str, start: int, end: int) -> bytes:
            return (repository / name).read_bytes()[start:end]

        def cache_folder(self) -> Path:
            return cache

    monkeypatch.setattr(hub, "Hub", FakeHub)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert run(["plan", "org/tiny", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == "org/tiny"
    assert answer["forecast"]["prefill_cold"] is None  # no file of the cache's disk to try
    assert answer["forecast"]["decode_warm"] > 0
    assert run(["plan", "org/tiny", "--memory", "1MB", "--no-probe"]) == 1
    assert capsys.readouterr().err.startswith("error: org/tiny needs")


def test_trace_of_a_model_serves_its_plan_and_speeds(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, model = str(tmp_path / "trace.npz"), str(golden / "mlx-2bit")
    assert run(["bench", "trace", trace, "-m", model, "--tokens", "8"]) == 0
    assert run(["plan", model, "--trace", trace, "--no-probe"]) == 0
    assert run(["bench", "replay", trace, "-m", model]) == 0
    assert "warm tok/s" in capsys.readouterr().out
    assert run(["bench", "replay", trace, "-m", model, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["memory_nbytes"] for row in rows] == sorted(row["memory_nbytes"] for row in rows)
    assert all(row["decode_warm"] > 0 for row in rows)
    assert run(["plan", "--trace", trace, "--no-probe"]) == 2  # of the demo model, which it is not of
    assert "is of another model: it has 4 layers, 2 of 8 experts" in capsys.readouterr().err


def test_verbose_answer_says_where_each_byte_goes(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(golden / "mlx-2bit")
    assert run(["generate", "-m", model, "--raw", "once", "--max-tokens", "2", "--verbose"]) == 0
    assert "what nobody counts" in capsys.readouterr().err
