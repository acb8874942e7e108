"""Any torch function as a problem on a manifold: a plain cost, or a mean of losses of samples.

    Ψ(θ) = f(θ)    or    Ψ(θ) = (1/N) Σ_i ℓ(x_i, θ),    θ ∈ M

Gradient, Hessian and, of losses of samples, the empirical Fisher information (1/N) Σ grad ℓ_i grad
ℓ_iᵀ come from automatic differentiation. If the losses are negative log-likelihoods (a plain cost:
that of all data), the Hessian is the observed Fisher information and gives standard errors; if not,
the sandwich of both does (M-estimation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.fisher.hessian import Hessian
from fisherfold.fisher.jacobian import EmpiricalFisher, Graph, record
from fisherfold.fisher.likelihoods import Gaussian
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds.base import (
    Manifold,
    Point,
    Tangent,
    leaves,
    positive_integer,
    reorder_like,
    require_manifold,
    tree_map,
    unflatten_like,
)
from fisherfold.problems.base import Problem, check_batch, check_data, check_theta
from fisherfold.problems.cache import LastPoint


class LossProblem(Problem):
    """A loss over a manifold, given as a torch function.

    The last evaluation is kept for its point: where ``loss`` closes over data that change, make a
    new problem.

    Args:
        manifold: where θ lives.
        loss: ``loss(theta)``, a number; with data ``loss(x, theta)``, the losses of a batch of
            samples, of shape (B,), of which the mean is taken here.
        x: the samples, a tensor of first dimension N, or several such as ``(inputs, targets)``,
            which ``loss`` gets as the same tuple; none for a plain cost.
        chunk_size: samples handled at once when their gradients are formed; all if not given.
    """

    fisher_kinds: ClassVar[tuple[str, ...]] = ("empirical", "observed")
    any_representative: ClassVar[bool] = True

    def __init__(
        self,
        manifold: Manifold,
        loss: Callable[..., Tensor],
        x: Tensor | Sequence[Tensor] | None = None,
        *,
        chunk_size: int | None = None,
    ) -> None:
        require_manifold(manifold)
        if not callable(loss):
            raise TypeError(
                f"loss must be a function of theta, or of samples and theta, got {loss!r}"
            )
        self.manifold = manifold
        self.function = loss
        self._single = isinstance(x, Tensor)
        self.inputs = () if x is None else (x,) if isinstance(x, Tensor) else tuple(x)
        if x is not None:
            check_data(
                **(
                    {"x": x}
                    if self._single
                    else {f"x[{i}]": part for i, part in enumerate(self.inputs)}
                )
            )
        self.n_samples = len(self.inputs[0]) if self.inputs else 1
        self.chunk_size = None if chunk_size is None else positive_integer(chunk_size, "chunk_size")
        self._last: LastPoint[tuple[Graph, tuple[Tensor, ...] | None]] = LastPoint()
        self._curved = (
            False  # whether a Hessian was asked for, and the graph of gradients is worth its memory
        )

    @override
    def loss(self, x: Point, batch: Tensor | None = None) -> Tensor:
        check_theta(self.manifold, x, self.inputs)
        if any(leaf.requires_grad for leaf in leaves(x)) or torch.is_inference_mode_enabled():
            return self._mean(x, batch)
        return self._evaluated(x, batch)[0][1].detach()

    @override
    def loss_and_gradient(self, x: Point, batch: Tensor | None = None) -> tuple[Tensor, Tangent]:
        check_theta(self.manifold, x, self.inputs)
        variables, value = graph = self._evaluated(x, batch)[0]
        if not value.requires_grad:
            raise ValueError(
                "loss must depend on theta through torch operations, but it has no gradient"
            )
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                value,
                leaves(variables),
                retain_graph=True,
                create_graph=self._curved,
                materialize_grads=True,
            )
        self._last.put(x, (graph, gradients if self._curved else None), batch)
        egrad = unflatten_like((gradient.detach() for gradient in gradients), variables)
        return value.detach(), self.manifold.riemannian_gradient(x, egrad)

    def _evaluated(self, x: Point, batch: Tensor | None) -> tuple[Graph, tuple[Tensor, ...] | None]:
        """The loss with its graph, for whoever asks for the gradient and the Hessian next."""
        if (kept := self._last.get(x, batch)) is not None:
            return kept
        self._last.clear()
        arranged_x = reorder_like(x, self.manifold.point_shape)
        return self._last.put(
            x, (record(lambda theta: self._mean(theta, batch), arranged_x), None), batch
        )

    @override
    def hessian(self, x: Point, batch: Tensor | None = None) -> Hessian:
        self._curved = True
        graph, gradients = self._evaluated(x, batch)
        return Hessian(
            self.manifold,
            x,
            lambda theta: self._mean(theta, batch),
            graph=graph,
            gradients=gradients,
        )

    @override
    def fisher(
        self, x: Point, batch: Tensor | None = None, *, kind: str = "empirical"
    ) -> FisherOperator:
        """The observed or the empirical Fisher information at ``x``.

        ``kind``: ``empirical``, the second moment of the gradients of the samples; ``observed``,
        the Hessian, from which ``Result.covariance`` takes standard errors. Raises ValueError if
        the kind is unknown, or empirical and the loss is a plain cost without samples.
        """
        check_theta(self.manifold, x, self.inputs)
        if kind not in self.fisher_kinds:
            raise ValueError(
                f"kind must be one of {list(self.fisher_kinds)}, got {kind!r}; NLLProblem has more"
            )
        if kind == "observed":
            return self.hessian(x, batch)
        if not self.inputs:
            raise ValueError(
                "a plain cost has no samples, and so no empirical Fisher information; use "
                "method='trust-region', 'lbfgs' or 'rcg'"
            )
        samples = self._samples(batch)

        def jacobian(part: slice) -> Point:
            def one(theta: Point, row: Any) -> Tensor:
                return self._losses(theta, tuple(column.unsqueeze(0) for column in row))

            rows = torch.func.vmap(torch.func.jacrev(one), (None, 0), chunk_size=self.chunk_size)
            return tree_map(Tensor.detach, rows(x, tuple(column[part] for column in samples)))

        return EmpiricalFisher(
            self.manifold,
            x,
            lambda theta: self._losses(theta, samples),
            jacobian,
            Gaussian(),
            y=None,
        )

    def _mean(self, theta: Point, batch: Tensor | None) -> Tensor:
        if self.inputs:
            return self._losses(theta, self._samples(batch)).mean()
        value = self.function(theta)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            raise ValueError(f"loss must return a single floating number, got {_form(value)}")
        return value.reshape(())

    def _losses(self, theta: Point, samples: tuple[Tensor, ...]) -> Tensor:
        losses = self.function(samples[0] if self._single else samples, theta)
        count = len(samples[0])
        if (
            not isinstance(losses, Tensor)
            or losses.shape != (count,)
            or not losses.is_floating_point()
        ):
            raise ValueError(
                f"loss must return one floating number per sample, shape ({count},), whose mean is "
                f"taken here, got {_form(losses)}"
            )
        return losses

    def _samples(self, batch: Tensor | None) -> tuple[Tensor, ...]:
        if batch is None:
            return self.inputs
        check_batch(batch, self.n_samples)
        return tuple(part[batch] for part in self.inputs)


def _form(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    hint = "; a loss is real: take its .real, or .abs().square()" if value.is_complex() else ""
    return f"{value.dtype} of shape {tuple(value.shape)}{hint}"
