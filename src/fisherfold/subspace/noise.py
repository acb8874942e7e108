"""The noise of related regressions, W = [m, U] integrated out by Laplace's method.

The maximum of the marginal likelihood takes W for known and what it has fitted of the noise for
signal: with three rows in a task and two directions about half of the noise is left. With W
    integrated out the common noise c has the posterior

    -log p(c | y) = min over Σ, s_t² of  -Σ_t log p(y_t | W, Σ, s_t²) + ½ log det(I + R F R)
                                         + Σ_t ρ/2 (log s_t² + c/s_t² - log c),

flat in log c, at the most likely W. F is the Fisher information of W with the coefficients
integrated out,

    F = blockdiag(Σ_t S_t,  Σ_t (Σ - V_t) ⊗ S_t + (H ↦ G_t V_t Hᵀ G_t V_t)),   S_t = A_t/s_t² - G_t
    V_t G_tᵀ,

with G_t = A_tU/s_t² and R² = Ψ ⊗ D⁻¹ the covariance of a prior of W of the size of what was found,

    Ψ = blockdiag(mᵀDm, UᵀDU)/n,    D = diag(Σ_t A_t)/rows.

The last sum ties the noise of tasks together; where all tasks have one noise variance, it is c. The
noise of a task is

    s_t² = (E‖ε_t‖² + ρc) / (n_t - f_t + ρ),    f_t = -∂ log det(I + R F R)/∂ log s_t²,

f_t its part of the effective number of parameters in W. For one task with a strong signal this is
the textbook: s² = ‖r‖²/(rows - features) is the maximum, ‖r‖²/(rows - features - 2) the mean. c is
its posterior mean, by the trapezoidal rule in log c.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fisherfold.subspace.marginal import (
    SubspacePrior,
    TaskPosterior,
    factor_above_one,
    noise_floor,
    posterior,
    start,
    symmetric_root,
)
from fisherfold.subspace.marginal_fit import (
    NOISE_ROWS,
    MarginalFit,
    common_noise,
    expected_moments,
    fit_marginal,
    noise_penalty,
    update_frame,
    update_mean,
)
from fisherfold.subspace.tasks import TaskStatistics

# At most so many numbers in W: its covariance has their square. Beyond, W is taken for known.
MOST_SHARED = 2048
_CHUNK_ENTRIES = 2**20
# Where W takes no more of the rows than this fraction, c is the maximum over what is left of them.
_SMALL = 0.05
# Where W takes more than half of the rows, the maximum of the likelihood may be a fit of the noise:
# search twice.
_MUCH = 0.5
_STEP = 1.5  # in log c, in standard deviations that it has at least
_LONGEST = 1.0  # step in log c
_EVEN = 8  # steps of one length; later ones grow
_GROWTH = 1.5  # of later steps
_MOST = 30  # steps to either side
_CLOSE = 0.01  # the accuracy of -log p(c | y)
_ROUNDS = 20  # at most, for that accuracy
_FALL = 6.0  # of log p(c | y), at which the search ends
# The evidence of a stalled fit is looked at after so many rounds of EM.
_STRETCH = 10
# A loss below the least possible one by more than this fraction is rounding.
_ROUNDING = 1e-6
_LARGEST = 4.0  # c in mean squared targets
_FEW = 4.0  # rows; fits of fewer are left as they are


@dataclass(frozen=True)
class SharedPrior:
    """The Gaussian prior Ψ ⊗ D⁻¹ of W = [m, U]."""

    root: Tensor  # Ψ^½, shape (1 + rank, 1 + rank)
    units: Tensor  # the diagonal of D^-½, shape (features,)

    @classmethod
    def of(cls, statistics: TaskStatistics, prior: SubspacePrior) -> SharedPrior | None:
        """The prior of the size of what was found."""
        n = statistics.n_features
        k = 1 + prior.frame.shape[1]
        if n * k > MOST_SHARED:
            return None
        squares = statistics.gram.diagonal(dim1=-2, dim2=-1)
        sizes = statistics.all_tasks.total(squares.sum(0)) / statistics.n_rows
        spread = sizes.new_zeros((k, k))
        spread[0, 0] = (prior.mean**2 * sizes).sum()
        spread[1:, 1:] = prior.frame.mT @ (prior.frame * sizes[:, None])
        spread = spread / (sizes > 0).sum().clamp(min=1)
        return cls(symmetric_root(spread), torch.where(sizes > 0, sizes, 1.0).rsqrt())

    def factor(self, precision: Tensor) -> Tensor:
        """The Cholesky factor of I + R F R."""
        size = len(self.root) * len(self.units)
        inner = self._between_roots(precision).reshape(size, size)
        inner.diagonal().add_(1.0)
        return factor_above_one(inner)

    def covariance(self, factor: Tensor) -> Tensor:
        """K = R (I + R F R)⁻¹ R, the covariance of W."""
        k = len(self.root)
        n = len(self.units)
        return self._between_roots(torch.cholesky_inverse(factor).reshape(k, n, k, n))

    def _between_roots(self, matrix: Tensor) -> Tensor:
        k = len(self.root)
        n = len(self.units)
        left = (self.root @ matrix.reshape(k, -1)).reshape(k * n, k, n)
        return (
            (self.root @ left).reshape(k, n, k, n).mul_(self.units[:, None, None]).mul_(self.units)
        )


def shared_information(
    statistics: TaskStatistics, prior: SubspacePrior, found: TaskPosterior
) -> Tensor:
    """F, the Fisher information of W = [m, U], over the tasks of all processes."""
    n, p = prior.frame.shape
    reach = found.scaled_gram_frame @ found.covariance
    weights = torch.cat(
        [torch.ones_like(reach[:, :1, 0]), (prior.covariance - found.covariance).flatten(1)], 1
    )
    sums = reach.new_zeros((1 + p * p, n * n))
    for tasks in task_chunks(*reach.shape[:2]):
        score = statistics.gram[tasks] / prior.noise[tasks, None, None]
        score = score - reach[tasks] @ found.scaled_gram_frame[tasks].mT
        sums.addmm_(weights[tasks].mT, score.flatten(1))
    flat = reach.flatten(1)
    information = sums.new_zeros((1 + p, n, 1 + p, n))
    information[0, :, 0, :] = sums[0].reshape(n, n)
    information[1:, :, 1:, :] = (flat.mT @ flat).reshape(n, p, n, p).permute(3, 0, 1, 2)
    information[1:, :, 1:, :] += sums[1:].reshape(p, p, n, n).permute(0, 2, 1, 3)
    size = (1 + p) * n
    whole = statistics.all_tasks.total(information).reshape(size, size)
    return ((whole + whole.mT) / 2).reshape(1 + p, n, 1 + p, n)


def _spent(
    statistics: TaskStatistics, prior: SubspacePrior, found: TaskPosterior, covariance: Tensor
) -> Tensor:
    """f_t = -⟨K, ∂F/∂log s_t²⟩.

    With I_t = UᵀG_t: ∂V = V I V, ∂(G V) = -G V (1 - I V), ∂S = -S + G V (1 - I V) Gᵀ.
    """
    n, p = prior.frame.shape
    gram_frame = found.scaled_gram_frame
    spread = found.covariance
    reach = gram_frame @ spread
    inner = prior.frame.mT @ gram_frame
    rest = reach - reach @ (inner @ spread)
    right = (prior.covariance - spread).flatten(1)
    growing = (spread @ inner @ spread).flatten(1)
    # the blocks of K for the mean and for all pairs of directions, as columns
    pairs = covariance[1:, :, 1:, :].permute(0, 2, 1, 3).reshape(p * p, n * n)
    blocks = torch.cat([covariance[0, :, 0, :].reshape(1, n * n), pairs]).mT
    crossed = covariance[1:, :, 1:, :].permute(1, 2, 3, 0).reshape(n * p, n * p)
    spent = 2 * ((reach.flatten(1) @ crossed) * rest.flatten(1)).sum(-1)
    for tasks in task_chunks(*reach.shape[:2]):
        score = (
            statistics.gram[tasks] / prior.noise[tasks, None, None]
            - reach[tasks] @ gram_frame[tasks].mT
        )
        falling = (score - rest[tasks] @ gram_frame[tasks].mT).flatten(1) @ blocks
        of_score = score.flatten(1) @ blocks[:, 1:]
        spent[tasks] += falling[:, 0] + (
            falling[:, 1:] * right[tasks] + of_score * growing[tasks]
        ).sum(-1)
    return spent


def task_chunks(tasks: int, features: int) -> Iterator[slice]:
    """Runs of tasks whose Gram matrices take bounded memory."""
    width = max(1, _CHUNK_ENTRIES // (features * features))
    return (slice(begin, begin + width) for begin in range(0, tasks, width))


def continue_stalled(
    statistics: TaskStatistics,
    fit: MarginalFit,
    noise: str,
    *,
    max_rounds: int = 300,
    tol: float = 1e-7,
    callback: Callable[[dict[str, float]], object] | None = None,
) -> MarginalFit:
    """Continue with EM where all steps for U are rejected, while that is better.

    With few rows for what all tasks share a higher likelihood is reached by fitting the noise; so
    the fit continues only while the evidence rises, -Σ_t log p(y_t | W) + ½ log det(I + R F R) with
    W integrated out.
    """
    if not (fit.converged and fit.stalled) or SharedPrior.of(statistics, fit.prior) is None:
        return fit
    rank = fit.prior.frame.shape[1]
    value = _evidence(statistics, fit.prior, noise)
    best = fit
    while (done := len(best.trace)) < max_rounds:
        later = fit_marginal(
            statistics,
            rank=rank,
            noise=noise,
            max_rounds=min(_STRETCH, max_rounds - done),
            tol=tol,
            prior=best.prior,
            callback=callback,
            first=done,
            expected=True,
        )
        reached = _evidence(statistics, later.prior, noise)
        if not reached < value:
            break
        value = reached
        best = replace(later, trace=best.trace + later.trace)
        if len(later.trace) < _STRETCH:
            break  # converged, or stopped by the callback
    return best


def _evidence(statistics: TaskStatistics, prior: SubspacePrior, noise: str) -> float:
    """-log p(y) with W integrated out, and with the prior of the noise."""
    found = posterior(statistics, prior)
    known = SharedPrior.of(statistics, prior)
    tasks = statistics.all_tasks
    assert known is not None
    factor = known.factor(shared_information(statistics, prior, found))
    return (
        tasks.add(found.losses)
        + noise_penalty(prior.noise, noise, tasks)
        + float(factor.diagonal().log().sum())
    )


class NoiseFit(NamedTuple):
    """The outcome of ``fit_noise``."""

    prior: SubspacePrior  # mean, frame, covariance and noise at the common noise that was found
    common: float  # that noise, c


def fit_noise(
    statistics: TaskStatistics,
    prior: SubspacePrior,
    noise: str,
    *,
    max_rounds: int = 300,
    tol: float = 1e-7,
) -> NoiseFit:
    """Find the common noise, and learn the rest once more with it."""
    first = common_noise(prior.noise, noise, statistics.all_tasks)
    search = _Search(statistics, noise, max_rounds, tol)
    if SharedPrior.of(statistics, prior) is None or search.rows <= _FEW:
        return NoiseFit(prior, first)
    begin = search.place(math.nan, prior)
    left = 1 - statistics.all_tasks.add(begin.spent) / search.rows
    if 1 - _SMALL <= left <= 1 + _ROUNDING:
        return NoiseFit(replace(prior, noise=prior.noise / left), first / left)
    places = search.places(begin, first / min(max(left, math.exp(-_LONGEST)), 1.0))
    if not _MUCH <= left <= 1:
        places = min(places, search.from_above(prior), key=_least)
    if not any(math.isfinite(there.value) for there in places.values()):
        return NoiseFit(prior, first)
    common = _mean(places)
    nearest = min(
        places, key=lambda place: (math.isinf(places[place].value), abs(place - math.log(common)))
    )
    return NoiseFit(search.settled(places[nearest], common, 0.0)[0], common)


class _Place:
    """A value of the common noise that was looked at: -log p(c | y), and what is learnt with it."""

    def __init__(
        self, value: float, prior: SubspacePrior, make_spent: Callable[[], Tensor]
    ) -> None:
        self.value = value
        self.prior = prior
        self._make_spent = make_spent

    @cached_property
    def spent(self) -> Tensor:
        """f_t, which only places that others are reached from have to pay for."""
        made = self._make_spent()
        del self._make_spent  # it holds the factor of I + R F R
        return made


class _Search:
    """The posterior of the common noise, place by place."""

    def __init__(self, statistics: TaskStatistics, noise: str, max_rounds: int, tol: float) -> None:
        self.statistics = statistics.cached()
        self.noise = noise
        self.max_rounds = max_rounds
        self.tasks = statistics.all_tasks
        self.floor = noise_floor(statistics)
        self.rows = statistics.n_rows
        self.limit = tol * self.rows
        self.mean_square = self.tasks.add(statistics.power) / max(self.rows, 1e-300)

    def places(self, begin: _Place, first: float) -> dict[float, _Place]:
        """Values of log c around the maximum, until the posterior has fallen."""
        doubt = 2 / self.rows + (
            2 / (NOISE_ROWS * self.tasks.size) if self.noise == "task" else 0.0
        )
        step = min(_STEP * math.sqrt(doubt), _LONGEST)
        middle = math.log(max(first, self.floor))
        found = {middle: self.learnt(begin, math.exp(middle))}
        for way in (1, -1):
            place = middle
            for number in range(_MOST):
                worth = {
                    p: there.value - p if way > 0 else there.value for p, there in found.items()
                }
                following = place + way * step * max(1.0, _GROWTH ** (number - _EVEN))
                common = math.exp(following)
                if worth[place] > min(worth.values()) + _FALL:
                    break
                if not self.floor <= common <= _LARGEST * self.mean_square:
                    break
                found[following] = self.learnt(found[place], common)
                place = following
        return found

    def from_above(self, prior: SubspacePrior) -> dict[float, _Place]:
        """The same, reached from all noise, so that W cannot have fitted the noise."""
        loud = max(self.mean_square, self.floor)
        fresh = start(self.statistics, rank=prior.frame.shape[1])
        begin = self.place(math.nan, replace(fresh, noise=torch.full_like(prior.noise, loud)))
        rough = self.places(begin, loud)
        best = min(rough, key=lambda place: rough[place].value)
        return (
            self.places(rough[best], math.exp(best)) if math.isfinite(rough[best].value) else rough
        )

    def learnt(self, begin: _Place, common: float) -> _Place:
        """The fit with this c from another one, as accurate as the posterior needs."""
        prior, value = self.settled(begin, common, _CLOSE)
        there = self.place(value, prior)
        if math.isnan(there.value):
            there.value = math.inf
        return there

    def settled(self, begin: _Place, common: float, close: float) -> tuple[SubspacePrior, float]:
        """The fit with this c until a round gains at most ``close``, and its -log p(y)."""
        spent = begin.spent if self.noise == "task" else torch.zeros_like(begin.prior.noise)
        variances = self._noise(common, spent, expected_moments(self.statistics, begin.prior)[1])
        prior = replace(begin.prior, noise=variances)
        value, loss = self._loss(prior, common, spent)
        for _ in range(min(self.max_rounds, _ROUNDS) if close else self.max_rounds):
            moved = update_mean(self.statistics, prior)
            covariance, errors = expected_moments(self.statistics, moved)
            moved = replace(moved, covariance=covariance, noise=self._noise(common, spent, errors))
            moved, _ = update_frame(self.statistics, moved)
            new_value, new_loss = self._loss(moved, common, spent)
            gain = loss - new_loss
            if not gain > 0:
                break
            prior = moved
            value = new_value
            loss = new_loss
            if gain <= max(self.limit, close):
                break
        return prior, value

    def _noise(self, common: float, spent: Tensor, errors: Tensor) -> Tensor:
        """The noise of tasks from their errors, c, and f_t."""
        if self.noise == "shared":
            return torch.full_like(errors, max(common, self.floor))
        left = (self.statistics.counts - spent).clamp(min=0)
        return ((errors + NOISE_ROWS * common) / (left + NOISE_ROWS)).clamp(min=self.floor)

    def _loss(self, prior: SubspacePrior, common: float, spent: Tensor) -> tuple[float, float]:
        """-log p(y) with the noise's prior, and with log det(I + R F R) held as in a round."""
        losses = posterior(self.statistics, prior).losses
        noise = prior.noise
        least = self.statistics.counts / 2 * (math.log(2 * math.pi) + noise.log())
        if self.tasks.add(losses < least - _ROUNDING * (1 + least.abs())):
            return (
                math.inf,
                math.inf,
            )  # no density is so large: with next to no noise this is rounding
        if self.noise == "task":
            losses = losses + NOISE_ROWS / 2 * (noise.log() + common / noise - math.log(common))
        return self.tasks.add(losses), self.tasks.add(losses - spent / 2 * noise.log())

    def place(self, value: float, prior: SubspacePrior) -> _Place:
        """The value with ½ log det(I + R F R), and f_t of the tasks of this process."""
        found = posterior(self.statistics, prior)
        known = SharedPrior.of(self.statistics, prior)
        assert known is not None, "fit_noise does not search where W is taken for known"
        factor = known.factor(shared_information(self.statistics, prior, found))
        made = lambda: _spent(self.statistics, prior, found, known.covariance(factor))  # noqa: E731
        return _Place(value + float(factor.diagonal().log().sum()), prior, made)


def _least(places: dict[float, _Place]) -> float:
    return min(there.value for there in places.values())


def _mean(places: dict[float, _Place]) -> float:
    """The mean of c by the trapezoidal rule in log c."""
    at = sorted(places)
    least = _least(places)
    gaps = [b - a for a, b in itertools.pairwise(at)]
    widths = [a + b for a, b in zip([0.0, *gaps], [*gaps, 0.0], strict=True)] if gaps else [1.0]
    masses = [
        width * math.exp(least - places[place].value)
        for place, width in zip(at, widths, strict=True)
    ]
    return sum(mass * math.exp(place) for mass, place in zip(masses, at, strict=True)) / sum(masses)
