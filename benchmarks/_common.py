"""What the benchmarks share: options, timing, tables and peers that may be missing.

Nothing here imports torch, so that ``list`` and ``--help`` answer at once.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

# tables alone need it: a machine with a GPU may have nothing but torch
if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")

# what to install for a module, where the names differ
PACKAGES = {
    "curvlinops": "curvlinops-for-pytorch",
    "faiss": "faiss-cpu",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "surprise": "scikit-surprise 'numpy<2'",
    "lenskit": "lenskit",
}
# widths at which tables are printed when the output is no terminal
WIDTH = 150


class Missing(Exception):
    """A peer or data that this machine does not have; says how to get it."""


def missing_module(error: ModuleNotFoundError) -> str:
    """Say how to get the module that was not found; nothing if it is one of our own."""
    name = (error.name or "").partition(".")[0]
    if name in ("", "fisherfold", "benchmarks"):
        return ""
    return f"the package {name} is missing: pip install {PACKAGES.get(name, name)}"


def peer(name: str) -> ModuleType:
    """Import a package to compare with, or raise ``Missing`` with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Missing(missing_module(error)) from error


def left_out(error: ImportError) -> str:
    """Say which peer is left out because a package is missing, and how to get it."""
    advice = missing_module(error) if isinstance(error, ModuleNotFoundError) else ""
    return f"left out: {advice or error}"


def names(text: str) -> list[str]:
    """Read an option of names separated by commas."""
    return [name for name in text.split(",") if name]


def integers(text: str) -> list[int]:
    """Read an option of whole numbers separated by commas; 1e6 is one too."""
    return [int(float(number)) for number in names(text)]


def numbers(text: str) -> list[float]:
    """Read an option of numbers separated by commas."""
    return [float(number) for number in names(text)]


def timed(work: Callable[[], T], clock: Callable[[], float] = time.process_time) -> tuple[T, float]:
    """Call ``work`` and return its result with the seconds it took; CPU seconds by default."""
    start = clock()
    result = work()
    return result, clock() - start


def least_seconds(
    work: Callable[[], Any], rounds: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Return the least time of several calls; CPU seconds by default."""
    return min(timed(work, clock)[1] for _ in range(rounds))


def median_seconds(
    work: Callable[[], Any], rounds: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Return the median time of several calls; CPU seconds by default."""
    return statistics.median(timed(work, clock)[1] for _ in range(rounds))


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """Write a mean and, if there are several values, their standard deviation."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def table(title: str, columns: Sequence[str], left: int = 1) -> Table:
    """Make a table whose first ``left`` columns are text and whose others are figures."""
    from rich.table import Table

    made = Table(title=title)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < left else "right")
    return made


def show(made: Table, width: int = WIDTH) -> None:
    """Print a table at a width that does not depend on the terminal."""
    from rich.console import Console

    Console(width=width).print(made)
