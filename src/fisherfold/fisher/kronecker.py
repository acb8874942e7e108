"""Kronecker-factored Fisher information of a matrix parameter.

    F ≈ P (R ⊗ L) P,    that is  v ↦ P (L v R),    vec stacks columns, so vec(L v R) = (R ⊗ L) vec(v)

If every gradient is g aᵀ, L = E[g gᵀ] and R = E[a aᵀ]. On the Grassmann manifold the projector acts on one side only,
I - U Uᵀ on the left, so that P (R ⊗ L) P = R ⊗ (P L P) is again a Kronecker product and the damped
inverse is exact through two eigendecompositions:

    (F + λ I)⁻¹ g = Q [ (Qᵀ g V) / (l rᵀ + λ) ] Vᵀ,    P L P = Q diag(l) Qᵀ,  R = V diag(r) Vᵀ.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.fisher.blocks import rounding_share
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds.base import Manifold
from fisherfold.manifolds.lengths import length


class KroneckerFisher(FisherOperator):
    """v ↦ P (L v R) on the tangent space at a matrix; a factor that is None is the identity (one-sided form).

    Args:
        manifold: a manifold of matrices.
        point: a matrix of it, without batch dimensions.
        left: L, symmetric positive semi-definite with as many rows as the point has, or None.
        right: R, symmetric positive semi-definite with as many rows as the point has columns, or None.
        keep_trace: divide R ⊗ L by tr L, for factors that are the two second moments of the same gradients.

    The damped solve is exact on Euclidean space and on the Grassmann manifold. Elsewhere the projector mixes both
    sides, the product is no Kronecker product any more, and ``solve`` runs CG with the factors as its preconditioner.
    """

    approximates = "F by a Kronecker product of two second moments, restricted to the tangent space"

    def __init__(
        self,
        manifold: Manifold,
        point: Tensor,
        *,
        left: Tensor | None,
        right: Tensor | None,
        keep_trace: bool = False,
    ) -> None:
        super().__init__(manifold, point)
        if point.ndim != 2:
            raise ValueError(f"a Kronecker Fisher needs a matrix as its point, got shape {tuple(point.shape)}")
        for name, factor, size in (("left", left, point.shape[0]), ("right", right, point.shape[1])):
            if factor is not None and factor.shape != (size, size):
                raise ValueError(f"{name} must have shape ({size}, {size}), got {tuple(factor.shape)}")
        if left is not None and manifold.projector_side == "left":
            left = _complement(point, left)
        self.left, self.right, self.keep_trace = left, right, keep_trace
        # for gradients M, tr E[M Mᵀ] = tr E[Mᵀ M] = E‖M‖² is the trace of F, and that of R ⊗ L is its square
        trace = float(left.trace()) if keep_trace and left is not None else 1.0
        self.factor = 1 / trace if trace > torch.finfo(point.dtype).tiny else 0.0
        self._eigen: tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None] | None = None

    @classmethod
    def from_gradients(cls, manifold: Manifold, point: Tensor, gradients: Tensor) -> KroneckerFisher:
        """The two second moments of the gradients, scaled to keep the trace.

        F ≈ E[Mᵀ M] ⊗ E[M Mᵀ] / E‖M‖² for gradients M: exact when E[vec M vec Mᵀ] is a Kronecker product.

        ``gradients``: per-sample Riemannian gradients, shape (samples, rows, columns).
        """
        count = len(gradients)
        left = torch.einsum("nij,nkj->ik", gradients, gradients) / count
        right = torch.einsum("nij,nik->jk", gradients, gradients) / count
        return cls(manifold, point, left=left, right=right, keep_trace=True)

    @override
    def moved(
        self, anchor_batch: FisherOperator, batch: FisherOperator, samples: Tensor, weight: float
    ) -> FisherOperator:
        if not (isinstance(anchor_batch, KroneckerFisher) and isinstance(batch, KroneckerFisher)):
            return super().moved(anchor_batch, batch, samples, weight)
        # on Grassmann, what stays at the anchor turns with the frame: the short factor R becomes Qᵀ R Q
        turn = self.manifold.alignment(self.point, batch.point)
        left = _moved(self.left, anchor_batch.left, batch.left, weight, None)
        right = _moved(self.right, anchor_batch.right, batch.right, weight, turn)
        return KroneckerFisher(self.manifold, batch.point, left=left, right=right, keep_trace=self.keep_trace)

    @property
    @override
    def is_structured(self) -> bool:
        return self.manifold.projector_side in {"none", "left"}

    @override
    def _matvec(self, v: Tensor) -> Tensor:
        product = self.factor * (v if self.left is None else self.left @ v)
        product = product if self.right is None else product @ self.right
        return self.manifold.project(self.point, product)

    @override
    def structured_solve(self, g: Tensor, damping: float, *, factored: bool = False) -> Tensor | None:
        if not self.is_structured:
            return None
        # 1/λ would blow up a part outside the range of F that is nothing but rounding
        return self._inverse(g, damping, factored, least=1e2 * torch.finfo(g.dtype).eps * _size(g))

    @override
    def precondition(self, v: Tensor, damping: float) -> Tensor:
        if self._is_singular(damping):
            # a pseudo-inverse would keep CG out of directions that the restriction to the tangent space needs
            return v
        return self._inverse(v, damping, factored=False)

    def precondition_hessian(self, v: Tensor, damping: float) -> Tensor:
        """Precondition a Hessian of which this is the Fisher information, with little trust in small eigenvalues."""
        # What residuals add to the Hessian is no smaller where the Fisher information is: along its flat directions the
        # inverse would be far too large. A tenth of the mean eigenvalue bounds it.
        mean = self.factor
        for side in (self.left, self.right):
            mean *= float(side.diagonal().mean()) if side is not None else 1.0
        return self._inverse(v, damping + 0.1 * mean, factored=False)

    def _spectra(self) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
        if self._eigen is None:
            self._eigen = (_eigen(self.left, self.factor), _eigen(self.right, 1.0))
        return self._eigen

    def _is_singular(self, damping: float) -> bool:
        """Whether R ⊗ L is so up to rounding, and the damping lost in it."""
        rows, columns = _sides(*self._spectra(), self.point)
        values = rows[:, None] * columns
        floor = values.max() * rounding_share(max(self.point.shape), values.dtype)
        return damping <= float(floor) and bool((values <= floor).any())

    def _inverse(self, g: Tensor, damping: float, factored: bool, least: float = 0.0) -> Tensor:
        """The damped inverse, without the part of g outside the range of F if that is not longer than ``least``."""
        left, right = self._spectra()
        inner = g if left is None else left[1].mT @ g
        inner = inner if right is None else inner @ right[1]
        rows, columns = _sides(left, right, g)
        outside = rows[:, None] * columns == 0
        if least > 0 and _size(torch.where(outside, inner, 0.0)) <= least:
            inner = torch.where(outside, 0.0, inner)
        inner = inner * _inverse_spectrum(left, right, g, damping, factored)
        inner = inner if left is None else left[1] @ inner
        inner = inner if right is None else inner @ right[1].mT
        return self.manifold.project(self.point, inner)


def _size(matrix: Tensor) -> float:
    return float(length(matrix, dim=(0, 1)))


def _complement(frame: Tensor, factor: Tensor) -> Tensor:
    """(I - U Uᵀ) L (I - U Uᵀ) without forming the projector."""
    factor = factor - frame @ (frame.mT @ factor)
    return factor - (factor @ frame) @ frame.mT


def _moved(
    anchor: Tensor | None, anchor_batch: Tensor | None, batch: Tensor | None, weight: float, turn: Tensor | None
) -> Tensor | None:
    if anchor is None or anchor_batch is None or batch is None:
        return None
    rest = anchor - weight * anchor_batch
    return weight * batch + (rest if turn is None else turn.mT @ rest @ turn)


def _eigen(matrix: Tensor | None, factor: float) -> tuple[Tensor, Tensor] | None:
    if matrix is None:
        return None
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    none = values <= values[-1] * rounding_share(len(values), values.dtype)
    return torch.where(none, 0.0, factor * values), vectors


def _sides(
    left: tuple[Tensor, Tensor] | None, right: tuple[Tensor, Tensor] | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """The eigenvalues of both factors, 1 for one that is the identity."""
    rows = torch.ones_like(like[:, 0]) if left is None else left[0]
    return rows, torch.ones_like(like[0]) if right is None else right[0]


def _inverse_spectrum(
    left: tuple[Tensor, Tensor] | None,
    right: tuple[Tensor, Tensor] | None,
    like: Tensor,
    damping: float,
    factored: bool,
) -> Tensor:
    """The eigenvalues of the damped inverse on the grid (rows, columns); 0 where F is singular and nothing damps it."""
    rows, columns = _sides(left, right, like)
    if factored and left is not None and right is not None:
        # Martens and Grosse: the damping is split so that both factors feel it in proportion to their mean eigenvalue
        balance = (rows.mean() / columns.mean()).sqrt() if float(columns.mean()) > 0 < float(rows.mean()) else 1.0
        damped = (rows + balance * damping**0.5)[:, None] * (columns + damping**0.5 / balance)
    else:
        damped = rows[:, None] * columns + damping
    floor = damped.max() * rounding_share(max(like.shape), like.dtype) if damping == 0 else 0.0
    singular = damped <= floor
    return torch.where(singular, 0.0, 1 / torch.where(singular, 1.0, damped))
