"""What the Gaussian updates take in place of the ratings where these are categories, or rows and columns drift.

    z_ij = η_ij + d_{i, t} + e_{j, t} + noise,    η_ij = b_i + c_j + ⟨u_i, v_j⟩

Effects of time. d and e belong to a row (column) and a period, with priors N(0, s²) and Gaussian posteriors.

Ordered probit. The category k is seen if κ_{k-1} < z ≤ κ_k; the cut points κ are learnt. With ω = τ α_i β_j ρ and Z the
probability of the category, log Z has at the mean of η the gradient √ω r and the curvature -ω h: its quadratic
approximation is that of a rating η + r/(h √ω) of weight h. (The textbook bound, which takes a truncated normal z for
observed, has h = 1: a rating of five stars where five were sure would tell as much as any other, and more factors
would do harm.) τ keeps the value of a Gaussian fit, because the cut points carry the scale. Two categories are the
probit model.

``WorkingRatings.refresh`` brings these up to date and returns the *working values* that the updates take.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inference.likelihoods import Ordinal, better_cuts, linearise
from fisherfold.completion.inference.posterior import CompletionPosterior
from fisherfold.completion.inference.time_effects import TimeEffects
from fisherfold.completion.ratings import Ratings

_CHUNK = 2**18


class WorkingRatings:
    """Ratings with what turns them into working values.

    Attributes:
        ratings: the ratings.
    """

    def __init__(
        self,
        ratings: Ratings,
        *,
        categories: Tensor | None = None,
        category: Tensor | None = None,
        times: Tensor | None = None,
        periods: tuple[Tensor | None, Tensor | None] = (None, None),
        amounts: Tensor | None = None,
        members: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Prepare.

        Args:
            ratings: the ratings.
            categories: the steps of ordered categories, ascending; None if values are measured.
            category: which of them each rating is, in row order.
            times: of the ratings in row order.
            periods: where the periods of rows and of columns start, for a fit that learns their effects.
            amounts: as how many ratings each counts, in row order, where its weight says something else.
            members: the rows and columns of a posterior that those of the ratings are, if not the same.
        """
        self.ratings = ratings
        by_row = ratings.by_row
        self._x = by_row.values()
        self._rows, self._columns = by_row.groups().long(), by_row.indices().long()
        if members is not None:
            self._rows, self._columns = members[0][self._rows], members[1][self._columns]
        self._to_columns = torch.argsort(by_row.indices(), stable=True)
        self._amounts = by_row.weights if amounts is None else amounts
        self._rho: Tensor | None = None
        if amounts is not None and by_row.weights is not None:
            self._rho = by_row.weights / amounts.to(by_row.weights)
        self._times, self._starts = times, periods
        self._places: list[Tensor | None] = [None, None]
        self._keys: list[Tensor | None] = [None, None]
        for k, codes in enumerate((self._rows, self._columns)):
            starts = periods[k]
            if starts is not None and times is not None:
                key = codes * (len(starts) + 1) + torch.bucketize(times, starts, right=True)
                self._keys[k], self._places[k] = torch.unique(key, return_inverse=True)
        self.categories, self._category = categories, category

    def as_numbers(self) -> WorkingRatings | None:
        """The same with categories taken for numbers; None if no times are left then."""
        if self._times is None:
            return None
        new = copy.copy(self)
        new._category = None
        return new

    def begin(self, posterior: CompletionPosterior) -> None:
        """Give a posterior what it needs to know of time and categories, if it does not have it."""
        effects = list(posterior.time_effects)
        for k, codes in enumerate((self._rows, self._columns)):
            keys, starts, place = self._keys[k], self._starts[k], self._places[k]
            if keys is None or starts is None or place is None or self._times is None:
                continue
            old = effects[k]
            if old is not None and torch.equal(old.keys, keys) and torch.equal(old.starts, starts):
                continue
            new = TimeEffects.start(starts, keys, self._x)
            if old is not None:
                some = torch.empty_like(keys)
                some[place] = torch.arange(len(place), device=place.device)
                new = new.taken_from(old, codes[some], self._times[some])
            effects[k] = new
        posterior.time_effects = (effects[0], effects[1])
        if self._category is not None and posterior.ordinal is None:
            values = self.categories
            assert values is not None
            posterior.ordinal = Ordinal(((values[1:] + values[:-1]) / 2).to(self._x), values)

    def refresh(
        self, posterior: CompletionPosterior, *, learn: bool = True
    ) -> tuple[Grouped, Grouped]:
        """The working values at a posterior; with ``learn`` cut points and effects of time are improved first."""
        rows, columns = posterior.rows, posterior.columns
        base = self._scores(posterior)
        omega = posterior.noise_precision * rows.weight[self._rows] * columns.weight[self._columns]
        if self._rho is not None:
            omega = omega * self._rho
        shifts = [self._drift(posterior, k) for k in (0, 1)]
        x, weights, spread, entropy = self._x, self.ratings.by_row.weights, None, 0.0
        if posterior.ordinal is not None and self._category is not None:
            mean = base + shifts[0][0] + shifts[1][0]
            if learn:
                self._improve_cuts_(posterior, mean, omega)
            found = linearise(posterior.ordinal, self._category, mean, omega)
            x, spread = found.values, found.spread
            weights = found.share if weights is None else weights * found.share
            entropy = self._total(found.entropy)
        if learn:
            share = omega if self._rho is None else omega / self._rho
            precision = share if weights is None else share * weights
            for k in (0, 1):
                effect, place = posterior.time_effects[k], self._places[k]
                if effect is not None and place is not None:
                    left = x - base - shifts[1 - k][0]
                    effects = list(posterior.time_effects)
                    effects[k] = effect.improved(place, left, precision)
                    posterior.time_effects = (effects[0], effects[1])
                    shifts[k] = self._drift(posterior, k)
            bounds = [e.bound() for e in posterior.time_effects if e is not None]
            posterior.extra_bound = entropy + sum(bounds)
        doubt = shifts[0][1] + shifts[1][1]
        return self._groups(
            x - shifts[0][0] - shifts[1][0], weights, doubt if spread is None else spread + doubt
        )

    def _scores(self, posterior: CompletionPosterior) -> Tensor:
        """The mean of η for every rating."""
        base = torch.empty_like(self._x)
        for start in range(0, len(base), _CHUNK):
            part = slice(start, start + _CHUNK)
            u = posterior.rows.mean[self._rows[part]]
            v = posterior.columns.mean[self._columns[part]]
            base[part] = (u[:, :-1] * v[:, :-1]).sum(1) + u[:, -1] + v[:, -1]
        return base

    def _drift(self, posterior: CompletionPosterior, k: int) -> tuple[Tensor, Tensor]:
        """Means and variances of the effects of time of one side for every rating."""
        effect, place = posterior.time_effects[k], self._places[k]
        if effect is None or self._times is None:
            return torch.zeros_like(self._x), torch.zeros_like(self._x)
        if place is None:
            return effect.find((self._rows, self._columns)[k], self._times)
        return effect.mean[place], effect.variance[place]

    def _improve_cuts_(self, posterior: CompletionPosterior, mean: Tensor, omega: Tensor) -> None:
        ordinal, category = posterior.ordinal, self._category
        assert ordinal is not None
        assert category is not None
        cuts = better_cuts(ordinal, category, mean, omega.sqrt(), self._amounts)
        posterior.ordinal = replace(ordinal, cuts=cuts)

    def _total(self, entropy: Tensor) -> float:
        return float((entropy if self._amounts is None else entropy * self._amounts).sum())

    def _groups(
        self, values: Tensor, weights: Tensor | None, spread: Tensor
    ) -> tuple[Grouped, Grouped]:
        """Working values in both orders; the spread is added to their squares."""
        by_row, by_column = self.ratings.by_row, self.ratings.by_column
        extra = spread if weights is None else weights * spread
        if by_row.extra_squares is not None:
            extra = extra + by_row.extra_squares
        order = self._to_columns
        # the scale of categories is that of their cut points, which know nothing of variances
        keeps = self._category is None
        rows = replace(
            by_row,
            stored_values=values,
            weights=weights,
            extra_squares=extra,
            excess=by_row.excess if keeps else None,
        )
        columns = replace(
            by_column,
            stored_values=values[order],
            weights=None if weights is None else weights[order],
            extra_squares=extra[order],
            excess=by_column.excess if keeps else None,
        )
        return rows, columns
