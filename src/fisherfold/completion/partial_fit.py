"""New ratings for a completed matrix: rows and columns grow, and the posterior follows.

A few ratings add their evidence to the rows and columns they touch. When they have become many, all ratings are gone
through again from where the posterior stands; when as many have come as there were at the last start, or a value lies
out of reach of the unit so far, the posterior is found anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fisherfold.completion.extremes import furthest, resolving, sampled
from fisherfold.completion.model import CompletionModel, Floats, other_kind
from fisherfold.completion.posterior import CompletionPosterior
from fisherfold.completion.ratings import Ratings
from fisherfold.completion.stream import absorb, grow, look_back
from fisherfold.completion.values import joined, level_and_scale
from fisherfold.completion.variational import fit_variational, gradual_start
from fisherfold.tables.ids import describe
from fisherfold.tables.inputs import Observations

Refit = Callable[[Ratings], tuple[CompletionPosterior, float]]
# A stream looks back at all its ratings when this share of new ones has come, and starts anew when as many have come as
# there were at the last start: dimensions that the first ratings could not support would else stay empty.
_LOOK_BACK, _START_ANEW = 0.05, 2.0


def take_in(
    model: CompletionModel, found: Observations, *, refit: Refit, duplicates: str = "mean", centred: bool = True,
    max_iter: int = 50, tol: float = 3e-4, seed: int = 0,
) -> None:  # fmt: skip
    """Add new ratings, with new rows and columns if need be.

    A few change the rows and columns they touch; when they have become many, all ratings are gone through again.

    Args:
        model: the model; changed in place.
        found: the new entries.
        refit: how a point estimate is found from scratch.
        duplicates: what becomes of a pair that was rated before: ``mean``, ``last`` or ``sum``. Until all ratings are
            gone through again it is one more observation.
        centred: whether a start from scratch takes the mean off.
        max_iter: the largest number of passes from scratch.
        tol: where they stop, as in a fit.
        seed: of a start from scratch.
    """
    model.check_kept()
    if model.inference == "point":
        model.check_reach(found.values)
    elif model.furthest(found.values) is not None:
        together = np.concatenate([model.given(), found.values])
        if furthest(sampled(together), together.min(), together.max())[-1] > model.reach:
            # no other unit, but a single mistake: in its unit nothing would be left of all that was given before
            model.check_reach(found.values)
        _rescale(model, together, centred=centred)
        model.n_at_start = 0
    _check_forms(model, found)
    posterior = model.posterior
    for index, ids, side, other in (
        (model.row_ids, found.all_rows, posterior.rows, posterior.columns),
        (model.column_ids, found.all_columns, posterior.columns, posterior.rows),
    ):
        before = len(index)
        index.add(ids)
        grow(side, other, len(index) - before)
    i, j = model.row_ids.numbers(found.rows), model.column_ids.numbers(found.columns)
    _remember(model, i, j, (found.values - model.center) / model.scale)
    model.low, model.high = min(model.low, found.values.min()), max(model.high, found.values.max())
    if _has_enough(model):
        _look_back(model, duplicates, centred, refit, max_iter=max_iter, tol=tol, seed=seed)
    else:
        absorb(posterior, *model.batch(i, j, found.values))


def _has_enough(model: CompletionModel) -> bool:
    """Whether so many ratings have come since the last look back that all of them are to be gone through."""
    n_now = len(model.seen_values)
    if model.inference == "point":
        return n_now >= _START_ANEW * model.n_at_start
    return model.n_at_start == 0 or n_now > (1 + _LOOK_BACK) * model.n_at_look


def _check_forms(model: CompletionModel, found: Observations) -> None:
    """Refuse ids that are known in another form, numbers as text or text as numbers: they would be new ones."""
    for name, ids, index in (("row", found.rows, model.row_ids), ("column", found.columns, model.column_ids)):
        meant = index.meant(ids) if other_kind(ids, index) else ids[:0]
        known = np.flatnonzero(index.numbers(meant) >= 0)
        if len(known):
            k = known[0]
            raise ValueError(
                f"{len(known)} of {len(ids)} {name} ids were seen before, but as another type: got "
                f"{describe(ids[k : k + 1])}, fitted with {describe(meant[k : k + 1])}; convert them"
            )


def _look_back(model: CompletionModel, duplicates: str, centred: bool, refit: Refit, **start: Any) -> None:
    """Go through all ratings again, from where the posterior stands or from scratch."""
    n_now = len(model.seen_values)
    rows, columns, values = _joined(model, duplicates)
    model.n_at_look = len(values)
    anew = n_now >= _START_ANEW * model.n_at_start
    # ratings that replaced others have come as well: a table that is rated over again starts anew too
    model.n_at_start -= math.ceil((n_now - len(values)) / _START_ANEW)
    dtype = model.posterior.rows.mean.dtype
    if anew:
        # the first values may have been one, or all alike, and told nothing of the unit of the others
        _rescale(model, values, centred=centred)
        dtype = resolving(sampled(values), values.min(), values.max(), model.scale, dtype)
        model.seen_values = model.seen_values.to(dtype)
    ratings = Ratings(
        rows, columns, (values - model.center) / model.scale, (len(model.row_ids), len(model.column_ids)),
        dtype=dtype, duplicates="mean", device=model.device,
    )  # fmt: skip
    old = model.posterior
    if not anew:
        look_back(old, ratings)
        return
    model.n_at_start = model.n_at_look
    if model.inference == "point":
        _adopt(model, *refit(ratings))
        return
    kept: dict[str, Any] = {
        "ridge": old.fixed_ridge, "row_offsets": old.rows.has_offset, "column_offsets": old.columns.has_offset,
        "set_effects": old.rows.set_effects is not None, "weight_strength": old.weight_strength,
    }  # fmt: skip
    first = gradual_start(ratings, old.rank, seed=start["seed"], **kept)
    model.posterior = fit_variational(ratings, old.rank, init=first, **kept, **start)


def _joined(model: CompletionModel, duplicates: str) -> tuple[Any, Any, Floats]:
    """All ratings by the rule; those that a later one has replaced, or was added to, are not kept any longer."""
    rows = np.repeat(np.arange(len(model.row_ids)), model.seen_offsets.diff().numpy())
    columns, values = model.seen_columns.numpy(), model.given()
    if duplicates not in ("sum", "last"):
        return rows, columns, values
    rows, columns, values = joined(rows, columns, values, duplicates)
    if duplicates == "sum":
        model.low, model.high = min(model.low, values.min()), max(model.high, values.max())
    counts = np.bincount(rows, minlength=len(model.row_ids))
    model.seen_offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))
    model.seen_columns = torch.from_numpy(columns)
    model.seen_values = torch.from_numpy((values - model.center) / model.scale).to(model.seen_values.dtype)
    return rows, columns, values


def _rescale(model: CompletionModel, values: Floats, *, centred: bool) -> None:
    """Take the level and the unit from these values, in float64; the posterior must be found anew."""
    given = model.given()
    model.center, model.scale = level_and_scale(values, centred=centred)
    model.seen_values = torch.from_numpy((given - model.center) / model.scale)


def _adopt(model: CompletionModel, posterior: CompletionPosterior, level: float) -> None:
    """Take a point estimate, whose global offset is a part of the level here, for the posterior."""
    model.posterior = posterior
    model.center += level * model.scale
    model.seen_values = (model.seen_values.double() - level).to(model.seen_values.dtype)


def _remember(model: CompletionModel, i: Any, j: Any, values: Floats) -> None:
    """Enter new entries behind those that each row has, without sorting the old ones."""
    n_rows, order = len(model.posterior.rows.mean), np.argsort(i, kind="stable")
    old = model.seen_offsets.diff().numpy()
    had = np.concatenate([old, np.zeros(n_rows - len(old), dtype=np.int64)])
    added = np.bincount(i, minlength=n_rows)
    ends = np.cumsum(had + added)
    starts = ends - had - added
    kept = np.arange(len(model.seen_columns)) + np.repeat(starts - (np.cumsum(had) - had), had)
    rows = np.asarray(i)[order]
    place = starts[rows] + had[rows] + np.arange(len(rows)) - (np.cumsum(added) - added)[rows]
    for name, fresh in (("seen_columns", j), ("seen_values", values)):
        before = getattr(model, name).numpy()
        merged = np.empty(len(kept) + len(rows), dtype=before.dtype)
        merged[kept], merged[place] = before, np.asarray(fresh)[order]
        setattr(model, name, torch.from_numpy(merged))
    model.seen_offsets = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int64))
