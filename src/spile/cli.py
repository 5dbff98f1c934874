"""Turns a command line into calls of the library, and every error into one sentence and an exit code.

Codes: 0 done, 1 failed (a missing or unfit model included), 2 wrong usage, 130 interrupted. It knows nothing
of how models work, nor what the commands do: they are in `commands`. Whatever a command needs is imported
inside of it, so that `--help` is quick and a budget pays for no import that is not used.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from spile import __version__
from spile.commands.chat import chat
from spile.commands.flags import Door
from spile.commands.generate import generate
from spile.commands.help import HELP_FLAGS, HelpCommand, HelpGroup
from spile.commands.memory import bench, plan
from spile.commands.models import convert, synth, verify
from spile.commands.serve import serve
from spile.console.terminal import note
from spile.errors import OptionError, SpileError

app = typer.Typer(
    name="spile",
    cls=HelpGroup,
    help="Run a mixture-of-experts language model in far less memory than its weights need.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP_FLAGS,
)
for _command in (generate, chat, serve, plan, verify, synth, convert):
    app.command(cls=HelpCommand, context_settings=HELP_FLAGS)(_command)
app.command("server", cls=HelpCommand, context_settings=HELP_FLAGS, hidden=True)(serve)
app.add_typer(bench)


def _show_version(value: bool) -> None:
    if value:
        from spile.console.terminal import Stdout

        Stdout(sys.stdout).write(f"spile {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        note(context.get_help(), word="")
        raise typer.Exit(2)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit code. Every error of a command ends here."""
    from spile.console.terminal import StdoutClosedError, prepare_streams

    prepare_streams()
    # NumPy's BLAS would start a thread a core; nothing here uses it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    door = Door()
    try:
        code = typer.main.get_command(app).main(
            args=arguments, prog_name="spile", obj=door, standalone_mode=False
        )
        if code == 130:  # the command line library has swallowed a Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except SpileError as error:
        if door.debug:
            traceback.print_exc()
        note(str(error), word="error: ")
        if error.hint:
            note(error.hint, word="hint: ")
        return 2 if isinstance(error, OptionError) else 1
    except StdoutClosedError:
        # What is still buffered must not fail again when Python flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # the outer door: anything else is a fault of ours
        if _is_usage_error(error):
            note(" ".join(str(error.format_message()).split()), word="error: ")  # type: ignore[attr-defined]
            command = error.ctx.command_path if getattr(error, "ctx", None) else "spile"  # type: ignore[attr-defined]
            note(f"'{command} --help' says what there is.", word="hint: ")
            return 2
        if door.debug:
            traceback.print_exc()
        if _is_out_of_memory(error):
            note("not enough memory: the system gave this process no more", word="error: ")
            note(
                "Give a smaller --memory, or this process more room (ulimit -v, a container).", word="hint: "
            )
            return 1
        note(f"unexpected {type(error).__name__}: {error}", word="error: ")
        note("this is a fault in spile; --debug shows where.", word="hint: ")
        return 1


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: for an object, a mapping, or a library that was to be loaded."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, ImportError) and "failed to map segment" in str(error))
    )


def _is_usage_error(error: Exception) -> bool:
    """Whether the flags were refused: in some versions typer's exceptions have no public name."""
    return hasattr(error, "format_message") and getattr(error, "exit_code", None) == 2
