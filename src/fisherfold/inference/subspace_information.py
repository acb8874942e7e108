"""The Fisher information of what all tasks share, W = [m, U], and the part that each task has in its determinant.

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

from fisherfold.inference.subspace import SubspacePrior, TaskPosterior
from fisherfold.problems.tasks import TaskStatistics

# Numbers in a strip: a part of what a processor keeps close to it.
_STRIP_ENTRIES = 2**18


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
    of_score, of_falling = _with_pairs(statistics, prior.noise, gram_frame, (reach, rest), covariance)
    rows, columns = torch.triu_indices(p, p, device=reach.device)
    right, growing = (part[:, rows, columns] for part in (prior.covariance - spread, spread @ inner @ spread))
    crossed = covariance[1:, :, 1:, :].permute(1, 2, 3, 0).reshape(n * p, n * p)
    twice = 2 * ((reach.flatten(1) @ crossed) * rest.flatten(1)).sum(-1)
    return of_falling[:, 0] + (of_falling[:, 1:] * right + of_score[:, 1:] * growing).sum(-1) + twice


def _with_pairs(
    statistics: TaskStatistics, noise: Tensor, gram_frame: Tensor, less: tuple[Tensor, ...], covariance: Tensor
) -> list[Tensor]:
    """⟨K_00, M_t⟩, then ⟨K_kl + K_lk, M_t⟩ for k < l and ⟨K_kk, M_t⟩; M_t is A_t/s_t² less L_t G_tᵀ, L by L."""
    p = len(covariance) - 1
    rows, columns = torch.triu_indices(p, p, device=gram_frame.device)
    pairs = torch.cat([covariance[:1, :, 0, :], covariance[1 + rows, :, 1 + columns, :]])
    pairs = pairs + pairs.mT
    pairs[0] /= 2
    pairs[1:][rows == columns] /= 2
    totals = [pairs.new_zeros((len(gram_frame), len(pairs))) for _ in less]
    for strip in _strips(*gram_frame.shape[:2]):
        matrix, kept = strip.scaled(statistics, noise), pairs[:, strip.rows, strip.columns].clone()
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
