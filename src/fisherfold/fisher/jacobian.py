"""The RFIM through Jacobian products, never materialised.

    F^R v = (1/N) P Σ_i J_iᵀ B_i J_i v

with the matrix B_i in the space of the outputs: the Fisher matrix of the output distribution
(exact), or the outer product of scores s = ∂ψ/∂z at sampled targets (Monte Carlo) or at the
observed ones (empirical, the REFIM). The model's graph is kept: Jᵀ w is one backward pass through
it, and J v is a backward pass through that backward pass, which is linear in w. No product
evaluates the model again (a forward-mode product would, and is several times slower here).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from fisherfold.fisher.blocks import gram
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
    unflatten,
    unflatten_like,
)

Graph: TypeAlias = "tuple[Point, Tensor]"

# Entries of the Jacobian that are formed at once: they stay in the cache.
BLOCK_ENTRIES = 2**19


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
    """What the exact, Monte-Carlo and empirical operators share.

    Args:
        manifold: the manifold.
        point: the point θ.
        outputs: the outputs z of all samples, a torch function of θ.
        jacobian: the Euclidean Jacobian of the outputs of a slice of samples, with leading
            dimensions (samples, q).
        likelihood: the distribution of a target given z.
        weights: w_i, one per sample.
        graph: θ as variables and z computed from them, if the caller has them already.
    """

    def __init__(
        self,
        manifold: Manifold,
        point: Point,
        outputs: Callable[[Point], Tensor],
        jacobian: Callable[[slice], Point],
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

    def _weighted(self, u: Tensor, part: slice = slice(None)) -> Tensor:
        """Times the roots of the weights, sample by sample."""
        if self._root_weights is None:
            return u
        return u * self._root_weights[part].to(u.dtype).reshape(-1, *(1 for _ in u.shape[1:]))

    @abstractmethod
    def _output_product(self, u: Tensor) -> Tensor:
        """B u for vectors u in the space of the outputs, sample by sample."""

    @abstractmethod
    def _output_factor(self, part: slice) -> Tensor:
        """S of shape (n, q, r) with B_i = S_i S_iᵀ, for a slice of samples."""

    def jvp(self, v: Tangent) -> Tensor:
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

    def vjp(self, w: Tensor) -> Tangent:
        """The adjoint product P Jᵀ w, in the metric of the manifold."""
        return self.manifold._gradient(self.point, unflatten_like(self._backward(w), self.point))

    @override
    @torch.inference_mode(False)  # where torch before 2.13 takes every derivative for 0
    def _matvec(self, v: Tangent) -> Tangent:
        return self.vjp(self._output_product(self.jvp(v)) / self.n_samples)

    def _factor_rows(self, part: slice) -> Tensor:
        """The rows of the factor for a slice of samples, before their projection onto the tangent space."""
        factor = self._output_factor(part) / self.n_samples**0.5
        jacobian = flatten(reorder_like(self._jacobian(part), self.point), batch=2)
        return (factor.mT @ jacobian).flatten(0, 1)

    def _slices(self) -> Iterator[slice]:
        """Samples whose Jacobians stay in the cache, whatever N is."""
        entries = (self.n_rows or 1) // self.n_samples * flatten(self.point).numel()
        size = max(1, BLOCK_ENTRIES // max(entries, 1))
        return (slice(k, min(k + size, self.n_samples)) for k in range(0, self.n_samples, size))

    @override
    def rows(self) -> Tensor:
        rows = torch.cat([self._factor_rows(part) for part in self._slices()])
        return flatten(self.manifold.project(self.point, unflatten(rows, self.point)), batch=1)

    @override
    def in_basis(self, basis: Tensor) -> Tensor:
        total = basis.new_zeros(len(basis), len(basis))
        for part in self._slices():
            total += gram(self._factor_rows(part) @ basis.mT)
        return total


class ExactFisher(JacobianFisher):
    """The RFIM: F^R = (1/N) Σ_i w_i (J_i P)ᵀ F_L(z_i) (J_i P), with F_L the Fisher matrix of the output distribution.

    For a Gaussian it is the Gauss-Newton matrix; where the loss has a minimum with zero residual it
    is the Riemannian Hessian there.
    """

    approximates = "nothing: F^R = (1/N) Σ J_iᵀ F_L(z_i) J_i exactly, on the given samples"

    @override
    def _output_product(self, u: Tensor) -> Tensor:
        return self._weighted(self.likelihood.fisher_vp(self.z, self._weighted(u)))

    @override
    def _output_factor(self, part: slice) -> Tensor:
        return self._weighted(self.likelihood.fisher_factor(self.z[part]), part)


class ScoreFisher(JacobianFisher):
    """(1/N) Σ_i w_i mean_s J_iᵀ s_is s_isᵀ J_i for scores s of shape (draws, N, q)."""

    approximates = "the second moment of given scores"
    scores: Tensor

    @override
    def _output_product(self, u: Tensor) -> Tensor:
        flat = self._weighted(u).reshape(1, len(u), -1)
        along = (self.scores * flat).sum(dim=-1, keepdim=True)
        return self._weighted((self.scores * along).mean(dim=0).reshape(u.shape))

    @override
    def _output_factor(self, part: slice) -> Tensor:
        scores = self.scores[:, part].permute(1, 2, 0) / len(self.scores) ** 0.5
        return self._weighted(scores, part)


class MonteCarloFisher(ScoreFisher):
    """The RFIM with targets sampled from the model.

    (1/N) Σ_i mean_s grad ψ_i(ỹ_s) grad ψ_i(ỹ_s)ᵀ, ỹ_s ~ p(· | z_i).

    Unbiased for the exact RFIM; its error falls like 1/√(draws · N).

    Args:
        *args: as of ``ExactFisher``.
        targets: drawn targets of all samples, a tensor for each draw.
        **options: as of ``ExactFisher``.
    """

    approximates = "F^R by targets drawn from the model: unbiased, error 1/√(draws N)"

    def __init__(self, *args: Any, targets: list[Tensor], **options: Any) -> None:
        super().__init__(*args, **options)
        self.scores = torch.stack([score(self.likelihood, self.z, y) for y in targets])
        self.targets = targets
        self.n_rows = len(targets) * self.n_samples


class EmpiricalFisher(ScoreFisher):
    """The REFIM: (1/N) Σ_i w_i grad ψ_i grad ψ_iᵀ with the observed targets.

    Not the Fisher information away from the true parameter: it vanishes at a perfect fit.

    Args:
        *args: as of ``ExactFisher``.
        y: the targets; None where the outputs are losses themselves, with score 1.
        **options: as of ``ExactFisher``.
    """

    approximates = (
        "the observed second moment of the gradients (REFIM), not an expectation over the model"
    )

    def __init__(self, *args: Any, y: Tensor | None, **options: Any) -> None:
        super().__init__(*args, **options)
        if y is None:
            self.scores = torch.ones_like(self.z)[None, :, None]
        else:
            self.scores = score(self.likelihood, self.z, y)[None]
        self.n_rows = self.n_samples


class ClusterFisher(FisherOperator):
    """The second moment of the sums of gradients over clusters.

    The filling of a sandwich for dependent samples.

        (1/N) G/(G - 1) Σ_c g_c g_cᵀ,    g_c = Σ_{i in c} w_i grad ψ_i,    G clusters

    Args:
        empirical: the operator of the single samples.
        groups: the cluster of every sample, 0 to G - 1.
        weights: w_i, one per sample.
    """

    approximates = "the second moment of the sums of gradients over clusters"

    def __init__(
        self, empirical: EmpiricalFisher, groups: Tensor, weights: Tensor | None = None
    ) -> None:
        super().__init__(empirical.manifold, empirical.point)
        self.empirical, self.groups = empirical, groups
        self.count = int(groups.max()) + 1
        scores = empirical.scores[0]
        self.scores = scores if weights is None else scores * weights[:, None].to(scores.dtype)

    @override
    @torch.inference_mode(False)
    def _matvec(self, v: Tangent) -> Tangent:
        u = self.empirical.jvp(v)
        along = (self.scores * u.reshape(len(u), -1)).sum(1)
        sums = along.new_zeros(self.count).index_add_(0, self.groups, along)
        found = (self.scores * sums[self.groups, None]).reshape(u.shape)
        share = self.count / (self.count - 1) / self.empirical.n_samples
        return self.empirical.vjp(share * found)


def score(likelihood: Likelihood, z: Tensor, y: Tensor) -> Tensor:
    """The derivative of the negative log-likelihood in its natural parameter, sample by sample."""
    derivative = torch.func.grad(lambda t: likelihood.nll(t, y).sum())(z)
    return (
        cast("Tensor", derivative).flatten(1) if z.ndim > 1 else cast("Tensor", derivative)[:, None]
    )
