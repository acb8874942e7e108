"""Inside a process that ``torchrun`` has started: join the others, and leave in good order."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from fisherfold.distributed.group import ALONE, Group, RankLost

TIMEOUT = 300.0  # seconds that an operation waits for a process that is alive but late
_PATIENCE = 10.0
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Whether ``torchrun`` has started this process.

    It names a rank, a number of processes and where they meet.
    """
    return all(name in os.environ for name in _PLACE)


@contextlib.contextmanager
def joined(timeout: float = TIMEOUT) -> Iterator[Group]:
    """Join all processes that ``torchrun`` has started.

    Gloo, and NCCL for GPUs where each process has its own.

    Args:
        timeout: seconds that an operation waits for a process that does not answer.

    Yields:
        The group; ``ALONE`` outside ``torchrun``.

    Raises:
        RankLost: if another process has ended, or the processes do not find each other.
        ValueError: if there is a process group already.
    """
    if not under_torchrun():
        yield ALONE
        return
    if distributed.is_initialized():
        raise ValueError(
            "torch.distributed is initialised already: share the fit as it is, without joined()"
        )
    _meet(timeout)
    try:
        yield Group()
    except RankLost:
        # the connections are broken already; tearing them down together would wait for the one that
        # is gone
        raise
    except BaseException:
        distributed.destroy_process_group()
        raise
    else:
        distributed.destroy_process_group()


def _meet(seconds: float) -> None:
    rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    place = f"rank {rank} of {world} has not met the others at {os.environ['MASTER_ADDR']}:{port}"
    hint = (
        "if this process is to work alone, take RANK and WORLD_SIZE, which it has inherited, out "
        "of its environment"
    )
    waiting = threading.Timer(
        _PATIENCE,
        lambda: print(
            f"{place} after {_PATIENCE:.0f} s, and waits on; {hint}", file=sys.stderr, flush=True
        ),
    )
    waiting.daemon = True
    waiting.start()
    try:
        # torchrun keeps its store over restarts; without a prefix of its own, a new start can read
        # the addresses of processes that have ended, and fail to connect
        timeout = timedelta(seconds=seconds)
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        plain = TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            world_size=world,
            is_master=rank == 0 and not hosted,
            timeout=timeout,
        )
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"fisherfold/start {start}", plain)
        distributed.init_process_group(
            _backend(), store=store, rank=rank, world_size=world, timeout=timeout
        )
    except (distributed.DistError, TimeoutError) as error:
        reason = str(error).splitlines()[0]
        raise RankLost(f"{place} within {seconds:g} s ({reason}); {hint}", []) from error
    finally:
        waiting.cancel()


def _backend() -> str:
    """NCCL for tensors of GPUs if every process of this host has one, its current device."""
    mine = int(os.environ.get("LOCAL_RANK", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not (0 < here <= torch.cuda.device_count() and distributed.is_nccl_available()):
        return "gloo"
    torch.cuda.set_device(mine)
    return "cpu:gloo,cuda:nccl"
