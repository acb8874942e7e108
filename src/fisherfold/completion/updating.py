"""New ratings for a fitted model, and models of rows that were not in the fit; the model that is given never changes.

A few new ratings change the rows and columns that they touch (``stream.update_batch``). When they have become many,
all ratings are gone through again (``stream.refine``), or the factors are found anew.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
from torch import Tensor

from fisherfold.completion.entries import Codes, Floats, merge
from fisherfold.completion.inference.stream import append_members, refine, update_batch
from fisherfold.completion.model import CompletionModel
from fisherfold.completion.ratings import Ratings, TrainingRatings
from fisherfold.completion.training import Settings, SideInformation, fitted

# The furthest value in units of the scale that new ratings may have: a point estimate has no weights that doubt it.
_FURTHEST = {"variational": 1e12, "point": 1e6}
# A stream goes through all its ratings when this share of new ones has come.
_REFINE = 0.05
# It starts anew when so many times the ratings of the last start have come: dimensions that the first ratings could
# not support would else stay empty.
_START_ANEW = 1.0


def with_new_rows(
    model: CompletionModel, count: int, rows: Codes, columns: Codes, values: Floats
) -> CompletionModel:
    """A model of new rows, numbered from 0, and the same columns, which do not move."""
    seen = TrainingRatings.from_entries(rows, columns, values, count)
    _check_reach(model, values)
    known = model.posterior
    # what the columns know about which rows rated them is of no use here: it speaks of the rows of the fit
    side, others = known.rows.prior_members(count), replace(known.columns, set_effects=None)
    if known.rows.set_effects is not None:
        side.set_effects = replace(
            known.rows.set_effects, sums=side.mean.new_zeros(side.mean.shape)
        )
    posterior = replace(known, rows=side, columns=others)
    if len(values):
        batch = _batch(model, rows, columns, values)
        update_batch(posterior, *batch, move=(True, False), new_rows=True)
    empty, unknown = side.counts == 0, known.rows.unknown_member()
    side.mean[empty], side.covariance[empty] = unknown.mean, unknown.covariance
    return model.with_rows(replace(side, set_effects=None), seen)


def updated(
    model: CompletionModel, rows: object, columns: object, values: Floats, settings: Settings
) -> CompletionModel:
    """The model with new ratings."""
    plain = model.posterior
    extended = (plain.ordinal, *plain.time_effects, plain.rows.features, plain.columns.features)
    if any(part is not None for part in extended):
        raise ValueError(
            "a model with features, times or categories takes no new ratings: fit it to all of them"
        )
    old_rows, old_columns, old_values = model.given()
    row_ids, column_ids = copy.copy(model.row_ids), copy.copy(model.column_ids)
    i, j = row_ids.extend(rows, "row"), column_ids.extend(columns, "column")
    came = len(values)
    joint = (
        np.concatenate([old_rows, i]),
        np.concatenate([old_columns, j]),
        np.concatenate([old_values, values]),
    )
    if model.n_since_start + came >= _START_ANEW * model.n_at_start:
        return fitted(settings, (row_ids, column_ids), *joint, SideInformation())
    _check_reach(model, values)
    new = replace(
        model,
        row_ids=row_ids,
        column_ids=column_ids,
        posterior=model.posterior.copied(),
        low=min(model.low, values.min()),
        high=max(model.high, values.max()),
        n_since_start=model.n_since_start + came,
        n_since_refined=model.n_since_refined + came,
    )
    posterior = new.posterior
    append_members(posterior.rows, posterior.columns, len(row_ids) - len(model.row_ids))
    append_members(posterior.columns, posterior.rows, len(column_ids) - len(model.column_ids))
    refined_for = len(joint[2]) - new.n_since_refined
    if model.inference == "variational" and new.n_since_refined > _REFINE * refined_for:
        if settings.duplicates in ("last", "sum"):
            joint = merge(*joint, settings.duplicates)
        ratings = Ratings(
            joint[0],
            joint[1],
            (joint[2] - model.center) / model.scale,
            (len(row_ids), len(column_ids)),
            dtype=posterior.rows.mean.dtype,
            duplicates="mean",
            device=model.device,
        )
        refine(posterior, ratings)
        new.n_since_refined = 0
    else:
        update_batch(posterior, *_batch(new, i, j, values))
    assert model.seen is not None
    scaled = ((joint[2] - model.center) / model.scale).astype(model.seen.values.dtype)
    new.seen = TrainingRatings.from_entries(joint[0], joint[1], scaled, len(row_ids))
    return new


def _batch(
    model: CompletionModel, rows: Codes, columns: Codes, values: Floats
) -> tuple[Ratings, Tensor, Tensor]:
    """New entries as a small matrix of the rows and columns that they touch."""
    i, local_rows = np.unique(rows, return_inverse=True)
    j, local_columns = np.unique(columns, return_inverse=True)
    batch = Ratings(
        local_rows,
        local_columns,
        (values - model.center) / model.scale,
        (len(i), len(j)),
        dtype=model.posterior.rows.mean.dtype,
        duplicates="mean",
        device=model.device,
    )
    return batch, model.tensor(i), model.tensor(j)


def _check_reach(model: CompletionModel, values: Floats) -> None:
    reach, center = _FURTHEST[model.inference], model.center
    far = float(values[np.abs(values - center).argmax()]) if len(values) else center
    if abs(far - center) > reach * model.scale:
        raise ValueError(
            f"the values must lie within {reach * model.scale:.3g} of {center:.6g}, which is {reach:g} times "
            f"the spread of the values so far, got {far:g}"
        )
