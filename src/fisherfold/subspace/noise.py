"""How large the noise of related regressions is, with what all tasks share not taken for known.

The maximum of the marginal likelihood takes mean and subspace, W = [m, U], for known, and what they have fitted of the
noise for signal. With few rows in a task little is left of it: about half with three rows in a task and two directions,
and next to nothing with two in some tables. Here W is integrated out by Laplace's method, and the common noise
c has the posterior

    -log p(c | y) = min over Σ, s_t² of  -Σ_t log p(y_t | W, Σ, s_t²) + ½ log det(I + R F R)
                                         + Σ_t ρ/2 (log s_t² + c/s_t² - log c),

flat in log c, at the W that makes y most likely, with F the Fisher information of W, the coefficients integrated out,

    F = blockdiag(Σ_t S_t,  Σ_t (Σ - V_t) ⊗ S_t + (H ↦ G_t V_t Hᵀ G_t V_t)),    G_t = A_tU/s_t²,

R² the covariance of the prior of W (``inference.subspace_information``) and the last sum the prior that draws the
noise of tasks together; where all tasks have one noise variance, it is c. The noise of a task becomes

    s_t² = (E‖ε_t‖² + ρc) / (n_t - f_t + ρ),    f_t = -∂ log det(I + R F R)/∂ log s_t²,

f_t its part of the effective number of parameters in W. In one task with a strong signal this is the regression of the
textbook: s² = ‖r‖²/(rows - features) is the maximum, and ‖r‖²/(rows - features - 2) the mean, so that the variance of a
prediction is that of Student's distribution. c is its posterior mean, by the trapezoidal rule in log c.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fisherfold.subspace.information import shared_information, shared_prior, spent_on_shared
from fisherfold.subspace.marginal import SubspacePrior, noise_floor, posterior
from fisherfold.subspace.marginal import start as first_guess
from fisherfold.subspace.marginal_fit import NOISE_ROWS, common_noise, expected_moments, update_frame, update_mean
from fisherfold.subspace.tasks import TaskStatistics

# Where W takes no more of the rows than this part, c is the maximum over what is left of them: off by the square of it.
_SMALL = 0.05

# Where W takes more than half of the rows, the maximum of the likelihood may be a fit of the noise, with none left of
# it, and lost to rounding (less than nothing taken): then the search begins from the other end as well.
_MUCH = 0.5

# Steps in log c, in standard deviations that it has at least: the rule is then exact to a thousandth for a Gaussian.
_STEP, _LONGEST = 1.5, 1.0

# What the posterior is looked at for needs its logarithm no closer than this, and so many rounds at most.
_CLOSE, _ROUNDS = 0.01, 20

# A task whose loss is less than the least possible one by more than this part of it was lost to rounding.
_ROUNDING = 1e-6

# After so many steps one way the posterior is wide, and steps grow, by this factor; so many at most.
_EVEN, _GROWTH, _MOST = 8, 1.5, 30

# Where the logarithm of the posterior, times c, has fallen by this much, the rest is left out.
_FALL = 6.0

# Of a few rows c has no mean and variance: it stays below so many times the mean squared target, and weights that add
# up to no more rows than these are left alone.
_LARGEST, _FEW = 4.0, 4.0


@dataclass(frozen=True)
class NoiseFit:
    """The outcome of ``fit_noise``.

    Attributes:
        prior: mean, frame, covariance and noise at the common noise that was found.
        common: that noise, c.
    """

    prior: SubspacePrior
    common: float


@dataclass(frozen=True)
class _Rule:
    """How the noise of tasks follows from their errors: c, and f_t for each."""

    common: float
    spent: Tensor
    noise: str
    floor: float

    def update(self, errors: Tensor, counts: Tensor) -> Tensor:
        if self.noise == "shared":
            return torch.full_like(errors, max(self.common, self.floor))
        left = (counts - self.spent).clamp(min=0)
        return ((errors + NOISE_ROWS * self.common) / (left + NOISE_ROWS)).clamp(min=self.floor)

    def penalty(self, noise_variance: Tensor) -> Tensor:
        """Of the prior of the noise, one number per task."""
        if self.noise == "shared":
            return torch.zeros_like(noise_variance)
        return NOISE_ROWS / 2 * (noise_variance.log() + self.common / noise_variance - math.log(self.common))


def fit_noise(
    statistics: TaskStatistics, prior: SubspacePrior, noise: str, *, max_rounds: int = 300, tol: float = 1e-7
) -> NoiseFit:
    """Find the common noise, and learn the rest once more with it.

    Args:
        statistics: the rows.
        prior: at the maximum of the marginal likelihood, where W is taken for known.
        noise: ``task`` or ``shared``.
        max_rounds: the most rounds of every fit with a given common noise.
        tol: such a fit ends when a round lowers its loss per row by less than this.

    Returns:
        The fit; the prior as it is where W is too large to be integrated out, the rows are too few, or nothing but
        rounding is left of the noise.

    Examples:
        >>> X = torch.eye(4, dtype=torch.float64).repeat(3, 1)
        >>> y = 100 * X.sum(1) + torch.tensor([0.1, -0.1, 0.2], dtype=torch.float64).repeat_interleave(4)
        >>> statistics = TaskStatistics.from_rows(X, y, torch.zeros(12, dtype=torch.int64))
        >>> from fisherfold.subspace.marginal_fit import fit_marginal
        >>> prior = fit_marginal(statistics, rank=1, noise="shared").prior
        >>> rest = float(statistics.residual_power(prior.mean[None]))
        >>> round(fit_noise(statistics, prior, "shared").common / (rest / (12 - 4 - 2)), 2)
        1.0
    """
    first = common_noise(prior.noise, noise, statistics.all_tasks)
    search = _Search(statistics, noise, max_rounds, tol)
    if shared_prior(statistics, prior) is None or search.rows <= _FEW:
        return NoiseFit(prior, first)
    start = search.start(prior)
    left = 1 - statistics.all_tasks.add(start.spent) / search.rows
    if 1 - _SMALL <= left <= 1 + _ROUNDING:
        return NoiseFit(replace(prior, noise=prior.noise / left), first / left)
    places = search.places(start, first / min(max(left, math.exp(-_LONGEST)), 1.0))
    if not _MUCH <= left <= 1:
        places = min(places, search.from_above(prior), key=_least)
    if not any(math.isfinite(there.value) for there in places.values()):
        return NoiseFit(prior, first)
    common = _mean(places)
    nearest = min(places, key=lambda place: (math.isinf(places[place].value), abs(place - math.log(common))))
    return NoiseFit(search.settled(places[nearest], common, 0.0)[0], common)


class _Place:
    """A value of the common noise that was looked at: -log p(c | y), and what is learnt with it."""

    def __init__(self, value: float, prior: SubspacePrior, make_spent: Callable[[], Tensor]) -> None:
        self.value, self.prior, self._make_spent = value, prior, make_spent

    @cached_property
    def spent(self) -> Tensor:
        """f_t, which only places that others are reached from have to pay for."""
        made = self._make_spent()
        del self._make_spent  # it holds the factor of I + R F R
        return made


class _Search:
    """The posterior of the common noise, place by place."""

    def __init__(self, statistics: TaskStatistics, noise: str, max_rounds: int, tol: float) -> None:
        self.statistics, self.noise, self.max_rounds = statistics.keeping(), noise, max_rounds
        self.tasks, self.floor = statistics.all_tasks, noise_floor(statistics)
        self.rows = float(self.tasks.total(statistics.counts.sum()))
        self.limit = tol * self.rows
        self.power = float(self.tasks.total(statistics.power.sum()))
        self.largest = _LARGEST * self.power / max(self.rows, 1e-300)

    def start(self, prior: SubspacePrior) -> _Place:
        """Where W is taken for known."""
        return self._place(math.nan, prior)

    def places(self, start: _Place, first: float) -> dict[float, _Place]:
        """What is at values of log c, from about the maximum upwards and downwards until the posterior has fallen."""
        doubt = 2 / self.rows + (2 / (NOISE_ROWS * self.tasks.size) if self.noise == "task" else 0.0)
        step = min(_STEP * math.sqrt(doubt), _LONGEST)
        middle = math.log(max(first, self.floor))
        found = {middle: self.learnt(start, math.exp(middle))}
        for way in (1, -1):
            place = middle
            for number in range(_MOST):
                worth = {p: there.value - p if way > 0 else there.value for p, there in found.items()}
                following = place + way * step * max(1.0, _GROWTH ** (number - _EVEN))
                common = math.exp(following)
                if worth[place] > min(worth.values()) + _FALL or not self.floor <= common <= self.largest:
                    break
                found[following] = self.learnt(found[place], common)
                place = following
        return found

    def from_above(self, prior: SubspacePrior) -> dict[float, _Place]:
        """The same, reached from targets that are all noise: W cannot have fitted the noise on the way."""
        loud = max(self.power / max(self.rows, 1e-300), self.floor)
        fresh = first_guess(self.statistics, rank=prior.frame.shape[1])
        rough = self.places(self.start(replace(fresh, noise=torch.full_like(prior.noise, loud))), loud)
        best = min(rough, key=lambda place: rough[place].value)
        return self.places(rough[best], math.exp(best)) if math.isfinite(rough[best].value) else rough

    def learnt(self, start: _Place, common: float) -> _Place:
        """What is learnt with this c from another place, as close as the posterior needs it."""
        prior, value = self.settled(start, common, _CLOSE)
        there = self._place(value, prior)
        if math.isnan(there.value):
            there.value = math.inf
        return there

    def settled(self, start: _Place, common: float, close: float) -> tuple[SubspacePrior, float]:
        """What is learnt with this c until a round lowers the loss by no more than ``close``, and its -log p(y)."""
        statistics = self.statistics
        # one variance for all is c, whatever they have spent
        spent = start.spent if self.noise == "task" else torch.zeros_like(start.prior.noise)
        rule = _Rule(common, spent, self.noise, self.floor)
        noise = rule.update(expected_moments(statistics, start.prior)[1], statistics.counts)
        prior = replace(start.prior, noise=noise)
        value, loss = self._loss(prior, rule)
        for _ in range(min(self.max_rounds, _ROUNDS) if close else self.max_rounds):
            further = self._round(prior, rule)
            new_value, new_loss = self._loss(further, rule)
            gain = loss - new_loss
            if not gain > 0:
                break
            prior, value, loss = further, new_value, new_loss
            if gain <= max(self.limit, close):
                break
        return prior, value

    def _round(self, prior: SubspacePrior, rule: _Rule) -> SubspacePrior:
        prior = update_mean(self.statistics, prior)
        covariance, errors = expected_moments(self.statistics, prior)
        noise = rule.update(errors, self.statistics.counts)
        return update_frame(self.statistics, replace(prior, covariance=covariance, noise=noise))[0]

    def _loss(self, prior: SubspacePrior, rule: _Rule) -> tuple[float, float]:
        """-log p(y) with the prior of the noise, and the same with what a round keeps fixed of log det(I + R F R)."""
        losses = posterior(self.statistics, prior).losses
        least = self.statistics.counts / 2 * (math.log(2 * math.pi) + prior.noise.log())
        if self.tasks.add(losses < least - _ROUNDING * (1 + least.abs())):
            return math.inf, math.inf  # no density is so large: with next to no noise this is rounding
        value = losses + rule.penalty(prior.noise)
        return self.tasks.add(value), self.tasks.add(value - rule.spent / 2 * prior.noise.log())

    def _place(self, value: float, prior: SubspacePrior) -> _Place:
        """The value with ½ log det(I + R F R), and f_t of every task that is here."""
        found, known = posterior(self.statistics, prior), shared_prior(self.statistics, prior)
        assert known is not None, "fit_noise does not search where W is taken for known"
        factor = known.factor(self.tasks.total(shared_information(self.statistics, prior, found)))

        def spent() -> Tensor:
            return spent_on_shared(self.statistics, prior, found, known.covariance(factor))

        return _Place(value + float(factor.diagonal().log().sum()), prior, spent)


def _least(places: dict[float, _Place]) -> float:
    return min(there.value for there in places.values())


def _mean(places: dict[float, _Place]) -> float:
    """The mean of c by the trapezoidal rule in log c."""
    at = sorted(places)
    least = _least(places)
    gaps = [b - a for a, b in itertools.pairwise(at)]
    widths = [a + b for a, b in zip([0.0, *gaps], [*gaps, 0.0], strict=True)] if gaps else [1.0]
    masses = [width * math.exp(least - places[place].value) for place, width in zip(at, widths, strict=True)]
    return sum(mass * math.exp(place) for mass, place in zip(masses, at, strict=True)) / sum(masses)
