"""Lines become messages, and messages are remembered for their owner alone."""

from __future__ import annotations

import io
import json
import stat
import sys
from pathlib import Path

import pytest

from spile.console.lines import PipeLines, TerminalLines, default_history, open_lines, read_message
from spile.errors import OptionError


def messages(data: bytes) -> list[str]:
    lines = PipeLines(io.BytesIO(data))
    found = []
    while True:
        try:
            found.append(read_message(lines))
        except EOFError:
            return found


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", []),
        (b"a", ["a"]),
        (b"a\nb\r\n", ["a", "b"]),
        (b"\n\n", ["", ""]),
        (b"a\\\nb\\\nc\nd", ["a\nb\nc", "d"]),
        (b"a\\", ["a\n"[:-1]]),
        (b'"""a\nb"""\nc', ["a\nb", "c"]),
        (b'"""\na\n\nb\n"""\n', ["\na\n\nb\n"]),
        (b'"""a"""\n', ["a"]),
        (b'"""a\nb', ["a\nb"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", ["a", "\ufeffb"]),
        ("\u4f60\u597d\n".encode(), ["\u4f60\u597d"]),
    ],
)
def test_lines_of_a_pipe_become_messages(data: bytes, found: list[str]) -> None:
    assert messages(data) == found


def test_text_that_is_not_utf8_is_named_by_its_place() -> None:
    lines = PipeLines(io.BytesIO(b"abc\nd\xffe\n"))
    assert lines.read("") == "abc"
    with pytest.raises(OptionError, match="standard input is not valid UTF-8 at byte 5"):
        lines.read("")


def test_closed_standard_input_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    lines, is_interactive = open_lines(None, ())
    assert not is_interactive
    with pytest.raises(EOFError):
        lines.read("")


def test_history_is_the_owners_alone_and_survives(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    path = tmp_path / "state" / "history"
    lines = TerminalLines(path, ())
    lines.remember("one\ntwo \u4f60")
    path.chmod(0o644)
    lines.remember("three")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with path.open("ab") as file:
        file.write(b"not json\n3\n")
    import readline

    readline.clear_history()
    TerminalLines(path, ())
    assert [readline.get_history_item(i + 1) for i in range(readline.get_current_history_length())] == [
        "one\ntwo \u4f60",
        "three",
    ]


def test_long_history_is_cut_to_its_end(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    path = tmp_path / "history"
    path.write_text("".join(json.dumps(f"message {i}") + "\n" for i in range(2500)))
    TerminalLines(path, ())
    left = path.read_text().splitlines()
    assert len(left) == 1000
    assert json.loads(left[-1]) == "message 2499"


def test_history_that_cannot_be_written_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("readline")
    (tmp_path / "file").write_text("")
    lines = TerminalLines(tmp_path / "file" / "history", ())
    lines.remember("a")
    lines.remember("b")
    assert capsys.readouterr().err.count("messages are not remembered") == 1


def test_history_lies_in_the_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_history() == tmp_path / "spile" / "chat_history"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_history() == tmp_path / ".local" / "state" / "spile" / "chat_history"


def test_messages_that_the_locale_cannot_write_are_not_recalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readline = pytest.importorskip("readline")
    recalled = []

    def add_history(message: str) -> None:
        message.encode("ascii")
        if "\0" in message:
            raise ValueError("embedded null character")
        recalled.append(message)

    monkeypatch.setattr(readline, "add_history", add_history)
    path = tmp_path / "history"
    path.write_text("".join(json.dumps(message) + "\n" for message in ["a", "\u4f60", "b\0", "c"]))
    lines = TerminalLines(path, ())
    lines.remember("\xe9")
    lines.remember("d")
    assert recalled == ["a", "c", "d"]
    assert [json.loads(line) for line in path.read_text().splitlines()][-2:] == ["\xe9", "d"]
