"""Damped solves (F + λ I) d = g on the tangent space.

The rule that picks a method when none is named, with d the dimension of the manifold and R the number of rows of the
factor W in F = WᵀW (samples times outputs):

1. ``structured`` if the operator has a direct solver of its own (Kronecker, row blocks), at the cost of its blocks;
2. ``woodbury`` if R < d, R ≤ 2048 and the factor fits in memory: R vector-Jacobian products and an R × R eigenproblem;
3. ``dense`` if d ≤ 128 and the factor fits in memory: its Gram matrix in an orthonormal basis of the tangent space;
4. ``cg`` otherwise: truncated conjugate gradients, one product a step, nothing is ever formed.

Named only: ``factored`` (the damping split over Kronecker factors: cheaper, a different direction) and ``pinv``, the
pseudo-inverse of the paper's local theory, F† = Jᵀ(JJᵀ)⁻¹ H_L⁻¹ (JJᵀ)⁻¹ J for a Jacobian of full row rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fisherfold.fisher.flat import flatten, unflatten
from fisherfold.manifolds.base import Manifold, Point, Tangent, combine, dot, scale

if TYPE_CHECKING:
    from fisherfold.fisher.operators import FisherOperator

METHODS = ("structured", "woodbury", "dense", "cg", "factored", "pinv")

DENSE_UP_TO = 128
ROWS_UP_TO = 2048
FACTOR_ENTRIES_UP_TO = 2**25


@dataclass(frozen=True)
class Solution:
    """A direction and how it was found.

    Attributes:
        x: the direction d with (F + λ I) d ≈ g.
        method: a name of ``METHODS``.
        decrease: g·d - ½ d·(F + λ I) d, by how much the quadratic model falls along -d.
        residual: ‖(F + λ I) d - g‖ / ‖g‖ for ``cg``; 0 for the direct methods, which do not measure it.
        iterations: products with F that ``cg`` spent.
        curvature: ``positive``, or ``zero``/``negative`` when ``cg`` met such a direction and stopped before it.
    """

    x: Tangent
    method: str
    decrease: float
    residual: float = 0.0
    iterations: int = 0
    curvature: str = "positive"


def choose(operator: FisherOperator) -> str:
    """The method that the rule of this module picks.

    Args:
        operator: the Fisher operator.

    Returns:
        A name of ``METHODS``.
    """
    if operator.is_structured:
        return "structured"
    dim, rows = operator.manifold.dim, operator.n_rows
    if rows is None or rows * flatten(operator.point).numel() > FACTOR_ENTRIES_UP_TO:
        return "cg"
    if rows < dim and rows <= ROWS_UP_TO:
        return "woodbury"
    return "dense" if dim <= DENSE_UP_TO else "cg"


def solve(
    operator: FisherOperator,
    g: Tangent,
    damping: float,
    *,
    method: str = "auto",
    rtol: float = 1e-10,
    max_iter: float | None = None,
) -> Solution:
    """Solve (F + λ I) d = g on the tangent space.

    Args:
        operator: the Fisher operator F.
        g: a tangent vector.
        damping: λ ≥ 0.
        method: ``auto`` or a name of ``METHODS``.
        rtol: relative residual at which ``cg`` stops.
        max_iter: products that ``cg`` may spend; ten times the dimension, at most 1000, if not given.

    Returns:
        The solution.

    Raises:
        ValueError: if the damping is negative or the method is unknown or does not apply.
    """
    if not damping >= 0:
        raise ValueError(f"damping must be a number ≥ 0, got {damping}")
    if method == "auto":
        method = choose(operator)
    if method == "cg":
        limit = min(10 * operator.manifold.dim, 1000) if max_iter is None else int(max_iter)
        return conjugate_gradients(operator, g, damping, rtol=rtol, max_iter=limit)
    if method in {"structured", "factored"}:
        x = operator.structured_solve(g, damping, factored=method == "factored")
        if x is None:
            kind = type(operator).__name__
            raise ValueError(f"{kind} on {operator.manifold!r} has no {method} solve; use method='cg'")
    elif method == "woodbury":
        x = _in_sample_space(operator, g, damping)
    elif method == "dense":
        x = _in_tangent_basis(operator, g, damping)
    elif method == "pinv":
        x = pseudo_inverse(operator, g)
    else:
        raise ValueError(f"method must be 'auto' or one of {list(METHODS)}, got {method!r}")
    # for an exact solve g·d - ½ d·(F + λ)d = ½ g·d
    return Solution(x, method, decrease=0.5 * float(dot(g, x)))


def conjugate_gradients(
    operator: FisherOperator, g: Tangent, damping: float, *, rtol: float, max_iter: int
) -> Solution:
    """Truncated preconditioned conjugate gradients.

    Args:
        operator: the Fisher operator F.
        g: a tangent vector.
        damping: λ ≥ 0.
        rtol: relative residual at which to stop.
        max_iter: products with F that may be spent.

    Returns:
        The solution, with its residual and the sign of the curvature that ended it.
    """
    x, r = scale(0.0, g), g
    z = operator.precondition(r, damping)
    p, rz = z, float(dot(r, z))
    size = float(dot(g, g)) ** 0.5
    curvature, iterations = "positive", 0
    residual = 1.0 if size > 0 else 0.0
    while residual > rtol and iterations < max_iter:
        product = combine(1.0, operator._matvec(p), damping, p)
        along = float(dot(p, product))
        iterations += 1
        # F is positive semi-definite: a curvature at rounding level means that nothing is left to gain along p
        floor = torch.finfo(flatten(p).dtype).eps * float(dot(p, p)) * 1e-2
        if not along > floor * damping or along <= 0:
            curvature = "zero" if along >= -floor else "negative"
            break
        alpha = rz / along
        x = combine(1.0, x, alpha, p)
        r = combine(1.0, r, -alpha, product)
        residual = float(dot(r, r)) ** 0.5 / size
        z = operator.precondition(r, damping)
        rz, previous = float(dot(r, z)), rz
        p = combine(1.0, z, rz / previous, p)
    decrease = 0.5 * (float(dot(g, x)) + float(dot(r, x)))
    return Solution(x, "cg", decrease, residual, iterations, curvature)


def tangent_basis(manifold: Manifold, point: Point) -> Tensor:
    """An orthonormal basis of the tangent space, from the eigenvectors of the projector. For small manifolds.

    Args:
        manifold: the manifold.
        point: a point of it.

    Returns:
        A matrix with flattened ambient vectors as its ``manifold.dim`` columns.
    """
    like = flatten(point)
    identity = torch.eye(like.numel(), dtype=like.dtype, device=like.device)
    projector = torch.stack([flatten(manifold.project(point, unflatten(e, point))) for e in identity])
    return torch.linalg.eigh(projector).eigenvectors[:, like.numel() - manifold.dim :]


def _in_tangent_basis(operator: FisherOperator, g: Tangent, damping: float) -> Tangent:
    basis = tangent_basis(operator.manifold, operator.point)
    if operator.n_rows is not None:
        coordinates = operator.rows() @ basis
        matrix = coordinates.T @ coordinates
    else:
        columns = [flatten(operator._matvec(unflatten(b, operator.point))) for b in basis.T]
        matrix = basis.T @ torch.stack(columns, dim=1)
        matrix = (matrix + matrix.T) / 2
    matrix.diagonal().add_(damping)
    return unflatten(basis @ _solve_positive(matrix, basis.T @ flatten(g)), operator.point)


def _solve_positive(matrix: Tensor, rhs: Tensor) -> Tensor:
    """Cholesky, or the pseudo-inverse where the matrix is singular to rounding."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    diagonal = factor.diagonal()
    well = int(info) == 0 and float(diagonal.min() / diagonal.max()) ** 2 > matrix.shape[0] * torch.finfo(rhs.dtype).eps
    if well:
        return torch.cholesky_solve(rhs[:, None], factor)[:, 0]
    values, vectors = torch.linalg.eigh(matrix)
    keep = values > _cutoff(values)
    inverse = torch.where(keep, 1 / torch.where(keep, values, 1.0), 0.0)
    return vectors @ (inverse * (vectors.T @ rhs))


def _cutoff(values: Tensor) -> Tensor:
    """Eigenvalues at or below this are rounding."""
    return values.max().clamp(min=0) * len(values) * torch.finfo(values.dtype).eps


def _gram_eigen(operator: FisherOperator) -> tuple[Tensor, Tensor, Tensor]:
    """The factor W, and the eigenvalues and orthonormal eigenvectors WᵀQ s^(-1/2) of WᵀW that are not rounding."""
    rows = operator.rows()
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    keep = values > _cutoff(values)
    values, vectors = values[keep], vectors[:, keep]
    return rows, values, rows.T @ (vectors / values.sqrt())


def _in_sample_space(operator: FisherOperator, g: Tangent, damping: float) -> Tangent:
    """Woodbury: d = V (s + λ)⁻¹ Vᵀ g + (g - V Vᵀ g)/λ, with V s Vᵀ = WᵀW from the eigenvectors of WWᵀ."""
    _, values, vectors = _gram_eigen(operator)
    flat = flatten(g)
    coordinates = vectors.T @ flat
    inside = vectors @ (coordinates / (values + damping))
    outside = flat - vectors @ coordinates
    outside = outside - vectors @ (vectors.T @ outside)
    # 1/λ would blow up a part outside the range of F that is nothing but rounding
    if damping > 0 and float(outside.norm()) > 1e2 * torch.finfo(flat.dtype).eps * float(flat.norm()):
        inside = inside + outside / damping
    return operator.manifold.project(operator.point, unflatten(inside, operator.point))


def pseudo_inverse(operator: FisherOperator, g: Tangent) -> Tangent:
    """F† g, through sample space if the factor has fewer rows than the manifold dimensions.

    Args:
        operator: the Fisher operator F.
        g: a tangent vector.

    Returns:
        The vector of least length that solves F d = g on the range of F.
    """
    if operator.n_rows is not None and operator.n_rows < operator.manifold.dim:
        _, values, vectors = _gram_eigen(operator)
        flat = vectors @ ((vectors.T @ flatten(g)) / values)
        return operator.manifold.project(operator.point, unflatten(flat, operator.point))
    return _in_tangent_basis(operator, g, 0.0)
