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

# Unrolled elimination wins for many small systems; LAPACK for few or large ones.
_LAPACK_BELOW = 400
_LAPACK_ABOVE_ORDER = 24
_RUN = 2**13
# Batched products of so many columns win above this order.
_BLOCKED_ABOVE, _BLOCK = 32, 17


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
    return packed.index_select(1, packed_positions(size, packed.device).flatten()).view(
        -1, size, size
    )


def outer_table(x: Tensor, *more: Tensor) -> Tensor:
    """The packed outer products x_j x_jᵀ of the rows of a table, and further columns beside them."""
    rows, columns = triangle(x.shape[1], x.device)
    products = x.index_select(1, rows).mul_(x.index_select(1, columns))
    return torch.cat([products, *more], dim=1) if more else products


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
    work[:, :size] = packed.T.index_select(0, packed_positions(size, packed.device).flatten()).view(
        size, size, count
    )
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


def solve_batch(precision: Tensor, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means, packed covariances and log-determinants of the precisions: A⁻¹ b, A⁻¹ and log|A| of a batch.

    Small matrices are swept with the batch as the last, long axis, larger ones a block of columns at a time:

        A ← A - C P Cᵀ,   C ← C P,   P ← -P     with C the columns of the block and P the inverse of its own part

    If a matrix is not positive to working precision the batch is inverted once more in float64, with its diagonals
    raised by 1e-10 of themselves.

    Example:
        >>> mean, inverse, log_det = solve_batch(torch.tensor([[[2.0, 1.0], [1.0, 3.0]]]), torch.tensor([[3.0, 4.0]]))
        >>> mean.tolist(), unpack(inverse)[0].mul(5).tolist(), round(float(log_det.exp()), 4)
        ([[1.0, 1.0]], [[3.0, -1.0], [-1.0, 2.0]], 5.0)
    """
    size = pull.shape[1]
    if size > _BLOCKED_ABOVE:
        work = precision.clone()
        log_det, positive = _sweep_blocks(work)
    else:
        from fisherfold.fisher.blocks import sweep  # with all Fisher operators

        work = precision.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
        pivots = sweep(work)
        log_det, positive = pivots.log().sum(0), bool((pivots > 0).all())
        work = work.permute(2, 0, 1).contiguous()
    if not (positive and bool(torch.isfinite(log_det).all())):
        raised = precision.double()
        raised.diagonal(dim1=1, dim2=2).mul_(1 + 1e-10)
        factors, info = torch.linalg.cholesky_ex(raised)
        if bool(info.any()) or not bool(torch.isfinite(factors).all()):
            raise ArithmeticError(
                "a posterior precision is not positive definite: the values or the ridge are too extreme"
            )
        log_det = (2 * factors.diagonal(dim1=1, dim2=2).log().sum(1)).to(pull)
        work = torch.cholesky_inverse(factors).neg_().to(pull)
    rows, columns = triangle(size, precision.device)
    packed = work.flatten(1).index_select(1, rows * size + columns).neg_()
    return torch.bmm(work, pull[:, :, None])[:, :, 0].neg_(), packed, log_det


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
        matrices[:, :, part], matrices[:, part], matrices[:, part, part] = (
            scaled,
            scaled.mT,
            -inverse,
        )
    return log_det, positive
