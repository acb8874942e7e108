"""What a figure is to run: the problem and the start of a seed, the methods with their step grids, and a budget.

The budget is in the paper's count of gradients: an iteration of a method is charged what the paper charges for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fisherfold.manifolds.base import Point
from fisherfold.problems.base import Problem


@dataclass(frozen=True)
class MethodPlan:
    """One method of a figure.

    Attributes:
        label: its name on the figure.
        method: its name for ``minimize``.
        charge: how many #grad/N one iteration costs in the paper's count.
        steps: the step sizes to search, largest first; one for a fixed step, none for a line search.
        options: further options for ``minimize``.
        paper: whether the paper has it; ours are drawn beside and take no part in its claim.
        curve: makes the rows for a seed where no ``minimize`` is run, with ``paper_grads`` and ``true_grads``.
    """

    label: str
    method: str
    charge: int
    steps: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: bool = True
    curve: Callable[[int], list[dict[str, float]]] | None = None


@dataclass(frozen=True)
class FigurePlan:
    """One figure.

    Attributes:
        name: the name of the command and of the files.
        title: the title of the figure.
        make: the problem and the starting point for a seed.
        methods: the methods, the paper's first.
        budget: #grad/N in the paper's count.
        metrics: trace columns to show and their labels, the honest one first.
        settings: whatever else determines the numbers (data, rank, damping, ...), part of a run's identity.
        note: a sentence that is printed on the figure.
        one_thread: whether runs are made on one thread, so that their rounding does not depend on the machine's cores.
    """

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
        """A sketch of the same figure: a third of the budget and the middle of every grid.

        Returns:
            A smaller plan.
        """
        methods = tuple(replace(m, steps=_middle(m.steps)) for m in self.methods)
        return replace(self, methods=methods, budget=max(6, self.budget // 3), title=f"{self.title} (quick sketch)")


def _middle(steps: tuple[float, ...]) -> tuple[float, ...]:
    cut = len(steps) // 3
    return steps[cut : len(steps) - cut]


def grid_125(largest: float, smallest: float) -> tuple[float, ...]:
    """The grid 5, 2, 1, 0.5, 0.2, ... between two numbers, largest first.

    Args:
        largest: the upper end.
        smallest: the lower end.

    Returns:
        Step sizes.

    Examples:
        >>> grid_125(2, 0.05)
        (2.0, 1.0, 0.5, 0.2, 0.1, 0.05)
    """
    low, high = math.floor(math.log10(smallest)), math.ceil(math.log10(largest))
    values = [float(f"{digit}e{power}") for power in range(high, low - 1, -1) for digit in (5, 2, 1)]
    return tuple(v for v in values if smallest * (1 - 1e-9) <= v <= largest * (1 + 1e-9))
