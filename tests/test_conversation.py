"""Turns, and the file they are kept in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spile.console.conversation import Conversation
from spile.errors import OptionError, SpileError, TextError, WriteError

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


def talk(num_turns: int, system: str | None = None) -> Conversation:
    conversation = Conversation(system)
    for number in range(num_turns):
        conversation.ask(f"question {number}")
        conversation.answer(f"answer {number}")
    return conversation


def test_messages_are_in_order_with_the_system_first() -> None:
    conversation = talk(1, "Be brief.")
    conversation.ask("more")
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant", "user"]


def test_turns_are_taken_back_from_the_end_and_dropped_from_the_start() -> None:
    conversation = talk(3, "Be brief.")
    assert conversation.undo()
    assert conversation.drop_oldest()
    assert [message["content"] for message in conversation.messages] == [
        "Be brief.",
        "question 1",
        "answer 1",
    ]
    assert not conversation.drop_oldest()  # the last one stays
    assert conversation.undo()
    assert not conversation.undo()
    assert conversation.messages == [SYSTEM]


def test_saved_conversation_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    talk(2, "Be brief.").save(path)
    loaded = Conversation("other")
    loaded.load(path)
    assert loaded.messages == talk(2, "Be brief.").messages
    assert len(loaded.turns) == 2
    assert [one.name for one in tmp_path.iterdir()] == ["talk.json"]  # nothing half-written is left


def test_tool_exchanges_belong_to_the_turn_they_are_in() -> None:
    conversation = Conversation()
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    conversation.replace([USER, call, {"role": "tool", "content": "2"}, ANSWER, USER])
    assert [len(turn) for turn in conversation.turns] == [4, 1]


def test_bare_list_is_a_conversation_too(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([USER, ANSWER]))
    conversation = Conversation("gone")
    conversation.load(path)
    assert conversation.messages == [USER, ANSWER]
    conversation.save(path)  # and may be replaced


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, TextError, "cannot be read: No such file"),
        ("{", TextError, "is not valid JSON"),
        ("\xff", TextError, "is not valid JSON"),
        ("3", OptionError, "holds no list of messages"),
        ('{"messages": 3}', OptionError, "holds no list of messages"),
        ("[]", OptionError, "messages is empty"),
        ("[3]", OptionError, r"messages\[0\] is a int"),
        (json.dumps([{"role": "user", "content": "\ud800"}]), OptionError, r"messages\[0\] holds half of a"),
        (json.dumps([ANSWER]), OptionError, "a conversation begins with the user, not with 'assistant'"),
    ],
)
def test_file_that_holds_no_conversation_changes_nothing(
    content: Any, error: type[SpileError], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    conversation = talk(1)
    with pytest.raises(error, match=message):
        conversation.load(path)
    assert conversation.messages == talk(1).messages


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="cannot be written: No such file or directory"):
        talk(1).save(tmp_path / "nowhere" / "talk.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(WriteError, match="is there and holds no conversation"):
        talk(1).save(tmp_path / "folder")


@pytest.mark.parametrize("content", ["[1, 2, 3]", "[]", '{"messages": [1]}', json.dumps([ANSWER])])
def test_only_a_conversation_is_replaced(content: str, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(content)
    with pytest.raises(WriteError, match="is there and holds no conversation"):
        talk(1).save(path)
    assert path.read_text() == content


def test_empty_conversation_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is nothing to save"):
        Conversation().save(tmp_path / "talk.json")
    assert not list(tmp_path.iterdir())


def test_save_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation()
    conversation.ask("\ud800")
    with pytest.raises(WriteError, match="cannot be written"):
        conversation.save(tmp_path / "talk.json")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        talk(1).save(tmp_path / "talk.json")
    assert not list(tmp_path.iterdir())


def test_file_that_is_too_long_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spile.console.conversation._LONGEST_FILE_NBYTES", 10)
    talk(1).save(tmp_path / "talk.json")
    with pytest.raises(TextError, match="is larger than the 10 such"):
        Conversation().load(tmp_path / "talk.json")
