"""How many fresh targets lie in the intervals of SubspaceRegressor.

Tasks are drawn from the model itself: coefficients with a common mean that differ along two
directions, noise of variance 1. Per draw, as many fresh rows as rows, and 50 tasks that are not
seen (``unseen="mean"``) with ten rows each; means over the draws, with their standard errors. With
``--beside`` there is one more task of so many rows, which is learnt from and not counted.

Against: the nominal level
Takes: three minutes
Page: docs/benchmarks/subspace.md
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import norm

from fisherfold import SubspaceRegressor

SMOKE = "--draws 2 --shape 8 6 4"

Array = np.ndarray[Any, Any]
SHAPES = [
    *[(80, 12, 10), (20, 15, 6), (8, 15, 6), (4, 15, 6), (2, 15, 6), (1, 15, 6), (20, 15, 20)],
    *[(40, 6, 6), (40, 3, 6), (40, 2, 6), (40, 1, 6)],
]
LEVELS = (0.5, 0.9, 0.95)
UNSEEN = 50
UNSEEN_ROWS = 10
UNSEEN_LEVEL = 0.9


def covered(tasks: int, rows: int, features: int, seed: int, beside: int = 0) -> list[float]:
    """The shares of fresh targets in intervals of ``LEVELS``, and of targets of unseen tasks."""
    draw = np.random.default_rng(seed)
    mean = draw.normal(size=features)
    directions = draw.normal(size=(2, features))
    weights = mean + draw.normal(size=(tasks + UNSEEN + (beside > 0), 2)) @ directions

    def table(task: Array) -> tuple[Array, Array]:
        x = draw.normal(size=(len(task), features))
        return x, (x * weights[task]).sum(1) + draw.normal(size=len(task))

    task = np.repeat(np.arange(tasks), rows)
    unseen = tasks + np.repeat(np.arange(UNSEEN), UNSEEN_ROWS)
    learnt = np.concatenate([task, np.full(beside, tasks + UNSEEN)])
    model = SubspaceRegressor(rank=2).fit(*table(learnt), task=learnt)

    def inside(x: Array, y: Array, task: Array, levels: Sequence[float]) -> list[float]:
        values, deviations = model.predict(x, task=task, return_std=True, unseen="mean")
        return [
            float(np.mean(np.abs(y - values) < norm.ppf((1 + level) / 2) * deviations))
            for level in levels
        ]

    return inside(*table(task), task, LEVELS) + inside(*table(unseen), unseen, [UNSEEN_LEVEL])


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument(
        "--shape", nargs=3, type=int, action="append", help="tasks, rows of each, and features"
    )
    parser.add_argument(
        "--beside", type=int, default=0, help="the rows of one large task beside them"
    )


def main(given: Namespace) -> None:
    heads = ("tasks", "rows each", "features", *(f"in {100 * level:g} %" for level in LEVELS))
    unseen = f"unseen tasks, in {100 * UNSEEN_LEVEL:g} %"
    beside = f", beside a task of {given.beside} rows" if given.beside else ""
    table = Table(*heads, unseen, title=f"targets in their intervals, {given.draws} draws{beside}")
    for shape in given.shape or SHAPES:
        shares = 100 * np.array(
            [covered(*shape, seed, given.beside) for seed in range(given.draws)]
        )
        means = shares.mean(0)
        errors = shares.std(0, ddof=1) / np.sqrt(given.draws)
        table.add_row(
            *map(str, shape), *(f"{m:.1f} ± {e:.1f}" for m, e in zip(means, errors, strict=True))
        )
    Console().print(table)
