"""A completed matrix as it is kept after the fit: ids, posterior, scale and range of the values, and what was seen.

    prediction(i, j) = g + s (b̄_i + c̄_j + ⟨ū_i, v̄_j⟩), clipped to the range of the observed values

g and s are the mean and standard deviation of the values; inside, everything is centred and scaled. An id never seen
takes part as any of those seen: an unknown row is an average row, so its prediction is the column's level.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.completion.posterior import CompletionPosterior
from fisherfold.completion.ratings import Ratings, places
from fisherfold.completion.stream import absorb, grow
from fisherfold.plain import counted
from fisherfold.tables.ids import IdIndex, Ids, describe

Floats = npt.NDArray[np.float64]
UNSEEN = ("prior", "nan", "error")
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
        n_at_start: the number of ratings when the posterior was last fitted from scratch, less half of those that were
            replaced since; 0 if it must be now.
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
        """A model that can take ratings in, or be stopped in it, while this one stays as it is."""
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
            if len(unknown) and len(unknown) == len(number) and other_kind(ids, index):
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
        mean, std = self.posterior.predict(rows, columns, with_std=with_std)
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
        self.check_kept()
        return self.seen_columns[int(self.seen_offsets[row]) : int(self.seen_offsets[row + 1])].long()

    def check_kept(self) -> None:
        """Refuse what needs the ratings of a model that does not keep them.

        Raises:
            ValueError: if they are not kept.
        """
        if len(self.seen_columns) == 0 and self.posterior.n_ratings > 0:
            raise ValueError(
                "this model was fitted over several processes to more ratings than it keeps; it can predict, and "
                "recommend with exclude_seen=False"
            )

    @property
    def reach(self) -> float:
        """How many units from the others a value may lie."""
        return _FURTHEST[self.inference]

    def furthest(self, values: Floats) -> float | None:
        """The value that lies too far from the others to be handled in their unit.

        Args:
            values: as given.

        Returns:
            The furthest one, None if all are in reach.
        """
        far, limit = np.abs(values - self.center), self.reach * self.scale
        return float(values[far.argmax()]) if len(values) and far.max() > limit else None

    def check_reach(self, values: Floats) -> None:
        """Refuse values that lie too far from the others.

        Args:
            values: as given.

        Raises:
            ValueError: if one does.
        """
        if (value := self.furthest(values)) is not None:
            raise ValueError(
                f"the values must lie within {self.reach * self.scale:.3g} of {self.center:.6g}, which is "
                f"{self.reach:g} times the spread of the values so far, got {value:g}"
            )

    def given(self) -> Floats:
        """The values of all ratings so far, as they were given.

        Returns:
            One per rating, row after row.
        """
        return self.seen_values.numpy().astype(np.float64) * self.scale + self.center

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
        self.check_reach(values)
        new, known = replace(self), self.posterior
        # what the columns know about which rows rated them is of no use here: it speaks of the rows of the fit
        side, others = known.rows.prior_member(), replace(known.columns, set_effects=None)
        grow(side, others, count - 1)
        if known.rows.set_effects is not None:
            side.set_effects = replace(known.rows.set_effects, sums=torch.zeros_like(side.mean))
        new.posterior = replace(known, rows=side, columns=others)
        if len(values):
            batch, here, there = new.batch(rows, columns, values)
            absorb(new.posterior, batch, here, there, move=(True, False), new_rows=True)
        empty, unknown = side.counts == 0, known.rows.unknown_member()
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
        part, found = places(rows, np.random.default_rng(0).random(len(rows))) % parts, np.empty(len(rows))
        for number in range(parts):
            held, rest = part == number, (part != number) & (columns >= 0)
            model = self.of_new_rows(len(np.bincount(rows)), rows[rest], columns[rest], values[rest])
            pairs = (torch.from_numpy(side[held]).to(self.device) for side in (rows, columns))
            found[held] = model.predict(*pairs, clip=clip)[0]
        return found

    def batch(self, i: Any, j: Any, values: Floats) -> tuple[Ratings, Tensor, Tensor]:
        """New entries as a small matrix of the rows and columns that they touch.

        Args:
            i: the row number of each entry.
            j: its column number.
            values: its value, as given.

        Returns:
            The matrix, centred and scaled, and the numbers here of its rows and of its columns.
        """
        rows, local_rows = np.unique(i, return_inverse=True)
        columns, local_columns = np.unique(j, return_inverse=True)
        scaled = (values - self.center) / self.scale
        batch = Ratings(
            local_rows, local_columns, scaled, (len(rows), len(columns)), dtype=self.posterior.rows.mean.dtype,
            duplicates="mean", device=self.device,
        )  # fmt: skip
        behind = [torch.from_numpy(t).long().to(self.device) for t in (rows, columns)]
        return batch, behind[0], behind[1]


def other_kind(ids: Ids, index: IdIndex) -> bool:
    """Whether no type of these ids occurs in the fit; all numbers are of one type.

    Args:
        ids: some ids.
        index: those of the fit.

    Returns:
        False if there was none in the fit.
    """

    def kinds(values: Ids) -> set[type]:
        found = {int} if values.dtype != object else set(map(type, values.tolist()))
        return {int if issubclass(kind, Real) else kind for kind in found}

    return len(index) > 0 and not kinds(ids) & kinds(index.labels)
