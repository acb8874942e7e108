r"""The Gaussian likelihood of rows with missing values, by patterns of what is there.

    Ψ(μ, Σ) = Σ_g (n_g / n) ½ [log det Σ_g + tr Σ_g⁻¹ (S_g + (m_g - μ_g)(m_g - μ_g)ᵀ)]

over the patterns g, with the rows and columns of Σ that a pattern has, and the means m_g and
covariances S_g (divisor n_g) of its rows. Complete data are a single pattern. Matrices of a pattern
have the full size: missing variables are independent ones of variance 1 and add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# entries of a block of matrices that are held at once
_BLOCK = 20_000_000


@dataclass(frozen=True)
class Moments:
    """Sufficient statistics of each pattern of missing values.

    Attributes:
        masks: 1 where a variable is there, else 0; shape (patterns, p).
        counts: the rows of each pattern.
        means: of each pattern, 0 where missing.
        covariances: of each pattern with divisor ``counts``, 0 where missing.
        rows: the data, 0 where missing; None where only a covariance is known.
        pattern: the pattern of each row.
    """

    masks: Tensor
    counts: Tensor
    means: Tensor
    covariances: Tensor
    rows: Tensor | None = None
    pattern: Tensor | None = None

    @classmethod
    def of_rows(cls, x: Tensor) -> Moments:
        """The statistics of rows with NaN where a value is missing; no row may be empty."""
        seen = torch.isfinite(x)
        masks, pattern = torch.unique(seen, dim=0, return_inverse=True)
        rows = torch.where(seen, x, 0.0)
        counts = torch.bincount(pattern, minlength=len(masks)).to(x.dtype)
        sums = torch.zeros(len(masks), x.shape[1], dtype=x.dtype).index_add_(0, pattern, rows)
        means = sums / counts[:, None]
        centred = torch.where(seen, rows - means[pattern], 0.0)
        squares = [centred[pattern == g].mT @ centred[pattern == g] for g in range(len(masks))]
        covariances = torch.stack(squares) / counts[:, None, None]
        return cls(masks.to(x.dtype), counts, means, covariances, rows, pattern)

    @classmethod
    def of_covariance(cls, covariance: Tensor, n: int) -> Moments:
        """The statistics of n complete rows with mean 0."""
        p = len(covariance)
        ones = covariance.new_ones(1, p)
        return cls(ones, covariance.new_tensor([n]), 0 * ones, covariance[None])

    @property
    def n(self) -> int:
        """The number of rows."""
        return int(self.counts.sum())

    @property
    def is_complete(self) -> bool:
        """Whether no value is missing."""
        return bool(self.masks.all())

    def loss(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Ψ, without the constant of the likelihood."""
        lower, _ = torch.linalg.cholesky_ex(self._filled(covariance))
        apart = self.masks * (self.means - mean)
        second = self.covariances + apart.unsqueeze(-1) * apart.unsqueeze(-2)
        fit = torch.cholesky_solve(second, lower).diagonal(dim1=-2, dim2=-1).sum(-1)
        logdet = 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return 0.5 * (self._shares * (logdet + fit)).sum()

    def log_likelihood(self, mean: Tensor, covariance: Tensor) -> float:
        """The log-likelihood of all rows."""
        observed = float((self.counts * self.masks.sum(1)).sum())
        constant = 0.5 * observed * math.log(2 * math.pi)
        return -self.n * float(self.loss(mean, covariance)) - constant

    def information(self, covariance: Tensor, means: Tensor, slopes: Tensor) -> Tensor:
        """The expected information of a row about parameters, from slopes of mean and covariance.

        ``means``: shape (parameters, p). ``slopes``: of the covariance, shape (parameters, p, p).
        """
        total = torch.zeros(len(slopes), len(slopes), dtype=slopes.dtype)
        for share, precision in zip(self._shares, self._precisions(covariance), strict=True):
            weighted = precision @ slopes @ precision
            total += 0.5 * share * slopes.flatten(1) @ weighted.flatten(1).mT
            total += share * means @ precision @ means.mT
        return total

    def scores(
        self, mean: Tensor, covariance: Tensor, means: Tensor, slopes: Tensor
    ) -> Iterator[Tensor]:
        """Blocks of the gradients of the rows' losses in parameters, from slopes as above."""
        assert self.rows is not None
        assert self.pattern is not None
        precisions = self._precisions(covariance)
        levels = torch.einsum("gij,mij->gm", precisions, slopes)
        step = max(1, _BLOCK // slopes.numel())
        for start in range(0, len(self.rows), step):
            g = self.pattern[start : start + step]
            apart = self.masks[g] * (self.rows[start : start + step] - mean)
            z = (precisions[g] @ apart.unsqueeze(-1)).squeeze(-1)
            squares = torch.einsum("ni,mij,nj->nm", z, slopes, z)
            yield 0.5 * (levels[g] - squares) - z @ means.mT

    def saturated(self, *, tol: float = 1e-10, max_iter: int = 2000) -> tuple[Tensor, Tensor]:
        """The maximum-likelihood mean and covariance without a model, by EM."""
        if self.is_complete:
            apart = self.means - self._average(self.means)
            spread = self.covariances + apart.unsqueeze(-1) * apart.unsqueeze(-2)
            return self._average(self.means), self._average(spread)
        mean = (self.counts[:, None] * self.means).sum(0) / (self.counts[:, None] * self.masks).sum(
            0
        )
        covariance = torch.eye(len(mean), dtype=mean.dtype)
        before = math.inf
        for _ in range(max_iter):
            mean, covariance = self._expectation_maximisation(mean, covariance)
            value = float(self.loss(mean, covariance))
            if before - value < tol:
                break
            before = value
        return mean, covariance

    def _expectation_maximisation(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        gain = covariance @ self._precisions(covariance)
        expected = mean + (gain @ (self.masks * (self.means - mean)).unsqueeze(-1)).squeeze(-1)
        new = self._average(expected)
        apart = expected - new
        spread = gain @ self.covariances @ gain.mT + apart.unsqueeze(-1) * apart.unsqueeze(-2)
        return new, self._average(spread + covariance - gain @ covariance)

    @property
    def _shares(self) -> Tensor:
        return self.counts / self.counts.sum()

    def _average(self, parts: Tensor) -> Tensor:
        return torch.tensordot(self._shares, parts, dims=1)

    def _filled(self, covariance: Tensor) -> Tensor:
        """Σ of each pattern, with the identity for what is missing."""
        both = self.masks.unsqueeze(-1) * self.masks.unsqueeze(-2)
        return both * covariance + torch.diag_embed(1 - self.masks)

    def _precisions(self, covariance: Tensor) -> Tensor:
        """Σ_g⁻¹ of each pattern, 0 for what is missing."""
        both = self.masks.unsqueeze(-1) * self.masks.unsqueeze(-2)
        return both * torch.cholesky_inverse(torch.linalg.cholesky(self._filled(covariance)))
