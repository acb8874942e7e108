"""Being asked to end: a scheduler's SIGTERM and a closed terminal's SIGHUP stop a command as Ctrl-C does.

Left to themselves they end a process at once: processes that it has started go on, and nobody says how to resume.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class Asked(KeyboardInterrupt):
    """An interrupt that is not Ctrl-C.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code(stop: BaseException) -> int:
    """What a stopped command returns, as shells count it.

    Args:
        stop: the interrupt.

    Returns:
        128 and the number of the signal.

    Examples:
        >>> exit_code(KeyboardInterrupt()), exit_code(Asked(15))
        (130, 143)
    """
    return 128 + (stop.number if isinstance(stop, Asked) else signal.SIGINT)


@contextmanager
def heard() -> Iterator[None]:
    """Turn the signals into interrupts while a block runs, except those that somebody ignores, as nohup does.

    Yields:
        Nothing.
    """
    before = {}
    # torchrun ends its processes so, and one that waits for another inside an operation would not hear it
    for name in ("SIGTERM", "SIGHUP") if "RANK" not in os.environ else ():
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            before[number] = signal.signal(number, _stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # who asks twice does not want to wait
    raise Asked(number)
