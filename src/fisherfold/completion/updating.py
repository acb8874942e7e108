"""New ratings for a fitted model, and models of rows that were not in the fit; the model that is given never changes.

A few new ratings change the rows and columns that they touch (``stream.update_batch``). When they have become many,
all ratings are gone through again (``stream.refine``), or the factors are found anew.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.completion.entries import Entries
from fisherfold.completion.events import Events
from fisherfold.completion.inference.features import FeatureColumns
from fisherfold.completion.inference.stream import Batch, append_members, refine, update_batch
from fisherfold.completion.model import CompletionModel
from fisherfold.completion.ratings import Ratings, TrainingRatings, Triplets
from fisherfold.completion.training import (
    Settings,
    SideInformation,
    Unit,
    as_steps,
    extend_ids,
    fitted,
    without_weights,
    working_ratings,
)
from fisherfold.distributed import Axis
from fisherfold.plain import counted
from fisherfold.tables.ids import IdIndex
from fisherfold.warn import warn

# The furthest value in units of the scale that new ratings may have: a point estimate has no weights that doubt it.
_FURTHEST = {"variational": 1e12, "point": 1e6}
# A stream goes through all its ratings when this share of new ones has come.
_REFINE = 0.05
# It starts anew when so many times the ratings of the last start have come: dimensions that the first ratings could
# not support would else stay empty.
_START_ANEW = 0.5


def with_new_rows(
    model: CompletionModel, count: int, entries: Triplets, features: Tensor | None = None
) -> CompletionModel:
    """A model of new rows, numbered from 0, with or without features; the columns do not move."""
    seen = TrainingRatings.of(entries, count)
    _check_categories(model, entries.values)
    _check_reach(model, entries.values)
    known = model.posterior
    # what the columns know about which rows rated them is of no use here: it speaks of the rows of the fit
    side, others = known.rows.prior_members(count), replace(known.columns, set_effects=None)
    if known.rows.set_effects is not None:
        side.set_effects = replace(known.rows.set_effects, sums=torch.zeros_like(side.mean))
    posterior = replace(known, rows=side, columns=others)
    if features is not None and known.rows.features is not None:
        side.features = replace(known.rows.features, table=features.to(side.mean))
        side.mean = side.mean + side.features.shift()
    if len(entries):
        update_batch(posterior, _batch(model, entries), move=(True, False), new_rows=True)
    empty, unknown = side.counts == 0, known.rows.unknown_member()
    side.mean[empty], side.covariance[empty] = unknown.mean, unknown.covariance
    if features is not None:
        described = known.rows.described(side.features.table[empty])  # type: ignore[union-attr]
        side.mean[empty], side.covariance[empty] = described.mean, described.covariance
    return model.with_rows(replace(side, set_effects=None, features=None), seen)


def with_described(
    model: CompletionModel, features: tuple[FeatureColumns | None, FeatureColumns | None]
) -> CompletionModel:
    """A model that also knows members of which there are only features; all others stay."""
    ids = copy.copy(model.row_ids), copy.copy(model.column_ids)
    known = [(side, side.unknown_member()) for side in model.sides]
    rows, columns = (replace(side) for side in model.sides)
    for side, other, index, given, name in (
        (rows, columns, ids[0], features[0], "row"),
        (columns, rows, ids[1], features[1], "column"),
    ):
        if given is None:
            continue
        n = len(index)
        extend_ids(index, given.ids, name)
        codes = index.encode(given.ids)
        table = np.zeros((len(index) - n, given.table.shape[1]))
        table[codes[codes >= n] - n] = given.table[codes >= n]
        append_members(side, other, len(table), torch.from_numpy(table).to(side.mean))
    for side, (old, unknown) in zip((rows, columns), known, strict=True):
        # the members with ratings are the same, and so is what was derived from them
        side.remember(unknown, None if old.features is None else old.cold_start())
    seen = model.seen
    if seen is not None:
        ends = np.full(len(ids[0]) - len(model.row_ids), seen.offsets[-1])
        seen = replace(seen, offsets=np.concatenate([seen.offsets, ends]))
    posterior = replace(model.posterior, rows=rows, columns=columns)
    return replace(model, row_ids=ids[0], column_ids=ids[1], posterior=posterior, seen=seen)


def updated(
    model: CompletionModel,
    entries: Entries,
    settings: Settings,
    features: tuple[FeatureColumns | None, FeatureColumns | None] = (None, None),
) -> CompletionModel:
    """The model with new ratings."""
    events, entries = _new_events(model, entries)
    if not len(entries.values):
        return model
    _check_times(model, entries)
    _check_categories(model, entries.values)
    row_ids, column_ids = copy.copy(model.row_ids), copy.copy(model.column_ids)
    i = row_ids.extend(entries.rows, "row")
    j = column_ids.extend(entries.columns, "column")
    ids = row_ids, column_ids
    for index, given, side in zip(ids, features, ("row", "column"), strict=True):
        if given is not None:
            extend_ids(index, given.ids, side)
    came = entries.numbered(i, j).merged(settings.rule, ids)
    joint = model.given().joined(came)
    tables = _feature_tables(model, ids, features)
    if model.n_since_start + len(came) >= _START_ANEW * model.n_at_start:
        known = SideInformation((tables[0], tables[1]))
        return replace(fitted(settings, ids, joint, known), events=events)
    _check_reach(model, entries.values)
    _warn_beyond(model, entries.values)
    new = replace(
        model,
        row_ids=row_ids,
        column_ids=column_ids,
        posterior=model.posterior.copied(),
        low=min(model.low, float(entries.values.min())),
        high=max(model.high, float(entries.values.max())),
        n_since_start=model.n_since_start + len(came),
        n_since_refined=model.n_since_refined + len(came),
        events=events,
    )
    _grow_(new, tables)
    if model.inference == "variational" and new.n_since_refined > _REFINE * (
        len(joint) - new.n_since_refined
    ):
        joint = joint.merged(settings.rule)
        _refine_(new, joint)
    else:
        update_batch(new.posterior, _batch(new, came))
        joint = joint.merged("keep")  # the rule decides at the next full pass
    new.seen = TrainingRatings.of(joint, len(row_ids))
    return new


def _new_events(model: CompletionModel, entries: Entries) -> tuple[Events | None, Entries]:
    """The events so far, and the entries that were not delivered before."""
    if entries.keys is None:
        return model.events, entries
    before = model.events
    if before is None:
        before = Events(np.zeros(0, dtype=np.int64), np.zeros(0))
    events, fresh = before.extended(entries.keys, entries.values)
    return events, entries if fresh.all() else entries.at(np.flatnonzero(fresh))


def _check_times(model: CompletionModel, entries: Entries) -> None:
    timed = model.posterior.time_effects != (None, None)
    if timed and entries.times is None:
        raise ValueError("this model was fitted with times: new ratings need time= as well")
    if not timed and entries.times is not None:
        raise ValueError("this model was fitted without times: fit it with times to use them")


def _check_categories(model: CompletionModel, values: Any) -> None:
    if model.categories is not None:
        other = values[~np.isin(values, model.categories)]
        if len(other):
            raise ValueError(
                f"{counted(len(other), 'value is', 'values are')} no category of the fit, the first is "
                f"{other[0]:g}; the categories are {', '.join(f'{c:g}' for c in model.categories[:10])}"
                f"{', ...' if len(model.categories) > 10 else ''}: fit the model again to have more"
            )


def _check_reach(model: CompletionModel, values: Any) -> None:
    if not len(values):
        return
    reach, center = _FURTHEST[model.inference], model.center
    far = float(values[np.abs(values - center).argmax()])
    if abs(far - center) > reach * model.scale:
        raise ValueError(
            f"the values must lie within {reach * model.scale:.3g} of {center:.6g}, which is {reach:g} times "
            f"the spread of the values so far, got {far:g}"
        )


def _warn_beyond(model: CompletionModel, values: Any) -> None:
    """Warn of values outside of the range of the fit: a scale, or a slip."""
    margin = 0.5 * (model.high - model.low)
    beyond = values[(values < model.low - margin) | (values > model.high + margin)]
    if len(beyond):
        warn(
            f"{len(beyond)} of {counted(len(values), 'new value')} lie far outside of the range of the "
            f"ratings so far, {model.low:g} to {model.high:g}; the first is {beyond[0]:g}"
        )


def _feature_tables(
    model: CompletionModel,
    ids: tuple[IdIndex, IdIndex],
    features: tuple[FeatureColumns | None, FeatureColumns | None],
) -> list[FeatureColumns | None]:
    """The encoded features of all members, old and new; new ones without any are average."""
    found: list[FeatureColumns | None] = []
    for side, index, given, encoder in zip(model.sides, ids, features, model.encoders, strict=True):
        if side.features is None or encoder is None:
            found.append(None)
            continue
        table = np.zeros((len(index), encoder.width))
        old = side.features.table.double().cpu().numpy()
        table[: len(old)] = old
        if given is not None:
            table[index.encode(given.ids)] = given.table
        found.append(FeatureColumns(index.labels, table, encoder))
    return found


def _grow_(model: CompletionModel, tables: list[FeatureColumns | None]) -> None:
    """Append new members to the posterior of a model, and set the features of all."""
    rows, columns = model.sides
    for side, other, index, table in (
        (rows, columns, model.row_ids, tables[0]),
        (columns, rows, model.column_ids, tables[1]),
    ):
        append_members(side, other, len(index) - len(side.mean))
        if side.features is not None and table is not None:
            whole = torch.from_numpy(table.table).to(side.features.table)
            side.features = replace(side.features, table=whole)
            side.invalidate()


def _refine_(model: CompletionModel, entries: Triplets) -> None:
    """Go through all ratings again."""
    ratings = _ratings(model, entries, (len(model.row_ids), len(model.column_ids)))
    working = working_ratings(ratings, entries, unit_of(model), model.categories)
    refine(model.posterior, ratings, working=working)
    model.n_since_refined = 0


def _ratings(model: CompletionModel, entries: Triplets, shape: tuple[int, int]) -> Ratings:
    """Merged entries in the units of a model."""
    if model.inference == "point":
        entries = without_weights(entries)
    if model.categories is not None:
        entries = as_steps(entries, model.categories)
    return Ratings.over(
        (Axis.whole(shape[0]), Axis.whole(shape[1])),
        entries,
        center=model.center,
        scale=model.scale,
        dtype=model.posterior.rows.mean.dtype,
        device=model.device,
    )


def unit_of(model: CompletionModel) -> Unit:
    """The unit of a fitted model."""
    dtype = model.posterior.rows.mean.dtype
    return Unit(model.center, model.scale, model.low, model.high, dtype)


def _batch(model: CompletionModel, entries: Triplets) -> Batch:
    """Merged entries as a small matrix of the rows and columns that they touch."""
    i, local_rows = np.unique(entries.rows, return_inverse=True)
    j, local_columns = np.unique(entries.columns, return_inverse=True)
    local = replace(entries, rows=local_rows, columns=local_columns)
    ratings = _ratings(model, local, (len(i), len(j)))
    members = model.tensor(i), model.tensor(j)
    working = working_ratings(ratings, local, unit_of(model), model.categories, members=members)
    return Batch(ratings, *members, working)
