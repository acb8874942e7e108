"""Spectral directions: the matrix sign of the momentum, by Newton-Schulz iterations (Muon).

With M = U S Vᵀ, iterations X ← aX + bXXᵀX + c(XXᵀ)²X from M/‖M‖ bring all singular values near 1:
the result is close to U Vᵀ, the steepest direction in the spectral norm. The coefficients are those
of airbench's Muon. The Gram form iterates on R = XXᵀ alone, of the order of the shorter side,

    P = aI + bR + cR²,      Q ← P Q,      R ← P R P,      X ← Q X,

and begins again from X after three iterations, since small singular values are lost in R.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
# Iterations of the Gram form between two products with X.
RESTART = 3


def orthogonalise(matrix: Tensor, steps: int = STEPS, *, gram: bool | None = None) -> Tensor:
    """The matrix sign, roughly: singular values between 0.7 and 1.2.

    Args:
        matrix: one, or a stack of them.
        steps: the number of iterations.
        gram: whether to use the Gram form; by default where one side is at least twice the other.
    """
    # float16 has three more binary digits than bfloat16, and all singular values are at most 1.3
    x = (matrix.half() if matrix.is_cuda else matrix).reshape(-1, *matrix.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    # a norm of zero gives zero; entries are divided by the largest first, since squares of tiny
    # numbers vanish
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    if gram is None:
        gram = 2 * x.shape[-2] <= x.shape[-1]
    for done in range(0, steps, RESTART if gram else 1):
        x = _by_gram(x, min(RESTART, steps - done)) if gram else _iterate(x)
    return (x.mT if tall else x).reshape(matrix.shape).to(matrix.dtype)


def _iterate(x: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    gram = x @ x.mT
    return torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)


def _by_gram(x: Tensor, steps: int) -> Tensor:
    """As many iterations on the Gram matrix, and one product with X."""
    a, b, c = COEFFICIENTS
    gram = x @ x.mT
    total: Tensor | None = None
    for step in range(steps):
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        total = p if total is None else p @ total
        if step < steps - 1:
            gram = p @ gram @ p
    return x if total is None else total @ x
