"""Row-block Fisher information of a matrix parameter: every row keeps its own block.

    F ≈ P B P,    (B v)_j = B_j v_j,    B_j = (1/N) Σ_i m_ij m_ijᵀ  for the j-th rows m_ij of the gradients

The restriction to the tangent space is exact: the damped solve is the minimum of ½<v, (B + λ)v> - <g, v> over tangent
vectors, whose multipliers are one number per row on the oblique manifold, and a p × p matrix S on Grassmann(n, p):

    v_j = (B_j + λ)⁻¹ (g_j - Sᵀ u_j),    Σ_j u_j v_jᵀ = 0    (p² equations for the p² entries of S).
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds import Euclidean, Grassmann, Oblique
from fisherfold.manifolds.base import Manifold


class RowBlockFisher(FisherOperator):
    """v ↦ P (B_j v_j)_j on the tangent space at a matrix.

    Args:
        manifold: a manifold of matrices.
        point: a matrix of it, without batch dimensions.
        blocks: one symmetric positive semi-definite block per row, shape (rows, columns, columns).

    The damped solve is exact on Euclidean space, on the oblique and on the (tall) Grassmann manifold; elsewhere
    ``solve`` runs CG with the blocks as its preconditioner.
    """

    approximates = "F by its diagonal blocks, one per row of the parameter, restricted to the tangent space"

    def __init__(self, manifold: Manifold, point: Tensor, blocks: Tensor) -> None:
        super().__init__(manifold, point)
        if point.ndim != 2:
            raise ValueError(f"a row-block Fisher needs a matrix as its point, got shape {tuple(point.shape)}")
        expected = (*point.shape, point.shape[1])
        if blocks.shape != expected:
            raise ValueError(f"blocks must have shape {expected}, got {tuple(blocks.shape)}")
        self.blocks = blocks

    @classmethod
    def from_gradients(cls, manifold: Manifold, point: Tensor, gradients: Tensor) -> RowBlockFisher:
        """The blocks of the second moment of the gradients.

        Args:
            manifold: a manifold of matrices.
            point: a matrix of it.
            gradients: per-sample Riemannian gradients, shape (samples, rows, columns).

        Returns:
            The operator.
        """
        return cls(manifold, point, torch.einsum("nij,nik->ijk", gradients, gradients) / len(gradients))

    @override
    def moved(self, anchor_batch: FisherOperator, batch: FisherOperator, weight: float) -> FisherOperator:
        if not (isinstance(anchor_batch, RowBlockFisher) and isinstance(batch, RowBlockFisher)):
            return super().moved(anchor_batch, batch, weight)
        blocks = self.blocks + weight * (batch.blocks - anchor_batch.blocks)
        return RowBlockFisher(self.manifold, batch.point, blocks)

    @property
    @override
    def is_structured(self) -> bool:
        tall = isinstance(self.manifold, Grassmann) and not self.manifold.wide
        return tall or isinstance(self.manifold, (Euclidean, Oblique))

    @override
    def _matvec(self, v: Tensor) -> Tensor:
        product = (self.blocks @ v.unsqueeze(-1)).squeeze(-1)
        return self.manifold.project(self.point, product)

    @override
    def structured_solve(self, g: Tensor, damping: float, *, factored: bool = False) -> Tensor | None:
        if factored or not self.is_structured:
            return None
        inverse = _damped_inverse(self.blocks, damping)
        free = (inverse @ g.unsqueeze(-1)).squeeze(-1)
        if isinstance(self.manifold, Euclidean):
            return free
        x = self.point
        if isinstance(self.manifold, Oblique):
            along = (inverse @ x.unsqueeze(-1)).squeeze(-1)
            multiplier = (x * free).sum(-1, keepdim=True) / (x * along).sum(-1, keepdim=True)
            return self.manifold.project(x, free - multiplier * along)
        p = x.shape[1]
        # (K S)_{ab} = Σ_j x_ja Σ_d (B_j + λ)⁻¹_{bd} (Sᵀ x_j)_d must equal Σ_j x_ja free_jb
        system = torch.einsum("ja,jc,jbd->abcd", x, x, inverse).reshape(p * p, p * p)
        multipliers = torch.linalg.lstsq(system, (x.mT @ free).reshape(-1, 1)).solution.reshape(p, p)
        corrected = free - (inverse @ (x @ multipliers).unsqueeze(-1)).squeeze(-1)
        return self.manifold.project(x, corrected)

    @override
    def precondition(self, v: Tensor, damping: float) -> Tensor:
        inverse = _damped_inverse(self.blocks, damping)
        return self.manifold.project(self.point, (inverse @ v.unsqueeze(-1)).squeeze(-1))


def _damped_inverse(blocks: Tensor, damping: float) -> Tensor:
    """(B_j + λ)⁻¹ for every row; the pseudo-inverse where a block is singular and nothing damps it."""
    damped = blocks + damping * torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    factors, info = torch.linalg.cholesky_ex(damped)
    if bool((info == 0).all()):
        return torch.cholesky_inverse(factors)
    return torch.linalg.pinv(damped, hermitian=True)
