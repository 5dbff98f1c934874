"""The real engine on models with a known chain of tokens: ends, stops, characters, limits, penalties, reasoning.

Every expectation is exact, and an answer in pieces is equal to the whole one.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import spile
from scripted import PROMPT, write_scripted
from spile.cli import run
from spile.generation.generate import Completion, join

WORDS = [b"al", b"pha", b" be", b"ta", b" gam", b"ma"]
CHARACTERS = (
    "\U0001f1e9\U0001f1ea",  # a flag: two characters of four bytes
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",  # a family, joined
    "e\u0301",  # a combining accent
    "\u4f60\u597d\u3002",
    "\u05e9\u05dc\u05d5\u05dd",
    "   three spaces",
    "\n\n\ttab",
)
Script = Callable[..., "Scripted"]


class Scripted:
    """A model that says a script."""

    def __init__(self, folder: Path, token_ids: list[int]) -> None:
        self.folder = folder
        self.token_ids = token_ids

    def ask(self, prompt: Any = PROMPT, *, raw: bool = True, **options: Any) -> Completion:
        """Answer in pieces and at once, check that they agree, and return the answer."""
        options = {"temperature": 0, "raw": raw, **options}
        with spile.load(self.folder) as model:
            whole = model.generate(prompt, **options)
            chunks = list(model.stream(prompt, **options))
        pieces = join(chunks)
        for name in ("text", "reasoning", "token_ids", "finish_reason", "stopped_by", "logprobs"):
            assert getattr(pieces, name) == getattr(whole, name)
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert not any("\ufffd" in chunk.text for chunk in chunks)
        assert whole.stats.completion_tokens == len(whole.token_ids)
        return whole


@pytest.fixture
def script(tiny_checkpoint: Callable[..., Path]) -> Script:
    def make(pieces: Sequence[bytes], **options: Any) -> Scripted:
        return Scripted(*write_scripted(tiny_checkpoint, pieces, **options))

    return make


def test_script_is_said_to_its_end(script: Script) -> None:
    it = script(WORDS)
    answer = it.ask()
    assert (answer.text, answer.finish_reason) == ("alpha beta gamma", "stop")
    assert list(answer.token_ids) == it.token_ids


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        (None, "alpha beta gamma", None),
        ("ha be", "alp", "ha be"),  # begins and ends inside of tokens
        (["x", "mm", "never", "a g"], "alpha bet", "a g"),
        ("alpha beta gamma", "", "alpha beta gamma"),
        (["gamma!", "gam\n"], "alpha beta gamma", None),  # held back, and not lost
    ],
)
def test_stop_texts_across_tokens(
    stop: Any, text: str, matched: str | None, script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    it = script(WORDS)
    answer = it.ask(stop=stop)
    assert (answer.text, answer.finish_reason, answer.stopped_by) == (text, "stop", matched)
    flags = [flag for one in ([stop] if isinstance(stop, str) else stop or []) for flag in ("--stop", one)]
    assert run(["generate", "-m", str(it.folder), "--raw", "--temp", "0", PROMPT, *flags]) == 0
    assert capfd.readouterr().out == text + "\n"


def test_stop_text_ends_the_work(script: Script) -> None:
    it = script([f"w{i} ".encode() for i in range(300)])
    answer = it.ask(stop="w3 w4")
    assert answer.text == "w0 w1 w2 "
    assert len(answer.token_ids) == 5


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("text", CHARACTERS)
def test_characters_over_tokens_arrive_whole(
    text: str, width: int, script: Script, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    data = text.encode()
    pieces = [data[i : i + width] for i in range(0, len(data), width)]
    used: list[bytes] = []
    for piece in pieces:  # an entry occurs once: a repeated one takes in its neighbour
        if used and (piece in used or piece == PROMPT.encode()):
            used[-1] += piece
        else:
            used.append(piece)
    if len(set(used)) < len(used):
        used = [data]
    it = script(used)
    assert it.ask().text == text
    assert run(["generate", "-m", str(it.folder), "--raw", "--temp", "0", PROMPT]) == 0
    assert capfdbinary.readouterr().out == data + b"\n"


def test_character_that_never_ends_is_dropped(script: Script) -> None:
    assert script([b"a", "\u4f60".encode()[:2]]).ask().text == "a"


def test_1500_tokens_need_no_limit(script: Script) -> None:
    words = [f"w{i:04} ".encode() for i in range(1500)]
    it = script(words)
    with spile.load(it.folder) as model:
        answer = model.generate(PROMPT, raw=True, temperature=0)
    assert (len(answer.token_ids), answer.finish_reason) == (1500, "stop")
    assert answer.text == b"".join(words).decode()
    limited = it.ask(max_tokens=7)
    assert (limited.text, limited.finish_reason) == (b"".join(words[:7]).decode(), "length")


def test_limit_end_and_stop_that_meet(script: Script) -> None:
    it = script(WORDS)
    assert it.ask(max_tokens=6).finish_reason == "length"  # whether the end came next was not computed
    assert it.ask(max_tokens=7).finish_reason == "stop"
    assert it.ask(max_tokens=6, stop="gamma").finish_reason == "stop"
    assert it.ask(max_tokens=5, stop="gamma").finish_reason == "length"
    assert it.ask(max_tokens=5, stop="gamma").text == "alpha beta gam"


def test_context_ends_an_answer_that_does_not_end(script: Script) -> None:
    it = script([b"ab", b"cd"], ends=False, context=64)
    answer = it.ask()
    assert answer.finish_reason == "length"
    assert answer.stats.prompt_tokens + len(answer.token_ids) == 64
    assert answer.text.startswith("abcd")


def test_ignored_end_goes_on_to_the_limit(script: Script) -> None:
    it = script(WORDS)
    answer = it.ask(ignore_eos=True, max_tokens=20)
    assert (len(answer.token_ids), answer.finish_reason) == (20, "length")
    assert answer.text.startswith("alpha beta gamma")
    assert list(answer.token_ids[:6]) == it.token_ids


def test_log_probabilities_of_a_sure_thing(script: Script) -> None:
    """The logit is the width, 128, and all others are walks of 128 steps: the softmax is 1."""
    it = script(WORDS)
    answer = it.ask(logprobs=3)
    assert [one.token_id for one in answer.logprobs] == it.token_ids
    for one in answer.logprobs:
        assert one.logprob == pytest.approx(0, abs=1e-6)
        assert one.top[0] == (one.token_id, one.logprob)
        assert one.top[0].logprob > one.top[1].logprob >= one.top[2].logprob
        assert math.isfinite(one.top[2].logprob)


def test_bias_and_penalties_change_the_way(script: Script) -> None:
    """-100 excludes a token altogether; a penalty of 100 makes what was said give way, once it was said."""
    it = script(WORDS)
    first = it.token_ids[0]
    assert it.ask(logit_bias={first: -100}, max_tokens=1).token_ids != (first,)
    assert it.ask(logit_bias={str(first): 0}, max_tokens=1).token_ids == (first,)
    assert list(it.ask(presence_penalty=100).token_ids) == it.token_ids  # nothing comes twice
    loop = script([b"ab", b"cd"], ends=False)
    # 128 / 2 - 100 lies below the 0 of the tokens that no script has.
    answer = loop.ask(max_tokens=12, presence_penalty=100, repetition_penalty=2)
    assert len(set(answer.token_ids)) == 12
    assert len(set(loop.ask(max_tokens=12).token_ids)) < 12


def test_prompt_longer_than_the_context_is_refused_with_both_numbers(
    script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    it = script(WORDS, context=128)
    with pytest.raises(spile.ContextError, match="the prompt has 200 tokens and the context holds 128"):
        it.ask("y" * 200)
    assert run(["generate", "-m", str(it.folder), "--raw", "y" * 200]) == 1
    assert "error: the prompt has 200 tokens and the context holds 128\n" in capfd.readouterr().err


THINKING = "{{ messages[0].content }}{# <think> #}"


def test_reasoning_of_a_real_engine(script: Script) -> None:
    it = script([b"<thi", b"nk>", b"\nHm", b".\n</", b"think>\n", b"\n", b"Yes."], template=THINKING)
    answer = it.ask(raw=False)
    assert (answer.reasoning, answer.text) == ("Hm.", "Yes.")
    cut = it.ask(raw=False, max_tokens=4)
    assert (cut.reasoning, cut.text, cut.finish_reason) == ("Hm.\n</", "", "length")
    assert it.ask(raw=False, stop=["H", "es"]).text == "Y"


def test_same_prompt_three_times_gives_the_same_answer_and_reads_one_token(script: Script) -> None:
    it = script(WORDS)
    prompt = "abcdefgh" + PROMPT
    with spile.load(it.folder) as model:
        held = model.hold()
        answers = [model.generate(prompt, raw=True, temperature=0, held=held) for _ in range(3)]
    assert {answer.text for answer in answers} == {"alpha beta gamma"}
    assert [answer.stats.cached_tokens for answer in answers] == [0, 8, 8]


def test_greedy_seeds_and_streams_agree_with_json(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    it = script(WORDS)
    command = ["generate", "-m", str(it.folder), "--raw", "--json", "--logprobs", "1", "--seed", "3", PROMPT]
    assert run(command) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["text"], answer["token_ids"]) == ("alpha beta gamma", it.token_ids)
    assert "".join(one["token"] for one in answer["logprobs"]) == answer["text"]


def test_decode_rate_is_that_of_a_stopwatch(script: Script) -> None:
    """Within a tenth of the time between the first and the last token as they leave the process."""
    it = script([f"w{i:04} ".encode() for i in range(400)])
    code = (
        "import sys, time, spile\n"
        "with spile.load(sys.argv[1]) as model:\n"
        "    chunks = model.stream('x', raw=True, temperature=0)\n"
        "    next(chunks)\n"
        "    start, count = time.perf_counter(), 0\n"
        "    for chunk in chunks:\n"
        "        if chunk.token_id is not None:\n"
        "            count, end = count + 1, time.perf_counter()\n"
        "print(count / (end - start), chunk.stats.tokens_per_second)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(it.folder)], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"[\d.]+ [\d.]+\n", done.stdout)
    watch, told = map(float, done.stdout.split())
    assert told == pytest.approx(watch, rel=0.1)
