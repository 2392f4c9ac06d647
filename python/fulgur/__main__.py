"""The program: ``python -m fulgur SUBCOMMAND``, the same as ``fulgur SUBCOMMAND``."""

import signal
import sys

from fulgur import _fulgur


def main():
    # Python's own ways would wait for the program to return; what the caller ignores stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return _fulgur.run_program(["fulgur", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
