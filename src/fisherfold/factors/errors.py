r"""The covariance of rotated, standardised loadings and factor correlations.

The parameters are v = (Λ, Φ, log σ, μ) with Σ = D (Λ Φ Λᵀ + I - diag(Λ Φ Λᵀ)) D, D = diag(σ):
loadings of variables of variance 1. The equations of the rotation, h(v) = 0 with Jacobian H,
identify them (Jennrich 1973, 1974): with a basis Z of the null space of H and the information B of
a row,

    C = Z (Zᵀ B Z)⁻¹ Zᵀ / n,    and the sandwich    C M C n

with the second moment M of the scores.

Any function f of v has the covariance J C Jᵀ. A variable whose unique variance is at its bound (a
Heywood case) adds the equation that its communality stays there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fisherfold.factors.moments import Moments
from fisherfold.factors.rotation import constraints, is_oblique

KINDS = ("expected", "observed", "robust")


@dataclass(frozen=True)
class Layout:
    """Where the parameters of a rotated model lie in a vector.

    Attributes:
        p: the number of variables.
        k: the number of factors.
        rotation: the criterion that identifies them, or None.
        kaiser: whether it is of rows of length 1.
    """

    p: int
    k: int
    rotation: str | None
    kaiser: bool

    def pack(self, loadings: Tensor, correlations: Tensor, sigma: Tensor, mean: Tensor) -> Tensor:
        """The vector of parameters."""
        rows, columns = torch.tril_indices(self.k, self.k, -1).unbind()
        free = correlations[rows, columns] if is_oblique(self.rotation) else mean[:0]
        return torch.cat([loadings.reshape(-1), free, sigma.log(), mean])

    def unpack(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loadings, factor correlations, standard deviations and means."""
        loadings = v[: self.p * self.k].reshape(self.p, self.k)
        eye = torch.eye(self.k, dtype=v.dtype)
        free = v[self.p * self.k : len(v) - 2 * self.p]
        if not len(free):
            return loadings, eye, v[-2 * self.p : -self.p].exp(), v[-self.p :]
        rows, columns = torch.tril_indices(self.k, self.k, -1).unbind()
        lower = torch.zeros_like(eye).index_put((rows, columns), free)
        return loadings, eye + lower + lower.mT, v[-2 * self.p : -self.p].exp(), v[-self.p :]

    def covariance(self, v: Tensor) -> Tensor:
        """Σ."""
        loadings, correlations, sigma, _ = self.unpack(v)
        common = loadings @ correlations @ loadings.mT
        off = 1 - torch.eye(self.p, dtype=v.dtype)
        return sigma[:, None] * (common * off + torch.eye(self.p, dtype=v.dtype)) * sigma

    def constraints(self, v: Tensor, fixed: Tensor) -> Tensor:
        """The equations of the rotation, and the communalities that are at their bound."""
        loadings, correlations, _, _ = self.unpack(v)
        at_bound = (loadings @ correlations * loadings).sum(dim=1)[fixed]
        if self.k == 1:
            return at_bound
        turned = constraints(loadings, correlations, self.rotation, self.kaiser)
        return torch.cat([turned, at_bound])


@dataclass(frozen=True)
class Uncertainty:
    """The covariance of the parameters of a rotated model.

    Attributes:
        layout: of the parameters.
        values: the estimates.
        matrix: their covariance, singular along the equations that identify them.
    """

    layout: Layout
    values: Tensor
    matrix: Tensor

    def of(self, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """A function of the vector of parameters, and its covariance."""
        value = f(self.values)
        slopes = torch.func.jacrev(f)(self.values).reshape(value.numel(), -1)
        return value, slopes @ self.matrix @ slopes.mT

    def standard_errors(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """The standard errors of the entries of a function."""
        value, covariance = self.of(f)
        return covariance.diagonal().clamp(min=0).sqrt().reshape(value.shape)


def uncertainty(
    layout: Layout, values: Tensor, moments: Moments, *, kind: str, fixed: Tensor
) -> Uncertainty:
    """The covariance of the parameters at a maximum of the likelihood.

    ``kind``: ``expected``, ``observed`` or ``robust`` (the sandwich with the Hessian). ``fixed``:
    the variables whose unique variance is at its bound.
    """
    p = layout.p
    slopes = _slopes(layout.covariance, values)
    means = torch.cat([values.new_zeros(len(values) - p, p), torch.eye(p, dtype=values.dtype)])
    covariance, mean = layout.covariance(values), layout.unpack(values)[3]
    if kind == "expected":
        information = moments.information(covariance, means, slopes)
    else:

        def loss(v: Tensor) -> Tensor:
            return moments.loss(layout.unpack(v)[3], layout.covariance(v))

        information = _hessian(loss, values)
    jacobian = torch.func.jacrev(lambda v: layout.constraints(v, fixed))(values)
    basis = _null_space(jacobian)
    inside = basis.mT @ information @ basis
    inverse = basis @ torch.linalg.solve(0.5 * (inside + inside.mT), basis.mT)
    if kind == "robust":
        blocks = moments.scores(mean, covariance, means, slopes)
        meat = torch.stack([block.mT @ block for block in blocks]).sum(dim=0) / moments.n
        inverse = inverse @ meat @ inverse
    return Uncertainty(layout, values, inverse / moments.n)


def _slopes(f: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """The derivatives of a matrix in the entries of a vector, by two backward passes."""
    v = v.detach().requires_grad_()
    value = f(v)
    weights = torch.zeros_like(value, requires_grad=True)
    (pulled,) = torch.autograd.grad(value, v, weights, create_graph=True)
    eye = torch.eye(len(v), dtype=v.dtype)
    return torch.autograd.grad(pulled, weights, eye, is_grads_batched=True)[0]


def _hessian(f: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    v = v.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(f(v), v, create_graph=True)
    eye = torch.eye(len(v), dtype=v.dtype)
    return torch.autograd.grad(gradient, v, eye, is_grads_batched=True)[0]


def _null_space(jacobian: Tensor) -> Tensor:
    if not len(jacobian):
        return torch.eye(jacobian.shape[1], dtype=jacobian.dtype)
    q, _ = torch.linalg.qr(jacobian.mT, mode="complete")
    return q[:, len(jacobian) :]
