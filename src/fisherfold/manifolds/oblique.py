"""The oblique manifold: matrices with unit rows, ``x_i`` on its own sphere for every row i.

It is the product of m spheres written as one m×n matrix, the home of scale-invariant network weights (the paper's
product of Gr(1, n), up to the signs of the rows). Every formula is the sphere's, row by row, and
``dist² = Σ_i angle(x_i, y_i)²``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds.base import Manifold
from fisherfold.manifolds.lengths import length
from fisherfold.manifolds.sphere import (
    angle_rows,
    exp_rows,
    log_rows,
    norm_error_rows,
    normalize_rows,
    parallel_rows,
    project_rows,
)


@dataclass(frozen=True, repr=False)
class Oblique(Manifold):
    """The m×n matrices with rows of unit length.

    Args:
        m: the number of rows.
        n: the length of a row, at least 2.
        retraction: ``"normalize"`` or ``"exp"``, both of order 2.
        transport_method: ``"projection"`` or ``"parallel"``.

    Examples:
        >>> oblique = Oblique(4, 3)
        >>> x = oblique.random_point(generator=torch.Generator().manual_seed(0))
        >>> torch.linalg.vector_norm(x, dim=-1)
        tensor([1., 1., 1., 1.], dtype=torch.float64)
    """

    retractions: ClassVar[Mapping[str, int]] = MappingProxyType({"normalize": 2, "exp": 2})
    transports: ClassVar[tuple[str, ...]] = ("projection", "parallel")

    m: int
    n: int
    retraction: str = field(default="normalize", kw_only=True)
    transport_method: str = field(default="projection", kw_only=True)

    def __post_init__(self) -> None:
        self._make_whole("m", "n")
        if self.n < 2:
            raise ValueError(f"n of Oblique must be at least 2, got {self.n}")
        self._choice("retraction", None)
        self._choice("transport_method", None)

    @property
    def dim(self) -> int:
        """The dimension, m (n - 1)."""
        return self.m * (self.n - 1)

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return (self.m, self.n)

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
        return length(angle_rows(x, y))

    def _random(
        self, shape: tuple[int, ...], generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        return normalize_rows(torch.randn(shape, generator=generator, dtype=dtype, device=device))

    def _constraint_error(self, x: Tensor) -> Tensor:
        return norm_error_rows(x)
