"""Standard errors on manifolds: the inverse Fisher information on the tangent space, and what follows from it.

    C = (N F)⁻¹ in an orthonormal basis b_1..b_m of the tangent space at the estimate x̂,
    Cov f(x̂) = J C Jᵀ,  J_i = Df(x̂)[b_i]      (delta method),
    {R_x̂(Σ c_i b_i) : cᵀC⁻¹c ≤ χ²_m}          (confidence region).

A quotient (Grassmann) has horizontal tangent vectors, so that f must be a function of the subspace. Directions that the
data do not identify, such as rotations of factor loadings, have no variance: f must not change along them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fisherfold.fisher.blocks import rounding_share
from fisherfold.fisher.operators import FisherOperator
from fisherfold.fisher.solve import coordinates, in_basis, tangent_basis
from fisherfold.manifolds.base import (
    Manifold,
    Point,
    Tangent,
    flatten,
    reorder_like,
    tolerance,
    unflatten,
)
from fisherfold.warn import warn

LARGEST = 4096  # dimensions for which matrices are formed
NO_MINIMUM = 0.1  # standard errors between an estimate and the minimum


@dataclass(frozen=True)
class Covariance:
    """The covariance of an estimate on the tangent space.

    Attributes:
        manifold: the manifold.
        point: the estimate x̂.
        basis: orthonormal tangent vectors, flattened, as rows; shape (dim, entries of the point).
        matrix: C, of the coordinates in that basis; shape (dim, dim).
        flat: directions that the data do not identify, as rows of coordinates; C is 0 there.
    """

    manifold: Manifold
    point: Point
    basis: Tensor = field(repr=False)
    matrix: Tensor = field(repr=False)
    flat: Tensor = field(repr=False)

    def of(self, f: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
        """A function of the estimate and its covariance, by the delta method.

        ``f``: a torch function of the point, which returns a tensor, or a dictionary of tensors (such as a point of a
        product), whose entries then follow each other as one vector. Raises ValueError if f changes along directions
        that the data do not identify.
        """

        def entries(x: Any) -> Tensor:
            value = f(x)
            return flatten(value) if isinstance(value, dict) else value

        value = entries(self.point)
        ambient = torch.autograd.functional.jacobian(
            lambda flat: entries(unflatten(flat, self.point)), flatten(self.point)
        )  # type: ignore[no-untyped-call]
        slopes = self.basis @ ambient.reshape(value.numel(), -1).mT
        if len(self.flat):
            lost = float((self.flat @ slopes).norm())
            if lost > 1e-4 * float(slopes.norm()):
                raise ValueError(
                    f"f is not identified: it changes along {len(self.flat)} directions in which the Fisher "
                    "information is 0; fix the model's invariance, or take a function that does not depend on it"
                )
        return value.detach(), (slopes.mT @ self.matrix @ slopes).detach()

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
        v = self.manifold.log(self.point, x)
        c = torch.stack(
            [self.manifold.inner(self.point, unflatten(b, self.point), v) for b in self.basis]
        )
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
        """Points on the boundary of the confidence region, for drawing it: a closed curve for dimension 2.

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


def covariance(
    operator: FisherOperator,
    count: float,
    *,
    gradient: Tangent,
    scores: FisherOperator | None = None,
) -> Covariance:
    """The covariance of a maximum-likelihood estimate from the Fisher information at it.

    ``count``: N. ``gradient``: of the loss; warns unless it is near 0. ``scores``: the empirical Fisher matrix, for the
    sandwich F⁻¹ (1/N) E[g gᵀ] F⁻¹ that does not trust the likelihood. Raises ValueError if the manifold is too large,
    or F is not finite or has a negative eigenvalue.
    """
    manifold, point = operator.manifold, operator.point
    if manifold.dim > LARGEST:
        raise ValueError(
            f"a covariance forms a matrix of the dimension of the manifold, {manifold.dim} > {LARGEST}"
        )
    basis = tangent_basis(manifold, point).mT
    information = in_basis(operator, basis)
    if not bool(torch.isfinite(information).all()):
        raise ValueError("the Fisher information at the estimate is not finite")
    values, vectors = torch.linalg.eigh(information)
    largest, least = float(values.abs().max()), float(values[0])
    # along an invariance of the model the curvature of a loss is as small as the gradient that a run has left
    if least < -10 * tolerance(values.dtype) * largest:
        raise ValueError(
            f"the information at the estimate has the negative eigenvalue {least:.2e} (the largest is {largest:.2e}): "
            "this is no minimum of the loss; run minimize to convergence, or from another start"
        )
    # products of gradients lose what is below the square root of the precision
    keep = values > largest * 1e2 * rounding_share(len(values), values.dtype)
    matrix = inverse = (vectors[:, keep] / values[keep]) @ vectors[:, keep].mT
    if scores is not None:
        matrix = inverse @ in_basis(scores, basis) @ inverse
    step = (
        inverse
        @ coordinates(
            manifold, point, basis, flatten(reorder_like(gradient, manifold.point_shape))[None]
        )[0]
    )
    # the length of the step to the minimum over the standard error in its direction
    ahead = float(step @ step) / math.sqrt(abs(float(step @ matrix @ step)) / count or math.inf)
    if ahead > NO_MINIMUM:
        warn(
            f"the estimate is no minimum of the loss: the next step would be {ahead:.2g} standard errors long; run "
            "minimize until it converges",
            RuntimeWarning,
        )
    return Covariance(manifold, point, basis, matrix / count, vectors[:, ~keep].mT)


def _level(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    return level
