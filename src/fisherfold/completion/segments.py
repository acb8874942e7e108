"""Sums of table rows over groups of ratings, the one kernel under every pass.

    out[g] = Σ_{k in group g} w_k table[index_k]

``embedding_bag`` does this in one streaming pass without materialising the gathered rows. A product with the sparse
matrix of the groups, or with its dense form chunk by chunk, gives the same and is quicker on other shapes; which one is
picked by ``method="auto"`` was measured (docs/decisions.md, benchmarks/completion_kernels.py).
"""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

METHODS = ("auto", "bag", "split", "csr", "dense")

_DENSE_ENTRIES = 2**24
_PIECE = 256
# Sparse products are quicker on rows of whole vectors (4 numbers of 8 bytes), if rows are read often enough for a copy.
_VECTOR = 4
_READ_OFTEN = 8
_MOST_ONES = 2**20


def bag_sum(
    table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None = None, *, method: str = "auto"
) -> Tensor:
    """Sum the rows of a table over groups of indices.

    Args:
        table: a matrix with one row per index value.
        indices: int32 or int64 row numbers of all groups, one group after the other.
        offsets: where each group starts, and the end of the last one; same dtype as ``indices``.
        weights: one factor per index, of the table's dtype; all 1 if not given.
        method: ``bag``, ``split``, ``csr`` or ``dense``; ``auto`` picks by device, dtype and density.

    Returns:
        A matrix with one row per group; zero for empty groups.

    Raises:
        ValueError: if the method is unknown.

    Example:
        >>> table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> bag_sum(table, torch.tensor([0, 2, 1]), torch.tensor([0, 2, 2, 3]))
        tensor([[6., 8.],
                [0., 0.],
                [3., 4.]])
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if method == "auto":
        method = pick_method(table, len(indices), len(offsets) - 1)
    if len(indices) == 0 or table.shape[1] == 0:
        return table.new_zeros(len(offsets) - 1, table.shape[1])
    if method == "csr":
        return _csr_sum(table, indices, offsets, weights)
    if method == "dense":
        return _dense_sum(table, indices, offsets, weights)
    if method == "split":
        return _split_sum(table, indices, offsets, weights)
    return F.embedding_bag(indices, table, offsets, mode="sum", include_last_offset=True, per_sample_weights=weights)


def pick_method(table: Tensor, n_indices: int, n_groups: int) -> str:
    """The kernel that ``bag_sum`` uses for these shapes.

    Args:
        table: the table.
        n_indices: the number of summands.
        n_groups: the number of groups.

    Returns:
        ``bag``, or for float64 on a CPU, where it has no fast path, ``csr`` or ``dense``; ``split`` on a GPU, where one
        thread would walk through the whole of a popular group.
    """
    if table.device.type != "cpu":
        return "split"
    if table.dtype != torch.float64:
        return "bag"
    crowded = n_indices >= 0.25 * n_groups * len(table)
    return "dense" if crowded and table.shape[1] > 32 else "csr"


def _split_sum(table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    # Groups are cut into pieces of bounded length, which are summed side by side, and the pieces are added up.
    counts = offsets.diff()
    pieces = (counts + (_PIECE - 1)) // _PIECE
    ends = pieces.cumsum(0, dtype=offsets.dtype)
    total = int(ends[-1])
    groups = torch.arange(len(counts), device=table.device).repeat_interleave(pieces, output_size=total)
    place = torch.arange(total, dtype=offsets.dtype, device=table.device) - (ends - pieces)[groups]
    cuts = torch.cat([offsets[:-1][groups] + _PIECE * place, offsets[-1:]])
    sums = F.embedding_bag(indices, table, cuts, mode="sum", include_last_offset=True, per_sample_weights=weights)
    order = torch.arange(total, dtype=offsets.dtype, device=table.device)
    ends = torch.cat([ends.new_zeros(1), ends])
    return F.embedding_bag(order, sums, ends, mode="sum", include_last_offset=True)


def _csr_sum(table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    width = table.shape[1]
    if width > 2 * _VECTOR and len(indices) >= _READ_OFTEN * len(table):
        table = F.pad(table, (0, -width % _VECTOR))
    values = _ones(table, len(indices)) if weights is None else weights
    with warnings.catch_warnings():
        # Sparse CSR products are announced as beta with a warning on first use.
        warnings.simplefilter("ignore", UserWarning)
        matrix = torch.sparse_csr_tensor(
            offsets, indices, values, size=(len(offsets) - 1, len(table)), check_invariants=False
        )
        return (matrix @ table)[:, :width]


def _ones(like: Tensor, count: int) -> Tensor:
    # Kept: making them anew takes a tenth of a product.
    return _kept_ones(like.dtype, like.device)[:count] if count <= _MOST_ONES else like.new_ones(count)


@lru_cache(maxsize=4)
def _kept_ones(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # kept for callers who differentiate, whoever came first
        return torch.ones(_MOST_ONES, dtype=dtype, device=device)


def _dense_sum(table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    # Products with the dense group matrix, a bounded number of its rows at a time.
    n_groups, width = len(offsets) - 1, len(table)
    out = table.new_empty(n_groups, table.shape[1])
    step = max(1, _DENSE_ENTRIES // width)
    for first in range(0, n_groups, step):
        last = min(first + step, n_groups)
        start, stop = int(offsets[first]), int(offsets[last])
        counts = offsets[first : last + 1].diff()
        rows = torch.arange(last - first, device=table.device).repeat_interleave(counts, output_size=stop - start)
        dense = table.new_zeros((last - first) * width)
        positions = rows.mul_(width).add_(indices[start:stop])
        if weights is None:
            dense[positions] = 1.0
        else:
            dense.index_add_(0, positions, weights[start:stop])
        torch.mm(dense.view(last - first, width), table, out=out[first:last])
    return out
