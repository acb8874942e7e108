"""A completed matrix as it is kept after the fit: ids, posterior, scale and range of the values, and the ratings.

    value = g + s η,        η: the score of a pair (``scoring``), of ordered categories its latent value

A request names members (``CompletionModel.members``), and every answer to it (means, intervals, probabilities, lists,
arrays) is made of their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.completion.entries import Codes, Floats
from fisherfold.completion.events import Events
from fisherfold.completion.inference.features import FeatureEncoder
from fisherfold.completion.inference.posterior import CompletionPosterior, Side
from fisherfold.completion.ratings import TrainingRatings, Triplets
from fisherfold.completion.scoring import Members, noise, score, variance
from fisherfold.plain import counted
from fisherfold.tables.ids import IdIndex

UNSEEN = ("prior", "nan", "error")
ROWS, COLUMNS = 0, 1
_NOT_KEPT = (
    "this model does not keep the ratings it was fitted to; it can predict, and recommend with "
    "exclude_seen=False"
)
_CHUNK = 2**15  # pairs that are scored at once


@dataclass
class CompletionModel:
    """Everything that prediction, recommendation, new ratings and files need.

    Attributes:
        row_ids: the ids of the rows.
        column_ids: the ids of the columns.
        posterior: the posterior of the centred and scaled values.
        center: g.
        scale: s.
        low: the smallest observed value.
        high: the largest observed value.
        seen: the ratings; None if the model does not keep them.
        inference: ``variational``, ``point`` or ``implicit``.
        n_merged: how many entries were merged into another one.
        n_at_start: the number of ratings when the factors were last found from scratch.
        n_since_start: how many have come since.
        n_since_refined: how many have come since all of them were last gone through.
        unobserved_weight: of ``implicit``.
        categories: the values of ordered categories, ascending.
        events: the keys of the entries so far, where they have some.
        encoders: how features of rows and of columns are encoded.
        has_spread: whether the covariances of the rows are those of the fit; a slim file has none.
    """

    row_ids: IdIndex
    column_ids: IdIndex
    posterior: CompletionPosterior
    center: float
    scale: float
    low: float
    high: float
    seen: TrainingRatings | None
    inference: str
    n_merged: int
    n_at_start: int
    n_since_start: int = 0
    n_since_refined: int = 0
    unobserved_weight: float = 0.0
    categories: Floats | None = None
    events: Events | None = None
    encoders: tuple[FeatureEncoder | None, FeatureEncoder | None] = (None, None)
    has_spread: bool = True
    _kept: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def device(self) -> torch.device:
        """Where the posterior lives."""
        return self.posterior.rows.mean.device

    @property
    def sides(self) -> tuple[Side, Side]:
        """The posteriors of the rows and of the columns."""
        return self.posterior.rows, self.posterior.columns

    @property
    def ids(self) -> tuple[IdIndex, IdIndex]:
        """The ids of the rows and of the columns."""
        return self.row_ids, self.column_ids

    def tensor(self, codes: Codes) -> Tensor:
        """Numbers of rows or columns where the posterior lives."""
        return torch.from_numpy(np.ascontiguousarray(codes)).to(self.device)

    def members(self, side: int, codes: Codes | None = None) -> Members:
        """Rows (0) or columns (1) by number, all of them if none are named; -1 is an unknown one."""
        if codes is None:
            codes = np.arange(len(self.ids[side]))
        return self.sides[side].members(self.tensor(codes))

    def keep(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A table that many requests use, made by the first of them."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

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

    def pairs(self, rows: Codes, columns: Codes, times: Floats | None = None) -> Pairs:
        """Pairs by number, to be predicted."""
        when = None if times is None else self.checked_times(times)
        return Pairs(self, self.members(ROWS, rows), self.members(COLUMNS, columns), when)

    def checked_times(self, times: Floats) -> Tensor:
        """Times where the posterior lives, for a model that knows of some."""
        if self.posterior.time_effects == (None, None):
            raise ValueError(
                "this model was fitted without times: fit it with times, or predict without them"
            )
        return torch.from_numpy(times).to(self.device)

    def given(self) -> Triplets:
        """All ratings so far."""
        if self.seen is None:
            raise ValueError(_NOT_KEPT)
        return self.seen.entries()

    def given_by(self, row: int) -> Triplets:
        """The ratings of a row."""
        if self.seen is None:
            raise ValueError(_NOT_KEPT)
        return self.seen.of_row(row)

    def seen_by(self, rows: Codes) -> tuple[Codes, Codes]:
        """The columns in which some rows have ratings."""
        if self.seen is None:
            raise ValueError(_NOT_KEPT)
        return self.seen.of_rows(rows)

    def with_rows(self, rows: Side, seen: TrainingRatings) -> CompletionModel:
        """A model of other rows, numbered from 0, and the same columns."""
        return replace(self, posterior=replace(self.posterior, rows=rows), seen=seen)


@dataclass(frozen=True)
class Pairs:
    """Pairs of members of a model and all that can be said of their values.

    Attributes:
        model: the model.
        rows: the rows of the pairs.
        columns: as many columns.
        times: when, or None.
    """

    model: CompletionModel
    rows: Members
    columns: Members
    times: Tensor | None = None

    def scores(self) -> Floats:
        """Expected scores in units of the values; of ordered categories they are latent."""
        found = np.empty(len(self.rows))
        for part, rows, columns, times in self._chunks():
            found[part] = _numpy(score(self.model.posterior, rows, columns, times=times))
        return found * self.model.scale + self.model.center

    def spread(self, *, with_noise: bool = False) -> Floats:
        """Standard deviations of scores in units of the values, with noise those of (latent) new values."""
        found, posterior = np.empty(len(self.rows)), self.model.posterior
        for part, rows, columns, times in self._chunks():
            square = variance(posterior, rows, columns, times=times)
            if with_noise:
                square = square + noise(posterior, rows, columns)
            found[part] = _numpy(square.sqrt())
        return found * self.model.scale

    def probabilities(self) -> Floats:
        """The probability of each ordered category."""
        ordinal, model = self.model.posterior.ordinal, self.model
        if ordinal is None:
            raise AttributeError("probabilities are those of likelihood='ordered' or 'binary'")
        found = np.empty((len(self.rows), len(ordinal.values)))
        for part, rows, columns, times in self._chunks():
            std = variance(model.posterior, rows, columns, times=times)
            std = (std + noise(model.posterior, rows, columns)).sqrt()
            mean = score(model.posterior, rows, columns, times=times)
            found[part] = _numpy(ordinal.probabilities(mean, std))
        return found

    def predict(self, *, clip: bool = True) -> Floats:
        """Expected values."""
        if self.model.categories is not None:
            return np.asarray(self.probabilities() @ self.model.categories)
        mean = self.scores()
        return np.clip(mean, self.model.low, self.model.high) if clip else mean

    def deviations(self) -> Floats:
        """Standard deviations of new values."""
        if self.model.categories is None:
            return self.spread(with_noise=True)
        chances, categories = self.probabilities(), self.model.categories
        unit = float(np.abs(categories).max()) or 1.0  # squares stay in range
        off = categories / unit - (chances @ (categories / unit))[:, None]
        return unit * np.sqrt((chances * off**2).sum(1))

    def intervals(self, coverage: float, *, clip: bool = True) -> tuple[Floats, Floats]:
        """Central intervals of new values; of ordered categories whole steps."""
        tail = (1 - coverage) / 2
        if self.model.categories is not None:
            below, categories = np.cumsum(self.probabilities(), axis=1), self.model.categories
            last = below.shape[1] - 1
            low, high = ((below < q).sum(1).clip(max=last) for q in (tail, 1 - tail))
            return categories[low], categories[high]
        mean = self.predict(clip=clip)
        half = NormalDist().inv_cdf(1 - tail) * self.deviations()
        least, most = (self.model.low, self.model.high) if clip else (-np.inf, np.inf)
        return np.clip(mean - half, least, most), np.clip(mean + half, least, most)

    @property
    def unknown(self) -> npt.NDArray[np.bool_]:
        """Which of the pairs have an unknown member."""
        return np.asarray(((self.rows.codes < 0) | (self.columns.codes < 0)).cpu().numpy())

    def _chunks(self) -> Iterator[tuple[slice, Members, Members, Tensor | None]]:
        for start in range(0, len(self.rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            times = None if self.times is None else self.times[part]
            yield part, self.rows[part], self.columns[part], times


def _numpy(found: Tensor) -> Floats:
    return np.asarray(found.double().cpu().numpy())
