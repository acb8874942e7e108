"""The Fisher information of the partially observed model, as a product for conjugate gradients.

    F[H] = (1/N) Σ_i P_iᵀ[ (I - Π_i) H_i a_i a_iᵀ + r_i r_iᵀ H_i M_i⁻¹ ],   Π_i = U_i M_i⁻¹ U_iᵀ, M_i = U_iᵀU_i + λ_i I

It costs O(|Ω| p² + N p²) per product. Dropping r_i r_iᵀ leaves the Gauss-Newton matrix in Kaufman's form. The Hessian,
or observed information, has -r_i r_iᵀ H_i M_i⁻¹ - U_i M_i⁻¹ H_iᵀ r_i a_iᵀ - r_i a_iᵀ H_iᵀ U_i M_i⁻¹ in its place: the
residual term changes sign, which is why the Fisher information converges linearly where residuals stay, and the Hessian
quadratically. It may be indefinite; a ridge adds the curvature term -H Uᵀ∇Ψ to it.

Why the signs matter: with true coefficients α_i and noise ε of variance σ², a_i = α_i + M_i⁻¹U_iᵀε and
r_i = -(I - Π_i)ε are independent, E[a_i a_iᵀ] = α_i α_iᵀ + σ² M_i⁻¹ and E[r_i r_iᵀ] = σ² (I - Π_i). In expectation the
three are (I - Π_i) ⊗ (α_i α_iᵀ + k σ² M_i⁻¹) with k = 2 (exact), 1 (Gauss-Newton), 0 (Hessian). ``efficient`` takes the
expected Hessian itself, the efficient information of U when the coefficients are nuisance parameters:
a_i a_iᵀ - s_i M_i⁻¹ in place of a_i a_iᵀ, with the unbiased s_i = ‖r_i‖²/(|Ω_i| - p). It may be indefinite where noise
exceeds signal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fisherfold.completion.inference.packed import triangle, unpack
from fisherfold.completion.point import kernels
from fisherfold.completion.ratings import Ratings
from fisherfold.fisher.blocks import apply_blocks, inverse_blocks
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds.base import Manifold


class CompletionFisher(FisherOperator):
    """The exact Fisher product; CG on it is preconditioned with the row blocks."""

    approximates = (
        "nothing: the Fisher information of the partially observed model, coefficients eliminated"
    )

    def __init__(
        self,
        manifold: Manifold,
        point: Tensor,
        ratings: Ratings,
        fit: kernels.ColumnFit,
        row_gram: Tensor,
        *,
        residual_terms: str,
        noise: Tensor | None = None,
    ) -> None:
        super().__init__(manifold, point)
        self.ratings, self.fit, self.row_gram, self.residual_terms = (
            ratings,
            fit,
            row_gram,
            residual_terms,
        )
        self._inverse = fit.inverse()
        self._weights: Tensor | None = None
        self._positive_gram = row_gram
        if noise is not None:
            a = fit.coefficients
            self._weights = a.unsqueeze(2) * a.unsqueeze(1) - noise[:, None, None] * self._inverse
            rows, columns = triangle(a.shape[1], a.device)
            self.row_gram = kernels.plain_sum(
                ratings.by_row.here(), self._weights[:, rows, columns]
            )
        self._blocks: tuple[float, Tensor] | None = None

    def _matvec(self, v: Tensor) -> Tensor:
        product = kernels.fisher_product(
            self.ratings.by_column,
            self.ratings.by_row.here(),
            self.point,
            self.fit,
            self._inverse,
            self.row_gram,
            v,
            residual_terms=self.residual_terms,
            weights=self._weights,
        )
        if self.residual_terms == "observed":
            # Uᵀ∇ = Σ_i U_iᵀr_i a_iᵀ = -Σ_i λ_i a_i a_iᵀ, zero without a ridge.
            a = self.fit.coefficients
            product = product + v @ (a.mT @ (self.fit.ridge[:, None] * a))
        product = self.ratings.column_axis.total(product)
        return self.manifold.project(self.point, product / self.ratings.n_columns)

    def precondition(self, v: Tensor, damping: float) -> Tensor:
        """P (B_j + λ)⁻¹ v_j with the row blocks B_j, which is positive definite on the tangent space."""
        if self._blocks is None or self._blocks[0] != damping:
            blocks = (
                unpack(self.ratings.column_axis.total(self._positive_gram)) / self.ratings.n_columns
            )
            # A row seen less often than the rank has a singular block; a hundredth of the mean keeps it invertible.
            scale = blocks.diagonal(dim1=1, dim2=2).mean().clamp(min=torch.finfo(v.dtype).tiny)
            blocks.diagonal(dim1=1, dim2=2).add_(damping + 1e-2 * scale)
            inverse = inverse_blocks(blocks)
            self._blocks = damping, torch.linalg.inv(blocks) if inverse is None else inverse
        return self.manifold.project(self.point, apply_blocks(self._blocks[1], v))
