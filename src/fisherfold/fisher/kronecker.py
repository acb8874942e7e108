"""Kronecker-factored Fisher information of a matrix parameter.

    F ≈ P (R ⊗ L) P,    that is  v ↦ P (L v R);
    vec stacks columns, so vec(L v R) = (R ⊗ L) vec(v)

If every gradient is g aᵀ, L = E[g gᵀ] and R = E[a aᵀ]. On the Grassmann manifold the projector acts
on one side only, I - U Uᵀ on the left, so that P (R ⊗ L) P = R ⊗ (P L P) is again a Kronecker
product and the damped inverse is exact through two eigendecompositions:

    (F + λ I)⁻¹ g = Q [ (Qᵀ g V) / (l rᵀ + λ) ] Vᵀ,    P L P = Q diag(l) Qᵀ,  R = V diag(r) Vᵀ.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.fisher.damped import KroneckerSpectrum, Spectrum
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds.base import Manifold


class KroneckerFisher(FisherOperator):
    """v ↦ P (L v R) on the tangent space at a matrix.

    A factor that is None is the identity (one-sided form).

    Args:
        manifold: a manifold of matrices.
        point: a matrix of it, without batch dimensions.
        left: L, symmetric positive semi-definite with as many rows as the point has, or None.
        right: R, symmetric positive semi-definite with as many rows as the point has columns, or
            None.
        keep_trace: divide R ⊗ L by tr L, for factors that are the two second moments of the same
            gradients.

    The damped solve is exact on Euclidean space and on the Grassmann manifold. Elsewhere the
    projector mixes both sides, the product is no Kronecker product any more, and ``solve`` runs CG
    with the factors as its preconditioner.
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
            raise ValueError(
                f"a Kronecker Fisher needs a matrix as its point, got shape {tuple(point.shape)}"
            )
        for name, factor, size in (
            ("left", left, point.shape[0]),
            ("right", right, point.shape[1]),
        ):
            if factor is not None and factor.shape != (size, size):
                raise ValueError(
                    f"{name} must have shape ({size}, {size}), got {tuple(factor.shape)}"
                )
        if left is not None and manifold.projector_structure == "left":
            left = _complement(point, left)
        self.left, self.right, self.keep_trace = left, right, keep_trace
        # for gradients M, tr E[M Mᵀ] = tr E[Mᵀ M] = E‖M‖² is the trace of F, and that of R ⊗ L is
        # its square
        trace = float(left.trace()) if keep_trace and left is not None else 1.0
        self.factor = 1 / trace if trace > torch.finfo(point.dtype).tiny else 0.0
        self._eigen: KroneckerSpectrum | None = None

    @classmethod
    def from_gradients(
        cls, manifold: Manifold, point: Tensor, gradients: Tensor
    ) -> KroneckerFisher:
        """The two second moments of the gradients, scaled to keep the trace.

        F ≈ E[Mᵀ M] ⊗ E[M Mᵀ] / E‖M‖² for gradients M: exact when E[vec M vec Mᵀ] is a Kronecker
        product.

        ``gradients``: per-sample Riemannian gradients, shape (samples, rows, columns).
        """
        count = len(gradients)
        left = torch.einsum("nij,nkj->ik", gradients, gradients) / count
        right = torch.einsum("nij,nik->jk", gradients, gradients) / count
        return cls(manifold, point, left=left, right=right, keep_trace=True)

    @override
    def variance_reduced(
        self, anchor_batch: FisherOperator, batch: FisherOperator, samples: Tensor, weight: float
    ) -> FisherOperator:
        if not (isinstance(anchor_batch, KroneckerFisher) and isinstance(batch, KroneckerFisher)):
            return super().variance_reduced(anchor_batch, batch, samples, weight)
        # on Grassmann, what stays at the anchor turns with the frame: the short factor R becomes Qᵀ
        # R Q
        turn = self.manifold.alignment(self.point, batch.point)
        left = _moved(self.left, anchor_batch.left, batch.left, weight, None)
        right = _moved(self.right, anchor_batch.right, batch.right, weight, turn)
        return KroneckerFisher(
            self.manifold, batch.point, left=left, right=right, keep_trace=self.keep_trace
        )

    @property
    @override
    def is_structured(self) -> bool:
        return self.manifold.projector_structure in {"none", "left"}

    @override
    def _matvec(self, v: Tensor) -> Tensor:
        product = self.factor * (v if self.left is None else self.left @ v)
        product = product if self.right is None else product @ self.right
        return self.manifold.project(self.point, product)

    @override
    def structured_solve(self, g: Tensor, damping: float) -> Tensor | None:
        if not self.is_structured:
            return None
        return self._inverse(g, damping)

    @override
    def precondition(self, v: Tensor, damping: float) -> Tensor:
        if self._spectrum().is_singular(damping):
            # a pseudo-inverse would keep CG out of directions that the restriction to the tangent
            # space needs
            return v
        return self._inverse(v, damping)

    def precondition_hessian(self, v: Tensor, damping: float) -> Tensor:
        """Precondition a Hessian of which this is the Fisher information, with little trust in small eigenvalues."""
        # What residuals add to the Hessian is no smaller where the Fisher information is: along its
        # flat directions the inverse would be far too large. A tenth of the mean eigenvalue bounds
        # it.
        mean = self.factor
        for side in (self.left, self.right):
            mean *= float(side.diagonal().mean()) if side is not None else 1.0
        return self._inverse(v, damping + 0.1 * mean)

    def _spectrum(self) -> KroneckerSpectrum:
        if self._eigen is None:
            left = (
                Spectrum.identity(self.point[:, 0]) if self.left is None else Spectrum.of(self.left)
            )
            right = (
                Spectrum.identity(self.point[0]) if self.right is None else Spectrum.of(self.right)
            )
            self._eigen = KroneckerSpectrum(left, right, self.factor)
        return self._eigen

    def _inverse(self, g: Tensor, damping: float) -> Tensor:
        return self.manifold.project(self.point, self._spectrum().solve(g, damping))


def _complement(frame: Tensor, factor: Tensor) -> Tensor:
    """(I - U Uᵀ) L (I - U Uᵀ) without forming the projector."""
    factor = factor - frame @ (frame.mT @ factor)
    return factor - (factor @ frame) @ frame.mT


def _moved(
    anchor: Tensor | None,
    anchor_batch: Tensor | None,
    batch: Tensor | None,
    weight: float,
    turn: Tensor | None,
) -> Tensor | None:
    if anchor is None or anchor_batch is None or batch is None:
        return None
    rest = anchor - weight * anchor_batch
    return weight * batch + (rest if turn is None else turn.mT @ rest @ turn)
