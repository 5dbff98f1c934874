"""Reasoning and answer are told apart however the text comes in pieces."""

from __future__ import annotations

import pytest

from spile.text.reasoning import ReasoningSplitter, begins_inside, can_reason


def run(pieces: list[str], *, has_begun: bool = False) -> tuple[str, str, bool]:
    splitter = ReasoningSplitter(has_begun=has_begun)
    found = [splitter.push(piece) for piece in pieces]
    inside = splitter.is_thinking
    found.append(splitter.flush())
    return "".join(one.reasoning for one in found), "".join(one.text for one in found), inside


@pytest.mark.parametrize(
    ("text", "has_begun", "reasoning", "answer"),
    [
        ("<think>\nsap rises\n</think>\n\nIn spring.\n", False, "sap rises", "In spring.\n"),
        ("\n <think>a</think>b", False, "a", "b"),
        ("sap rises\n</think>\n\nIn spring.", True, "sap rises", "In spring."),
        ("\n  In spring.", False, "", "\n  In spring."),
        ("a <think>b</think> c", False, "", "a <think>b</think> c"),
        ("<think></think>a", False, "", "a"),
        ("<think>\n\n</think>\n\na <think> b", False, "", "a <think> b"),
        ("<think>a < b </thin </think>c", False, "a < b </thin", "c"),
        ("<think>a", False, "a", ""),
        ("<think>a </th", False, "a </th", ""),
        ("<thi", False, "", "<thi"),
        ("<thinking>", False, "", "<thinking>"),
        ("  ", False, "", "  "),
        ("", False, "", ""),
        ("", True, "", ""),
        ("a\n\nb</think>", True, "a\n\nb", ""),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ],
)
def test_parts_are_the_same_in_pieces_of_every_size(
    text: str, has_begun: bool, reasoning: str, answer: str
) -> None:
    for width in range(1, len(text) + 1):
        pieces = [text[i : i + width] for i in range(0, len(text), width)]
        assert run(pieces, has_begun=has_begun)[:2] == (reasoning, answer)
    assert run([text], has_begun=has_begun)[:2] == (reasoning, answer)


def test_it_tells_whether_the_reasoning_goes_on() -> None:
    assert run(["<think>a"])[2]
    assert not run(["<think>a</think>"])[2]
    assert not run(["a"])[2]


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    splitter = ReasoningSplitter()
    assert splitter.push("<think>one") == ("one", "")
    assert splitter.push(" two ") == (" two", "")
    assert splitter.push("three</") == (" three", "")
    assert splitter.push("think>four") == ("", "four")
    assert splitter.push(" <think>") == ("", " <think>")


def test_templates_and_prompts_are_recognised() -> None:
    assert begins_inside("<|im_start|>assistant\n<think>\n")
    assert not begins_inside("<think>\n\n</think>\n\n")
    assert can_reason("{{ '<think>\\n\\n</think>' }}")
    assert not can_reason("{{ messages }}")
