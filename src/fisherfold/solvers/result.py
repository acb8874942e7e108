"""What a run returns: the point, why it ended, and the trace as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fisherfold.fisher.covariance import covariance
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds.base import Point, leaves
from fisherfold.plain import counted
from fisherfold.problems.base import Problem
from fisherfold.warn import warn

if TYPE_CHECKING:
    import pandas
    import polars

# Solves are preconditioned by a matrix up to this dimension, made from so many samples per
# dimension.
LARGEST_NEARBY = 1000
SAMPLES_PER_DIMENSION = 20


@dataclass
class Trace:
    """One row per iteration; the columns depend on the method.

    Always there: ``iteration``; ``samples``, the sample gradients evaluated so far, by criteria as
    well; ``products``, the sample Fisher products so far; ``seconds`` of solver time; ``loss`` and
    ``gradient_norm`` over all samples (NaN in rows of a stochastic method where they were not
    evaluated). ``rngd`` adds ``rho``, ``sigma`` and ``accepted``; the problem's metrics follow.

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
        x: the best point: the one with the lowest loss over all samples that was seen; of a run
            that converged the one that met the criterion, unless another was lower by more than
            rounding.
        value: the loss there.
        status: ``converged`` (a stopping criterion on the solution), ``stopped`` (a budget, a
            callback), ``max_iter``, ``stalled`` (no acceptable step was found), ``non_finite``
            (only infinite or NaN values ahead), ``saddle`` (the gradient is 0, and the loss falls
            along a direction) or ``unbounded`` (its minimum lies at infinity).
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
        information: str | None = None,
        robust: bool = False,
        groups: Any = None,
        dispersion: float = 1.0,
    ) -> Any:
        """The covariance of the estimate, from the information on the tangent space at ``x``.

        That of maximum likelihood needs a loss that is a mean negative log-likelihood, at its
        minimum, of a model that is right; the sandwich (``robust=True``) any mean of losses. A
        prior of the problem counts as data. Warns if the minimum is more than a tenth of a standard
        error away, or the run has not ended at one.

        Args:
            f: a torch function of the point; its covariance follows by the delta method.
            information: ``expected``, the model's Fisher information; ``observed``, the Hessian of
                the loss; the expected one where the problem has it, if not given.
            robust: the sandwich H⁻¹ S H⁻¹ of the Hessian and the second moment of the observed
                gradients, right even where the likelihood is not.
            groups: a label for every sample; samples of one label may depend on each other. Only
                with ``robust``.
            dispersion: a factor, such as the residual variance of a ``Gaussian()`` whose variance 1
                was a placeholder; not with ``robust``, whose observed gradients contain it.

        Returns:
            A ``fisherfold.fisher.Covariance`` with standard errors, intervals and confidence
            regions; with f the covariance matrix of its entries.

        Raises:
            ValueError: if the result has no problem with it, the curvature at the estimate is
                negative, or f changes along directions that data do not identify.
        """
        if self.problem is None:
            raise ValueError("this result does not know its problem; results of minimize do")
        if not 0 < dispersion < math.inf:
            raise ValueError(f"dispersion must be a positive number, got {dispersion}")
        if information not in (None, "expected", "observed"):
            raise ValueError(
                f"information must be 'expected' or 'observed', got {information!r}; robust=True "
                "gives the sandwich"
            )
        if robust and dispersion != 1:
            raise ValueError(
                "robust=True takes the dispersion from the observed gradients; leave out "
                f"dispersion={dispersion}"
            )
        if robust and information == "expected":
            raise ValueError(
                "robust=True does not trust the model, whose expected information is of no use to "
                "it; leave out information='expected'"
            )
        if groups is not None and not robust:
            raise ValueError("groups are for the sandwich; add robust=True")
        if self.status in {"saddle", "unbounded"}:
            warn(f"standard errors of no minimum: {self.message}", RuntimeWarning)
        problem, kinds = self.problem, self.problem.fisher_kinds
        kind = next(kind for kind in ("exact", "observed", *kinds) if kind in kinds)
        observed = robust or information == "observed" or kind == "observed"
        if information == "expected" and kind == "observed":
            raise ValueError(
                f"{type(problem).__name__} has no expected information, which takes a likelihood; "
                "use NLLProblem, or information='observed'"
            )
        scores = problem.scores(self.x, groups) if robust else None
        found = covariance(
            problem.hessian(self.x) if observed else problem.fisher(self.x, kind=kind),
            problem.n_samples / dispersion,
            gradient=problem.gradient(self.x),
            scores=scores,
            nearby=self._nearby(problem, kind, observed=observed),
        )
        return found if f is None else found.of(f)[1]

    def _nearby(self, problem: Problem, kind: str, *, observed: bool) -> FisherOperator | None:
        """The information of some of the samples, or the expected beside the observed one, for preconditioning."""
        dim = problem.manifold.dim
        if kind != "exact" or dim > LARGEST_NEARBY:
            return None
        count = SAMPLES_PER_DIMENSION * dim + 1000
        if count < problem.n_samples / 4:
            generator = torch.Generator().manual_seed(0)
            batch = torch.randint(problem.n_samples, (count,), generator=generator)
            try:
                return problem.fisher(self.x, batch.to(leaves(self.x)[0].device), kind=kind)
            except ValueError:  # of problems that keep statistics of all samples
                pass
        return problem.fisher(self.x, kind=kind) if observed else None

    def __repr__(self) -> str:
        made = counted(self.iterations, "iteration")
        return f"Result({self.status} after {made}, value {self.value:.6g}: {self.message})"
