"""Which kernel sums a packed outer-product table over the ratings of every column fastest, and which solves them.

    FISHERFOLD_DATA=... python benchmarks/completion_kernels.py [--threads 1]

``bag`` is embedding_bag over CSR indices, ``csr`` a product with the sparse mask, ``dense`` with the dense mask built
on the fly, ``padded`` a bmm of gathered rows in buckets of similar size. Milliseconds, best of seven. A second table is
the product of a kept dense mask and a thin table, as for crowded tables: whole and in pieces through NumPy, and whole
through torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from fisherfold import datasets
from fisherfold.completion import Ratings
from fisherfold.completion.crowded import crowded_sum
from fisherfold.completion.grouped import Grouped
from fisherfold.completion.packed import _by_lapack, outer_table, solve_positive, unpack
from fisherfold.completion.segments import bag_sum


def best(function: Callable[[], object], repeats: int = 7) -> str:
    function()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return f"{1e3 * min(times):.1f}"


def padded(side: Grouped, frame: torch.Tensor) -> None:
    """Gram matrices by gathering columns of similar size into blocks padded with zeros."""
    classes = torch.log2(side.counts.clamp(min=1).double()).ceil().long()
    longer = torch.cat([frame, frame.new_zeros(1, frame.shape[1])])
    for height in sorted(set(classes.tolist())):
        members = (classes == height).nonzero().squeeze(1)
        for block in members.split(max(1, 2**20 >> height)):
            positions, offsets = side.select(block)
            counts = offsets.diff().long()
            index = torch.full((len(block), int(counts.max())), len(frame))
            index[torch.arange(index.shape[1]) < counts[:, None]] = side.at(positions)[0].long()
            rows = longer[index]
            torch.bmm(rows.mT, rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    table = Table(title=f"{torch.get_num_threads()} thread(s), ms")
    names = ("data", "groups", "dtype", "rank", "bag", "csr", "dense", "padded", "bag, weighted", "csr, weighted")
    for name in (*names, "solves unrolled", "solves LAPACK"):
        table.add_column(name, justify="left" if name in {"data", "groups", "dtype"} else "right")
    for name in ("movielens1m", "jester1"):
        data = datasets.load_ratings(name)
        for dtype in (torch.float32, torch.float64):
            ratings = Ratings(data.rows, data.cols, data.values, data.shape, dtype=dtype)
            for groups, side, others in (
                ("users", ratings.by_row, ratings.n_columns), ("items", ratings.by_column, ratings.n_rows)
            ):  # fmt: skip
                for rank in (5, 10):
                    table.add_row(name, groups, str(dtype)[6:], str(rank), *measure(side, others, rank, dtype))
    Console(width=150).print(table)
    Console(width=150).print(thin_products())


def thin_products() -> Table:
    """Sums over a crowded table as products with its dense mask, in the shape of Jester-1."""
    table = Table(title="dense mask times a thin table, ms")
    for name in ("mask", "width", "dtype", "NumPy, pieces", "NumPy, whole", "torch, whole"):
        table.add_column(name, justify="right")
    for dtype in (torch.float32, torch.float64):
        mask = (torch.rand(100, 24983, generator=torch.Generator().manual_seed(0)) < 0.7).to(dtype)
        for matrix, width in ((mask, 15), (mask, 5), (mask.T, 15), (mask.T, 5)):
            thin = torch.randn(matrix.shape[1], width, dtype=dtype)
            times = (
                best(lambda: crowded_sum(matrix, thin)),  # noqa: B023
                best(lambda: matrix.numpy() @ thin.numpy()),  # noqa: B023
                best(lambda: matrix @ thin),  # noqa: B023
            )
            table.add_row(f"{matrix.shape[0]} × {matrix.shape[1]}", str(width), str(dtype)[6:], *times)
    return table


def measure(side: Grouped, others: int, rank: int, dtype: torch.dtype) -> list[str]:
    frame = torch.randn(others, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    packed, indices, offsets, values = outer_table(frame), side.indices(), side.offsets, side.values()
    sums = [best(lambda m=m: bag_sum(packed, indices, offsets, method=m)) for m in ("bag", "csr", "dense")]
    weighted = [best(lambda m=m: bag_sum(frame, indices, offsets, values, method=m)) for m in ("bag", "csr")]
    gram, right = bag_sum(packed, indices, offsets), bag_sum(frame, indices, offsets, values)
    ridge = torch.ones(1, 1, dtype=dtype)
    solves = [
        best(lambda: solve_positive(gram, right, ridge)),
        best(lambda: _by_lapack(unpack(gram), right, ridge)),
    ]
    return [*sums, best(lambda: padded(side, frame), 2), *weighted, *solves]


if __name__ == "__main__":
    main()
