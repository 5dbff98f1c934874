"""Help fits a screen, says what there is, and is what docs/cli.md says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

from spile.cli import app, run
from spile.commands.help import MOST_ROWS, WIDTH, help_texts

TOOL = Path(__file__).parents[1] / "tools" / "write_cli_docs.py"
HELP = dict(help_texts(app))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_cli_docs", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", HELP)
def test_help_fits_a_screen(path: str) -> None:
    lines = HELP[path].splitlines()
    assert len(lines) <= MOST_ROWS
    assert max(map(len, lines)) <= WIDTH
    assert HELP[path].isascii()


@pytest.mark.parametrize("path", HELP)
def test_every_flag_says_what_it_does(path: str) -> None:
    for line in HELP[path].splitlines():
        if line.startswith("  -"):
            assert len(line.split("  ")) >= 3, line


@pytest.mark.parametrize("path", HELP)
def test_help_is_printed_to_stdout(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*path.split()[1:], "--help"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == HELP[path]


def test_page_is_what_the_commands_say(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run python tools/write_cli_docs.py"


def test_no_command_at_all_shows_the_help_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.rstrip("\n") == HELP["spile"]


def test_shells_can_complete() -> None:
    """What bash asks when someone presses Tab after 'spile ge'."""
    environment = {"_SPILE_COMPLETE": "complete_bash", "COMP_WORDS": "spile ge", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "spile"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["generate"]


def test_page_has_every_flag_of_every_command(tool: ModuleType) -> None:
    """Those that a help leaves out have a list of their own; a command's other name is no command more."""
    sections = tool.PAGE.read_text(encoding="utf-8").split("## spile ")
    group = get_command(app)
    for name, one in group.commands.items():  # type: ignore[attr-defined]
        section = next((text for text in sections if text.startswith(f"{name}\n")), None)
        assert (section is None) == one.hidden, name
        for parameter in [] if section is None else one.params:
            assert parameter.param_type_name == "argument" or parameter.opts[0] in section
    assert "  server " not in HELP["spile"]


@pytest.mark.parametrize("path", [path for path in HELP if "variable: " in HELP[path]])
def test_variable_that_a_help_names_is_of_one_of_its_flags(path: str) -> None:
    variable, flag = re.findall(r"variable: (\w+) for (--[\w-]+)\.", HELP[path])[0]
    assert variable == "SPILE_" + flag.removeprefix("--").replace("-", "_").upper()
    assert f"{flag} " in HELP[path].split("variable")[0] or f"{flag}\n" in HELP[path]
