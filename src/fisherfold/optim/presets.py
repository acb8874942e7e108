"""The paper's optimizers as presets: MKFAC, its limit SGD-G, and Euclidean K-FAC.

Steps on spheres are as long as the direction says (θ = η ‖D‖ per row), and damping is absolute.
Directions are normalised, λ(F + λI)⁻¹∇W: the step (F + λI)⁻¹∇W of the paper with rate η_g is
``manifold_lr = η_g/λ`` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fisherfold.optim.grouping import Treatment, check_number, choice, probed
from fisherfold.optim.optimizer import SphereOptimizer
from fisherfold.warn import warn


class _Preset(SphereOptimizer):
    """A step whose length is that of the direction, with SGD for the rest."""

    _by_angle = False
    _nesterov = False
    _relative = False
    _finds_roles = False

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        invariant: str | Mapping[str, str | int] | None,
        example_input: Any,
        **options: Any,
    ) -> None:
        self._asked = (invariant, example_input)
        super().__init__(model, lr, **options)
        del self._asked

    def _treatments(self, flow: Any = None) -> dict[str, Treatment]:
        assert self.model is not None
        found = probed(self.model, *self._asked)
        self._reasons = {name: treatment.reason for name, treatment in found.items()}
        if self._asked[0] != "none" and not any(t.spheres for t in found.values()):
            warn(
                f"no weight of {type(self.model).__name__} was found to be scale invariant, as "
                f"weights in front of "
                "normalisation layers are: nothing is on spheres; pass invariant='none' if that "
                "is meant"
            )
        return found


class MKFAC(_Preset):
    r"""Kronecker-factored natural gradients on the spheres of scale-invariant weights.

    As in the paper.

    With the factors A and G of the Fisher block of a weight W, a step is

        B ← μB + ∇W,      W ← exp_W(-η_g P_W λ(A ⊗ G + λI)⁻¹ B),

    and SGD with momentum for all other parameters. Curvature collects itself every ``every`` steps;
    ``refresh`` is the paper's schedule (with ``every=0``).

    Args:
        model: a module, wrapped by DDP or ``torch.compile`` or not.
        lr: the rate of other parameters.
        manifold_lr: η_g, the rate on spheres, of the normalised direction.
        momentum: μ, for both.
        weight_decay: of matrices that are not on spheres.
        damping: λ; a group entry, used when inverses are renewed.
        rest: ``"sgd"`` or ``"kfac"`` for matrices that are not on spheres.
        every: steps between collections of curvature; 0 leaves it to ``refresh``.
        reduction: ``"mean"`` or ``"sum"``: how the loss is reduced over its terms.
        grad_scaler: the ``torch.amp.GradScaler`` that scales the losses, if one does: absolute
            damping needs gradients of the loss itself. Clipping is of no consequence.
        invariant: a mapping from names of parameters to ``"row"``, ``"tensor"``, ``"none"`` or a
            number of spheres, which overrides the probe; or ``"none"``.
        example_input: a batch for the probe: a tensor, a tuple of arguments or a mapping of keyword
            arguments.
        process_group: whose ranks share curvature; the default group if there is one.

    Raises:
        ValueError: if an option is out of range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        >>> x, y = torch.randn(64, 8), torch.randint(3, (64,))
        >>> opt = MKFAC(net, damping=0.1, example_input=x)
        >>> for _ in range(50):
        ...     opt.zero_grad()
        ...     loss = nn.functional.cross_entropy(net(x), y)
        ...     loss.backward()
        ...     _ = opt.step()
        >>> loss.item() < 0.9
        True
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.05,
        manifold_lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 0.1,
        rest: str = "sgd",
        every: int = 10,
        reduction: str = "mean",
        grad_scaler: Any = None,
        invariant: str | Mapping[str, str | int] | None = None,
        example_input: Any = None,
        process_group: Any = None,
    ) -> None:
        choice("rest", rest, ("sgd", "kfac"))
        choice("reduction", reduction, ("mean", "sum"))
        check_number("manifold_lr", manifold_lr, above=0.0)
        self._mean = reduction == "mean"
        super().__init__(
            model,
            manifold_lr,
            invariant,
            example_input,
            direction="natural",
            rest=rest,
            rest_lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            damping=damping,
            every=every,
            process_group=process_group,
        )
        self.curvature.scaler = grad_scaler


class KFAC(_Preset):
    """Euclidean K-FAC for all matrix layers, SGD for vectors.

    The direction λ(A ⊗ G + λI)⁻¹∇W with momentum.

    Args:
        model: a module, wrapped by DDP or ``torch.compile`` or not.
        lr: the rate.
        momentum: μ.
        weight_decay: of matrices.
        damping: λ.
        every: steps between collections of curvature; 0 leaves it to ``refresh``.
        reduction: ``"mean"`` or ``"sum"``.
        grad_scaler: as for ``MKFAC``.
        process_group: whose ranks share curvature; the default group if there is one.

    Raises:
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.05,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 0.1,
        every: int = 10,
        reduction: str = "mean",
        grad_scaler: Any = None,
        process_group: Any = None,
    ) -> None:
        choice("reduction", reduction, ("mean", "sum"))
        self._mean = reduction == "mean"
        super().__init__(
            model,
            lr,
            "none",
            None,
            direction="natural",
            rest="kfac",
            rest_lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            damping=damping,
            every=every,
            process_group=process_group,
        )
        self.curvature.scaler = grad_scaler


class SGDG(_Preset):
    """Riemannian SGD with momentum on the spheres of scale-invariant weights: MKFAC for λ → ∞.

    Args:
        model: a module, wrapped by DDP or ``torch.compile`` or not.
        lr: the rate of other parameters.
        manifold_lr: η_g, the rate on spheres.
        momentum: μ, for both.
        weight_decay: of matrices that are not on spheres.
        invariant: a mapping from names of parameters to ``"row"``, ``"tensor"``, ``"none"`` or a
            number of spheres, which overrides the probe; or ``"none"``.
        example_input: a batch for the probe: a tensor, a tuple of arguments or a mapping of keyword
            arguments.

    Raises:
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.05,
        manifold_lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        invariant: str | Mapping[str, str | int] | None = None,
        example_input: Any = None,
    ) -> None:
        check_number("manifold_lr", manifold_lr, above=0.0)
        super().__init__(
            model,
            manifold_lr,
            invariant,
            example_input,
            direction="gradient",
            rest="sgd",
            rest_lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            every=0,
        )
