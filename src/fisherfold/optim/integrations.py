"""Where optimizers are made by others: parameter groups for timm, a factory for the Trainer of Hugging Face.

Lightning and Accelerate take the optimizer as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fisherfold.optim.grouping import findings_of, groups_of, unwrap
from fisherfold.optim.optimizer import SphereOptimizer


def param_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    rest: str = "muon",
    rest_lr: float | None = None,
    weight_decay: float | None = None,
    invariant: str | Mapping[str, str | int] | None = None,
    example_input: Any = None,
) -> list[dict[str, Any]]:
    """Parameter groups that ``SphereOptimizer`` takes in place of a model, such as for timm's ``param_group_fn``.

    Args:
        model: the module.
        lr: the angle per step; that of the optimizer if not given.
        rest: as for ``SphereOptimizer``.
        rest_lr: as for ``SphereOptimizer``.
        weight_decay: of matrices that are not on spheres; that of the optimizer if not given.
        invariant: as for ``SphereOptimizer``.
        example_input: as for ``SphereOptimizer``.

    Returns:
        The groups, with the names of parameters.
    """
    model = unwrap(model)
    found = findings_of(model, invariant, example_input)
    groups = groups_of(model, found, lr=lr, rest=rest, rest_lr=rest_lr, weight_decay=weight_decay)
    return [{key: value for key, value in group.items() if value is not None} for group in groups]


class TrainerFactory:
    """Makes a ``SphereOptimizer`` of the model of a Hugging Face ``Trainer``.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        >>> options = {"lr": 0.02, "rest_lr": 1e-3}
        >>> trainer_options = {"optimizer_cls_and_kwargs": (TrainerFactory, options)}
        >>> len(TrainerFactory()(model, **options).param_groups)
        3
    """

    def __call__(self, model: nn.Module, **options: Any) -> SphereOptimizer:
        """Make the optimizer.

        Args:
            model: of the trainer.
            **options: as for ``SphereOptimizer``.

        Returns:
            The optimizer.
        """
        return SphereOptimizer(model, **options)


def register_with_timm(name: str = "sphere") -> None:
    """Make ``SphereOptimizer`` known to timm: ``create_optimizer_v2(model, "sphere", param_group_fn=param_groups)``.

    Args:
        name: under which timm knows it.
    """
    from timm.optim._optim_factory import OptimInfo, default_registry

    info = OptimInfo(
        name,
        SphereOptimizer,
        "angles along spectral directions on spheres",
        has_eps=False,
        has_momentum=True,
    )
    default_registry.register(info)
