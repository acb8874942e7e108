r"""The unit sphere of R^n: ``P_x v = v - <x, v> x`` and ``R_x(v) = (x + v) / |x + v|``.

The oblique manifold is the product of m spheres written as one m×n matrix, the home of
scale-invariant weights of networks (the paper's product of Gr(1, n), up to the signs of the rows):
all formulas work on the last axis of any tensor. Angles are ``2 atan2(|x - y|, |x + y|)``: unlike
the arc cosine this keeps all digits near 0 and near π. Exponential map and logarithm are smooth and
can be differentiated at a zero step and from a point to itself; the distance has a kink there, and
another at the antipode, where its derivative is given as 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds import frames
from fisherfold.manifolds.algebra import row_product, safe_norm, series
from fisherfold.manifolds.base import Manifold

# cos √t and sin √t / √t up to t = 1/4, and θ / sin θ in w = sin²(θ/2) up to w = 1/20, to the last
# digit
_COS = tuple((-1) ** k / math.factorial(2 * k) for k in range(9))
_SINC = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(9))
_ANGLE_OVER_SINE = tuple(
    4**k * math.factorial(k) ** 2 / math.factorial(2 * k + 1) for k in range(13)
)


class UnitRows(Manifold):
    """What the sphere and the oblique manifold share: every row of a point has length 1."""

    retractions: ClassVar[Mapping[str, int]] = {"normalize": 2, "exp": 2}
    transports: ClassVar[tuple[str, ...]] = ("projection", "parallel")
    n: int
    complex: bool

    def __post_init__(self) -> None:
        self._check_options(*(name for name in ("m", "n") if hasattr(self, name)))
        if self.n < 2 and not self.complex:
            raise ValueError(f"n of {type(self).__name__} must be at least 2, got {self.n}")

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return v - row_product(x, v) * x

    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        return self._project(x, h) - row_product(x, e) * v

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        return _normalized(x + v) if method == "normalize" else self._exp(x, v)

    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        if method == "parallel":
            # v - 2 <m, v> / <m, m> m with m = x + y, a reflection at the middle: it keeps lengths
            # near the antipode, where 1 + <x, y> = <m, m> / 2 would cancel, and the rounding of m
            # is no small part of it
            middle = _middle(x, y)
            v = v - 2 * row_product(middle, v) / row_product(middle, middle) * middle
        return self._project(y, v)

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        """The great circle ``cos|v| x + sin|v| v/|v|``, normalised: rounding must not add up."""
        square = row_product(v, v)
        near = square < 0.25
        t = torch.where(near, square, 0.0)
        short = series(_COS, t) * x + series(_SINC, t) * v
        far = torch.where(near, 1.0, v)
        angle = safe_norm(far, keepdim=True)
        return _normalized(torch.where(near, short, angle.cos() * x + angle.sin() * (far / angle)))

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        apart, middle = y - x, _middle(x, y)
        chord = row_product(apart, apart)
        across = row_product(middle, middle)
        # both have the tangent part of y; the shorter is exact, where y would cancel
        direction = self._project(x, torch.where(chord < across, apart, middle))
        w = chord / (chord + across)
        near = w < 0.05
        far = torch.where(near, 1.0, direction)
        ratio = _angles(x, torch.where(near, -x, y)).unsqueeze(-1) / safe_norm(far, keepdim=True)
        return direction * torch.where(
            near, series(_ANGLE_OVER_SINE, torch.where(near, w, 0.0)), ratio
        )

    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        return _normalized(torch.randn(shape, generator=generator, dtype=dtype, device=device))

    def _constraint_error(self, x: Tensor) -> Tensor:
        return (safe_norm(x) - 1).abs().amax()


@dataclass(frozen=True, repr=False)
class Sphere(UnitRows):
    """The unit vectors of R^n.

    Args:
        n: the dimension of the surrounding space, at least 2.
        retraction: ``"normalize"`` or ``"exp"``, both of order 2.
        transport_method: ``"projection"`` or ``"parallel"`` (along the shortest geodesic).
        complex: whether the vectors are those of C^n; ``n`` may be 1 then.

    Examples:
        >>> sphere = Sphere(3)
        >>> x, y = torch.eye(3)[0], torch.eye(3)[1]
        >>> sphere.dist(x, y)
        tensor(1.5708)
        >>> sphere.retract(x, sphere.project(x, torch.tensor([5.0, 1.0, 0.0])))
        tensor([0.7071, 0.7071, 0.0000])
    """

    n: int
    retraction: str = field(default="normalize", kw_only=True)
    transport_method: str = field(default="projection", kw_only=True)
    complex: bool = field(default=False, kw_only=True)

    @property
    def dim(self) -> int:
        """The dimension, n - 1; 2n - 1 of complex vectors."""
        return (2 if self.complex else 1) * self.n - 1

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return (self.n,)

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        return _angles(x, y)


@dataclass(frozen=True, repr=False)
class Oblique(UnitRows):
    """The m×n matrices with rows of unit length.

    Args:
        m: the number of rows.
        n: the length of a row, at least 2.
        retraction: ``"normalize"`` or ``"exp"``, both of order 2.
        transport_method: ``"projection"`` or ``"parallel"``.
        complex: whether rows are complex; ``n`` may be 1 then, for numbers of modulus 1.

    Examples:
        >>> oblique = Oblique(4, 3)
        >>> x = oblique.random_point(generator=torch.Generator().manual_seed(0))
        >>> torch.linalg.vector_norm(x, dim=-1)
        tensor([1., 1., 1., 1.], dtype=torch.float64)
    """

    projector_structure: ClassVar[str] = "rows"

    m: int
    n: int
    retraction: str = field(default="normalize", kw_only=True)
    transport_method: str = field(default="projection", kw_only=True)
    complex: bool = field(default=False, kw_only=True)

    @property
    def dim(self) -> int:
        """The dimension, m (n - 1); m (2n - 1) of complex rows."""
        return self.m * ((2 if self.complex else 1) * self.n - 1)

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return (self.m, self.n)

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        return safe_norm(_angles(x, y))


def _normalized(y: Tensor) -> Tensor:
    # the largest entry as a constant, so that squares of huge steps do not overflow
    y = y / y.detach().abs().amax(dim=-1, keepdim=True)
    return y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)


def _angles(x: Tensor, y: Tensor) -> Tensor:
    """The angles between the rows, with all digits near 0 and near π."""
    return 2 * torch.atan2(safe_norm(x - y), safe_norm(x + y))


def _middle(x: Tensor, y: Tensor) -> Tensor:
    """The sum x + y; NaN or an error where the rows are opposite and have no middle."""
    middle = x + y
    opposite = frames.antipodal(
        safe_norm(middle.detach(), keepdim=True),
        4 * torch.finfo(x.dtype).eps,
        "y is antipodal to x: there is no unique shortest geodesic between them",
    )
    return torch.where(opposite, torch.nan, middle)
