"""The paper's completion figures: MovieLens-1M and Jester-1, four methods and one of ours, rank 5.

The paper's settings: the subspace lies over the users, a sample is a movie or a joke, no ridge, no
offsets, no clipping; a fixed number of ratings of every user is held out. Errors are mean squared
errors. The released scripts report the error after fitting the coefficients again *on the held-out
ratings* (``refit``), which measures the subspace and predicts nothing; ``held_out`` is the
prediction error, with coefficients from the training ratings, and is first.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fisherfold import datasets
from fisherfold.completion.point.problem import CompletionProblem
from fisherfold.completion.ratings import Ratings, places
from fisherfold.manifolds.base import Point
from fisherfold.problems.base import Problem
from fisherfold.reproduce.figures import FigurePlan, MethodPlan, checksum, four_methods, grid_125

RANK = 5
METRICS = {
    "held_out": "held-out MSE",
    "refit": "test MSE after a refit",
    "train": "training MSE",
}
NOTE = (
    "A refit fits the coefficients to the test ratings themselves: it measures the subspace and "
    "predicts nothing.\n"
    "Without a ridge a movie with fewer training ratings than the rank gets a nonsensical "
    "prediction."
)


def jester() -> FigurePlan:
    """The Jester-1 figure: 100 jokes as samples, 2 ratings of every user held out, 36 #grad/N."""
    return _plan(
        "jester", "Jester-1, rank 5", "jester1", per_user=2, batch=1, budget=36, steps=(0.05,)
    )


def movielens() -> FigurePlan:
    """The MovieLens-1M figure.

    3952 movies as samples, 10 ratings of every user held out, 30 #grad/N.

    RNGD tries step 2 (the released script) and 0.05 (the text, which fits batch 1).
    """
    return _plan(
        "movielens",
        "MovieLens-1M, rank 5",
        "movielens1m",
        per_user=10,
        batch=50,
        budget=30,
        steps=(2.0, 0.05),
    )


def hold_out(rows: NDArray[Any], per_row: int, seed: int) -> NDArray[np.bool_]:
    """Choose some entries of every row at random."""
    drawn = places(rows, np.random.default_rng(seed).random(len(rows)))
    return np.asarray(drawn < np.minimum(per_row, np.bincount(rows) - 1)[rows])


def split(data: datasets.Ratings, per_user: int, seed: int) -> tuple[Ratings, Ratings]:
    """Training and held-out ratings in float64."""
    held = hold_out(data.rows, per_user, seed)
    train, test = (
        Ratings(data.rows[p], data.cols[p], data.values[p], data.shape, dtype=torch.float64)
        for p in (~held, held)
    )
    return train, test


def default_curve(data: datasets.Ratings, per_user: int, seed: int) -> list[dict[str, float]]:
    """``MatrixCompletion`` with its defaults on a split of the figure, pass by pass.

    A pass sums over the ratings by row and by column, as a gradient does, and counts as one. Each
    point is a fit of its own with so many passes, so that its CPU seconds hold everything from the
    arrays on. There is no ``refit``.
    """
    from fisherfold.completion import (
        MatrixCompletion,
    )  # not before it is needed: scikit-learn takes a while

    held = hold_out(data.rows, per_user, seed)
    pairs = np.stack([data.rows, data.cols], axis=1)
    mean = float(data.values[~held].mean())
    rows = [_errors(data, held, np.full(len(held), mean), 0, 0.0)]
    for passes in range(1, 51):
        began = time.process_time()
        model = MatrixCompletion(RANK, random_state=seed, max_iter=passes, n_jobs=1)
        model.fit(pairs[~held], data.values[~held])
        seconds = time.process_time() - began
        rows.append(_errors(data, held, model.predict(pairs), passes, seconds))
        if model.converged_:
            break
    return rows


def _errors(
    data: datasets.Ratings, held: NDArray[np.bool_], predicted: Any, passes: int, seconds: float
) -> dict[str, float]:
    squares = (predicted - data.values) ** 2
    return {
        "iteration": passes,
        "paper_grads": passes,
        "true_grads": passes,
        "seconds": seconds,
        "loss": float(squares[~held].sum()) / (2 * data.shape[1]),
        "held_out": float(squares[held].mean()),
        "train": float(squares[~held].mean()),
    }


def _plan(
    name: str,
    title: str,
    dataset: str,
    *,
    per_user: int,
    batch: int,
    budget: int,
    steps: tuple[float, ...],
) -> FigurePlan:
    data = datasets.load_ratings(dataset)

    def make(seed: int) -> tuple[Problem, Point]:
        train, test = split(data, per_user, seed)
        problem = CompletionProblem(train, RANK, orientation="rows", held_out=test, table="batch")
        return problem, problem.manifold.random_point(generator=torch.Generator().manual_seed(seed))

    methods = (
        *four_methods(steps, grid_125(2.0, 5e-9), batch),
        MethodPlan("RNGD row-block (ours)", "rngd", 1, (), {"fisher": "row-block"}, paper=False),
        MethodPlan(
            "MatrixCompletion (our default)",
            "MatrixCompletion",
            1,
            (),
            {},
            paper=False,
            curve=lambda seed: default_curve(data, per_user, seed),
        ),
    )
    settings = {
        "rank": RANK,
        "per_user": per_user,
        "batch": batch,
        "ratings": len(data.values),
        "orientation": "users",
        "data": checksum(data.rows, data.cols, data.values),
    }
    return FigurePlan(name, title, make, methods, budget, METRICS, settings, NOTE)
