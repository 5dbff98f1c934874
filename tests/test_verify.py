"""The certificate holds for a sound model, and each thing that can be wrong makes it fail and is named."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import spile
from spile import verify as module
from spile.agreement import Agreement, compare
from spile.errors import ModelNotFoundError, OptionError
from spile.files import digests
from spile.files.checkpoint import open_checkpoint
from spile.files.digests import record_files
from spile.verify import Report, heading, line, verify
from spile.verify_row import Configuration, Row


@pytest.fixture(autouse=True)
def no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SHIPPED_RECORDS", tmp_path / "none")


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    shutil.copytree(golden / "mlx-2bit", tmp_path / "model", copy_function=shutil.copyfile)
    (tmp_path / "model").chmod(0o755)
    return tmp_path / "model"


def flip(folder: Path, name: str, *, offset: int = 0, keep_time: bool = False) -> None:
    """Flip a bit in each of 64 bytes of a tensor."""
    checkpoint = open_checkpoint(folder)
    tensor = checkpoint.tensors[name]
    path = checkpoint.shards[tensor.shard]
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(tensor.offset + offset)
        data = file.read(64)
        file.seek(tensor.offset + offset)
        file.write(bytes(byte ^ 1 for byte in data))
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_sound_model_is_certified_in_every_default_row(folder: Path) -> None:
    record_files(open_checkpoint(folder))
    seen: list[Row] = []
    report = verify(folder, on_row=seen.append)
    print(heading(), *map(line, report.rows), report.verdict(), sep="\n")
    assert report.ok
    assert tuple(seen) == report.rows
    assert len(report.rows) >= 8
    assert {row.state for row in report.rows} == {"ok"}
    assert len({row.sha256 for row in report.rows}) == 1
    assert len({row.token_ids for row in report.rows}) == 1
    assert min(row.resident_expert_bytes or 0 for row in report.rows) < (
        report.rows[0].resident_expert_bytes or 0
    )
    assert any((row.bytes_read or 0) > 0 for row in report.rows)
    assert report.files is not None
    assert report.files.compared_with
    assert "undamaged" in report.verdict()
    answer = json.loads(json.dumps(report.as_dict()))
    assert answer["ok"] is True
    assert answer["rows"][0]["configuration"]["memory_bytes"] is None


def test_one_flipped_bit_in_one_expert_fails(folder: Path) -> None:
    record_files(open_checkpoint(folder))
    checkpoint = open_checkpoint(folder)
    tensor = checkpoint.tensors["model.layers.1.mlp.switch_mlp.down_proj.weight"]
    with checkpoint.shards[tensor.shard].open("r+b") as file:
        file.seek(tensor.offset + 3 * tensor.nbytes // 8)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    report = verify(folder, threads=[1], tokens=4, decoded=1)
    assert not report.ok
    assert report.files is not None
    assert report.files.damaged == (f"{tensor.name}, expert 3",)
    assert "DAMAGED" in report.verdict()


def test_weights_that_change_between_runs_fail(folder: Path) -> None:
    """What a wrong slot or a bit flipped in memory would look like: one run's weights differ."""

    def damage(row: Row) -> None:
        if row.configuration.threads == 1:
            flip(folder, "lm_head.weight", keep_time=True)

    report = verify(folder, threads=[1, 2], tokens=4, decoded=1, files=False, on_row=damage)
    assert [row.state for row in report.rows] == ["ok", "ok", "different"]
    assert not report.ok
    assert "DIFFERENT" in report.verdict()
    assert "DIFFERENT" in line(report.rows[-1])


def test_files_written_to_meanwhile_fail(folder: Path) -> None:
    path = folder / "model.safetensors"
    stamps = iter(range(10**18, 10**18 + 100))

    def touch(row: Row) -> None:
        os.utime(path, ns=(0, next(stamps)))

    report = verify(folder, threads=[1, 2], tokens=4, decoded=1, files=False, on_row=touch)
    assert not report.ok
    assert "written to" in (report.rows[-1].reason or "")


def test_first_run_says_that_files_were_not_compared(folder: Path) -> None:
    report = verify(folder, threads=[1], tokens=4, decoded=1)
    assert report.ok
    assert "not compared" in report.verdict()


def test_lists_are_multiplied_after_the_first_row(folder: Path) -> None:
    report = verify(folder, threads=[1, 2], chunks=[1, 3], tokens=5, decoded=2, files=False)
    found = [(row.configuration.threads, row.configuration.prefill_chunk) for row in report.rows]
    assert found == [(None, None), (1, 1), (1, 3), (2, 1), (2, 3)]
    assert report.ok
    assert {row.num_tokens for row in report.rows} == {7}


def test_budget_below_the_floor_is_skipped_with_its_reason_and_proves_nothing(folder: Path) -> None:
    report = verify(folder, memories=[1_000_000], tokens=4, decoded=1, files=False)
    assert [row.state for row in report.rows] == ["ok", "skipped"]
    assert report.rows[1].reason
    assert "skipped" in line(report.rows[1])
    assert not report.ok
    assert "NOT SHOWN" in report.verdict()


def test_process_that_dies_is_a_failed_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    report = verify(folder, threads=[1], tokens=4, decoded=1, files=False)
    assert [row.state for row in report.rows] == ["failed", "failed"]
    assert "ended with code 1" in (report.rows[0].reason or "")
    assert not report.ok


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("kill -9 $$", "the process was ended by signal 9 (SIGKILL): the last word"),
        ("exit 3", "the process ended with code 3: the last word"),
    ],
)
@pytest.mark.parametrize("answer", ["", '{"sha256": "0", "token_ids": []}'])
def test_how_a_process_ended_and_what_it_said_stay_in_the_report_also_after_its_answer(
    end: str, reason: str, answer: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(
        f"#!/bin/sh\ncat >/dev/null\necho '{answer}'\necho first >&2\necho the last word >&2\n{end}\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    report = verify(folder, threads=[1], tokens=4, decoded=1, files=False)
    assert not report.ok
    assert reason in line(report.rows[0])
    row = json.loads(json.dumps(report.as_dict()))["rows"][0]
    assert row["reason"] == reason
    assert row["stderr"] == "first\nthe last word"


def test_model_without_tokenizer_gets_a_token_a_byte(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    report = verify(folder, threads=[1], tokens=4, decoded=1, files=False)
    assert report.ok
    assert "a byte" in report.text


@pytest.mark.parametrize(
    "options",
    [{"tokens": 0}, {"tokens": 256}, {"decoded": 0}, {"memories": [0]}, {"threads": [0]}, {"chunks": [-1]}],
)
def test_numbers_out_of_range_are_refused(options: dict[str, object], folder: Path) -> None:
    with pytest.raises(OptionError):
        verify(folder, files=False, **options)  # type: ignore[arg-type]


def test_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        verify(tmp_path / "nothing")


def test_default_rows_of_the_large_model_use_budgets_and_are_scalar_on_few_tokens_alone() -> None:
    rows = module._default_configurations(24 * 256, 4_869_586_944, small=False, num_chosen=8)
    assert {row.memory_bytes for row in rows} == {None, 630_000_000, 1_000_000_000, 2_000_000_000}
    assert all(row.slots is None for row in rows)
    scalar = [row for row in rows if row.isa == "scalar"]
    assert [row.num_tokens for row in scalar] == [4]
    assert sum(row.group == scalar[0].group for row in rows) == 2  # it has another to be equal to
    # The beginning is read in chunks also where the last tokens are taken singly: one by one it would take minutes.
    assert {row.last_step for row in rows} == {None, 1, 7}
    assert all(row.prefill_chunk in (None, 64) for row in rows)


def test_a_large_model_is_compared_at_the_end_of_a_text_longer_than_window_and_chunk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SMALL_EXPERT_NBYTES", 0), ("LARGE_MODEL_TOKENS", 200), ("LARGE_MODEL_HASHED", 20)):
        monkeypatch.setattr(module, name, value)
    report = verify(folder, files=False)
    print(heading(), *map(line, report.rows), report.verdict(), sep="\n")
    assert report.ok
    assert (report.num_tokens, report.num_hashed) == (200, 20)
    assert [row.num_tokens for row in report.rows[-2:]] == [12, 12]
    assert len({row.sha256 for row in report.rows[:-2]}) == 1
    assert "auto/1" in line(report.rows[3])


def test_a_certificate_says_who_made_it_where_and_when(folder: Path) -> None:
    answer = json.loads(json.dumps(verify(folder, threads=[1], tokens=4, decoded=1, files=False).as_dict()))
    assert answer["version"] == spile.__version__
    assert set(answer["machine"]) == {"cpu", "cores", "memory_bytes", "os"}
    assert all(answer["machine"].values())
    assert datetime.fromisoformat(answer["date"]).utcoffset() == timedelta(0)
    assert answer["verdict"].startswith("OK: 2 runs")
    assert (answer["kv_bits"], answer["kv_v_bits"], answer["kv_ring_bits"]) == (16, 16, 16)


# engines


def test_both_engines_are_each_equal_to_themselves_and_agree_with_each_other(folder: Path) -> None:
    report = verify(folder, engine="both", chunks=[5], tokens=12, decoded=1, files=False)
    print(*map(line, report.rows), *report.agreements, report.verdict(), sep="\n")
    assert report.ok
    assert [row.configuration.engine for row in report.rows] == ["cpu", "cpu", "mlx", "mlx", "cpu", "mlx"]
    assert report.rows[0].sha256 != report.rows[2].sha256
    judged = [agreement for agreement in report.agreements if agreement.is_judged]
    assert [agreement.num_same_choice for agreement in judged] == [12]
    assert judged[0].largest < 1e-4
    assert "the engines agree" in report.verdict()
    assert report.verdict().startswith("OK: 4 runs")
    answer = json.loads(json.dumps(report.as_dict()))
    assert [each["is_judged"] for each in answer["agreements"]] == [True, False]


def test_default_rows_of_the_mlx_engine_compare_at_the_same_chunk() -> None:
    rows = module._mlx_configurations(32, 400_000, num_chosen=2)
    assert {row.engine for row in rows} == {"mlx"}
    for chunk in {row.prefill_chunk for row in rows}:
        assert chunk is not None
        slots = [row.slots for row in rows if row.prefill_chunk == chunk]
        assert slots[0] is None
        assert len(slots) >= 2
    large = module._mlx_configurations(24 * 256, 4_869_586_944, num_chosen=8)
    assert {row.memory_bytes for row in large} == {None, 630_000_000, 1_000_000_000, 2_000_000_000}
    assert len({row.group for row in large}) == 1


def agreement(folder: Path, difference: float, positions: int) -> Agreement:
    """Compare 100 positions of which some differ."""
    logits = np.random.default_rng(0).normal(size=(100, 50)).astype(np.float32)
    other = logits.copy()
    other[:positions, 7] += np.float32(difference)
    kept = {}
    for engine, values in (("cpu", logits), ("mlx", other)):
        path = folder / engine
        values.tofile(path)
        kept[Configuration(engine=engine, is_precise=True)] = path
    return compare(kept, 50)[0]


def test_engines_that_are_off_by_more_than_rounding_do_not_agree(tmp_path: Path) -> None:
    assert agreement(tmp_path, 1e-4, 100).ok
    assert agreement(tmp_path, 0.5, 5).ok  # near ties between experts
    assert not agreement(tmp_path, 0.5, 6).ok
    assert "TOO FAR APART" in str(agreement(tmp_path, 0.5, 6))
    assert "TOO FAR APART" not in str(agreement(tmp_path, 0.5, 5))


def certificate(rows: tuple[Row, ...], **fields: object) -> Report:
    made = Report(
        model="m",
        text="t",
        num_tokens=4,
        num_hashed=4,
        num_decoded=1,
        kv_bits=16,
        kv_v_bits=16,
        kv_ring_bits=16,
        rows=rows,
    )
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def test_a_certificate_across_engines_needs_an_agreement(tmp_path: Path) -> None:
    rows = (Row(Configuration(), "ok", sha256="a"), Row(Configuration(threads=1), "ok", sha256="a"))
    report = certificate(rows, is_across_engines=True)
    assert not report.ok
    assert "not compared" in report.verdict()
    far = agreement(tmp_path, 0.5, 6)
    report = certificate(rows, is_across_engines=True, agreements=(far,))
    assert not report.ok
    assert "DIFFERENT: the engines" in report.verdict()
    near = agreement(tmp_path, 0.0, 0)
    assert certificate(rows, is_across_engines=True, agreements=(near,)).ok


def test_rows_of_different_kinds_are_not_compared_with_each_other() -> None:
    rows = (Row(Configuration(), "ok", sha256="a"), Row(Configuration(engine="mlx"), "ok", sha256="b"))
    report = certificate(rows)
    assert not report.ok
    assert "NOT SHOWN" in report.verdict()


def test_an_unknown_engine_is_refused(folder: Path) -> None:
    with pytest.raises(OptionError, match="'metal'"):
        verify(folder, engine="metal")
