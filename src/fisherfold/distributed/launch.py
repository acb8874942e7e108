"""Inside a process that ``torchrun`` has started: join the others, and leave in good order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

from torch import distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from fisherfold.distributed.group import ALONE, Group
from fisherfold.distributed.health import RankLost
from fisherfold.distributed.store import reached

# How long an operation waits for a process that is alive but late, for example one that still reads its share.
TIMEOUT = timedelta(minutes=30)
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Whether this process was started by ``torchrun``.

    Returns:
        True if its environment names a rank, a number of processes and where they meet.
    """
    return all(name in os.environ for name in _PLACE)


def _number(name: str, least: int, most: int) -> int:
    """A number of the environment; one that cannot be would be waited for until the time is over."""
    text = os.environ[name]
    if not (text.strip().isdecimal() and least <= int(text) <= most):
        raise ValueError(f"the environment variable {name} must be a number from {least} to {most}, got {text!r}")
    return int(text)


def _initialise(timeout: timedelta) -> None:
    # torchrun keeps its store over restarts; without a prefix of its own, a new start can read the addresses of
    # processes that have ended, and fail to connect
    world = _number("WORLD_SIZE", 1, 2**31 - 1)
    rank, port = _number("RANK", 0, world - 1), _number("MASTER_PORT", 0, 2**16 - 1)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = os.environ["MASTER_ADDR"]
    plain = reached(address, port, world_size=world, is_master=rank == 0 and not hosted, timeout=timeout)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"fisherfold/start {start}", plain)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def _meet(timeout: timedelta) -> None:
    try:
        _initialise(timeout)
    except (distributed.DistError, TimeoutError) as error:
        rank, world, address, port = (os.environ[name] for name in _PLACE)
        reason = str(error).splitlines()[0]
        raise RankLost(
            f"rank {rank} of {world} did not meet the others at {address}:{port} ({reason}); if this process is to "
            "work alone, take RANK and WORLD_SIZE, which it has from torchrun, out of its environment",
            [],
        ) from error


@contextlib.contextmanager
def joined(timeout: timedelta = TIMEOUT) -> Iterator[Group]:
    """The group of all processes that ``torchrun`` has started; gloo over CPUs.

    Args:
        timeout: how long an operation waits for a process that does not answer.

    Yields:
        The group; ``ALONE`` outside ``torchrun``.

    Raises:
        RankLost: if another process has ended, or the processes do not find each other.
        ValueError: if there is a process group already, or the environment names a rank or port that cannot be.
    """
    if not under_torchrun():
        yield ALONE
        return
    if distributed.is_initialized():
        raise ValueError("torch.distributed is initialised already: share the fit as it is, without joined()")
    _meet(timeout)
    try:
        yield Group()
    except RankLost:
        # the connections are broken already; tearing them down together would wait for the one that is gone
        raise
    except BaseException:
        distributed.destroy_process_group()
        raise
    else:
        distributed.destroy_process_group()
