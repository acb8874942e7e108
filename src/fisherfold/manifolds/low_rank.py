r"""Matrices of fixed rank with the geometry of the matrices around them, and low-rank covariances.

``FixedRank``: X = u s vᵀ with orthonormal u, v and an invertible s, which hold for every rotation
(u q, qᵀ s r, v r). A tangent vector is (u̇, ṡ, v̇) with ``uᵀu̇ = 0`` and ``vᵀv̇ = 0``; it stands
for the matrix ``Ẋ = u̇ s vᵀ + u ṡ vᵀ + u s v̇ᵀ``, and the metric is ``<Ẋ, Ẏ>``. No m×n matrix is
ever formed.

``LowRankPSD``: X = x xᵀ, with x and x q the same point. The metric is that of x, the
Bures–Wasserstein metric of X; vectors are horizontal, ``xᵀv = vᵀx``, and geodesics are straight
lines x + t v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds import frames
from fisherfold.manifolds.algebra import real_product, safe_norm
from fisherfold.manifolds.base import Manifold

Factors = dict[str, Tensor]


@dataclass(frozen=True, repr=False)
class FixedRank(Manifold):
    """The real m×n matrices of rank r, each written as the factors of ``u @ s @ v.mT``.

    Args:
        m: the number of rows.
        n: the number of columns.
        rank: r, at most m and n.
        retraction: ``"svd"``, the nearest matrix of rank r, or ``"orthographic"``, the one that
            differs from it by a normal vector; it is cheaper and can be differentiated. Both are of
            order 2.
        transport_method: only ``"projection"``.

    Examples:
        >>> manifold = FixedRank(5, 4, 2)
        >>> x = manifold.random_point(generator=torch.Generator().manual_seed(0))
        >>> manifold.dim, int(torch.linalg.matrix_rank(manifold.matrix(x)))
        (14, 2)
    """

    retractions: ClassVar[Mapping[str, int]] = {"svd": 2, "orthographic": 2}

    m: int
    n: int
    rank: int
    retraction: str = field(default="svd", kw_only=True)
    transport_method: str = field(default="projection", kw_only=True)

    def __post_init__(self) -> None:
        self._check_options("m", "n", "rank")
        if self.rank > min(self.m, self.n):
            raise ValueError(
                f"rank of FixedRank must be at most {min(self.m, self.n)}, got {self.rank}"
            )

    @property
    def dim(self) -> int:
        """The dimension, r (m + n - r)."""
        return self.rank * (self.m + self.n - self.rank)

    @property
    def point_shape(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the factors of one point."""
        r = self.rank
        return {"u": (self.m, r), "s": (r, r), "v": (self.n, r)}

    def matrix(self, x: Factors) -> Tensor:
        """The m×n matrix of a point."""
        return x["u"] @ x["s"] @ x["v"].mT

    def from_matrix(self, matrix: Tensor) -> Factors:
        """The nearest point to a matrix; raises ValueError if its rank is too small."""
        if tuple(matrix.shape[-2:]) != (self.m, self.n):
            raise ValueError(
                f"matrix must have shape (..., {self.m}, {self.n}), got {tuple(matrix.shape)}"
            )
        x = self._nearest(matrix)
        self.check_point(x, name="the nearest matrix")
        return x

    def _nearest(self, matrix: Tensor) -> Factors:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        r = self.rank
        return {"u": u[..., :r], "s": torch.diag_embed(s[..., :r]), "v": vh[..., :r, :].mT}

    def _embedding(self, x: Factors) -> Tensor:
        return self.matrix(x).flatten(-2)

    def _symmetry(self, generator: torch.Generator) -> Callable[[Factors], Factors]:
        left = frames.random_rotation(self.rank, False, generator)
        right = frames.random_rotation(self.rank, False, generator)
        return lambda x: {"u": left(x["u"]), "s": right(left(x["s"].mT).mT), "v": right(x["v"])}

    def _project(self, x: Factors, v: Factors) -> Factors:
        return {"u": _off(x["u"], v["u"]), "s": v["s"], "v": _off(x["v"], v["v"])}

    def _inner(self, x: Factors, u: Factors, v: Factors) -> Tensor:
        s = x["s"]
        parts = (
            real_product(u["u"] @ s, v["u"] @ s),
            real_product(u["s"], v["s"]),
            real_product(u["v"] @ s.mT, v["v"] @ s.mT),
        )
        return torch.stack([part.sum(dim=(-2, -1)) for part in parts]).sum(dim=0)

    def _gradient(self, x: Factors, e: Factors) -> Factors:
        s = x["s"]
        g = self._project(x, e)
        rows, columns = _right_solve(g["u"], s @ s.mT), _right_solve(g["v"], s.mT @ s)
        return self._project(x, {"u": rows, "s": g["s"], "v": columns})

    def _hessian(self, x: Factors, e: Factors, h: Factors, v: Factors) -> Factors:
        # P_X D²f[Ẋ] and the curvature G v̇ vᵀ + u u̇ᵀ G (Vandereycken 2013), in derivatives by
        # factors
        s = x["s"]
        rows = _right_solve(_off(x["u"], e["u"]), s.mT)
        columns = _right_solve(_off(x["v"], e["v"]), s)
        bent = {
            "u": h["u"] - rows @ v["s"].mT,
            "s": h["s"] - v["u"].mT @ rows - columns.mT @ v["v"],
            "v": h["v"] - columns @ v["s"],
        }
        return self._gradient(x, bent)

    def _retract(self, x: Factors, v: Factors, method: str) -> Factors:
        u, s, w = x["u"], x["s"], x["v"]
        core = s + v["s"]
        if method == "orthographic":
            left = u + _right_solve(v["u"] @ s, core)
            right = w + _right_solve(v["v"] @ s.mT, core.mT)
            (u, s_left), (w, s_right) = _polar(left), _polar(right)
            return {"u": u, "s": s_left @ core @ s_right, "v": w}
        if 2 * self.rank > min(self.m, self.n):
            y = self._nearest(u @ core @ w.mT + v["u"] @ s @ w.mT + u @ s @ v["v"].mT)
        else:
            y = self._nearest_in_spans(x, v, core)
        # the representative next to the old one
        left = frames.rotation_between(y["u"].mT @ u)
        right = frames.rotation_between(y["v"].mT @ w)
        return {"u": y["u"] @ left, "s": left.mT @ y["s"] @ right, "v": y["v"] @ right}

    def _nearest_in_spans(self, x: Factors, v: Factors, core: Tensor) -> Factors:
        """The nearest matrix of rank r to X + Ẋ, from a matrix of 2r rows and columns."""
        r = self.rank
        left, a = torch.linalg.qr(torch.cat([x["u"], v["u"] @ x["s"]], dim=-1))
        right, b = torch.linalg.qr(torch.cat([x["v"], v["v"] @ x["s"].mT], dim=-1))
        small = a[..., :r] @ core @ b[..., :r].mT + a[..., r:] @ b[..., :r].mT
        small = small + a[..., :r] @ b[..., r:].mT
        finite = torch.isfinite(small).all(dim=-1).all(dim=-1)[..., None, None]
        y = self._nearest(torch.where(finite, small, 0.0))
        s = torch.where(finite, y["s"], torch.nan)
        return {"u": left @ y["u"], "s": s, "v": right @ y["v"]}

    def _transport(self, x: Factors, y: Factors, v: Factors, method: str) -> Factors:
        # Ẋ = a vᵀ + b v̇ᵀ, projected onto the tangent space at y
        a = v["u"] @ x["s"] + x["u"] @ v["s"]
        b = x["u"] @ x["s"]
        columns = a @ (x["v"].mT @ y["v"]) + b @ (v["v"].mT @ y["v"])
        rows = x["v"] @ (a.mT @ y["u"]) + v["v"] @ (b.mT @ y["u"])
        return {
            "u": _right_solve(_off(y["u"], columns), y["s"]),
            "s": y["u"].mT @ columns,
            "v": _right_solve(_off(y["v"], rows), y["s"].mT),
        }

    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Factors:
        def frame(size: tuple[int, ...]) -> Tensor:
            return frames.random_frame(size, generator=generator, dtype=dtype, device=device)

        values = torch.rand(shape["s"][:-1], generator=generator, dtype=dtype, device=device)
        core = frame(shape["s"]) * (0.5 + values).unsqueeze(-2)
        return {"u": frame(shape["u"]), "s": core @ frame(shape["s"]).mT, "v": frame(shape["v"])}

    def _constraint_error(self, x: Factors) -> Tensor:
        return torch.maximum(*(frames.orthonormality_error(x[key]) for key in ("u", "v")))

    def _complaint(self, x: Factors) -> str | None:
        values = torch.linalg.svdvals(x["s"])
        if bool((values[..., -1] > torch.finfo(values.dtype).eps * values[..., 0]).all()):
            return None
        return "its rank is less than that; its 's' must be invertible"


@dataclass(frozen=True, repr=False)
class LowRankPSD(Manifold):
    """The positive semidefinite n×n matrices ``x @ x.mT`` of rank k, written as n×k factors x.

    Losses must be functions of ``x @ x.mT``. The metric is that of Bures and Wasserstein.

    Args:
        n: the number of rows.
        k: the rank, at most n.
        retraction: only ``"add"``, the exponential map ``x + v``.
        transport_method: only ``"projection"``.
        complex: whether the matrices are Hermitian instead of real and symmetric.

    Examples:
        >>> x = torch.tensor([[2.0], [0.0]])
        >>> LowRankPSD(2, 1).dist(x, -x)
        tensor(0.)
    """

    retractions: ClassVar[Mapping[str, int]] = {"add": 2}
    constrained: ClassVar[bool] = False

    n: int
    k: int
    retraction: str = field(default="add", kw_only=True)
    transport_method: str = field(default="projection", kw_only=True)
    complex: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._check_options("n", "k")
        if self.k > self.n:
            raise ValueError(f"k of LowRankPSD must be at most n={self.n}, got {self.k}")

    @property
    def dim(self) -> int:
        """The dimension, nk - k(k - 1)/2; 2nk - k² of Hermitian matrices."""
        if self.complex:
            return 2 * self.n * self.k - self.k**2
        return self.n * self.k - self.k * (self.k - 1) // 2

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return (self.n, self.k)

    def alignment(self, x: Tensor, y: Tensor) -> Tensor:
        """The orthogonal factor of xᵀy: the rotation of y against the factor next to x."""
        return frames.rotation_between(frames.cross(x, y)).to(x.dtype)

    def _symmetry(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        return frames.random_rotation(self.k, self.complex, generator)

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return v - x @ _spin(x, v)

    def _hessian(self, x: Tensor, e: Tensor, h: Tensor, v: Tensor) -> Tensor:
        return self._project(x, h - v @ _spin(x, e))

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        return x + v

    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        return self._project(y, v @ self.alignment(x, y))

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        return x + v

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        return y @ self.alignment(x, y).mH - x

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        return safe_norm(self._log(x, y), dim=(-2, -1))

    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        frame = frames.random_frame(shape, generator=generator, dtype=dtype, device=device)
        small = (*shape[:-2], self.k, self.k)
        turn = frames.random_frame(small, generator=generator, dtype=dtype, device=device)
        values = torch.rand(
            (*shape[:-2], 1, self.k), generator=generator, dtype=frame.real.dtype, device=device
        )
        return frame * (1 + values) @ turn

    def _constraint_error(self, x: Tensor) -> Tensor:
        return x.real.new_zeros(())

    def _complaint(self, x: Tensor) -> str | None:
        values = torch.linalg.svdvals(x)
        if bool((values[..., -1] > torch.finfo(values.dtype).eps * values[..., 0]).all()):
            return None
        return f"its columns are linearly dependent, so that the rank is less than {self.k}"


def _off(frame: Tensor, v: Tensor) -> Tensor:
    """The part of v outside the span of a frame."""
    return frames.minus_product(v, frame, frames.cross(frame, v))


def _right_solve(v: Tensor, matrix: Tensor) -> Tensor:
    """``v @ matrix⁻¹``; not finite where the matrix is singular."""
    return torch.linalg.solve_ex(matrix, v, left=False).result


def _polar(y: Tensor) -> tuple[Tensor, Tensor]:
    """The frame and the symmetric factor of ``y = q h``."""
    q = frames.polar(y)
    return q, frames.symmetric(frames.cross(q, y)).to(y.dtype)


def _spin(x: Tensor, v: Tensor) -> Tensor:
    """The skew Ω of the vertical part x Ω of v: ``G Ω + Ω G = xᴴv - vᴴx`` with ``G = xᴴx``."""
    values, vectors = frames.eigh(frames.cross(x, x))
    overlap = frames.cross(x, v)
    inner = vectors.mH @ (overlap - overlap.mH) @ vectors
    inner = inner / (values.unsqueeze(-1) + values.unsqueeze(-2))
    return (vectors @ inner @ vectors.mH).to(x.dtype)
