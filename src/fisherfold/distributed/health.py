"""Signs of life: which process has ended, when a collective operation breaks.

A killed process closes its connections, so the operation that waits for it fails at once, but with an address and not
with a rank. Every process therefore tells the others its host and process number when the group is made, and beats: it
raises a counter in the rendezvous store. After a failure a process looks whether the others still run: on its own host
by their number, elsewhere by their counters. It then waits for a moment before it leaves, so that the others, who look
around all the time, see the first process missing before they see the second; and it writes the answer into the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from fisherfold.distributed.store import reached

_LOOK = 0.2
_LOOKS_PER_BEAT = 5
_PATIENCE = 6.0
_FAREWELL = 3 * _LOOK
_VERDICT = "lost"


class RankLost(RuntimeError):
    """A process of the group has ended or does not answer.

    Attributes:
        ranks: which ones; empty if it could not be found out.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


class Health:
    """What is known about the other processes.

    Args:
        people: for each rank what ``describe`` gave there.
        rank: the number of this process.
    """

    def __init__(self, people: list[str], rank: int) -> None:
        self.people = [json.loads(text) for text in people]
        self.rank = rank
        self._others = [r for r in range(len(people)) if r != rank]
        # groups of other processes, which may meet at the same place, have beats and verdicts of their own
        place = hashlib.sha256("\n".join(people).encode()).hexdigest()
        self._store = _store(place)
        self._first_missed: list[int] = []
        given = weakref.ref(self), rank, None if self._store is None else place
        threading.Thread(target=_watch, args=given, daemon=True, name="fisherfold-watch").start()

    @staticmethod
    def describe() -> str:
        """Host and process number of this process."""
        return json.dumps({"host": socket.gethostname(), "pid": os.getpid()})

    def _missing(self) -> list[int]:
        """The ranks on this host whose process has ended."""
        return [r for r in self._others if self._is_neighbour(r) and not _is_running(self.people[r]["pid"])]

    def verdict(self, error: Exception) -> RankLost:
        """Find out who is missing.

        Args:
            error: what the collective operation raised.

        Returns:
            The exception to raise, which names the rank.
        """
        ranks = self._first_missed or self._recorded() or self._search()
        if ranks:
            self._record(ranks)
        time.sleep(_FAREWELL)
        if not ranks:
            reason = str(error).splitlines()[0][:200]
            return RankLost(f"rank {self.rank} could not reach another rank, all of which still run: {reason}", [])
        who = ", ".join(f"rank {r} (process {self.people[r]['pid']} on {self.people[r]['host']})" for r in ranks)
        return RankLost(
            f"{who} has ended or does not answer; rank {self.rank} stops. Under torchrun --max-restarts a fit with a "
            "checkpoint goes on from there",
            ranks,
        )

    def _search(self) -> list[int]:
        deadline = time.monotonic() + _PATIENCE
        beats = self._beats()
        while time.monotonic() < deadline:
            if known := self._first_missed or self._missing() or self._recorded():
                return known
            time.sleep(_LOOK / 4)
        now = self._beats()
        return [r for r in self._others if beats[r] == now[r]]

    def _is_neighbour(self, rank: int) -> bool:
        return bool(self.people[rank]["host"] == socket.gethostname())

    def _beats(self) -> list[str]:
        # a rank that has never beaten stands still; one whose counter cannot be read is given the benefit of the doubt
        found = []
        for rank in range(len(self.people)):
            text = f"unknown at {time.monotonic()}"
            with contextlib.suppress(RuntimeError):
                if self._store is not None:
                    key = f"beat/{rank}"
                    text = self._store.get(key).decode() if self._store.check([key]) else "never"
            found.append(text)
        return found

    def _recorded(self) -> list[int]:
        with contextlib.suppress(RuntimeError, ValueError):
            if self._store is not None and self._store.check([_VERDICT]):
                return [int(rank) for rank in json.loads(self._store.get(_VERDICT))]
        return []

    def _record(self, ranks: list[int]) -> None:
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                self._store.compare_set(_VERDICT, "", json.dumps(ranks))


def _watch(watched: weakref.ref[Health], rank: int, place: str | None) -> None:
    """Look around and beat until somebody is missing, or until nobody asks any more: the fit has ended."""
    store, count = None if place is None else _store(place), 0
    while (health := watched()) is not None and not health._first_missed:
        health._first_missed = health._missing()
        del health  # it lives as long as its group, and not for this thread
        if store is not None and count % _LOOKS_PER_BEAT == 0:
            with contextlib.suppress(RuntimeError):
                store.set(f"beat/{rank}", str(count))
        count += 1
        time.sleep(_LOOK)


def _store(place: str) -> Any:
    """A connection of our own to a place in the store of the rendezvous, if the environment names one."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (address and port):
        return None
    try:
        plain = reached(address, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    except (RuntimeError, ValueError, TypeError, TimeoutError):
        return None
    start = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore("/".join(("fisherfold", *start, place)), plain)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        # a process that has ended but was not yet waited for still answers to signals
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in {"Z", "X"}
    return True
