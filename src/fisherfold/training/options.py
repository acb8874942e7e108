"""All that decides how a network is trained, and how it is written down.

A schedule multiplies a rate by its decay at 30, 60 and 90 percent of the epochs (``"step"``, the paper's), or takes it
along half a cosine to zero or to a given share of its start (``"cosine"``). Curvature is renewed at the start and at
the same three points, or every so many epochs, with a damping that has its own decay at these points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

MILESTONES = (0.3, 0.6, 0.9)
BELOW_ONE = {
    "momentum", "beta2", "dropout", "smoothing", "teaching", "noise", "ahead", "ascent", "ascent_scales", "ascent_start"
}  # fmt: skip
OPTIMIZERS = ("sgd", "sgdp", "adam", "adamp", "kfac", "mkfac", "sgdg")


@dataclass(frozen=True)
class Settings:
    """All that decides how a network is trained, apart from data, seed and device.

    Attributes:
        preset: the name they go by.
        optimizer: sgd, sgdp, adam, adamp, kfac, mkfac or sgdg.
        lr: the step size η, of Euclidean parameters where some are on spheres.
        lr_decay: its factor at the milestones.
        lr_end: the share of ``lr`` at which a cosine ends.
        manifold_lr: the step size η_g on spheres, or the angle per step where ``balanced``.
        manifold_decay: its factor at the milestones.
        manifold_end: the share of ``manifold_lr`` at which a cosine ends.
        manifold_power: the exponent of the cosine for ``manifold_lr``; ½ is how rows turn under weight decay, whose
            angle per step goes with the root of the rate.
        schedule: ``"step"`` or ``"cosine"``.
        weight_decay: of Euclidean parameters.
        dropout: of the network's activations.
        smoothing: the share of every target that is spread over all classes, in training.
        mixup: α of the Beta(α, α) in whose ratio pairs of images and their losses are mixed, one draw per batch; 0 for
            none.
        cutmix: the probability with which a batch has a patch of its images, and its part of their losses, replaced by
            those of other images; 0 for none.
        mixed_until: the share of the epochs from which on images are no longer mixed; 1 to mix them to the end.
        teaching: the share of the loss, at the end of training, that is the divergence from what the network of the
            averaged weights answers to the same images; it grows from none in proportion to the epochs.
        temperature: what the logits of both networks are divided by there.
        noise: the angle in radians by which rows are turned at random while a gradient is computed.
        ahead: the angle in radians by which rows are turned further along their last step meanwhile.
        ascent: the root mean square of the angles, in radians, by which rows are turned towards growing loss for a
            second gradient, which the step takes; 0 to leave them.
        ascent_scales: the root mean square of the logarithms of the factors by which gains and biases are scaled
            towards growing loss for it; 0 to leave them. Where both are left there is one gradient.
        ascent_start: the share of the epochs before which there is one gradient all the same.
        ascent_parts: into how many parts of equal size a batch is split then, each with an ascent and batch norms of
            its own.
        average: over how many epochs the weights of the network that is judged are averaged, exponentially; 0 for the
            network itself.
        momentum: μ, or β₁ of Adam.
        beta2: of Adam.
        damping: λ of the first refresh.
        damping_decay: its factor at the later ones.
        euclidean: ``"sgd"`` or ``"kfac"``, for the matrices that are on no sphere beside some that are.
        balanced: the same turning for every row on a sphere.
        max_angle: the largest angle by which a row may turn in a step; 0 for any.
        clip: the length to which the direction of a row on a sphere is cut before it joins the momentum; 0 for any.
        orthogonality: ω of the penalty on correlations between rows on spheres.
        basis_tolerance: the accepted error of directions on truncated bases of eigenvectors.
        fisher: how the factors are collected.
        refresh_batches: over how many batches.
        refresh_every: epochs between refreshes; 0 for the start and the milestones.
        epochs: in all.
        batch: images per step.
    """

    preset: str
    optimizer: str
    lr: float
    lr_decay: float = 0.1
    lr_end: float = 0.0
    manifold_lr: float = 0.0
    manifold_decay: float = 0.2
    manifold_end: float = 0.0
    manifold_power: float = 1.0
    schedule: str = "step"
    weight_decay: float = 5e-4
    dropout: float = 0.0
    smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mixed_until: float = 1.0
    teaching: float = 0.0
    temperature: float = 1.0
    noise: float = 0.0
    ahead: float = 0.0
    ascent: float = 0.0
    ascent_scales: float = 0.0
    ascent_start: float = 0.0
    ascent_parts: int = 1
    average: int = 0
    momentum: float = 0.9
    beta2: float = 0.999
    damping: float = 1.0
    damping_decay: float = 1.0
    euclidean: str = "sgd"
    balanced: bool = False
    max_angle: float = 0.0
    clip: float = 0.0
    orthogonality: float = 0.0
    basis_tolerance: float = 0.05
    fisher: str = "mc"
    refresh_batches: int = 50
    refresh_every: int = 0
    epochs: int = 100
    batch: int = 128

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.schedule not in {"step", "cosine"}:
            raise ValueError(f"schedule must be 'step' or 'cosine', got {self.schedule!r}")
        if self.euclidean not in {"sgd", "kfac"}:
            raise ValueError(f"euclidean must be 'sgd' or 'kfac', got {self.euclidean!r}")
        for field in fields(self):
            _check(field.name, str(field.type), value := getattr(self, field.name))
            if str(field.type) == "float":  # 1 and 1.0 are one setting, and runs have the names of their settings
                object.__setattr__(self, field.name, float(value))
        if self.curved and not self.damping_at(self.epochs) > 0:
            damping = f"got damping={self.damping:g} and damping_decay={self.damping_decay:g}"
            raise ValueError(f"the damping of {self.optimizer} must be above 0 at every refresh, {damping}")
        if sum(map(bool, (self.noise, self.ahead, self.ascent or self.ascent_scales))) > 1:
            raise ValueError(
                "weights are moved at random (noise), further on (ahead) or up (ascent, ascent_scales), not two of them"
            )
        if self.mixup and self.cutmix:
            raise ValueError("images are mixed by weight (mixup) or by patches (cutmix), not both")
        for name in ("cutmix", "mixed_until"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be at most 1, got {getattr(self, name)!r}")
        if self.teaching and not self.average:
            raise ValueError("teaching needs averaged weights, got average=0")
        if self.teaching and not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature!r}")
        if self.batch % self.ascent_parts:
            raise ValueError(f"ascent_parts must divide batch={self.batch}, got {self.ascent_parts}")

    @property
    def curved(self) -> bool:
        """Whether the optimizer uses curvature."""
        return self.optimizer in {"kfac", "mkfac"}

    def stage(self, epoch: int) -> int:
        """How many milestones are behind.

        Args:
            epoch: counted from 0.

        Returns:
            0 to 3; none is before the first epoch, not even of a run of one.
        """
        return sum(epoch >= max(1, round(share * self.epochs)) for share in MILESTONES)

    def refreshes_at(self, epoch: int) -> bool:
        """Whether the curvature is renewed before an epoch.

        Args:
            epoch: counted from 0.

        Returns:
            True at the start and at the milestones or every so many epochs, where there is curvature.
        """
        if self.refresh_every:
            return self.curved and epoch % self.refresh_every == 0
        return self.curved and (epoch == 0 or self.stage(epoch) != self.stage(epoch - 1))

    def rates(self, epoch: int) -> tuple[float, float]:
        """The two step sizes of an epoch.

        Args:
            epoch: counted from 0.

        Returns:
            η and η_g.
        """
        if self.schedule == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * epoch / self.epochs))
            length = self.lr_end + (1 - self.lr_end) * factor
            turning = self.manifold_end + (1 - self.manifold_end) * factor**self.manifold_power
            return self.lr * length, self.manifold_lr * turning
        stage = self.stage(epoch)
        return self.lr * self.lr_decay**stage, self.manifold_lr * self.manifold_decay**stage

    def ascends_at(self, epoch: int) -> bool:
        """Whether steps of an epoch take a second gradient, of weights moved towards growing loss.

        Args:
            epoch: counted from 0.

        Returns:
            True from ``ascent_start`` on, where there is an ascent.
        """
        return (self.ascent or self.ascent_scales) > 0 and epoch >= round(self.ascent_start * self.epochs)

    def mixes_at(self, epoch: int) -> bool:
        """Whether images of an epoch may be mixed.

        Args:
            epoch: counted from 0.

        Returns:
            True before ``mixed_until``, where there is mixing.
        """
        return (self.mixup or self.cutmix) > 0 and epoch < round(self.mixed_until * self.epochs)

    def teaching_at(self, epoch: int) -> float:
        """The share of the averaged network's answers in the loss of an epoch.

        Args:
            epoch: counted from 0.

        Returns:
            From 0 on, below ``teaching``.
        """
        return self.teaching * epoch / self.epochs

    def damping_at(self, epoch: int) -> float:
        """λ of a refresh before an epoch.

        Args:
            epoch: counted from 0.

        Returns:
            The damping.
        """
        return self.damping * self.damping_decay ** self.stage(epoch)

    def as_json(self) -> dict[str, Any]:
        """The settings as plain values.

        Returns:
            A dictionary.
        """
        return asdict(self)


def _check(name: str, kind: str, value: Any) -> None:
    """Refuse a setting that no run could use."""
    whole, number = isinstance(value, int) and not isinstance(value, bool), isinstance(value, int | float)
    least = 0 if name in {"refresh_every", "average"} else 1
    if kind == "int" and not (whole and value >= least):
        raise ValueError(f"{name} must be at least {least} and whole, got {value!r}")
    if (kind == "bool" and not isinstance(value, bool)) or (kind == "str" and not isinstance(value, str)):
        raise ValueError(f"{name} must be of type {kind}, got {value!r}")
    if kind == "float" and not (number and not isinstance(value, bool) and math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number, at least 0, got {value!r}")
    if name in BELOW_ONE and value >= 1:
        raise ValueError(f"{name} must be below 1, got {value!r}")


def with_defaults(named: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a log or a checkpoint, with those that are newer than it: they had their defaults.

    Args:
        named: settings by name.

    Returns:
        What is named, and the defaults of the other fields of ``Settings``.
    """
    return {**{field.name: field.default for field in fields(Settings) if field.default is not MISSING}, **named}


def parse_setting(text: str) -> tuple[str, Any]:
    """A setting as it is typed.

    Args:
        text: NAME=VALUE.

    Returns:
        The name of a field of ``Settings`` and a value of its type.

    Raises:
        ValueError: if there is no such field, or the value is not of its type.

    Example:
        >>> parse_setting("refresh_every=5"), parse_setting("balanced=true")
        (('refresh_every', 5), ('balanced', True))
    """
    name, _, value = text.partition("=")
    kind = kind_of_setting(name)
    reads: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": _truth}
    try:
        return name, reads[kind](value)
    except ValueError:
        raise ValueError(f"{name} must be of type {kind}, got {value!r}") from None


def kind_of_setting(name: str) -> str:
    """The type of a setting that may be replaced.

    Args:
        name: a field of ``Settings``.

    Returns:
        int, float, str or bool.

    Raises:
        ValueError: if there is no such setting.
    """
    kinds = {field.name: str(field.type) for field in fields(Settings) if field.name not in {"preset", "optimizer"}}
    if name not in kinds:
        raise ValueError(f"{name!r} is no setting; there are {', '.join(sorted(kinds))}")
    return kinds[name]


def _truth(word: str) -> bool:
    if word.lower() not in {"true", "false"}:
        raise ValueError(word)
    return word.lower() == "true"
