"""The Fisher information and the Hessian of many small regressions in a shared subspace, as operators.

Along H the coefficients change by ẇ_t = -G_t⁻¹ (UᵀA_t H w_t + Hᵀe_t), and U w_t by k_t = H w_t + U ẇ_t. The Fisher
information of N(X_t U w_t(U), I) is H ↦ P (1/N) Σ_t J_tᵀA_t k_t with J_t H = k_t; the ridge is a Gaussian
observation √λ w_t of zero and adds λ ẇ_tᵀẇ_t. The Hessian of the penalised loss is

    P (1/N) Σ_t [ A_tk_t w_tᵀ + e_t ẇ_tᵀ ] - H Uᵀ∇Ψ,

which differs from the Fisher information by terms in the residuals e_t.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from fisherfold.distributed import Axis
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.operators import FisherOperator
from fisherfold.subspace.task_state import TaskState


class SubspaceFisher(FisherOperator):
    """The exact Fisher information (1/N) Σ_t J_tᵀJ_t with J_t H = (X_t k_t, √λ ẇ_t)."""

    preconditioner: KroneckerFisher
    approximates = "nothing: the Fisher information of N(X_t U w_t(U), I), w_t(U) the ridge solution"

    def __init__(
        self, point: Tensor, grams: Tensor, state: TaskState, count: int, preconditioner: KroneckerFisher,
        samples: Axis,
    ) -> None:  # fmt: skip
        super().__init__(preconditioner.manifold, point)
        self.grams, self.state, self.count = grams, state, count
        self.preconditioner, self.samples = preconditioner, samples

    def _moved(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """ẇ_t and A_tk_t."""
        state = self.state
        moved = state.weights @ v.mT
        change = -_apply(state.inverse, _apply(state.gram_frame.mT, moved) + state.residual @ v)
        return change, _apply(self.grams, moved + change @ self.point.mT)

    @override
    def _matvec(self, v: Tensor) -> Tensor:
        state, x = self.state, self.point
        change, image = self._moved(v)
        back = _apply(state.inverse, image @ x + state.ridge * change)
        through = image - _apply(state.gram_frame, back)
        product = through.mT @ state.weights - state.residual.mT @ back
        return self.manifold.project(x, self.samples.total(product) / self.count)


class SubspaceHessian(SubspaceFisher):
    """The Riemannian Hessian of the penalised loss."""

    approximates = "the Fisher information; it is the Hessian"

    @override
    def _matvec(self, v: Tensor) -> Tensor:
        residual, x, w = self.state.residual, self.point, self.state.weights
        change, image = self._moved(v)
        product = image.mT @ w + residual.mT @ change - v @ (x.mT @ (residual.mT @ w))
        return self.manifold.project(x, self.samples.total(product) / self.count)

    @override
    def precondition(self, v: Tensor, damping: float) -> Tensor:
        return self.preconditioner.precondition_hessian(v, damping)


def _apply(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[..., None]).squeeze(-1)
