"""What a run returns: the point, why it ended, and the trace as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fisherfold.fisher.covariance import covariance
from fisherfold.manifolds.base import Point
from fisherfold.plain import counted
from fisherfold.problems.base import Problem

if TYPE_CHECKING:
    import pandas
    import polars


@dataclass
class Trace:
    """One row per iteration; the columns depend on the method.

    Always there: ``iteration``; ``samples``, the sample gradients evaluated so far, by criteria as well;
    ``products``, the sample Fisher products so far; ``seconds`` of solver time; ``loss`` and ``gradient_norm`` over all
    samples (NaN in rows of a stochastic method where they were not evaluated). ``rngd`` adds ``rho``, ``sigma`` and
    ``accepted``; the problem's metrics follow.

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
        """The trace as a polars table."""
        import polars

        return polars.DataFrame({name: self[name] for name in self.columns}, strict=False)

    def to_pandas(self) -> pandas.DataFrame:
        """The trace as a pandas table (pandas must be installed)."""
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
        problem: what was minimised, for ``covariance``.
    """

    x: Point
    value: float
    status: str
    message: str
    trace: Trace
    iterations: int
    last: Any = field(repr=False, default=None)
    problem: Problem | None = field(repr=False, default=None, compare=False)

    @property
    def success(self) -> bool:
        """Whether a criterion on the solution was met."""
        return self.status == "converged"

    def covariance(
        self,
        f: Callable[[Any], Tensor] | None = None,
        *,
        robust: bool = False,
        dispersion: float = 1.0,
    ) -> Any:
        """The covariance of the estimate, from the Fisher information on the tangent space at ``x``.

        It is that of maximum likelihood: the loss must be a mean negative log-likelihood, at its minimum. A prior of
        the problem counts as data. Warns if the minimum is more than a tenth of a standard error away.

        Args:
            f: a torch function of the point; its covariance follows by the delta method.
            robust: the sandwich with the observed gradients, right even where the likelihood is not; of problems with
                a ``fisher`` of kind ``empirical``.
            dispersion: a factor, such as the residual variance of a ``Gaussian()`` whose variance 1 was a placeholder;
                not with ``robust``, whose observed gradients contain it.

        Returns:
            A ``fisherfold.fisher.Covariance`` with standard errors, intervals and confidence regions; with f the
            covariance matrix of its entries.

        Raises:
            ValueError: if the result has no problem with it, the curvature at the estimate is negative, or f changes
                along directions that data do not identify.
        """
        if self.problem is None:
            raise ValueError("this result does not know its problem; results of minimize do")
        if not 0 < dispersion < math.inf:
            raise ValueError(f"dispersion must be a positive number, got {dispersion}")
        if robust and dispersion != 1:
            raise ValueError(
                f"robust=True takes the dispersion from the observed gradients; leave out dispersion={dispersion}"
            )
        kinds = self.problem.fisher_kinds
        if robust and "empirical" not in kinds:
            name = type(self.problem).__name__
            raise ValueError(
                f"robust=True needs the Fisher kind 'empirical', {name} has {list(kinds)}"
            )
        scores = self.problem.fisher(self.x, kind="empirical") if robust else None
        kind = next(kind for kind in ("exact", "observed", *kinds) if kind in kinds)
        operator, count = (
            self.problem.fisher(self.x, kind=kind),
            self.problem.n_samples / dispersion,
        )
        found = covariance(operator, count, gradient=self.problem.gradient(self.x), scores=scores)
        return found if f is None else found.of(f)[1]

    def __repr__(self) -> str:
        made = counted(self.iterations, "iteration")
        return f"Result({self.status} after {made}, value {self.value:.6g}: {self.message})"
