"""The paper's Kronecker factors of parameters that a model applies as linear layers, found by watching the model run.

    s = W a,    ∇_W ψ = g aᵀ,    F ≈ E[a aᵀ] ⊗ E[g gᵀ],    g = ∂ψ/∂s at targets drawn from the model

with a the inputs of the layer and s its outputs; where a layer is applied at several places of a sample (a sequence),
a is averaged and g summed over them (K-FAC expand). Blocks between parameters are left out. A vector, such as a bias,
keeps the second moment of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fisherfold.fisher.collector import FactorSums
from fisherfold.fisher.jacobian import score
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.likelihoods import Likelihood
from fisherfold.fisher.operators import DenseFisher, FisherOperator
from fisherfold.fisher.solve import solve
from fisherfold.manifolds import Product
from fisherfold.manifolds.base import Manifold, Point, Tangent, tree_map

_TRANSPOSES = (torch.Tensor.T.__get__, torch.Tensor.mT.__get__, torch.Tensor.t, torch.t)  # type: ignore[attr-defined]
_PRODUCTS = (torch.Tensor.matmul, torch.matmul, torch.Tensor.mm, torch.mm, torch.Tensor.__matmul__)


class BlockFisher(FisherOperator):
    """One operator per factor of a product manifold; what couples the factors is left out.

    Args:
        manifold: the product manifold.
        point: a point of it.
        blocks: the operator of every factor.
    """

    approximates = "F by its diagonal blocks, one per factor of the product"

    manifold: Product

    def __init__(self, manifold: Product, point: Point, blocks: dict[str, FisherOperator]) -> None:
        super().__init__(manifold, point)
        self.blocks = {name: blocks[name] for name in manifold.factors}

    @property
    @override
    def is_structured(self) -> bool:
        return True

    @override
    def _matvec(self, v: Tangent) -> Tangent:
        return {name: block._matvec(v[name]) for name, block in self.blocks.items()}

    @override
    def variance_reduced(
        self, anchor_batch: FisherOperator, batch: FisherOperator, samples: Tensor, weight: float
    ) -> FisherOperator:
        if not (isinstance(anchor_batch, BlockFisher) and isinstance(batch, BlockFisher)):
            return super().variance_reduced(anchor_batch, batch, samples, weight)
        blocks = {
            name: block.variance_reduced(
                anchor_batch.blocks[name], batch.blocks[name], samples, weight
            )
            for name, block in self.blocks.items()
        }
        return BlockFisher(self.manifold, batch.point, blocks)

    @override
    def structured_solve(self, g: Tangent, damping: float) -> Tangent:
        return {name: solve(block, g[name], damping).x for name, block in self.blocks.items()}


def layer_fisher(
    manifold: Manifold,
    point: Point,
    outputs: Callable[[Point], Tensor],
    likelihood: Likelihood,
    *,
    targets: Callable[[Tensor], list[Tensor]],
    weights: Tensor | None = None,
) -> FisherOperator:
    """E[a aᵀ] ⊗ E[g gᵀ] for a matrix, or for every matrix of a dictionary of parameters.

    ``targets``: those drawn for outputs, a tensor for each draw.
    """
    variables = tree_map(lambda leaf: leaf.detach().requires_grad_(), point)
    watch = _Watch({"": variables} if isinstance(variables, Tensor) else variables)
    with torch.enable_grad(), watch:
        z = outputs(variables)
    root = (
        torch.ones(len(z), dtype=z.dtype, device=z.device)
        if weights is None
        else weights.sqrt().to(z.dtype)
    )
    sensitivities: dict[str, list[Tensor]] = {name: [] for name in watch.names}
    fixed = z.detach()
    for drawn in targets(fixed):
        seed = (score(likelihood, fixed, drawn) * root[:, None]).reshape(z.shape)
        wanted = [watch.calls[name][1] for name in watch.names]
        for name, g in zip(
            watch.names, torch.autograd.grad(z, wanted, seed, retain_graph=True), strict=True
        ):
            sensitivities[name].append(g)
    blocks = {
        name: _block(manifold, point, watch, name, torch.stack(sensitivities[name]))
        for name in watch.names
    }
    return (
        blocks[""] if isinstance(point, Tensor) else BlockFisher(_product(manifold), point, blocks)
    )


def _product(manifold: Manifold) -> Product:
    if not isinstance(manifold, Product):
        raise ValueError(
            f"layer factors of several parameters need a Product manifold, got {manifold!r}"
        )
    return manifold


def _block(manifold: Manifold, point: Point, watch: _Watch, name: str, g: Tensor) -> FisherOperator:
    """The operator of one parameter from the inputs and sensitivities of its layer, g of shape (draws, N, ...)."""
    place = point[name] if name else point
    factor = _product(manifold).factors[name] if name else manifold
    a, _, transposed = watch.calls[name]
    samples = g.shape[0] * g.shape[1]
    if a is None:  # a bias: its gradient is the sum over places
        gradients = g.reshape(samples, -1, g.shape[-1]).sum(1)
        return DenseFisher(factor, place, gradients.mT @ gradients / samples)
    sums = FactorSums.empty(g.new_empty(g.shape[-1], a.shape[-1]))
    sums.add(a.detach(), g)
    sums.close(samples, mean=False)
    inputs, outputs = sums.finish(centre=False)
    sides = (outputs, inputs)
    left, right = sides if transposed else sides[::-1]
    return KroneckerFisher(factor, place, left=left, right=right)


class _Watch(TorchFunctionMode):
    """What every parameter is multiplied with while the model runs: (inputs, outputs, whether as in ``linear``)."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        for name, leaf in parameters.items():
            if not isinstance(leaf, Tensor) or leaf.ndim not in (1, 2):
                seen = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ValueError(
                    f"kind='layers' takes matrices and vectors, got {name or 'theta'} of shape {seen}"
                )
        self.parameters = parameters
        self.calls: dict[str, tuple[Tensor | None, Tensor, bool]] = {}
        self.places = {id(leaf): (name, False) for name, leaf in parameters.items()}
        self.alive: list[Tensor] = []

    @property
    def names(self) -> list[str]:
        """The parameters; raises if one of them is not applied as a layer."""
        if missing := [name or "theta" for name in self.parameters if name not in self.calls]:
            raise ValueError(
                f"kind='layers' needs parameters that are applied as a linear layer, {missing} are not"
            )
        return list(self.parameters)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is functional.linear:
            a, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
            self._seen(weight, a, out, is_linear=True)
            self._seen(bias, None, out)
            return out
        second = args[1] if len(args) > 1 else None
        if func in _TRANSPOSES and id(args[0]) in self.places:
            name, turned = self.places[id(args[0])]
            self.places[id(out)] = (name, not turned)
            self.alive.append(out)
        elif (
            func in _PRODUCTS
            and isinstance(second, Tensor)
            and id(second) in self.places
            and second.ndim == 2
        ):
            self._seen(second, args[0], out)
        elif func in (torch.Tensor.add, torch.Tensor.__add__, torch.add):
            for part in args[:2]:
                if isinstance(part, Tensor) and part.ndim == 1:
                    self._seen(part, None, out)
        elif isinstance(out, Tensor) and any(id(part) in self.places for part in args):
            name = next(self.places[id(part)][0] for part in args if id(part) in self.places)
            raise ValueError(
                f"kind='layers' needs {name or 'theta'} to be applied as a linear layer (x @ theta, or "
                f"torch.nn.functional.linear), but the model calls {getattr(func, '__name__', func)} on it; use "
                "kind='kronecker'"
            )
        return out

    def _seen(self, weight: Any, a: Tensor | None, out: Tensor, *, is_linear: bool = False) -> None:
        if id(weight) not in self.places:
            return
        name, turned = self.places[id(weight)]
        if name in self.calls:
            raise ValueError(
                f"kind='layers' needs each parameter in one layer, {name or 'theta'} is in several"
            )
        self.calls[name] = (a, out, is_linear != turned)
