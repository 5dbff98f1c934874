"""Saved prompts: what a file holds is put back bit for bit, or the file is refused with one sentence."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spile
from spile.errors import OptionError, PromptFileError, SpileError, WriteError
from spile.files.checkpoint import open_checkpoint
from spile.files.fingerprint import fingerprint
from spile.generation.prompt_files import open_prompt_file

DEMO = Path(spile.__file__).parent / "demo" / "model"
STORY = "Once upon a time there was a bear who lived in a forest with a fox. " * 16  # around the ring
OPTIONS: dict[str, Any] = {"raw": True, "temperature": 0, "max_tokens": 12, "logprobs": 2}
Load = Callable[..., spile.Model]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A prompt of 300 tokens and more, saved."""
    with spile.load(DEMO, context=700, prefill_chunk=32) as model:
        model.generate(STORY, save_prompt=tmp_path / "story.kv", **OPTIONS)
    return tmp_path / "story.kv"


def answer(prompt: Any, *, load: dict[str, Any] | None = None, **options: Any) -> spile.Completion:
    with spile.load(DEMO, **{"context": 700, **(load or {})}) as model:
        return model.generate(prompt, **{**OPTIONS, **options})


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(PromptFileError) as found:
        call()
    message = str(found.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("load", [{}, {"prefill_chunk": 16, "threads": 1}, {"io": "buffered"}], ids=str)
def test_prompt_that_goes_on_from_a_file_is_answered_as_if_both_had_been_given_in_one(
    saved: Path, load: dict[str, Any]
) -> None:
    """Also with another chunk, number of threads or budget than it was saved with."""
    goes_on = answer(" Then the fox", load=load, load_prompt=saved)
    fresh = answer(STORY + " Then the fox")
    assert goes_on.token_ids == fresh.token_ids
    assert goes_on.logprobs == fresh.logprobs
    assert goes_on.stats.prompt_tokens == fresh.stats.prompt_tokens
    assert goes_on.stats.cached_tokens >= goes_on.stats.prompt_tokens - 8


def test_nothing_added_is_the_saved_prompt_itself(saved: Path) -> None:
    again, fresh = answer("", load_prompt=saved), answer(STORY)
    assert again.token_ids == fresh.token_ids
    assert again.stats.cached_tokens == fresh.stats.prompt_tokens - 1


def test_message_goes_on_from_a_saved_message_of_a_turn(tmp_path: Path) -> None:
    """The template's end of the saved prompt is not a part of the one that goes on: it is cut off."""
    file = tmp_path / "turn.kv"
    answer(STORY, raw=False, system="Be brief.", save_prompt=file)
    goes_on = answer(" What next?", raw=False, load_prompt=file)
    fresh = answer(STORY + " What next?", raw=False, system="Be brief.")
    assert (goes_on.token_ids, goes_on.logprobs) == (fresh.token_ids, fresh.logprobs)
    assert goes_on.stats.cached_tokens > fresh.stats.prompt_tokens - 20


def test_ids_go_on_from_saved_ids_and_a_text_does_not(tmp_path: Path) -> None:
    file = tmp_path / "ids.kv"
    ids = list(range(100, 500))
    answer(ids, raw=False, save_prompt=file)
    assert answer([7, 8], raw=False, load_prompt=file).logprobs == answer([*ids, 7, 8], raw=False).logprobs
    with pytest.raises(OptionError, match="not saved from a text"):
        answer("text", load_prompt=file)


def test_file_saved_from_one_that_was_loaded_holds_both(saved: Path, tmp_path: Path) -> None:
    answer(" Then", load_prompt=saved, save_prompt=tmp_path / "both.kv")
    found = answer(" he ran", load_prompt=tmp_path / "both.kv")
    assert found.logprobs == answer(STORY + " Then he ran").logprobs


def test_raw_and_template_do_not_mix(saved: Path) -> None:
    with pytest.raises(OptionError, match="saved with raw"):
        answer("x", raw=False, load_prompt=saved)


def test_file_is_the_owners_alone_and_a_fitting_size(saved: Path) -> None:
    assert saved.stat().st_mode & 0o777 == 0o600
    found = open_prompt_file(saved)
    assert saved.stat().st_size == found.nbytes() < 3_000_000
    assert os.listdir(saved.parent) == ["story.kv"]


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ({"kv_bits": 32}, ("kv_bits 16", "32")),
        ({"kv_ring_bits": 8}, ("kv_ring_bits 16", "8")),
        ({"activation_bytes": 3}, ("activation_bytes 2", "3")),
    ],
    ids=str,
)
def test_other_options_than_it_was_saved_with_are_refused(
    saved: Path, load: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused(lambda: answer("x", load=load, load_prompt=saved), str(saved), "was saved with", *words)


def test_another_model_is_refused_and_a_copy_is_not(
    saved: Path, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    copy = shutil.copytree(DEMO, tmp_path / "copy")
    with spile.load(copy, context=700) as model:
        assert model.generate(" x", load_prompt=saved, **OPTIONS).stats.cached_tokens > 100
    shard = next(copy.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    tensor = open_checkpoint(copy).tensors["model.norm.weight"]
    data[tensor.offset] ^= 1  # trained a little more
    shard.write_bytes(data)
    with spile.load(copy, context=700) as model:
        refused(lambda: model.generate("x", load_prompt=saved, **OPTIONS), "was saved with model")


def test_fingerprint_depends_on_weights_and_config_and_not_on_place_or_shards(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    first = fingerprint(open_checkpoint(tiny_checkpoint()))
    assert fingerprint(open_checkpoint(tiny_checkpoint(shards=2))) == first
    assert fingerprint(open_checkpoint(tiny_checkpoint(seed=1))) != first
    assert fingerprint(open_checkpoint(tiny_checkpoint(rope_theta=5000.0))) != first


def test_flipped_bit_anywhere_is_found(saved: Path) -> None:
    data = saved.read_bytes()
    header = 12 + int.from_bytes(data[8:12], "little")
    with spile.load(DEMO, context=700) as model:
        for offset in (
            0,
            9,
            40,
            header // 2,
            header,
            header + 999,
            len(data) // 2,
            len(data) - 40,
            len(data) - 1,
        ):
            changed = bytearray(data)
            changed[offset] ^= 4
            saved.write_bytes(changed)
            refused(lambda: model.generate("x", load_prompt=saved, **OPTIONS), str(saved))
        saved.write_bytes(data)
        assert model.generate("x", load_prompt=saved, **OPTIONS).stats.cached_tokens > 100, "as before"


def test_file_that_was_cut_short_is_refused_before_any_work(saved: Path) -> None:
    data = saved.read_bytes()
    for length in (0, 5, 12, 100, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:length])
        refused(lambda: open_prompt_file(saved), str(saved))
    saved.write_bytes(data + b"x")
    refused(lambda: open_prompt_file(saved), f"{len(data) + 1:,} bytes", f"{len(data):,}")


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a file's header and its digest as a forger would, who leaves the rest."""
    data = path.read_bytes()
    length = int.from_bytes(data[8:12], "little")
    header = json.loads(data[12 : 12 + length])
    change(header)
    text = json.dumps(header).encode()
    begin = data[:8] + len(text).to_bytes(4, "little") + text
    path.write_bytes(begin + data[12 + length : -96] + hashlib.sha256(begin).digest() + data[-64:])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.clear(),
        lambda header: header.update(format=1),
        lambda header: header.update(start=-1),
        lambda header: header.update(sliding_start=10**9),
        lambda header: header.update(token_ids=[[1], [2, 3]]),
        lambda header: header.update(token_ids=["x"]),
        lambda header: header.update(token_ids=[2**40]),
        lambda header: header.update(token_ids=[]),
        lambda header: header.update(row_nbytes={"full": [0], "sliding": []}),
        lambda header: header.update(identity=3),
        lambda header: header.update(row_nbytes={"full": [10**30], "sliding": [1]}),
    ],
)
def test_header_that_makes_no_sense_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    rewritten(saved, change)
    refused(lambda: open_prompt_file(saved), str(saved))


def test_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("Once")
    refused(lambda: answer("x", load_prompt=tmp_path / "story.txt"), "no saved prompt")
    refused(lambda: answer("x", load_prompt=tmp_path / "none.kv"), "No such file")
    refused(lambda: answer("x", load_prompt=tmp_path), "Is a directory")
    refused(lambda: answer("x", load_prompt="\0"), "null byte")
    os.mkfifo(tmp_path / "pipe")
    refused(lambda: answer("x", load_prompt=tmp_path / "pipe"), "no regular file")


def test_what_is_no_saved_prompt_is_not_overwritten(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "story.txt").write_text("Once")
    os.mkfifo(tmp_path / "pipe")
    for name in ("story.txt", "none/x.kv", ".", "pipe"):
        with pytest.raises(WriteError):
            answer("x", save_prompt=tmp_path / name)
    assert (tmp_path / "story.txt").read_text() == "Once"
    answer("another", save_prompt=saved)
    assert open_prompt_file(saved).about["text"] == "another"


def test_link_to_a_saved_prompt_stays_a_link_when_its_file_is_replaced(tmp_path: Path, saved: Path) -> None:
    link = tmp_path / "link.kv"
    link.symlink_to(saved)
    answer("another", save_prompt=link)
    assert link.is_symlink()
    assert open_prompt_file(saved).about["text"] == "another"


def test_damage_to_the_text_or_the_ids_of_a_saved_prompt_is_not_taken_for_another_prompt(saved: Path) -> None:
    data = saved.read_bytes()
    for what in (b'"text":"', b'"token_ids":['):
        changed = bytearray(data)
        changed[data.index(what) + len(what)] ^= 1
        saved.write_bytes(changed)
        refused(lambda: open_prompt_file(saved), "damaged")


def test_prompt_that_leaves_the_saved_one_too_early_is_read_whole_and_it_is_said(saved: Path) -> None:
    notes: list[str] = []
    with spile.load(DEMO, context=700, on_note=notes.append) as model:
        ids = open_prompt_file(saved).token_ids.tolist()[:50] + [9] * 40
        found = model.generate(model.encoded(ids), load_prompt=saved, **{**OPTIONS, "raw": False})
    assert found.stats.cached_tokens == 0
    assert found.logprobs == answer(ids, raw=False).logprobs
    assert any("was of no use" in note for note in notes)


def run(
    *arguments: str, most_nbytes: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if most_nbytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_nbytes, most_nbytes))

    return subprocess.run(
        [sys.executable, "-m", "spile", "generate", "--raw", "--temp", "0", "--max-tokens", "8", *arguments],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        env={**os.environ, **environment},
    )


def test_disk_that_fills_while_saving_leaves_nothing_behind_and_the_old_file_as_it_was(saved: Path) -> None:
    before = saved.read_bytes()
    done = run(STORY * 2, "--save-prompt", str(saved), most_nbytes=200_000)
    assert done.returncode == 1
    assert done.stderr.count("error:") == 1
    assert "cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == ["story.kv"]


def test_command_saves_and_goes_on(tmp_path: Path) -> None:
    file = str(tmp_path / "story.kv")
    assert run(STORY, "--save-prompt", file).returncode == 0
    goes_on = run(" The fox", "--load-prompt", file, "--json")
    fresh = run(STORY + " The fox", "--json")
    found, expected = json.loads(goes_on.stdout), json.loads(fresh.stdout)
    assert found["token_ids"] == expected["token_ids"]
    assert found["cached_tokens"] > 200
    assert expected["cached_tokens"] == 0
    assert json.loads(run("--load-prompt", file, "--json").stdout)["cached_tokens"] > 200


def test_command_keeps_prompts_in_a_folder_that_several_processes_share(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "prompts"
    arguments = ["--prompt-cache", str(folder), "--json", "--context", "700"]
    command = [sys.executable, "-m", "spile", "generate", "--raw", "--temp", "0", "--max-tokens", "8"]
    both = [
        subprocess.Popen([*command, STORY + end, *arguments], stdout=subprocess.PIPE, text=True)
        for end in ("", " The fox")
    ]
    outputs = [json.loads(process.communicate()[0]) for process in both]
    again = json.loads(run(STORY + " The fox", *arguments).stdout)
    assert again["token_ids"] == outputs[1]["token_ids"]
    assert again["cached_tokens"] == again["prompt_tokens"] - 1
    assert folder.stat().st_mode & 0o777 == 0o700


def test_damaged_block_of_a_folder_is_dropped_and_read_anew(tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    options: dict[str, Any] = {"prompt_cache": folder, "prefill_chunk": 32}
    expected = answer(STORY, load=options)
    for damage in ("flipped", "cut", "emptied", "another's"):
        notes: list[str] = []
        path = sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime)[-1]  # the first block
        data = bytearray(path.read_bytes())
        if damage == "flipped":
            data[len(data) // 2] ^= 1
        elif damage == "another's":
            data = bytearray(sorted(folder.iterdir())[0].read_bytes() + b"x")
        else:
            data = data[: 0 if damage == "emptied" else -5]
        path.write_bytes(data)
        found = answer(STORY, load={**options, "on_note": notes.append})
        assert found.logprobs == expected.logprobs
        assert [note for note in notes if "a kept prompt was dropped" in note]
        again = answer(STORY, load=options)
        assert again.logprobs == expected.logprobs
        assert again.stats.cached_tokens == again.stats.prompt_tokens - 1, "it was written again"


def test_folder_keeps_to_its_limit_and_forgets_what_was_used_least_lately(tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    options = {"prompt_cache": folder, "prompt_cache_limit": "2MB", "prefill_chunk": 32}
    for number in range(4):
        answer([number + 1] * 300, raw=False, load=options)
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 2_000_000
    assert answer([4] * 300, raw=False, load=options).stats.cached_tokens == 299
    assert answer([1] * 300, raw=False, load=options).stats.cached_tokens == 0


def test_folder_that_cannot_be_written_is_said_once_and_answers_go_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    notes: list[str] = []
    options = {"prompt_cache": tmp_path / "file" / "prompts", "on_note": notes.append}
    with spile.load(DEMO, context=700, **options) as model:
        for _ in range(2):
            assert model.generate("Once", **OPTIONS).text
    assert len([note for note in notes if "no longer kept" in note]) == 1
    with pytest.raises(OptionError, match="is a file"):
        spile.load(DEMO, prompt_cache=tmp_path / "file")


def test_disk_that_fills_ends_the_keeping_and_not_the_answer(tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    done = run(STORY, "--prompt-cache", str(folder), most_nbytes=50_000)
    assert done.returncode == 0
    assert done.stdout.strip()
    assert "no longer kept" in done.stderr
    assert os.listdir(folder) == []


@pytest.mark.parametrize("limit", [0, -1, True, "much", None])
def test_limit_that_is_no_size_is_refused(limit: Any) -> None:
    with pytest.raises(SpileError, match="prompt_cache_limit"):
        spile.load(DEMO, prompt_cache_limit=limit)
