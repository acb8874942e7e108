r"""The Stiefel manifold of orthonormal p-frames in R^n, with the Euclidean (embedded) metric.

``P_x v = v - x sym(xᵀv)``. Of its retractions only the polar one and the exponential map are of
second order for this metric; QR and Cayley are of first order (the Cayley transform belongs to the
canonical metric).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds import frames
from fisherfold.manifolds.algebra import safe_norm, static_all
from fisherfold.manifolds.base import tolerance

# geodesics that are tried for the logarithm, which converges linearly: in 10 at a distance of 0.7
_SHOTS = 300
# pieces of a geodesic along which a vector is carried by projections
_PARTS = 4


@dataclass(frozen=True, repr=False)
class Stiefel(frames.Frames):
    """The n×p matrices with orthonormal columns, real or complex.

    Args:
        n: the number of rows.
        p: the number of columns, at most n.
        retraction: ``"polar"`` or ``"exp"`` (order 2), ``"qr"`` or ``"cayley"`` (order 1).
        transport_method: only ``"projection"``.
        complex: whether the frames are complex.

    Examples:
        >>> stiefel = Stiefel(5, 2)
        >>> stiefel.dim, stiefel.retraction_order, Stiefel(5, 2, retraction="qr").retraction_order
        (7, 2, 1)
        >>> x = stiefel.random_point(generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(x.T @ x, torch.eye(2, dtype=x.dtype))
        True
    """

    retractions: ClassVar[Mapping[str, int]] = {"polar": 2, "qr": 1, "cayley": 1, "exp": 2}

    n: int
    p: int
    retraction: str = field(default="polar", kw_only=True)
    transport_method: str = field(default="projection", kw_only=True)
    complex: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._check_options("n", "p")
        if self.p > self.n:
            raise ValueError(f"p of Stiefel must be at most n={self.n}, got {self.p}")

    @property
    def dim(self) -> int:
        """The dimension, np - p(p + 1)/2; 2np - p² of complex frames."""
        if self.complex:
            return 2 * self.n * self.p - self.p**2
        return self.n * self.p - self.p * (self.p + 1) // 2

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return frames.minus_product(v, x, frames.symmetric(frames.cross(x, v)))

    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        overlap = frames.symmetric(frames.cross(x, e))
        return self._project(x, h - v @ overlap.to(v.dtype))

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        if method == "polar":
            return frames.polar(x + v)
        if method == "qr":
            return frames.qr(x + v)
        return _cayley(x, v) if method == "cayley" else self._exp(x, v)

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        return frames.geodesic(x, v, frames.skew(frames.cross(x, v)))

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        """By shooting: what a geodesic misses is carried back along it to its velocity."""
        start = self._project(x, y - x)
        v = _stretched(start, y - x)
        for _ in range(_SHOTS):
            end = self._exp(x, v)
            step = _stretched(self._project(end, y - end), y - end)
            for part in reversed(range(_PARTS)):
                at = self._exp(x, v * (part / _PARTS)) if part else x
                step = _stretched(self._project(at, step), step)
            v = v + step
            change = torch.linalg.vector_norm(step.detach(), dim=(-2, -1))
            if static_all(change <= 8 * torch.finfo(x.dtype).eps):
                break
        missed = torch.linalg.vector_norm((y - end).detach(), dim=(-2, -1))
        if static_all(missed <= tolerance(x.dtype)) is False:
            raise ValueError("y is too far from x: no geodesic was found between them")
        return v

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        return safe_norm(self._log(x, y), dim=(-2, -1))


def _stretched(v: Tensor, like: Tensor) -> Tensor:
    """A matrix with the length of another one."""
    length = safe_norm(v, dim=(-2, -1), keepdim=True)
    found = length > 0
    ratio = safe_norm(like, dim=(-2, -1), keepdim=True) / torch.where(found, length, 1.0)
    return v * torch.where(found, ratio, 1.0)


def _cayley(x: Tensor, v: Tensor) -> Tensor:
    """The Cayley transform ``(I - W/2)^{-1} (I + W/2) x`` of ``W = (Pv) xᵀ - x (Pv)ᵀ``.

    Here ``P = I - ½xxᵀ``.
    """
    # W = a bᵀ has rank 2p, so this is x + a (I - ½bᵀa)^{-1} bᵀx. Without the ½ in P it would not be
    # a retraction at all: rotations within the frame would go twice as far. The polar factor at the
    # end removes rounding, which the transform itself would let add up from step to step.
    turned = v - 0.5 * x @ frames.cross(x, v).to(x.dtype)
    x = x.expand_as(turned)
    a = torch.cat([turned, x], dim=-1)
    b = torch.cat([x, -turned], dim=-1)
    gram = frames.cross(b, a)
    eye = torch.eye(a.shape[-1], dtype=gram.dtype, device=x.device)
    # never singular but for the rounding of huge steps, which must come back as points that can be
    # rejected
    weights = torch.linalg.solve_ex(eye - 0.5 * gram, frames.cross(b, x)).result
    return frames.polar(x + a @ weights.to(x.dtype))
