"""Sums of outer products, and many small symmetric positive definite matrices at once.

A batch of n matrices of order q is *batch-last*, a (q, q, n) tensor in which each matrix entry is
one vector of length n. The inverse is the sweep operator, q rank-one updates of the whole batch:

    for k = 1..q:   A ← A - a_k a_kᵀ / A_kk  off row and column k,
                    a_k / A_kk  on them,   -1 / A_kk  at (k, k)

which leaves -A⁻¹ in place of A and the pivots of the Cholesky factorisation on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

# LAPACK is quicker for few or large matrices.
_FEWEST, _LARGEST_ORDER = 400, 24
# Entries of a batch that is swept at once: it stays in the cache.
_ENTRIES = 2**17
# Rows that are summed at once, in their own precision.
_BLOCK_ROWS = 256
# Rounding units that sums leave of the eigenvalue 0, with a margin; matrices of more rows have as
# many as rows.
_UNITS = 32


def gram(rows: Tensor) -> Tensor:
    """The matrix WᵀW, summed in float64 over blocks of rows, so that rounding does not grow with their number."""
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    for block in torch.split(rows, _BLOCK_ROWS):
        total += block.T @ block
    return total.to(rows.dtype)


def rounding_share(size: int, dtype: torch.dtype) -> float:
    """The share of the largest eigenvalue of a matrix of sums at or below which another one is 0."""
    return max(size, _UNITS) * torch.finfo(dtype).eps


def sweep(matrices: Tensor) -> Tensor:
    """Replace every matrix of a batch-last tensor by its negative inverse."""
    pivots = matrices.new_empty(len(matrices), matrices.shape[2])
    for k in range(len(matrices)):
        row = matrices[k].clone()
        pivots[k] = row[k]
        reciprocal = row[k].reciprocal()
        scaled = row * reciprocal
        torch.addcmul(matrices, row[:, None], scaled[None], value=-1, out=matrices)
        matrices[k] = scaled
        matrices[:, k] = scaled
        matrices[k, k] = -reciprocal
    return pivots


def inverse_blocks(blocks: Tensor) -> Tensor | None:
    """The inverses of many small well-conditioned matrices."""
    count, size, _ = blocks.shape
    if count < _FEWEST or size > _LARGEST_ORDER:
        return None
    inverse = torch.empty_like(blocks)
    least = torch.finfo(blocks.dtype).eps ** 0.5
    step = max(256, _ENTRIES // size**2)
    for start in range(0, count, step):
        part = slice(start, start + step)
        work = blocks[part].permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
        diagonal = work.diagonal(dim1=0, dim2=1).mT.clone()
        if not bool((sweep(work) > least * diagonal).all()):
            return None
        inverse[part] = work.neg_().permute(2, 0, 1)
    return inverse


def apply_blocks(blocks: Tensor, x: Tensor) -> Tensor:
    """The products of small matrices with the rows of a table."""
    return torch.bmm(blocks, x.unsqueeze(2)).squeeze(2)
