r"""The unit sphere of R^n: ``P_x v = v - <x, v> x`` and ``R_x(v) = (x + v) / |x + v|``.

The functions at the end work on the last axis of any tensor, so that the oblique manifold (many spheres) is the same
code. Angles are ``2 atan2(|x - y|, |x + y|)``: unlike the arc cosine this keeps all digits near 0 and near π.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds.base import Manifold, positive_integer


@dataclass(frozen=True, repr=False)
class Sphere(Manifold):
    """The unit vectors of R^n.

    Args:
        n: the dimension of the surrounding space, at least 2.
        retraction: ``"normalize"`` or ``"exp"``, both of order 2.
        transport_method: ``"projection"`` or ``"parallel"`` (along the shortest geodesic).

    Examples:
        >>> sphere = Sphere(3)
        >>> x, y = torch.eye(3)[0], torch.eye(3)[1]
        >>> sphere.dist(x, y)
        tensor(1.5708)
        >>> sphere.retract(x, sphere.project(x, torch.tensor([5.0, 1.0, 0.0])))
        tensor([0.7071, 0.7071, 0.0000])
    """

    retractions: ClassVar[Mapping[str, int]] = MappingProxyType({"normalize": 2, "exp": 2})
    transports: ClassVar[tuple[str, ...]] = ("projection", "parallel")

    n: int
    retraction: str = field(default="normalize", kw_only=True)
    transport_method: str = field(default="projection", kw_only=True)

    def __post_init__(self) -> None:
        positive_integer(self.n, "n of Sphere")
        if self.n < 2:
            raise ValueError(f"n of Sphere must be at least 2, got {self.n}")
        self._choice("retraction", None)
        self._choice("transport_method", None)

    @property
    def dim(self) -> int:
        """The dimension, n - 1."""
        return self.n - 1

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return (self.n,)

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return project_rows(x, v)

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        return normalize_rows(x + v) if method == "normalize" else exp_rows(x, v)

    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        return project_rows(y, v) if method == "projection" else parallel_rows(x, y, v)

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        return exp_rows(x, v)

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        return log_rows(x, y)

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        return angle_rows(x, y)

    def _random(
        self, shape: tuple[int, ...], generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        return normalize_rows(torch.randn(shape, generator=generator, dtype=dtype, device=device))

    def _constraint_error(self, x: Tensor) -> Tensor:
        return norm_error_rows(x)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def project_rows(x: Tensor, v: Tensor) -> Tensor:
    """The projection of every row of ``v`` orthogonally to the same row of ``x``.

    Args:
        x: unit rows.
        v: rows.

    Returns:
        ``v - <x, v> x``, row by row.
    """
    return v - (x * v).sum(dim=-1, keepdim=True) * x


def normalize_rows(y: Tensor) -> Tensor:
    """Every row over its length.

    Args:
        y: rows, none of them zero.

    Returns:
        Unit rows.
    """
    return y / _norm(y)


def exp_rows(x: Tensor, v: Tensor) -> Tensor:
    """The great circles ``cos|v| x + sin|v| v/|v|``, normalised so that rounding does not add up over many steps.

    Args:
        x: unit rows.
        v: tangent rows.

    Returns:
        Unit rows.
    """
    angle = _norm(v)
    return normalize_rows(angle.cos() * x + torch.sinc(angle / torch.pi) * v)


def angle_rows(x: Tensor, y: Tensor) -> Tensor:
    """The angles between the rows, with all digits near 0 and near π.

    Args:
        x: unit rows.
        y: unit rows.

    Returns:
        One angle per row, in [0, π].
    """
    return 2 * torch.atan2(_norm(x - y), _norm(x + y)).squeeze(-1)


def log_rows(x: Tensor, y: Tensor) -> Tensor:
    """The tangent rows at ``x`` whose great circles end in ``y``.

    Args:
        x: unit rows.
        y: unit rows.

    Returns:
        Tangent rows of length ``angle_rows(x, y)``.
    """
    _refuse_antipodes(x, y)
    # y - x is exact for neighbours, where y - <x, y> x would cancel.
    direction = project_rows(x, y - x)
    length = _norm(direction)
    angle = angle_rows(x, y).unsqueeze(-1)
    return direction * torch.where(length > 0, angle / length, 1.0)


def parallel_rows(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Parallel transport ``v - <y, v> / (1 + <x, y>) (x + y)`` along the shortest great circle.

    Args:
        x: unit rows.
        y: unit rows.
        v: tangent rows at ``x``.

    Returns:
        Tangent rows at ``y`` of the same lengths.
    """
    _refuse_antipodes(x, y)
    cosine = (x * y).sum(dim=-1, keepdim=True)
    return v - (y * v).sum(dim=-1, keepdim=True) / (1 + cosine) * (x + y)


def norm_error_rows(x: Tensor) -> Tensor:
    """The largest deviation of a row's length from 1.

    Args:
        x: rows.

    Returns:
        A tensor without dimensions.
    """
    return (_norm(x) - 1).abs().amax()


def _refuse_antipodes(x: Tensor, y: Tensor) -> None:
    if bool((_norm(x + y) <= 4 * torch.finfo(x.dtype).eps).any()):
        raise ValueError("y is antipodal to x: there is no unique shortest geodesic between them")
