"""Row-block Fisher information of a matrix parameter: every row keeps its own block.

    F ≈ P B P,    (B v)_j = B_j v_j,    B_j = (1/N) Σ_i m_ij m_ijᵀ,
    m_ij the j-th rows of the gradients

The restriction to the tangent space is exact: the damped solve is the minimum of ½<v, (B + λ)v> -
<g, v> over tangent vectors. On the oblique manifold it falls apart into rows; on Grassmann(n, p)
its multipliers are a p × p matrix S:

    v_j = (B_j + λ)⁻¹ (g_j - Sᵀ u_j),    Σ_j u_j v_jᵀ = 0    (p² equations for the p² entries of S).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.fisher.blocks import apply_blocks
from fisherfold.fisher.damped import damped_blocks
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds.base import Manifold

# a residual of so many rounding units is none
_EXACT = 1e3
_REFINEMENTS = 3


class RowBlockFisher(FisherOperator):
    """v ↦ P (B_j v_j)_j on the tangent space at a matrix.

    Args:
        manifold: a manifold of matrices.
        point: a matrix of it, without batch dimensions.
        blocks: one symmetric positive semi-definite block per row, shape (rows, columns, columns).

    The damped solve is exact on Euclidean space, on the oblique and on the Grassmann manifold;
    elsewhere, and on Grassmann where a block is singular and nothing damps it, or so little that
    the direct solve loses half of its digits, ``solve`` runs CG with the blocks as its
    preconditioner.
    """

    approximates = (
        "F by its diagonal blocks, one per row of the parameter, restricted to the tangent space"
    )

    def __init__(self, manifold: Manifold, point: Tensor, blocks: Tensor) -> None:
        super().__init__(manifold, point)
        if point.ndim != 2:
            raise ValueError(
                f"a row-block Fisher needs a matrix as its point, got shape {tuple(point.shape)}"
            )
        expected = (*point.shape, point.shape[1])
        if blocks.shape != expected:
            raise ValueError(f"blocks must have shape {expected}, got {tuple(blocks.shape)}")
        self.blocks = blocks
        self._preconditioner: tuple[float, Tensor, bool] | None = None

    @classmethod
    def from_gradients(cls, manifold: Manifold, point: Tensor, gradients: Tensor) -> RowBlockFisher:
        """The blocks of the second moment of the gradients.

        ``gradients``: per-sample Riemannian gradients, shape (samples, rows, columns).
        """
        return cls(
            manifold, point, torch.einsum("nij,nik->ijk", gradients, gradients) / len(gradients)
        )

    @override
    def variance_reduced(
        self, anchor_batch: FisherOperator, batch: FisherOperator, samples: Tensor, weight: float
    ) -> FisherOperator:
        if not (isinstance(anchor_batch, RowBlockFisher) and isinstance(batch, RowBlockFisher)):
            return super().variance_reduced(anchor_batch, batch, samples, weight)
        rest = self.blocks - weight * anchor_batch.blocks
        turn = self.manifold.alignment(self.point, batch.point)
        rest = rest if turn is None else turn.mT @ rest @ turn
        return RowBlockFisher(self.manifold, batch.point, weight * batch.blocks + rest)

    @property
    @override
    def is_structured(self) -> bool:
        return self.manifold.projector_structure in {"none", "rows", "left"}

    @override
    def _matvec(self, v: Tensor) -> Tensor:
        return self.manifold.project(self.point, apply_blocks(self.blocks, v))

    @override
    def structured_solve(self, g: Tensor, damping: float) -> Tensor | None:
        if not self.is_structured:
            return None
        x, blocks = self.point, self.blocks
        if self.manifold.projector_structure == "rows":
            blocks = _complement(x, blocks)
        inverse, singular = damped_blocks(blocks, damping)
        if self.manifold.projector_structure != "left":
            return self.manifold.project(x, apply_blocks(inverse, g))
        if singular:
            return None
        restricted, d = self._restricted(inverse), torch.zeros_like(g)
        eps, size = torch.finfo(g.dtype).eps, float(self.manifold.norm(x, g))
        missing, left = g, math.inf
        # refined where 1/λ of flat blocks has cost digits
        for _ in range(1 + _REFINEMENTS):
            d = d + restricted(missing)
            missing = self.manifold.project(x, g - apply_blocks(blocks, d) - damping * d)
            left = float(self.manifold.norm(x, missing))
            if not left > _EXACT * eps * size:
                break
        # blocks that are not finite give NaN, for which there is no better way
        return None if left > eps**0.5 * size else d

    def _restricted(self, inverse: Tensor) -> Callable[[Tensor], Tensor]:
        """(P B P + λ)⁻¹ on the Grassmann manifold, through the multipliers S of the constraint."""
        x, p = self.point, self.point.shape[1]
        # (K S)_{ab} = Σ_j x_ja Σ_d (B_j + λ)⁻¹_{bd} (Sᵀ x_j)_d must equal Σ_j x_ja free_jb
        outer = (x.unsqueeze(2) * x.unsqueeze(1)).flatten(1)
        system = (
            (outer.mT @ inverse.flatten(1)).view(p, p, p, p).transpose(1, 2).reshape(p * p, p * p)
        )
        # positive definite, since the blocks are and x has full rank; blocks that are not finite
        # give NaN, not a crash
        factors, pivots, _ = torch.linalg.lu_factor_ex(system)

        def solve(g: Tensor) -> Tensor:
            free = apply_blocks(inverse, g)
            multipliers = torch.linalg.lu_solve(
                factors, pivots, (x.mT @ free).reshape(-1, 1)
            ).reshape(p, p)
            return self.manifold.project(x, free - apply_blocks(inverse, x @ multipliers))

        return solve

    @override
    def precondition(self, v: Tensor, damping: float) -> Tensor:
        if self._preconditioner is None or self._preconditioner[0] != damping:
            self._preconditioner = (damping, *damped_blocks(self.blocks, damping))
        _, inverse, singular = self._preconditioner
        if singular:
            # a pseudo-inverse would keep CG out of directions that the restriction to the tangent
            # space needs
            return v
        return self.manifold.project(self.point, apply_blocks(inverse, v))


def _complement(x: Tensor, blocks: Tensor) -> Tensor:
    """P_j B_j P_j + τ_j x_j x_jᵀ for unit rows x_j.

    Decoupled from the normal direction, and regular along it.
    """
    size = blocks.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
    row, column = x.unsqueeze(1), x.unsqueeze(2)
    blocks = blocks - column @ (row @ blocks)
    blocks = blocks - (blocks @ column) @ row
    return blocks + torch.where(size > 0, size, 1.0) * column * row
