"""The two halves of MKFAC on their own: curvature without the manifold, and the manifold without curvature.

``KFAC`` preconditions every Linear and convolution in Euclidean space, (A ⊗ G + λI)⁻¹ ∇W with the bias as last column;
``SGDG`` is Riemannian SGD with momentum on the same spheres as MKFAC, its limit for λ → ∞ with η_g/λ held fixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from typing_extensions import override

from fisherfold.optim.mkfac import MKFAC


class KFAC(MKFAC):
    """Euclidean K-FAC with momentum: MKFAC without the manifold, and without its options for rows on spheres.

    Args:
        model: a module, or parameter groups.
        lr: the step size.
        momentum: μ.
        weight_decay: added to the preconditioned gradient.
        damping: λ; a group entry, used at the next refresh after it changes.
        damping_mode: as for ``MKFAC``.
        basis: as for ``MKFAC``.
        basis_tolerance: as for ``MKFAC``.
        fisher: as for ``MKFAC``.
        reduction: as for ``MKFAC``.
        factor_decay: as for ``MKFAC``.
        max_rows: as for ``MKFAC``.
        capturable: as for ``MKFAC``.
        allow_tf32: as for ``MKFAC``.
        model_of_groups: the module that owns the parameters, where groups are given; without it there is no curvature.
        process_group: as for ``MKFAC``.
        seed: of Monte-Carlo targets.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> x, y = torch.randn(32, 4), torch.randint(2, (32,))
        >>> opt = KFAC(net, lr=0.1, damping=0.1)
        >>> opt.refresh([(x, y)], nn.CrossEntropyLoss())
        >>> sorted(opt.curvature.layers)
        ['0.weight', '2.weight']
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        lr: float = 0.05,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 1.0,
        damping_mode: str = "exact",
        basis: str | float = "auto",
        basis_tolerance: float = 0.05,
        fisher: str = "empirical",
        reduction: str = "mean",
        factor_decay: float = 0.95,
        max_rows: int | None = 2048,
        capturable: bool = False,
        allow_tf32: bool = True,
        model_of_groups: nn.Module | None = None,
        process_group: Any = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            model,
            lr,
            invariant="none",
            euclidean="kfac",
            momentum=momentum,
            weight_decay=weight_decay,
            damping=damping,
            damping_mode=damping_mode,
            basis=basis,
            basis_tolerance=basis_tolerance,
            fisher=fisher,
            reduction=reduction,
            factor_decay=factor_decay,
            max_rows=max_rows,
            capturable=capturable,
            allow_tf32=allow_tf32,
            model_of_groups=model_of_groups,
            process_group=process_group,
            seed=seed,
        )

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Args:
            param_group: as for any optimizer.

        Raises:
            ValueError: if it is on a manifold.
        """
        if (manifold := param_group.get("manifold", "none")) != "none":
            raise ValueError(f"KFAC keeps all parameters in Euclidean space, got manifold={manifold!r}; use MKFAC")
        super().add_param_group(param_group)


class SGDG(MKFAC):
    """Riemannian SGD with momentum on the spheres of scale-invariant weights: MKFAC without curvature.

    Args:
        model: a module, or parameter groups with a ``"manifold"`` entry.
        lr: the step size of Euclidean parameters.
        manifold_lr: the step size of scale-invariant weights.
        momentum: μ.
        weight_decay: for Euclidean parameters only.
        invariant: as for ``MKFAC``.
        example_input: as for ``MKFAC``.
        retraction: ``"exp"`` or ``"normalize"``.
        max_angle: the largest angle by which a row may turn in one step.
        clip: as for ``MKFAC``.
        orthogonality: as for ``MKFAC``.
        balanced: as for ``MKFAC``.
        capturable: no host synchronisation in ``step``.
        fuse: compile the update of a weight.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        >>> x, y = torch.randn(32, 4), torch.randint(2, (32,))
        >>> opt = SGDG(net, lr=0.1, manifold_lr=0.2, example_input=x)
        >>> nn.functional.cross_entropy(net(x), y).backward()
        >>> opt.step()
        >>> bool((net[0].weight.norm(dim=1) - 1).abs().max() < 1e-6)
        True
    """

    uses_curvature = False

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        lr: float = 0.05,
        manifold_lr: float = 0.25,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        invariant: str | Mapping[str, str | int] | None = None,
        example_input: Any = None,
        retraction: str = "exp",
        max_angle: float | None = None,
        clip: float | None = None,
        orthogonality: float = 0.0,
        balanced: bool = False,
        capturable: bool = False,
        fuse: bool = False,
    ) -> None:
        super().__init__(
            model,
            lr,
            manifold_lr,
            momentum=momentum,
            weight_decay=weight_decay,
            invariant=invariant,
            example_input=example_input,
            retraction=retraction,
            max_angle=max_angle,
            clip=clip,
            orthogonality=orthogonality,
            balanced=balanced,
            capturable=capturable,
            fuse=fuse,
        )
