"""The information of an estimate, and standard errors from it: the one place for both.

With Ψ = (1/N) Σ w_i ψ_i at its minimum x̂, and operators on the tangent space there,

    expected   F = (1/N) Σ w_i E[grad ψ_i grad ψ_iᵀ]    the model's information    Cov x̂ = F⁻¹/N
    observed   H = Hess Ψ                               the curvature seen         Cov x̂ = H⁻¹/N
    sandwich   S = (1/N) Σ w_i grad ψ_i grad ψ_iᵀ       right for a wrong model    H⁻¹ S H⁻¹/N

and S = (1/N) Σ_c g_c g_cᵀ with sums g_c over clusters of dependent samples. By the delta method

    Cov f(x̂) = Dᵀ A D / N,  D = A⁻¹ grad f  (A = F or H),    Dᵀ S D / N for the sandwich,

one solve for each entry of f, by conjugate gradients; or by a matrix in an orthonormal basis, where
it costs less:

    {R_x̂(Σ c_i b_i) : cᵀC⁻¹c ≤ χ²_m},   C the covariance of the coordinates c   (a region).

A quotient (Grassmann) has horizontal tangent vectors, so that f must be a function of the subspace.
Directions that the data do not identify, such as rotations of factor loadings, have no variance: f
must not change along them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fisherfold.fisher.blocks import rounding_share
from fisherfold.fisher.operators import FisherOperator, PreconditionedFisher
from fisherfold.fisher.solve import coordinates, dense_costs_less, solve, tangent_basis
from fisherfold.manifolds.base import (
    Manifold,
    Point,
    Tangent,
    flatten,
    leaves,
    reorder_like,
    tolerance,
    unflatten,
)
from fisherfold.warn import warn

# A step to the minimum of so many standard errors or more is reported.
NO_MINIMUM = 0.1
# The relative residual of a solve for a standard error.
PRECISION = 1e-8
# The share of a gradient of f in unidentified directions from which on f is not identified.
UNIDENTIFIED = 1e-4
# Random representatives that are drawn until one is another array.
DRAWS = 8
# Curvatures below this share of the largest one are those of an invariance, for products of
# gradients.
FLAT_UNITS = 1e2


@dataclass(frozen=True)
class Covariance:
    """The covariance of an estimate on the tangent space.

    Attributes:
        information: F or H at the estimate, an operator.
        count: N, over the dispersion.
        scores: S of the sandwich, an operator; None without.
        nearby: an operator near the information that is cheaply made dense, to precondition solves;
            None without.
    """

    information: FisherOperator
    count: float
    scores: FisherOperator | None = None
    nearby: FisherOperator | None = field(default=None, repr=False)

    @property
    def manifold(self) -> Manifold:
        """The manifold."""
        return self.information.manifold

    @property
    def point(self) -> Point:
        """The estimate x̂."""
        return self.information.point

    @cached_property
    def basis(self) -> Tensor:
        """Orthonormal tangent vectors, flattened, as rows; shape (dim, entries of the point)."""
        return tangent_basis(self.manifold, self.point).mT

    @cached_property
    def _inverse(self) -> tuple[Tensor, Tensor]:
        """A⁻¹ in the basis, and the directions that the data do not identify as rows of coordinates."""
        matrix = self.information.in_basis(self.basis)
        if not bool(torch.isfinite(matrix).all()):
            raise ValueError("the Fisher information at the estimate is not finite")
        values, vectors = torch.linalg.eigh(matrix)
        largest, least = float(values.abs().max()), float(values[0])
        # along an invariance of the model the curvature of a loss is as small as the gradient that
        # a run has left
        if least < -10 * tolerance(values.dtype) * largest:
            raise ValueError(_no_minimum(least, largest))
        keep = values > largest * FLAT_UNITS * rounding_share(len(values), values.dtype)
        inverse = (vectors[:, keep] / values[keep]) @ vectors[:, keep].mT
        return inverse, vectors[:, ~keep].mT

    @property
    def flat(self) -> Tensor:
        """Directions that the data do not identify, as rows of coordinates.

        The covariance is 0 there.
        """
        return self._inverse[1]

    @cached_property
    def matrix(self) -> Tensor:
        """C, of the coordinates in the basis; shape (dim, dim)."""
        inverse = self._inverse[0]
        if self.scores is None:
            return inverse / self.count
        return inverse @ self.scores.in_basis(self.basis) @ inverse / self.count

    def of(self, f: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
        """A function of the estimate and its covariance, by the delta method.

        ``f``: a torch function of the point, which returns a tensor, or a dictionary of tensors
        (such as a point of a product), whose entries then follow each other as one vector. Raises
        ValueError if f changes along directions that the data do not identify.
        """

        def entries(x: Any) -> Tensor:
            value = f(x)
            return flatten(value) if isinstance(value, dict) else value

        check_function(self.manifold, self.point, entries, "f")
        value = entries(self.point)
        ambient = torch.autograd.functional.jacobian(
            lambda flat: entries(unflatten(flat, self.point)), flatten(self.point)
        )  # type: ignore[no-untyped-call]
        ambient = ambient.reshape(value.numel(), -1)
        if self._is_dense(value.numel()):
            return value.detach(), self._by_matrix(ambient).detach()
        return value.detach(), self._by_solves(ambient).detach()

    def _is_dense(self, count: int) -> bool:
        """Whether a matrix is there, or costs less than a solve for every entry of a function."""
        return "_inverse" in self.__dict__ or dense_costs_less(self.information, count)

    def _by_matrix(self, ambient: Tensor) -> Tensor:
        slopes = self.basis @ ambient.mT
        if len(self.flat):
            lost = float((self.flat @ slopes).norm())
            if lost > UNIDENTIFIED * float(slopes.norm()):
                raise ValueError(_unidentified(f"{len(self.flat)} directions"))
        return slopes.mT @ self.matrix @ slopes

    def _by_solves(self, ambient: Tensor) -> Tensor:
        gradients = [
            self.manifold.riemannian_gradient(self.point, unflatten(row, self.point))
            for row in ambient
        ]
        solved = [self._solve(gradient) for gradient in gradients]
        if self.scores is None:
            images = gradients
        else:
            images = [self.scores._matvec(d) for d in solved]
        pairs = [[self.manifold._inner(self.point, d, g) for g in images] for d in solved]
        found = torch.stack([torch.stack(row) for row in pairs]) / self.count
        return (found + found.mT) / 2

    @cached_property
    def _preconditioned(self) -> FisherOperator:
        if self.nearby is None:
            return self.information
        return PreconditionedFisher(self.information, self.nearby)

    def _solve(self, gradient: Tangent, *, strict: bool = True) -> Tangent:
        """A⁻¹ g by the matrix or by conjugate gradients, which also tell saddles and what is not identified.

        ``strict``: whether g must lie in the range of A.
        """
        if self._is_dense(1):
            flat = flatten(gradient)[None]
            c = coordinates(self.manifold, self.point, self.basis, flat)[0]
            return unflatten(self._inverse[0] @ c @ self.basis, self.point)
        found = solve(self._preconditioned, gradient, 0.0, method="cg", rtol=PRECISION)
        if found.curvature == "negative":
            raise ValueError(_no_minimum(-math.inf, math.inf))
        if strict and found.residual > UNIDENTIFIED:
            if found.curvature == "zero":
                raise ValueError(_unidentified("a direction"))
            warn(
                "a standard error was solved for up to a relative residual of "
                f"{found.residual:.1e} only; the information at the estimate is nearly singular",
                RuntimeWarning,
            )
        return found.x

    def standard_errors(self, f: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
        """A function of the estimate and the standard errors of its entries."""
        value, covariance = self.of(f)
        return value, covariance.diagonal().clamp(min=0).sqrt().reshape(value.shape)

    def interval(self, f: Callable[[Any], Tensor], level: float = 0.9) -> tuple[Tensor, Tensor]:
        """A two-sided confidence interval for every entry of a function.

        ``level``: the probability with which an interval is to hold the truth.
        """
        value, error = self.standard_errors(f)
        z = math.sqrt(2) * float(torch.erfinv(torch.tensor(_level(level), dtype=torch.float64)))
        return value - z * error, value + z * error

    def distance(self, x: Point) -> float:
        """cᵀC⁻¹c of the coordinates c of log_x̂(x): on average ``dim`` at the truth."""
        v = flatten(self.manifold.log(self.point, x))[None]
        c = coordinates(self.manifold, self.point, self.basis, v)[0]
        values, vectors = torch.linalg.eigh(self.matrix)
        keep = values > values.max() * rounding_share(len(values), values.dtype)
        return float(((vectors.mT @ c)[keep].square() / values[keep]).sum())

    def contains(self, x: Point, level: float = 0.9) -> bool:
        """Whether a point lies in the confidence region, an ellipsoid of the tangent space bent onto the manifold.

        ``level``: the probability with which the region is to hold the truth.
        """
        return self.distance(x) <= self._radius(level) ** 2

    def boundary(
        self, count: int = 100, level: float = 0.9, *, generator: torch.Generator | None = None
    ) -> Point:
        """Points on the boundary of the confidence region, for drawing it.

        A closed curve for dimension 2.

        ``level``: as of ``contains``. ``generator``: of the directions in more than two dimensions.
        """
        values, vectors = torch.linalg.eigh(self.matrix)
        dim = len(values)
        if dim == 2:
            angle = torch.linspace(0, 2 * math.pi, count, dtype=values.dtype)
            directions = torch.stack([angle.cos(), angle.sin()], 1).to(values)
        else:
            directions = torch.randn(
                count, dim, generator=generator, dtype=values.dtype, device=values.device
            )
            directions = directions / directions.norm(dim=1, keepdim=True)
        c = self._radius(level) * (directions * values.clamp(min=0).sqrt()) @ vectors.mT
        v = unflatten(c @ self.basis, self.point)
        if isinstance(self.point, Tensor):
            return self.manifold.retract(self.point.expand_as(v), v)
        points = {name: leaf.expand_as(v[name]) for name, leaf in self.point.items()}
        return self.manifold.retract(points, v)

    def _radius(self, level: float) -> float:
        from scipy.stats import chi2

        return math.sqrt(chi2.ppf(_level(level), len(self.matrix) - len(self.flat)))

    def check_minimum(self, gradient: Tangent) -> None:
        """Warn unless the minimum is less than a tenth of a standard error away.

        ``gradient``: of the loss at the estimate.
        """
        # how far a minimum is needs no digits: the nearby information will do
        near = self._preconditioned
        if isinstance(near, PreconditionedFisher) and "_inverse" not in self.__dict__:
            step = near.precondition(gradient, 0.0)
            inverse = near.precondition(step, 0.0)
        else:
            # what rounding has left of a gradient points anywhere
            step = self._solve(gradient, strict=False)
            inverse = self._solve(step, strict=False)
        length = float(self.manifold._inner(self.point, step, step))
        image = step if self.scores is None else self.scores._matvec(inverse)
        variance = float(self.manifold._inner(self.point, inverse, image)) / self.count
        # the length of the step to the minimum over the standard error in its direction
        ahead = length / math.sqrt(abs(variance)) if variance else 0.0
        if ahead > NO_MINIMUM:
            warn(
                f"the estimate is no minimum of the loss: the next step would be {ahead:.2g} "
                "standard errors long; run minimize until it converges",
                RuntimeWarning,
            )


def covariance(
    operator: FisherOperator,
    count: float,
    *,
    gradient: Tangent,
    scores: FisherOperator | None = None,
    nearby: FisherOperator | None = None,
) -> Covariance:
    """The covariance of a maximum-likelihood estimate from the information at it.

    ``operator``: F or H. ``count``: N. ``gradient``: of the loss; warns unless it is near 0.
    ``scores``: S, for the sandwich A⁻¹ S A⁻¹, which does not trust the likelihood where A is the
    Hessian. ``nearby``: see ``Covariance``. Raises ValueError if the information is not finite or
    has a negative eigenvalue.
    """
    found = Covariance(operator, count, scores, nearby)
    found.check_minimum(reorder_like(gradient, found.point))
    return found


def other_representative(manifold: Manifold, x: Point) -> Point | None:
    """The same point of a quotient by another array, at random.

    None where points have a single one.
    """
    device = leaves(x)[0].device
    generator = torch.Generator(device=device).manual_seed(0)
    for _ in range(DRAWS):
        with device:  # whatever the default is
            change = manifold._symmetry(generator)
        if change is None:
            return None
        other = change(x)
        # of a line the change may be none
        if not all(torch.equal(a, b) for a, b in zip(leaves(x), leaves(other), strict=True)):
            return other
    return None


def check_function(manifold: Manifold, x: Point, f: Callable[[Any], Tensor], name: str) -> None:
    """Raise unless a function has one value for all representatives of a point of a quotient.

    ``name``: of the function, for the message. One random representative is tried.
    """
    if (other := other_representative(manifold, x)) is None:
        return
    with torch.no_grad():
        value, again = f(x), f(other)
    off = float((value - again).abs().max())
    size = float(value.abs().max())
    if math.isfinite(off) and off > tolerance(leaves(x)[0].dtype) * max(size, _slope(f, x)):
        raise ValueError(not_a_function(manifold, name, off))


def _slope(f: Callable[[Any], Tensor], x: Point) -> float:
    """How much a function changes per unit of its argument, the rounding of a function that is nearly 0."""
    rows = torch.autograd.functional.jacobian(lambda v: f(unflatten(v, x)), flatten(x))  # type: ignore[no-untyped-call]
    return float(rows.norm()) * float(flatten(x).norm())


def not_a_function(manifold: Manifold, name: str, off: float) -> str:
    """The sentence for a function that depends on the representative of a point."""
    remedy = "a manifold whose points are the arrays themselves"
    if type(manifold).__name__ == "Grassmann":
        remedy = f"Stiefel({manifold.n}, {manifold.p})"  # type: ignore[attr-defined]
    return (
        f"{name} is no function of the points of {manifold!r}: for another representative of the "
        f"same point it differs by {off:.2g}; use {remedy}, or make it depend on the point alone, "
        "as u @ u.mT does"
    )


def _no_minimum(least: float, largest: float) -> str:
    size = "" if math.isinf(least) else f" {least:.2e} (the largest is {largest:.2e})"
    return (
        f"the information at the estimate has the negative eigenvalue{size}: this is no minimum of "
        "the loss; run minimize to convergence, with escape=True, or from another start"
    )


def _unidentified(where: str) -> str:
    return (
        f"f is not identified: it changes along {where} in which the Fisher information is 0; fix "
        "the model's invariance, or take a function that does not depend on it"
    )


def _level(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    return level
