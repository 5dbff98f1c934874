"""The command line: what goes to which stream, exit codes, and no traceback whatever happens."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeEngine, write_byte_tokenizer
from spile.cli import run

EOS = 256
KEYS = [
    "text",
    "reasoning",
    "token_ids",
    "finish_reason",
    "stopped_by",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "prompt_tokens_per_second",
    "tokens_per_second",
    "time_to_first_token_seconds",
    "peak_memory_bytes",
    "resident_expert_bytes",
    "bytes_read",
    "expert_hits",
    "expert_misses",
    "engine",
    "exact",
]
UNICODE = "\U0001f1e9\U0001f1ea \U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \u4f60\u597d \u05e9\u05dc"
# The command line over a scripted engine, in a process of its own.
SCRIPTED = """
import sys
sys.path.insert(0, {tests!r})
from fakes import FakeEngine, write_byte_tokenizer
import spile.engines
script = {script!r}
delay = {delay!r}
class Engine(FakeEngine):
    def decode(self, *arguments):
        import time
        time.sleep(delay)
        return super().decode(*arguments)
def open_engine(model, options, *, tokenizer_nbytes=0):
    return Engine(script, vocab_size=model.spec.vocab_size)
spile.engines.open_engine = open_engine
from spile.__main__ import main
sys.argv[1:] = {arguments!r}
sys.exit(main())
"""


@pytest.fixture
def model(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A tiny checkpoint whose token ids are bytes."""
    folder = tiny_checkpoint()
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    write_byte_tokenizer(folder, config={"eos_token": "<|endoftext|>", "chat_template": template})
    return folder


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that scripts the answer of the engine that the next command opens."""

    def script(text: str, **options: Any) -> None:
        def open_engine(model: Any, options_: Any, *, tokenizer_nbytes: int = 0) -> FakeEngine:
            return FakeEngine([*text.encode(), EOS], vocab_size=model.spec.vocab_size, **options)

        monkeypatch.setattr("spile.engines.open_engine", open_engine)

    script("Hello")
    return script


def scripted(arguments: list[str], script: list[int], delay: float = 0.0) -> list[str]:
    tests = str(Path(__file__).parent)
    code = SCRIPTED.format(tests=tests, script=script, delay=delay, arguments=arguments)
    return [sys.executable, "-c", code]


def on_terminal(
    command: list[str],
    *,
    rows: int,
    columns: int,
    terminal: str = "xterm",
    end_by: signal.Signals | None = None,
    code: int = 0,
) -> bytes:
    """Run with both streams on one terminal and return what it was sent; `end_by` comes after some tokens."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": terminal}
    shown = b""
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # how Linux says that the other end is closed
                break
            if not data:
                break
            shown += data
            if end_by is not None and shown.count(b"A") > 9:
                process.send_signal(end_by)
                end_by = None
    os.close(ours)
    assert process.returncode == code
    return shown


def generate(model: Path, *arguments: str) -> int:
    return run(["generate", "-m", str(model), "--temp", "0", *arguments])


def test_text_goes_to_stdout_and_all_else_to_stderr(
    model: Path, engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    engine(UNICODE)
    assert generate(model, "Hi") == 0
    out, err = capfd.readouterr()
    assert out == UNICODE + "\n"
    named, *lines = err.splitlines()
    assert named == f"model: {model}"
    assert lines[0] == "memory auto: everything resident (fake)"
    assert re.fullmatch(r"Prompt: \d+ tokens, [\d.,]+ tok/s", lines[1])
    assert re.fullmatch(rf"Generation: {len(UNICODE.encode())} tokens, [\d.,]+ tok/s", lines[2])
    assert re.fullmatch(r"Peak memory: [\d.]+ MB", lines[3])
    assert re.fullmatch(r"Experts: [\d.]+ k?B read, 75\.0 % hits \(\d+ of \d+\)", lines[4])
    assert len(lines) == 5
    assert not set(err) & {"\x1b", "\r"}


def test_json_is_one_object_with_every_key(
    model: Path, engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    engine(UNICODE)
    assert generate(model, "Hi", "--json", "--raw") == 0
    out, _ = capfd.readouterr()
    assert out.count("\n") == 1
    answer = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert [key for key in answer if key in KEYS] == KEYS
    assert answer["text"] == UNICODE
    assert answer["token_ids"] == list(UNICODE.encode())
    assert (answer["finish_reason"], answer["prompt_tokens"], answer["engine"]) == ("stop", 2, "fake")
    assert answer["exact"] is True


@pytest.mark.parametrize("text", ["", "x"])
def test_json_of_a_short_answer_has_null_for_its_rate(
    text: str, model: Path, engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    engine(text)
    assert generate(model, "Hi", "--json") == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["completion_tokens"], answer["tokens_per_second"]) == (len(text), None)


def test_limit_and_finish_reason(model: Path, engine: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "Hi", "--json", "--max-tokens", "3") == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["text"], answer["finish_reason"]) == ("Hel", "length")


def test_every_flag_has_a_variable(
    model: Path, engine: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "MODEL": str(model),
        "PROMPT": "Hi",
        "JSON": "1",
        "MAX_TOKENS": "2",
        "TEMP": "0",
    }.items():
        monkeypatch.setenv(f"SPILE_{name}", value)
    assert run(["generate"]) == 0
    assert json.loads(capfd.readouterr().out)["text"] == "He"

    from typer.main import get_command

    from spile.cli import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    for command in commands.values():
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                flag = max(parameter.opts, key=len).removeprefix("--").upper().replace("-", "_")
                assert parameter.envvar == f"SPILE_{flag}"


def test_command_line_wins_over_a_variable(
    model: Path, engine: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPILE_PROMPT", "x" * 50)
    monkeypatch.setenv("SPILE_MODEL", "/nowhere")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hi")))
    assert run(["chat", str(model), "--temp", "0"]) == 0
    assert capfd.readouterr().out == "Hello\n"
    assert run(["generate", "Hi", "-m", str(model), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["prompt_tokens"] == len("user: Hi")
    assert run(["generate", "Hi"]) == 1
    assert "/nowhere" in capfd.readouterr().err


def test_chat_template_that_is_not_utf8_is_not_to_be_downloaded(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jinja"
    path.write_bytes(b"\xff")
    assert run(["generate", "Hi", "-m", str(model), "--chat-template", str(path)]) == 1
    err = capfd.readouterr().err
    assert f"error: {path} is not UTF-8 text (byte 0)" in err
    assert "hint: Save the template as UTF-8." in err


def test_prompt_comes_from_the_flag_or_standard_input_too(
    model: Path, engine: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stdin(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    def num_tokens(*arguments: str) -> int:
        assert generate(model, "--raw", "--json", *arguments) == 0
        number = json.loads(capfd.readouterr().out)["prompt_tokens"]
        assert isinstance(number, int)
        return number

    assert num_tokens("--prompt", "Hi") == 2
    stdin("H\u00e9\n".encode())
    assert num_tokens("-") == 3
    stdin(b"\xef\xbb\xbfHi\r\n")
    assert num_tokens("--prompt", "-") == 2
    stdin(b"a\nb\n\n")
    assert num_tokens("-") == 4
    stdin(b"Hi \xff")
    assert generate(model, "-") == 2
    assert "error: standard input is not valid UTF-8 at byte 3\n" in capfd.readouterr().err
    monkeypatch.setattr("sys.stdin", None)  # as after <&-
    assert generate(model, "-") == 2
    assert "error: the prompt is empty\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "there is no prompt"),
        (["generate", "a", "--prompt", "b"], "PROMPT was given twice: 'a' and --prompt 'b'"),
        (["generate", "a", "--temp", "-1"], "temperature is -1.0: it must be a number from 0 to 100"),
        (["generate", "a", "--top-p", "2"], "top_p is 2.0"),
        (["generate", "a", "--top-k", "-1"], "top_k is -1"),
        (["generate", "a", "--min-p", "nan"], "min_p is nan"),
        (["generate", "a", "--seed", "-1"], "seed is -1"),
        (["generate", "a", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "a", "--memory", "lots"], "--memory 'lots' is no size"),
        (["generate", "a", "--threads", "0"], "threads is 0"),
        (["generate", "a", "--io", "fast"], "io is 'fast'"),
        (["generate", "a", "--kv-bits", "3"], "kv_bits is 3"),
        (["generate", "a", "--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["generate", "a", "--presence-penalty", "101"], "presence_penalty is 101.0"),
        (["generate", "a", "--frequency-penalty", "nan"], "frequency_penalty is nan"),
        (["generate", "a", "--logit-bias", "1"], "--logit-bias is '1': it must be a token id and a number"),
        (["generate", "a", "--logit-bias", "1=x"], "--logit-bias is '1=x'"),
        (["generate", "a", "--logit-bias", "1=101"], "logit_bias of token 1 is 101.0"),
        (["generate", "a", "--logit-bias", "9999=1"], "logit_bias names token id 9999"),
        (["generate", "a", "--logprobs", "-1", "--json"], "logprobs is -1"),
        (["generate", "a", "--logprobs", "1"], "--logprobs needs --json"),
        (["generate", "a", "--stop", ""], "stop is ['']"),
        (["generate", "a", "--think", "loud"], "--think is 'loud': it must be one of show, hide, off"),
        (["generate", "a", "--template-args", "{"], "--template-args is not valid JSON"),
        (["generate", "a", "--template-args", "3"], "--template-args is a JSON int"),
        (["generate", "a", "--template-args", '{"messages": []}'], "the template argument 'messages'"),
        (["generate", "", "--raw"], "the prompt is empty"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "a\udcff"], "the prompt is not valid UTF-8 at character 1"),
        (["generate", "a", "--system", "ab\udcff"], "--system is not valid UTF-8 at character 2"),
        (["generate", "a", "--stop", "\udcff"], "stop is not valid UTF-8 at character 0"),
        (["chat", "--system", "\udcff"], "--system is not valid UTF-8 at character 0"),
        (["generate", "a", "--raw", "--system", "b"], "system needs the chat template"),
        (["verify", "a", "-m", "b"], "MODEL was given twice: 'a' and --model 'b'"),
        (
            ["synth", "x", "--preset", "huge"],
            "there is no preset 'huge': there are maple-20b, qwen3-30b-a3b-4bit, tiny",
        ),
        (["synth", "x", "--seed", "-1"], "seed -1 is negative"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    model: Path,
    engine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "generate":
        monkeypatch.setenv("SPILE_MODEL", str(model))
    assert run(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert f"error: {message}" in err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 3
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "a", "--bogus"],
        ["generate", "a", "--temp", "hot"],
        ["generate", "a", "b"],
        ["nothing"],
        ["synth"],
        ["convert", "x"],
    ],
)
def test_what_the_parser_refuses_is_exit_code_2(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert re.fullmatch(r"hint: 'spile( \w+)? --help' says what there is\.", second)


@pytest.mark.parametrize("name", ["missing", "~/missing", "./missing/", ""])
def test_missing_model_is_one_sentence_and_exit_code_1(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "a", "-m", name]) == 1
    _, err = capfd.readouterr()
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= 3


def test_prompt_longer_than_the_context_is_exit_code_1_with_both_numbers(
    model: Path, engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert generate(model, "x" * 600, "--raw") == 1
    first, second = capfd.readouterr().err.splitlines()
    assert first == "error: the prompt has 600 tokens and the context holds 512"
    assert second.startswith("hint: Shorten the prompt")
    assert generate(model, "x" * 60, "--raw", "--context", "50") == 1
    assert "the prompt has 60 tokens and the context holds 50" in capfd.readouterr().err


def test_debug_shows_the_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "a", "-m", "missing", "--debug"]) == 1
    err = capfd.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-2 if "hint: " in err else -1].startswith("error: ")


def test_fault_of_ours_is_one_line_too(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the unforeseen")

    monkeypatch.setattr("spile.engines.open_engine", broken)
    assert generate(model, "Hi") == 1
    err = capfd.readouterr().err
    assert err.startswith("error: unexpected RuntimeError: the unforeseen\n")
    assert "Traceback" not in err


def test_model_without_template_is_noted(model: Path, engine: Any, capfd: pytest.CaptureFixture[str]) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert generate(model, "Hi") == 0
    out, err = capfd.readouterr()
    assert out == "Hello\n"
    assert "note: this model has no chat template" in err


def test_verbose_says_more_on_stderr(model: Path, engine: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "Hi", "--verbose") == 0
    out, err = capfd.readouterr()
    assert out == "Hello\n"
    assert all(part in err for part in (f"model: {model}\n", "context ", "temperature=0", "finish: stop"))


def test_ascii_output_neither_fails_nor_breaks(model: Path) -> None:
    command = scripted(["generate", "-m", str(model), "--temp", "0", "Hi"], [*UNICODE.encode(), EOS])
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert done.stdout == UNICODE.encode("ascii", "replace") + b"\n"
    command = scripted(
        ["generate", "-m", str(model), "--temp", "0", "--json", "Hi"], [*UNICODE.encode(), EOS]
    )
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert json.loads(done.stdout)["text"] == UNICODE


def test_utf8_output_is_the_text_byte_by_byte(model: Path) -> None:
    command = scripted(["generate", "-m", str(model), "--temp", "0", "Hi"], [*UNICODE.encode(), EOS])
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    assert subprocess.run(command, capture_output=True, env=environment, check=True).stdout == (
        UNICODE.encode() + b"\n"
    )


def test_interrupt_is_exit_code_130_and_one_line(model: Path) -> None:
    command = scripted(["generate", "-m", str(model), "--temp", "0", "Hi"], [65], delay=0.02)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == b"AAA"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert err.splitlines()[1:] == [b"memory auto: everything resident (fake)", b"interrupted"]


@pytest.mark.parametrize("delay", [0.05, 0.1, 0.2, 0.3])
def test_interrupt_during_imports_and_loading_shows_no_traceback(delay: float, model: Path) -> None:
    command = scripted(["generate", "-m", str(model), "--temp", "0", "Hi"], [65], delay=0.02)
    code = command[2].replace("import sys\n", "import sys, signal\nprint('started', flush=True)\n", 1)
    # The preamble of this test is not the program: only what happens in `main` counts.
    code = code.replace("from spile.__main__", "print('main', flush=True)\nfrom spile.__main__")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == [b"started\n", b"main\n"]
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert err.splitlines()[-1] == b"interrupted"


def test_closed_stdout_is_no_failure_and_no_noise(model: Path) -> None:
    command = scripted(["generate", "-m", str(model), "--temp", "0", "Hi"], [65], delay=0.005)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(2)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=10) == 0
    assert err.splitlines()[1:] == [b"memory auto: everything resident (fake)"]


def test_streams_that_are_closed_from_the_start(model: Path) -> None:
    command = scripted(["generate", "-m", str(model), "--temp", "0", "Hi"], [65, EOS])
    shell = ["sh", "-c", '"$0" "$@" >&-', *command]
    done = subprocess.run(shell, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"error: standard output is closed\n")
    shell = ["sh", "-c", '"$0" "$@" 2>&-', *command]
    done = subprocess.run(shell, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (0, b"A\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_behind_stdout_is_an_error(model: Path) -> None:
    command = scripted(["generate", "-m", str(model), "--temp", "0", "Hi"], [65, EOS])
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1] == b"error: standard output cannot be written: No space left on device"
    )


def test_live_line_appears_on_a_terminal_only_and_goes_away(model: Path) -> None:
    """stderr is a terminal, stdout a pipe: the line is written over and erased before the summary."""
    command = scripted(["generate", "-m", str(model), "--temp", "0", "Hi"], [65] * 12 + [EOS], delay=0.03)
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # how Linux says that the other end is closed
                break
            if not data:
                break
            shown += data
        assert process.stdout is not None
        assert process.stdout.read() == b"A" * 12 + b"\n"
    os.close(ours)
    assert process.returncode == 0
    assert re.search(rb"\r\x1b\[Kreading the prompt: 50 % of \d+ tokens", shown)
    assert re.search(rb"\r\x1b\[K\d+ tokens, [\d.]+ tok/s, memory [\d.]+ MB, 75\.0 % hits", shown)
    assert re.search(rb"\r\x1b\[KPrompt: \d+ tokens", shown)


def test_answer_on_the_same_screen_scrolls_above_the_live_line(model: Path) -> None:
    """The last row is taken out of the scrolling rows (DECSTBM) and given back before the summary."""
    command = scripted(["generate", "-m", str(model), "--temp", "0", "Hi"], [65] * 9 + [EOS], delay=0.03)
    shown = on_terminal(command, rows=10, columns=60)
    begin, end = shown.index(b"\x1b[1;9r"), shown.index(b"\x1b[r")
    assert begin < shown.index(b"\x1b7\x1b[10;1H\x1b[K1 tokens, ") < end < shown.index(b"Prompt: ")
    answer = re.sub(rb"\x1b7.*?\x1b8|\x1bD\x1b\[A|\r", b"", shown[shown.index(b"\x1b[K") :])
    assert b"A" * 9 + b"\nPrompt: " in answer
    for rows, terminal in ((3, "xterm"), (10, "dumb")):
        assert b"\x1b[1;" not in on_terminal(command, rows=rows, columns=60, terminal=terminal)


def test_ended_process_leaves_the_terminal_as_it_was(model: Path) -> None:
    command = scripted(["generate", "-m", str(model), "--temp", "0", "Hi"], [65], delay=0.03)
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        shown = on_terminal(command, rows=10, columns=60, end_by=number, code=code)
        assert b"\x1b[1;9r" in shown
        assert shown.count(b"\x1b[r") == 1
        assert b"Traceback" not in shown


def test_model_cannot_drive_the_terminal(model: Path) -> None:
    """On a terminal escape codes in an answer are shown as question marks; a pipe gets every byte."""
    script = [*b"a\x1b[2Jb\tc\x07", EOS]
    command = scripted(["generate", "-m", str(model), "--temp", "0", "Hi"], script)
    ours, theirs = pty.openpty()
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.DEVNULL, check=True)
    os.close(theirs)
    assert os.read(ours, 4096).replace(b"\r\n", b"\n") == b"a?[2Jb\tc?\n"
    os.close(ours)
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout == b"a\x1b[2Jb\tc\x07\n"


def test_version_and_help_are_quick_and_light() -> None:
    code = (
        "import sys\nfrom spile.cli import run\ncode = run(sys.argv[1:])\n"
        "heavy = {'numpy', 'tokenizers', 'jinja2', 'huggingface_hub', 'psutil'} & set(sys.modules)\n"
        "print(code, sorted(heavy), file=sys.stderr)"
    )
    for arguments in (
        ["--version"],
        ["--help"],
        ["generate", "--help"],
        ["verify", "--help"],
        ["synth", "--help"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
        )
        assert done.stderr == "0 []\n"
        assert "spile" in done.stdout


def test_answering_imports_no_rich(model: Path) -> None:
    """It would take 8 MB of the budget for nothing."""
    command = scripted(["generate", "-m", str(model), "--temp", "0", "Hi"], [EOS])
    code = command[2].replace(
        "sys.exit(main())", "main()\nprint([m for m in sys.modules if m.startswith('rich')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_synth_writes_and_refuses_a_folder_that_is_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "synth"
    arguments = ["synth", str(folder), "--layers", "2", "--experts", "4", "--shards", "2", "--seed", "7"]
    assert run(arguments) == 0
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_experts"]) == (2, 4)
    assert len(list(folder.glob("*.safetensors"))) == 2
    assert run(arguments) == 1
    assert "error: " in capfd.readouterr().err


def test_convert_packs_a_source(golden_bf16: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(golden_bf16), str(tmp_path / "packed")]) == 0
    assert (tmp_path / "packed" / "config.json").exists()
    assert capfd.readouterr().err == f"wrote {tmp_path / 'packed'}\n"


def answer_of(model: Path, capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert generate(model, "Hi", "--json", *arguments) == 0
    answer = json.loads(capfd.readouterr().out)
    assert isinstance(answer, dict)
    return answer


def test_stop_texts_cut_the_answer(model: Path, engine: Any, capfd: pytest.CaptureFixture[str]) -> None:
    engine("alpha beta gamma")
    answer = answer_of(model, capfd, "--stop", "zzz", "--stop", "ta ga")
    assert (answer["text"], answer["finish_reason"], answer["stopped_by"]) == ("alpha be", "stop", "ta ga")
    assert answer["completion_tokens"] == len("alpha beta ga")
    assert generate(model, "Hi", "--stop", "ta ga") == 0
    assert capfd.readouterr().out == "alpha be\n"
    answer = answer_of(model, capfd)
    assert (answer["text"], answer["stopped_by"]) == ("alpha beta gamma", None)


def test_log_probabilities_are_in_the_json(
    model: Path, engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    engine("\u00e9")
    answer = answer_of(model, capfd, "--logprobs", "1")
    assert [one["token_id"] for one in answer["logprobs"]] == [0xC3, 0xA9]
    assert answer["logprobs"][0]["token"] == "\ufffd"  # half a character
    assert answer["logprobs"][0]["top"] == [
        {key: answer["logprobs"][0][key] for key in ("token_id", "token", "logprob")}
    ]
    assert answer["logprobs"][0]["logprob"] == pytest.approx(0, abs=1e-6)
    assert "logprobs" not in answer_of(model, capfd)
    assert answer_of(model, capfd, "--logprobs", "0")["logprobs"][0]["top"] == []


def test_bias_penalty_and_ignored_ends_reach_the_sampler(
    model: Path, engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    engine("AB")
    assert answer_of(model, capfd, "--logit-bias", "65=-100", "--max-tokens", "2")["token_ids"] == [0, 66]
    answer = answer_of(model, capfd, "--ignore-eos", "--max-tokens", "4")
    assert (answer["token_ids"], answer["finish_reason"]) == ([65, 66, 0, 0], "length")
    engine("AAAA")
    assert answer_of(model, capfd, "--presence-penalty", "60", "--max-tokens", "3")["token_ids"] == [65, 0, 1]
    assert answer_of(model, capfd, "--frequency-penalty", "30", "--max-tokens", "3")["token_ids"] == [
        65,
        65,
        0,
    ]


@pytest.fixture
def thinker(model: Path) -> Path:
    """A model whose template knows the markers and the switch."""
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ note }}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    write_byte_tokenizer(model, config={"eos_token": "<|endoftext|>", "chat_template": template})
    return model


def test_reasoning_is_no_part_of_stdout_in_a_pipe(
    thinker: Path, engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    engine("<think>\nHm \u4f60.\n</think>\n\nYes.")
    assert generate(thinker, "Hi") == 0
    out, err = capfd.readouterr()
    assert out == "Yes.\n"
    assert "[thinking]\nHm \u4f60.\nPrompt: " in err
    assert generate(thinker, "Hi", "--think", "hide") == 0
    out, err = capfd.readouterr()
    assert out == "Yes.\n"
    assert "Hm" not in err
    answer = answer_of(thinker, capfd)
    assert (answer["reasoning"], answer["text"]) == ("Hm \u4f60.", "Yes.")


def test_limit_inside_of_the_reasoning_is_said(
    thinker: Path, engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    engine("<think>Hm.</think>Yes.")
    assert generate(thinker, "Hi", "--max-tokens", "9") == 0
    out, err = capfd.readouterr()
    assert out == "\n"
    assert "note: the limit of 9 tokens fell inside of the reasoning, before any answer; --think off" in err
    assert generate(thinker, "Hi", "--max-tokens", "19") == 0
    assert "note: " not in capfd.readouterr().err


def test_template_flags_reach_the_template(
    thinker: Path, engine: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert answer_of(thinker, capfd, "--template-args", '{"note": "abc"}')["prompt_tokens"] == 5
    assert answer_of(thinker, capfd, "--think", "off")["prompt_tokens"] == 2 + len("<think></think>")
    path = tmp_path / "mine.jinja"
    path.write_text("four")
    assert answer_of(thinker, capfd, "--chat-template", str(path))["prompt_tokens"] == 4
    path.write_text("{{ raise_exception('no\nway') }}")
    assert generate(thinker, "Hi", "--chat-template", str(path)) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "error: the chat template refuses the messages: no way"
    assert generate(thinker, "Hi", "--chat-template", str(tmp_path / "none")) == 1
    assert "error: there is no chat template " in capfd.readouterr().err


def test_large_prompt_from_a_pipe_is_refused_or_read_whole(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = ("word " * 40_000).encode()
    command = scripted(["generate", "-m", str(model), "--raw", "--json", "-"], [65, EOS])
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"error: the prompt has 200,000 tokens and the context holds 512\n")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 300_000}))
    command[2] = command[2].replace("vocab_size=model", "context=300_000, vocab_size=model")
    done = subprocess.run(command, input=text, capture_output=True, check=True)
    assert json.loads(done.stdout)["prompt_tokens"] == 200_000


def test_closed_stdout_of_help_is_no_noise() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "spile", "generate", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["--version"], ["plan", "--no-probe"]])
def test_full_disk_is_one_line_for_every_output(arguments: list[str]) -> None:
    """Broke: "unexpected OSError ... this is a fault in spile"."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "spile", *arguments], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert done.stderr == b"error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(12, "x"), ImportError("x.so: failed to map segment from shared object")]
)
def test_no_memory_is_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(source: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("spile.loading.load", refuse)
    assert run(["generate", "Hi"]) == 1
    assert capfd.readouterr().err.startswith("error: not enough memory: ")


@pytest.mark.parametrize("flag", [["--manifest", "m.json"], ["--record"]])
def test_verify_without_files_has_nothing_to_record(
    flag: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", "--no-files", *flag]) == 2
    assert f"--no-files and {flag[0]} contradict each other" in capfd.readouterr().err


def test_verify_has_no_table_over_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--tokens", "0"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "tokens must be at least 1" in err


def test_interrupt_during_the_imports_is_quiet() -> None:
    """Broke: a traceback of whatever was being imported."""
    code = "import os, signal, sys, spile.__main__ as m\n"
    code += "class Finder:\n  def find_spec(self, name, *rest):\n"
    code += "    if name == 'spile.cli': os.kill(os.getpid(), signal.SIGINT)\n"
    code += "sys.meta_path.insert(0, Finder())\nsys.exit(m.main())\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")


@pytest.mark.parametrize("name", ["model", "model/", "weights.safetensors", "weights.gguf"])
def test_prompt_that_is_a_model_here_is_asked_about(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "weights.safetensors").touch()
    (tmp_path / "weights.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert run(["generate", name]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert f"-m {name} " in err
    assert f"--prompt {name}" in err


def test_prompt_flag_sends_a_folders_name(
    model: Path,
    engine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "words").mkdir()
    monkeypatch.chdir(tmp_path)
    for arguments in (["--prompt", "words"], ["words"]):  # with -m a word is a word
        assert generate(model, *arguments) == 0
        assert capfd.readouterr().out == "Hello\n"


def test_generate_with_the_demo_says_so_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "Once", "--max-tokens", "1"]) == 0
    out, err = capfd.readouterr()
    assert "demo" not in out
    assert "model: the demo, a toy of 7 MB" in err


@pytest.mark.parametrize("command", ["", "generate", "serve", "bench", "bench trace"])
def test_short_help_flag_is_the_long_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "-h"]) == 0
    short = capsys.readouterr().out
    assert run([*command.split(), "--help"]) == 0
    assert short == capsys.readouterr().out
