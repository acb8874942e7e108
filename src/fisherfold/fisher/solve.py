"""Damped solves (F + λ I) d = g on the tangent space.

The method that ``auto`` takes costs least by an estimate from counts: d, the dimension of the
manifold, R, the number of rows of the factor W in F = WᵀW (samples times outputs), the operations
of the model, and the digits asked for. Times would differ from run to run, and results with them.

1. ``structured`` where the operator has a direct solver of its own (Kronecker, row blocks);
2. ``dense`` for up to 32 dimensions where it takes no more than 5 ms, since it is exact;
3. ``cg``, truncated conjugate gradients: some six products for every digit, nothing is formed;
4. ``dense``, the Gram matrix of the factor in an orthonormal basis of the tangent space;
5. ``woodbury``, the R × R Gram matrix of the rows of the factor, for R ≤ 2048.

Named only: ``pinv``, the pseudo-inverse of the paper's local theory, F† = Jᵀ(JJᵀ)⁻¹ H_L⁻¹ (JJᵀ)⁻¹ J
for a Jacobian of full row rank.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fisherfold.fisher.conjugate import Solution, conjugate_gradients
from fisherfold.fisher.damped import Spectrum
from fisherfold.manifolds.base import (
    Manifold,
    Point,
    Tangent,
    combine,
    flatten,
    leaves,
    reorder_like,
    scale,
    tree_map,
    unflatten,
)

if TYPE_CHECKING:
    from fisherfold.fisher.operators import FisherOperator

METHODS = ("structured", "woodbury", "dense", "cg", "pinv")

ROWS_UP_TO = 2048
FACTOR_ENTRIES_UP_TO = 2**25
# Products of a solve by conjugate gradients: to begin with, and for every digit of the residual.
FIRST_PRODUCTS = 3
PRODUCTS_PER_DIGIT = 6
# Products that conjugate gradients need for a solve to many digits, where nothing else is known.
CG_PRODUCTS = 20
# Dimensions up to which a matrix is formed without asking what it costs.
SMALL = 32
# Nanoseconds of an exact solve that nobody waits for.
NO_TIME = 5e6


def choose(operator: FisherOperator, rtol: float = 1e-10) -> str:
    """The method that costs least by the estimates of this module, which are counts and no times.

    ``rtol``: the relative residual asked of conjugate gradients.
    """
    if operator.is_structured:
        return "structured"
    dim, rows = operator.manifold.dim, operator.n_rows
    entries = flatten(operator.point).numel()
    if rows is None:
        return "cg"
    dense = dense_cost(operator)
    if dim <= SMALL and dense <= NO_TIME:
        return "dense"  # exact, at no price
    digits = -math.log10(max(min(rtol, 0.5), 1e-16))
    products = min(dim, rows, FIRST_PRODUCTS + PRODUCTS_PER_DIGIT * digits)
    costs = {"cg": products * product_cost(operator), "dense": dense}
    fits = rows <= ROWS_UP_TO and rows * entries <= FACTOR_ENTRIES_UP_TO
    if fits and operator.manifold.ambient_metric:
        costs["woodbury"] = woodbury_cost(operator)
    return min(costs, key=lambda name: costs[name])


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

    An operator that is not positive semi-definite, such as a Hessian, must be so with λ I for
    ``dense`` and ``pinv``, which raise torch.linalg.LinAlgError otherwise; ``cg`` says where it has
    met negative curvature.

    Args:
        operator: the Fisher operator F.
        g: a tangent vector.
        damping: λ ≥ 0; 0 for ``pinv``.
        method: ``auto`` or a name of ``METHODS``.
        rtol: relative residual at which ``cg`` stops.
        max_iter: products that ``cg`` may spend; ten times the dimension, at most 1000, if not
            given.

    Returns:
        The solution.

    Raises:
        ValueError: if a number is negative or none at all, or the method is unknown or does not
            apply.
    """
    for name, value in (("damping", damping), ("rtol", rtol)):
        number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
        if not number or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number ≥ 0, got {value}")
    if max_iter is not None and not max_iter >= 0:
        raise ValueError(f"max_iter must be at least 0, got {max_iter}")
    if method == "pinv" and damping > 0:
        raise ValueError(f"pinv has no damping, got damping={damping}; use method='dense'")
    g = reorder_like(g, operator.point)
    if method == "auto":
        method = choose(operator, rtol)
        if method == "structured" and (x := operator.structured_solve(g, damping)) is not None:
            return Solution(x, method, decrease=0.5 * _inner(operator, g, x))
        method = "cg" if method == "structured" else method
    if method == "cg":
        limit = min(10 * operator.manifold.dim, 1000) if max_iter is None else int(max_iter)
        return conjugate_gradients(operator, g, damping, rtol=rtol, max_iter=limit)
    if method == "structured":
        x = operator.structured_solve(g, damping)
        if x is None:
            kind = type(operator).__name__
            raise ValueError(
                f"{kind} on {operator.manifold!r} has no structured solve; use method='cg'"
            )
    elif method == "woodbury":
        if operator.n_rows is None or not operator.manifold.ambient_metric:
            raise ValueError(
                f"{type(operator).__name__} has no factor in sample space; use method='cg' or "
                "'dense'"
            )
        x = _in_sample_space(operator, g, damping)
    elif method == "dense":
        x = _in_tangent_basis(operator, g, damping)
    elif method == "pinv":
        # through sample space if the factor has fewer rows than the manifold dimensions
        small = operator.n_rows is not None and operator.n_rows < operator.manifold.dim
        by = _in_sample_space if small and operator.manifold.ambient_metric else _in_tangent_basis
        x = by(operator, g, 0.0)
    else:
        raise ValueError(f"method must be 'auto' or one of {list(METHODS)}, got {method!r}")
    # for an exact solve g·d - ½ d·(F + λ)d = ½ g·d
    return Solution(x, method, decrease=0.5 * _inner(operator, g, x))


def _inner(operator: FisherOperator, u: Tangent, v: Tangent) -> float:
    return float(operator.manifold._inner(operator.point, u, v))


def tangent_basis(manifold: Manifold, point: Point) -> Tensor:
    """An orthonormal basis of the tangent space in the metric of the manifold.

    For small manifolds.
    """
    return flatten(reorder_like(manifold.tangent_basis(point), manifold.point_shape), batch=1).mT


def coordinates(manifold: Manifold, point: Point, basis: Tensor, vectors: Tensor) -> Tensor:
    """The inner products <b_j, v_i> in the metric of the manifold."""
    if manifold.ambient_metric:
        return vectors @ basis.mT
    points = tree_map(lambda leaf: leaf.expand(len(basis), *leaf.shape), point)
    rows = unflatten(basis, point)
    like = [unflatten(v.expand(len(basis), -1), point) for v in vectors]
    return torch.stack([manifold.inner(points, rows, v) for v in like])


def lowest_curvature(
    operator: FisherOperator, start: Tangent, steps: int
) -> tuple[float, float, Tangent]:
    """The least and the largest eigenvalue that a few Lanczos steps find, and a unit vector of the least.

    ``start``: a tangent vector of positive length. ``steps``: products to spend, at most the
    dimension.
    """
    manifold, point = operator.manifold, operator.point
    v = reorder_like(start, point)
    basis: list[Tangent] = []
    images: list[Tangent] = []
    for _ in range(min(steps, manifold.dim)):
        for _ in range(2):  # once more for the rounding of the first time
            for q in basis:
                v = combine(1.0, v, -_inner(operator, q, v), q)
        length = math.sqrt(_inner(operator, v, v))
        if not length > 1e2 * torch.finfo(leaves(v)[0].dtype).eps * max(_size(images), 1e-300):
            break
        basis.append(scale(1 / length, v))
        images.append(operator._matvec(basis[-1]))
        v = manifold._project(point, images[-1])
    matrix = torch.tensor(
        [[_inner(operator, q, h) for h in images] for q in basis],
        dtype=torch.float64,
        device="cpu",
    )
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    direction = scale(0.0, basis[0])
    for share, q in zip(vectors[:, 0].tolist(), basis, strict=True):
        direction = combine(1.0, direction, share, q)
    return float(values[0]), float(values.abs().max()), direction


def _size(vectors: list[Tangent]) -> float:
    return float(flatten(vectors[-1]).norm()) if vectors else 0.0


def product_cost(operator: FisherOperator) -> float:
    """What a product with the operator costs, in nanoseconds of a core of 2025."""
    return 1.5e5 + 0.3 * operator.work + 15.0 * (operator.n_rows or 0)


def dense_cost(operator: FisherOperator) -> float:
    """What the matrix of the operator in a basis of the tangent space and its eigenpairs cost."""
    dim, entries = operator.manifold.dim, flatten(operator.point).numel()
    decompositions = 1.0 * (dim**3 + entries**3)
    if operator.n_rows is None:
        return dim * product_cost(operator) + decompositions
    sums = operator.n_rows * (50.0 + 10.0 * entries + 0.05 * dim * (entries + dim))
    return 1.5e6 + sums + decompositions


def woodbury_cost(operator: FisherOperator) -> float:
    """What the rows of the factor, their Gram matrix and its eigenpairs cost."""
    rows, entries = operator.n_rows or 0, flatten(operator.point).numel()
    return 1.5e6 + rows * (50.0 + 10.0 * entries + 0.05 * rows * entries) + 1.0 * rows**3


def dense_costs_less(operator: FisherOperator, count: int) -> bool:
    """Whether a matrix costs less than so many solves by conjugate gradients."""
    if operator.manifold.dim <= SMALL:
        return True
    products = min(operator.manifold.dim, CG_PRODUCTS)
    return dense_cost(operator) <= count * products * product_cost(operator)


def _in_tangent_basis(operator: FisherOperator, g: Tangent, damping: float) -> Tangent:
    if operator.manifold.dim == 0:
        return scale(0.0, g)
    basis = tangent_basis(operator.manifold, operator.point).mT
    spectrum = Spectrum.of(operator.in_basis(basis), name="F")
    least = float(spectrum.values[0])
    if least < 0 and least + damping <= 0:
        # negative curvature that is no rounding, and that the damping has not outweighed
        raise torch.linalg.LinAlgError(  # type: ignore[attr-defined]  # public, but not listed by torch
            f"F + λ I is not positive definite: F has the eigenvalue {least:.2e} and the damping "
            f"is {damping:.2e}; use more, or method='cg', which stops before such directions"
        )
    flat = coordinates(operator.manifold, operator.point, basis, flatten(g)[None])[0]
    return unflatten(spectrum.solve(flat, damping) @ basis, operator.point)


def _in_sample_space(operator: FisherOperator, g: Tangent, damping: float) -> Tangent:
    """Woodbury in its spectral form, with V s Vᵀ = WᵀW from the eigenvectors of WWᵀ."""
    rows, flat = operator.rows(), flatten(g)
    spectrum = Spectrum.of_rows(rows)
    d = spectrum.solve(flat, damping)
    # eigenvectors that come from a Gram matrix lose digits where s is small; refinement gives them
    # back
    for _ in range(2):
        missing = flat - rows.T @ (rows @ d) - damping * d
        d = d + spectrum.solve(missing, damping, whole=flat)
    return operator.manifold.project(operator.point, unflatten(d, operator.point))
