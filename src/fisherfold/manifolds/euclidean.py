"""Euclidean space, to which every method must reduce: ``P_x = Id`` and ``R_x(v) = x + v``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds.base import Manifold, positive_integer


@dataclass(frozen=True, init=False, repr=False)
class Euclidean(Manifold):
    """The space of tensors of a given shape with the Frobenius inner product.

    Args:
        *shape: the sizes of one point; none for a number.
        retraction: only ``"add"``, the exponential map ``x + v``.
        transport_method: only ``"projection"``, the identity.
        complex: whether the tensors are complex.

    Examples:
        >>> Euclidean(3, 2).dim
        6
        >>> Euclidean(2).retract(torch.zeros(2), torch.ones(2))
        tensor([1., 1.])
    """

    retractions: ClassVar[Mapping[str, int]] = {"add": 2}
    projector_structure: ClassVar[str] = "none"

    shape: tuple[int, ...] = ()
    retraction: str = field(default="add", kw_only=True)
    transport_method: str = field(default="projection", kw_only=True)
    complex: bool = field(default=False, kw_only=True)

    def __init__(
        self,
        *shape: int,
        retraction: str = "add",
        transport_method: str = "projection",
        complex: bool = False,
    ) -> None:
        sizes = tuple(positive_integer(size, "every size of Euclidean") for size in shape)
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "retraction", retraction)
        object.__setattr__(self, "transport_method", transport_method)
        object.__setattr__(self, "complex", complex)
        self._check_options()

    @property
    def dim(self) -> int:
        """The number of real entries."""
        return (2 if self.complex else 1) * math.prod(self.shape)

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return self.shape

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return v

    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        return h

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        return x + v

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        return x + v

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        return y - x

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(x, y - x)

    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    def _constraint_error(self, x: Tensor) -> Tensor:
        return x.real.new_zeros(())

    def __repr__(self) -> str:
        sizes = [*map(str, self.shape), *(["complex=True"] if self.complex else [])]
        return f"Euclidean({', '.join(sizes)})"
