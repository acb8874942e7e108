"""What a figure is to run: the problem and the start of a seed, the methods with their step grids, and a budget.

The budget is in the paper's count of gradients: an iteration of a method is charged what the paper charges for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray

from fisherfold.files import digest
from fisherfold.manifolds.base import Point
from fisherfold.problems.base import Problem


@dataclass(frozen=True)
class MethodPlan:
    """One method of a figure."""

    label: str
    method: str
    charge: int
    steps: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: bool = True
    curve: Callable[[int], list[dict[str, float]]] | None = None


@dataclass(frozen=True)
class FigurePlan:
    """One figure."""

    name: str
    title: str
    make: Callable[[int], tuple[Problem, Point]]
    methods: tuple[MethodPlan, ...]
    budget: int
    metrics: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    one_thread: bool = False

    def quick(self) -> FigurePlan:
        """A sketch of the same figure: a third of the budget and the middle of every grid."""
        methods = tuple(replace(m, steps=_middle(m.steps)) for m in self.methods)
        return replace(self, methods=methods, budget=max(6, self.budget // 3), title=f"{self.title} (quick sketch)")


def checksum(*arrays: NDArray[Any]) -> str:
    """What tells data from other data: recorded runs of other ones are not read."""
    return digest(map(torch.from_numpy, arrays))[:16]


def _middle(steps: tuple[float, ...]) -> tuple[float, ...]:
    cut = len(steps) // 3
    return steps[cut : len(steps) - cut]


def grid_125(largest: float, smallest: float) -> tuple[float, ...]:
    """The grid 5, 2, 1, 0.5, 0.2, ... between two numbers, largest first."""
    low, high = math.floor(math.log10(smallest)), math.ceil(math.log10(largest))
    values = [float(f"{digit}e{power}") for power in range(high, low - 1, -1) for digit in (5, 2, 1)]
    return tuple(v for v in values if smallest * (1 - 1e-9) <= v <= largest * (1 + 1e-9))
