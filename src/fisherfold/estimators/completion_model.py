"""A completed matrix as it is kept after the fit: ids, posterior, scale and range of the values, and what was seen.

    prediction(i, j) = g + s (b̄_i + c̄_j + ⟨ū_i, v̄_j⟩), clipped to the range of the observed values

g and s are the mean and standard deviation of the values; inside, everything is centred and scaled. An id never seen
takes part with its learnt prior: an unknown row is an average row, so its prediction is the column's level.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.estimators.ids import IdIndex, Ids, describe
from fisherfold.estimators.inputs import Observations
from fisherfold.inference.completion import CompletionPosterior
from fisherfold.inference.predictive import predict_pairs
from fisherfold.inference.stream import absorb, grow, prior_member, refresh_priors
from fisherfold.problems.ratings import Ratings

Floats = npt.NDArray[np.float64]
UNSEEN = ("prior", "nan", "error")
_REFRESH_GROWTH = 0.1  # the priors are learnt anew when a stream has brought this share of new ratings


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
        inference: ``variational`` or ``point``.
        n_at_refresh: the number of ratings when the priors were last learnt.
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
    inference: str
    n_at_refresh: int
    n_merged: int

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
                raise ValueError(
                    f"{len(unknown)} {name} ids were not seen in fit, the first is {describe(ids[unknown])}; "
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
        return self.seen_columns[int(self.seen_offsets[row]) : int(self.seen_offsets[row + 1])].long()

    def absorb(self, found: Observations) -> None:
        """Add new ratings, with new rows and columns if need be, without a new fit.

        Args:
            found: the new entries.
        """
        posterior = self.posterior
        for index, ids, side, other in (
            (self.row_ids, found.all_rows, posterior.rows, posterior.columns),
            (self.column_ids, found.all_columns, posterior.columns, posterior.rows),
        ):
            before = len(index)
            index.add(ids)
            grow(side, other, len(index) - before)
        i, j = self.row_ids.numbers(found.rows), self.column_ids.numbers(found.columns)
        batch, rows, columns = self._batch(i, j, found.values)
        absorb(posterior, batch, rows, columns)
        self._remember(i, j)
        self.low, self.high = min(self.low, found.values.min()), max(self.high, found.values.max())
        learnt = self.inference == "variational" and posterior.fixed_ridge is None
        if learnt and posterior.n_ratings > (1 + _REFRESH_GROWTH) * self.n_at_refresh:
            refresh_priors(posterior)
            self.n_at_refresh = posterior.n_ratings

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
        new = copy.copy(self)
        rows = prior_member(self.posterior.rows)
        if (sets := self.posterior.rows.set_effects) is not None:
            rows.set_effects = replace(sets, sums=torch.zeros_like(rows.mean))
        new.posterior = replace(self.posterior, rows=rows, columns=copy.copy(self.posterior.columns))
        if known.any():
            number = j.cpu().numpy()[known]
            batch, here, there = new._batch(np.zeros(len(number), dtype=np.int64), number, values[known])
            absorb(new.posterior, batch, here, there, move=(True, False))
        return new

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

    def _remember(self, i: Any, j: Any) -> None:
        """Enter new pairs into the seen columns of each row."""
        counts = self.seen_offsets.diff().numpy()
        old = np.repeat(np.arange(len(counts)), counts)
        rows = np.concatenate([old, np.asarray(i)])
        columns = np.concatenate([self.seen_columns.numpy(), np.asarray(j, dtype=np.int32)])
        order = np.argsort(rows, kind="stable")
        totals = np.bincount(rows, minlength=len(self.posterior.rows.mean))
        self.seen_columns = torch.from_numpy(columns[order].astype(np.int32))
        self.seen_offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(totals)]).astype(np.int64))


def _other_kind(ids: Ids, index: IdIndex) -> bool:
    def is_text(values: Ids) -> bool:
        return values.dtype == object and isinstance(values[0], str)

    return len(index) > 0 and is_text(ids) != is_text(index.labels)
