"""From row numbers, column numbers and values to a posterior.

x_ij = g + s z_ij,    g, s: mean and standard deviation of the values;    z is what the solvers see
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fisherfold.completion.entries import Codes, Floats, merge
from fisherfold.completion.inference.features import FeatureColumns
from fisherfold.completion.inference.observations import Observations
from fisherfold.completion.inference.posterior import CompletionPosterior
from fisherfold.completion.inference.rank import USUAL_RANK, find_rank
from fisherfold.completion.inference.start import FeatureTable
from fisherfold.completion.inference.time_effects import periods_of
from fisherfold.completion.inference.variational import fit_variational, gradual_start
from fisherfold.completion.model import CompletionModel
from fisherfold.completion.ratings import Ratings, TrainingRatings
from fisherfold.distributed import ALONE, Group
from fisherfold.progress import track
from fisherfold.tables.ids import IdIndex
from fisherfold.warn import warn

# A row drifts from day to day, a column over so many periods with as many ratings each.
_DAY, _MOST_DAYS, _PERIODS = 86400.0, 20_000, 20
# of ``inference="point"``, those that need no step size
SOLVERS = ("rngd", "rngd-vr", "rcg", "rgd")
_MOST_CATEGORIES = 100
_MOST, _WIDTH = (
    (0.05, 0.95),
    3.29,
)  # most values lie between these quantiles; of a Gaussian so many deviations apart
_SAMPLE = 2**17  # of the values, to tell where most of them lie
_RULED = (
    1 / 30
)  # where most values spread over less than this part of the scale, float32 cannot tell them apart


@dataclass(frozen=True)
class Settings:
    """How to fit; the names are those of ``MatrixCompletion``."""

    rank: int | None  # None: found on held-out ratings
    ridge: float | None
    offsets: str
    inference: str
    solver: str
    rated_sets: bool
    max_iter: int
    tol: float
    duplicates: str
    seed: int
    device: str
    dtype: torch.dtype
    verbose: bool = False
    likelihood: str = "gaussian"

    @property
    def engine_options(self) -> dict[str, Any]:
        """What the engine calls its options."""
        return {
            "ridge": self.ridge,
            "row_offsets": self.offsets in ("both", "rows"),
            "column_offsets": self.offsets in ("both", "columns"),
            "seed": self.seed,
        }

    @property
    def rule(self) -> str:
        """What becomes of pairs given twice."""
        return merge_rule(self.duplicates, self.likelihood)

    def for_table(self, n_rows: int, n_columns: int) -> Settings:
        """The same with a rank that a table of this size has; a warning says so where it is less."""
        largest = self.largest_rank(n_rows, n_columns)
        if self.rank is None and self.inference == "point":
            return replace(self, rank=min(USUAL_RANK, largest))
        if self.rank is None or self.rank <= largest:
            return self
        warn(
            f"rank={self.rank} is more than a table of {n_rows} x {n_columns} allows; rank={largest} is used"
        )
        return replace(self, rank=largest)

    def largest_rank(self, n_rows: int, n_columns: int) -> int:
        """The largest rank that a table of this size has; the solvers of the paper need one less."""
        if (largest := min(n_rows, n_columns) - (self.solver != "auto")) < 1:
            raise ValueError(
                f"solver={self.solver!r} needs a table larger than {n_rows} x {n_columns}"
            )
        return largest


def merge_rule(duplicates: str, likelihood: str) -> str:
    """What becomes of pairs given twice: the mean of categories need be none, the nearest one is."""
    return "category" if duplicates == "mean" and likelihood != "gaussian" else duplicates


@dataclass(frozen=True)
class SideInformation:
    """What a fit knows besides pairs and values."""

    features: tuple[FeatureColumns | None, FeatureColumns | None] = (
        None,
        None,
    )  # of the rows and of the columns
    times: Floats | None = None  # of the entries, in seconds or any other unit
    weights: Floats | None = None  # of the entries

    @property
    def given(self) -> bool:
        """Whether there is any of them."""
        return any(part is not None for part in (*self.features, self.times, self.weights))

    def at(self, where: npt.NDArray[Any]) -> SideInformation:
        """Those of some of the entries."""
        times, weights = (
            None if given is None else given[where] for given in (self.times, self.weights)
        )
        return replace(self, times=times, weights=weights)

    def tables(
        self, ids: tuple[IdIndex, IdIndex], ratings: Ratings
    ) -> tuple[FeatureTable | None, FeatureTable | None]:
        """The features of all rows and of all columns, as the engine takes them."""
        found: list[FeatureTable | None] = []
        for given, index in zip(self.features, ids, strict=True):
            if given is None:
                found.append(None)
                continue
            table = torch.from_numpy(given.of(index.encode(given.ids), len(index)))
            groups = torch.from_numpy(given.groups)
            found.append((table.to(ratings.device, ratings.dtype), groups.to(ratings.device)))
        return found[0], found[1]


@dataclass
class PreparedRatings:
    """Ratings as the solvers want them, and how to get back."""

    ratings: Ratings  # centred and scaled
    center: float  # what was subtracted
    scale: float  # what was divided by
    low: float  # the smallest value
    high: float  # the largest value
    n_merged: int  # how many entries were merged into another one
    observations: Observations | None = (
        None  # weights, times and categories of the ratings, if there are any
    )
    features: tuple[FeatureTable | None, FeatureTable | None] = (
        None,
        None,
    )  # of the rows and of the columns


def prepare(
    rows: Codes,
    columns: Codes,
    values: Floats,
    ids: tuple[IdIndex, IdIndex],
    settings: Settings,
    extras: SideInformation,
) -> PreparedRatings:
    """Merge pairs given twice, centre and scale, and sort both ways."""
    given = len(values)
    if extras.times is not None or extras.weights is not None:
        rows, columns, values, extras = merge_pairs(
            rows, columns, values, extras, ids, settings.rule
        )
    times, weights = extras.times, extras.weights
    if settings.rule != "mean":  # a mean is taken on the way, of values that were all observed
        rows, columns, values = merge(rows, columns, values, settings.rule, ids)
    center, scale, low, high, dtype = standardise(values, settings)
    ratings = Ratings(
        rows,
        columns,
        (values - center) / scale,
        (len(ids[0]), len(ids[1])),
        dtype=dtype,
        duplicates="mean",
        device=settings.device,
    )
    table = PreparedRatings(
        ratings,
        center,
        scale,
        low,
        high,
        given - ratings.n_ratings,
        features=extras.tables(ids, ratings),
    )
    if times is not None or weights is not None or settings.likelihood != "gaussian":
        _check_categories(values, settings.likelihood)
        order = np.lexsort((columns, rows))
        in_order = [
            None if given is None else torch.from_numpy(given[order]) for given in (times, weights)
        ]
        mean_one = None if in_order[1] is None else (in_order[1] / in_order[1].mean()).to(dtype)
        periods = (None, None) if times is None else _periods(times)
        table.observations = Observations(
            ratings,
            likelihood=settings.likelihood,
            weights=mean_one,
            times=in_order[0],
            periods=periods,
            categories=torch.from_numpy((np.unique(values) - center) / scale),
        )
    return table


def merge_pairs(
    rows: Codes,
    columns: Codes,
    values: Floats,
    extras: SideInformation,
    ids: tuple[IdIndex, IdIndex],
    rule: str,
) -> tuple[Codes, Codes, Floats, SideInformation]:
    """Each pair once: values by the rule, the last time, the sum of the weights."""
    key = rows * (int(columns.max(initial=0)) + 1) + columns
    unique, place = np.unique(key, return_inverse=True)
    if len(unique) == len(key):
        return rows, columns, values, extras
    i, j, joined = merge(rows, columns, values, rule, ids)
    times, weights = extras.times, extras.weights
    if times is not None:
        last = np.full(len(unique), -np.inf)
        np.maximum.at(last, place, times)
        times = last
    together = None if weights is None else np.bincount(place, weights=weights).astype(np.float64)
    return i, j, joined, replace(extras, times=times, weights=together)


def _periods(times: Floats) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the periods of rows and of columns start: days, if times are seconds, and runs of as many ratings each."""
    runs = periods_of(times, None, _PERIODS)
    days = periods_of(times, _DAY, _MOST_DAYS)
    return days if len(days) > 1 else runs, runs


def _check_categories(values: Floats, likelihood: str) -> None:
    count = len(np.unique(values))
    if likelihood == "binary" and count != 2:
        raise ValueError(f"likelihood='binary' needs two different values, got {count}")
    if likelihood == "ordered" and not 2 <= count <= _MOST_CATEGORIES:
        raise ValueError(
            f"likelihood='ordered' needs 2 to {_MOST_CATEGORIES} different values, got {count}; "
            "use 'gaussian' for values that are measured"
        )


def standardise(
    values: Floats, settings: Settings, group: Group = ALONE
) -> tuple[float, float, float, float, torch.dtype]:
    """Centre, scale and range of the values of all processes, and the dtype that resolves them."""
    count, total = group.sum(
        torch.tensor([len(values), values.sum()], dtype=torch.float64)
    ).tolist()
    if count == 0:
        raise ValueError(
            "there are no ratings: found 0 observed entries on all ranks, at least 1 is needed"
        )
    ends = group.largest(torch.tensor([values.max(initial=-np.inf), -values.min(initial=np.inf)]))
    high, low = float(ends[0]), -float(ends[1])
    center = total / count if settings.offsets != "none" else 0.0
    largest = max(abs(low - center), abs(high - center))
    if largest <= 1e-12 * abs(center):
        return center, abs(center) or 1.0, low, high, settings.dtype
    # dividing first keeps the squares in range
    squares = group.sum(
        torch.tensor(np.square((values - center) / largest).sum(), dtype=torch.float64)
    )
    scale = largest * float(squares / count) ** 0.5
    sample = group.gather(
        torch.from_numpy(values[:: len(values) * group.size // _SAMPLE + 1].copy())
    ).numpy()
    return center, scale, low, high, _resolving(sample, low, high, scale, settings.dtype)


def _resolving(
    values: Floats, low: float, high: float, scale: float, dtype: torch.dtype
) -> torch.dtype:
    """float64, with a warning, where one value far from all others rules the scale; else the given dtype."""
    first, last = (float(q) for q in np.quantile(values, _MOST))
    spread = last / _WIDTH - first / _WIDTH
    far = high if high / 2 - last / 2 > first / 2 - low / 2 else low
    times = abs(far / spread - (last if far == high else first) / spread) if spread > 0 else 0.0
    if not 0 < spread < _RULED * scale or times * _RULED < 1:
        return dtype
    warn(
        f"most values lie between {first:.6g} and {last:.6g}, but {far:.6g} is {times:,.0f} times their spread away: "
        "it rules the scale of the fit, which is made in float64; leave it out if it is a mistake, or fit logarithms"
    )
    return torch.float64


def solve(
    table: PreparedRatings,
    settings: Settings,
    init: CompletionPosterior | None = None,
    callback: Callable[[CompletionPosterior], None] | None = None,
) -> CompletionPosterior:
    """Run the solver."""
    ratings, observations = table.ratings, table.observations
    how: dict[str, Any] = {
        "max_iter": settings.max_iter,
        "tol": settings.tol,
    } | settings.engine_options
    with track(
        "fitting", at_most=settings.max_iter, verbose=settings.verbose and ratings.group.is_first
    ) as line:
        if settings.inference == "point":
            from fisherfold.completion.point.fit import fit_point  # with the solvers of the paper

            def report(record: dict[str, float]) -> None:
                line.update(int(record["iteration"]), record)

            assert settings.rank is not None  # ``for_table`` has chosen
            return fit_point(ratings, settings.rank, solver=settings.solver, callback=report, **how)

        def after_pass(posterior: CompletionPosterior) -> None:
            if callback is not None:
                callback(posterior)
            line.update(len(posterior.trace), posterior.trace[-1])

        how["set_effects"] = settings.rated_sets
        if init is None:
            model = settings.engine_options | {"set_effects": settings.rated_sets}
            rank = settings.rank
            if rank is None:
                rank = find_rank(ratings, features=table.features, **model)
            init = gradual_start(ratings, rank, features=table.features, **model)
            if settings.likelihood != "gaussian" and observations is not None:
                # the scale of the latent values is that of a fit to the categories as numbers
                numbers = observations.as_numbers()
                roughly = how | {"tol": 3 * settings.tol, "observations": numbers}
                init = fit_variational(ratings, init.rank, init=init, **roughly)
                init.trace, init.converged = [], False
        return fit_variational(
            ratings, init.rank, init=init, callback=after_pass, observations=observations, **how
        )


def model_of(
    ids: tuple[IdIndex, IdIndex],
    table: PreparedRatings,
    posterior: CompletionPosterior,
    inference: str,
    seen: TrainingRatings | None = None,
) -> CompletionModel:
    """The model of a table that was fitted."""
    return CompletionModel(
        *ids,
        posterior,
        table.center,
        table.scale,
        table.low,
        table.high,
        seen,
        inference,
        table.n_merged,
        table.ratings.n_ratings,
    )


def fitted(
    settings: Settings,
    ids: tuple[IdIndex, IdIndex],
    rows: Codes,
    columns: Codes,
    values: Floats,
    known: SideInformation,
) -> CompletionModel:
    """Fit a model to numbered entries."""
    table = prepare(rows, columns, values, ids, settings, known)
    posterior = solve(table, settings)
    seen = TrainingRatings.of(table.ratings)
    return model_of(ids, table, posterior, settings.inference, seen)
