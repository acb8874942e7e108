"""Ordered categories: category k is seen if κ_{k-1} < z ≤ κ_k for a normal z. Two categories are the probit model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LIKELIHOODS = ("gaussian", "ordered", "binary")
_LEAST_SHARE = 0.02  # of ω that a category is worth
_FAR = 30.0  # standard deviations: beyond, a normal density is zero


@dataclass(frozen=True)
class Ordinal:
    """Ordered categories."""

    cuts: Tensor  # κ, one fewer than there are categories, ascending, in scaled units
    values: Tensor  # the value of each category, in scaled units

    def probabilities(self, mean: Tensor, std: Tensor) -> Tensor:
        """The probability of each category."""
        inside = torch.special.ndtr((self.cuts.to(std) - mean.to(std)[:, None]) / std[:, None])
        below = torch.cat([torch.zeros_like(inside[:, :1]), inside], dim=1)
        return torch.cat([inside, torch.ones_like(inside[:, :1])], dim=1) - below

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The lower and upper ends of the interval of each category."""
        edge = self.cuts.new_full((1,), math.inf)
        return torch.cat([-edge, self.cuts]), torch.cat([self.cuts, edge])


def truncated(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of the standard normal distribution on an interval.

    Example:
        >>> mean, _, log_mass = truncated(torch.tensor([0.0]), torch.tensor([math.inf]))
        >>> round(float(mean), 4), round(float(log_mass.exp()), 4)
        (0.7979, 0.5)
    """
    flip = low > 0  # the tail that is counted is always the lower one, whose logarithm is accurate
    a, b = torch.where(flip, -high, low), torch.where(flip, -low, high)
    a, b = a.clamp(-_FAR - 1, _FAR), b.clamp(-_FAR, _FAR + 1)
    log_b, log_a = torch.special.log_ndtr(b), torch.special.log_ndtr(a)
    log_mass = log_b + torch.log1p(-torch.exp((log_a - log_b).clamp(max=-1e-12)))
    constant = 0.5 * math.log(2 * math.pi)
    at_a, at_b = (torch.exp(-0.5 * t * t - constant - log_mass) for t in (a, b))
    mean = at_a - at_b
    return torch.where(flip, -mean, mean), a * at_a - b * at_b, log_mass


@dataclass(frozen=True)
class Linearised:
    """Ordered categories as Gaussian ratings at some means."""

    values: Tensor  # the working values
    spread: Tensor  # what is added to their squares
    share: Tensor  # the share of ω that each is worth
    entropy: Tensor  # of z


def linearise(ordinal: Ordinal, category: Tensor, mean: Tensor, omega: Tensor) -> Linearised:
    """The quadratic approximation of the log likelihood of categories in the latent mean."""
    root = omega.sqrt()
    low, high = (edge[category] for edge in ordinal.bounds())
    ratio, slope, log_mass = truncated(
        ((low - mean) * root).double(), ((high - mean) * root).double()
    )
    share = (ratio * ratio - slope).clamp(_LEAST_SHARE, 1)
    values = mean + (ratio / (share * root.double())).to(mean)
    # so that ω share E[(value - η)²] is ω E[(z - η)²] of the truncated normal z where the mean of η stays
    spread = ((1 + slope) / share - (ratio / share) ** 2) / omega.double()
    entropy = 0.5 * math.log(2 * math.pi * math.e) - 0.5 * omega.double().log()
    entropy = entropy + log_mass + 0.5 * slope
    return Linearised(values, spread.to(mean), share.to(mean), entropy)


def better_cuts(
    ordinal: Ordinal, category: Tensor, mean: Tensor, root: Tensor, weights: Tensor | None
) -> Tensor:
    """One Newton step of the log likelihood over the cut points, whose Hessian is tridiagonal."""
    low, high = (edge[category] for edge in ordinal.bounds())
    a, b = ((edge - mean) * root for edge in (low, high))
    _, _, log_mass = truncated(a.double(), b.double())
    constant = 0.5 * math.log(2 * math.pi)
    scale = root.double()
    at_a, at_b = (
        scale * torch.exp(-0.5 * t.double().clamp(-_FAR, _FAR) ** 2 - constant - log_mass)
        for t in (a, b)
    )
    at_a, at_b = at_a * torch.isfinite(a), at_b * torch.isfinite(b)
    w = torch.ones_like(at_a) if weights is None else weights.double()
    n = len(ordinal.cuts)
    gradient, hessian = at_a.new_zeros(n + 2), at_a.new_zeros(n + 2, n + 2)
    gradient.index_add_(0, category + 1, w * at_b).index_add_(0, category, -w * at_a)
    finite = [torch.nan_to_num(t.double(), posinf=0.0, neginf=0.0) for t in (a, b)]
    own_a, own_b = at_a * (at_a - finite[0] * scale), at_b * (at_b + finite[1] * scale)
    flat = hessian.view(-1)
    flat.index_add_(0, category * (n + 3), w * own_a).index_add_(
        0, (category + 1) * (n + 3), w * own_b
    )
    flat.index_add_(0, category * (n + 3) + 1, -w * at_a * at_b)
    inner = hessian[1:-1, 1:-1]
    inner = inner + inner.mT - torch.diag(inner.diagonal())
    inner = inner + 1e-6 * torch.diag(inner.diagonal().abs() + 1)
    step = torch.linalg.solve(inner, gradient[1:-1])
    cuts = ordinal.cuts.double()
    if not bool(torch.isfinite(step).all()):
        raise ArithmeticError(
            "the cut points of the categories have left the finite numbers: the values are too extreme"
        )
    while True:
        moved = (cuts + step).to(ordinal.cuts)
        if bool((moved.diff() > 0).all()):
            return moved
        step = step / 2
