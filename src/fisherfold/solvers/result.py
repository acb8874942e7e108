"""What a run returns: the point, why it ended, and the trace as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fisherfold.manifolds.base import Point
from fisherfold.plain import counted

if TYPE_CHECKING:
    import pandas
    import polars


@dataclass
class Trace:
    """One row per iteration; the columns depend on the method.

    Always there: ``iteration``; ``samples``, the sample gradients evaluated so far; ``products``, the sample Fisher
    products so far; ``seconds`` of solver time; ``loss`` and ``gradient_norm`` over all samples (NaN in rows of a
    stochastic method where they were not evaluated). ``rngd`` adds ``rho``, ``sigma`` and ``accepted``; the problem's
    metrics follow.

    Attributes:
        rows: the rows as dictionaries.
    """

    rows: list[dict[str, float]] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self.rows)

    def __getitem__(self, column: str) -> list[float]:
        if self.rows and column not in self.columns:
            raise KeyError(f"the trace has the columns {self.columns}, not {column!r}")
        return [row.get(column, float("nan")) for row in self.rows]

    def to_polars(self) -> polars.DataFrame:
        """The trace as a polars table.

        Returns:
            One row per iteration.
        """
        import polars

        return polars.DataFrame({name: self[name] for name in self.columns}, strict=False)

    def to_pandas(self) -> pandas.DataFrame:
        """The trace as a pandas table (pandas must be installed).

        Returns:
            One row per iteration.
        """
        import pandas

        return pandas.DataFrame({name: self[name] for name in self.columns})


@dataclass(frozen=True)
class Result:
    """The outcome of ``minimize``.

    Attributes:
        x: the best point: the one with the lowest loss over all samples that was seen; of a run that converged the one
            that met the criterion, unless another was lower by more than rounding.
        value: the loss there.
        status: ``converged`` (a stopping criterion on the solution), ``stopped`` (a budget, a callback), ``max_iter``,
            ``stalled`` (no acceptable step was found) or ``non_finite`` (only infinite or NaN values ahead).
        message: the reason in a sentence.
        trace: the table of the run.
        iterations: how many were made.
        last: the final iterate, which differs from ``x`` only if the loss went up at the end.
    """

    x: Point
    value: float
    status: str
    message: str
    trace: Trace
    iterations: int
    last: Any = field(repr=False, default=None)

    @property
    def success(self) -> bool:
        """Whether a criterion on the solution was met."""
        return self.status == "converged"

    def __repr__(self) -> str:
        made = counted(self.iterations, "iteration")
        return f"Result({self.status} after {made}, value {self.value:.6g}: {self.message})"
