"""Completion by a point estimate: a subspace, coefficients, offsets, and how strongly to shrink them.

``solver="auto"`` is the natural gradient of ``fisherfold.completion.factors``: half-steps of length 1 with row-block
Fisher, the prior covariance of the coefficients carried along, nothing to tune. ``ridge="auto"`` picks λ on a
validation part along a warm-started path λ = c σ²/s, σ² the variance that offsets leave and s the standard deviation
of all values, and on below it where its least λ is the best, then fits all ratings. Other solvers are those of
``point_solvers``, for the paper's problem.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fisherfold.completion.factors import Factors, Penalty, TwoSided, additive_model, grow
from fisherfold.completion.point_model import PointFit
from fisherfold.completion.point_solvers import SOLVERS, SolverRun, fit_by_solver
from fisherfold.completion.ratings import Ratings
from fisherfold.files import sound
from fisherfold.plain import counted
from fisherfold.solvers.result import Trace
from fisherfold.tables.checkpoint import FitCheckpoint
from fisherfold.tables.posterior_files import check_trace, finite_number, take

Offsets = Literal["all", "rows", "columns", "global", "none"]
Callback = Callable[[dict[str, float]], object]

# λ/σ² on the validation path: upwards, because a direction that a large λ has killed does not come back.
_PATH = tuple(2.0 ** (k / 2) for k in range(2, 13))
_DOWN, _HELPS = 4.0, 0.999
_DEFAULT_LEVEL = 8.0
_ENOUGH_TO_VALIDATE = 50
_FACTORS = ("rows", "columns", "row_offset", "column_offset")
_WEIGHTING = {"none": 0.0, "root": 0.5, "count": 1.0}


def fit_point(
    ratings: Ratings,
    rank: int,
    *,
    ridge: float | Literal["auto"] = "auto",
    ridge_weighting: Literal["none", "root", "count"] = "root",
    offset_ridge: float | None = None,
    offsets: Offsets | bool = "all",
    solver: str = "auto",
    max_iter: int = 30,
    tol: float = 1e-4,
    validation: float | Ratings | None = None,
    continuation: bool = False,
    seed: int = 0,
    callback: Callback | None = None,
    on_interrupt: Literal["raise", "return"] = "raise",
    verbose: bool = False,
    saved: FitCheckpoint | None = None,
) -> PointFit:
    """Fit a completion model by a point estimate.

    Args:
        ratings: the observed entries; the fit is done in their dtype and on their device.
        rank: the dimension of the subspace.
        ridge: λ ≥ 0 of the penalty on both factors, or ``auto`` for the best on a validation part (0 where ``solver``
            names a method of the paper, which has no ridge).
        ridge_weighting: the exponent of the weights (n/n̄)^α: ``none`` 0, ``root`` ½, ``count`` 1 (per rating).
        offset_ridge: λ₀; a third of λ/s if not given, s the standard deviation of the values.
        offsets: ``all`` (or True), ``rows`` or ``columns`` (with the mean), ``global``, ``none`` (or False).
        solver: ``auto``, or a method of ``fisherfold.minimize`` for the paper's problem, ridge on coefficients alone:
            ``rngd``, ``rngd-vr``, ``rcg`` or ``rgd``; the rank must then be less than both sides of the matrix.
        max_iter: the most iterations.
        tol: stop when an iteration (five of them, where ``solver`` names a method) lowers the objective by less than
            this share of it.
        validation: a share of the ratings, or other ratings, to stop early on, for ``solver="auto"``; with
            ``ridge="auto"`` they choose λ (a tenth if not given) and the final fit uses all ``ratings``.
        continuation: raise the rank step by step (1, 2, 4, ...), each new direction from the residuals.
        seed: fixes the validation part and the start.
        callback: called with the trace row of every iteration; a true value stops the fit.
        on_interrupt: ``return`` the model so far on Ctrl-C, or ``raise``.
        verbose: print one line per iteration.
        saved: keeps the state of the fit after every iteration, once λ is chosen; a killed fit goes on from it.

    Returns:
        The model.

    Raises:
        ValueError: if an option does not go with the solver.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(40, 2, generator=g) @ torch.randn(2, 30, generator=g)
        >>> seen = (torch.rand(40, 30, generator=g) < 0.6).nonzero()
        >>> model = fit_point(Ratings(seen[:, 0], seen[:, 1], x[seen[:, 0], seen[:, 1]]), 2, ridge=0.01, max_iter=200)
        >>> hidden = (model.U @ model.A.T + model.row_offset[:, None] + model.column_offset + model.global_offset) - x
        >>> bool(hidden.square().mean() < 1e-2 * x.square().mean())
        True
    """
    _check(ratings, rank, ridge, ridge_weighting, offset_ridge, offsets, max_iter, validation, on_interrupt)
    if solver not in ("auto", *SOLVERS):
        raise ValueError(f"solver must be one of auto, {', '.join(SOLVERS)}, got {solver!r}")
    which = ("all" if offsets else "none") if isinstance(offsets, bool) else offsets
    generator = torch.Generator().manual_seed(seed)
    power = _WEIGHTING[ridge_weighting]
    run = _Run(max_iter, tol, callback, on_interrupt, verbose, saved)
    if solver != "auto":
        if validation is not None or continuation or offset_ridge is not None:
            raise ValueError(f"validation, continuation and offset_ridge need solver='auto', got solver={solver!r}")
        chosen = SolverRun(solver, max_iter, tol, seed, callback, on_interrupt == "return", verbose, saved)
        level = 0.0 if ridge == "auto" else float(ridge)
        return fit_by_solver(ratings, rank, _additive(ratings, which, power), ridge=level, run=chosen)
    searching = ridge == "auto" and (ratings.n_ratings >= _ENOUGH_TO_VALIDATE or validation is not None)
    held_out: Ratings | None = None
    train = ratings
    if validation is not None or searching:
        train, held_out = _split(ratings, 0.1 if validation is None else validation, generator)
    start = _additive(train, which, power)
    unit = _unit(ratings, centred=which != "none")
    left = _variance_left(train, start) / unit

    def penalty(level: float) -> Penalty:
        # With no ridge at all, rows with few ratings would be singular: the floor selects their least-norm solution.
        floor = torch.finfo(ratings.dtype).eps ** 0.5 * left
        on_offsets = level / 3 / unit if offset_ridge is None else offset_ridge
        return Penalty(max(level, floor), max(on_offsets, floor / unit), power)

    if (stand := run.resumed(ratings)) is not None:
        return run.to_the_end(ratings if searching else train, *stand, None if searching else held_out)
    level = _PATH[0] * left if searching else _DEFAULT_LEVEL * left if ridge == "auto" else ridge
    first = _start(train, start, penalty(level), rank, generator, continuation)
    if searching and held_out is not None:
        level, first = _choose_ridge(run, train, held_out, first, left, penalty)
        train, held_out = ratings, None
    return run.to_the_end(train, _Stand(first), penalty(level), held_out)


def _additive(ratings: Ratings, offsets: str, power: float) -> Factors:
    rows, columns = offsets in {"all", "rows"}, offsets in {"all", "columns"}
    penalty = Penalty(1.0, 3.0, power)
    return additive_model(ratings, penalty, rows=rows, columns=columns, mean=offsets != "none")


def _variance_left(ratings: Ratings, at: Factors) -> float:
    return _mean_square(ratings, at) or 1.0


def _unit(ratings: Ratings, *, centred: bool) -> float:
    # λ times a product of factors is a square of values: λ has the unit of the values, λ₀ has none
    values = ratings.entries()[2].double()
    mean = ratings.add(values) / ratings.n_ratings if centred else 0.0
    return math.sqrt(ratings.add((values - mean).square()) / ratings.n_ratings) or 1.0


def _mean_square(ratings: Ratings, at: Factors) -> float:
    rows, columns, values = ratings.entries()
    return ratings.add((at.predict(rows, columns) - values).double().square()) / ratings.n_ratings


def _start(
    ratings: Ratings, at: Factors, penalty: Penalty, rank: int, generator: torch.Generator, continuation: bool
) -> Factors:
    stages = [rank]
    if continuation:
        stages = [2**k for k in range(int(math.log2(rank)) + 1) if 2**k < rank] + [rank]
    problem = TwoSided(ratings, penalty)
    for stage in stages:
        at = problem.balance(grow(ratings, at, stage, generator))
        for _ in range(3 if stage < rank else 0):
            at = problem.balance(problem.row_step(problem.column_step(at)[0])[0])
    return at


def _split(ratings: Ratings, validation: float | Ratings, generator: torch.Generator) -> tuple[Ratings, Ratings]:
    if isinstance(validation, Ratings):
        return ratings, validation
    held = held_out_entries(ratings, validation, int(torch.randint(2**31, (1,), generator=generator)))
    rows, columns, values = ratings.entries()
    parts = [ratings.like(rows[chosen], columns[chosen], values[chosen]) for chosen in (~held, held)]
    return parts[0], parts[1]


def held_out_entries(ratings: Ratings, share: float, seed: int) -> Tensor:
    """Choose a share of the entries at random, whoever holds them: those whose pair has the smallest hash.

    Args:
        ratings: the entries.
        share: between 0 and 1; at least one entry is chosen and at least one is left.
        seed: fixes the choice.

    Returns:
        Whether each entry that is here is chosen.
    """
    rows, columns, _ = ratings.entries()
    keys = _hash(rows.long() + ratings.row_axis.start, columns.long() + ratings.column_axis.start, seed)
    wanted = max(1, min(ratings.n_ratings - 1, round(share * ratings.n_ratings)))
    low, high = 0, 2**31 - 1
    while low < high:
        middle = (low + high) // 2
        if int(ratings.group.sum((keys <= middle).sum())) >= wanted:
            high = middle
        else:
            low = middle + 1
    return keys <= low


def _hash(rows: Tensor, columns: Tensor, seed: int) -> Tensor:
    # splitmix64 on the pair; int64 products wrap around
    key = (rows << 32) ^ columns ^ (seed * 0x9E3779B97F4A7C1 & 0x7FFFFFFFFFFFFFFF)
    for factor, shift in ((-0x40A7B892E31B1A47, 30), (-0x6B2FB644ECCEEE15, 27), (0x2545F4914F6CDD1D, 31)):
        key = (key ^ ((key >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (key >> 33) & 0x7FFFFFFF


_Trial = tuple[float, float, Factors]  # λ, the validation error and where it was found


def _choose_ridge(
    run: _Run, train: Ratings, held_out: Ratings, at: Factors, left: float, penalty: Callable[[float], Penalty]
) -> tuple[float, Factors]:
    # A few warm-started half-steps per λ are enough to rank them; stop when two in a row are worse than the best.
    path: list[_Trial] = [(_PATH[0] * left, math.inf, at)]
    below: list[_Trial] = []

    def tried(level: float, at: Factors, rounds: int) -> _Trial:
        problem = TwoSided(train, penalty(level * left))
        for _ in range(rounds):
            at = problem.balance(problem.row_step(problem.column_step(at)[0])[0])
        at, _ = problem.column_step(at)
        error = _rmse(at, held_out)
        run.record({"ridge": level * left, "validation_rmse": error})
        return level * left, error, at

    best = 0
    with run.interruptible():
        for k, level in enumerate(_PATH):
            path.append(tried(level, path[-1][2], 6 if k == 0 else 3))
            best = min(range(len(path)), key=lambda i: path[i][1])
            if run.ended is not None or k + 1 - best >= 2:
                break
        # the least λ of the path is the best where there is little noise: go on below it while that helps
        least, level, helps = torch.finfo(train.dtype).eps ** 0.5, _PATH[0], best == 1
        while helps and run.ended is None and level >= _DOWN * least:
            level, before = level / _DOWN, below[-1] if below else path[1]
            below.append(tried(level, before[2], 3))
            helps = below[-1][1] < _HELPS * before[1]
    if below:
        chosen = min([path[1], *below], key=lambda trial: trial[1])
        return chosen[0], chosen[2]
    return _vertex(path, best), path[best][2]


def _vertex(errors: list[_Trial], best: int) -> float:
    # The parabola through the best λ and its neighbours on the logarithmic grid.
    if not 1 < best < len(errors) - 1:
        return errors[best][0]
    before, here, after = (errors[best + k][1] for k in (-1, 0, 1))
    shift = 0.5 * (before - after) / max(before - 2 * here + after, 1e-300)
    return errors[best][0] * math.sqrt(2.0) ** max(-0.5, min(0.5, shift))


def _rmse(at: Factors, ratings: Ratings) -> float:
    return math.sqrt(_mean_square(ratings, at))


@dataclass(frozen=True)
class _Stand:
    """Where the loop stands: the best factors so far, their objective and validation error (NaN before the first)."""

    at: Factors
    objective: float = math.nan
    error: float = math.inf


class _Run:
    """The loop: iterate, record, stop. ``ended`` holds the status and the reason once there is one."""

    def __init__(
        self, max_iter: int, tol: float, callback: Callback | None, on_interrupt: str, verbose: bool,
        saved: FitCheckpoint | None,
    ) -> None:  # fmt: skip
        self.max_iter, self.tol, self.callback = max_iter, tol, callback
        self.on_interrupt, self.verbose, self.saved = on_interrupt, verbose, saved
        self.trace = Trace()
        self.began = time.perf_counter()
        self.ended: tuple[str, str] | None = None
        self.made = 0

    def record(self, row: dict[str, float]) -> None:
        row = {"iteration": float(len(self.trace) + 1), "seconds": time.perf_counter() - self.began, **row}
        self.trace.rows.append(row)
        if self.verbose:
            print("  ".join(f"{name} {value:.6g}" for name, value in row.items()), flush=True)
        if self.callback is not None and self.callback(row):
            self.ended = ("stopped", "the callback asked to stop")

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if self.on_interrupt == "raise":
                raise
            self.ended = ("interrupted", "interrupted by the user; the model is that of the last full iteration")

    def resumed(self, ratings: Ratings) -> tuple[_Stand, Penalty] | None:
        """Where a fit that was killed stood, if its checkpoint is there."""
        if self.saved is None or (found := self.saved.load()) is None:
            return None
        tensors, state = found
        with sound(self.saved.path, "checkpoint"):
            factors: dict[str, Any] = {name: take(tensors, name, None) for name in _FACTORS}
            self.trace.rows = check_trace(state["trace"])
            self.began -= self.trace.rows[-1]["seconds"] if self.trace.rows else 0.0
            self.ended = None if state["ended"] is None else (str(state["ended"][0]), str(state["ended"][1]))
            self.made = int(state["made"])
            at = Factors(**factors, **state["factors"]).shared_out(ratings)
            stand = _Stand(at, float(state["objective"]), float(state["error"]))
            return stand, Penalty(*(finite_number("penalty", value) for value in state["penalty"]))

    def _save(self, ratings: Ratings, stand: _Stand, penalty: Penalty) -> None:
        if self.saved is None:
            return
        at = stand.at.gathered(ratings)
        state = {
            "trace": self.trace.rows, "ended": self.ended, "made": self.made, "objective": stand.objective,
            "error": stand.error, "penalty": [penalty.ridge, penalty.offset_ridge, penalty.power],
            "factors": {name: getattr(at, name) for name in ("mean", "with_row_offset", "with_column_offset")},
        }  # fmt: skip
        self.saved.save({name: getattr(at, name) for name in _FACTORS}, state)

    def to_the_end(self, ratings: Ratings, stand: _Stand, penalty: Penalty, held_out: Ratings | None) -> PointFit:
        problem = TwoSided(ratings, penalty)
        with self.interruptible():
            if math.isnan(stand.objective):
                stand = _Stand(*problem.column_step(stand.at))
            while self.ended is None and self.made < self.max_iter:
                at, objective = problem.column_step(problem.balance(problem.row_step(stand.at)[0]))
                error = math.inf if held_out is None else _rmse(at, held_out)
                self.made += 1
                self._record_step(penalty, objective, error)
                if held_out is not None and error >= stand.error:
                    self.ended = ("stopped", f"the validation error rose after {stand.error:.6g}")
                else:
                    if self.ended is None and stand.objective - objective <= self.tol * abs(objective):
                        self.ended = ("converged", f"the objective fell by less than {self.tol:g} of itself")
                    stand = _Stand(at, objective, error)
                self._save(ratings, stand, penalty)
        status, message = self.ended or ("max_iter", counted(self.max_iter, "iteration is made", "iterations are made"))
        return PointFit.of(stand.at.gathered(ratings), ratings, penalty, self.trace, status, message)

    def _record_step(self, penalty: Penalty, objective: float, error: float) -> None:
        row = {"ridge": penalty.ridge, "objective": objective}
        self.record(row if error == math.inf else row | {"validation_rmse": error})


def _check(
    ratings: Ratings, rank: int, ridge: float | str, weighting: str, offset_ridge: float | None,
    offsets: str | bool, max_iter: int, validation: float | Ratings | None, on_interrupt: str,
) -> None:  # fmt: skip
    most = min(ratings.shape)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most:
        raise ValueError(f"rank must be a whole number between 1 and min(n_rows, n_columns)={most}, got {rank!r}")
    for name, value in (("ridge", ridge), ("offset_ridge", offset_ridge)):
        if value is not None and value != "auto" and (isinstance(value, str) or not 0 <= value < math.inf):
            raise ValueError(f"{name} must be a finite number ≥ 0, or 'auto' for ridge, got {value!r}")
    if weighting not in _WEIGHTING:
        raise ValueError(f"ridge_weighting must be one of {list(_WEIGHTING)}, got {weighting!r}")
    if offsets not in {"all", "rows", "columns", "global", "none", True, False}:
        raise ValueError(f"offsets must be 'all', 'rows', 'columns', 'global' or 'none', got {offsets!r}")
    if max_iter < 1:
        raise ValueError(f"max_iter must be at least 1, got {max_iter}")
    if isinstance(validation, Ratings):
        if validation.shape != ratings.shape:
            raise ValueError(f"validation must have the shape {ratings.shape} of ratings, got {validation.shape}")
    elif validation is not None and not 0 < validation < 1:
        raise ValueError(f"validation must be a share between 0 and 1, or ratings, got {validation}")
    if on_interrupt not in {"raise", "return"}:
        raise ValueError(f"on_interrupt must be 'raise' or 'return', got {on_interrupt!r}")
