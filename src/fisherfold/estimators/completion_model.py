"""A completed matrix as it is kept after the fit: ids, posterior, scale and range of the values, and what was seen.

    prediction(i, j) = g + s (b̄_i + c̄_j + ⟨ū_i, v̄_j⟩), clipped to the range of the observed values

g and s are the mean and standard deviation of the values; inside, everything is centred and scaled. An id never seen
takes part as any of those seen: an unknown row is an average row, so its prediction is the column's level.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.estimators.ids import IdIndex, Ids, describe
from fisherfold.estimators.inputs import Observations
from fisherfold.inference.completion import CompletionPosterior, fit_variational
from fisherfold.inference.completion_path import gradual_start
from fisherfold.inference.predictive import predict_pairs
from fisherfold.inference.stream import absorb, grow, look_back, prior_member, unknown_member
from fisherfold.plain import counted
from fisherfold.problems.ratings import Ratings

Floats = npt.NDArray[np.float64]
Refit = Callable[[Ratings], tuple[CompletionPosterior, float]]
UNSEEN = ("prior", "nan", "error")
# A stream looks back at all its ratings when this share of new ones has come, and starts anew when there are twice as
# many as at the last start: dimensions that the first ratings could not support would else stay empty.
_LOOK_BACK, _START_ANEW = 0.05, 2.0
# The furthest value in units of the scale: beyond, sums of squares leave float32; a point estimate, without weights
# that doubt an outlier, loses its old evidence to one before.
_FURTHEST = {"variational": 1e12, "point": 1e6}


@dataclass
class CompletionModel:
    """Everything that prediction, fold-in and files need.

    Attributes:
        row_ids: the ids of the rows.
        column_ids: the ids of the columns.
        posterior: the posterior of the centred and scaled values; for point estimates all covariances are zero.
        center: g.
        scale: s.
        low: the smallest observed value.
        high: the largest observed value.
        seen_offsets: where the seen columns of each row start.
        seen_columns: the seen columns, row after row.
        seen_values: the values there, centred and scaled.
        inference: ``variational`` or ``point``.
        n_at_look: the number of ratings when all of them were last gone through.
        n_at_start: the number of ratings when the posterior was last fitted from scratch; 0 if it must be now.
        n_merged: how many entries of the fit were merged into another one.
    """

    row_ids: IdIndex
    column_ids: IdIndex
    posterior: CompletionPosterior
    center: float
    scale: float
    low: float
    high: float
    seen_offsets: Tensor
    seen_columns: Tensor
    seen_values: Tensor
    inference: str
    n_at_look: int
    n_at_start: int
    n_merged: int

    def __copy__(self) -> CompletionModel:
        """A model that can absorb ratings, or be stopped in it, while this one stays as it is."""
        row_ids, column_ids = copy.copy(self.row_ids), copy.copy(self.column_ids)
        return replace(self, row_ids=row_ids, column_ids=column_ids, posterior=self.posterior.copied())

    @property
    def device(self) -> torch.device:
        """Where the posterior lives."""
        return self.posterior.rows.mean.device

    def locate(self, rows: Ids, columns: Ids, unseen: str) -> tuple[Tensor, Tensor]:
        """Numbers of rows and columns, -1 where the id is not known.

        Args:
            rows: row ids.
            columns: column ids.
            unseen: ``error`` refuses unknown ids; else ids of another kind than those of the fit are refused.

        Returns:
            Two int64 tensors.

        Raises:
            ValueError: if ids are refused.
        """
        i, j = self.row_ids.numbers(rows, "row"), self.column_ids.numbers(columns, "column")
        for name, number, ids, index in (("row", i, rows, self.row_ids), ("column", j, columns, self.column_ids)):
            unknown = np.flatnonzero(number < 0)
            if len(unknown) and unseen == "error":
                count = counted(len(unknown), f"{name} id was", f"{name} ids were")
                raise ValueError(
                    f"{count} not seen in fit, the first is {describe(ids[unknown])}; "
                    "use unseen='prior' or 'nan' to predict them"
                )
            if len(unknown) and len(unknown) == len(number) and _other_kind(ids, index):
                raise ValueError(
                    f"none of the {name} ids was seen in fit, and they are of another type: "
                    f"got {describe(ids)}, fitted with {describe(index.labels)}"
                )
        return torch.from_numpy(i).to(self.device), torch.from_numpy(j).to(self.device)

    def predict(
        self, rows: Tensor, columns: Tensor, *, with_std: bool = False, clip: bool = True, unseen: str = "prior"
    ) -> tuple[Floats, Floats | None]:
        """Predict entries by number.

        Args:
            rows: row numbers, -1 for unknown.
            columns: column numbers, -1 for unknown.
            with_std: whether standard deviations are wanted.
            clip: whether means are clipped to the observed range.
            unseen: ``nan`` gives NaN where the row or the column is unknown.

        Returns:
            Means and standard deviations (or None) in the units of the values.
        """
        mean, std = predict_pairs(self.posterior, rows, columns, with_std=with_std)
        value = mean.double().cpu().numpy() * self.scale + self.center
        if clip:
            np.clip(value, self.low, self.high, out=value)
        spread = None if std is None else std.double().cpu().numpy() * self.scale
        if unseen == "nan":
            unknown = ((rows < 0) | (columns < 0)).cpu().numpy()
            value[unknown] = np.nan
            if spread is not None:
                spread[unknown] = np.nan
        return value, spread

    def seen_by(self, row: int) -> Tensor:
        """The columns in which a row has ratings.

        Args:
            row: the number of the row.

        Returns:
            Column numbers.
        """
        self._check_kept()
        return self.seen_columns[int(self.seen_offsets[row]) : int(self.seen_offsets[row + 1])].long()

    def _check_kept(self) -> None:
        if len(self.seen_columns) == 0 and self.posterior.n_ratings > 0:
            raise ValueError(
                "this model was fitted over several processes to more ratings than it keeps; it can predict, and "
                "recommend with exclude_seen=False"
            )

    def _furthest(self, values: Floats) -> float | None:
        """The value that lies too far from the others to be handled in their unit, if there is one."""
        far, limit = np.abs(values - self.center), _FURTHEST[self.inference] * self.scale
        return float(values[far.argmax()]) if len(values) and far.max() > limit else None

    def _check_reach(self, values: Floats) -> None:
        if (value := self._furthest(values)) is not None:
            limit = _FURTHEST[self.inference]
            raise ValueError(
                f"the values must lie within {limit * self.scale:.3g} of {self.center:.6g}, which is {limit:g} times "
                f"the spread of the values so far, got {value:g}"
            )

    def _given(self) -> Floats:
        """The values of all ratings so far, as they were given."""
        return self.seen_values.numpy().astype(np.float64) * self.scale + self.center

    def _rescale(self, values: Floats, *, centred: bool) -> None:
        """Take the level and the unit from these values; the posterior must be found anew."""
        given = self._given()
        self.center, self.scale = level_and_scale(values, centred=centred)
        self.seen_values = torch.from_numpy((given - self.center) / self.scale).to(self.seen_values.dtype)

    def absorb(
        self, found: Observations, *, refit: Refit, duplicates: str = "mean", centred: bool = True, max_iter: int = 50,
        tol: float = 3e-4, seed: int = 0,
    ) -> None:  # fmt: skip
        """Add new ratings, with new rows and columns if need be.

        A few change the rows and columns they touch; when they have become many, all ratings are gone through again.

        Args:
            found: the new entries.
            refit: how a point estimate is found from scratch.
            duplicates: what becomes of a pair that was rated before: ``mean``, ``last`` or ``sum``. Until all ratings
                are gone through again it is one more observation.
            centred: whether a start from scratch takes the mean off.
            max_iter: the largest number of passes from scratch.
            tol: where they stop, as in a fit.
            seed: of a start from scratch.
        """
        self._check_kept()
        if self.inference == "point":
            self._check_reach(found.values)
        elif self._furthest(found.values) is not None:
            self._rescale(np.concatenate([self._given(), found.values]), centred=centred)
            self.n_at_start = 0
        self._check_forms(found)
        posterior = self.posterior
        for index, ids, side, other in (
            (self.row_ids, found.all_rows, posterior.rows, posterior.columns),
            (self.column_ids, found.all_columns, posterior.columns, posterior.rows),
        ):
            before = len(index)
            index.add(ids)
            grow(side, other, len(index) - before)
        i, j = self.row_ids.numbers(found.rows), self.column_ids.numbers(found.columns)
        self._remember(i, j, (found.values - self.center) / self.scale)
        self.low, self.high = min(self.low, found.values.min()), max(self.high, found.values.max())
        if self._has_enough():
            self._look_back(duplicates, centred, refit, max_iter=max_iter, tol=tol, seed=seed)
        else:
            absorb(posterior, *self._batch(i, j, found.values))

    def _has_enough(self) -> bool:
        """Whether so many ratings have come since the last look back that all of them are to be gone through."""
        n_now = len(self.seen_values)
        if self.inference == "point":
            return n_now >= _START_ANEW * self.n_at_start
        return self.n_at_start == 0 or n_now > (1 + _LOOK_BACK) * self.n_at_look

    def _check_forms(self, found: Observations) -> None:
        """Refuse ids that are known in another form, numbers as text or text as numbers: they would be new ones."""
        for name, ids, index in (("row", found.rows, self.row_ids), ("column", found.columns, self.column_ids)):
            meant = index.meant(ids) if _other_kind(ids, index) else ids[:0]
            known = np.flatnonzero(index.numbers(meant) >= 0)
            if len(known):
                k = known[0]
                raise ValueError(
                    f"{len(known)} of {len(ids)} {name} ids were seen before, but as another type: got "
                    f"{describe(ids[k : k + 1])}, fitted with {describe(meant[k : k + 1])}; convert them"
                )

    def _look_back(self, duplicates: str, centred: bool, refit: Refit, **start: Any) -> None:
        rows = np.repeat(np.arange(len(self.row_ids)), self.seen_offsets.diff().numpy())
        columns, values, self.n_at_look = self.seen_columns.numpy(), self._given(), len(self.seen_values)
        rows, columns, values = joined(rows, columns, values, duplicates)
        if duplicates == "sum":
            self.low, self.high = min(self.low, values.min()), max(self.high, values.max())
        anew = self.n_at_look >= _START_ANEW * self.n_at_start
        if anew:
            # the first values may have been one, or all alike, and told nothing of the unit of the others
            self._rescale(values, centred=centred)
        ratings = Ratings(
            rows, columns, (values - self.center) / self.scale, (len(self.row_ids), len(self.column_ids)),
            dtype=self.posterior.rows.mean.dtype, duplicates="mean", device=self.device,
        )  # fmt: skip
        old = self.posterior
        if not anew:
            look_back(old, ratings)
            return
        self.n_at_start = self.n_at_look
        if self.inference == "point":
            self._adopt(*refit(ratings))
            return
        kept: dict[str, Any] = {
            "ridge": old.fixed_ridge, "row_offsets": old.rows.has_offset, "column_offsets": old.columns.has_offset,
            "set_effects": old.rows.set_effects is not None, "weight_strength": old.weight_strength,
        }  # fmt: skip
        first = gradual_start(ratings, old.rank, seed=start["seed"], **kept)
        self.posterior = fit_variational(ratings, old.rank, init=first, **kept, **start)

    def _adopt(self, posterior: CompletionPosterior, level: float) -> None:
        """Take a point estimate, whose global offset is a part of the level here, for the posterior."""
        self.posterior = posterior
        self.center += level * self.scale
        self.seen_values = (self.seen_values.double() - level).to(self.seen_values.dtype)

    def of_new_row(self, columns: Ids, values: Floats, unseen: str) -> CompletionModel:
        """A model of one new row, number 0, and the same columns; these do not move, unknown ones are left out.

        Args:
            columns: the ids of the columns that the row has rated.
            values: its values.
            unseen: ``error`` refuses unknown columns.

        Returns:
            The model.
        """
        _, j = self.locate(self.row_ids.labels[:0], columns, unseen)
        known = (j >= 0).cpu().numpy()
        number = j.cpu().numpy()[known]
        return self.of_new_rows(1, np.zeros_like(number), number, values[known])

    def of_new_rows(self, count: int, rows: Any, columns: Any, values: Floats) -> CompletionModel:
        """A model of new rows, numbered from 0, and the same columns, which do not move.

        Args:
            count: how many rows.
            rows: the row of each entry.
            columns: the number of its column.
            values: its value.

        Returns:
            The model; a row without entries is any of those of the fit.
        """
        self._check_reach(values)
        new, known = replace(self), self.posterior
        # what the columns know about which rows rated them is of no use here: it speaks of the rows of the fit
        side, others = prior_member(known.rows), replace(known.columns, set_effects=None)
        grow(side, others, count - 1)
        if known.rows.set_effects is not None:
            side.set_effects = replace(known.rows.set_effects, sums=torch.zeros_like(side.mean))
        new.posterior = replace(known, rows=side, columns=others)
        if len(values):
            batch, here, there = new._batch(rows, columns, values)
            absorb(new.posterior, batch, here, there, move=(True, False), new_rows=True)
        empty, unknown = side.counts == 0, unknown_member(known.rows)
        side.mean[empty], side.covariance[empty] = unknown.mean, unknown.covariance
        new.posterior.rows, new.posterior.columns = replace(side, set_effects=None), known.columns
        return new

    def from_the_rest(self, rows: Any, columns: Any, values: Floats, *, parts: int, clip: bool) -> Floats:
        """Predict entries of new rows, those of each part from the other parts of their row.

        Args:
            rows: the row of each entry, from 0.
            columns: the number of its column, -1 if it is not known.
            values: its value.
            parts: into how many parts the entries of each row are cut at random.
            clip: as in ``predict``.

        Returns:
            One prediction per entry.
        """
        order = np.lexsort((np.random.default_rng(0).random(len(rows)), rows))
        starts = np.cumsum(np.bincount(rows)) - np.bincount(rows)
        part, found = np.empty(len(rows), dtype=np.int64), np.empty(len(rows))
        part[order] = (np.arange(len(rows)) - starts[rows[order]]) % parts
        for number in range(parts):
            held, rest = part == number, (part != number) & (columns >= 0)
            model = self.of_new_rows(len(starts), rows[rest], columns[rest], values[rest])
            pairs = (torch.from_numpy(side[held]).to(self.device) for side in (rows, columns))
            found[held] = model.predict(*pairs, clip=clip)[0]
        return found

    def _batch(self, i: Any, j: Any, values: Floats) -> tuple[Ratings, Tensor, Tensor]:
        """New entries numbered within the batch, and what is behind its rows and columns."""
        rows, local_rows = np.unique(i, return_inverse=True)
        columns, local_columns = np.unique(j, return_inverse=True)
        scaled = (values - self.center) / self.scale
        batch = Ratings(
            local_rows, local_columns, scaled, (len(rows), len(columns)), dtype=self.posterior.rows.mean.dtype,
            duplicates="mean", device=self.device,
        )  # fmt: skip
        behind = [torch.from_numpy(t).long().to(self.device) for t in (rows, columns)]
        return batch, behind[0], behind[1]

    def _remember(self, i: Any, j: Any, values: Floats) -> None:
        """Enter new entries behind those that each row has, without sorting the old ones."""
        n_rows, order = len(self.posterior.rows.mean), np.argsort(i, kind="stable")
        old = self.seen_offsets.diff().numpy()
        had = np.concatenate([old, np.zeros(n_rows - len(old), dtype=np.int64)])
        added = np.bincount(i, minlength=n_rows)
        ends = np.cumsum(had + added)
        starts = ends - had - added
        kept = np.arange(len(self.seen_columns)) + np.repeat(starts - (np.cumsum(had) - had), had)
        rows = np.asarray(i)[order]
        place = starts[rows] + had[rows] + np.arange(len(rows)) - (np.cumsum(added) - added)[rows]
        for name, fresh in (("seen_columns", j), ("seen_values", values)):
            before = getattr(self, name).numpy()
            merged = np.empty(len(kept) + len(rows), dtype=before.dtype)
            merged[kept], merged[place] = before, np.asarray(fresh)[order]
            setattr(self, name, torch.from_numpy(merged))
        self.seen_offsets = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int64))


def level_and_scale(values: Floats, *, centred: bool) -> tuple[float, float]:
    """What to take off the values and what to divide by.

    Args:
        values: the values.
        centred: whether their mean is taken off.

    Returns:
        The mean, or zero, and the root mean square of what is left; of constant values, which have no spread, their
        size, or one.

    Example:
        >>> level_and_scale(np.array([1.0, 3.0]), centred=True), level_and_scale(np.array([4.0, 4.0]), centred=True)
        ((2.0, 1.0), (4.0, 4.0))
    """
    center = float(values.mean()) if centred else 0.0
    off = values - center
    largest = float(np.abs(off).max())
    if largest <= 1e-12 * abs(center):
        return center, abs(center) or 1.0
    # dividing first keeps the squares in range
    return center, largest * float(np.sqrt(np.mean((off / largest) ** 2)))


def joined(rows: Any, columns: Any, values: Any, rule: str) -> tuple[Any, Any, Any]:
    """Entries of which equal pairs are one, where that must be known before level and scale are taken.

    A sum is one value, not its parts, and what a later value has replaced is no value any more. All values of a mean
    were observed.

    Args:
        rows: row numbers.
        columns: column numbers.
        values: values.
        rule: the rule for pairs that occur twice.

    Returns:
        The same three, for ``sum`` and ``last`` with each pair once.

    Example:
        >>> entries = np.array([0, 1, 0]), np.array([2, 2, 2]), np.array([1.0, 5.0, 2.0])
        >>> [[part.tolist() for part in joined(*entries, rule)[::2]] for rule in ("sum", "last")]
        [[[0, 1], [3.0, 5.0]], [[0, 1], [2.0, 5.0]]]
    """
    if rule not in ("sum", "last"):
        return rows, columns, values
    order = np.lexsort((columns, rows))
    rows, columns, values = (np.asarray(part)[order] for part in (rows, columns, values))
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(rows) != 0) | (np.diff(columns) != 0)]))
    ends = np.append(starts[1:], len(values)) - 1
    return rows[starts], columns[starts], values[ends] if rule == "last" else np.add.reduceat(values, starts)


def _other_kind(ids: Ids, index: IdIndex) -> bool:
    """Whether no type of these ids occurs in the fit; all numbers are of one type."""

    def kinds(values: Ids) -> set[type]:
        found = {int} if values.dtype != object else set(map(type, values.tolist()))
        return {int if issubclass(kind, Real) else kind for kind in found}

    return len(index) > 0 and not kinds(ids) & kinds(index.labels)
