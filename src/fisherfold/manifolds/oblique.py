"""The oblique manifold: matrices with unit rows, ``x_i`` on its own sphere for every row i.

It is the product of m spheres written as one m×n matrix, the home of scale-invariant network weights (the paper's
product of Gr(1, n), up to the signs of the rows). Every formula is the sphere's, row by row, and
``dist² = Σ_i angle(x_i, y_i)²``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fisherfold.manifolds.lengths import length
from fisherfold.manifolds.sphere import UnitRows, angle_rows


@dataclass(frozen=True, repr=False)
class Oblique(UnitRows):
    """The m×n matrices with rows of unit length.

    Args:
        m: the number of rows.
        n: the length of a row, at least 2.
        retraction: ``"normalize"`` or ``"exp"``, both of order 2.
        transport_method: ``"projection"`` or ``"parallel"``.

    Examples:
        >>> import torch
        >>> oblique = Oblique(4, 3)
        >>> x = oblique.random_point(generator=torch.Generator().manual_seed(0))
        >>> torch.linalg.vector_norm(x, dim=-1)
        tensor([1., 1., 1., 1.], dtype=torch.float64)
    """

    projector_side: ClassVar[str] = "rows"

    m: int
    n: int
    retraction: str = field(default="normalize", kw_only=True)
    transport_method: str = field(default="projection", kw_only=True)

    @property
    def dim(self) -> int:
        """The dimension, m (n - 1)."""
        return self.m * (self.n - 1)

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return (self.m, self.n)

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        return length(angle_rows(x, y))
