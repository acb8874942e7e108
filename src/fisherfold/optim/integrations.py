"""Where optimizers are made by others.

Parameter groups for timm, a factory for the Trainer of Hugging Face.

Lightning and Accelerate take the optimizer as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fisherfold.optim.grouping import groups_of, treatments_of, unwrap
from fisherfold.optim.optimizer import SphereOptimizer

# The learning_rate of TrainingArguments where none is set.
HF_RATE = 5e-5


class Groups(list[dict[str, Any]]):
    """Parameter groups that know their model, whose data flow the optimizer looks at."""

    model: nn.Module


def param_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    rest_lr: float | None = None,
    weight_decay: float | None = None,
    layer_decay: float | None = None,
    overrides: Mapping[str, str | int] | None = None,
) -> Groups:
    """Parameter groups that ``SphereOptimizer`` takes in place of a model.

    Such as for timm's ``param_group_fn``.

    Args:
        model: the module.
        lr: the angle per step; that of the optimizer if not given.
        rest_lr: as for ``SphereOptimizer``.
        weight_decay: of matrices that are not on spheres; that of the optimizer if not given.
        layer_decay: the factor of both rates from each layer to the one before it, for a model of
            timm; it is the entry ``lr_scale`` of the groups, which the schedulers of timm read.
        overrides: as for ``SphereOptimizer``.

    Returns:
        The groups, with the names of parameters.
    """
    model = unwrap(model)
    scales = {} if layer_decay is None else _layer_scales(model, layer_decay)
    found = treatments_of(model, overrides or {})
    groups = groups_of(
        model,
        found,
        rates={"lr": lr, "rest_lr": rest_lr},
        rest="adamw",
        weight_decay=weight_decay,
        scales=scales,
    )
    kept = Groups({k: v for k, v in group.items() if v is not None} for group in groups)
    kept.model = model
    return kept


def _layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """The factor of every parameter, from the layers that timm knows."""
    from timm.models import group_parameters

    matcher: Any = model.group_matcher
    layers: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
    last = max(layers.values())
    return {name: decay ** (last - layer) for name, layer in layers.items()}


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

    @classmethod
    def of(cls, args: Any, **options: Any) -> tuple[type[TrainerFactory], dict[str, Any]]:
        """What ``Trainer(optimizer_cls_and_kwargs=...)`` takes, from its ``TrainingArguments``.

        Args:
            args: of the trainer: ``learning_rate`` is the angle; ``weight_decay``, ``adam_beta1``,
                ``adam_beta2`` and ``adam_epsilon`` are those of AdamW.
            **options: further ones of ``SphereOptimizer``.

        Returns:
            The factory and its options.

        Raises:
            ValueError: if ``learning_rate`` is that of AdamW by default, which is no angle.
        """
        if args.learning_rate == HF_RATE:
            raise ValueError(
                f"learning_rate is {HF_RATE}, the default for AdamW: set it to an angle in "
                f"radians, such as 0.02, or "
                "0.002 for fine-tuning"
            )
        own = {
            "lr": args.learning_rate,
            "weight_decay": args.weight_decay,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
        }
        return cls, own | options

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
    """Make ``SphereOptimizer`` known to timm.

    ``create_optimizer_v2(model, "sphere", param_group_fn=param_groups)``.

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
