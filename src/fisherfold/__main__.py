"""The command line: ``fisherfold`` and ``python -m fisherfold``."""

import os
import signal

# a standard stream that was closed must not be found taken by a file that is opened here
while (_descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
    pass
os.close(_descriptor)

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # until a command is under way, Ctrl-C ends the process without a trace of imports
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from fisherfold.cli import main as _main  # noqa: E402  (no file may be opened before)


def main() -> None:
    """Run the command line.

    A signal that comes when the command has ended is too late to change how.
    """
    try:
        _main()
    finally:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if (number := getattr(signal, name, None)) is not None:
                signal.signal(number, signal.SIG_IGN)


__all__ = ["main"]

if __name__ == "__main__":
    main()
