"""Turns the start of the process into a call of the command line, ready for Ctrl-C from the first moment.

`python -m spile` and the console script `spile` both come here. It knows no command: it imports the ones that
do inside of the guard, because those imports take most of the time in which an impatient user presses Ctrl-C.
"""

import sys

try:
    import os
    import signal
except KeyboardInterrupt:  # before there is anything to tell
    sys.exit(130)


def main() -> int:
    """Run the command line; return the exit code."""
    has_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if has_interrupts:
            signal.signal(signal.SIGINT, _stop)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # and not ignored, as nohup has it
                signal.signal(number, _end)
        from spile.cli import run

        if has_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if has_interrupts:  # so that Python's own end, which nothing guards, shows no traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _stop(number: int, frame: object) -> None:
    """End at once: during the imports there is nothing to clean up, and an exception could be swallowed."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def _end(number: int, frame: object) -> None:
    """End as an exception does, so that temporary folders go and the terminal is left as it was."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
