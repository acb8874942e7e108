r"""The Grassmann manifold of p-dimensional subspaces, each written as an orthonormal n×p frame.

A point is the span of ``x``, so ``x`` and ``xQ`` (Q a p×p rotation) are the same point; tangent
vectors are horizontal, ``xᵀv = 0``, with ``P_x v = v - x xᵀv``. Polar, QR and Cholesky retractions
all give ``span(x + v)`` and are of second order. Operations between two points first align the
second representative: with ``xᵀy = U cos(θ) Vᵀ`` and ``Q = U Vᵀ``, ``xᵀ(y Qᵀ) = U cos(θ) Uᵀ`` is
symmetric, and then everything is a function of that p×p matrix and of ``y Qᵀ``. It can be
differentiated wherever no principal angle is a right one (``frames``), from a point to itself too;
only the distance has a kink there, where its derivative is given as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds import frames
from fisherfold.manifolds.algebra import safe_norm


@dataclass(frozen=True, repr=False)
class Grassmann(frames.Frames):
    """The p-dimensional subspaces of R^n, or of C^n.

    Args:
        n: the dimension of the surrounding space.
        p: the dimension of the subspaces, less than n.
        retraction: ``"polar"``, ``"qr"``, ``"cholesky"`` or ``"exp"``, all of order 2. After the
            polar one the projection transport needs no alignment, so it is the one for stored
            directions.
        transport_method: ``"projection"`` or ``"parallel"`` (along the shortest geodesic).
        complex: whether the subspaces are those of C^n.

    Examples:
        >>> grassmann = Grassmann(100, 5)
        >>> x = grassmann.random_point(generator=torch.Generator().manual_seed(0))
        >>> v = grassmann.random_tangent(x, generator=torch.Generator().manual_seed(1))
        >>> float(grassmann.dist(x, grassmann.exp(x, 1e-9 * v))) - 1e-9 < 1e-16
        True
    """

    retractions: ClassVar[Mapping[str, int]] = {"polar": 2, "qr": 2, "cholesky": 2, "exp": 2}
    transports: ClassVar[tuple[str, ...]] = ("projection", "parallel")
    projector_structure: ClassVar[str] = "left"

    n: int
    p: int
    retraction: str = field(default="polar", kw_only=True)
    transport_method: str = field(default="projection", kw_only=True)
    complex: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._check_options("n", "p")
        if self.p >= self.n:
            raise ValueError(
                f"p of Grassmann, the dimension of the subspaces, must be less than n={self.n}, "
                f"got {self.p}"
            )

    @property
    def dim(self) -> int:
        """The dimension, p (n - p); twice that of complex subspaces."""
        return (2 if self.complex else 1) * self.p * (self.n - self.p)

    def alignment(self, x: Tensor, y: Tensor) -> Tensor:
        """The orthogonal factor of xᵀy: the rotation of y against the frame next to x."""
        return frames.rotation_between(frames.cross(x, y)).to(x.dtype)

    def _symmetry(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        return frames.random_rotation(self.p, self.complex, generator)

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return _horizontal(x, v)

    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        return _horizontal(x, h) - v @ frames.cross(x, e).to(v.dtype)

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        if method == "exp":
            return self._exp(x, v)
        orthonormalize = {"polar": frames.polar, "qr": frames.qr, "cholesky": frames.cholesky_qr}[
            method
        ]
        return orthonormalize(x + v)

    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        rotation, cosines = _alignment(x, y)
        if method == "projection":
            return _horizontal(y, v) @ rotation
        # v - (x + y')(I + cos θ)^{-1} y'ᵀv with y' = y Qᵀ; for p = 1 it is the sphere's formula.
        aligned = y @ rotation.mH
        eye = torch.eye(self.p, dtype=cosines.dtype, device=x.device)
        weights = torch.linalg.solve(eye + cosines, frames.cross(aligned, v)).to(x.dtype)
        return (v - (x + aligned) @ weights) @ rotation

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        return frames.geodesic(x, v)

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        """``B f(cos θ)``, f = θ / sin θ, with B the horizontal part of the aligned y."""
        rotation, cosines = _alignment(x, y)
        # Twice: the second pass takes out what the rounding of the first left along x, so that tiny
        # angles keep their digits. y - x is exact for neighbouring representatives.
        normal = _horizontal(x, _horizontal(x, y - x)) @ rotation.mH
        return normal @ frames.angle_over_sine(cosines).to(x.dtype)

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        return safe_norm(self._log(x, y), dim=(-2, -1))


def _horizontal(x: Tensor, v: Tensor) -> Tensor:
    return frames.minus_product(v, x, frames.cross(x, v))


def _alignment(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation Q that brings ``y Qᵀ`` next to x, and the matrix ``xᵀy Qᵀ`` of cosines."""
    overlap = frames.cross(x, y)
    rotation = frames.rotation_between(overlap)
    return rotation.to(x.dtype), frames.symmetric(overlap @ rotation.mH)
