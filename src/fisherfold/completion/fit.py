"""From observed entries to a fitted model: numbering, centring, the solver, the progress bar, Ctrl-C, checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fisherfold.completion.extremes import resolving, sampled
from fisherfold.completion.model import CompletionModel
from fisherfold.completion.partial_fit import Refit
from fisherfold.completion.point_posterior import point_posterior
from fisherfold.completion.posterior import CompletionPosterior
from fisherfold.completion.ratings import Ratings, RepeatedPairs
from fisherfold.completion.shared_ratings import Prepared, Share, seen_entries, share_out
from fisherfold.completion.start import start_posterior
from fisherfold.completion.values import joined, level_and_scale
from fisherfold.completion.variational import fit_variational, gradual_start
from fisherfold.distributed import ALONE, Group
from fisherfold.files import digest, sound
from fisherfold.tables.checkpoint import FitCheckpoint
from fisherfold.tables.ids import IdIndex, plain
from fisherfold.tables.inputs import Observations
from fisherfold.tables.posterior_files import pack_posterior, unpack_posterior
from fisherfold.threads import threads

# Of a table that nothing is missing in, nothing can be learnt about missing values.
_LONG = "; or, if this is a list of entries and no matrix, hand over fit(X[['user', 'item']], X['rating'])"


@dataclass(frozen=True)
class FitOptions:
    """How to fit; the names are those of ``MatrixCompletion``.

    ``may_grow`` says that more rows and columns will come, so that the rank may exceed those of the first batch:
    factors that the data do not speak of stay at their prior.
    """

    rank: int
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
    n_jobs: int | None
    verbose: bool
    return_on_interrupt: bool
    checkpoint: str | os.PathLike[str] | None = None
    group: Group = ALONE
    may_grow: bool = False

    def identity(self) -> dict[str, Any]:
        """What decides the result of a fit, apart from the data; ``max_iter`` may grow."""
        free = {"max_iter", "device", "n_jobs", "verbose", "return_on_interrupt", "checkpoint", "group", "may_grow"}
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in free}


def prepare(found: Observations, options: FitOptions) -> Prepared:
    """Number the ids, centre and scale the values, and sort them both ways.

    Args:
        found: the observed entries.
        options: how to fit.

    Returns:
        What the solvers want.
    """
    row_ids, column_ids = IdIndex(found.all_rows), IdIndex(found.all_columns)
    if not (options.may_grow and options.inference == "variational"):
        full = found.is_table and len(found.values) == len(row_ids) * len(column_ids)
        _check_rank(options, len(row_ids), len(column_ids), hint=_LONG if full and len(column_ids) in (3, 4) else "")
    rows, columns, values = row_ids.numbers(found.rows), column_ids.numbers(found.columns), found.values
    rows, columns, values = joined(rows, columns, values, options.duplicates)
    center, scale = level_and_scale(values, centred=options.offsets != "none")
    low, high = float(values.min()), float(values.max())

    def where(value: float) -> str:
        k = int(np.argmax(values == value))
        return f" (row {plain(row_ids.labels[rows[k]])!r}, column {plain(column_ids.labels[columns[k]])!r})"

    dtype = resolving(sampled(values), low, high, scale, options.dtype, where)
    with _naming(row_ids, column_ids):
        ratings = Ratings(
            rows, columns, (values - center) / scale, (len(row_ids), len(column_ids)), dtype=dtype,
            duplicates=options.duplicates, device=options.device,  # type: ignore[arg-type]
        )  # fmt: skip
    merged = ratings.n_duplicates + len(found.values) - len(values)
    return Prepared(ratings, row_ids, column_ids, center, scale, low, high, merged)


def merged(found: Observations, duplicates: str) -> Observations:
    """Each pair once, as a fit sees it: what is held out of a fit must not be in it under another line.

    Args:
        found: the observed entries.
        duplicates: what becomes of a pair given twice: ``mean``, ``last``, ``sum`` or ``error``.

    Returns:
        The same entries if no pair occurs twice, else those that are left, by column, of the same table.

    Example:
        >>> import numpy as np
        >>> ids, values = np.array([7, 7, 8]), np.array([1.0, 2.0, 5.0])
        >>> merged(Observations(ids, ids, values, ids, ids), "sum").values.tolist()
        [3.0, 5.0]
    """
    row_ids, column_ids = IdIndex(found.rows), IdIndex(found.columns)
    rows, columns, values = row_ids.numbers(found.rows), column_ids.numbers(found.columns), found.values
    rows, columns, values = joined(rows, columns, values, duplicates)
    with _naming(row_ids, column_ids):
        ratings = Ratings(
            rows, columns, values, (len(row_ids), len(column_ids)), dtype=torch.float64,
            duplicates=duplicates,  # type: ignore[arg-type]
        )  # fmt: skip
    if ratings.n_duplicates + len(found.values) - len(values) == 0:
        return found
    i, j, kept = (part.numpy() for part in ratings.entries())
    return dataclasses.replace(found, rows=row_ids.labels[i], columns=column_ids.labels[j], values=kept)


@contextlib.contextmanager
def _naming(row_ids: IdIndex, column_ids: IdIndex) -> Iterator[None]:
    """Name a repeated pair by its ids in place of their numbers."""
    try:
        yield
    except RepeatedPairs as error:
        pair = plain(row_ids.labels[error.row]), plain(column_ids.labels[error.column])
        raise RepeatedPairs(error.count, *pair) from None


def _check_rank(options: FitOptions, n_rows: int, n_columns: int, *, hint: str = "") -> None:
    rank, limit = options.rank, min(n_rows, n_columns)
    bound = f"min(n_rows, n_columns)=min({n_rows}, {n_columns})={limit}"
    if rank > limit:
        raise ValueError(f"rank must be between 1 and {bound}, got {rank}; choose a smaller one{hint}")
    if options.solver != "auto" and rank == limit:
        raise ValueError(
            f"rank must be less than {bound} for solver={options.solver!r}, whose subspace would be the whole space, "
            f"got {rank}"
        )


def fit_model(found: Observations | Share, options: FitOptions) -> tuple[CompletionModel, bool]:
    """Fit a model, alone or together with the other processes of ``options.group``.

    Args:
        found: the observed entries, or this process's share of them.
        options: how to fit.

    Returns:
        The model, the same on every process, and whether the fit was interrupted.
    """
    with threads(options.n_jobs):
        if isinstance(found, Share):
            centred = options.offsets != "none"
            ready = share_out(
                found, options.group, dtype=options.dtype, duplicates=options.duplicates, centred=centred
            )
            _check_rank(options, len(ready.row_ids), len(ready.column_ids))
        else:
            ready = prepare(found, options)
        saved = checkpoint_of(ready.ratings, options, ready.given)
        outcome = run(ready.ratings, options, saved=saved)
    posterior = outcome.posterior.gathered()
    model = CompletionModel(
        ready.row_ids, ready.column_ids, posterior, ready.center + outcome.level * ready.scale, ready.scale,
        ready.low, ready.high, *seen_entries(ready.ratings, outcome.level), options.inference, posterior.n_ratings,
        posterior.n_ratings, ready.n_merged,
    )  # fmt: skip
    if saved is not None and not outcome.interrupted:
        saved.remove()
    return model, outcome.interrupted


def checkpoint_of(ratings: Ratings, options: FitOptions, given: str = "", /, **search: Any) -> FitCheckpoint | None:
    """The checkpoint of a fit, if there is to be one.

    Args:
        ratings: the centred and scaled ratings.
        options: how to fit.
        given: over several processes, what tells these entries from others; the ratings are scaled, to rounding.
        **search: what a search over ranks and ridges tries; its checkpoint lies beside that of the final fit.

    Returns:
        The checkpoint, which knows the data and the options by a digest.
    """
    if options.checkpoint is None:
        return None
    if ratings.group.size > 1:
        data = f"{given} {ratings.n_ratings}"
    else:
        side = ratings.by_column
        data = digest([side.offsets, side.indices(), side.values()])
    identity = options.identity() | {"shape": ratings.shape, "data": data} | search
    path = f"{os.fspath(options.checkpoint)}.search" if search else options.checkpoint
    return FitCheckpoint(path, identity, ratings.group)


@dataclass(frozen=True)
class Outcome:
    """What a solver returns.

    Attributes:
        posterior: the posterior.
        interrupted: whether Ctrl-C ended the fit.
        level: a constant to add to all predictions, in scaled units.
    """

    posterior: CompletionPosterior
    interrupted: bool
    level: float = 0.0


def run(
    ratings: Ratings, options: FitOptions, init: CompletionPosterior | None = None, saved: FitCheckpoint | None = None
) -> Outcome:
    """Run the solver behind a progress bar; end it in good order at Ctrl-C if so wanted.

    Args:
        ratings: the centred and scaled ratings.
        options: how to fit.
        init: where to start from (``variational`` only).
        saved: where to keep the state of the fit, and to go on from if there is one.

    Returns:
        The posterior and how it came about.

    Raises:
        KeyboardInterrupt: at Ctrl-C, if it is not to be caught.
    """
    posterior = init
    try:
        with progress(options) as show:
            if options.inference == "point":
                return Outcome(*point_posterior(
                    ratings, options.rank, ridge=options.ridge, offsets=options.offsets, solver=options.solver,
                    max_iter=options.max_iter, tol=options.tol, seed=options.seed, callback=show, saved=saved,
                    return_on_interrupt=options.return_on_interrupt,
                ))  # fmt: skip
            if posterior is None:
                posterior = _resumed(saved, ratings) or gradual_start(
                    ratings, options.rank, set_effects=options.rated_sets, **_model(options)
                )
            posterior = _ascend(ratings, options, posterior, show, saved)
    except KeyboardInterrupt:
        if not options.return_on_interrupt:
            raise
        if posterior is None:  # nothing is known yet but the mean
            posterior = start_posterior(ratings, options.rank, blank=True, **_model(options))
        return Outcome(posterior, True)
    return Outcome(posterior, False)


def point_refit(options: FitOptions) -> Refit:
    """How a stream of a point estimate starts anew; Ctrl-C leaves the model as it was.

    Args:
        options: how to fit.

    Returns:
        A function from all centred and scaled ratings to the posterior and its global offset.
    """
    plainly = dataclasses.replace(options, inference="point", verbose=False, return_on_interrupt=False)

    def refit(ratings: Ratings) -> tuple[CompletionPosterior, float]:
        outcome = run(ratings, plainly)
        return outcome.posterior, outcome.level

    return refit


def _model(options: FitOptions) -> dict[str, Any]:
    return {
        "ridge": options.ridge, "row_offsets": options.offsets in ("both", "rows"),
        "column_offsets": options.offsets in ("both", "columns"), "seed": options.seed,
    }  # fmt: skip


def _resumed(saved: FitCheckpoint | None, ratings: Ratings) -> CompletionPosterior | None:
    if saved is None or (found := saved.load()) is None:
        return None
    with sound(saved.path, "checkpoint"):
        return unpack_posterior(*found).shared_out(ratings.row_axis, ratings.column_axis)


def _ascend(
    ratings: Ratings, options: FitOptions, posterior: CompletionPosterior, show: _Show, saved: FitCheckpoint | None
) -> CompletionPosterior:
    def after_pass(posterior: CompletionPosterior) -> None:
        if saved is not None:
            saved.save(*pack_posterior(posterior.gathered()))
        show(posterior.trace[-1])

    return fit_variational(
        ratings, options.rank, max_iter=options.max_iter, tol=options.tol, set_effects=options.rated_sets,
        callback=after_pass, init=posterior, **_model(options),
    )  # fmt: skip


class _Show:
    """Draws one line per pass on a rich progress bar, or nothing."""

    def __init__(self, options: FitOptions) -> None:
        self.total = options.max_iter
        self.bar = None
        if options.verbose and options.group.is_first:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self.bar = Progress(
                TextColumn("completing"), BarColumn(bar_width=20), MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), console=Console(stderr=True),
            )  # fmt: skip
            self.task = self.bar.add_task("fit", total=self.total, figures="")

    def __call__(self, record: dict[str, float]) -> None:
        if self.bar is not None:
            figures = "  ".join(f"{k} {v:.5g}" for k, v in record.items() if k not in ("iteration", "seconds"))
            self.bar.update(self.task, completed=record["iteration"], figures=figures)


@contextlib.contextmanager
def progress(options: FitOptions) -> Iterator[_Show]:
    """A progress bar that is shown while the block runs, if the fit is verbose.

    Args:
        options: how to fit.

    Yields:
        What to call after every pass.
    """
    show = _Show(options)
    if show.bar is None:
        yield show
    else:
        with show.bar:
            yield show
