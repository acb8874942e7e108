"""What one step on the Grassmann manifold costs over one QR decomposition.

Every row is the least time over interleaved rounds (each round runs all rows, small ones several
times, so that a slow moment of the machine hits all alike); the ratio is to ``torch.linalg.qr`` of
the same matrix in the same process. The frame error is the largest entry of |xᵀx - I| of the
result, in float64.

Against: `torch.linalg.qr`, geoopt, pymanopt
Takes: two minutes
Page: docs/benchmarks/core.md
"""

import importlib
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from fisherfold.manifolds import Grassmann
from fisherfold.manifolds.frames import orthonormality_error

SMOKE = "--rounds 1 --rows 300"

# Above this height n×n matrices (geoopt's default Stiefel manifold) no longer fit.
MAX_SQUARE = 5000


@dataclass
class Row:
    name: str
    run: Callable[[], object]
    frame: bool
    best: float = float("inf")


def peer(name: str):
    """A peer's module, or None where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


def rows(n: int, p: int, dtype: torch.dtype) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    grassmann = Grassmann(n, p)
    x = grassmann.random_point(generator=generator, dtype=dtype)
    v = 0.1 * grassmann.random_tangent(x, generator=generator)
    a = torch.randn(n, p, generator=generator, dtype=dtype)
    y = x + v
    out = [Row("torch.linalg.qr", lambda: torch.linalg.qr(y).Q, True)]
    for method in grassmann.retractions:
        out.append(
            Row(
                f"fisherfold retract, {method}",
                lambda m=method: grassmann.retract(x, v, method=m),
                True,
            )
        )
    out.append(Row("fisherfold project", lambda: grassmann.project(x, a), False))
    geoopt = peer("geoopt")
    if geoopt:
        euclidean = geoopt.Stiefel(canonical=False)
        canonical = geoopt.Stiefel()
        out.append(Row("geoopt Stiefel(canonical=False) retr", lambda: euclidean.retr(x, v), True))
        out.append(
            Row("geoopt Stiefel(canonical=False) proju", lambda: euclidean.proju(x, a), False)
        )
        if n <= MAX_SQUARE:
            out.append(Row("geoopt Stiefel() retr", lambda: canonical.retr(x, v), True))
            out.append(Row("geoopt Stiefel() proju", lambda: canonical.proju(x, a), False))
    manifolds = peer("pymanopt.manifolds")
    if manifolds:
        theirs = manifolds.Grassmann(n, p)
        nx = x.numpy()
        nv = v.numpy()
        na = a.numpy()
        out.append(Row("pymanopt Grassmann retraction", lambda: theirs.retraction(nx, nv), True))
        out.append(Row("pymanopt Grassmann projection", lambda: theirs.projection(nx, na), False))
    return out


def measure(table: list[Row], rounds: int) -> None:
    for _ in range(rounds):
        for row in table:
            begin = time.perf_counter()
            for _ in range(100):
                start = time.perf_counter()
                row.run()
                stop = time.perf_counter()
                row.best = min(row.best, stop - start)
                if stop - begin > 0.2:
                    break


def show(console: Console, n: int, p: int, dtype: torch.dtype, rounds: int) -> None:
    table = rows(n, p, dtype)
    measure(table, rounds)
    name = str(dtype).removeprefix("torch.")
    title = f"Gr({n}, {p}), {name}, {torch.get_num_threads()} threads, best of {rounds}"
    printed = Table("operation", "ms", "ratio to QR", "frame error", title=title)
    for column in printed.columns[1:]:
        column.justify = "right"
    for row in table:
        error = (
            f"{float(orthonormality_error(torch.as_tensor(row.run()))):.0e}" if row.frame else ""
        )
        printed.add_row(row.name, f"{1e3 * row.best:.2f}", f"{row.best / table[0].best:.2f}", error)
    console.print(printed)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of torch (2)")
    parser.add_argument("--rows", type=int, default=10**6, help="of the large matrix (10^6)")


def main(given: Namespace) -> None:
    torch.set_num_threads(given.threads)
    console = Console(width=100)
    for n, dtype in ((given.rows, torch.float32), (3952, torch.float32), (3952, torch.float64)):
        show(console, n, 10, dtype, given.rounds)
