"""Turns the start of the process into a call of the command line, ready for Ctrl-C from the first moment.

`python -m spile` and the console script `spile` both come here. It knows no command: it imports the ones that
do inside of the guard, because those imports take most of the time in which an impatient user presses Ctrl-C.
"""

import signal
import sys


def main() -> int:
    """Run the command line; return the exit code."""
    try:
        from spile.cli import run

        return run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
