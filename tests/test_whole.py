"""Files that are read whole: regular ones of a sane size, and a sentence with the name for all others."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import spile
from spile.cli import run
from spile.errors import SpileError, TextError
from spile.files.whole import read_whole
from spile.making.synth import PRESETS, write_checkpoint

ROOT = Path(__file__).parents[1]
FILES = [
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "tiny"
    write_checkpoint(folder, PRESETS["tiny"], seed=0)
    return folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(64 * 10**9)  # holes take no disk


def socketed(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's name is short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [pipe, endless, huge, socketed, dangling, Path.mkdir])
@pytest.mark.parametrize("name", FILES)
def test_file_of_a_model_that_is_none_is_said_by_name(
    name: str, make: Callable[[Path], None], folder: Path
) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    began = time.perf_counter()
    with pytest.raises(SpileError) as caught:
        spile.load(folder).generate("Hi", max_tokens=1)
    assert time.perf_counter() - began < 5
    assert name in str(caught.value) or make is dangling  # which is as if there were none


@pytest.mark.parametrize("flag", ["--chat-template", "--json-schema"])
@pytest.mark.parametrize("make", [pipe, endless, huge, Path.mkdir])
def test_file_of_a_flag_that_is_none_is_said_by_name(
    flag: str, make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "given")
    assert run(["generate", "Hi", flag, str(tmp_path / "given"), "--max-tokens", "1"]) in (1, 2)
    assert "given" in (shown := capsys.readouterr().err)
    assert "fault in spile" not in shown


def test_size_is_told_with_the_one_that_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    assert read_whole(tmp_path / "f", 5, TextError) == b"12345"
    with pytest.raises(TextError, match=r"f has 5 bytes: it is larger than the 4 such a file may have"):
        read_whole(tmp_path / "f", 4, TextError)
    with pytest.raises(FileNotFoundError):
        read_whole(tmp_path / "g", 4, TextError)
    with pytest.raises(TextError, match=r"'a\\x00b' cannot be read"):
        read_whole(Path("a\0b"), 4, TextError)


def test_file_that_may_not_be_read_is_said_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TextError, match="f cannot be read: Permission denied"):
        read_whole(tmp_path / "f", 4, TextError)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_half_of_a_surrogate_pair_in_a_file_is_one_sentence(name: str, folder: Path) -> None:
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace("{", '{"note": "\\ud800",', 1))
    with pytest.raises(SpileError, match=rf"{name} .*half of a surrogate pair"):
        spile.load(folder)


def test_half_of_a_surrogate_pair_in_a_source_to_convert_is_one_sentence(
    golden_bf16: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(golden_bf16, tmp_path / "bf16"))
    text = (source / "config.json").read_text()
    (source / "config.json").write_text(text.replace("{", '{"note": "\\uDFFF",', 1))
    with pytest.raises(SpileError, match="half of a surrogate pair"):
        spile.load(source)


def test_damaged_folders_are_refused_in_a_sentence_or_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of what tools/fuzz_folders.py does by thousands."""
    spec = importlib.util.spec_from_file_location("fuzz_folders", ROOT / "tools" / "fuzz_folders.py")
    assert spec is not None
    assert spec.loader is not None
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    monkeypatch.setattr("spile.text.renderer.LIMIT_SECONDS", 1.0)
    bases = fuzz.make_bases(tmp_path)
    ends = {fuzz.run_one(base)[0] for base in bases}
    assert ends == {"answered"}
    for seed in (*range(25), 2747):
        rng = random.Random(seed)
        folder = Path(shutil.copytree(rng.choice(bases), tmp_path / f"m{seed}"))
        what = fuzz.mutate(rng, folder)
        assert fuzz.run_one(folder)[0] in ("answered", "refused"), (seed, what)
