"""Turns the start of the process into a call of the command line, ready for Ctrl-C from the first moment.

`python -m spile` and the console script `spile` both come here. It knows no command: it imports the ones that
do inside of the guard, because those imports take most of the time in which an impatient user presses Ctrl-C.
"""

import signal
import sys


def main() -> int:
    """Run the command line; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # and not ignored, as nohup has it
            signal.signal(number, _end)
    try:
        from spile.cli import run

        return run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once
        print("interrupted", file=sys.stderr)
        return 130


def _end(number: int, frame: object) -> None:
    """End as an exception does, so that temporary folders go and the terminal is left as it was."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
