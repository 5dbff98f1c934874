"""The README, the public names and the command line say the same."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import spile
from spile import errors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    """Return every `spile ...` line of the README's code blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = (part for block in blocks for line in block.splitlines() for part in line.split(" && "))
    return [line for line in lines if line.startswith("spile ")]


def test_rows_of_folders_name_their_files() -> None:
    """A folder's row in docs/architecture.md names each of its own files that has no row by itself."""
    table = (ROOT / "docs" / "architecture.md").read_text().split("## Rooms")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    listed = {name: row.split("|")[2] for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    source = ROOT / "src" / "spile"
    told_elsewhere = {"architectures", "engines", "commands"}  # one file an architecture, engine or command
    for folder in (path.parent for path in source.glob("*/__init__.py")):
        if folder.name not in told_elsewhere:
            named = set(re.findall(r"`([^`]+\.py)`", listed[f"{folder.name}/"]))
            apart = {Path(name).name for name in listed if name.startswith(f"{folder.name}/")}
            assert named == {path.name for path in folder.glob("*.py")} - {"__init__.py", *apart}, folder.name


def test_all_is_the_public_names() -> None:
    """`__all__`, what is there at run time, and what type checkers are told."""
    assert spile.__all__ == sorted(set(spile.__all__))
    for name in spile.__all__:
        assert getattr(spile, name) is not None
    tree = ast.parse((ROOT / "src" / "spile" / "__init__.py").read_text())
    told = {
        alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {*told, "__version__"} - {None} == set(spile.__all__)
    assert all(
        issubclass(kind, spile.SpileError) for name, kind in vars(errors).items() if name.endswith("Error")
    )
    assert {name for name in vars(errors) if name.endswith("Error")} <= set(spile.__all__)


@pytest.mark.parametrize("command", commands())
def test_readme_command_parses(command: str) -> None:
    from typer.main import get_command

    from spile.cli import app

    group = get_command(app)
    name, *arguments = shlex.split(command)[1:]
    subcommand = group.commands[name]  # type: ignore[attr-defined]
    subcommand.make_context(name, arguments)  # parses, and runs nothing


def test_readme_has_commands() -> None:
    assert len(commands()) >= 5


def test_ci_runs_the_readme_test_command() -> None:
    (command,) = README.split("## Tests")[1].split("```")[1].strip().splitlines()
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    install, run = command.split(" && ")
    assert any(
        line.startswith("pip install") and install.removeprefix("pip install ") in line for line in script
    )
    assert script[-1] == run


def test_readme_holds_no_placeholders() -> None:
    assert not re.search(r"@[A-Z0-9]+@|PLACEHOLDER", README)
