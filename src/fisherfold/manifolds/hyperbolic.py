r"""Hyperbolic space of curvature -1 in two models: the Poincaré ball and the Lorentz hyperboloid.

In the ball the metric is ``λ² u · v`` with ``λ = 2 / (1 - |x|²)``; with ``q² = |x - y|² / ((1 -
|x|²) (1 - |y|²))`` the distance is ``2 arsinh q``, which keeps all digits near 0. On the
hyperboloid ``<x, x> = -1``, ``x_0 > 0`` of the Minkowski product ``<u, v> = -u_0 v_0 + u_1 v_1 +
…`` the metric is that product and the distance ``2 arsinh |x - y| / 2``. ``x_{1…n} / (1 + x_0)``
maps the hyperboloid to the ball.

The ball holds points up to a distance of about 36 from its centre in float64, and 16 in float32;
the hyperboloid loses digits at such distances, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.manifolds.algebra import row_product, safe_norm, series
from fisherfold.manifolds.base import Manifold

# cosh √t and sinh √t / √t up to t = 1/4; artanh √t / √t up to t = 1/20; θ / sinh θ in sinh²(θ/2) <
# 1/20
_COSH = tuple(1 / math.factorial(2 * k) for k in range(9))
_SINHC = tuple(1 / math.factorial(2 * k + 1) for k in range(9))
_ARTANH = tuple(1 / (2 * k + 1) for k in range(13))
_ANGLE_OVER_SINH = tuple(
    (-4) ** k * math.factorial(k) ** 2 / math.factorial(2 * k + 1) for k in range(13)
)
# the series are used below these squares
_NEAR_STEP = 0.25
_NEAR_POINT = 0.05


class Hyperbolic(Manifold):
    """What both models share."""

    retractions: ClassVar[Mapping[str, int]] = {"exp": 2}
    transports: ClassVar[tuple[str, ...]] = ("parallel",)
    n: int

    def __post_init__(self) -> None:
        self._check_options("n")

    @property
    @override
    def dim(self) -> int:
        return self.n

    @override
    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        return self._exp(x, v)


@dataclass(frozen=True, repr=False)
class PoincareBall(Hyperbolic):
    """Hyperbolic space as the open unit ball of R^n.

    Args:
        n: the dimension.
        retraction: only ``"exp"``.
        transport_method: only ``"parallel"`` (along the geodesic).

    Examples:
        >>> ball = PoincareBall(2)
        >>> ball.dist(torch.zeros(2), torch.tensor([0.5, 0.0]))
        tensor(1.0986)
    """

    n: int
    retraction: str = field(default="exp", kw_only=True)
    transport_method: str = field(default="parallel", kw_only=True)

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return (self.n,)

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return v

    def _inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return (row_product(u, v) / _gap(x).square()).squeeze(-1) * 4

    def _gradient(self, x: Tensor, e: Tensor) -> Tensor:
        return 0.25 * _gap(x).square() * e

    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        # of a conformal metric λ²: λ⁻² (h - (∇φ·v) e + (∇φ·e) v - (v·e) ∇φ), φ = log λ, ∇φ = λ x
        slope = 2 / _gap(x) * x
        bend = row_product(slope, e) * v - row_product(slope, v) * e - row_product(v, e) * slope
        return 0.25 * _gap(x).square() * (h + bend)

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        """``x ⊕ tanh(λ|v|/2) v/|v|``, the Möbius sum."""
        step = v / _gap(x)  # λ v / 2
        cosh, sinhc = _hyperbolic_functions(row_product(step, step))
        y = sinhc / cosh * step
        cross, square, norm = row_product(x, y), row_product(y, y), row_product(x, x)
        total = (1 + 2 * cross + square) * x + (1 - norm) * y
        return _inside(total / (1 + 2 * cross + norm * square))

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        """``(2/λ) artanh|w| w/|w|`` with ``w = -x ⊕ y``."""
        apart = y - x
        chord = row_product(apart, apart)
        total = _gap(x) * _gap(y) + chord  # 1 - 2 x·y + |x|²|y|²
        w = (_gap(x) * apart - chord * x) / total
        square = chord / total  # |w|²
        near = square < _NEAR_POINT
        far = torch.where(near, 0.5, square)
        beyond = torch.where(near, 1.0, chord / (_gap(x) * _gap(y)))  # sinh²(d/2)
        ratio = torch.asinh(beyond.sqrt()) / far.sqrt()
        short = series(_ARTANH, torch.where(near, square, 0.0))
        return _gap(x) * torch.where(near, short, ratio) * w

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        scale = (_gap(x) * _gap(y)).sqrt().squeeze(-1)
        return 2 * torch.asinh(safe_norm(y - x) / scale)

    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        """``λ_x / λ_y gyr[y, -x] v``."""
        yv, xv = row_product(y, v), -row_product(x, v)
        cross, xx, yy = -row_product(x, y), row_product(x, x), row_product(y, y)
        along_y = -yv * xx + xv + 2 * cross * xv
        along_x = -xv * yy - yv
        turned = v + 2 * (along_y * y - along_x * x) / (1 + 2 * cross + xx * yy)
        return _gap(y) / _gap(x) * turned

    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        v = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        return self._exp(torch.zeros_like(v), 0.25 * v)

    def _constraint_error(self, x: Tensor) -> Tensor:
        return (safe_norm(x) - 1).clamp(min=0).amax()

    def _complaint(self, x: Tensor) -> str | None:
        return None if bool((safe_norm(x) < 1).all()) else "it lies on the boundary of the ball"


@dataclass(frozen=True, repr=False)
class Lorentz(Hyperbolic):
    """Hyperbolic space as the upper sheet of the hyperboloid in R^(n+1), time first.

    Args:
        n: the dimension.
        retraction: only ``"exp"``.
        transport_method: only ``"parallel"`` (along the geodesic).

    Examples:
        >>> lorentz = Lorentz(2)
        >>> x = torch.tensor([1.0, 0.0, 0.0])
        >>> lorentz.dist(x, lorentz.exp(x, torch.tensor([0.0, 0.0, 2.0])))
        tensor(2.)
    """

    n: int
    retraction: str = field(default="exp", kw_only=True)
    transport_method: str = field(default="parallel", kw_only=True)

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return (self.n + 1,)

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        normal = _reflected(x)
        return v - row_product(normal, v) / row_product(normal, normal) * normal

    def _inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return _minkowski(u, v).squeeze(-1)

    def _gradient(self, x: Tensor, e: Tensor) -> Tensor:
        g = _reflected(e)
        g = g + _minkowski(x, g) * x
        return g + _minkowski(x, g) * x

    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        return self._gradient(x, h) + row_product(x, e) * v

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        cosh, sinhc = _hyperbolic_functions(_minkowski(v, v).clamp(min=0))
        return _on_sheet(cosh * x + sinhc * v)

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        apart = y - x
        w = 0.25 * _minkowski(apart, apart).clamp(min=0)  # sinh²(d/2)
        near = w < _NEAR_POINT
        far = torch.where(near, 1.0, w)
        # d / sinh d with sinh d = 2 sinh(d/2) cosh(d/2)
        ratio = torch.asinh(far.sqrt()) / (far * (1 + far)).sqrt()
        short = series(_ANGLE_OVER_SINH, torch.where(near, w, 0.0))
        direction = apart + _minkowski(x, apart) * x
        return torch.where(near, short, ratio) * (direction + _minkowski(x, direction) * x)

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        square = _minkowski(y - x, y - x).squeeze(-1).clamp(min=0)
        zero = square == 0
        return torch.where(zero, 0.0, 2 * torch.asinh(0.5 * torch.where(zero, 1.0, square).sqrt()))

    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        return v + _minkowski(y, v) / (1 - _minkowski(x, y)) * (x + y)

    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        return _on_sheet(0.5 * noise)

    def _constraint_error(self, x: Tensor) -> Tensor:
        return ((_minkowski(x, x) + 1) / (1 + row_product(x, x))).abs().amax()

    def _complaint(self, x: Tensor) -> str | None:
        return None if bool((x[..., 0] > 0).all()) else "it is on the lower sheet; change its sign"


def _gap(x: Tensor) -> Tensor:
    return 1 - row_product(x, x)


def _inside(y: Tensor) -> Tensor:
    """The point, or where rounding has put it on the boundary of the ball one just inside."""
    limit = 1 - 4 * torch.finfo(y.dtype).eps
    length = torch.linalg.vector_norm(y.detach(), dim=-1, keepdim=True)
    return torch.where(length > limit, y * (limit / length), y)


def _reflected(x: Tensor) -> Tensor:
    return torch.cat([-x[..., :1], x[..., 1:]], dim=-1)


def _minkowski(u: Tensor, v: Tensor) -> Tensor:
    return row_product(u[..., 1:], v[..., 1:]) - u[..., :1] * v[..., :1]


def _on_sheet(x: Tensor) -> Tensor:
    """The point of the hyperboloid with the same coordinates in space."""
    space = x[..., 1:]
    return torch.cat([(1 + row_product(space, space)).sqrt(), space], dim=-1)


def _hyperbolic_functions(square: Tensor) -> tuple[Tensor, Tensor]:
    """Cosh t and sinh t / t as smooth functions of t²; tanh t is finite for every t."""
    near = square < _NEAR_STEP
    t = torch.where(near, 1.0, square).sqrt()
    small = torch.where(near, square, 0.0)
    cosh = torch.where(near, series(_COSH, small), t.cosh())
    return cosh, torch.where(near, series(_SINHC, small), t.sinh() / t)
