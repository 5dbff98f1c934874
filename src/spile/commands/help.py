"""Turns a command's declaration into a help text that fits a screen: plain, 80 columns, one line a flag.

It does not know the commands. Rich, which typer would use, needs twice the rows for the same words, and 8 MB.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

WIDTH = 80
MOST_ROWS = 48  # a laptop's full-height terminal has 50
_WIDEST_FLAG = 34  # of a column of flags; a longer one pushes its help to the right
_ARGUMENTS = "Arguments"
_OTHERS = "Other flags"  # the panel of those that name none
_SHORTER = {  # than typer's own words
    "install_completion": "Install completion of commands for this shell.",
    "show_completion": "Show what that would install.",
    "help": "Show this and exit.",
}
_TYPES = {"integer": "N", "float": "X", "path": "FILE", "text": "TEXT"}
HELP_FLAGS = {"help_option_names": ["-h", "--help"]}  # of every command's context


class HelpCommand(TyperCommand):
    """A command whose help is `command_help`."""

    def get_help(self, ctx: Any) -> str:
        return command_help(self, ctx)

    def get_help_option(self, ctx: Any) -> Any:
        return _through_stdout(super().get_help_option(ctx))


class HelpGroup(TyperGroup):
    """A command that has commands: its help lists them."""

    def get_help(self, ctx: Any) -> str:
        shown = {name: one for name, one in self.commands.items() if not one.hidden}
        commands = [(name, (one.help or "").split("\n")[0]) for name, one in shown.items()]
        flags = [_row(parameter) for parameter in self.get_params(ctx)]
        width = _column([*commands, *flags])
        lines = [f"Usage: {ctx.command_path} COMMAND ...", *_sentences(self), "", "Commands"]
        lines += [*_table(commands, width), "Flags", *_table(flags, width)]
        return "\n".join([*lines, f"'{ctx.command_path} COMMAND --help' says more."])

    def get_help_option(self, ctx: Any) -> Any:
        return _through_stdout(super().get_help_option(ctx))


def command_help(command: Any, context: Any) -> str:
    """Return the help of one command: its usage, a sentence, then its flags by panel."""
    panels: dict[str, list[tuple[str, str]]] = {}
    pieces = [context.command_path, "[FLAGS]"]
    for parameter in command.get_params(context):
        if getattr(parameter, "hidden", False):
            continue
        is_argument = parameter.param_type_name == "argument"
        if is_argument:
            name = _row(parameter)[0]
            pieces.append(name if parameter.required else f"[{name}]")
        panel = getattr(parameter, "rich_help_panel", None) or (_ARGUMENTS if is_argument else _OTHERS)
        panels.setdefault(panel, []).append(_row(parameter))
    if _OTHERS in panels:
        panels[_OTHERS] = panels.pop(_OTHERS)  # last
    width = _column([row for rows in panels.values() for row in rows])
    lines = [f"Usage: {' '.join(pieces)}", *_sentences(command), ""]
    for panel, rows in panels.items():
        lines += [panel, *_table(rows, width)]
    variable, flag = next((one.envvar, one.opts[0]) for one in command.get_params(context) if one.envvar)
    return "\n".join([*lines, f"Every flag has a variable: {variable} for {flag}."])


def help_texts(app: typer.Typer) -> Iterator[tuple[str, str]]:
    """Yield every command's path, groups and the root included, and its help."""
    for context in _contexts(typer.main.get_command(app), "spile", None):
        yield context.command_path, context.get_help()


def hidden_flags(app: typer.Typer) -> Iterator[tuple[str, list[str]]]:
    """Yield the path of every command that has flags which its help leaves out, and a line for each."""
    for context in _contexts(typer.main.get_command(app), "spile", None):
        rows = [_row(one) for one in context.command.get_params(context) if getattr(one, "hidden", False)]
        if rows:
            yield context.command_path, _table(rows, _column(rows))


def _contexts(command: Any, name: str, parent: Any) -> Iterator[Any]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield context
    for inner_name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _contexts(inner, inner_name, context)


def _through_stdout(option: Any) -> Any:
    """Let the help option write as the commands do: with an error in one sentence where that fails."""
    if option is not None:
        option.callback = _show_help
    return option


def _show_help(context: Any, parameter: Any, value: bool) -> None:
    from spile.console.terminal import Stdout

    if value and not context.resilient_parsing:
        Stdout(sys.stdout).write(context.get_help() + "\n")
        context.exit()


def _sentences(command: Any) -> list[str]:
    return textwrap.wrap(" ".join((command.help or "").split()), WIDTH)


def _row(parameter: Any) -> tuple[str, str]:
    """Return what is typed, and what it does."""
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper(), parameter.help or ""
    left = "/".join([", ".join(sorted(parameter.opts, key=len)), *parameter.secondary_opts])
    if not parameter.is_flag:
        left += " " + (parameter.metavar or _TYPES.get(parameter.type.name, "VALUE"))
    return left, _SHORTER.get(parameter.name) or parameter.help or ""


def _column(rows: list[tuple[str, str]]) -> int:
    return min(max(len(left) for left, _ in rows), _WIDEST_FLAG)


def _table(rows: list[tuple[str, str]], width: int) -> list[str]:
    indent = " " * (width + 4)
    lines: list[str] = []
    for left, right in rows:
        begin = f"  {left:{width}}  "
        lines += textwrap.wrap(
            right, WIDTH, initial_indent=begin, subsequent_indent=indent, drop_whitespace=True
        ) or [begin.rstrip()]
    return lines
