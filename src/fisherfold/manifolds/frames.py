r"""Orthonormal frames from almost orthonormal matrices, and how two of them lie.

No n×n matrix is ever formed. For complex frames read ``ᴴ`` for ``ᵀ``.

Stiefel and Grassmann points are n×p matrices with ``xᵀx = I``; a step leaves them at some ``y`` of
full rank and one of three maps brings it back. All of them read the shape of ``y`` off its p×p Gram
matrix ``G = yᵀy``:

- polar: ``y G^{-1/2}``, the nearest frame;
- CholeskyQR: ``y L^{-T}`` with ``G = L Lᵀ``;
- Householder QR with positive diagonal, which needs no Gram matrix and is therefore the fall-back
  for the others (and, in float32, less orthonormal than they are for very tall matrices).

The frame error of the first two is about ``eps · cond(G)``, so they hand over to QR beyond
``MAX_CONDITION``, and under ``vmap``, where the condition cannot be looked at.

With ``m = xᵀy = U cos(θ) Vᵀ`` the rotation between two frames is ``Q = U Vᵀ``, the polar factor of
m, and ``c = m Qᵀ`` holds the cosines. Both are smooth functions of m while no angle is a right one,
but singular vectors are not: they coincide where the subspaces meet. So where derivatives are
wanted Q is found by Newton's iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import override

from fisherfold.manifolds.algebra import static_all
from fisherfold.manifolds.base import Manifold

# A retraction step of Frobenius length s gives cond(G) ≤ 1 + s²; steps beyond 4 take the slower,
# safer road.
MAX_CONDITION = 16.0
# Rows summed in the working precision before the sum goes on in float64: rounding then does not
# grow with n.
BLOCK_ROWS = 256
# Beyond this height the float32 Householder QR of LAPACK has lost two digits of orthonormality.
TALL_ROWS = 16_384
# Steps of Newton's iteration with scaling: enough for every condition in float64.
_NEWTON_STEPS = 10
# Its last change, whose square is the error.
_NEWTON_CHANGE = 1e-10
# θ / sin θ = Σ 4^k (k!)² / (2k + 1)! w^k in w = sin²(θ/2) ≤ 1/2; what is left out is below 1e-16.
# In rows of seven.
_WIDTH = 7
_SERIES = [4**k * math.factorial(k) ** 2 / math.factorial(2 * k + 1) for k in range(_WIDTH**2)]


class Frames(Manifold):
    """What the manifolds of orthonormal n×p frames share."""

    n: int
    p: int
    complex: bool

    @property
    @override
    def point_shape(self) -> tuple[int, ...]:
        return (self.n, self.p)

    @override
    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        return random_frame(shape, generator=generator, dtype=dtype, device=device)

    @override
    def _constraint_error(self, x: Tensor) -> Tensor:
        return orthonormality_error(x)


def cross(a: Tensor, b: Tensor) -> Tensor:
    """The p×q matrix ``aᵀb`` of tall matrices, or ``aᴴb``.

    Its rounding error does not grow with the height of the matrices.
    """
    wide = torch.complex128 if a.is_complex() else torch.float64
    blocks = a.shape[-2] // BLOCK_ROWS
    if blocks < 2:
        return (a.mH @ b).to(wide)
    rows = blocks * BLOCK_ROWS
    head_a = torch.unflatten(a[..., :rows, :], -2, (blocks, BLOCK_ROWS))
    head_b = torch.unflatten(b[..., :rows, :], -2, (blocks, BLOCK_ROWS))
    tail = a[..., rows:, :].mH @ b[..., rows:, :]
    return (head_a.mH @ head_b).sum(dim=-3, dtype=wide) + tail


def minus_product(v: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """The matrix ``v - x w``, in one pass over the memory where possible."""
    weights = weights.to(v.dtype)
    if v.ndim == x.ndim == 2:
        return torch.addmm(v, x, weights, alpha=-1)
    return v - x @ weights


def polar(y: Tensor) -> Tensor:
    """The orthonormal polar factor ``y (yᵀy)^{-1/2}``, the nearest frame to ``y``."""
    if not _is_differentiated(y):
        values, vectors = eigh(cross(y, y))
        # Squares below the floor have underflown, and infinite ones overflown. Written so that NaN
        # fails as well.
        floor = torch.finfo(y.dtype).tiny / torch.finfo(y.dtype).eps
        largest = values[..., -1]
        fine = (largest <= MAX_CONDITION * (values[..., 0] - floor)) & (largest < torch.inf)
        if bool(fine.all()):
            return y @ ((vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mH).to(y.dtype)
    q, r = torch.linalg.qr(y)
    finite = torch.isfinite(r).all(dim=(-2, -1), keepdim=True)
    return torch.where(finite, q @ rotation_between(torch.where(finite, r, 0.0)), torch.nan)


def qr(y: Tensor) -> Tensor:
    """The Q of the QR decomposition whose R has a positive diagonal, so that ``qr(x) = x``."""
    return _householder_qr(y) if y.shape[-2] < TALL_ROWS else cholesky_qr(y)


def cholesky_qr(y: Tensor) -> Tensor:
    """The same frame as ``qr`` through the Cholesky factor of the Gram matrix."""
    gram = cross(y, y)
    lower, failed = torch.linalg.cholesky_ex(gram)
    inverse = _inverse_triangle(lower)
    # The condition in the row-sum norm: an upper bound of the spectral one without eigenvalues.
    condition = _row_sum_norm(gram) * _row_sum_norm(inverse.mH @ inverse)
    if not static_all((failed == 0) & (condition <= MAX_CONDITION)):
        return _householder_qr(y)
    return y @ inverse.mH.to(y.dtype)


def _householder_qr(y: Tensor) -> Tensor:
    q, r = torch.linalg.qr(y)
    signs = torch.sgn(r.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)
    signs = torch.where(signs == 0, 1.0, signs)
    if y.shape[-2] < TALL_ROWS:
        return (q * signs).contiguous()
    inverse = _inverse_triangle(torch.linalg.cholesky_ex(cross(q, q)).L)
    return q @ (inverse.mH.to(y.dtype) * signs)


def _inverse_triangle(lower: Tensor) -> Tensor:
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)


def _row_sum_norm(matrix: Tensor) -> Tensor:
    return matrix.abs().sum(dim=-1).amax(dim=-1)


def geodesic(x: Tensor, v: Tensor, rotation: Tensor | None = None) -> Tensor:
    """The end of the geodesic from a frame with velocity v, in the Euclidean metric.

    ``rotation``: A, the part of v within the frame; None for 0.
    """
    # With v = x A + K, A skew and xᵀK = 0, it is [x K] expm([[2A, -KᵀK], [I, 0]]) [I; 0] expm(-A)
    # (Edelman, Arias and Smith 1998, section 2.2.2, in the basis [x K]), a smooth function of v
    # that needs only p×p products.
    p = x.shape[-1]
    normal = v if rotation is None else minus_product(v, x, rotation)
    gram = cross(normal, normal)
    # The length of K, as a constant, balances the two blocks; any positive number gives the same
    # frame.
    length = gram.detach().diagonal(dim1=-2, dim2=-1).real.sum(dim=-1).sqrt()[..., None, None]
    length = torch.where(length > 0, length, 1.0)
    eye = torch.eye(p, dtype=gram.dtype, device=x.device).expand_as(gram)
    twist = torch.zeros_like(gram) if rotation is None else 2 * rotation
    top = torch.cat([twist, -gram / length], dim=-1)
    bottom = torch.cat([length * eye, torch.zeros_like(gram)], dim=-1)
    turn = matrix_exp(torch.cat([top, bottom], dim=-2))[..., :p]
    if rotation is not None:
        turn = turn @ matrix_exp(-rotation)
    end = minus_product(x @ turn[..., :p, :].to(x.dtype), normal, -turn[..., p:, :] / length)
    return polar(end)  # so that rounding does not add up over many steps


def matrix_exp(matrix: Tensor) -> Tensor:
    """The matrix exponential; NaN where an entry is not finite."""
    finite = torch.isfinite(matrix).all(dim=-1).all(dim=-1)[..., None, None]
    matrix = torch.where(finite, matrix, 0.0)
    # Of a single float64 matrix of norm 0.01 to 0.05 torch.linalg.matrix_exp (2.13) is off by up to
    # 1e-10; of two it is right.
    exponential = torch.linalg.matrix_exp(torch.stack([matrix, matrix]))[0]
    return torch.where(finite, exponential, torch.nan)


def orthonormality_error(x: Tensor) -> Tensor:
    """The largest entry of ``|xᵀx - I|``."""
    eye = torch.eye(x.shape[-1], dtype=torch.float64, device=x.device)
    return (cross(x, x) - eye).abs().amax()


def random_frame(
    shape: tuple[int, ...],
    *,
    generator: torch.Generator | None,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tensor:
    """A frame of Haar (uniform) distribution."""
    return qr(torch.randn(shape, generator=generator, dtype=dtype, device=device))


def random_rotation(
    n: int, is_complex: bool, generator: torch.Generator
) -> Callable[[Tensor], Tensor]:
    """The map ``x ↦ x q`` with a random orthogonal or unitary q."""
    dtype = torch.complex128 if is_complex else torch.float64
    q = random_frame((n, n), generator=generator, dtype=dtype, device=generator.device)
    return lambda x: x @ q.to(x.dtype)


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues and eigenvectors of Hermitian matrices; NaN where an entry is not finite."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # not listed by torch
        # A step that went astray must come back as a point that can be rejected, and not raise.
        finite = torch.isfinite(matrix).all(dim=-1).all(dim=-1)[..., None]
        values, vectors = torch.linalg.eigh(torch.where(finite[..., None], matrix, 0.0))
        values = torch.where(finite, values, torch.nan)
    return values, vectors


def angle_over_sine(cosines: Tensor) -> Tensor:
    """The matrix function ``θ / sin θ`` of the cosines of angles between 0 and a right one."""
    eye = torch.eye(cosines.shape[-1], dtype=cosines.dtype, device=cosines.device)
    eye = eye.expand_as(cosines)
    w = 0.5 * (eye - cosines)
    powers = [eye]
    for _ in range(_WIDTH):
        powers.append(powers[-1] @ w)
    rows = torch.tensor(_SERIES, dtype=w.dtype, device=w.device).reshape(_WIDTH, _WIDTH)
    parts = torch.tensordot(rows, torch.stack(powers[:_WIDTH]), dims=1)
    value = parts[-1]
    for part in reversed(parts[:-1].unbind()):
        value = value @ powers[_WIDTH] + part
    return value


def rotation_between(matrix: Tensor) -> Tensor:
    """The orthogonal polar factor ``U Vᵀ`` of ``m = U s Vᵀ``, which can be differentiated twice."""
    if not _is_differentiated(matrix):
        left, _, right = torch.linalg.svd(matrix)
        return left @ right
    # Q ← ½(μ Q + Q^{-T}/μ), with Higham's scaling μ: as Q ends orthogonal, μ may count as a
    # constant
    q, settled = matrix, 0
    for _ in range(_NEWTON_STEPS):
        inverse = torch.linalg.inv_ex(q).inverse.mH
        sizes = [
            _row_sum_norm(part.detach()) * _row_sum_norm(part.detach().mT) for part in (inverse, q)
        ]
        factor = (sizes[0] / sizes[1]).sqrt().sqrt()[..., None, None]
        before, q = q, 0.5 * (factor * q + inverse / factor)
        settled += bool(static_all((q - before).detach().abs() < _NEWTON_CHANGE))
        if settled == 3:  # of a fixed point every step adds an order of exact derivatives
            break
    return q


def _is_differentiated(x: Tensor) -> bool:
    """Whether derivatives in x may be wanted, or no value can be read, under torch.func."""
    tracked = torch.is_grad_enabled() and x.requires_grad
    return tracked or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def skew(matrix: Tensor) -> Tensor:
    """The skew-symmetric, or skew-Hermitian, part."""
    return 0.5 * (matrix - matrix.mH)


def symmetric(matrix: Tensor) -> Tensor:
    """The symmetric, or Hermitian, part."""
    return 0.5 * (matrix + matrix.mH)


def antipodal(least: Tensor, bound: float, message: str) -> Tensor:
    """Where numbers below a bound tell that no geodesic is unique; raise if values can be read."""
    found = least <= bound
    if static_all(~found) is False:
        raise ValueError(message)
    return found
