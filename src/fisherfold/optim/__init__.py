"""Optimizers for networks, in the form of ``torch.optim``."""

from fisherfold.optim.integrations import TrainerFactory, param_groups, register_with_timm
from fisherfold.optim.invariance import Finding, find_scale_invariant
from fisherfold.optim.optimizer import SphereOptimizer
from fisherfold.optim.presets import KFAC, MKFAC, SGDG

__all__ = [
    "KFAC",
    "MKFAC",
    "SGDG",
    "Finding",
    "SphereOptimizer",
    "TrainerFactory",
    "find_scale_invariant",
    "param_groups",
    "register_with_timm",
]
