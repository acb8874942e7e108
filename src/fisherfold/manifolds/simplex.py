r"""Probabilities and positive numbers with their Fisher information as the metric (Fisher–Rao).

A categorical distribution with probabilities x has the information ``<u, v>_x = Σ u_i v_i / x_i``:
with ``z = √x`` the simplex is a piece of the unit sphere, four times as large, and all is done
there. The scale x of a distribution such as the exponential one has ``<u, v>_x = Σ u_i v_i /
x_i²``: it is flat in log x.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds.algebra import row_product, safe_norm
from fisherfold.manifolds.base import Manifold, positive_integer
from fisherfold.manifolds.sphere import Sphere


@dataclass(frozen=True, repr=False)
class Simplex(Manifold):
    """The vectors of n positive numbers with sum 1, with the Fisher–Rao metric.

    Args:
        n: the number of entries, at least 2.
        retraction: ``"exp"`` (order 2; a geodesic is reflected where it meets the boundary) or
            ``"softmax"``, ``x exp(v / x)`` over its sum (order 1).
        transport_method: only ``"parallel"`` (along the geodesic).

    Examples:
        >>> simplex = Simplex(2)
        >>> simplex.dist(torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.8]))
        tensor(0.6435)
    """

    retractions: ClassVar[Mapping[str, int]] = {"exp": 2, "softmax": 1}
    transports: ClassVar[tuple[str, ...]] = ("parallel",)

    n: int
    retraction: str = field(default="exp", kw_only=True)
    transport_method: str = field(default="parallel", kw_only=True)

    def __post_init__(self) -> None:
        self._check_options("n")
        if self.n < 2:
            raise ValueError(f"n of Simplex must be at least 2, got {self.n}")

    @property
    def dim(self) -> int:
        """The dimension, n - 1."""
        return self.n - 1

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return (self.n,)

    @property
    def _sphere(self) -> Sphere:
        return Sphere(self.n)

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return v - v.mean(dim=-1, keepdim=True)

    def _inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return (u * v / x).sum(dim=-1)

    def _gradient(self, x: Tensor, e: Tensor) -> Tensor:
        g = x * (e - row_product(x, e))
        return g - g.sum(dim=-1, keepdim=True) * x

    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        z = x.sqrt()
        w = 0.5 * v / z
        return 0.5 * z * self._sphere._hessian(z, 2 * z * e, 2 * w * e + 2 * z * h, w)

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        if method == "exp":
            return self._exp(x, v)
        return _positive(torch.softmax(x.log() + v / x, dim=-1))

    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        z, end = x.sqrt(), y.sqrt()
        return 2 * end * self._sphere._transport(z, end, 0.5 * v / z, "parallel")

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        z = x.sqrt()
        return _positive(self._sphere._exp(z, 0.5 * v / z).square())

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        z = x.sqrt()
        return 2 * z * self._sphere._log(z, y.sqrt())

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * self._sphere._dist(x.sqrt(), y.sqrt())

    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        uniform = torch.rand(shape, generator=generator, dtype=dtype, device=device)
        waits = -torch.log1p(-uniform) + torch.finfo(dtype).eps
        # half of it uniform: a start has room on all sides
        return 0.5 * waits / waits.sum(dim=-1, keepdim=True) + 0.5 / self.n

    def _constraint_error(self, x: Tensor) -> Tensor:
        return torch.maximum((x.sum(dim=-1) - 1).abs().amax(), (-x).clamp(min=0).amax())

    def _complaint(self, x: Tensor) -> str | None:
        return None if bool((x > 0).all()) else "its entries must be positive"


@dataclass(frozen=True, init=False, repr=False)
class PositiveOrthant(Manifold):
    """The tensors of positive numbers, with the Fisher–Rao metric of scales.

    Args:
        *shape: the sizes of one point; none for a number.
        retraction: only ``"exp"``, ``x exp(v / x)``.
        transport_method: only ``"parallel"``.

    Examples:
        >>> PositiveOrthant().dist(torch.tensor(1.0), torch.tensor(0.01))
        tensor(4.6052)
    """

    retractions: ClassVar[Mapping[str, int]] = {"exp": 2}
    transports: ClassVar[tuple[str, ...]] = ("parallel",)

    shape: tuple[int, ...] = ()
    retraction: str = field(default="exp", kw_only=True)
    transport_method: str = field(default="parallel", kw_only=True)

    def __init__(
        self, *shape: int, retraction: str = "exp", transport_method: str = "parallel"
    ) -> None:
        sizes = tuple(positive_integer(size, "every size of PositiveOrthant") for size in shape)
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "retraction", retraction)
        object.__setattr__(self, "transport_method", transport_method)
        self._check_options()

    @property
    def dim(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return self.shape

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return v

    def _inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return self._sum((u / x) * (v / x))

    def _gradient(self, x: Tensor, e: Tensor) -> Tensor:
        return x.square() * e

    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        return x * (x * h + v * e)

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        return self._exp(x, v)

    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        return v * (y / x)

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        return _positive(x * (v / x).exp())

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        return x * _log_ratio(x, y)

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        axes = tuple(range(-len(self.shape), 0))
        ratio = _log_ratio(x, y)
        return safe_norm(ratio, dim=axes) if axes else safe_norm(ratio.unsqueeze(-1))

    def _sum(self, products: Tensor) -> Tensor:
        axes = tuple(range(-len(self.shape), 0))
        return products.sum(dim=axes) if axes else products

    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        return (0.5 * torch.randn(shape, generator=generator, dtype=dtype, device=device)).exp()

    def _constraint_error(self, x: Tensor) -> Tensor:
        return (-x).clamp(min=0).amax()

    def _complaint(self, x: Tensor) -> str | None:
        return None if bool((x > 0).all()) else "its entries must be positive"

    def __repr__(self) -> str:
        return f"PositiveOrthant({', '.join(map(str, self.shape))})"


def _log_ratio(x: Tensor, y: Tensor) -> Tensor:
    """log(y / x), with all digits near 0."""
    apart = (y - x) / x
    near = apart.detach().abs() < 0.5
    return torch.where(near, torch.where(near, apart, 0.0).log1p(), (y / x).log())


def _positive(x: Tensor) -> Tensor:
    """The numbers, or the least positive one where they have underflown."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)
