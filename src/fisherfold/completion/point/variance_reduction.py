r"""Variance reduction for completion: coefficients and gradient at an anchor U₀, corrected where the batch falls.

    g = g_B(U) + P_U (g(U₀) - g_B(U₀)),    C = (1/N) Σ_i ã_i ã_iᵀ

with ã_i a table of coefficients. Two readings of which rows of the table are fresh are offered. ``persistent``: every
row that was sampled since the anchor keeps its latest coefficients, as the text reads. ``batch``: only the current
batch is fresh, C = C₀ + (Σ_B a aᵀ - a₀ a₀ᵀ)/N, as the released script does. Points are compared by their frames, so the
retraction should be the polar one, which does not turn them.

``DenseEpoch`` fuses the steps for single columns that see most of the rows, the paper's setting for Jester: gathering
the rows of such a column costs more than reading all of them. The iterate is kept transposed, a few long vectors, and
a step with column i is two products of a small and a tall matrix: the inner products that the step needs, and

    Uᵀ ← Sᵀ[ t X a₀, -t X a, -t X, (I + t E X)ᵀ ] (r₀ᵀ; rᵀ; Gᵀ; Uᵀ),    E = Uᵀ(G + r aᵀ - r₀ a₀ᵀ),  X = (C + λI)⁻¹

with r = m ∘ (U a) - x and r₀ = m ∘ (U₀ a₀) - x on the mask m of the column. The polar factor S is known before the
product, because the Gram matrix of its right-hand side is small algebra: UᵀU = I, and UᵀG follows the recursion of U.
It runs in NumPy, whose calls on 5×5 matrices cost a quarter of a tensor library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import lapack
from torch import Tensor

from fisherfold.completion.point.kernels import ColumnFit, fit_columns
from fisherfold.completion.point.problem import CompletionProblem, TableRule
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.operators import FisherOperator
from fisherfold.problems.base import Snapshot

Array = npt.NDArray[Any]
Small = npt.NDArray[np.float64]

# From this share of rated entries on, reading whole columns is quicker than gathering.
_CROWDED = 0.3
# Multiply-adds up to which a BLAS multiplies thin matrices as they lie; larger products are packed first.
_SMALL_PRODUCT = 10**6


class CompletionSnapshot(Snapshot):
    """The full pass at an anchor: loss, gradient, every a_i, and C.

    Attributes:
        anchor_coefficients: a_i at the anchor.
        coefficients: the table ã_i.
        factor: C.
    """

    problem: CompletionProblem

    def __init__(
        self, problem: CompletionProblem, x: Tensor, *, table: TableRule = "persistent"
    ) -> None:
        if table not in {"persistent", "batch"}:
            raise ValueError(f"table must be 'persistent' or 'batch', got {table!r}")
        super().__init__(problem, x)
        self.table = table
        self.anchor_coefficients = problem.fit(x).coefficients
        self.coefficients = self.anchor_coefficients.clone()
        self.factor = problem.samples.second_moment(self.coefficients) / problem.n_samples
        self._recent: tuple[Tensor, Tensor, ColumnFit] | None = None

    def _fit(self, x: Tensor, batch: Tensor) -> ColumnFit:
        # Gradient and Fisher of one step ask for the same batch at the same point.
        if self._recent is None or self._recent[0] is not x or self._recent[1] is not batch:
            self._recent = (x, batch, self.problem.fit(x, batch))
        return self._recent[2]

    def gradient(self, x: Tensor, batch: Tensor) -> Tensor:  # noqa: D102
        fit, problem = self._fit(x, batch), self.problem
        known = self.anchor_coefficients[problem.samples.local(batch)[1]]
        here, there = problem.column_gradients(batch, (x, fit.coefficients), (self.x, known))
        there = problem.manifold.project(self.x, there)
        return problem._tangent(x, self.full_gradient + (here - there) / len(batch))

    def fisher(self, x: Tensor, batch: Tensor, *, kind: str) -> FisherOperator:  # noqa: D102
        if kind != "kronecker":
            return super().fisher(x, batch, kind=kind)
        fresh, samples = self._fit(x, batch).coefficients, self.problem.samples
        here = samples.local(batch)[1]
        known = self.coefficients[here]
        factor = (
            self.factor
            + samples.total(fresh.mT @ fresh - known.mT @ known) / self.problem.n_samples
        )
        if self.table == "persistent":
            # A column drawn twice is one row of the table: the factor follows the table, not the batch.
            self.coefficients[here] = fresh
            if len(set(batch.tolist())) < len(batch):
                factor = samples.second_moment(self.coefficients) / self.problem.n_samples
            self.factor = factor
        return KroneckerFisher(self.problem.manifold, x, left=None, right=factor)

    def epoch(  # noqa: D102
        self,
        x: Tensor,
        batches: Iterable[Tensor],
        *,
        step: float,
        kind: str | None = None,
        damping: float = 0.0,
    ) -> Tensor:
        batches = list(batches)
        if kind in {None, "kronecker"} and can_fuse(self.problem, batches):
            anchor = self.x, self.full_gradient, self.anchor_coefficients
            epoch = DenseEpoch(
                self.problem,
                x,
                *anchor,
                natural=kind is not None,
                damping=damping,
                table=self.table,
            )
            return epoch.run(batches, lambda _: step)
        return super().epoch(x, batches, step=step, kind=kind, damping=damping)


def can_fuse(problem: CompletionProblem, batches: list[Tensor]) -> bool:
    """Whether ``DenseEpoch`` can make these steps, and is quicker."""
    plain = (
        problem.ridge == 0
        and problem.manifold.retraction == "polar"
        and not problem.samples.is_shared
    )
    crowded = problem.ratings.density >= _CROWDED and problem.ratings.device.type == "cpu"
    return plain and crowded and all(len(batch) == 1 for batch in batches)


class _Stack:
    """m ∘ Uᵀ, x, r₀, r, Gᵀ and Uᵀ above each other, so that every product reads neighbours."""

    def __init__(self, size: int, length: int, dtype: Any) -> None:
        whole = np.empty((3 * size + 3, length), dtype=dtype)
        self.masked, self.values, self.anchor_residual, self.residual = (
            whole[:size],
            whole[size],
            whole[size + 1],
            whole[size + 2],
        )
        self.gradient, self.frame = whole[size + 3 : 2 * size + 3], whole[2 * size + 3 :]
        self.fitted = whole[: size + 1]  # m ∘ Uᵀ and x
        self.measured = whole[: size + 2]  # and r₀
        self.residuals = whole[size + 1 : size + 3]
        self.still = whole[size + 1 : 2 * size + 3]  # r₀, r and Gᵀ
        self.moving = whole[size + 1 :]  # and Uᵀ


class DenseEpoch:
    """Steps of single columns without a ridge, on the CPU."""

    def __init__(
        self,
        problem: CompletionProblem,
        x: Tensor,
        anchor: Tensor,
        gradient: Tensor,
        coefficients: Tensor,
        *,
        natural: bool = False,
        damping: float = 0.0,
        table: TableRule = "batch",
    ) -> None:
        self.problem, self.natural, self.damping, self.persistent = (
            problem,
            natural,
            damping,
            table == "persistent",
        )
        self.values, self.mask = (part.numpy() for part in problem.dense_columns)
        n, p = x.shape
        self.anchor, still = _numpy(anchor.mT), _numpy(gradient.mT)
        # two stacks take turns, so that no product is written onto its input
        self.stack, self.spare = (_Stack(p, n, self.anchor.dtype) for _ in range(2))
        for stack in (self.stack, self.spare):
            stack.gradient[:], stack.frame[:] = still, _numpy(x.mT)
        self.chunk = max(64, _SMALL_PRODUCT // (p * (2 * p + 2)))
        self.known = _numpy(coefficients)
        self.coefficients = self.known.astype(np.float64)
        self.factor = self.coefficients.T @ self.coefficients / len(self.coefficients)
        # the Gram matrix of r₀, r, G and U, and the weights of the step: filled at every step
        self.gram, self.weights, self.pull = (
            np.eye(2 * p + 2),
            np.empty((2 * p + 2, p)),
            np.empty((2, p)),
        )
        self.gram[2 : p + 2, 2 : p + 2] = still @ still.T
        self._set_cross(self.stack.frame @ still.T)
        self.fit = np.full(p + 1, -1.0, dtype=self.anchor.dtype)
        self.identity = np.eye(p)
        self.weak = float(torch.finfo(x.dtype).eps) ** 0.5
        self.rounding = n * float(torch.finfo(x.dtype).eps)

    def run(self, batches: list[Tensor], step: Callable[[int], float]) -> Tensor:
        """Make all steps."""
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                for k, batch in enumerate(batches):
                    self._step(int(batch), step(k))
        except np.linalg.LinAlgError:
            return self._point().fill_(torch.nan)  # the solver takes it back
        last = self._point()
        finite = bool(torch.isfinite(last).all())
        return self.problem.manifold.retract(last, torch.zeros_like(last)) if finite else last

    def _point(self) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.stack.frame.T))

    def _step(self, column: int, size: float) -> None:
        stack, gram, weights, pull, mask = (
            self.stack,
            self.gram,
            self.weights,
            self.pull,
            self.mask[column],
        )
        p = len(self.identity)
        np.multiply(stack.frame, mask, out=stack.masked)
        stack.values[:] = self.values[column]
        np.matmul(self.known[column], self.anchor, out=stack.anchor_residual)
        np.multiply(stack.anchor_residual, mask, out=stack.anchor_residual)
        np.subtract(stack.anchor_residual, stack.values, out=stack.anchor_residual)
        products = np.asarray(stack.measured @ stack.frame.T, dtype=np.float64)
        a = self._coefficients(column, products)
        # r = (m ∘ U) a - x, of rows that are already there
        self.fit[:p] = a
        np.matmul(self.fit, stack.fitted, out=stack.residual)
        against = stack.residuals @ stack.still.T
        gram[:2, : p + 2], gram[: p + 2, :2] = against, against.T
        along = gram[:2, p + 2 :]
        along[0], along[1] = products[p + 1], products[:p] @ a - products[p]
        gram[p + 2 :, :2] = along.T
        np.negative(self.known[column], out=pull[0])
        pull[1] = a
        down = self._inverse(column, a) * -size if self.natural else self.identity * -size
        np.matmul(pull, down, out=weights[:2])
        weights[2 : p + 2] = down
        np.subtract(
            self.identity, (gram[p + 2 :, 2 : p + 2] + along.T @ pull) @ down, out=weights[p + 2 :]
        )
        image = weights.T @ gram
        values, vectors = _spectrum(image @ weights)
        turn = (vectors / np.sqrt(values)) @ vectors.T
        self._move((turn @ weights.T).astype(self.anchor.dtype, copy=False))
        self._set_cross(turn @ image[:, 2 : p + 2])

    def _move(self, weights: Array) -> None:
        for start in range(0, self.anchor.shape[1], self.chunk):
            part = slice(start, start + self.chunk)
            np.matmul(weights, self.stack.moving[:, part], out=self.spare.frame[:, part])
        self.stack, self.spare = self.spare, self.stack

    def _set_cross(self, cross: Array) -> None:
        p = len(cross)
        self.gram[p + 2 :, 2 : p + 2], self.gram[2 : p + 2, p + 2 :] = cross, cross.T

    def _coefficients(self, column: int, products: Small) -> Small:
        p = len(products) - 2
        gram = products[:p]
        factor, solution, failed = lapack.dposv(gram, products[p])
        if failed == 0 and (factor.diagonal() ** 2 > self.weak * gram.diagonal()).all():
            return np.asarray(solution)
        frame = self._point()
        side = self.problem.ratings.by_column.take(torch.tensor([column]))
        return fit_columns(side, frame, frame.new_zeros(1)).coefficients[0].double().numpy()

    def _inverse(self, column: int, a: Small) -> Small:
        # The rule of CompletionSnapshot for the table of coefficients, then (C + λI)⁻¹.
        stored = self.coefficients[column]
        factor = self.factor + (a[:, None] * a - stored[:, None] * stored) / len(self.coefficients)
        if self.persistent:
            self.coefficients[column], self.factor = a, factor
        values, vectors = _spectrum(factor)
        # in ascending order; rounding may leave the least below zero
        if self.damping == 0 and not values[0] > values[-1] * self.rounding:
            inverse = np.divide(
                1.0, values, out=np.zeros_like(values), where=values > values[-1] * self.rounding
            )
        else:
            inverse = 1 / (np.maximum(values, 0) + self.damping)
        return np.asarray((vectors * inverse) @ vectors.T)


def _spectrum(matrix: Small) -> tuple[Small, Small]:
    # LAPACK itself: the wrappers cost more than the 5×5 problem.
    values, vectors, failed = lapack.dsyevd(matrix)
    if failed or not math.isfinite(values[-1]):
        raise np.linalg.LinAlgError(f"a spectrum did not converge (code {failed})")
    return values, vectors


def _numpy(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().contiguous().numpy())
