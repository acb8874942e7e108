"""Variance reduction for completion: tables of coefficients at an anchor, renewed where the batch falls.

    g = g_B(U) + P_U (g(U₀) - g_B(U₀)),    C = (1/N) Σ_i ã_i ã_iᵀ

with ã_i the table. Two readings of which rows of the table are fresh are offered. ``persistent``: every row that was
sampled since the anchor keeps its latest coefficients, as the text reads. ``batch``: only the current batch is fresh,
C = C₀ + (Σ_B a aᵀ - a₀ a₀ᵀ)/N, as the released script does. Points are compared by their frames, so the retraction
should be the polar one, which does not turn them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fisherfold.completion.epoch import lazy_epoch
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.operators import FisherOperator
from fisherfold.problems.base import Snapshot

if TYPE_CHECKING:
    from fisherfold.completion.kernels import ColumnFit
    from fisherfold.completion.problem import CompletionProblem

TableRule = Literal["persistent", "batch"]


class CompletionSnapshot(Snapshot):
    """The full pass at an anchor: loss, gradient, every a_i, and C.

    Args:
        problem: the completion problem.
        x: the anchor frame.
        table: ``persistent`` or ``batch``.

    Attributes:
        coefficients: the table ã_i.
        factor: C.
    """

    problem: CompletionProblem

    def __init__(self, problem: CompletionProblem, x: Tensor, *, table: TableRule = "persistent") -> None:
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
        here = problem.column_gradients(x, batch, fit.coefficients)
        there = problem.column_gradients(self.x, batch, self.anchor_coefficients[problem.samples.local(batch)[1]])
        there = problem.manifold.project(self.x, there)
        return problem._tangent(x, self.full_gradient + (here - there) / len(batch))

    def fisher(self, x: Tensor, batch: Tensor, *, kind: str) -> FisherOperator:  # noqa: D102
        if kind != "kronecker":
            return super().fisher(x, batch, kind=kind)
        factor = self._renewed(batch, self._fit(x, batch).coefficients)
        return KroneckerFisher(self.problem.manifold, x, left=None, right=factor)

    def _renewed(self, batch: Tensor, fresh: Tensor) -> Tensor:
        samples = self.problem.samples
        here = samples.local(batch)[1]
        known = self.coefficients[here]
        factor = self.factor + samples.total(fresh.mT @ fresh - known.mT @ known) / self.problem.n_samples
        if self.table == "persistent":
            # A column drawn twice is one row of the table: the factor follows the table, not the batch.
            self.coefficients[here] = fresh
            if len(set(batch.tolist())) < len(batch):
                factor = samples.second_moment(self.coefficients) / self.problem.n_samples
            self.factor = factor
        return factor

    def inverse_factor(self, batch: Tensor, fresh: Tensor, damping: float) -> Tensor:
        """(C + λI)⁻¹ after the batch has been put into C; the pseudo-inverse if nothing damps.

        Args:
            batch: column numbers.
            fresh: their coefficients at the iterate.
            damping: λ.

        Returns:
            A p×p matrix.
        """
        values, vectors = torch.linalg.eigh(self._renewed(batch, fresh))
        values = values.clamp(min=0) + damping
        floor = float(values.max()) * len(self.x) * torch.finfo(values.dtype).eps if damping == 0 else 0.0
        inverse = torch.where(values > floor, 1 / values, 0.0)
        return (vectors * inverse) @ vectors.mT

    def epoch(  # noqa: D102
        self, x: Tensor, batches: Iterable[Tensor], *, step: float, kind: str | None = None, damping: float = 0.0
    ) -> Tensor:
        general = kind not in {None, "kronecker"} or self.problem.manifold.retraction != "polar"
        if general or self.problem.samples.is_shared:
            return super().epoch(x, batches, step=step, kind=kind, damping=damping)
        return lazy_epoch(self, x, batches, step=lambda _: step, natural=kind is not None, damping=damping)
