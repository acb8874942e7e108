"""The prior and the Fisher information of what all tasks share, W = [m, U], and the part that each task has in them.

    F = blockdiag(Σ_t S_t,  Σ_t (Σ - V_t) ⊗ S_t + (H ↦ G_t V_t Hᵀ G_t V_t)),    S_t = A_t/s_t² - G_t V_t G_tᵀ,

with G_t = A_tU/s_t². The S_t are as large as all Gram matrices together. Here they exist strip by strip, rows b of all
tasks at a time, each used at once for all pairs of directions k ≤ l, and only on and above the diagonal: every Gram
matrix is read once, half of it, and nothing else has its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fisherfold.subspace.marginal import SubspacePrior, TaskPosterior, factor_above_one, symmetric_root
from fisherfold.subspace.tasks import TaskStatistics

# So many numbers in W at most: its covariance has their square. What is shared is taken for known beyond.
MOST_SHARED = 2048

# Numbers in a strip: a part of what a processor keeps close to it.
_STRIP_ENTRIES = 2**18


@dataclass(frozen=True)
class SharedPrior:
    """The Gaussian prior Ψ ⊗ D⁻¹ of W = [m, U].

    Attributes:
        root: Ψ^½, shape (1 + rank, 1 + rank).
        units: the diagonal of D^-½, shape (features,).
    """

    root: Tensor
    units: Tensor

    def factor(self, precision: Tensor) -> Tensor:
        """The Cholesky factor of I + R P R, with R = Ψ^½ ⊗ D^-½ and P the precision that the likelihood gives to W.

        Args:
            precision: P, shape (1 + rank, features, 1 + rank, features).

        Returns:
            A lower triangular matrix.
        """
        size = len(self.root) * len(self.units)
        inner = self._between_roots(precision).reshape(size, size)
        inner.diagonal().add_(1.0)
        return factor_above_one(inner)

    def covariance(self, factor: Tensor) -> Tensor:
        """R (I + R P R)⁻¹ R, the covariance of W.

        Args:
            factor: from ``factor``.

        Returns:
            A tensor of shape (1 + rank, features, 1 + rank, features).
        """
        k, n = len(self.root), len(self.units)
        return self._between_roots(torch.cholesky_inverse(factor).reshape(k, n, k, n))

    def _between_roots(self, matrix: Tensor) -> Tensor:
        k, n = len(self.root), len(self.units)
        left = (self.root @ matrix.reshape(k, -1)).reshape(k * n, k, n)
        return (self.root @ left).reshape(k, n, k, n).mul_(self.units[:, None, None]).mul_(self.units)


def shared_prior(statistics: TaskStatistics, prior: SubspacePrior) -> SharedPrior | None:
    """The prior of what all tasks share, of the size of what was found.

    Args:
        statistics: the rows.
        prior: what was found.

    Returns:
        The prior, or None where W is too large and taken for known.
    """
    n, k = statistics.n_features, 1 + prior.frame.shape[1]
    if n * k > MOST_SHARED:
        return None
    tasks, squares = statistics.all_tasks, statistics.gram.diagonal(dim1=-2, dim2=-1)
    sizes = tasks.total(squares.sum(0)) / tasks.total(statistics.counts.sum())
    spread = sizes.new_zeros((k, k))
    spread[0, 0] = (prior.mean**2 * sizes).sum()
    spread[1:, 1:] = prior.frame.mT @ (prior.frame * sizes[:, None])
    spread = spread / (sizes > 0).sum().clamp(min=1)  # features that are zero in all rows are none
    return SharedPrior(symmetric_root(spread), torch.where(sizes > 0, sizes, 1.0).rsqrt())


def shared_information(statistics: TaskStatistics, prior: SubspacePrior, found: TaskPosterior) -> Tensor:
    """F, the Fisher information of W = [m, U] in the targets, over the tasks that are here.

    Args:
        statistics: the rows.
        prior: what it is taken at.
        found: the posterior of the coefficients there.

    Returns:
        A tensor of shape (1 + rank, features, 1 + rank, features), symmetric up to rounding.
    """
    n, p = prior.frame.shape
    gram_frame, reach = found.scaled_gram_frame, found.scaled_gram_frame @ found.covariance
    rows, columns = torch.triu_indices(p, p, device=reach.device)
    right = (prior.covariance - found.covariance)[:, rows, columns]
    weights = torch.cat([torch.ones_like(right[:, :1]), right], 1).mT.contiguous()
    sums = reach.new_empty((len(weights), n, n))
    for strip in _strips(*gram_frame.shape[:2]):
        score = strip.minus(strip.scaled(statistics, prior.noise), reach, gram_frame)
        part = (weights @ score.flatten(1)).reshape(-1, *score.shape[1:])
        sums[:, strip.rows, strip.columns] = part
        sums[:, strip.columns, strip.rows] = part.mT
    information = sums.new_zeros((1 + p, n, 1 + p, n))
    flat = reach.flatten(1)
    information[1:, :, 1:, :] = (flat.mT @ flat).reshape(n, p, n, p).permute(3, 0, 1, 2)
    information[0, :, 0, :] = sums[0]
    for k, m, part in zip(rows.tolist(), columns.tolist(), sums[1:], strict=True):
        information[1 + k, :, 1 + m, :] += part
        if k != m:
            information[1 + m, :, 1 + k, :] += part
    return information


def spent_on_shared(
    statistics: TaskStatistics, prior: SubspacePrior, found: TaskPosterior, covariance: Tensor
) -> Tensor:
    """f_t = -⟨K, ∂F/∂log s_t²⟩ with K = R (I + R F R)⁻¹ R.

    With I_t = UᵀG_t:  ∂V = V I V,  ∂(G V) = -G V (1 - I V),  ∂S = -S + G V (1 - I V) Gᵀ.

    Args:
        statistics: the rows.
        prior: where F is taken.
        found: the posterior of the coefficients there.
        covariance: K, shape (1 + rank, features, 1 + rank, features).

    Returns:
        One number per task that is here.
    """
    n, p = prior.frame.shape
    gram_frame, spread = found.scaled_gram_frame, found.covariance
    reach, inner = gram_frame @ spread, prior.frame.mT @ gram_frame
    rest = reach - reach @ (inner @ spread)
    rows, columns = torch.triu_indices(p, p, device=reach.device)
    pairs = torch.cat([torch.zeros_like(rows[:1]), 1 + rows]), torch.cat([torch.zeros_like(rows[:1]), 1 + columns])
    of_score, of_falling = _with_pairs(statistics, prior.noise, gram_frame, (reach, rest), covariance, pairs)
    right, growing = (part[:, rows, columns] for part in (prior.covariance - spread, spread @ inner @ spread))
    crossed = covariance[1:, :, 1:, :].permute(1, 2, 3, 0).reshape(n * p, n * p)
    twice = 2 * ((reach.flatten(1) @ crossed) * rest.flatten(1)).sum(-1)
    return of_falling[:, 0] + (of_falling[:, 1:] * right + of_score[:, 1:] * growing).sum(-1) + twice


def shared_doubt(
    statistics: TaskStatistics,
    prior: SubspacePrior,
    found: TaskPosterior,
    covariance: Tensor,
    moments: Tensor,
    reach: Tensor,
) -> Tensor:
    """Σ_kl E[ã_t ã_tᵀ]_kl tr(A_t B_t K_kl B_tᵀ)/s_t² with B_t = I - U V_t G_tᵀ: what the rows of t know less for W.

    B_tᵀA_tB_t/s_t² = A_t/s_t² - G_t V_t (2 - UᵀG_t V_t) G_tᵀ.

    Args:
        statistics: the rows.
        prior: with the noise s_t².
        found: the posterior of the coefficients there.
        covariance: K, shape (1 + rank, features, 1 + rank, features), or of no size.
        moments: E[ã_t ã_tᵀ], shape (tasks, 1 + rank, 1 + rank), or of no size.
        reach: G_t V_t, or no column of it for B_t = I.

    Returns:
        One number per task that is here.
    """
    if len(covariance) == 0:
        return torch.zeros_like(prior.noise)
    size = reach.shape[-1]
    less = 2 * reach - reach @ (prior.frame.mT @ reach)[:, :size]
    rows, columns = torch.triu_indices(len(covariance), len(covariance), device=reach.device)
    gram_frame = found.scaled_gram_frame[..., :size]
    (totals,) = _with_pairs(statistics, prior.noise, gram_frame, (less,), covariance, (rows, columns))
    return (totals * moments[:, rows, columns]).sum(-1)


def _with_pairs(
    statistics: TaskStatistics,
    noise: Tensor,
    gram_frame: Tensor,
    less: tuple[Tensor, ...],
    covariance: Tensor,
    pairs: tuple[Tensor, Tensor],
) -> list[Tensor]:
    """⟨K_kl + K_lk, M_t⟩ for pairs k < l and ⟨K_kk, M_t⟩; M_t is A_t/s_t² less L_t G_tᵀ, one L after the other."""
    rows, columns = pairs
    blocks = covariance[rows, :, columns, :]
    blocks = blocks + blocks.mT
    blocks[rows == columns] /= 2
    totals = [blocks.new_zeros((len(gram_frame), len(blocks))) for _ in less]
    for strip in _strips(*gram_frame.shape[:2]):
        matrix, kept = strip.scaled(statistics, noise), blocks[:, strip.rows, strip.columns].clone()
        kept[:, :, strip.height :] *= 2  # what lies below the diagonal
        for total, part in zip(totals, less, strict=True):
            matrix = strip.minus(matrix, part, gram_frame)
            total.addmm_(matrix.flatten(1), kept.flatten(1).mT)
    return totals


@dataclass(frozen=True)
class _Strip:
    """Some rows of a symmetric matrix, from the diagonal on."""

    rows: slice
    columns: slice
    height: int

    def scaled(self, statistics: TaskStatistics, noise: Tensor) -> Tensor:
        """Its part of every A_t/s_t²."""
        return statistics.gram[:, self.rows, self.columns] / noise[:, None, None]

    def minus(self, matrix: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Its part of M_t - L_t R_tᵀ, in the place of that of M_t."""
        return matrix.baddbmm_(left[:, self.rows], right[:, self.columns].mT, alpha=-1)


def _strips(tasks: int, size: int) -> Iterator[_Strip]:
    """The strips of matrices of this size, lower ones higher where they are narrower."""
    begin = 0
    while begin < size:
        height = max(1, min(size - begin, _STRIP_ENTRIES // max(tasks * (size - begin), 1)))
        yield _Strip(slice(begin, begin + height), slice(begin, size), height)
        begin += height
