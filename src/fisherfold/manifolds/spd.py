r"""Symmetric positive definite matrices (covariances) with the affine-invariant metric.

    <u, v>_x = tr(x⁻¹ u x⁻¹ v),  Exp_x(v) = L expm(L⁻¹ v L⁻ᵀ) Lᵀ,  dist(x, y) = |log eig(x⁻¹ y)|

with x = L Lᵀ. It is twice the Fisher information of one sample of a centred normal distribution
with covariance x, and does not change when the variables are mixed by an invertible matrix A:
dist(A x Aᵀ, A y Aᵀ) = dist(x, y). The Riemannian gradient of a Euclidean one e is ``x sym(e) x``.
The logarithm can be differentiated where the eigenvalues of x⁻¹y differ, the distance everywhere
once (its derivative at its kink is 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds import frames
from fisherfold.manifolds.algebra import real_product, safe_norm
from fisherfold.manifolds.base import Manifold

# the affine-invariant distance below which x⁻¹y - I keeps digits that x⁻¹y would lose
_NEAR = 0.5


@dataclass(frozen=True, repr=False)
class SPD(Manifold):
    """The symmetric (Hermitian) positive definite n×n matrices, affine-invariant metric.

    Args:
        n: the number of rows.
        retraction: ``"quadratic"``, ``x + v + ½ v x⁻¹ v``, which is positive definite for every v,
            or ``"exp"``; both are of order 2.
        transport_method: only ``"parallel"`` (along the geodesic).
        complex: whether the matrices are Hermitian instead of real and symmetric.

    Examples:
        >>> spd = SPD(2)
        >>> x = torch.eye(2, dtype=torch.float64)
        >>> spd.dist(x, 4 * x), spd.dist(x, x / 4)
        (tensor(1.9605, dtype=torch.float64), tensor(1.9605, dtype=torch.float64))
    """

    retractions: ClassVar[Mapping[str, int]] = {"quadratic": 2, "exp": 2}
    transports: ClassVar[tuple[str, ...]] = ("parallel",)

    n: int
    retraction: str = field(default="quadratic", kw_only=True)
    transport_method: str = field(default="parallel", kw_only=True)
    complex: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._check_options("n")

    @property
    def dim(self) -> int:
        """The dimension, n (n + 1)/2; n² of Hermitian matrices."""
        return self.n**2 if self.complex else self.n * (self.n + 1) // 2

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return (self.n, self.n)

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return frames.symmetric(v)

    def _inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        lower = _lower(x)
        return real_product(_whitened(lower, u), _whitened(lower, v)).sum(dim=(-2, -1))

    def _gradient(self, x: Tensor, e: Tensor) -> Tensor:
        return frames.symmetric(x @ frames.symmetric(e) @ x)

    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        return frames.symmetric(x @ frames.symmetric(h) @ x + v @ frames.symmetric(e) @ x)

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        if method == "exp":
            return self._exp(x, v)
        half = torch.linalg.solve_triangular(_lower(x), v, upper=False)
        return frames.symmetric(x + v + 0.5 * half.mH @ half)

    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        lower = _lower(x)
        values, vectors = frames.eigh(_whitened(lower, y))
        root = vectors * values.sqrt().unsqueeze(-2) @ vectors.mH
        return _congruence(lower @ root, _whitened(lower, v))

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        lower = _lower(x)
        return _congruence(lower, frames.matrix_exp(_whitened(lower, v)))

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        lower = _lower(x)
        matrix, near = _relative(lower, x, y)
        values, vectors = frames.eigh(matrix)
        logs = torch.where(near, values.log1p(), torch.where(near, 1.0, values).log())
        return _congruence(lower, vectors * logs.unsqueeze(-2) @ vectors.mH)

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        matrix, near = _relative(_lower(x), x, y)
        values, _ = frames.eigh(matrix)
        return safe_norm(torch.where(near, values.log1p(), torch.where(near, 1.0, values).log()))

    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        frame = frames.random_frame(shape, generator=generator, dtype=dtype, device=device)
        logs = torch.randn(shape[:-1], generator=generator, dtype=frame.real.dtype, device=device)
        return frames.symmetric(frame * (0.5 * logs).exp().unsqueeze(-2) @ frame.mH)

    def _constraint_error(self, x: Tensor) -> Tensor:
        size = x.abs().amax(dim=(-2, -1)).clamp(min=torch.finfo(x.dtype).tiny)
        return ((x - x.mH).abs().amax(dim=(-2, -1)) / size).amax()

    def _complaint(self, x: Tensor) -> str | None:
        least = float(torch.linalg.eigvalsh(x).amin())
        if least > 0:
            return None
        return f"it is not positive definite, its smallest eigenvalue is {least:.2e}"


def _lower(x: Tensor) -> Tensor:
    """The Cholesky factor; NaN where a step to be rejected has lost positive definiteness."""
    lower, failed = torch.linalg.cholesky_ex(x)
    return torch.where(failed[..., None, None] == 0, lower, torch.nan)


def _whitened(lower: Tensor, v: Tensor) -> Tensor:
    """L⁻¹ v L⁻ᵀ."""
    half = torch.linalg.solve_triangular(lower, v, upper=False)
    return frames.symmetric(torch.linalg.solve_triangular(lower, half.mH, upper=False))


def _congruence(lower: Tensor, matrix: Tensor) -> Tensor:
    """L m Lᵀ."""
    return frames.symmetric(lower @ matrix @ lower.mH)


def _relative(lower: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """L⁻¹ y L⁻ᵀ, less the identity where y is near x, and where that is."""
    apart = _whitened(lower, y - x)
    near = torch.linalg.vector_norm(apart.detach(), dim=(-2, -1)) < _NEAR
    return torch.where(near[..., None, None], apart, _whitened(lower, y)), near.unsqueeze(-1)
