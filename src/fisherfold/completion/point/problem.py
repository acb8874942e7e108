"""Low-rank matrix completion: a subspace that explains every column from its observed entries.

    min over U ∈ Gr(n, p) of  Ψ(U) = (1/2N) Σ_i min_a ‖P_i(U a - x_i)‖² + λ_i ‖a‖²

The coefficients are eliminated (variable projection), so by the envelope theorem the Euclidean gradient is
(1/N) Σ_i P_iᵀ r_i a_iᵀ with r_i = U_i a_i - x_i; without a ridge it is tangent already. Seven Fisher matrices, from the
paper's p×p factor to the exact product, are offered under the names of ``CompletionProblem.fisher_kinds``.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fisherfold.completion.inference.packed import unpack
from fisherfold.completion.point import kernels
from fisherfold.completion.point.fisher_operators import CompletionFisher
from fisherfold.completion.ratings import Ratings
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.operators import FisherOperator
from fisherfold.fisher.rowblock import RowBlockFisher
from fisherfold.manifolds import Grassmann
from fisherfold.plain import counted
from fisherfold.problems.base import Problem, Snapshot, check_batch
from fisherfold.problems.cache import LastPoint

Orientation = Literal["auto", "rows", "columns"]
RidgeWeighting = Literal["column", "count"]
TableRule = Literal["persistent", "batch"]


class CompletionProblem(Problem):
    """Ψ(U) over the subspaces of the rows (or of the columns) of a matrix with holes.

    A sample is a column, with all its ratings. Kinds of ``fisher``:

    - ``kronecker``, the paper's: H ↦ H C, C = (1/N) Σ a_i a_iᵀ, as if every entry were observed;
    - ``kronecker-rows``: row j of H C times the share of the columns that row j is seen in;
    - ``row-block``: h_j ↦ (1/N) Σ_{i ∈ Ω^j} a_i a_iᵀ h_j; with step 1 it is a half-step of alternating least squares;
    - ``exact``: the Fisher information of the partially observed model, as a product for CG;
    - ``gauss-newton``: the same without the term r_i r_iᵀ: the Schur complement of the joint Fisher information;
    - ``efficient``: the same less its bias by the noise in the coefficients, the expected Hessian;
    - ``observed``: the Hessian, for the last digits; positive definite near a minimum only.

    Args:
        ratings: the observed entries.
        rank: p, less than the number of rows of the subspace and at most the number of columns.
        ridge: λ ≥ 0.
        ridge_weighting: ``column``: λ_i = λ; ``count``: λ_i = λ times the number of ratings of column i.
        orientation: ``rows`` for a subspace of R^{n_rows} with one sample per column, ``columns`` for the transposed
            problem, ``auto`` for the smaller side as rows, which has the cheaper steps and the more samples.
        held_out: ratings that ``metrics`` measures the prediction error on, in the shape of ``ratings``.
        clip: a range that predictions in ``metrics`` are clipped to.
        table: which coefficients make the factor of the variance-reduced ``kronecker``: ``persistent``, the latest of
            every column since the anchor, or ``batch``, those of the batch alone.

    Attributes:
        ratings: the ratings, transposed if the orientation asks for it.
        transposed: whether they are.
        samples: which columns are here; all of them unless the ratings are shared out over processes.
        rank: p.

    Example:
        >>> x = torch.outer(torch.arange(1.0, 5), torch.arange(1.0, 4)).double()
        >>> rows, columns = (torch.arange(12) // 3), torch.arange(12) % 3
        >>> problem = CompletionProblem(Ratings(rows, columns, x.flatten()), rank=1, orientation="rows")
        >>> u = torch.nn.functional.normalize(torch.arange(1.0, 5).double(), dim=0)[:, None]
        >>> bool(problem.loss(u) < 1e-14), problem.manifold
        (True, Grassmann(4, 1))
    """

    fisher_kinds: ClassVar[tuple[str, ...]] = (
        "row-block",
        "kronecker",
        "kronecker-rows",
        "exact",
        "gauss-newton",
        "efficient",
        "observed",
    )

    def __init__(
        self,
        ratings: Ratings,
        rank: int,
        *,
        ridge: float = 0.0,
        ridge_weighting: RidgeWeighting = "column",
        orientation: Orientation = "auto",
        held_out: Ratings | None = None,
        clip: tuple[float, float] | None = None,
        table: TableRule = "persistent",
    ) -> None:
        _check_options(ratings, rank, ridge, ridge_weighting, orientation, held_out)
        self.transposed = orientation == "columns" or (
            orientation == "auto" and _auto_transposes(ratings)
        )
        self.ratings = ratings.T if self.transposed else ratings
        if self.ratings.row_axis.is_shared:
            raise ValueError(
                f"orientation {orientation!r} would spread the subspace over processes; use 'auto'"
            )
        if not rank < self.ratings.n_rows:
            rows = counted(self.ratings.n_rows, "row")
            raise ValueError(f"rank must be less than the {rows} of the subspace, got {rank}")
        self.rank, self.table = int(rank), table
        self.ridge, self.ridge_weighting = ridge, ridge_weighting
        self.held_out = held_out.T if held_out is not None and self.transposed else held_out
        self.clip = clip
        self.manifold = Grassmann(self.ratings.n_rows, self.rank)
        self.samples = self.ratings.column_axis
        self.n_samples, self.group = self.samples.size, self.samples.group
        self._squares = kernels.square_sum(self.ratings.by_column, torch.float64)
        self._size = self.samples.add(self._squares) / (2 * self.n_samples)
        self._last: LastPoint[kernels.ColumnFit] = LastPoint()
        self._moments: LastPoint[tuple[Tensor, Tensor]] = LastPoint()

    def fit(self, x: Tensor, batch: Tensor | None = None) -> kernels.ColumnFit:
        """The coefficients at a frame, one row per column of a batch (or of all columns) that is here."""
        if batch is not None:
            check_batch(batch, self.n_samples)
            side = self.ratings.by_column.take(self.samples.local(batch)[1])
            return kernels.fit_columns(side, x, self.ridges(side.counts, x))
        # Loss, gradient and Fisher at one point share the pass: solvers ask for them one after the other.
        if (kept := self._last.get(x)) is not None:
            return kept
        self.samples.check_same(x)
        ridge = self.ridges(self.ratings.column_counts, x)
        return self._last.put(x, kernels.fit_columns(self.ratings.by_column, x, ridge))

    def ridges(self, counts: Tensor, like: Tensor) -> Tensor:
        """λ_i of columns with so many ratings, in the dtype of ``like``."""
        weights = counts if self.ridge_weighting == "count" else torch.ones_like(counts)
        return self.ridge * weights.to(like.dtype)

    @cached_property
    def dense_columns(self) -> tuple[Tensor, Tensor]:
        """The transposed matrix with zeros at holes, and its mask; for nearly full tables."""
        rows, columns, values = self.ratings.entries()
        places = columns.long() * self.ratings.n_rows + rows
        filled, mask = (
            values.new_zeros(self.ratings.n_columns, self.ratings.n_rows) for _ in range(2)
        )
        filled.view(-1)[places], mask.view(-1)[places] = values, 1.0
        return filled, mask

    def loss(self, x: Tensor, batch: Tensor | None = None) -> Tensor:  # noqa: D102
        return self._loss(x, batch, self.fit(x, batch))

    def gradient(self, x: Tensor, batch: Tensor | None = None) -> Tensor:  # noqa: D102
        return self._gradient(x, batch, self.fit(x, batch))

    def loss_and_gradient(self, x: Tensor, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: D102
        fit = self.fit(x, batch)
        return self._loss(x, batch, fit), self._gradient(x, batch, fit)

    def loss_rounding(self, x: Tensor, loss: float) -> float:  # noqa: D102
        # a difference of sums of the size of Σ x²
        return super().loss_rounding(x, max(abs(loss), self._size))

    def _loss(self, x: Tensor, batch: Tensor | None, fit: kernels.ColumnFit) -> Tensor:
        squares = self._squares if batch is None else self._squares[self.samples.local(batch)[1]]
        total = self.samples.total(fit.penalised_squares(squares.to(x.dtype)).sum())
        return total / (2 * (self.n_samples if batch is None else len(batch)))

    def _gradient(self, x: Tensor, batch: Tensor | None, fit: kernels.ColumnFit) -> Tensor:
        if batch is None:
            gram, weighted = self._row_moments(fit)
            total = self.samples.total(kernels.matvec(gram, x) - weighted) / self.n_samples
        else:
            total = self.column_gradients(batch, (x, fit.coefficients))[0] / len(batch)
        return self._tangent(x, total)

    def _row_moments(self, fit: kernels.ColumnFit) -> tuple[Tensor, Tensor]:
        # Of the columns that are here. Kept for the Fisher matrices, which a solver asks for where it has just had the
        # gradient.
        a = fit.coefficients
        return self._moments.get(a) or self._moments.put(a, kernels.moments(self.ratings.by_row, a))

    def column_gradients(self, batch: Tensor, *points: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Σ_i P_iᵀ (U_i a_i - x_i) a_iᵀ over a batch, for frames U with coefficients of the columns here."""
        side = self.ratings.by_column.take(self.samples.local(batch)[1])
        rows, groups, values, terms = side.indices(), side.groups(), side.values(), []
        for x, coefficients in points:
            spread = coefficients.index_select(0, groups)
            residual = (x.index_select(0, rows) * spread).sum(1) - values.to(x.dtype)
            terms.append(residual[:, None] * spread)
        joint = torch.cat(terms, dim=1)
        joint = joint.new_zeros(self.ratings.n_rows, joint.shape[1]).index_add_(0, rows, joint)
        return torch.split(self.samples.total(joint), self.rank, dim=1)

    def fisher(  # noqa: D102
        self, x: Tensor, batch: Tensor | None = None, *, kind: str = "row-block"
    ) -> FisherOperator:
        if kind not in self.fisher_kinds:
            raise ValueError(f"kind must be one of {list(self.fisher_kinds)}, got {kind!r}")
        fit = self.fit(x, batch)
        a, count = fit.coefficients, self.n_samples if batch is None else len(batch)
        if kind in {"kronecker", "kronecker-rows"}:
            factor = self.samples.second_moment(a) / count
        if kind == "kronecker":
            return KroneckerFisher(self.manifold, x, left=None, right=factor)
        ratings = self.ratings if batch is None else self.ratings.take_columns(batch)
        if kind == "kronecker-rows":
            share = ratings.row_counts.to(x.dtype) / count
            return RowBlockFisher(self.manifold, x, share[:, None, None] * factor)
        gram = (self._row_moments(fit) if batch is None else kernels.moments(ratings.by_row, a))[0]
        if kind == "row-block":
            return RowBlockFisher(self.manifold, x, unpack(ratings.by_row.total(gram)) / count)
        terms = {"exact": "expected", "observed": "observed"}.get(kind, "none")
        noise = self._noise(fit, batch) if kind == "efficient" else None
        return CompletionFisher(
            self.manifold, x, ratings, fit, gram, residual_terms=terms, noise=noise
        )

    def _noise(self, fit: kernels.ColumnFit, batch: Tensor | None) -> Tensor:
        # ‖r_i‖²/(|Ω_i| - p), zero for columns that the fit uses up.
        squares, counts = self._squares, self.ratings.column_counts
        if batch is not None:
            chosen = self.samples.local(batch)[1]
            squares, counts = squares[chosen], counts[chosen]
        spare = counts.to(fit.rhs.dtype) - self.rank
        rest = fit.residual_squares(squares.to(fit.rhs.dtype))
        return torch.where(spare > 0, rest / spare.clamp(min=1), 0.0)

    def descend(  # noqa: D102
        self, x: Tensor, batches: Iterable[Tensor], *, step: Callable[[int], float]
    ) -> Tensor:
        from fisherfold.completion.point.variance_reduction import DenseEpoch, can_fuse

        batches = list(batches)
        if not can_fuse(self, batches):
            return super().descend(x, batches, step=step)
        nothing = torch.zeros_like(x), x.new_zeros(self.n_samples, self.rank)
        return DenseEpoch(self, x, x, *nothing).run(batches, step)

    def snapshot(self, x: Tensor) -> Snapshot:  # noqa: D102
        from fisherfold.completion.point.variance_reduction import CompletionSnapshot

        return CompletionSnapshot(self, x, table=self.table)

    def spectral_start(self, *, sweeps: int = 5, seed: int = 0) -> Tensor:
        """The leading left singular vectors of the matrix with zeros at its holes, by subspace iteration.

        Args:
            sweeps: how many products with the matrix and its transpose.
            seed: fixes the random start.

        Returns:
            A frame, in the dtype of the ratings.
        """
        generator = torch.Generator().manual_seed(seed)
        right = self.samples.randn(self.rank, generator)
        right = right.to(device=self.ratings.device, dtype=self.ratings.dtype)
        for _ in range(sweeps):
            left: Tensor = torch.linalg.qr(kernels.value_sum(self.ratings.by_row, right)).Q
            right = kernels.value_sum(self.ratings.by_column, left)
        return left

    def predict(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Predicted values u_rᵀ a_c with the coefficients fitted on the training ratings.

        Args:
            x: a frame U.
            rows: row numbers, in the orientation of the problem.
            columns: column numbers.

        Returns:
            One value per pair, clipped if the problem has a range.
        """
        return self._predict(x, self.samples.gather(self.fit(x).coefficients), rows, columns)

    def _predict(self, x: Tensor, coefficients: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        values = x.new_empty(len(rows))
        for start in range(0, len(rows), kernels.CHUNK):
            part = slice(start, start + kernels.CHUNK)
            left, right = x.index_select(0, rows[part]), coefficients.index_select(0, columns[part])
            torch.sum(left * right, dim=1, out=values[part])
        return values if self.clip is None else values.clamp(*self.clip)

    def metrics(self, x: Tensor) -> dict[str, float]:
        """Mean squared errors at a frame.

        Args:
            x: a frame U.

        Returns:
            ``held_out``: on the held-out ratings, with coefficients from the training ratings; ``refit``: the figure of
            the released scripts, with coefficients fitted again on the held-out ratings themselves, which measures the
            subspace and predicts nothing; ``train``: on the training ratings. The first two need ``held_out``.
        """
        fit = self.fit(x)
        train = (
            self.samples.add(fit.residual_squares(self._squares.to(x.dtype)))
            / self.ratings.n_ratings
        )
        if self.held_out is None:
            return {"train": train}
        rows, columns, values = self.held_out.entries()
        error = self._predict(x, fit.coefficients, rows, columns) - values.to(x.dtype)
        side = self.held_out.by_column
        again = kernels.fit_columns(side, x, self.ridges(side.counts, x))
        squares = kernels.square_sum(side, x.dtype)
        refit = self.samples.add(again.residual_squares(squares)) / self.held_out.n_ratings
        held_out = self.samples.add(error.square()) / self.held_out.n_ratings
        return {"held_out": held_out, "refit": refit, "train": train}


def _auto_transposes(ratings: Ratings) -> bool:
    # what is shared out are the samples; in one process the longer side
    if ratings.row_axis.is_shared or ratings.column_axis.is_shared:
        return ratings.row_axis.is_shared
    return ratings.n_columns < ratings.n_rows


def _check_options(
    ratings: Ratings,
    rank: int,
    ridge: float,
    weighting: str,
    orientation: str,
    held_out: Ratings | None,
) -> None:
    most = min(ratings.shape)
    if isinstance(rank, bool) or not isinstance(rank, numbers.Integral) or not 1 <= rank <= most:
        raise ValueError(
            f"rank must be a whole number between 1 and min(n_rows, n_columns)={most}, got {rank!r}"
        )
    if not (ridge >= 0 and ridge < float("inf")):
        raise ValueError(f"ridge must be a finite number ≥ 0, got {ridge}")
    if weighting not in {"column", "count"}:
        raise ValueError(f"ridge_weighting must be 'column' or 'count', got {weighting!r}")
    if orientation not in {"auto", "rows", "columns"}:
        raise ValueError(f"orientation must be 'auto', 'rows' or 'columns', got {orientation!r}")
    if held_out is not None and held_out.shape != ratings.shape:
        raise ValueError(
            f"held_out must have the shape {ratings.shape} of ratings, got {held_out.shape}"
        )
