"""The curvature of a model's weights: factors averaged over time, and the damped inverses made from them.

Factors are averaged as  A ← β A + (1-β) A_new,  z ← β z + (1-β),  and used as A/z: an exponential mean without the bias
of its start. A factor that is not finite, or whose factorisation fails, leaves the last inverse in place and is
counted; after ``MAX_FAILURES`` in a row it is an error with the weight's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fisherfold.optim import distributed
from fisherfold.optim.factors import FactorSums, TrackedWeight, accumulation_dtype
from fisherfold.optim.precondition import Preconditioner, exact, factored, products
from fisherfold.optim.spectral import FactorError
from fisherfold.warn import warn

MAX_FAILURES = 3


@dataclass
class LayerCurvature:
    """What is known about the curvature of one weight.

    Attributes:
        tracked: the weight and its modules.
        a: the running mean of A before bias correction.
        g: the running mean of G before bias correction.
        mass: z, the sum of the weights in the running mean.
        inverse: the damped inverse in use.
        failures: how many updates in a row could not be used.
        lengths: of the rows when the last factors were taken, for a weight on spheres; the factors are those at 1.
    """

    tracked: TrackedWeight
    a: Tensor | None = None
    g: Tensor | None = None
    mass: float = 0.0
    inverse: Preconditioner | None = None
    failures: int = 0
    lengths: Tensor | None = None

    def update(self, a: Tensor, g: Tensor, decay: float) -> None:
        """Fold new factors into the running means.

        Args:
            a: the new A, which is taken over.
            g: the new G, which is taken over.
            decay: β; 0 forgets the past.
        """
        if decay == 0:
            self.a, self.g, self.mass = a, g, 1.0
        elif self.a is None or self.g is None:
            self.a, self.g, self.mass = a.mul_(1 - decay), g.mul_(1 - decay), 1 - decay
        else:
            self.a = self.a.to(a.dtype).mul_(decay).add_(a, alpha=1 - decay)
            self.g = self.g.to(g.dtype).mul_(decay).add_(g, alpha=1 - decay)
            self.mass = decay * self.mass + (1 - decay)

    def measure(self, lengths: Tensor | None) -> None:
        """Note the lengths of rows with which factors were taken.

        Args:
            lengths: one per row of a weight on spheres.
        """
        if self.lengths is None or lengths is None:
            self.lengths = lengths
        else:
            self.lengths.copy_(lengths)  # captured graphs read this tensor

    def direction(self, gradient: Tensor) -> Tensor:
        """The preconditioned gradient.

        Args:
            gradient: a matrix.

        Returns:
            A matrix of its dtype, which is not that of the inverse where the model has been cast since; the gradient
            itself before the first inverse.
        """
        if self.inverse is None:
            return gradient
        return self.inverse.apply(gradient.to(self.inverse.left.dtype)).to(gradient.dtype)

    def bytes(self) -> int:
        """The memory of factors and inverse.

        Returns:
            A number of bytes.
        """
        inverse = () if self.inverse is None else self.inverse.tensors().values()
        return sum(t.numel() * t.element_size() for t in (self.a, self.g, *inverse) if t is not None)


@dataclass(frozen=True)
class CurvatureOptions:
    """How inverses are made.

    Attributes:
        damping_mode: ``"exact"`` or ``"factored"``.
        basis: ``"auto"``, ``"full"`` or the fraction of A's eigenvectors to keep.
        tolerance: the accepted relative error of a truncated basis.
        static: keep the memory of inverses in place for captured graphs.
        allow_tf32: whether CUDA may use TF32 in the products.
        keep_factors: keep the factors after an inversion (for running means), or free them.
    """

    damping_mode: str
    basis: str | float
    tolerance: float
    static: bool
    allow_tf32: bool
    keep_factors: bool


class Curvature:
    """Factors and inverses of all tracked weights of a model."""

    layers: dict[str, LayerCurvature]

    def __init__(self, options: CurvatureOptions, process_group: Any = None) -> None:
        self.options = options
        self.process_group = process_group
        self.calls: dict[str, int] = {}
        self.__setstate__({"layers": {}})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a copied or loaded state; weights are found by their ``id``, which is new there."""
        vars(self).update(state)
        self.by_weight = {id(layer.tracked.weight): layer for layer in self.layers.values()}

    def follow(self, weights: Sequence[TrackedWeight]) -> None:
        """Take up further weights, of which nothing is known yet.

        Args:
            weights: with names that are new.
        """
        self.__setstate__({"layers": self.layers | {tracked.name: LayerCurvature(tracked) for tracked in weights}})

    @property
    def weights(self) -> list[TrackedWeight]:
        """The tracked weights."""
        return [layer.tracked for layer in self.layers.values()]

    @property
    def live(self) -> list[TrackedWeight]:
        """Those that are not frozen."""
        return [tracked for tracked in self.weights if tracked.weight.requires_grad]

    def fold(
        self, sums: dict[str, FactorSums], decay: float, *, lengths: Mapping[str, Tensor], forgive: bool = False
    ) -> set[str]:
        """Reduce new statistics over processes and fold them into the factors.

        Factors that are not finite are left out and counted; too many in a row are a ``FactorError``.

        Args:
            sums: the statistics by weight name.
            decay: β of the running mean.
            lengths: of rows of weights on spheres, now.
            forgive: do not count factors that are not finite (an overflow under loss scaling is no failure).

        Returns:
            The names of the weights whose factors are new.
        """
        joint = distributed.reduce_sums(sums, self.weights, self.process_group)
        renewed = set()
        for name, layer in self.layers.items():
            # an expert that no sample was sent to has been called, and nothing is known of it
            if name not in joint or not joint[name].rows:
                continue
            a, g = joint.pop(name).finish()
            if bool(torch.isfinite(a).all()) and bool(torch.isfinite(g).all()):
                layer.update(a, g, decay)
                layer.measure(lengths.get(name))
                renewed.add(name)
            elif not forgive:
                self._count_failure(layer, "its factors are not finite")
        return renewed

    def _count_failure(self, layer: LayerCurvature, why: str) -> None:
        layer.failures += 1
        if layer.failures >= MAX_FAILURES:
            raise FactorError(f"{layer.tracked.name}: {why}, {layer.failures} times in a row")

    def invert(self, dampings: Mapping[str, float]) -> None:
        """Make new inverses from the factors.

        A failure leaves the last inverse in place and is counted; too many in a row are a ``FactorError``.

        Args:
            dampings: λ by weight name; weights not named keep their inverse.
        """
        ready = {name: layer for name, layer in self.layers.items() if name in dampings and layer.a is not None}
        costs = {name: float(sum(size**3 for size in layer.tracked.sizes)) for name, layer in ready.items()}
        owner = distributed.share_out(costs, distributed.world_size(self.process_group))
        here = distributed.rank(self.process_group)
        mine = {name: self._inverse(ready[name], dampings[name]) for name in ready if owner[name] == here}
        like = {name: layer.a for name, layer in ready.items() if layer.a is not None}
        for name, result in distributed.exchange(mine, owner, like, self.process_group).items():
            layer = ready[name]
            if not self.options.keep_factors:
                layer.a = layer.g = None
            if isinstance(result, str):
                self._count_failure(layer, result)
                continue
            layer.failures = 0
            self._install(layer, result)

    def _inverse(self, layer: LayerCurvature, damping: float) -> Preconditioner | str:
        if layer.a is None or layer.g is None:
            return "it has no factors"
        name = layer.tracked.name
        a, g = (t if layer.mass == 1 else t / layer.mass for t in (layer.a, layer.g))
        if layer.tracked.bias is not None and not layer.tracked.bias.requires_grad:
            # frozen since it joined: it makes up for no step of its weight
            a = a.clone()
            a[-1], a[:, -1] = 0.0, 0.0
        options = self.options
        ratio = float(options.basis) if not isinstance(options.basis, str) else None
        tolerance = None if options.basis == "full" else options.tolerance
        try:
            with torch.no_grad(), products(a.device, allow_tf32=options.allow_tf32):
                if options.damping_mode == "factored":
                    return factored(a, g, damping, name=name)
                return exact(a, g, damping, rank=ratio, tolerance=tolerance, start=layer.inverse, name=name)
        except FactorError as error:
            return str(error)

    def _install(self, layer: LayerCurvature, new: Preconditioner) -> None:
        """Put a new inverse in place; with ``static``, into the memory of the first one."""
        if not self.options.static:
            layer.inverse = new
        elif layer.inverse is None:
            layer.inverse = new.with_headroom() if self.options.basis == "auto" else new
        elif layer.inverse.fits(new):
            layer.inverse.write(new)
        else:
            warn(
                f"the inverse of {layer.tracked.name} outgrew its memory ({_shapes(layer.inverse)} to {_shapes(new)}): "
                "graphs captured before this refresh use the old one; capture again, or fix the size with basis=1/16",
            )
            layer.inverse = new

    def direction(self, weight: nn.Parameter, gradient: Tensor) -> Tensor:
        """(A ⊗ G + λI)⁻¹ ∇W as a matrix; the gradient itself before the first refresh.

        Args:
            weight: on spheres.
            gradient: its gradient at unit length, a matrix.

        Returns:
            One row per row of the weight.
        """
        layer = self.by_weight.get(id(weight))
        return gradient if layer is None else layer.direction(gradient)


def gradient_matrix(weight: nn.Parameter) -> Tensor:
    """The gradient of a weight as a matrix in the dtype of its curvature.

    Args:
        weight: with a gradient.

    Returns:
        One row per row of the weight.
    """
    assert weight.grad is not None
    return weight.grad.reshape(len(weight), -1).to(accumulation_dtype(weight))


def _shapes(inverse: Preconditioner) -> str:
    return " and ".join(str(tuple(t.shape)) for t in (inverse.left, inverse.right))
