"""Lines for a person: numbers as they are, and nothing where they cannot be told."""

from __future__ import annotations

import io
import re
import textwrap

import pytest

from spile.console.terminal import (
    AnswerWriter,
    BottomLine,
    Cursor,
    LiveLine,
    Progress,
    Stdout,
    StdoutClosedError,
    WordWrap,
    bytes_text,
    fitting,
    generation_text,
    has_styles,
    note,
    prefill_text,
    summary_lines,
    unanswered_note,
)
from spile.errors import WriteError
from spile.generation.generate import Chunk, Stats

STATS = Stats(
    prompt_tokens=1234,
    cached_tokens=0,
    completion_tokens=56,
    prompt_tokens_per_second=98.76,
    tokens_per_second=12.34,
    time_to_first_token_seconds=1.5,
    peak_memory_bytes=612_300_000,
    resident_expert_bytes=300_000_000,
    bytes_read=1_234_000_000,
    expert_hits=831,
    expert_misses=169,
    stall_seconds=0.5,
    engine="cpu",
    exact=True,
)


def changed(**values: object) -> Stats:
    return Stats(**{**STATS.as_dict(), **values})


def test_summary_has_the_lines_of_the_issue() -> None:
    assert summary_lines(STATS) == [
        "Prompt: 1,234 tokens, 98.8 tok/s",
        "Generation: 56 tokens, 12.3 tok/s",
        "Peak memory: 612 MB",
        "Experts: 1.23 GB read, 83.1 % hits (831 of 1,000)",
    ]


def test_rates_that_cannot_be_told_are_dashes() -> None:
    lines = summary_lines(changed(tokens_per_second=None, expert_hits=0, expert_misses=0, bytes_read=0))
    assert lines[1] == "Generation: 56 tokens, - tok/s"
    assert lines[3] == "Experts: 0 B read, no expert wanted"


def test_approximate_answers_say_so() -> None:
    assert summary_lines(changed(exact=False))[-1].startswith("Approximate: ")


def test_live_texts() -> None:
    assert prefill_text(50, 200, 2.0) == "reading the prompt: 25 % of 200 tokens, 25.0 tok/s"
    assert prefill_text(0, 200, 0.0) == "reading the prompt: 0 % of 200 tokens"
    assert generation_text(1, 0.0, 5_000_000, None) == "1 tokens, memory 5.0 MB"
    assert generation_text(11, 2.0, 612_300_000, 0.5) == "11 tokens, 5.0 tok/s, memory 612 MB, 50.0 % hits"
    assert bytes_text("writing", 1, 4_000_000) == "writing: 0 % of 4.0 MB"
    assert bytes_text("writing", 0, 0) == "writing: 0 % of 0 B"


def test_live_line_is_silent_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    line = LiveLine(stream)
    line.show(lambda: pytest.fail("made a text that nobody sees"), at_once=True)
    line.clear()
    assert stream.getvalue() == ""


def test_line_is_ended_only_once() -> None:
    stream = io.StringIO()
    stdout = Stdout(stream)
    stdout.end_line()
    stdout.write("a")
    stdout.end_line()
    stdout.end_line()
    assert stream.getvalue() == "a\n"


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (BrokenPipeError(), StdoutClosedError),
        (OSError(28, "No space left on device"), WriteError),
        (ValueError("I/O operation on closed file"), WriteError),
    ],
)
def test_output_that_fails_is_told_apart(
    raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.StringIO):
        def write(self, text: str) -> int:
            raise raised

    with pytest.raises(expected):
        Stdout(Failing()).write("a")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def written(
    out: io.StringIO, err: io.StringIO, chunks: list[Chunk], *, shows: bool = True
) -> tuple[str, str]:
    writer = AnswerWriter(Stdout(out), err, shows_reasoning=shows)
    for chunk in chunks:
        writer.write(chunk)
    writer.close()
    return out.getvalue(), err.getvalue()


CHUNKS = [Chunk("", 1, reasoning="Hm"), Chunk("", 2, reasoning=" \x1b[1m."), Chunk("Y", 3), Chunk("es", 4)]


def test_reasoning_is_dimmed_on_a_terminal_and_apart_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert written(Terminal(), io.StringIO(), CHUNKS) == ("\x1b[2mHm ?[1m.\x1b[0m\n\nYes", "")
    assert written(io.StringIO(), io.StringIO(), CHUNKS) == ("Yes", "[thinking]\nHm \x1b[1m.\n")
    assert written(io.StringIO(), Terminal(), CHUNKS) == ("Yes", "\x1b[2mHm ?[1m.\x1b[0m\n")
    assert written(Terminal(), io.StringIO(), CHUNKS, shows=False) == ("Yes", "")
    monkeypatch.setenv("NO_COLOR", "1")
    assert written(Terminal(), io.StringIO(), CHUNKS) == ("[thinking]\nHm ?[1m.\n[answer]\nYes", "")
    assert not has_styles()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_styles()
    monkeypatch.delenv("TERM")
    assert not has_styles()


def test_style_never_outlives_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert written(Terminal(), io.StringIO(), CHUNKS[:1])[0] == "\x1b[2mHm\x1b[0m\n"


def test_answer_comes_though_nobody_reads_the_reasoning() -> None:
    assert written(io.StringIO(), Closed(), CHUNKS) == ("Yes", "")


def test_answer_that_ended_inside_of_its_reasoning_is_explained() -> None:
    stats = changed(prompt_tokens=10, completion_tokens=20)
    assert unanswered_note(stats, 4096).startswith("the limit of 20 tokens fell inside of the reasoning")
    assert unanswered_note(stats, 29).startswith("the context of 29 tokens was full inside of the reasoning")


def test_live_line_tells_context_and_thinking() -> None:
    assert generation_text(1, 0.0, 5_000_000, None, (345, 1024)) == (
        "1 tokens, memory 5.0 MB, context 345 of 1,024"
    )
    stream = Terminal()
    progress = Progress(stream, lambda: None, shares_screen=False)
    progress.context = (10, 1024)
    for chunk in CHUNKS:
        progress.token(chunk)
        progress._line._shown_at = float("-inf")
    lines = [line.split(" tokens, ")[0] for line in stream.getvalue().split("\r\x1b[K") if line]
    assert lines == ["thinking: 1", "thinking: 2", "3", "4"]
    assert "context 14 of 1,024" in stream.getvalue()


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("", 0),
        ("abc", 3),
        ("a" * 10, 10),  # at the margin
        ("a" * 11, 1),
        ("a" * 10 + "\n", 0),
        ("a" * 10 + "\nbc", 2),
        ("\u4e2d" * 5, 10),
        ("a" + "\u4e2d" * 5, 2),  # half of a wide character does not fit
        ("e\u0301" * 10, 10),
        ("a\tb", 9),
        ("a\t\t", 9),
    ],
)
def test_column_is_followed(text: str, column: int) -> None:
    whole, pieces = Cursor(), Cursor()
    whole.advance(text, 10)
    for character in text:
        pieces.advance(character, 10)
    assert whole.column == pieces.column == column
    assert whole.is_at_margin(10) == (column == 10)


def test_bottom_line_waits_while_the_cursor_is_at_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving it would lose that, and the next character would be written over the last one."""
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()  # of 80 columns
    stdout, line = Stdout(stream), BottomLine(stream)
    stdout.write("\n" + "a" * 80)
    line.show(lambda: "status", at_once=True)
    assert "status" not in stream.getvalue()
    stdout.write("b")
    line.show(lambda: "status", at_once=True)
    assert "status" in stream.getvalue()
    stdout.end_line()


def test_line_that_is_too_long_for_the_row_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitting("x" * 200) == "x" * 79


def test_note_in_the_middle_of_an_answer_begins_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = Terminal()
    monkeypatch.setattr("sys.stderr", errors)
    monkeypatch.setattr("spile.console.terminal._cursor", Cursor())
    Stdout(Terminal()).write("Once")
    note("the folder is full")
    note("and more")
    assert errors.getvalue() == "\nnote: the folder is full\nnote: and more\n"


def screen(sent: str, columns: int) -> list[str]:
    """What a terminal shows of text with new lines, steps back and erasures to the line's end."""
    lines, column = [""], 0
    for piece in re.findall(r"\x1b\[\d*[DK]|.", sent, re.DOTALL):
        if piece == "\n":
            lines.append("")
            column = 0
        elif piece.endswith("K") and len(piece) > 1:
            lines[-1] = lines[-1][:column]
        elif piece.endswith("D") and len(piece) > 1:
            column -= int(piece[2:-1])
        else:
            if column == columns:
                lines.append("")
                column = 0
            lines[-1] = lines[-1][:column] + piece + lines[-1][column + 1 :]
            column += 1
    return lines


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("columns", [20, 24, 80])
def test_words_are_kept_whole_at_the_edge_whatever_pieces_they_come_in(size: int, columns: int) -> None:
    text = "The sap of sugar maples rises in spring, when nights are cold.\n\n  - extraordinarily long-windedness"
    wrap, column, sent = WordWrap(), 0, ""
    for start in range(0, len(text), size):
        more, column = wrap.wrap(text[start : start + size], column, columns)
        sent += more
    lines = [line.rstrip() for line in screen(sent, columns)]
    expected = [
        row
        for line in text.split("\n")
        for row in (textwrap.wrap(line, columns - 1, break_on_hyphens=False) or [""])
    ]
    assert lines == expected


def test_word_wider_than_the_screen_is_cut_and_nothing_is_lost() -> None:
    sent, column = WordWrap().wrap("a " + "b" * 50 + " c", 0, 20)
    assert "".join(screen(sent, 20)).replace(" ", "") == "a" + "b" * 50 + "c"
    assert max(map(len, screen(sent, 20))) <= 19
    assert column < 20


def test_lines_without_spaces_break_between_wide_characters() -> None:
    sent, _ = WordWrap().wrap("日本語" * 10, 0, 21)
    assert [len(line) for line in sent.split("\n")] == [10, 10, 10]
