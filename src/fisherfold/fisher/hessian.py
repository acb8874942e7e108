"""The Riemannian Hessian of a loss or of a prior as an operator, by automatic differentiation.

    Hess Ψ(x)[v] = P (D²Ψ[v] + (D_v P) ∇Ψ)    for the ambient metric

The Euclidean gradient is evaluated once with its graph; a product is one backward pass through it,
which gives D²Ψ[v], and the manifold's own conversion. Unlike a Fisher information it may be
indefinite.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.fisher.jacobian import Graph, record
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds.base import (
    Manifold,
    Point,
    Tangent,
    combine,
    leaves,
    reorder_like,
    tree_map,
    unflatten_like,
)


class Hessian(FisherOperator):
    """v ↦ Hess Ψ(x)[v] on the tangent space.

    Args:
        manifold: the manifold.
        point: x.
        loss: Ψ, a torch function that can be differentiated twice.
        graph: x as variables and Ψ computed from them, if the caller has them already.
        gradients: the Euclidean gradient in the leaves of x with its graph, if the caller has it
            already.
    """

    approximates = "nothing: the Riemannian Hessian of the loss, which may be indefinite"

    def __init__(
        self,
        manifold: Manifold,
        point: Point,
        loss: Callable[[Point], Tensor],
        *,
        graph: Graph | None = None,
        gradients: tuple[Tensor, ...] | None = None,
    ) -> None:
        super().__init__(manifold, point)
        variables, value = graph or record(loss, point)
        self._variables = leaves(reorder_like(variables, self.point))
        if not value.requires_grad:
            raise ValueError(
                "the loss must be a torch function of theta to have a Hessian, but it has no "
                "gradient"
            )
        if gradients is None:
            with torch.enable_grad():
                gradients = torch.autograd.grad(
                    value, self._variables, create_graph=True, materialize_grads=True
                )
        self._gradients = gradients
        self._egrad = unflatten_like(
            (gradient.detach() for gradient in self._gradients), self.point
        )

    @override
    @torch.inference_mode(False)
    def _matvec(self, v: Tangent) -> Tangent:
        # the gradient in a parameter in which the loss is linear may be a constant
        pairs = [(g, t) for g, t in zip(self._gradients, leaves(v), strict=True) if g.requires_grad]
        if pairs:
            gradients, along = zip(*pairs, strict=True)
            parts = torch.autograd.grad(
                gradients, self._variables, along, retain_graph=True, materialize_grads=True
            )
            ehess = unflatten_like(parts, self.point)
        else:
            ehess = tree_map(torch.zeros_like, self.point)
        return self.manifold._hessian(
            self.point, self._egrad, ehess, v
        )  # the hook: all has been checked before


class PriorFisher(FisherOperator):
    """The information of data and of a prior density.

    F + Hess π / N, with π minus the logarithm of the density.

    The Hessian is Riemannian, so that π may be written in any form that is the same on the
    manifold.

    Args:
        data: F.
        prior: π; where its Hessian is negative beyond F, solves need damping.
        scale: 1/N.
    """

    approximates = "F^R plus the Riemannian Hessian of minus the logarithm of the prior density"

    def __init__(
        self, data: FisherOperator, prior: Callable[[Point], Tensor], scale: float
    ) -> None:
        super().__init__(data.manifold, data.point)
        self.data, self.scale, self.preconditioner = data, scale, data
        self.function = prior
        self.targets = data.targets
        self.prior = Hessian(data.manifold, self.point, prior)

    @override
    def variance_reduced(
        self, anchor_batch: FisherOperator, batch: FisherOperator, samples: Tensor, weight: float
    ) -> FisherOperator:
        if not (isinstance(anchor_batch, PriorFisher) and isinstance(batch, PriorFisher)):
            return super().variance_reduced(anchor_batch, batch, samples, weight)
        data = self.data.variance_reduced(anchor_batch.data, batch.data, samples, weight)
        return PriorFisher(data, batch.function, self.scale)

    @override
    def _matvec(self, v: Tangent) -> Tangent:
        return combine(1.0, self.data._matvec(v), self.scale, self.prior._matvec(v))
