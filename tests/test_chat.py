"""A conversation: what the model is asked, what is held, what commands do; keys on a pseudo-terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeEngine, write_byte_tokenizer
from pseudo_terminal import Keys
from spile.cli import run
from spile.console.chat import Chat, ChatOptions, commands
from spile.errors import ContextError, OptionError
from spile.model import Model
from spile.text.sidecar import read_sidecar
from spile.text.tokenizer import open_tokenizer

EOS, START = 256, 257
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


class Script:
    """Lines as a person would type them. A function among them is called when its turn comes."""

    def __init__(self, *steps: str | Callable[[], None]) -> None:
        self._steps = list(steps)
        self.remembered: list[str] = []

    def read(self, prompt: str) -> str:
        while self._steps:
            step = self._steps.pop(0)
            if isinstance(step, str):
                return step
            step()
        raise EOFError

    def remember(self, message: str) -> None:
        self.remembered.append(message)


class Case:
    """A chat over a scripted engine whose tokens are bytes; `<s>` and `<e>` are special."""

    def __init__(self, folder: Path, *, template: str = TEMPLATE, **engine: Any) -> None:
        config = {"eos_token": "<e>", "chat_template": template}
        write_byte_tokenizer(folder, special=("<e>", "<s>"), config=config)
        self.engine = FakeEngine([EOS], **engine)
        self.notes: list[str] = []
        self.says("Hello")
        self.model = Model(
            open_engine=lambda: self.engine,
            config={"eos_token_id": EOS},
            sidecar=read_sidecar(folder),
            tokenizer=open_tokenizer(folder, config={}),
            plan_context=lambda: self.engine.context,
            vocab_size=300,
            on_note=self.notes.append,
        )
        self.chat: Chat | None = None

    def says(self, text: str) -> None:
        self.engine.script = [*text.encode(), EOS]

    def run(
        self,
        *steps: str | Callable[[], None],
        system: str | None = None,
        is_interactive: bool = True,
        think: str = "show",
        overflow: str = "stop",
        **sampling: Any,
    ) -> Chat:
        options = ChatOptions(
            self.model.sampling.changed({"temperature": 0, **sampling}), {}, think, overflow
        )
        self.chat = Chat(self.model, options, Script(*steps), system=system, is_interactive=is_interactive)
        self.chat.run()
        return self.chat

    @property
    def read(self) -> list[str]:
        """What the engine had to read, prompt by prompt, as text."""
        marks = {EOS: b"<e>", START: b"<s>"}
        return [
            b"".join(marks.get(i) or bytes([i]) for i in call[1]).decode()
            for call in self.engine.calls
            if call[0] == "prefill"
        ]


@pytest.fixture
def case(tmp_path: Path) -> Callable[..., Case]:
    return lambda **options: Case(tmp_path, **options)


def test_answers_go_to_stdout_and_all_else_to_stderr(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    case().run("Hi", "/stats")
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert "/help lists the commands" in err
    assert "Generation: 5 tokens" in err
    assert "Context: " in err


def test_second_turn_reads_only_what_is_new(case: Callable[..., Case]) -> None:
    it = case()
    it.run("Hi", lambda: it.says("Fine"), "How are you?", "And now?")
    assert it.read == [
        "<s>user:Hi<e><s>assistant:",
        "<e><s>user:How are you?<e><s>assistant:",
        "<e><s>user:And now?<e><s>assistant:",
    ]
    assert len(it.engine.states) == 1
    text = "<s>user:Hi<e><s>assistant:Hello<e><s>user:How are you?<e><s>assistant:Fine<e><s>user:And now?<e>"
    assert it.model.tokenizer is not None
    whole = it.model.tokenizer.encode(text + "<s>assistant:")
    assert it.engine.states[0].fed == [*whole, *b"Fine"]


def test_prompts_ids_do_not_depend_on_what_is_held(case: Callable[..., Case]) -> None:
    """Each turn encodes the whole text, and goes on from what the ids have in common with those held."""
    it = case()
    assert it.model.tokenizer is not None
    texts: list[str] = []
    encode = it.model.tokenizer.encode

    def recorded(text: str, *more: Any) -> list[int]:
        texts.append(text)
        return encode(text, *more)

    it.model.tokenizer.encode = recorded  # type: ignore[method-assign]
    it.run("Hi", "Again")
    first = "<s>user:Hi<e><s>assistant:"
    assert texts == [first, first + "Hello<e><s>user:Again<e><s>assistant:"]
    assert it.read == [first, "<e><s>user:Again<e><s>assistant:"]


def test_template_that_changes_the_answer_is_compared_id_by_id(case: Callable[..., Case]) -> None:
    """It trims: the state goes on from the last id that is still the same."""
    it = case(template=TEMPLATE.replace("m.content", "m.content | trim"))
    it.says(" Hello ")
    it.run("Hi", "Again")
    assert it.read == ["<s>user:Hi<e><s>assistant:", "Hello<e><s>user:Again<e><s>assistant:"]
    assert len(it.engine.states) == 1


def test_reasoning_is_shown_apart_and_not_sent_back(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    it = case(template=THINKING)
    it.says("<think>Hm.</think>Yes.")
    it.run("Hi", "Sure?")
    out, err = capsys.readouterr()
    assert out == "Yes.\nYes.\n"
    assert err.count("[thinking]\nHm.\n") == 2
    assert it.read == ["<s>user:Hi<e><s>assistant:", "Yes.<e><s>user:Sure?<e><s>assistant:"]


def test_reasoning_can_be_hidden_or_switched_off(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    it = case(template=THINKING)
    it.says("<think>Hm.</think>Yes.")
    it.run("Hi", think="hide")
    assert "Hm." not in "".join(capsys.readouterr())
    it.says("Yes.")
    it.run("/set think off", "Hi")
    assert it.read[-1].endswith("<think></think>")


def test_limit_inside_of_the_reasoning_is_said(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    it = case(template=THINKING)
    it.says("<think>Hm, let me see.</think>Yes.")
    chat = it.run("Hi", max_tokens=12)
    assert "note: the limit of 12 tokens fell inside of the reasoning, before any answer" in (
        capsys.readouterr().err
    )
    assert chat._conversation.turns == []  # nothing was answered


def test_system_undo_and_reset_change_what_is_sent(case: Callable[..., Case]) -> None:
    it = case()
    it.run("/system Be brief.", "A", "B", "/undo", "C", "/reset", "D", '/system ""', "E")
    prompts = [bytes(i if i < 256 else ord("|") for i in state.fed) for state in it.engine.states]
    assert len(it.read) == 5
    assert it.read[0] == "<s>system:Be brief.<e><s>user:A<e><s>assistant:"
    assert it.read[2] == "C<e><s>assistant:"  # goes on where B began
    assert it.read[3] == "<s>system:Be brief.<e><s>user:D<e><s>assistant:"
    assert prompts[-1].startswith(b"|user:D")


def test_wrong_commands_are_one_line_and_the_conversation_goes_on(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    it = case()
    it.run(
        "/bogus",
        "/save",
        "/load /nowhere/x",
        "/set temp hot",
        "/set nothing 3",
        "/set temp",
        "/set seed -1",
        "Hi",
    )
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    errors = [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]
    assert errors[0] == "there is no command /bogus"
    assert errors[1] == "/save needs a file's name"
    assert errors[2] == "/nowhere/x cannot be read: No such file or directory"
    assert errors[3].startswith("temperature is 'hot'")
    assert errors[4] == "there is no setting 'nothing'"
    assert errors[5] == "temp needs a value"
    assert errors[6].startswith("seed is -1")
    assert len(errors) == 7


def test_every_command_of_the_help_is_there(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    chat = case().run("/help")
    assert set(commands()) == set(chat._commands)
    assert all(name in capsys.readouterr().err or name for name in commands())


def test_set_changes_sampling_and_shows_it(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    it = case()
    it.run(
        "/set temp 0.5",
        "/set top_k=7",
        "/set max-tokens 2",
        "/set stop ll",
        "/set",
        "/set max-tokens default",
        "Hi",
    )
    out, err = capsys.readouterr()
    assert re.search(r"^temp +0\.5$", err, re.MULTILINE)
    assert re.search(r"^top-k +7$", err, re.MULTILINE)
    assert re.search(r"^max-tokens +2$", err, re.MULTILINE)
    assert re.search(r"^seed +-$", err, re.MULTILINE)
    assert out == "He\n"


def test_words_that_begin_with_a_slash_are_no_commands(case: Callable[..., Case]) -> None:
    it = case()
    it.run("/usr/bin is a folder", " /help me", "/ 2")
    assert len(it.read) == 3


def test_save_and_load_go_on_from_where_it_was(
    case: Callable[..., Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    it = case()
    path = tmp_path / "talk.json"
    it.run("Hi", f"/save {path}", f"/save {path}", "/reset", f"/load {path}", "Again", system="Be brief.")
    assert json.loads(path.read_text()) == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
        ]
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert it.read[1] == (
        "<s>system:Be brief.<e><s>user:Hi<e><s>assistant:Hello<e><s>user:Again<e><s>assistant:"
    )
    assert "error" not in capsys.readouterr().err


def test_save_replaces_no_other_file(
    case: Callable[..., Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    case().run("Hi", f"/save {path}")
    assert path.read_text() == "mine"
    assert f"error: {path} is there and holds no conversation" in capsys.readouterr().err


def test_conversation_longer_than_the_context_is_refused_with_both_numbers(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    it = case(context=60)
    chat = it.run("Hi", "x" * 60)
    err = capsys.readouterr().err
    assert "error: the prompt has 104 tokens and the context holds 60" in err
    assert "hint: /reset or /undo makes room, and /set overflow drop-oldest does so by itself." in err
    assert [turn[0]["content"] for turn in chat._conversation.turns] == ["Hi"]
    assert len(it.read) == 1


def test_full_context_ends_the_answer_and_says_so(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    it = case(context=40)
    it.says("x" * 100)
    it.run("Hi")
    assert "note: the context of 40 tokens is full and the answer ends here; /reset or /undo makes room" in (
        capsys.readouterr().err
    )


def test_oldest_turns_are_dropped_where_that_was_chosen(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each turn takes 28 tokens of 120; room for an answer is a quarter of the context."""
    it = case(context=120)
    chat = it.run("A1", "B2", "C3", "D4", "E5", overflow="drop-oldest", system="S")
    err = capsys.readouterr().err
    assert "the context of 120 tokens is nearly full: the oldest " in err
    assert "error" not in err
    contents = [turn[0]["content"] for turn in chat._conversation.turns]
    assert contents[-1] == "E5"
    assert 1 < len(contents) < 5
    assert all(len(state.fed) <= 120 for state in it.engine.states)
    assert it.read[-1].count("assistant:") >= 1


def test_pipe_ends_with_the_first_error(case: Callable[..., Case]) -> None:
    it = case(context=60)
    with pytest.raises(ContextError):
        it.run("x" * 60, "Hi", is_interactive=False)
    with pytest.raises(OptionError, match="no command /bogus"):
        it.run("/bogus", is_interactive=False)


def test_exit_leaves_at_once(case: Callable[..., Case]) -> None:
    it = case()
    it.run("/exit", "Hi")
    assert it.read == []


class Interrupted(FakeEngine):
    """Ctrl-C is pressed while it works on the n-th token, or while it reads."""

    press_at = 3

    def decode(self, state: Any, token_id: int) -> Any:
        if state.position - self._num_prompt == self.press_at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().decode(state, token_id)


def test_ctrl_c_stops_the_answer_and_keeps_what_there_is(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    it = case()
    it.engine = Interrupted([*b"Hello", EOS])
    before = signal.getsignal(signal.SIGINT)
    chat = it.run("Hi", lambda: setattr(it.engine, "press_at", 99), "Again")
    assert signal.getsignal(signal.SIGINT) is before
    out, err = capsys.readouterr()
    assert out == "Hello\nHello\n" or out == "Hell\nHello\n"
    stopped = out.splitlines()[0]
    assert "(stopped)" in err
    assert chat._conversation.turns[0][1]["content"] == stopped
    # The state goes on from the stopped answer, of which the last token was never fed.
    assert it.read[1] == f"{stopped[-1]}<e><s>user:Again<e><s>assistant:"
    assert len(it.engine.states) == 1


def test_ctrl_c_while_the_prompt_is_read_takes_the_message_back(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    class Reading(FakeEngine):
        presses = True

        def prefill(self, state: Any, token_ids: Any, on_progress: Any = None) -> Any:
            if self.presses:
                self.presses = False
                os.kill(os.getpid(), signal.SIGINT)
            return super().prefill(state, token_ids, on_progress)

    it = case()
    it.engine = Reading([*b"Hello", EOS])
    it.run("Hi", "Again")
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert "(stopped)" in err
    assert "user:Hi" not in it.read[1]


def test_second_ctrl_c_keeps_what_there_is_of_the_answer(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    class Impatient(FakeEngine):
        def decode(self, state: Any, token_id: int) -> Any:
            if state.position - self._num_prompt == 2:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return super().decode(state, token_id)

    it = case()
    it.engine = Impatient([*b"Hello", EOS])
    chat = it.run("Hi", "/stats")
    out, err = capsys.readouterr()
    assert out == "Hel\n"
    assert "(stopped)" in err
    assert "the last answer was stopped" in err
    assert [message["content"] for message in chat._conversation.turns[0]] == ["Hi", "Hel"]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/save ~nosuchuser/x", "'~nosuchuser/x' names the home folder of a user who has none here"),
        ("/load ~nosuchuser/x", "'~nosuchuser/x' names the home folder of a user who has none here"),
        ("/save " + "x" * 300, "x" * 300 + " cannot be written: File name too long"),
        ("/load " + "x" * 300, "x" * 300 + " cannot be read: File name too long"),
        ("/save a\0b", "'a\\x00b' cannot be written: embedded null byte"),
        ("/load a\0b", "'a\\x00b' cannot be read: embedded null byte"),
        ("/save /dev/zero", "/dev/zero is there and holds no conversation"),
        ("/load /dev/zero", "/dev/zero cannot be read: it is not a regular file"),
    ],
)
def test_slip_in_a_files_name_loses_nothing(
    line: str,
    error: str,
    case: Callable[..., Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    chat = case().run("Hi", line)
    assert f"error: {error}\n" in capsys.readouterr().err
    assert len(chat._conversation.turns) == 1


def test_fault_in_a_command_is_one_line_and_the_conversation_goes_on(
    case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(Chat, "_save", fail)
    chat = case().run("Hi", "/save x", "Again")
    assert "error: /save failed: unexpected ZeroDivisionError: by zero\n" in capsys.readouterr().err
    assert len(chat._conversation.turns) == 2
    with pytest.raises(ZeroDivisionError):
        case().run("/save x", is_interactive=False)


def test_hints_of_set_name_what_can_be_given(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    it = case()
    chat = it.run(
        "/set seed 3", "/set seed none", "/set seed", "/set stop", "/set temp", "/set think", "/help"
    )
    assert chat._options.sampling.seed is None
    err = capsys.readouterr().err
    assert [line for line in err.splitlines() if line.startswith("hint: ")] == [
        "hint: Such as /set seed 7; /set seed default gives the default back.",
        "hint: Such as /set stop ###; /set stop default gives the default back.",
        "hint: Such as /set temp 0; /set temp default gives the default back.",
        "hint: It is one of show, hide, off.",
    ]
    assert "/set NAME default" in err


@pytest.mark.parametrize("overflow", ["drop-oldest", "stop"])
def test_single_message_that_is_too_long_is_not_told_to_make_room(
    overflow: str, case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    case(context=60).run("x" * 60, overflow=overflow)
    err = capsys.readouterr().err
    assert "hint: Shorten the prompt" in err
    assert "drop-oldest" not in err


def test_ctrl_c_in_a_pipe_ends_the_program(case: Callable[..., Case]) -> None:
    it = case()
    it.engine = Interrupted([*b"Hello", EOS])
    with pytest.raises(KeyboardInterrupt):
        it.run("Hi", is_interactive=False)


def has_gnu_readline() -> bool:
    try:
        import readline
    except ImportError:
        return False
    return "libedit" not in (readline.__doc__ or "")


needs_gnu_readline = pytest.mark.skipif(not has_gnu_readline(), reason="needs GNU readline")


# The command itself, over a scripted engine in a process of its own.
SCRIPTED = """
import sys, time
sys.path.insert(0, {tests!r})
from fakes import FakeEngine
import spile.engines
class Engine(FakeEngine):
    def decode(self, *arguments):
        time.sleep({delay!r})
        return super().decode(*arguments)
spile.engines.open_engine = lambda model, options: Engine(
    [*{answer!r}, 256], vocab_size=model.spec.vocab_size, context={context!r}
)
from spile.__main__ import main
sys.argv[1:] = {arguments!r}
sys.exit(main())
"""


@pytest.fixture
def command(tiny_checkpoint: Callable[..., Path]) -> Callable[..., list[str]]:
    """A function that returns the command of a chat whose answers are this text."""
    folder = tiny_checkpoint()

    def make(
        answer: str, *arguments: str, delay: float = 0.0, context: int = 400, template: str = TEMPLATE
    ) -> list[str]:
        config = {"eos_token": "<e>", "chat_template": template}
        write_byte_tokenizer(folder, special=("<e>", "<s>"), config=config)
        code = SCRIPTED.format(
            tests=str(Path(__file__).parent),
            delay=delay,
            answer=answer.encode(),
            context=context,
            arguments=["chat", str(folder), "--temp", "0", *arguments],
        )
        return [sys.executable, "-c", code]

    return make


@pytest.fixture
def keys() -> Iterator[Callable[..., Keys]]:
    """A function that starts a command on a pseudo-terminal of its own."""
    opened: list[Keys] = []

    def start(command: list[str], **options: Any) -> Keys:
        opened.append(Keys(command, **options))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@needs_gnu_readline
def test_keys_make_a_conversation(command: Callable[..., list[str]], keys: Callable[..., Keys]) -> None:
    it = keys(command("Hello there"))
    it.wait("> ")
    it.press("Hi\r")
    it.wait("Hello there")
    it.wait("context 31 of 400]")
    it.wait("> ")
    it.press("/st\t\r")  # completed
    it.wait("Generation: 11 tokens")
    it.wait("> ")
    it.press("\x1b[A\x1b[A\r")  # the message before the last
    it.wait("Hello there")
    it.wait("> ")
    it.press("one\\\r")
    it.wait(". ")
    it.press("two\r")
    it.wait("Hello there")
    it.wait("> ")
    it.press('"""\rthree\r\rfour"""\r')
    it.wait("Hello there")
    it.wait("> ")
    it.press("\x04")
    assert it.end() == 0
    history = Path(os.environ["HOME"]) / ".local" / "state" / "spile" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert [json.loads(line) for line in history.read_text().splitlines()] == [
        "Hi",
        "/stats ",
        "Hi",
        "one\ntwo",
        "\nthree\n\nfour",
    ]


def test_ctrl_c_stops_the_answer_clears_the_line_and_ctrl_d_leaves(
    command: Callable[..., list[str]], keys: Callable[..., Keys]
) -> None:
    it = keys(command("A" * 300, delay=0.02))
    it.wait("> ")
    it.press("Hi\r")
    it.wait("AAAA")
    it.press("\x03")
    it.wait("(stopped)")
    it.wait("> ")
    it.press("not sent")
    it.wait("not sent")
    time.sleep(0.2)  # Python misses a Ctrl-C in the microseconds between the echo and its next select()
    it.press("\x03")
    it.wait("(Ctrl-D or /exit leaves)")
    it.wait("> ")
    it.press("/stats\r")
    it.wait("the last answer was stopped")
    it.wait("> ")
    it.press("\x04")
    assert it.end() == 0
    assert "Traceback" not in it.shown


def test_bottom_line_follows_the_terminal_and_goes_away(
    command: Callable[..., list[str]], keys: Callable[..., Keys]
) -> None:
    it = keys(command("A" * 60, delay=0.03), rows=20, columns=70)
    it.wait("> ")
    it.press("Hi\r")
    it.wait_code("\x1b[1;19r")
    it.wait_code("\x1b[20;1H\x1b[K")
    it.wait_code("tok/s, memory ")
    it.wait_code("75.0 % hits, context ")
    it.resize(rows=12, columns=40)
    it.wait_code("\x1b[1;11r")
    it.wait_code("\x1b[r")
    it.wait("> ")
    it.press("/exit\r")
    assert it.end() == 0


@pytest.mark.parametrize(
    ("environment", "dims"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)],
)
def test_thinking_is_dimmed_where_the_terminal_can(
    environment: dict[str, str], dims: bool, command: Callable[..., list[str]], keys: Callable[..., Keys]
) -> None:
    it = keys(command("<think>Hm.</think>Yes.", template=THINKING), environment=environment)
    it.wait("> ")
    it.press("Hi\r")
    it.wait("Yes.")
    it.wait("> ")
    it.press("\x04")
    assert it.end() == 0
    if dims:
        assert "\x1b[2mHm.\x1b[0m\r\n\r\nYes." in it.text
    else:
        assert "[thinking]\r\nHm.\r\n[answer]\r\nYes." in it.text
        assert "\x1b[2m" not in it.shown
    if environment.get("TERM") == "dumb":
        assert "\x1b" not in it.shown


@needs_gnu_readline
def test_pasted_lines_are_one_message(command: Callable[..., list[str]], keys: Callable[..., Keys]) -> None:
    it = keys(command("Hello"))
    it.wait("> ")
    it.press("\x1b[200~one\ntwo\x1b[201~\r")
    it.wait("Hello")
    it.wait("> ")
    it.press("/save talk.json\r")
    it.wait("wrote talk.json")
    it.wait("> ")
    it.press("\x04")
    assert it.end() == 0
    messages = json.loads((it.folder / "talk.json").read_text())["messages"]
    assert [message["content"] for message in messages] == ["one\ntwo", "Hello"]


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
@pytest.mark.parametrize("terminal", [pytest.param("", marks=needs_gnu_readline), "dumb"])
def test_lines_pasted_through_a_terminal_are_one_message(
    terminal: str, command: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The terminal decides whether it marks what is pasted, by what the program asked of it."""
    tmux = ["tmux", "-S", str(tmp_path / "socket")]
    program = [*(["env", "TERM=dumb"] if terminal else []), *command("Hello")]
    subprocess.run(
        [*tmux, "new-session", "-d", "-x", "80", "-y", "24", "-c", str(tmp_path), *program], check=True
    )

    def wait(text: str, count: int = 1) -> None:
        deadline, screen = time.monotonic() + 15, ""
        while time.monotonic() < deadline:
            screen = subprocess.run(
                [*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True
            ).stdout
            if screen.count(text) >= count:
                return
            time.sleep(0.05)
        raise AssertionError(f"never showed {text!r}: {screen}")

    try:
        wait("\n>")
        pasted = "one\n  two\n\nthree = 3"
        subprocess.run([*tmux, "set-buffer", pasted], check=True)
        subprocess.run([*tmux, "paste-buffer", "-p"], check=True)
        subprocess.run([*tmux, "send-keys", "Enter"], check=True)
        wait("Hello")
        subprocess.run([*tmux, "send-keys", "/save talk.json", "Enter"], check=True)
        wait("wrote talk.json")
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["content"] for message in messages] == [pasted, "Hello"]


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_ways_out_of_a_chat(word: str, case: Callable[..., Case]) -> None:
    it = case()
    it.run(word, "never sent")
    assert it.read == []


def test_budget_that_cannot_be_kept_is_refused_before_anything_is_typed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(["chat", "--memory", "20MB"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "> " not in err
    assert "and the budget is 20.0 MB" in err


def test_chat_names_its_model_at_the_start(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    case().run()
    first, second = capsys.readouterr().err.splitlines()[:2]
    assert first.startswith("model: ")
    assert second == "memory auto: everything resident (fake)"


def test_chat_with_the_demo_says_that_it_is_a_toy(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert run(["chat"]) == 0
    assert "model: the demo, a toy" in capfd.readouterr().err


def test_terminated_chat_leaves_the_terminal_as_it_was(
    command: Callable[..., list[str]], keys: Callable[..., Keys]
) -> None:
    it = keys(command("A" * 300, delay=0.02), rows=20)
    it.wait("> ")
    it.press("Hi\r")
    it.wait_code("\x1b[1;19r")
    it.signal(signal.SIGTERM)
    assert it.end() == 143
    assert it.shown.count("\x1b[r") == 1
    assert "Traceback" not in it.shown


def test_pipe_gets_answers_only(command: Callable[..., list[str]]) -> None:
    done = subprocess.run(
        command("Hello"), input=b"Hi\n\n/set temp 0.5\nAgain", capture_output=True, check=True
    )
    assert done.stdout == b"Hello\nHello\n"
    assert b"\x1b" not in done.stderr
    assert b"> " not in done.stderr


def test_pipe_with_broken_text_is_refused_with_its_place(command: Callable[..., list[str]]) -> None:
    done = subprocess.run(command("Hello"), input=b"Hi\nab\xff\n", capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stdout == b"Hello\n"
    assert b"error: standard input is not valid UTF-8 at byte 5\n" in done.stderr


def test_large_prompt_from_a_pipe_is_refused_by_its_length(command: Callable[..., list[str]]) -> None:
    text = b"word " * 40_000 + b"\n"
    done = subprocess.run(command("Hello"), input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"error: the prompt has 200,018 tokens and the context holds 400\n" in done.stderr


def test_closed_stdout_ends_the_chat_quietly(command: Callable[..., list[str]]) -> None:
    with subprocess.Popen(
        command("A" * 300, delay=0.005), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"Hi\nHi\n")
        process.stdin.close()
        process.stdout.read(2)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=10) == 0
    assert b"Traceback" not in err
    assert b"error" not in err


def test_closed_stdin_is_the_end(command: Callable[..., list[str]]) -> None:
    done = subprocess.run(["sh", "-c", '"$0" "$@" <&-', *command("Hello")], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"")


def test_model_that_cannot_chat_is_refused_at_the_start(
    tiny_checkpoint: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_checkpoint()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    write_byte_tokenizer(folder, config={"eos_token": "<|endoftext|>"})
    assert run(["chat", str(folder)]) == 1
    first, second = capfd.readouterr().err.splitlines()
    assert first == f"error: {folder} has no chat template, and a conversation needs one"
    assert second.startswith("hint: Give one by --chat-template")
    (folder / "tokenizer.json").unlink()
    assert run(["chat", str(folder)]) == 1
    assert "has no tokenizer" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--overflow", "wrap"], "--overflow is 'wrap': it must be one of stop, drop-oldest"),
        (["--think", "aloud"], "--think is 'aloud': it must be one of show, hide, off"),
        (["--temp", "-1"], "temperature is -1.0"),
        (["--template-args", "{"], "--template-args is not valid JSON"),
        (["--template-args", "[]"], "--template-args is a JSON list: it must be an object"),
        (["--logit-bias", "x=1"], "--logit-bias is 'x=1'"),
        (["a", "-m", "b"], "MODEL was given twice"),
    ],
)
def test_wrong_flags_are_refused_before_a_model_is_looked_for(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["chat", *arguments]) == 2
    assert f"error: {message}" in capfd.readouterr().err


def test_demo_model_talks(keys: Callable[..., Keys]) -> None:
    """The real engine behind real keys: two turns, the second going on from the first."""
    command = [sys.executable, "-m", "spile", "chat", "--max-tokens", "12", "--seed", "1"]
    it = keys(command)
    it.wait("> ", seconds=20)
    it.press("Hello\r")
    it.wait("of 1,024]")
    it.wait("> ")
    it.press("Tell me a story\r")
    it.wait("of 1,024]")
    it.wait("> ")
    it.press("/stats\r")
    it.wait("of the prompt were held")
    it.wait("> ")
    it.press("\x04")
    assert it.end() == 0
    held = re.search(r"([\d,]+) of the prompt were held", it.shown)
    assert held is not None
    assert int(held[1]) >= 22


def test_answer_of_nothing_takes_the_message_back_and_says_so(
    case: Callable[..., Case], capsys: pytest.CaptureFixture[str]
) -> None:
    it = case()
    it.says("")
    chat = it.run("Hi")
    out, err = capsys.readouterr()
    assert out == ""
    assert "(no answer: the message is taken back)" in err
    assert chat._conversation.messages == []
