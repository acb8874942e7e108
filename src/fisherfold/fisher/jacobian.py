"""The RFIM through Jacobian products, never materialised.

    F^R v = (1/N) P Σ_i J_iᵀ B_i J_i v

with the matrix B_i in the space of the outputs: the Fisher matrix of the output distribution (exact), or the outer
product of scores s = ∂ψ/∂z at sampled targets (Monte Carlo) or at the observed ones (empirical, the REFIM). The model's
graph is kept: Jᵀ w is one backward pass through it, and J v is a backward pass through that backward pass, which is
linear in w. No product evaluates the model again (a forward-mode product would, and is several times slower here).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from fisherfold.fisher.likelihoods import Likelihood
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds.base import (
    Manifold,
    Point,
    Tangent,
    flatten,
    leaves,
    reorder_like,
    tree_map,
    unflatten_like,
)

Graph: TypeAlias = "tuple[Point, Tensor]"


def record(outputs: Callable[[Point], Tensor], point: Point) -> Graph:
    """Evaluate a model and keep its graph."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "there are no gradients inside torch.inference_mode(); leave it, no_grad() does no harm"
        )
    variables = tree_map(lambda leaf: leaf.detach().requires_grad_(), point)
    # by plain kernels: what is fused for speed (attention) cannot be differentiated twice
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        return variables, outputs(variables)


class JacobianFisher(FisherOperator):
    """What the exact, Monte-Carlo and empirical operators share."""

    def __init__(
        self,
        manifold: Manifold,
        point: Point,
        outputs: Callable[[Point], Tensor],
        jacobian: Callable[[], Point],
        likelihood: Likelihood,
        *,
        weights: Tensor | None = None,
        graph: Graph | None = None,
    ) -> None:
        super().__init__(manifold, point)
        self._jacobian = jacobian
        self.likelihood = likelihood
        variables, self._graph = graph or record(outputs, point)
        self._variables = reorder_like(variables, self.point)
        self.z = self._graph.detach()
        self.n_samples = len(self.z)
        self.n_rows = self.z.numel()
        self._root_weights = None if weights is None else weights.sqrt()
        self._transposed: tuple[Tensor, list[Tensor]] | None = None

    def _weighted(self, u: Tensor) -> Tensor:
        """Times the roots of the weights, sample by sample."""
        if self._root_weights is None:
            return u
        return u * self._root_weights.to(u.dtype).reshape(-1, *(1 for _ in u.shape[1:]))

    @abstractmethod
    def _output_product(self, u: Tensor) -> Tensor:
        """B u for vectors u in the space of the outputs, sample by sample."""

    @abstractmethod
    def _output_factor(self) -> Tensor:
        """S of shape (N, q, r) with B_i = S_i S_iᵀ."""

    def push_forward(self, v: Tangent) -> Tensor:
        """The Jacobian product J v."""
        if not self._graph.requires_grad:
            return torch.zeros_like(self.z)
        if self._transposed is None:
            # Jᵀ w with its graph, at w = 0: linear in w, so that its transpose is J
            seed = torch.zeros_like(self.z, requires_grad=True)
            with torch.enable_grad():
                self._transposed = seed, self._backward(seed, create_graph=True)
        seed, gradients = self._transposed
        (product,) = torch.autograd.grad(
            gradients, seed, leaves(reorder_like(v, self.point)), retain_graph=True
        )
        return product

    def _backward(self, w: Tensor, *, create_graph: bool = False) -> list[Tensor]:
        variables = leaves(self._variables)
        if not self._graph.requires_grad:
            return [torch.zeros_like(leaf) for leaf in variables]
        return list(
            torch.autograd.grad(
                self._graph,
                variables,
                w,
                retain_graph=True,
                create_graph=create_graph,
                materialize_grads=True,
            )
        )

    def pull_back(self, w: Tensor) -> Tangent:
        """The adjoint product P Jᵀ w, in the metric of the manifold."""
        return self.manifold.riemannian_gradient(
            self.point, unflatten_like(self._backward(w), self.point)
        )

    @override
    @torch.inference_mode(False)  # where torch before 2.13 takes every derivative for 0
    def _matvec(self, v: Tangent) -> Tangent:
        return self.pull_back(self._output_product(self.push_forward(v)) / self.n_samples)

    @override
    def rows(self) -> Tensor:
        factor = self._output_factor() / self.n_samples**0.5
        stacked = tree_map(
            lambda leaf: torch.einsum("nqr,nq...->nr...", factor, leaf).flatten(0, 1),
            self._jacobian(),
        )
        tangent = self.manifold.project(self.point, stacked)
        return flatten(tangent, batch=1)


class ExactFisher(JacobianFisher):
    """The RFIM: F^R = (1/N) Σ_i w_i (J_i P)ᵀ F_L(z_i) (J_i P), with F_L the Fisher matrix of the output distribution.

    For a Gaussian it is the Gauss-Newton matrix; where the loss has a minimum with zero residual it is the Riemannian
    Hessian there.
    """

    approximates = "nothing: F^R = (1/N) Σ J_iᵀ F_L(z_i) J_i exactly, on the given samples"

    @override
    def _output_product(self, u: Tensor) -> Tensor:
        return self._weighted(self.likelihood.fisher_vp(self.z, self._weighted(u)))

    @override
    def _output_factor(self) -> Tensor:
        return self._weighted(self.likelihood.fisher_factor(self.z))


class _ScoreFisher(JacobianFisher):
    """B_i is the mean of outer products of scores, of shape (draws, N, q), times the weight of the sample."""

    scores: Tensor

    @override
    def _output_product(self, u: Tensor) -> Tensor:
        flat = self._weighted(u).reshape(1, len(u), -1)
        along = (self.scores * flat).sum(dim=-1, keepdim=True)
        return self._weighted((self.scores * along).mean(dim=0).reshape(u.shape))

    @override
    def _output_factor(self) -> Tensor:
        return self._weighted(self.scores.permute(1, 2, 0) / len(self.scores) ** 0.5)


class MonteCarloFisher(_ScoreFisher):
    """The RFIM with targets sampled from the model: (1/N) Σ_i mean_s grad ψ_i(ỹ_s) grad ψ_i(ỹ_s)ᵀ, ỹ_s ~ p(· | z_i).

    Unbiased for the exact RFIM; its error falls like 1/√(draws · N).

    Args:
        *args: as of ``ExactFisher``.
        draws: targets per sample.
        generator: the source of randomness.
        **options: as of ``ExactFisher``.
    """

    approximates = "F^R by targets drawn from the model: unbiased, error 1/√(draws N)"

    def __init__(
        self, *args: Any, draws: int = 1, generator: torch.Generator | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        if draws < 1:
            raise ValueError(f"draws must be at least 1, got {draws}")
        z = self.z.repeat(draws, *(1 for _ in self.z.shape[1:]))
        targets = self.likelihood.sample(z, generator=generator)
        self.scores = score(self.likelihood, z, targets).reshape(draws, self.n_samples, -1)
        self.n_rows = draws * self.n_samples

    @override
    def moved(
        self, anchor_batch: FisherOperator, batch: FisherOperator, samples: Tensor, weight: float
    ) -> FisherOperator:
        # what is taken away must be a part of what is there: with draws of its own the rest were not positive
        if isinstance(anchor_batch, MonteCarloFisher):
            anchor_batch.scores = self.scores[:, samples]
        return super().moved(anchor_batch, batch, samples, weight)


class EmpiricalFisher(_ScoreFisher):
    """The REFIM: (1/N) Σ_i grad ψ_i grad ψ_iᵀ with the observed targets.

    Not the Fisher information away from the true parameter: it vanishes at a perfect fit.

    Args:
        *args: as of ``ExactFisher``.
        y: the targets.
        **options: as of ``ExactFisher``.
    """

    approximates = (
        "the observed second moment of the gradients (REFIM), not an expectation over the model"
    )

    def __init__(self, *args: Any, y: Tensor, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scores = score(self.likelihood, self.z, y)[None]
        self.n_rows = self.n_samples


def score(likelihood: Likelihood, z: Tensor, y: Tensor) -> Tensor:
    """The derivative of the negative log-likelihood in its natural parameter, sample by sample."""
    derivative = torch.func.grad(lambda t: likelihood.nll(t, y).sum())(z)
    return (
        cast("Tensor", derivative).flatten(1) if z.ndim > 1 else cast("Tensor", derivative)[:, None]
    )
