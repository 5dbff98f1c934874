"""Imports run down the list of docs/architecture.md, in no circle; an architecture is named in its own places alone."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "spile"
FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
MAPLE = ("architectures/", "making/", "engines/mlx/maple.py")  # where Maple may be named


def rooms() -> list[list[str]]:
    """Return the list's rows, top to bottom: the files and folders of each."""
    table = (ROOT / "docs" / "architecture.md").read_text().split("## Rooms")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [re.findall(r"`([^`]+)`", row) for row in rows]


def rank(file: str) -> int:
    """Return a file's row: that of the longest name in the list which it begins with."""
    found = [(len(name), row) for row, names in enumerate(rooms()) for name in names if file.startswith(name)]
    assert found, f"{file} has no row in docs/architecture.md"
    return max(found)[1]


def imports(file: str) -> set[str]:
    """Return the files that one imports, in functions and for type checkers alone too; `_core` is the compiled core."""
    found = set()
    for node in ast.walk(ast.parse((SOURCE / file).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports by a relative name"
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            found |= {target for target in [target_of(name)] if target not in (None, file)}
    return {target for target in found if target is not None}


def target_of(name: str) -> str | None:
    """Return the file that a dotted name lies in, None where it is not spile's."""
    package, *parts = name.split(".")
    if package != "spile":
        return None
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length])
        if path == "_core":
            return path
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in FILES:
                return file
    return "__init__.py"


GRAPH = {file: imports(file) for file in FILES}


def test_imports_run_down_the_list() -> None:
    upwards = [
        f"{file} imports {target}" for file in FILES for target in GRAPH[file] if rank(target) < rank(file)
    ]
    assert upwards == []


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {' -> '.join(error.args[1])}") from None


def test_list_has_a_row_for_every_room_and_no_other() -> None:
    names = [name for row in rooms() for name in row]
    assert len(names) == len(set(names))
    for name in names:
        assert name == "_core" or (SOURCE / name).exists(), f"docs/architecture.md lists {name}"


def test_maple_is_named_in_its_own_places_alone() -> None:
    """As an import, an identifier, or what a value is compared with; help and comments may say it."""
    found = []
    for file in FILES:
        if file.startswith(MAPLE):
            continue
        for node in ast.walk(ast.parse((SOURCE / file).read_text())):
            values = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
            names = [value.value for value in values if isinstance(value, ast.Constant)]
            names += [
                getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname", "module")
            ]
            if any(isinstance(name, str) and "maple" in name.lower() for name in names):
                found.append(f"{file}:{getattr(node, 'lineno', '?')}")
    assert found == []
