"""Copies and pickles of optimizers go on like the original, and side streams belong to one optimizer each."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fisherfold.optim import KFAC, MKFAC, SGDG, SGDP, AdamP
from fisherfold.optim.streams import N_BRANCHES, Branches

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


def made(kind: type, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return net, kind(net, **options)


def go(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 5, generator=generator), torch.randint(3, (16,), generator=generator)
        with optimizer.statistics(enabled=optimizer.uses_curvature and step % 2 == 0):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("how", list(COPIES))
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (MKFAC, {"damping": 0.1, "euclidean": "kfac", "balanced": True}),
        (MKFAC, {"damping": 0.1, "capturable": True}),
        (KFAC, {"damping": 0.1}),
        (SGDG, {"orthogonality": 0.1, "clip": 0.05}),
    ],
)
def test_copy_goes_on_like_the_original(how: str, kind: type, options: dict[str, Any]) -> None:
    net, optimizer = made(kind, **options)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)  # wraps the optimizer's step, which no pickle takes
    go(net, optimizer, range(3))
    other, copied = COPIES[how]((net, optimizer))
    assert copied.model is other
    assert type(copied) is kind
    go(net, optimizer, range(3, 6))
    untouched = [p.clone() for p in other.parameters()]
    go(other, copied, range(3, 6))
    assert not all(torch.equal(p, q) for p, q in zip(untouched, other.parameters(), strict=True))
    for mine, theirs in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert copied.report() == optimizer.report()


class FakeStream:
    """A stream that writes down what it waits for."""

    def __init__(self, log: list[tuple[str, str]], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append((self.name, other.name))


def test_branches_fork_from_the_stream_of_their_device_and_join_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, str]] = []
    made_streams: list[str] = []

    def new(device: torch.device) -> FakeStream:
        made_streams.append(f"{device}/{len(made_streams)}")
        return FakeStream(log, made_streams[-1])

    monkeypatch.setattr(torch.cuda, "Stream", new)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(log, f"{device}/main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(log.append((stream.name, "work"))))
    jobs = [(SimpleNamespace(is_cuda=True, device=torch.device("cuda", i % 2), numel=lambda: 1), i) for i in range(10)]
    done: list[int] = []
    mine, other = Branches(), Branches()
    mine.run(lambda _, number: done.append(number), jobs, parallel=True)
    assert sorted(done) == list(range(10))
    assert len(made_streams) == 2 * N_BRANCHES
    for device in ("cuda:0", "cuda:1"):
        own = [name for name in made_streams if name.startswith(device)]
        here = [entry for entry in log if entry[0].startswith(device)]
        assert here[:N_BRANCHES] == [(name, f"{device}/main") for name in own]
        assert here[N_BRANCHES:-N_BRANCHES] == [(own[i % N_BRANCHES], "work") for i in range(5)]
        assert here[-N_BRANCHES:] == [(f"{device}/main", name) for name in own]
    device = torch.device("cuda", 0)
    assert mine.streams(device) is mine.streams(device)
    assert not set(mine.streams(device)) & set(other.streams(device))
    for made_copy in (copy.deepcopy(mine), copy.copy(mine), pickle.loads(pickle.dumps(mine))):
        assert made_copy._streams == {}


def test_every_optimizer_has_branches_of_its_own() -> None:
    (net, first), (_, second) = made(SGDG), made(SGDG)
    third = SGDG(net)
    branches = [o._branches for o in (first, second, third, copy.deepcopy(first))]
    assert len({id(b) for b in branches}) == 4
    assert "_branches" not in first.state_dict()


@pytest.mark.parametrize("kind", [SGDP, AdamP])
def test_projected_optimizers_keep_their_branches_and_copies_get_their_own(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.eye(3))])
    own = optimizer._branches
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer._branches is own
    copied = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    assert len({id(o._branches) for o in (optimizer, *copied)}) == 3


def test_without_cuda_jobs_run_in_order_the_largest_first() -> None:
    done: list[int] = []
    jobs = [(torch.zeros(1 + i // 3), i) for i in range(6)]
    Branches().run(lambda _, number: done.append(number), jobs, parallel=True)
    assert done == [3, 4, 5, 0, 1, 2]
