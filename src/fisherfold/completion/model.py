"""A completed matrix as it is kept after the fit: ids, posterior, scale and range of the values, and what was seen.

    E[x_ij] = g + s (b̄_i + c̄_j + ⟨ū_i, v̄_j⟩),    clipped to the range of the observed values
    Var[x_ij] = s² (ũᵀ C_j ũ + ṽᵀ R_i ṽ + tr(R_uu C_vv) + E[1/α_i] E[1/β_j] / τ),    ũ = (ū, 1), ṽ = (v̄, 1)

R_i and C_j are the posterior covariances of (u_i, b_i) and (v_j, c_j). A request gathers the members that it names and
costs nothing else. An id that was not seen takes part as any of those that were.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.completion.entries import Codes, Floats, merge, nearest
from fisherfold.completion.fit import Extras, Settings, Table, prepare, solve
from fisherfold.completion.inference.implicit import new_rows
from fisherfold.completion.inference.posterior import CompletionPosterior
from fisherfold.completion.inference.stream import absorb, grow, look_back
from fisherfold.completion.ratings import Ratings
from fisherfold.distributed import Axis
from fisherfold.plain import counted
from fisherfold.tables.ids import IdIndex

UNSEEN = ("prior", "nan", "error")
_NOT_KEPT = (
    "this model does not keep the ratings it was fitted to; it can predict, and recommend with "
    "exclude_seen=False"
)
# The furthest value in units of the scale that new ratings may have: a point estimate has no weights that doubt it.
_FURTHEST = {"variational": 1e12, "point": 1e6}
# A stream looks back at all its ratings when this share of new ones has come, and starts anew when as many have come as
# there were at the last start: dimensions that the first ratings could not support would else stay empty.
_LOOK_BACK, _START_ANEW = 0.05, 1.0


@dataclass
class Seen:
    """The ratings of each row, centred and scaled."""

    offsets: npt.NDArray[np.int64]  # where those of each row start, and the end
    columns: npt.NDArray[np.int32]  # their column numbers
    values: npt.NDArray[np.floating]  # their values

    @classmethod
    def of(cls, ratings: Ratings) -> Seen:
        """The ratings of a fit."""
        by_row = ratings.by_row
        parts = by_row.offsets.long(), by_row.indices(), by_row.values()
        return cls(*(part.cpu().numpy() for part in parts))

    @property
    def rows(self) -> Codes:
        """The row of each rating."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @classmethod
    def from_entries(
        cls, rows: Codes, columns: Codes, values: npt.NDArray[np.floating], n_rows: int
    ) -> Seen:
        """Ratings in any order of the rows."""
        order = np.argsort(rows, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n_rows))]).astype(
            np.int64
        )
        return cls(offsets, columns.astype(np.int32)[order], values[order])

    def of_rows(self, rows: Codes) -> tuple[Codes, Codes]:
        """The columns in which some rows have ratings."""
        known = rows >= 0
        starts = np.where(known, self.offsets[rows], 0)
        counts = np.where(known, self.offsets[rows + 1] - starts, 0)
        place = np.repeat(np.arange(len(rows)), counts)
        inside = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        return place, self.columns[starts[place] + inside].astype(np.int64)


@dataclass
class CompletionModel:
    """Everything that prediction, recommendation, new ratings and files need."""

    row_ids: IdIndex  # the ids of the rows
    column_ids: IdIndex  # the ids of the columns
    posterior: CompletionPosterior  # the posterior of the centred and scaled values
    center: float  # g
    scale: float  # s
    low: float  # the smallest observed value
    high: float  # the largest observed value
    seen: Seen | None  # the ratings; None if the model does not keep them
    inference: str  # ``variational``, ``point`` or ``implicit``
    n_merged: int  # how many entries were merged into another one
    n_at_start: int  # the number of ratings when the factors were last found from scratch
    n_since_start: int = 0  # how many have come since
    n_since_look: int = 0  # how many have come since all of them were last gone through
    unobserved_weight: float = 0.0  # of ``implicit``
    _directions: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls,
        ids: tuple[IdIndex, IdIndex],
        table: Table,
        posterior: CompletionPosterior,
        inference: str,
        seen: Seen | None = None,
    ) -> CompletionModel:
        """The model of a table that was fitted."""
        return cls(
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

    @property
    def device(self) -> torch.device:
        """Where the posterior lives."""
        return self.posterior.rows.mean.device

    @cached_property
    def column_table(self) -> tuple[Tensor, Tensor]:
        """The factors of the columns, one line per factor, and their offsets, as rankings want them."""
        mean = self.posterior.columns.mean
        return mean[:, :-1].T.contiguous(), mean[:, -1].contiguous()

    def directions(self, side: int) -> Tensor:
        """Unit vectors of the rows (0) or columns (1) whose inner products are correlations of predicted values."""
        if side not in self._directions:
            sides = self.posterior.rows, self.posterior.columns
            other = sides[1 - side].mean[:, :-1].double()
            off = other - other.mean(0)
            values, vectors = torch.linalg.eigh(off.T @ off / len(off))
            table = sides[side].mean[:, :-1].double() @ vectors * values.clamp(min=0).sqrt()
            table = table / table.norm(dim=1, keepdim=True).clamp(min=1e-300)
            self._directions[side] = table.to(sides[side].mean)
        return self._directions[side]

    def tensor(self, codes: Codes) -> Tensor:
        """Numbers of rows or columns where the posterior lives."""
        return torch.from_numpy(np.ascontiguousarray(codes)).to(self.device)

    def locate(self, ids: object, side: str, unseen: str) -> Codes:
        """Numbers of ids, -1 where one is not known."""
        index = self.row_ids if side == "row" else self.column_ids
        codes = index.encode(ids, side)
        if unseen == "error" and (codes < 0).any():
            unknown = np.flatnonzero(codes < 0)
            first = np.asarray(ids, dtype=object)[unknown[0]]
            raise ValueError(
                f"{counted(len(unknown), f'{side} id was', f'{side} ids were')} not seen in fit, the first is {first!r}"
                "; use unseen='prior' or 'nan' to predict them"
            )
        return codes

    def predict(
        self,
        rows: Codes,
        columns: Codes,
        *,
        with_std: bool = False,
        clip: bool = True,
        unseen: str = "prior",
        times: Floats | None = None,
    ) -> tuple[Floats, Floats | None]:
        """Predict entries by number."""
        if self.posterior.ordinal is None:
            means, spreads = self.posterior.predict(
                self.tensor(rows), self.tensor(columns), with_std=with_std, times=self._when(times)
            )
            mean = means.double().cpu().numpy() * self.scale + self.center
            std = None if spreads is None else spreads.cpu().numpy() * self.scale
        else:
            chances, categories = self.probabilities(rows, columns, times), self.categories
            mean = chances @ categories
            std = np.sqrt(np.maximum(chances @ categories**2 - mean**2, 0)) if with_std else None
        if clip:
            np.clip(mean, self.low, self.high, out=mean)
        if unseen == "nan":
            unknown = (rows < 0) | (columns < 0)
            mean[unknown] = np.nan
            if std is not None:
                std[unknown] = np.nan
        return mean, std

    @property
    def categories(self) -> Floats:
        """The values of ordered categories."""
        assert self.posterior.ordinal is not None
        values = self.posterior.ordinal.values.double().cpu().numpy() * self.scale + self.center
        return np.asarray(
            np.round(values, 9 - int(np.floor(np.log10(max(abs(self.low), abs(self.high), 1e-9)))))
        )

    def probabilities(self, rows: Codes, columns: Codes, times: Floats | None = None) -> Floats:
        """The probabilities of ordered categories."""
        mean, std = self.posterior.predict(
            self.tensor(rows), self.tensor(columns), with_std=True, times=self._when(times)
        )
        assert self.posterior.ordinal is not None
        assert std is not None
        return np.asarray(self.posterior.ordinal.probabilities(mean, std).cpu().numpy())

    def _when(self, times: Floats | None) -> Tensor | None:
        """Times where the posterior lives."""
        if times is None:
            return None
        if self.posterior.time_effects == (None, None):
            raise ValueError(
                "this model was fitted without times: fit it with times, or predict without them"
            )
        return torch.from_numpy(times).to(self.device)

    def intervals(
        self,
        rows: Codes,
        columns: Codes,
        coverage: float,
        *,
        clip: bool = True,
        unseen: str = "prior",
        times: Floats | None = None,
    ) -> tuple[Floats, Floats]:
        """Central intervals of new values; of ordered categories whole steps."""
        tail = (1 - coverage) / 2
        if self.posterior.ordinal is not None:
            below = np.cumsum(self.probabilities(rows, columns, times), axis=1)
            low, high = ((below < q).sum(1).clip(max=below.shape[1] - 1) for q in (tail, 1 - tail))
            return self.categories[low], self.categories[high]
        mean, std = self.predict(
            rows, columns, with_std=True, clip=clip, unseen=unseen, times=times
        )
        assert std is not None
        half = NormalDist().inv_cdf(1 - tail) * std
        least, most = (self.low, self.high) if clip else (-np.inf, np.inf)
        return np.clip(mean - half, least, most), np.clip(mean + half, least, most)

    def given(self) -> tuple[Codes, Codes, Floats]:
        """All ratings so far."""
        if self.seen is None:
            raise ValueError(_NOT_KEPT)
        values = self.seen.values.astype(np.float64) * self.scale + self.center
        values = values if self.posterior.ordinal is None else nearest(values, self.categories)
        return self.seen.rows, self.seen.columns.astype(np.int64), values

    def seen_by(self, rows: Codes) -> tuple[Codes, Codes]:
        """The columns in which some rows have ratings."""
        if self.seen is None:
            raise ValueError(_NOT_KEPT)
        return self.seen.of_rows(rows)

    def with_new_rows(
        self, count: int, rows: Codes, columns: Codes, values: Floats
    ) -> CompletionModel:
        """A model of new rows, numbered from 0, and the same columns, which do not move."""
        if self.inference == "implicit":
            return self._with_new_implicit_rows(count, rows, columns, values)
        self._check_reach(values)
        known = self.posterior
        # what the columns know about which rows rated them is of no use here: it speaks of the rows of the fit
        side, others = known.rows.prior_members(count), replace(known.columns, set_effects=None)
        if known.rows.set_effects is not None:
            side.set_effects = replace(known.rows.set_effects, sums=torch.zeros_like(side.mean))
        posterior = replace(known, rows=side, columns=others)
        if len(values):
            absorb(
                posterior, *self._batch(rows, columns, values), move=(True, False), new_rows=True
            )
        empty, unknown = side.counts == 0, known.rows.unknown_member()
        side.mean[empty], side.covariance[empty] = unknown.mean, unknown.covariance
        posterior.rows, posterior.columns = replace(side, set_effects=None), known.columns
        return replace(
            self, posterior=posterior, seen=Seen.from_entries(rows, columns, values, count)
        )

    def _with_new_implicit_rows(
        self, count: int, rows: Codes, columns: Codes, values: Floats
    ) -> CompletionModel:
        axes = Axis.whole(count), Axis.whole(len(self.column_ids))
        dtype = self.posterior.rows.mean.dtype
        ratings = Ratings.over(
            axes, rows, columns, values, dtype=dtype, duplicates="sum", device=self.device
        )
        posterior = replace(
            self.posterior, rows=new_rows(self.posterior, ratings, self.unobserved_weight)
        )
        return replace(
            self, posterior=posterior, seen=Seen.from_entries(rows, columns, values, count)
        )

    def _batch(self, rows: Codes, columns: Codes, values: Floats) -> tuple[Ratings, Tensor, Tensor]:
        """New entries as a small matrix of the rows and columns that they touch."""
        i, local_rows = np.unique(rows, return_inverse=True)
        j, local_columns = np.unique(columns, return_inverse=True)
        batch = Ratings(
            local_rows,
            local_columns,
            (values - self.center) / self.scale,
            (len(i), len(j)),
            dtype=self.posterior.rows.mean.dtype,
            duplicates="mean",
            device=self.device,
        )
        return batch, self.tensor(i), self.tensor(j)

    def _check_reach(self, values: Floats) -> None:
        reach = _FURTHEST[self.inference]
        far = float(values[np.abs(values - self.center).argmax()]) if len(values) else self.center
        if abs(far - self.center) > reach * self.scale:
            raise ValueError(
                f"the values must lie within {reach * self.scale:.3g} of {self.center:.6g}, which is {reach:g} times "
                f"the spread of the values so far, got {far:g}"
            )

    def updated(
        self, rows: object, columns: object, values: Floats, settings: Settings
    ) -> CompletionModel:
        """The model with new ratings; this one stays as it is.

        A few change the rows and columns that they touch; when they have become many, all ratings are gone through
        again, or the factors are found anew.
        """
        plain = self.posterior
        extended = (plain.ordinal, *plain.time_effects, plain.rows.features, plain.columns.features)
        if any(part is not None for part in extended):
            raise ValueError(
                "a model with features, times or categories takes no new ratings: fit it to all of them"
            )
        old_rows, old_columns, old_values = self.given()
        row_ids, column_ids = copy.copy(self.row_ids), copy.copy(self.column_ids)
        i, j = row_ids.extend(rows, "row"), column_ids.extend(columns, "column")
        came = len(values)
        joint = (
            np.concatenate([old_rows, i]),
            np.concatenate([old_columns, j]),
            np.concatenate([old_values, values]),
        )
        if self.n_since_start + came >= _START_ANEW * self.n_at_start:
            return fitted(settings, (row_ids, column_ids), *joint, Extras())
        self._check_reach(values)
        new = replace(
            self,
            row_ids=row_ids,
            column_ids=column_ids,
            posterior=self.posterior.copied(),
            low=min(self.low, values.min()),
            high=max(self.high, values.max()),
            n_since_start=self.n_since_start + came,
            n_since_look=self.n_since_look + came,
        )
        posterior = new.posterior
        grow(posterior.rows, posterior.columns, len(row_ids) - len(self.row_ids))
        grow(posterior.columns, posterior.rows, len(column_ids) - len(self.column_ids))
        if self.inference == "variational" and new.n_since_look > _LOOK_BACK * (
            len(joint[2]) - new.n_since_look
        ):
            if settings.duplicates in ("last", "sum"):
                joint = merge(*joint, settings.duplicates)
            ratings = Ratings(
                joint[0],
                joint[1],
                (joint[2] - self.center) / self.scale,
                (len(row_ids), len(column_ids)),
                dtype=posterior.rows.mean.dtype,
                duplicates="mean",
                device=self.device,
            )
            look_back(posterior, ratings)
            new.n_since_look = 0
        else:
            absorb(posterior, *new._batch(i, j, values))
        assert self.seen is not None
        scaled = ((joint[2] - self.center) / self.scale).astype(self.seen.values.dtype)
        new.seen = Seen.from_entries(joint[0], joint[1], scaled, len(row_ids))
        return new


def fitted(
    settings: Settings,
    ids: tuple[IdIndex, IdIndex],
    rows: Codes,
    columns: Codes,
    values: Floats,
    extras: Extras,
) -> CompletionModel:
    """Fit a model to numbered entries."""
    table = prepare(rows, columns, values, ids, settings, extras)
    return CompletionModel.of(
        ids, table, solve(table, settings), settings.inference, Seen.of(table.ratings)
    )
