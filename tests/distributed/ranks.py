"""Start real gloo processes over loopback and collect what they return."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.distributed import TCPStore

BOUND = 300.0  # seconds; far more than any of them needs on a busy machine


@contextlib.contextmanager
def meeting() -> Iterator[dict[str, str]]:
    """The environment of processes that meet at a store which this one holds, as the agent of torchrun does.

    A port that is only looked for, and opened later by rank 0, can be taken by another process in between: ranks of two
    test runs then meet each other, and wait for the rest.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def free_port() -> int:
    """A port that is free now; for those who open it themselves, and say so where it is free no more."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _enter(
    rank: int,
    world: int,
    place: dict[str, str],
    bound: float,
    folder: str,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(bound)  # where it stands, in the report of a test that hangs
    os.environ |= place
    distributed.init_process_group("gloo", rank=rank, world_size=world)
    result = work(*arguments)
    torch.save(result, Path(folder) / f"{world}-{rank}.pt")
    # what holds the group, such as DistributedDataParallel, must be gone before it: freed after it, it ends the threads
    # of gloo with the lock of Python held, for which one of them may wait (torch 2.13), and both wait for ever
    gc.collect()
    distributed.destroy_process_group()


def on_ranks(
    world: int, folder: Path, work: Callable[..., Any], *arguments: Any, bound: float = BOUND
) -> list[Any]:
    """What ``work`` returns on each of ``world`` processes; those that do not end are killed and named."""
    with meeting() as place:
        given = world, place, bound, str(folder), work, arguments
        started = multiprocessing.start_processes(
            _enter, given, nprocs=world, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + bound + 5
        while not started.join(timeout=max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                late = [
                    rank for rank, process in enumerate(started.processes) if process.is_alive()
                ]
                for process in started.processes:
                    process.kill()
                    process.join()
                raise TimeoutError(f"ranks {late} of {world} did not end within {bound:g} seconds")
    return [torch.load(folder / f"{world}-{rank}.pt", weights_only=True) for rank in range(world)]


def same_bits(results: list[Any]) -> None:
    """Every rank returned the same bits."""
    for other in results[1:]:
        compare(results[0], other, exact=True)


def compare(
    one: Any, other: Any, *, exact: bool = False, rtol: float = 1e-9, atol: float = 1e-11
) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            compare(one[key], other[key], exact=exact, rtol=rtol, atol=atol)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            compare(a, b, exact=exact, rtol=rtol, atol=atol)
    elif isinstance(one, (torch.Tensor, float)):
        tight = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": rtol, "atol": atol}
        torch.testing.assert_close(
            torch.as_tensor(other), torch.as_tensor(one), equal_nan=True, **tight
        )
    else:
        assert one == other
