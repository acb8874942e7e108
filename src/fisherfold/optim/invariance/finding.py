"""What is known about the scale invariance of a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["row", "group", "tensor", "none"]


@dataclass(frozen=True)
class Finding:
    """What is known about one parameter.

    Attributes:
        kind: ``row``, ``group``, ``tensor`` or ``none``.
        spheres: the number of blocks of rows that are invariant each on its own; 0 for ``none``.
        reason: one sentence.
        statistic: the largest |cos(w, ∂f/∂w)|·√dim over draws and blocks; NaN if not measured.
        rescaling: the relative change of the outputs when blocks are rescaled, at the model's own
            values and with the true ε of its normalisation layers; NaN if not measured.
    """

    kind: Kind
    spheres: int
    reason: str
    statistic: float = float("nan")
    rescaling: float = float("nan")


def kind_of(rows: int, spheres: int) -> Kind:
    """The kind of a partition of rows into blocks."""
    return (
        "none"
        if not spheres
        else "row"
        if spheres == rows
        else "tensor"
        if spheres == 1
        else "group"
    )
