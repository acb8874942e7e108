"""From row numbers, column numbers and values to a posterior.

x_ij = g + s z_ij,    g, s: mean and standard deviation of the values;    z is what the solvers see
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fisherfold.completion.entries import Floats
from fisherfold.completion.inference.features import FeatureColumns, FeatureEncoder
from fisherfold.completion.inference.posterior import CompletionPosterior
from fisherfold.completion.inference.rank import USUAL_RANK, find_rank
from fisherfold.completion.inference.start import FeatureTable
from fisherfold.completion.inference.time_effects import periods_of
from fisherfold.completion.inference.variational import fit_variational, gradual_start
from fisherfold.completion.inference.working_ratings import WorkingRatings
from fisherfold.completion.model import CompletionModel
from fisherfold.completion.ratings import Ratings, TrainingRatings, Triplets
from fisherfold.distributed import ALONE, Axis, Group
from fisherfold.progress import track
from fisherfold.tables.ids import IdIndex, as_ids, integer_of
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
    """What becomes of pairs given twice: each of several categories is kept, since their mean need be none."""
    return "keep" if duplicates == "mean" and likelihood != "gaussian" else duplicates


@dataclass(frozen=True)
class SideInformation:
    """What a fit knows of rows and columns besides their ratings.

    Attributes:
        features: of the rows and of the columns.
    """

    features: tuple[FeatureColumns | None, FeatureColumns | None] = (None, None)

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return self.features != (None, None)

    @property
    def encoders(self) -> tuple[FeatureEncoder | None, FeatureEncoder | None]:
        """How the features are encoded."""
        row, column = (None if each is None else each.encoder for each in self.features)
        return row, column

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
    """Ratings as the solvers want them, and how to get back.

    Attributes:
        ratings: centred and scaled.
        entries: the merged ones in units of the values.
        unit: what was subtracted and divided by, and the range.
        n_merged: how many entries were merged into another one.
        categories: the values of ordered categories, ascending.
        working: what makes working values of categories and times.
        features: of the rows and of the columns.
        encoders: how they were encoded.
    """

    ratings: Ratings
    entries: Triplets
    unit: Unit
    n_merged: int
    categories: Floats | None = None
    working: WorkingRatings | None = None
    features: tuple[FeatureTable | None, FeatureTable | None] = (None, None)
    encoders: tuple[FeatureEncoder | None, FeatureEncoder | None] = (None, None)


@dataclass(frozen=True)
class Unit:
    """The unit of a fit: value = center + scale z.

    Attributes:
        center: g.
        scale: s.
        low: the smallest value that was observed.
        high: the largest one.
        dtype: the type that resolves the values.
    """

    center: float
    scale: float
    low: float
    high: float
    dtype: torch.dtype


def prepare(
    given: Triplets, ids: tuple[IdIndex, IdIndex], settings: Settings, known: SideInformation
) -> PreparedRatings:
    """Merge pairs given twice, centre and scale, and sort both ways."""
    entries = given.merged(settings.rule, ids)
    n_merged = len(given) - len(entries) + int(entries.repeated.sum())
    # replicates of a mean were all observed
    observed = given if settings.rule == "mean" else entries
    ends = float(observed.values.min()), float(observed.values.max())
    categories, numbers = None, entries
    if settings.inference == "point":
        numbers = without_weights(entries)
    if settings.likelihood != "gaussian":
        categories = np.unique(entries.values)
        _check_categories(categories, settings.likelihood)
        numbers = as_steps(entries, categories)
    unit = standardise(numbers, ends, settings)
    axes = Axis.whole(len(ids[0])), Axis.whole(len(ids[1]))
    ratings = Ratings.over(
        axes,
        numbers,
        center=unit.center,
        scale=unit.scale,
        dtype=unit.dtype,
        device=settings.device,
    )
    return PreparedRatings(
        ratings,
        entries,
        unit,
        n_merged,
        categories,
        working_ratings(ratings, entries, unit, categories),
        known.tables(ids, ratings),
        known.encoders,
    )


def without_weights(entries: Triplets) -> Triplets:
    """Each pair as one rating: the paper's problem has no weights."""
    return Triplets(entries.rows, entries.columns, entries.values)


def as_steps(entries: Triplets, categories: Floats) -> Triplets:
    """Ordered categories as even steps from the lowest to the highest: only their order says anything."""
    steps = np.linspace(categories[0], categories[-1], len(categories))
    return replace(entries, values=steps[np.searchsorted(categories, entries.values)])


def working_ratings(
    ratings: Ratings,
    entries: Triplets,
    unit: Unit,
    categories: Floats | None,
    *,
    members: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> WorkingRatings | None:
    """What makes working values of categories and times, if there are any; members are those of a batch."""
    if categories is None and entries.times is None:
        return None
    device, steps, category = ratings.device, None, None
    if categories is not None:
        even = np.linspace(categories[0], categories[-1], len(categories))
        steps = torch.from_numpy((even - unit.center) / unit.scale).to(device)
        category = torch.from_numpy(np.searchsorted(categories, entries.values)).to(device)
    times = None if entries.times is None else torch.from_numpy(entries.times).to(device)
    periods: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if entries.times is not None and members is None:
        periods = _periods(entries.times)
    amounts = None if entries.weights is None else entries.amounts
    return WorkingRatings(
        ratings,
        categories=steps,
        category=category,
        times=times,
        periods=periods,
        amounts=None if amounts is None else torch.from_numpy(amounts).to(device),
        members=members,
    )


def _periods(times: Floats) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the periods of rows and of columns start: days, if times are seconds, and runs of as many ratings each."""
    runs = periods_of(times, None, _PERIODS)
    days = periods_of(times, _DAY, _MOST_DAYS)
    return days if len(days) > 1 else runs, runs


def _check_categories(categories: Floats, likelihood: str) -> None:
    count = len(categories)
    if likelihood == "binary" and count != 2:
        raise ValueError(f"likelihood='binary' needs two different values, got {count}")
    if likelihood == "ordered" and not 2 <= count <= _MOST_CATEGORIES:
        raise ValueError(
            f"likelihood='ordered' needs 2 to {_MOST_CATEGORIES} different values, got {count}; "
            "use 'gaussian' for values that are measured"
        )


def standardise(
    entries: Triplets, ends: tuple[float, float], settings: Settings, group: Group = ALONE
) -> Unit:
    """Centre, scale and range of the values of all processes, and the dtype that resolves them.

    ``ends`` are the least and the largest value here, infinite if there is none.
    """
    extremes = group.largest(torch.tensor([ends[1], -ends[0]], dtype=torch.float64))
    high, low = float(extremes[0]), -float(extremes[1])
    if not np.isfinite([low, high]).all():
        raise ValueError(
            "there are no ratings: found 0 observed entries on all ranks, at least 1 is needed"
        )
    values, size = entries.values, max(abs(low), abs(high)) or 1.0
    weights = entries.amounts if entries.weights is None else entries.weights
    w: Any = 1.0 if weights is None else weights
    # dividing first keeps sums and squares in range
    sums = [entries._default("weights").sum(), (w * (values / size)).sum(), entries.total_amount]
    count, total, amount = group.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
    center = size * total / count if settings.offsets != "none" else 0.0
    largest = max(abs(low - center), abs(high - center))
    if largest <= 1e-12 * abs(center):
        return Unit(center, abs(center) or 1.0, low, high, settings.dtype)
    squares = w * np.square((values - center) / largest)
    if entries.spread is not None:
        squares = squares + np.square(entries.spread / largest)
    total = float(group.sum(torch.tensor(float(np.sum(squares)), dtype=torch.float64)))
    scale = largest * (total / amount) ** 0.5
    sample = group.gather(
        torch.from_numpy(values[:: len(values) * group.size // _SAMPLE + 1].copy())
    ).numpy()
    return Unit(center, scale, low, high, _resolving(sample, low, high, scale, settings.dtype))


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
    ratings, working = table.ratings, table.working
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
            if settings.likelihood != "gaussian" and working is not None:
                # the scale of the latent values is that of a fit to the categories as numbers
                numbers = working.as_numbers()
                roughly = how | {"tol": 3 * settings.tol, "working": numbers}
                init = fit_variational(ratings, init.rank, init=init, **roughly)
                init.trace, init.converged = [], False
        return fit_variational(
            ratings, init.rank, init=init, callback=after_pass, working=working, **how
        )


def extend_ids(index: IdIndex, ids: Any, side: str) -> None:
    """Number ids of features that have no ratings; the type of the ids stays."""
    found = as_ids(ids, side)
    if found.dtype == object and not index.is_text and len(index):
        numbers = [integer_of(text) for text in found.tolist()]
        if None in numbers:
            odd = found[numbers.index(None)]
            raise ValueError(
                f"the ids of {side}_features must be integers as those of the ratings are, got {odd!r}"
            )
        found = np.array(numbers, dtype=np.int64)
    index.extend(found, side)


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
        table.unit.center,
        table.unit.scale,
        table.unit.low,
        table.unit.high,
        seen,
        inference,
        table.n_merged,
        table.ratings.n_ratings,
        categories=table.categories,
        encoders=table.encoders,
    )


def fitted(
    settings: Settings,
    ids: tuple[IdIndex, IdIndex],
    entries: Triplets,
    known: SideInformation,
) -> CompletionModel:
    """Fit a model to numbered entries."""
    table = prepare(entries, ids, settings, known)
    posterior = solve(table, settings)
    seen = TrainingRatings.of(table.entries, len(ids[0]))
    return model_of(ids, table, posterior, settings.inference, seen)
