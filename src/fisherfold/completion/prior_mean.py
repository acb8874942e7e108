"""The prior mean of a member: what the mere set of its ratings tells about it.

    m_i = c + n_i^{-1/2} Σ_{j ∈ Ω_i} x_j,     x_j ~ N(0, (γK)⁻¹)

The effects x_j minimise Σ_i ‖ū_i - m_i‖²_K + γ Σ_j ‖x_j‖²_K, a ridge problem in which K cancels. A few conjugate
gradient steps after each update of the ū_i suffice, because each goes on from the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.kernels import plain_sum

# γ, chosen on a validation part of MovieLens-1M; raising the bound over it instead is slower and no more accurate.
SET_STRENGTH = 3.0


@dataclass(frozen=True)
class SetEffects:
    """What the set of rated entries tells: the effects x_j and what is needed to apply them.

    Attributes:
        effects: x_j, one row for each member of the other side.
        sums: Σ_{j ∈ Ω_i} x_j for every member i of this side.
        shares: d_j = Σ_{i ∈ Ω^j} 1/n_i.
    """

    effects: Tensor
    sums: Tensor
    shares: Tensor

    @classmethod
    def of(cls, effects: Tensor, counts: Tensor, own: Grouped, other: Grouped) -> SetEffects:
        """Effects x_j with what is needed to apply them.

        Args:
            effects: x_j.
            counts: n_i.
            own: the ratings grouped by the members whose prior mean they shift.
            other: the ratings grouped by the members of the other side.

        Returns:
            The effects, their sums over each rated set, and the shares.
        """
        root = _inverse_root(counts)
        return cls(effects, plain_sum(own, effects.contiguous()), plain_sum(other, root * root)[:, 0])

    def shift(self, counts: Tensor) -> Tensor:
        """The term n_i^{-1/2} Σ_j x_j of the prior mean of each member."""
        return self.sums * _inverse_root(counts)

    def copied(self) -> SetEffects:
        """The same effects with tensors of their own."""
        return SetEffects(self.effects.clone(), self.sums.clone(), self.shares.clone())

    def improved(self, off: Tensor, counts: Tensor, own: Grouped, other: Grouped, *, steps: int = 2) -> SetEffects:
        """Improve the effects by conjugate gradients.

        Args:
            off: ū_i - m_i of each member with the effects so far.
            counts: n_i.
            own: the ratings grouped by the members of this side.
            other: the ratings grouped by the members of the other side.
            steps: the number of conjugate gradient steps.

        Returns:
            Better effects.
        """
        root, x, sums = _inverse_root(counts), self.effects, self.sums
        tiny = torch.finfo(x.dtype).tiny
        scale = 1 / (self.shares[:, None] + SET_STRENGTH)
        residual = plain_sum(other, off * root) - SET_STRENGTH * x
        direction = scale * residual
        progress = own.total((residual * direction).sum(0))
        for _ in range(steps):
            image_sums = plain_sum(own, direction.contiguous())
            image = plain_sum(other, image_sums * (root * root)) + SET_STRENGTH * direction
            step = progress / own.total((direction * image).sum(0)).clamp(min=tiny)
            x, sums = x + step * direction, sums + step * image_sums
            residual = residual - step * image
            fresh = scale * residual
            new_progress = own.total((residual * fresh).sum(0))
            direction = fresh + new_progress / progress.clamp(min=tiny) * direction
            progress = new_progress
        return SetEffects(x, sums, self.shares)


def _inverse_root(counts: Tensor) -> Tensor:
    return counts.clamp(min=1).rsqrt()[:, None]
