r"""The rotations of R^n, the special orthogonal group SO(n), with the metric of the n×n matrices around it.

Tangent vectors at ``x`` are ``x A`` with A skew, ``P_x v = x skew(xᵀv)`` and ``Exp_x(x A) = x expm(A)``. The metric is
bi-invariant; a rotation of R³ by the angle θ is ``√2 θ`` away from the identity. With ``R = xᵀy`` the midpoint of two
rotations is ``x R^{1/2}``, where ``R^{1/2}`` is the polar factor of ``I + R``, and the logarithm is ``2 artanh T`` with
``T = (R - I)(R + I)⁻¹``, the tangents of half the angles, which are halved further by ``T (I + (I - T²)^{1/2})⁻¹``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds import frames
from fisherfold.manifolds.algebra import safe_norm, static_all
from fisherfold.manifolds.base import tolerance

# half angles up to π/2 are halved so often, and artanh x = Σ x^{2k+1}/(2k+1) is exact to rounding at tan(π/32)
_HALVINGS, _TERMS = 4, 9


@dataclass(frozen=True, repr=False)
class Rotations(frames.Frames):
    """The n×n rotation matrices, orthogonal and of determinant 1.

    Args:
        n: the dimension of the space that is rotated, at least 2.
        retraction: ``"cayley"``, ``"polar"`` or ``"exp"`` (order 2), ``"qr"`` (order 1).
        transport_method: ``"projection"`` or ``"parallel"`` (along the shortest geodesic).

    Examples:
        >>> rotations = Rotations(3)
        >>> x = rotations.random_point(generator=torch.Generator().manual_seed(0))
        >>> round(float(torch.linalg.det(x)), 6)
        1.0
    """

    retractions: ClassVar[Mapping[str, int]] = {"cayley": 2, "polar": 2, "exp": 2, "qr": 1}
    transports: ClassVar[tuple[str, ...]] = ("projection", "parallel")

    n: int
    retraction: str = field(default="cayley", kw_only=True)
    transport_method: str = field(default="projection", kw_only=True)

    def __post_init__(self) -> None:
        self._check_options("n")
        if self.n < 2:
            raise ValueError(f"n of Rotations must be at least 2, got {self.n}")

    @property
    def dim(self) -> int:
        """The dimension, n (n - 1)/2."""
        return self.n * (self.n - 1) // 2

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return (self.n, self.n)

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return x @ _skew(x.mT @ v)

    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        overlap = x.mT @ e
        return self._project(x, h - 0.5 * v @ (overlap + overlap.mT))

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        if method == "exp":
            return self._exp(x, v)
        if method == "cayley":
            half = 0.5 * _skew(x.mT @ v)
            eye = torch.eye(self.n, dtype=x.dtype, device=x.device)
            y = _renewed(x @ torch.linalg.solve_ex(eye - half, eye + half).result)
        else:
            y = frames.polar(x + v) if method == "polar" else frames.qr(x + v)
        # only the rounding of huge steps makes a reflection, which must come back as a point that can be rejected
        return torch.where(torch.linalg.det(y.detach())[..., None, None] > 0, y, torch.nan)

    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        if method == "projection":
            return self._project(y, v)
        root = _root(x.mT @ y)
        return y @ root.mT @ _skew(x.mT @ v) @ root

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        return _renewed(x @ frames.matrix_exp(_skew(x.mT @ v)))

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        eye = torch.eye(self.n, dtype=x.dtype, device=x.device)
        # y - x is exact for neighbours, so that small angles keep their digits
        tangent = _skew(
            torch.linalg.solve(_unless_opposite(x.mT @ y + eye), x.mT @ (y - x), left=False)
        )
        for _ in range(_HALVINGS):
            root = frames.rotation_between(eye + tangent).mT @ (eye + tangent)
            tangent = _skew(torch.linalg.solve(eye + root, tangent, left=False))
        square, total = tangent @ tangent, eye / (2 * _TERMS + 1)
        for k in reversed(range(_TERMS)):
            total = total @ square + eye / (2 * k + 1)
        return 2.0 ** (_HALVINGS + 1) * x @ _skew(tangent @ total)

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        return safe_norm(self._log(x, y), dim=(-2, -1))

    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        frame = frames.random_frame(shape, generator=generator, dtype=dtype, device=device)
        sign = torch.linalg.det(frame).sign()[..., None, None]
        return torch.cat([sign * frame[..., :1], frame[..., 1:]], dim=-1)

    def _complaint(self, x: Tensor) -> str | None:
        if bool((torch.linalg.det(x) > 0).all()):
            return None
        return "its determinant is -1, so it is a reflection; flip one column"


def _skew(matrix: Tensor) -> Tensor:
    return 0.5 * (matrix - matrix.mT)


def _renewed(y: Tensor) -> Tensor:
    """Two Newton-Schulz steps to the polar factor, so that rounding does not add up; NaN after steps far too long."""
    for _ in range(2):
        y = 1.5 * y - 0.5 * y @ (y.mT @ y)
    gap = y.detach().mT @ y.detach() - torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    return torch.where(
        gap.abs().amax(dim=(-2, -1), keepdim=True) < tolerance(y.dtype), y, torch.nan
    )


def _root(turn: Tensor) -> Tensor:
    """The rotation by half the angles, the polar factor of I + R."""
    eye = torch.eye(turn.shape[-1], dtype=turn.dtype, device=turn.device)
    return frames.rotation_between(_unless_opposite(turn + eye))


def _unless_opposite(total: Tensor) -> Tensor:
    """I + R, unless an angle of R is π and the geodesic may turn either way."""
    opposite = (
        torch.linalg.svdvals(total.detach())[..., -1:, None] <= 8 * torch.finfo(total.dtype).eps
    )
    fine = static_all(~opposite)
    if fine is None:
        return torch.where(opposite, torch.nan, total)
    if not fine:
        raise ValueError(
            "y is half a turn away from x: there is no unique shortest geodesic between them"
        )
    return total
