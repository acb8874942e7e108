"""Completion over several processes: every quantity, every Fisher matrix and every solver equals one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fisherfold.completion.inference.variational import fit_variational, gradual_start
from fisherfold.completion.point.fit import fit_point, held_out_entries
from fisherfold.completion.point.problem import CompletionProblem
from fisherfold.completion.ratings import Ratings, Triplets
from fisherfold.distributed import ALONE, Axis, Group
from fisherfold.solvers import GradientNorm, MaxSeconds, minimize
from toy import slow

from ranks import compare, on_ranks, same_bits  # isort: skip

ROWS, COLUMNS, RANK = 14, 30, 2


def entries() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, RANK)) @ rng.normal(size=(RANK, COLUMNS)) + 0.1 * rng.normal(
        size=(ROWS, COLUMNS)
    )
    seen = rng.random((ROWS, COLUMNS)) < 0.5
    seen[:, 7] = False  # a column that nobody has rated
    seen[4:, 9] = False
    rows, columns = np.nonzero(seen)
    return rows.astype(np.int32), columns.astype(np.int32), x[rows, columns]


def cuts(world: int) -> list[int]:
    """Uneven shares; with three or four ranks one of them has no column, with four one has nothing but an empty one."""
    return {1: [0, 30], 2: [0, 25, 30], 3: [0, 11, 11, 30], 4: [0, 7, 8, 8, 30]}[world]


def shared(group: Group, *, transposed: bool = False) -> Ratings:
    rows, columns, values = entries()
    edges = cuts(group.size)
    axis = Axis(COLUMNS, edges[group.rank], edges[group.rank + 1], group)
    mine = (columns >= axis.start) & (columns < axis.stop)
    here = rows[mine], columns[mine] - axis.start, values[mine]
    ratings = Ratings.over((Axis.whole(ROWS), axis), Triplets(*here), dtype=torch.float64)
    return ratings.T if transposed else ratings


def quantities(group: Group) -> dict[str, Any]:
    ratings = shared(group)
    problem = CompletionProblem(ratings, RANK, ridge=0.01)
    generator = torch.Generator().manual_seed(1)
    x = problem.manifold.random_point(generator=generator, dtype=torch.float64)
    v = problem.manifold.random_tangent(x, generator=generator)
    batch = torch.tensor([3, 9, 9, 28, 7])
    found: dict[str, Any] = {
        "counts": ratings.row_counts,
        "mean": ratings.mean,
        "start": problem.spectral_start(),
    }
    for name, chosen in (("full", None), ("batch", batch)):
        found[name] = problem.loss_and_gradient(x, chosen)
        for kind in problem.fisher_kinds:
            found[f"{name} {kind}"] = problem.fisher(x, chosen, kind=kind).matvec(v)
            found[f"{name} {kind} preconditioned"] = problem.fisher(
                x, chosen, kind=kind
            ).precondition(v, 0.1)
    found["predict"] = problem.predict(x, torch.tensor([0, 13]), torch.tensor([29, 8]))
    found["metrics"] = problem.metrics(x)
    return found


def solves(
    group: Group, method: str, fisher: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    problem = CompletionProblem(shared(group), RANK)
    x0 = problem.manifold.random_point(
        generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    named = {} if fisher is None else {"fisher": fisher}
    result = minimize(problem, x0, method, max_iter=4, seed=3, **named, **options)
    names = ("loss", "gradient_norm", "samples")
    return {
        "x": result.x,
        "value": result.value,
        "trace": [[row[n] for n in names] for row in result.trace.rows],
    }


SOLVERS = [
    ("rngd", "exact", {}),
    ("rngd", "row-block", {}),
    ("rngd", "kronecker", {"batch_size": 9}),
    ("rngd-vr", "kronecker", {"step": 0.3, "batch_size": 4}),
    ("rsvrg", None, {"step": 0.05, "batch_size": 4}),
    ("rsgd", None, {"step": 0.05, "batch_size": 4}),
    ("rcg", None, {}),
]


def fits(group: Group, transposed: bool) -> dict[str, Any]:
    ratings = shared(group, transposed=transposed)
    held = held_out_entries(ratings, 0.1, 5)
    found: dict[str, Any] = {"held out": float(group.sum(held.sum()))}
    for name, options in (
        ("auto", {"tol": 0.0}),
        ("fixed", {"ridge": 0.1, "tol": 0.0}),
        ("paper", {"solver": "rngd"}),
    ):
        model = fit_point(ratings, RANK, max_iter=5, **options)  # type: ignore[arg-type]
        rows, columns = model.rows.gathered(), model.columns.gathered()
        found[name] = {"product": rows.mean[:, :-1] @ columns.mean[:, :-1].T}
        found[name] |= {
            "offsets": [rows.mean[:, -1], columns.mean[:, -1]],
            "ridge": model.fixed_ridge,
        }
        found[name] |= {
            "priors": [rows.precision, columns.precision],
            "log_det": [rows.log_det, columns.log_det],
        }
    posterior = fit_variational(ratings, RANK, max_iter=4, tol=0.0)
    for name, side in (
        ("rows", posterior.rows.gathered()),
        ("columns", posterior.columns.gathered()),
    ):
        found[name] = [side.mean, side.covariance, side.weight, side.prior_mean, side.precision]
    found["bound"] = [row["bound"] for row in posterior.trace]
    given = fit_variational(
        ratings, RANK, max_iter=2, ridge=2.0, set_effects=False, column_offsets=False
    )
    found["given"] = [given.noise_precision, given.rows.gathered().mean]
    path = gradual_start(ratings, 6).gathered()  # fewer ratings than coefficients
    found["path"] = [
        path.rank,
        path.noise_precision,
        path.columns.mean,
        path.columns.precision,
        path.rows.precision,
    ]
    return found


def everything() -> dict[str, Any]:
    """All of the above on the ranks of the default group, so that processes are started once."""
    group = Group()
    found: dict[str, Any] = {"quantities": quantities(group)}
    for method, fisher, options in SOLVERS:
        found[f"{method} {fisher}"] = solves(group, method, fisher, options)
    for transposed in (False, True):
        found[f"fits {transposed}"] = fits(group, transposed)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    found: dict[str, Any] = {"quantities": quantities(ALONE)}
    for method, fisher, options in SOLVERS:
        found[f"{method} {fisher}"] = solves(ALONE, method, fisher, options)
    for transposed in (False, True):
        found[f"fits {transposed}"] = fits(ALONE, transposed)
    return found


@pytest.mark.parametrize("world", [2, *slow(1, 3, 4)])
def test_ranks_equal_one_process(world: int, tmp_path: Path, alone: dict[str, Any]) -> None:
    ranks = on_ranks(world, tmp_path, everything)
    same_bits(ranks)
    assert ranks[0].keys() == alone.keys()
    for name, expected in alone.items():
        # iterations amplify rounding a little
        tolerance = 1e-10 if name == "quantities" else 1e-6
        compare(expected, ranks[0][name], rtol=tolerance, atol=tolerance)


def stopped(how: str) -> tuple[str, str, int]:
    group = Group()
    problem = CompletionProblem(shared(group), RANK)
    x0 = problem.manifold.random_point(
        generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )

    def callback(state: Any) -> str:
        if how == "clock" and state.iteration == 3:
            state.seconds += 100.0 * group.rank
        return "enough" if how == "callback" and state.iteration == 3 and group.rank == 1 else ""

    stop = GradientNorm(0.0) | MaxSeconds(90.0)
    result = minimize(problem, x0, max_iter=12, stop=stop, callback=callback)
    return result.status, result.message, result.iterations


@pytest.mark.parametrize(("how", "iterations"), [("clock", 4), ("callback", 3)])
def test_a_run_that_one_process_ends_has_ended_on_all(
    how: str, iterations: int, tmp_path: Path
) -> None:
    found = on_ranks(2, tmp_path, stopped, how)
    same_bits(found)
    status, message, made = found[0]
    assert (status, made) == ("stopped", iterations)
    assert ("90 s were allowed" if how == "clock" else "enough") in message
