"""The store of the rendezvous, where processes find each other and leave word, reached within a bounded time."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

_GRACE = 5.0  # seconds by which the store may be late to say that its time is over


def reached(address: str, port: int, *, timeout: timedelta, **options: Any) -> TCPStore:
    """The store of the rendezvous, or an error once the time is over.

    TCPStore itself keeps its timeout where nobody listens, but waits without end for the first word of something else
    that listens there and is silent.

    Args:
        address: the host.
        port: its port.
        timeout: how long to wait.
        **options: of ``TCPStore``.

    Returns:
        The store.

    Raises:
        TimeoutError: if what listens there does not answer.
    """
    made: queue.SimpleQueue[TCPStore | Exception] = queue.SimpleQueue()

    def make() -> None:
        try:
            made.put(TCPStore(address, port, timeout=timeout, **options))
        except Exception as error:
            made.put(error)

    threading.Thread(target=make, daemon=True, name="fisherfold-meet").start()
    try:
        found = made.get(timeout=timeout.total_seconds() + _GRACE)
    except queue.Empty:
        raise TimeoutError("what listens there does not answer") from None
    if isinstance(found, Exception):
        raise found
    return found
