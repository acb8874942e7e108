"""Small networks at special starts: what is scale invariant follows from the architecture, whatever the start.

A network is ``head(relu(norm(between(first(x)))))``, or, as a residual one, ``h = stem(x)`` and
``head(relu(last(h + norm(between(first(h))))))``. Its one candidate is ``first``; ``stem`` is not invariant, since the
branch does not scale with h, and is mistaken for it at starts where the branch vanishes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 6
BETWEEN = {"relu": nn.ReLU, "tanh": nn.Tanh, "identity": nn.Identity}
NORMS: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "linear": {
        "batch": lambda: nn.BatchNorm1d(WIDTH, eps=1e-12),
        "layer": lambda: nn.LayerNorm(WIDTH, eps=1e-12),
        "group": lambda: nn.GroupNorm(2, WIDTH, eps=1e-12),
        "rms": lambda: nn.RMSNorm(WIDTH, eps=1e-12),
    },
    "conv": {
        "batch": lambda: nn.BatchNorm2d(WIDTH, eps=1e-12),
        "layer": lambda: nn.LayerNorm([WIDTH, 3, 3], eps=1e-12),
        "group": lambda: nn.GroupNorm(2, WIDTH, eps=1e-12),
        "instance": lambda: nn.InstanceNorm2d(WIDTH, eps=1e-12, affine=True),
        "rms": lambda: nn.RMSNorm([WIDTH, 3, 3], eps=1e-12),
    },
}
Case = tuple[str, str, bool, bool, str]
CASES: list[Case] = [
    case for layer in NORMS for case in itertools.product([layer], NORMS[layer], [False, True], [False, True], BETWEEN)
]


class Block(nn.Module):
    """The network of one case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        layer, norm, bias, self.residual, between = case
        kind = nn.Linear if layer == "linear" else nn.Conv2d
        size = () if layer == "linear" else (1,)
        if self.residual:
            self.stem = kind(3, WIDTH, *size, bias=False)
            self.last = NORMS[layer][norm]()
        self.first = kind(WIDTH if self.residual else 3, WIDTH, *size, bias=bias)
        self.between, self.norm = BETWEEN[between](), NORMS[layer][norm]()
        self.head = nn.Linear(WIDTH * (1 if layer == "linear" else 9), 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x) if self.residual else x
        y = self.norm(self.between(self.first(h)))
        return self.head(torch.relu(self.last(h + y) if self.residual else y).flatten(1))


def network(case: Case, start: Callable[[Block], None]) -> tuple[nn.Module, Tensor, dict[str, str]]:
    """The network at a start, its input, and the kinds of its weights that are not ``none``."""
    layer, norm, bias, _, between = case
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(CASES.index(case))
        net = Block(case)
        x = torch.randn((16, 3) if layer == "linear" else (6, 3, 3, 3))
        with torch.no_grad():
            start(net)
    if between == "tanh" or (bias and not (between == "identity" and norm in ("batch", "instance"))):
        return net, x, {}
    kinds = {"batch": "row", "instance": "row", "group": "group", "layer": "tensor", "rms": "tensor"}
    return net, x, {"first.weight": kinds[norm]}


def _scale(net: Block, names: tuple[str, ...], factor: float) -> None:
    for name, parameter in net.named_parameters():
        if name.startswith(names):
            parameter.mul_(factor)


def random(net: Block) -> None:
    for parameter in net.parameters():
        parameter.normal_(0.0, 0.7)


def zero_biases(net: Block) -> None:
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()


def zero_gain(net: Block) -> None:
    _scale(net, ("norm.weight", "norm.bias"), 0.0)


def zero_head(net: Block) -> None:
    _scale(net, ("head",), 0.0)


def all_zero_but_matrices(net: Block) -> None:
    zero_biases(net)
    zero_gain(net)
    zero_head(net)


def constant_matrices(net: Block) -> None:
    zero_biases(net)
    for name in ("first.weight", "head.weight"):
        net.get_parameter(name).fill_(0.5)


def tiny_gain(net: Block) -> None:
    zero_biases(net)
    _scale(net, ("norm.weight",), 1e-6)


def tiny_matrices(net: Block) -> None:
    zero_biases(net)
    _scale(net, ("stem.weight", "head.weight"), 1e-3)
    _scale(net, ("first.weight",), 1e-2)


def huge_bias(net: Block) -> None:
    _scale(net, ("first.bias",), 1e3)


def dead_rows(net: Block) -> None:
    zero_biases(net)
    net.head.weight[:, ::2] = 0
    net.first.weight[0] = 0


STARTS: dict[str, Callable[[Block], None]] = {
    "default": lambda net: None,
    "random": random,
    "zero biases": zero_biases,
    "zero gain": zero_gain,
    "zero head": zero_head,
    "all zero but matrices": all_zero_but_matrices,
    "constant matrices": constant_matrices,
    "tiny gain": tiny_gain,
    "tiny matrices": tiny_matrices,
    "huge bias": huge_bias,
    "dead rows": dead_rows,
}
