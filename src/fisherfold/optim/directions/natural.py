"""Natural directions: λ(F + λI)⁻¹ times the momentum, with the Kronecker-factored Fisher information of each weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fisherfold.optim.curvature.inverse import Preconditioner


def natural(
    momenta: list[Tensor], entries: Sequence[Any], inverses: Sequence[Preconditioner | None]
) -> list[Tensor]:
    """Apply the inverse of each weight that has one."""
    return [
        m if inverse is None else inverse.apply(m.reshape(len(m), -1)).reshape(m.shape)
        for m, inverse in zip(momenta, inverses, strict=True)
    ]
