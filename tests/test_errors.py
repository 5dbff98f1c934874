"""The error tree: what a user can catch, and that foreign text cannot break a message."""

import json
import shutil
from pathlib import Path

import pytest

from spile import errors
from spile.cli import run
from spile.console.terminal import note
from spile.errors import OptionError, ReadError, SpileError, clean, quote
from spile.making.synth import PRESETS, write_checkpoint
from spile.server.log import Log


def test_every_error_is_a_spile_error_and_keeps_its_hint() -> None:
    classes = [
        item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)
    ]
    assert len(classes) == 12
    for kind in classes:
        error = kind("what is wrong", "what to do")
        assert isinstance(error, SpileError)
        assert str(error) == "what is wrong"
        assert error.hint == "what to do"
        assert kind("no hint").hint is None


def test_what_makes_a_model_unusable_is_a_model_error() -> None:
    for kind in (errors.ModelNotFoundError, errors.CheckpointError, errors.UnsupportedModelError):
        assert issubclass(kind, errors.ModelError)
    for kind in (errors.BudgetError, errors.ReadError, errors.OptionError, errors.WriteError):
        assert not issubclass(kind, errors.ModelError)


def test_a_read_error_holds_file_offset_wanted_and_got() -> None:
    message = str(ReadError.at("a.safetensors", 4096, 8192, 100, "the file ends there"))
    assert message == (
        "cannot read a.safetensors: at offset 4,096 wanted 8,192 bytes, got 100: the file ends there"
    )


@pytest.mark.parametrize(
    "value", ["a\nb", "\x1b[31m", "\ud800", "é" * 500, ["x"] * 1000, {"a": 1}, None, 10**400]
)
def test_a_quoted_value_is_one_short_line_of_printable_ascii(value: object) -> None:
    shown = quote(value)
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) <= 120


EVIL = "\x1b]0;owned\x07\x1b[31mred\u202eeci\u2066\nfake: line\r\x9b2J\x00"


def is_clean(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n")) and "\nfake: line" not in text


def test_foreign_text_is_one_printable_line_of_any_language() -> None:
    assert (
        clean("d\u00e9j\u00e0 \u05e9\u05dc\u05d5\u05dd \u4f60\u597d \U0001f600")
        == "d\u00e9j\u00e0 \u05e9\u05dc\u05d5\u05dd \u4f60\u597d \U0001f600"
    )
    assert clean("a\n\tb\x1b[0m\u202e\ud800\u2028") == "a  b\\x1b[0m\\u202e\\ud800 "
    assert len(clean("\x1b" * 10**6)) < 10_000
    assert str(OptionError(EVIL, EVIL)).isprintable()
    assert (OptionError("", EVIL).hint or "").isprintable()


def test_foreign_text_is_cleaned_at_every_door(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A template's words, values and names in files, names of files and models, arguments, notes, the server's log."""
    model = tmp_path / "tiny"
    write_checkpoint(model, PRESETS["tiny"], seed=0)
    (tmp_path / "t.jinja").write_text("{{ raise_exception(" + json.dumps(EVIL) + ") }}")

    def damaged(name: str, old: str, new: str) -> str:
        folder = tmp_path / f"damaged-{name}"
        shutil.copytree(model, folder)
        (folder / name).write_text((folder / name).read_text().replace(old, json.dumps(new)[1:-1], 1))
        return str(folder)

    odd = tmp_path / f"odd{EVIL[:8]}\u202e"
    shutil.copytree(model, odd)
    (odd / "config.json").write_text("{")
    lines: list[list[str]] = [
        ["generate", "Hi", "-m", str(model), "--chat-template", str(tmp_path / "t.jinja")],
        ["generate", "Hi", "-m", damaged("config.json", "silu", EVIL)],
        ["generate", "Hi", "-m", damaged("tokenizer.json", "BPE", EVIL)],
        ["generate", "Hi", "-m", damaged("tokenizer_config.json", "chat_template", EVIL)],
        ["generate", "Hi", "-m", str(odd)],
        ["generate", "Hi", "-m", EVIL.rstrip("\0")],
        ["generate", "Hi", "-m", str(model), "--think", EVIL],
        ["generate", "Hi", f"--{EVIL}"],
        ["plan", "--model", str(odd), "--no-probe"],
    ]
    for line in lines:
        run(line)
        shown = capsys.readouterr().err
        assert shown, line
        assert is_clean(shown), (line, shown)
        assert "fault in spile" not in shown
    note(EVIL.replace("\n", " "))
    Log().write(EVIL)
    assert is_clean(capsys.readouterr().err)
