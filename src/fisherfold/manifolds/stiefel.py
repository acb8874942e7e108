r"""The Stiefel manifold of orthonormal p-frames in R^n, with the Euclidean (embedded) metric.

``P_x v = v - x sym(xᵀv)``. Of its retractions only the polar one and the exponential map are of second order for this
metric; QR and Cayley are of first order (the Cayley transform belongs to the canonical metric).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds import frames


@dataclass(frozen=True, repr=False)
class Stiefel(frames.Frames):
    """The n×p matrices with orthonormal columns.

    Args:
        n: the number of rows.
        p: the number of columns, at most n.
        retraction: ``"polar"`` or ``"exp"`` (order 2), ``"qr"`` or ``"cayley"`` (order 1).
        transport_method: only ``"projection"``.

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

    def __post_init__(self) -> None:
        self._check_options("n", "p")
        if self.p > self.n:
            raise ValueError(f"p of Stiefel must be at most n={self.n}, got {self.p}")

    @property
    def dim(self) -> int:
        """The dimension, np - p(p + 1)/2."""
        return self.n * self.p - self.p * (self.p + 1) // 2

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        overlap = frames.cross(x, v)
        return frames.minus_product(v, x, 0.5 * (overlap + overlap.mT))

    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        overlap = frames.cross(x, e)
        return self._project(x, h - 0.5 * v @ (overlap + overlap.mT).to(v.dtype))

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        if method == "polar":
            return frames.polar(x + v)
        if method == "qr":
            return frames.qr(x + v)
        return _cayley(x, v) if method == "cayley" else self._exp(x, v)

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        overlap = frames.cross(x, v)
        return frames.geodesic(x, v, 0.5 * (overlap - overlap.mT))


def _cayley(x: Tensor, v: Tensor) -> Tensor:
    """The Cayley transform ``(I - W/2)^{-1} (I + W/2) x`` of ``W = (Pv) xᵀ - x (Pv)ᵀ``, ``P = I - ½xxᵀ``."""
    # W = a bᵀ has rank 2p, so this is x + a (I - ½bᵀa)^{-1} bᵀx. Without the ½ in P it would not be a retraction at
    # all: rotations within the frame would go twice as far. The polar factor at the end removes rounding, which the
    # transform itself would let add up from step to step.
    turned = v - 0.5 * x @ frames.cross(x, v).to(x.dtype)
    x = x.expand_as(turned)
    a = torch.cat([turned, x], dim=-1)
    b = torch.cat([x, -turned], dim=-1)
    eye = torch.eye(a.shape[-1], dtype=torch.float64, device=x.device)
    # never singular but for the rounding of huge steps, which must come back as points that can be rejected
    weights = torch.linalg.solve_ex(eye - 0.5 * frames.cross(b, a), frames.cross(b, x)).result
    return frames.polar(x + a @ weights.to(x.dtype))
