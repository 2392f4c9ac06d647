"""The program: ``python -m fulgur SUBCOMMAND``, the same as ``fulgur SUBCOMMAND``."""

import signal
import sys

from fulgur import _fulgur


def main():
    for name in (signal.SIGINT, signal.SIGPIPE):  # Python's own ways would wait for the program
        signal.signal(name, signal.SIG_DFL)
    return _fulgur.run_program(["fulgur", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
