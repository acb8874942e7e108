"""Start real gloo processes over loopback and collect what they return."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _enter(rank: int, world: int, port: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=world)
    result = work(*arguments)
    torch.save(result, Path(folder) / f"{world}-{rank}.pt")
    distributed.destroy_process_group()


def on_ranks(world: int, folder: Path, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``work`` returns on each of ``world`` processes."""
    multiprocessing.start_processes(
        _enter, (world, free_port(), str(folder), work, arguments), nprocs=world, start_method="forkserver"
    )
    return [torch.load(folder / f"{world}-{rank}.pt", weights_only=True) for rank in range(world)]


def same_bits(results: list[Any]) -> None:
    """Every rank returned the same bits."""
    for other in results[1:]:
        compare(results[0], other, exact=True)


def compare(one: Any, other: Any, *, exact: bool = False, rtol: float = 1e-9, atol: float = 1e-11) -> None:
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
        torch.testing.assert_close(torch.as_tensor(other), torch.as_tensor(one), equal_nan=True, **tight)
    else:
        assert one == other
