"""The command line: ``fisherfold`` and ``python -m fisherfold``."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # until a command is under way, Ctrl-C ends the process without a trace of imports
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from fisherfold.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
