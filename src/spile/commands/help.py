"""Turns a command's declaration into a help text that fits a screen: plain, 80 columns, one line a flag.

It does not know the commands. Rich, which typer would use, needs twice the rows for the same words, and 8 MB.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

WIDTH = 80
MOST_ROWS = 40
_FLAG_WIDTH = 28
_OTHERS = "Other flags"  # the panel of those that name none
_ARGUMENTS = "Arguments"
_SHORTER = {  # than typer's own words
    "install_completion": "Install completion of commands for this shell.",
    "show_completion": "Show what that would install.",
}
_EPILOG = "Every flag has a variable: SPILE_MAX_TOKENS for --max-tokens."


class HelpCommand(TyperCommand):
    """A command whose help is `command_help`."""

    def get_help(self, ctx: Any) -> str:
        return command_help(self, ctx)


class HelpGroup(TyperGroup):
    """The root, whose help lists its commands."""

    def get_help(self, ctx: Any) -> str:
        lines = [f"Usage: {ctx.command_path} COMMAND ...", "", self.help or "", "", "Commands"]
        for name, command in self.commands.items():
            lines.append(f"  {name:{_FLAG_WIDTH - 3}} {(command.help or '').splitlines()[0]}")
        lines += ["Flags", *(_line(parameter) for parameter in self.get_params(ctx))]
        return "\n".join([*lines, "", f"'{ctx.command_path} COMMAND --help' says more."])


def command_help(command: Any, context: Any) -> str:
    """Return the help of one command: its usage, a sentence, then its flags by panel."""
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    panels: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        is_argument = parameter.param_type_name == "argument"
        panel = getattr(parameter, "rich_help_panel", None) or (_ARGUMENTS if is_argument else _OTHERS)
        panels.setdefault(panel, []).append(_line(parameter))
    if _OTHERS in panels:
        panels[_OTHERS] = panels.pop(_OTHERS)  # last
    lines = [f"Usage: {usage}", *(command.help or "").splitlines(), ""]
    for panel, rows in panels.items():
        lines += [panel, *rows]
    return "\n".join([*lines, _EPILOG])


def _line(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        left = parameter.metavar or parameter.name.upper()
    else:
        flags = "/".join([", ".join(sorted(parameter.opts, key=len)), *parameter.secondary_opts])
        left = flags if parameter.is_flag else f"{flags} {parameter.metavar or 'VALUE'}"
    gap = " " * max(1, _FLAG_WIDTH - 2 - len(left))
    return f"  {left}{gap}{_SHORTER.get(parameter.name, parameter.help or '')}".rstrip()


def help_text(app: typer.Typer, name: str | None = None) -> str:
    """Return the help of one command, or of the root."""
    group = typer.main.get_command(app)
    root = group.make_context("spile", [], resilient_parsing=True)
    if name is None:
        return group.get_help(root)
    command = group.commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, [], parent=root, resilient_parsing=True)
    text: str = command.get_help(context)
    return text
