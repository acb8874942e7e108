"""Many small symmetric positive definite systems at once, stored so that the long axis is the one that vectorises.

A batch of m symmetric p×p matrices is *packed*, its lower triangle in one row of a (m, p(p+1)/2) table, which is what
segment sums of outer products give. Solving unrolls Gaussian elimination over the entries, each a vector of length m:

    for k = 1..p:   row_k ← row_k / d_k,   M_ij ← M_ij - M_ik row_kj  for i, j > k

Its pivots d_k over the diagonal they started from are 1 - R² of coordinate k on those before it: near zero, the system
is ill conditioned and the caller is told.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fisherfold.fisher.blocks import sweep

# Unrolled elimination wins for many small systems; LAPACK for few or large ones.
_LAPACK_BELOW = 400
_LAPACK_ABOVE_ORDER = 24
_RUN = 2**13
# Batched products win above this order, in runs that fit into the second-level cache.
_BLOCKED_ABOVE, _BLOCKED_RUN, _BLOCK = 80, 64, 17


@lru_cache(maxsize=256)
def triangle(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column numbers of the packed lower triangle."""
    rows, columns = torch.tril_indices(size, size, device=device)
    return rows, columns


@lru_cache(maxsize=256)
def packed_positions(size: int, device: torch.device) -> Tensor:
    """Where entry (i, j) of a symmetric matrix lies in its packed form."""
    rows, columns = triangle(size, device)
    positions = torch.zeros(size, size, dtype=torch.int64, device=device)
    order = torch.arange(len(rows), device=device)
    positions[rows, columns] = order
    positions[columns, rows] = order
    return positions


def order_of(length: int) -> int:
    """The order p of matrices whose packed form has p(p+1)/2 entries."""
    return int(((8 * length + 1) ** 0.5 - 1) // 2)


def unpack(packed: Tensor) -> Tensor:
    """The square matrices of a packed table."""
    size = order_of(packed.shape[-1])
    return packed.index_select(1, packed_positions(size, packed.device).flatten()).view(-1, size, size)


def outer_table(x: Tensor, *more: Tensor) -> Tensor:
    """The packed outer products x_j x_jᵀ of the rows of a table, and further columns beside them."""
    size = x.shape[1]
    length = size * (size + 1) // 2
    out = x.new_empty(len(x), length + sum(m.shape[1] for m in more))
    start = 0
    for k in range(size):
        torch.mul(x[:, : k + 1], x[:, k : k + 1], out=out[:, start : start + k + 1])
        start += k + 1
    for m in more:
        out[:, start : start + m.shape[1]] = m
        start += m.shape[1]
    return out


def solve_positive(packed: Tensor, rhs: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """Solve (M_i + diag) x_i = b_i for all i.

    Example:
        >>> m = torch.tensor([[2.0, 1.0, 3.0]])
        >>> x, pivot = solve_positive(m, torch.tensor([[4.0, 7.0]]), torch.zeros(1, 1))
        >>> x.round(decimals=4).tolist(), round(float(pivot), 4)
        ([[1.0, 2.0]], 0.8333)
    """
    count, size = rhs.shape
    if count < _LAPACK_BELOW or size > _LAPACK_ABOVE_ORDER:
        return _by_lapack(unpack(packed), rhs, diagonal)
    if count > 2 * _RUN and packed.device.type == "cpu":
        # a run's work stays in the cache, and its memory does not grow with the table
        spread = diagonal.expand(count, -1)
        runs = [slice(start, start + _RUN) for start in range(0, count, _RUN)]
        parts = [solve_positive(packed[run], rhs[run], spread[run]) for run in runs]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    work = packed.new_empty(size, size + 1, count)
    work[:, :size] = packed.T.index_select(0, packed_positions(size, packed.device).flatten()).view(size, size, count)
    work[:, size] = rhs.T
    main = work[:, :size].diagonal(dim1=0, dim2=1).T
    main += diagonal.expand(count, size).T
    whole = main.clone()
    for k in range(size):
        row = work[k, k + 1 :] / work[k, k]
        work[k + 1 :, k + 1 :].addcmul_(work[k + 1 :, k, None], row[None], value=-1)
        work[k, k + 1 :] = row
    share = (main / whole).amin(dim=0)
    x = work[:, size].clone()
    for k in range(size - 1, 0, -1):
        x[:k].addcmul_(work[:k, k], x[k], value=-1)
    return x.T.contiguous(), share


def _by_lapack(square: Tensor, rhs: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
    main = square.diagonal(dim1=1, dim2=2)
    main += diagonal
    factors, info = torch.linalg.cholesky_ex(square)
    share = (factors.diagonal(dim1=1, dim2=2) ** 2 / main).amin(dim=1)
    share = torch.where(info == 0, share, torch.zeros_like(share))
    return torch.cholesky_solve(rhs.unsqueeze(-1), factors).squeeze(-1), share


def pack(square: Tensor) -> Tensor:
    """The packed table of symmetric matrices."""
    rows, columns = triangle(square.shape[-1], square.device)
    return square[:, rows, columns]


def invert_batch_last(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Invert a batch of symmetric positive definite matrices.

    If a pivot is not positive (a matrix that is singular to working precision) the batch is inverted once more in
    float64, with its diagonal raised by 1e-10 of itself.

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


def solve_batch_last(precision: Tensor, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means, packed covariances and log-determinants of the precisions: A⁻¹ b, A⁻¹ and log|A| of a batch.

    Above order 80 runs of matrices are swept a block of columns at a time, by batched products:

        A ← A - C P Cᵀ,   C ← C P,   P ← -P     with C the columns of the block and P the inverse of its own part
    """
    size, count = pull.shape
    rows, columns = triangle(size, precision.device)
    places = rows * size + columns  # of the packed form in the flattened matrix
    if size <= _BLOCKED_ABOVE:
        inverse, log_det = invert_batch_last(precision)
        return (inverse * pull).sum(1), inverse.flatten(0, 1).index_select(0, places), log_det
    mean, packed = torch.empty_like(pull), pull.new_empty(len(places), count)
    log_det = pull.new_empty(count)
    run = _BLOCKED_RUN if precision.device.type == "cpu" else count
    for start in range(0, count, run):
        part = slice(start, start + run)
        work = precision[:, :, part].permute(2, 0, 1).clone(memory_format=torch.contiguous_format)
        log_det[part], positive = _sweep_blocks(work)
        if not positive:
            inverse, log_det[part] = invert_batch_last(precision[:, :, part].contiguous())
            work = inverse.neg_().permute(2, 0, 1).contiguous()
        mean[:, part] = torch.bmm(work, pull[:, part].T[:, :, None])[:, :, 0].neg_().T
        packed[:, part] = work.flatten(1).index_select(1, places).neg_().T
    return mean, packed, log_det


def _sweep_blocks(matrices: Tensor) -> tuple[Tensor, bool]:
    """Sweep matrices that lie one after the other in place; the log-determinants, and whether all were positive."""
    log_det, positive = matrices.new_zeros(len(matrices)), True
    for start in range(0, matrices.shape[1], _BLOCK):
        part = slice(start, start + _BLOCK)
        columns = matrices[:, :, part].contiguous()
        factors, info = torch.linalg.cholesky_ex(columns[:, part])
        positive = positive and not bool(info.any())
        inverse = torch.cholesky_inverse(factors)
        log_det += 2 * factors.diagonal(dim1=1, dim2=2).log().sum(1)
        scaled = columns @ inverse
        matrices.baddbmm_(scaled, columns.mT, alpha=-1)
        matrices[:, :, part], matrices[:, part], matrices[:, part, part] = scaled, scaled.mT, -inverse
    return log_det, positive and bool(torch.isfinite(log_det).all())


def _sweep(matrices: Tensor) -> tuple[Tensor, bool]:
    """Sweep every pivot in place; the log-determinants, and whether all pivots were positive."""
    pivots = sweep(matrices)
    log_det = pivots.log().sum(dim=0)
    return log_det, bool((pivots > 0).all() & torch.isfinite(log_det).all())
