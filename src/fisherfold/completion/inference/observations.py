"""How values come about from a prediction: ordered categories, effects of time, weights of the ratings.

    z_ij = η_ij + d_{i, t} + e_{j, t} + noise,    η_ij = b_i + c_j + ⟨u_i, v_j⟩

Effects of time. d and e belong to a row (column) and a period, with priors N(0, s²) and Gaussian posteriors.

Ordered probit. The category k is seen if κ_{k-1} < z ≤ κ_k; the cut points κ are learnt. With ω = τ α_i β_j and Z the
probability of the category, log Z has at the mean of η the gradient √ω r and the curvature -ω h: its quadratic
approximation is that of a rating η + r/(h √ω) of weight h. (The textbook bound, which takes a truncated normal z for
observed, has h = 1: a rating of five stars where five were sure would tell as much as any other, and more factors
would do harm.) τ keeps the value of a Gaussian fit, because the cut points carry the scale. Two categories are the
probit model.

``Observations.refresh`` brings these up to date and returns the *working values* that the Gaussian updates
of rows and columns take in place of the ratings. A rating of weight w counts as w ratings.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inference.likelihoods import Ordinal, better_cuts, truncated
from fisherfold.completion.inference.posterior import CompletionPosterior
from fisherfold.completion.inference.time_effects import TimeEffects
from fisherfold.completion.ratings import Ratings

_CHUNK = 2**18
_LEAST_SHARE = 0.02


@dataclass(frozen=True)
class WorkingGroup(Grouped):
    """Ratings in one order with weights, and with E[z²] beside the mean of z."""

    weights: Tensor | None = None  # w of each rating, None if all are 1
    squares: Tensor = field(default_factory=lambda: torch.empty(0))  # E[z²] of each rating

    def _power(self, power: int, part: slice, dtype: torch.dtype) -> Tensor | None:
        w = None if self.weights is None else self.weights[part]
        if power == 0:
            return w
        values = (self.stored_values if power == 1 else self.squares)[part]
        return values if w is None else values * w


class Observations:
    """The ratings of a fit with what turns them into working values.

    Attributes:
        ratings: the ratings.
        weights: of each rating in row order, None if all are 1.
    """

    def __init__(
        self,
        ratings: Ratings,
        *,
        likelihood: str = "gaussian",
        weights: Tensor | None = None,
        times: Tensor | None = None,
        periods: tuple[Tensor | None, Tensor | None] = (None, None),
        categories: Tensor | None = None,
    ) -> None:
        """Prepare for a fit."""
        self.ratings, self.weights = ratings, weights
        by_row = ratings.by_row
        self._i, self._j, self._x = by_row.groups().long(), by_row.indices().long(), by_row.values()
        self._to_columns = torch.argsort(by_row.indices(), stable=True)
        self._total = (
            float(weights.double().sum()) if weights is not None else float(ratings.n_ratings)
        )
        self._places: list[Tensor | None] = [None, None]
        self._starts = periods
        self._keys: list[Tensor | None] = [None, None]
        for k, members in enumerate((self._i, self._j)):
            starts = periods[k]
            if starts is not None and times is not None:
                key = members * (len(starts) + 1) + torch.bucketize(times, starts, right=True)
                self._keys[k], self._places[k] = torch.unique(key, return_inverse=True)
        self._category: Tensor | None = None
        if likelihood != "gaussian":
            found, self._category = torch.unique(self._x, return_inverse=True)
            self.categories = found.double() if categories is None else categories

    def as_numbers(self) -> Observations | None:
        """The same with categories taken for numbers; None if no weights and no times are left then."""
        if self.weights is None and self._places == [None, None]:
            return None
        new = copy.copy(self)
        new._category = None
        return new

    def begin(self, posterior: CompletionPosterior) -> None:
        """Give a posterior what it needs to know of time and categories, if it does not have it."""
        posterior.n_ratings = round(self._total)
        if self.weights is not None:
            for side, members in ((posterior.rows, self._i), (posterior.columns, self._j)):
                side.amounts = torch.zeros_like(side.amounts).index_add_(0, members, self.weights)
        effects = list(posterior.time_effects)
        for k, keys in enumerate(self._keys):
            starts = self._starts[k]
            if keys is not None and starts is not None and effects[k] is None:
                zero = self._x.new_zeros(len(keys))
                effects[k] = TimeEffects(starts, keys, zero, zero + 0.01, 0.01)
        posterior.time_effects = (effects[0], effects[1])
        if self._category is not None and posterior.ordinal is None:
            values = self.categories
            posterior.ordinal = Ordinal(((values[1:] + values[:-1]) / 2).to(self._x), values)

    def refresh(self, posterior: CompletionPosterior) -> tuple[Grouped, Grouped]:
        """Update effects of time, cut points and latent values at a posterior."""
        rows, columns, x = posterior.rows, posterior.columns, self._x
        base = torch.empty_like(x)
        for start in range(0, len(x), _CHUNK):
            part = slice(start, start + _CHUNK)
            u, v = rows.mean[self._i[part]], columns.mean[self._j[part]]
            base[part] = (u[:, :-1] * v[:, :-1]).sum(1) + u[:, -1] + v[:, -1]
        omega = posterior.noise_precision * rows.weight[self._i] * columns.weight[self._j]
        shifts = [self._shift(posterior, k) for k in (0, 1)]
        shift, extra = shifts[0][0] + shifts[1][0], shifts[0][1] + shifts[1][1]
        entropy, spread, weights = 0.0, torch.zeros_like(x), self.weights
        if posterior.ordinal is not None:
            x, spread, share, entropy = self._linearised(posterior, base + shift, omega)
            weights = share if weights is None else weights * share
        effects = list(posterior.time_effects)
        for k, effect in enumerate(effects):
            place = self._places[k]
            if effect is not None and place is not None:
                left = x - base - shifts[1 - k][0]
                effects[k] = effect.improved(
                    place, left, omega if weights is None else omega * weights
                )
                posterior.time_effects = (effects[0], effects[1])
                shifts[k] = self._shift(posterior, k)
        shift, extra = shifts[0][0] + shifts[1][0], shifts[0][1] + shifts[1][1]
        posterior.extra_bound = entropy + sum(e.bound() for e in effects if e is not None)
        working = x - shift
        squares = working * working + spread + extra
        by_row, by_column = self.ratings.by_row, self.ratings.by_column
        order, n_rows, n_columns = self._to_columns, by_column.n_others, by_row.n_others
        weights_by_column = None if weights is None else weights[order]
        return (
            WorkingGroup(
                by_row.offsets, by_row.stored_indices, working, n_columns, None, weights, squares
            ),
            WorkingGroup(
                by_column.offsets,
                by_column.stored_indices,
                working[order],
                n_rows,
                None,
                weights_by_column,
                squares[order],
            ),
        )

    def _shift(self, posterior: CompletionPosterior, k: int) -> tuple[Tensor, Tensor]:
        effect, place = posterior.time_effects[k], self._places[k]
        if effect is None or place is None:
            return torch.zeros_like(self._x), torch.zeros_like(self._x)
        return effect.mean[place], effect.variance[place]

    def _linearised(
        self, posterior: CompletionPosterior, mean: Tensor, omega: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """Working values, what is added to their squares, the share of ω that they are worth, and the entropy of z."""
        ordinal, category, root = posterior.ordinal, self._category, omega.sqrt()
        assert ordinal is not None
        assert category is not None
        ordinal = replace(ordinal, cuts=better_cuts(ordinal, category, mean, root, self.weights))
        posterior.ordinal = ordinal
        low, high = (edge[category] for edge in ordinal.bounds())
        ratio, slope, log_mass = truncated(
            ((low - mean) * root).double(), ((high - mean) * root).double()
        )
        share = (ratio * ratio - slope).clamp(_LEAST_SHARE, 1)
        values = mean + (ratio / (share * root.double())).to(mean)
        # so that ω share E[(value - η)²] is ω E[(z - η)²] of the truncated normal z where the mean of η stays
        spread = (((1 + slope) / share - (ratio / share) ** 2) / omega.double()).to(mean)
        entropy = (
            0.5 * math.log(2 * math.pi * math.e)
            - 0.5 * omega.double().log()
            + log_mass
            + 0.5 * slope
        )
        total = entropy if self.weights is None else entropy * self.weights
        return values, spread, share.to(mean), float(total.sum())
