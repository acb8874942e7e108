r"""Rotations of factor loadings to a simple structure, and the equations that they satisfy.

Of unrotated loadings A an orthogonal rotation is ``Λ = A T`` with a rotation T, an oblique one ``Λ
= A T⁻ᵀ`` with columns of T of length 1 and factor correlations ``Φ = TᵀT``. A criterion Q(Λ) is
minimised over the manifold of T. At the minimum, with G = dQ/dΛ, ``Λᵀ G`` is symmetric
(orthogonal), or ``Λᵀ G Φ⁻¹`` diagonal (oblique; Jennrich 1973): the constraints that identify the
rotated parameters.

- ``varimax``: Q = -¼ Σ_c Σ_i (λ_ic² - mean_i λ_ic²)² (Kaiser 1958), orthogonal;
- ``oblimin``: Q = ¼ Σ_{c≠d} Σ_i λ_ic² λ_id², direct quartimin (Jennrich and Sampson 1966), oblique;
- ``geomin``: Q = Σ_i (Π_c (λ_ic² + ε))^{1/k} (Yates 1987), oblique, ε = 0.01;
- ``promax``: the oblique least-squares fit to the fourth powers of varimax loadings (Hendrickson
  and White 1964).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fisherfold.manifolds import Manifold, Oblique, Rotations
from fisherfold.problems import LossProblem
from fisherfold.solvers import GradientNorm, minimize

ROTATIONS = ("varimax", "promax", "oblimin", "geomin")
# the power of promax
_POWER = 4
# ε of geomin
_EPSILON = 0.01


def varimax(loadings: Tensor) -> Tensor:
    """Minus the variances of squared loadings."""
    squares = loadings.square()
    return -0.25 * (squares - squares.mean(dim=0)).square().sum()


def oblimin(loadings: Tensor) -> Tensor:
    """The covariation of squared loadings of different factors."""
    products = loadings.square().mT @ loadings.square()
    return 0.25 * (products.sum() - products.diagonal().sum())


def geomin(loadings: Tensor) -> Tensor:
    """The geometric means of the squared loadings of a variable."""
    return (loadings.square() + _EPSILON).log().mean(dim=1).exp().sum()


_CRITERIA: dict[str, Callable[[Tensor], Tensor]] = {
    "varimax": varimax,
    "promax": varimax,
    "oblimin": oblimin,
    "geomin": geomin,
}


def is_oblique(rotation: str | None) -> bool:
    """Whether a criterion is minimised over oblique rotations; promax is varimax at first."""
    return rotation in {"oblimin", "geomin"}


def default_kaiser(rotation: str | None) -> bool:
    """Whether rows are brought to length 1 for a criterion unless told otherwise."""
    return rotation in {"varimax", "promax"}


def rotate(
    loadings: Tensor,
    rotation: str | None,
    *,
    kaiser: bool | None = None,
    starts: int = 10,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Rotate a loading matrix.

    Args:
        loadings: a matrix of p variables and k factors, in float64.
        rotation: one of ``varimax``, ``promax``, ``oblimin`` and ``geomin``, or None for none.
        kaiser: whether rows are brought to length 1 for the rotation and back; True for varimax and
            promax if not given, else False.
        starts: how many rotations are minimised from, the first of which is the identity.
        seed: of the others.

    Returns:
        The rotated loadings and the factor correlations, with factors in order of their sums of
        squared loadings and with positive sums.
    """
    if rotation is not None and rotation not in ROTATIONS:
        raise ValueError(f"rotation must be one of {list(ROTATIONS)} or None, got {rotation!r}")
    k = loadings.shape[1]
    if rotation is None or k == 1:
        return ordered(loadings, torch.eye(k, dtype=loadings.dtype))
    rotated, correlations = ordered(*_minimised(loadings, rotation, kaiser, starts, seed))
    if rotation == "promax":
        return ordered(*promax(rotated))
    return rotated, correlations


def promax(loadings: Tensor) -> tuple[Tensor, Tensor]:
    """The oblique rotation of varimax loadings that is nearest to their powers."""
    target = loadings * loadings.abs() ** (_POWER - 1)
    turn = torch.linalg.solve(loadings.mT @ loadings, loadings.mT @ target)
    inverse = torch.linalg.inv(turn.mT @ turn)
    scale = inverse.diagonal().sqrt()
    return loadings @ (turn * scale), inverse / scale / scale[:, None]


def ordered(loadings: Tensor, correlations: Tensor) -> tuple[Tensor, Tensor]:
    """Factors in order of their sums of squares, each with a positive sum of loadings."""
    order = loadings.square().sum(dim=0).argsort(descending=True)
    signs = torch.where(loadings.sum(dim=0) < 0, -1.0, 1.0).to(loadings.dtype)[order]
    return loadings[:, order] * signs, correlations[order][:, order] * signs * signs[:, None]


def constraints(
    loadings: Tensor, correlations: Tensor, rotation: str | None, kaiser: bool
) -> Tensor:
    """The equations of a rotated matrix, 0 at a minimum of its criterion; differentiable.

    Without a rotation ``Λᵀ Ψ⁻¹ Λ`` is diagonal, with the unique variances of standardised
    variables.
    """
    k = loadings.shape[1]
    rows, columns = torch.triu_indices(k, k, 1).unbind()
    communalities = (loadings @ correlations * loadings).sum(dim=1)
    if rotation is None:
        gram = loadings.mT @ (loadings / (1 - communalities).unsqueeze(-1))
        return gram[rows, columns]
    # rotations leave communalities as they are, so that the weights are constants of the criterion
    weights = communalities.rsqrt().unsqueeze(-1) if kaiser else torch.ones_like(loadings[:, :1])
    criterion = _CRITERIA[rotation]
    slopes = torch.func.grad(lambda matrix: criterion(weights * matrix))(loadings)
    product = loadings.mT @ slopes
    if not is_oblique(rotation):
        return (product - product.mT)[rows, columns]
    product = torch.linalg.solve(correlations, product, left=False)
    return torch.cat([product[rows, columns], product[columns, rows]])


def _minimised(
    loadings: Tensor, rotation: str, kaiser: bool | None, starts: int, seed: int
) -> tuple[Tensor, Tensor]:
    kaiser = default_kaiser(rotation) if kaiser is None else kaiser
    k = loadings.shape[1]
    weights = loadings.square().sum(dim=1, keepdim=True).rsqrt() if kaiser else 1.0
    rows = weights * loadings
    criterion = _CRITERIA[rotation]
    oblique = is_oblique(rotation)
    manifold: Manifold = Oblique(k, k) if oblique else Rotations(k)

    def applied(matrix: Tensor, turn: Tensor) -> Tensor:
        # the rows of an oblique point are the columns of T
        return torch.linalg.solve(turn, matrix, left=False) if oblique else matrix @ turn

    problem = LossProblem(manifold, lambda turn: criterion(applied(rows, turn)))
    generator = torch.Generator().manual_seed(seed)
    best, lowest = None, float("inf")
    for start in range(max(1, starts)):
        turn = torch.eye(k, dtype=loadings.dtype)
        if start:
            turn = Rotations(k).random_point(generator=generator, dtype=loadings.dtype)
        result = minimize(problem, turn, "trust-region", stop=GradientNorm(1e-10), max_iter=200)
        if result.value < lowest - 1e-10 * abs(lowest if best is not None else 0.0):
            best, lowest = result.x, result.value
    assert best is not None
    correlations = best @ best.mT if oblique else torch.eye(k, dtype=loadings.dtype)
    return applied(loadings, best), correlations
