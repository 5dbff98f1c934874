"""docs/server.md and contrib/ say what the server takes, and their commands parse."""

from __future__ import annotations

import configparser
import json
import plistlib
import re
import shlex
from pathlib import Path
from types import NoneType
from typing import get_type_hints

import pytest
from typer.main import get_command

from spile.cli import app
from spile.server.wire import ChatBody, CompletionBody
from spile.sizes import parse_size

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "server.md").read_text()


def parsed(command: str) -> dict[str, object]:
    """Parse a `spile serve` command as the shell would; return its flags."""
    name, *arguments = shlex.split(command)[1:]
    subcommand = get_command(app).commands[name]  # type: ignore[attr-defined]
    return dict(subcommand.make_context(name, arguments).params)


def test_table_has_every_parameter_and_no_other() -> None:
    table = PAGE.split("## What is supported")[1].split("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    refused = set(re.findall(r"`(\w+)`", table.split("Refused by name:")[1].split(".")[0]))
    hints = {**get_type_hints(ChatBody), **get_type_hints(CompletionBody)}
    never = {name for name, hint in hints.items() if hint is NoneType} | {"store"}
    assert refused == never
    assert told == set(hints) - never


def test_endpoints_are_the_servers() -> None:
    source = (ROOT / "src" / "spile" / "server" / "app.py").read_text()
    for path in re.findall(r'Route\("(/[\w/]*)', source):
        assert f"`{path.rstrip('/') or '/'}`" in PAGE or path in PAGE, path


@pytest.mark.parametrize("command", re.findall(r"^spile .*", PAGE, re.MULTILINE))
def test_commands_parse(command: str) -> None:
    parsed(command)


@pytest.mark.parametrize("block", re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
def test_json_is_json(block: str) -> None:
    json.loads(block)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_python_is_python(block: str) -> None:
    compile(block, "docs/server.md", "exec")


def test_unit_limits_the_group_a_little_above_the_budget() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "contrib" / "spile.service")
    command = unit["Service"]["ExecStart"]
    assert command.startswith("/")
    budget = parse_size(str(parsed(command)["memory"]), name="memory")
    limit = int(unit["Service"]["MemoryMax"].removesuffix("M")) * 2**20
    assert budget < limit < 1.1 * budget
    assert unit["Service"]["MemorySwapMax"] == "0"


def test_agent_has_the_budget() -> None:
    agent = plistlib.loads((ROOT / "contrib" / "spile.plist").read_bytes())
    flags = parsed(shlex.join(agent["ProgramArguments"]))
    assert parse_size(str(flags["memory"]), name="memory") == agent["HardResourceLimits"]["ResidentSetSize"]
