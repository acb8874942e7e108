r"""The rotations of R^n and the unitary matrices, with the metric of the matrices around them.

Tangent vectors at ``x`` are ``x A`` with A skew, ``P_x v = x skew(xᵀv)`` and ``Exp_x(x A) = x
expm(A)``. The metric is bi-invariant; a rotation of R³ by the angle θ is ``√2 θ`` away from the
identity. With ``R = xᵀy`` the midpoint of two rotations is ``x R^{1/2}``, where ``R^{1/2}`` is the
polar factor of ``I + R``, and the logarithm is ``2 artanh T`` with ``T = (R - I)(R + I)⁻¹``, the
tangents of half the angles, which are halved further by ``T (I + (I - T²)^{1/2})⁻¹``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.manifolds import frames
from fisherfold.manifolds.algebra import safe_norm
from fisherfold.manifolds.base import tolerance
from fisherfold.manifolds.frames import skew

# half angles up to π/2 are halved so often, and artanh x = Σ x^{2k+1}/(2k+1) is exact to rounding
# at tan(π/32)
_HALVINGS = 4
_TERMS = 9
# rounding units of 2 cos θ/2 within which an angle θ is half a turn
_HALF_TURN = 8


class MatrixGroup(frames.Frames):
    """What rotations and unitary matrices share."""

    retractions: ClassVar[Mapping[str, int]] = {"cayley": 2, "polar": 2, "exp": 2, "qr": 1}
    transports: ClassVar[tuple[str, ...]] = ("projection", "parallel")
    n: int

    @property
    @override
    def point_shape(self) -> tuple[int, ...]:
        return (self.n, self.n)

    @override
    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return x @ skew(x.mH @ v)

    @override
    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        return self._project(x, h - v @ frames.symmetric(x.mH @ e))

    @override
    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        if method == "exp":
            return self._exp(x, v)
        if method == "cayley":
            half = 0.5 * skew(x.mH @ v)
            eye = _eye_like(x)
            return _renewed(x @ torch.linalg.solve_ex(eye - half, eye + half).result)
        return frames.polar(x + v) if method == "polar" else frames.qr(x + v)

    @override
    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        if method == "projection":
            return self._project(y, v)
        root = frames.rotation_between(_unless_opposite(x.mH @ y + _eye_like(x)))
        return y @ root.mH @ skew(x.mH @ v) @ root

    @override
    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        return _renewed(x @ frames.matrix_exp(skew(x.mH @ v)))

    @override
    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        eye = _eye_like(x)
        # y - x is exact for neighbours, so that small angles keep their digits
        total = _unless_opposite(x.mH @ y + eye)
        tangent = skew(torch.linalg.solve(total, x.mH @ (y - x), left=False))
        for _ in range(_HALVINGS):
            root = frames.rotation_between(eye + tangent).mH @ (eye + tangent)
            tangent = skew(torch.linalg.solve(eye + root, tangent, left=False))
        square, total = tangent @ tangent, eye / (2 * _TERMS + 1)
        for k in reversed(range(_TERMS)):
            total = total @ square + eye / (2 * k + 1)
        return 2.0 ** (_HALVINGS + 1) * x @ skew(tangent @ total)

    @override
    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        # 2 sin θ/2 and 2 cos θ/2 of all angles; half a turn has a length, although no one direction
        chords = torch.linalg.svdvals((y - x).detach())
        across = torch.linalg.svdvals((y + x).detach())
        half_turn = across[..., -1] <= _HALF_TURN * torch.finfo(x.dtype).eps
        angles = 2 * torch.atan2(chords, across.flip(-1))
        other = torch.where(half_turn[..., None, None], x, y)
        length = safe_norm(self._log(x, other), dim=(-2, -1))
        return torch.where(half_turn, torch.linalg.vector_norm(angles, dim=-1), length)


@dataclass(frozen=True, repr=False)
class Rotations(MatrixGroup):
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

    @override
    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        y = super()._retract(x, v, method)
        # only the rounding of huge steps makes a reflection: a point to be rejected
        return torch.where(torch.linalg.det(y.detach())[..., None, None] > 0, y, torch.nan)

    @override
    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        frame = frames.random_frame(shape, generator=generator, dtype=dtype, device=device)
        sign = torch.linalg.det(frame).sign()[..., None, None]
        return torch.cat([sign * frame[..., :1], frame[..., 1:]], dim=-1)

    @override
    def _complaint(self, x: Tensor) -> str | None:
        if bool((torch.linalg.det(x) > 0).all()):
            return None
        return "its determinant is -1, so it is a reflection; flip one column"


@dataclass(frozen=True, repr=False)
class Unitary(MatrixGroup):
    """The unitary n×n matrices, the group U(n).

    Args:
        n: the number of rows.
        retraction: ``"cayley"``, ``"polar"`` or ``"exp"`` (order 2), ``"qr"`` (order 1).
        transport_method: ``"projection"`` or ``"parallel"`` (along the shortest geodesic).

    Examples:
        >>> x = Unitary(2).random_point(generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(x.mH @ x, torch.eye(2, dtype=x.dtype))
        True
    """

    complex = True

    n: int
    retraction: str = field(default="cayley", kw_only=True)
    transport_method: str = field(default="projection", kw_only=True)

    def __post_init__(self) -> None:
        self._check_options("n")

    @property
    def dim(self) -> int:
        """The dimension, n²."""
        return self.n**2


def _eye_like(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def _renewed(y: Tensor) -> Tensor:
    """Two Newton-Schulz steps to the polar factor; NaN after steps far too long."""
    for _ in range(2):
        y = 1.5 * y - 0.5 * y @ (y.mH @ y)
    gap = (y.detach().mH @ y.detach() - _eye_like(y)).abs().amax(dim=(-2, -1), keepdim=True)
    return torch.where(gap < tolerance(y.dtype), y, torch.nan)


def _unless_opposite(total: Tensor) -> Tensor:
    """I + R; NaN or an error where an angle of R is π and the geodesic may turn either way."""
    opposite = frames.antipodal(
        torch.linalg.svdvals(total.detach())[..., -1:, None],
        _HALF_TURN * torch.finfo(total.dtype).eps,
        "y is half a turn away from x: there is no unique shortest geodesic between them",
    )
    return torch.where(opposite, torch.nan, total)
