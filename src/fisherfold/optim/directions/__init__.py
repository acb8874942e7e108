"""Directions: what becomes of the momentum of a weight before it is projected onto its tangent space.

A direction is a function of the momenta of many weights (of sharded ones the part that this process holds), of their
entries and of the damped inverses of those that have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fisherfold.optim.directions.natural import natural
from fisherfold.optim.directions.spectral import spectral

Direction = Callable[[list[Tensor], Sequence[Any], Sequence[Any]], list[Tensor]]


def gradient(
    momenta: list[Tensor], entries: Sequence[Any], inverses: Sequence[Any]
) -> list[Tensor]:
    """The momenta as they are."""
    return momenta


DIRECTIONS: dict[str, Direction] = {"spectral": spectral, "gradient": gradient, "natural": natural}
