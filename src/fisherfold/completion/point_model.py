"""A completion model fitted by a point estimate: x_ji ≈ μ + β_j + γ_i + u_jᵀ a_i with an orthonormal frame U."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fisherfold.completion.factors import Factors, Penalty
from fisherfold.completion.ratings import Ratings
from fisherfold.solvers.result import Trace


@dataclass(frozen=True)
class PointFit:
    """A fitted model, x_ji ≈ μ + β_j + γ_i + u_jᵀ a_i.

    A new column with observed rows J is folded in by one small ridge problem in (a, γ), with the penalty
    v (aᵀ ``column_penalty`` a + ``offset_ridge`` γ²), v = ``weight(len(J), "columns")``; a new row by the same with
    ``row_penalty``, in the coordinates of A.

    Attributes:
        U: an orthonormal frame of the subspace, one row per row of the matrix.
        A: the coefficients, one row per column.
        row_offset: β, zero if not fitted.
        column_offset: γ, zero if not fitted.
        global_offset: μ, zero if not fitted.
        row_penalty: λ S.
        column_penalty: λ S⁻¹.
        offset_ridge: λ₀.
        ridge: λ.
        ridge_power: α of the weights (n/n̄)^α.
        mean_counts: n̄ of the rows and of the columns.
        trace: one row per iteration.
        status: ``converged``, ``max_iter``, ``stopped`` (callback, validation) or ``interrupted``.
        message: the reason in a sentence.
    """

    U: Tensor
    A: Tensor
    row_offset: Tensor
    column_offset: Tensor
    global_offset: float
    row_penalty: Tensor
    column_penalty: Tensor
    offset_ridge: float
    ridge: float
    ridge_power: float
    mean_counts: tuple[float, float]
    trace: Trace = field(repr=False)
    status: str
    message: str

    @property
    def rank(self) -> int:
        """The dimension of the subspace."""
        return self.U.shape[1]

    def weight(self, count: float, axis: Literal["rows", "columns"]) -> float:
        """The weight of the penalty of a row or column with so many ratings.

        Args:
            count: the number of ratings.
            axis: ``rows`` or ``columns``.

        Returns:
            (n/n̄)^α.
        """
        mean = self.mean_counts[0 if axis == "rows" else 1]
        return float((max(count, 1) / mean) ** self.ridge_power)

    def predict(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Predicted values.

        Args:
            rows: row numbers.
            columns: column numbers.

        Returns:
            One value per pair.
        """
        factors = Factors(self.global_offset, self.U, self.A, self.row_offset, self.column_offset, True, True)
        return factors.predict(rows, columns)

    @classmethod
    def of(cls, at: Factors, ratings: Ratings, penalty: Penalty, trace: Trace, status: str, message: str) -> PointFit:
        """The model of two factors: L = U T gives the frame U, A = R Tᵀ and the prior covariance S = T Tᵀ.

        Args:
            at: the factors.
            ratings: the ratings they were fitted to.
            penalty: the penalty they were fitted with.
            trace: one row per iteration.
            status: how the fit ended.
            message: why.

        Returns:
            The model.
        """
        # L = U T by QR in float64, so that U is a frame to working precision even when a direction is all but gone.
        frame, turn = torch.linalg.qr(at.rows.double())
        eye = torch.eye(len(turn), dtype=torch.float64, device=turn.device)
        prior = turn @ turn.mT
        if float(prior.trace()) < torch.finfo(at.rows.dtype).tiny ** 0.5:
            prior = eye  # any S goes with factors that are zero
        # a direction that is all but gone keeps a penalty on both sides: of zero and infinity there is no inverse
        prior = prior + 1e-12 * prior.diagonal().mean() * eye
        return cls(
            U=frame.to(at.rows),
            A=(at.columns.double() @ turn.mT).to(at.rows),
            row_offset=at.row_offset,
            column_offset=at.column_offset,
            global_offset=at.mean,
            row_penalty=(penalty.ridge * prior).to(at.rows),
            column_penalty=(penalty.ridge * torch.linalg.inv(prior)).to(at.rows),
            offset_ridge=penalty.offset_ridge,
            ridge=penalty.ridge,
            ridge_power=penalty.power,
            mean_counts=(ratings.n_ratings / ratings.n_rows, ratings.n_ratings / ratings.n_columns),
            trace=trace,
            status=status,
            message=message,
        )
