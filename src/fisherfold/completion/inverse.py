"""The inverses of many small symmetric positive definite matrices at once.

A batch is *packed*, the lower triangle of each matrix in one row of a (n, q(q+1)/2) table (``problems.packed``), or
*batch-last*, a (q, q, n) tensor in which each matrix entry is one vector of length n. A⁻¹ and log|A| = Σ_k log d_k come
from the sweep operator and its pivots d_k (``fisher.blocks``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fisherfold.completion.packed import triangle
from fisherfold.fisher.blocks import sweep


def pack(square: Tensor) -> Tensor:
    """The packed table of symmetric matrices.

    Args:
        square: a (n, q, q) tensor.

    Returns:
        A (n, q(q+1)/2) table.
    """
    rows, columns = triangle(square.shape[-1], square.device)
    return square[:, rows, columns]


def invert_batch_last(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Invert a batch of symmetric positive definite matrices.

    If a pivot is not positive (a matrix that is singular to working precision) the batch is inverted once more in
    float64, with its diagonal raised by 1e-10 of itself.

    Args:
        matrices: a batch-last (q, q, n) tensor.

    Returns:
        The batch-last inverses, and the logarithms of the determinants of the given matrices.

    Raises:
        ArithmeticError: if the matrices are not positive definite in float64 either.

    Example:
        >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]]).unsqueeze(-1)
        >>> inverse, log_det = invert_batch_last(a)
        >>> torch.allclose(inverse[..., 0] @ a[..., 0], torch.eye(2), atol=1e-6), round(float(log_det.exp()), 4)
        (True, 5.0)
    """
    work = matrices.clone()
    log_det, positive = _sweep(work)
    if positive:
        return work.neg_(), log_det
    work = matrices.double()
    work.diagonal(dim1=0, dim2=1).mul_(1 + 1e-10)
    log_det, positive = _sweep(work)
    if not positive:
        raise ArithmeticError("a posterior precision is not positive definite: the values or the ridge are too extreme")
    return work.neg_().to(matrices.dtype), log_det.to(matrices.dtype)


def _sweep(matrices: Tensor) -> tuple[Tensor, bool]:
    """Sweep every pivot in place; the log-determinants, and whether all pivots were positive."""
    pivots = sweep(matrices)
    log_det = pivots.log().sum(dim=0)
    return log_det, bool((pivots > 0).all() & torch.isfinite(log_det).all())
