"""The one collector of Kronecker factors.

Running sums over the terms of a loss and the rows of each.

For a layer s = W a whose inputs are a_r and whose gradients are g_r = ∂ℓ/∂s_r, where r runs over
the rows (positions) of all terms of a loss, and ℓ is the loss of the term that the row belongs to,

    A = (1/R) Σ_r (a_r - c)(a_r - c)ᵀ,        G = (1/D) Σ_r g_r g_rᵀ,        F ≈ A ⊗ G

with R rows and D terms (K-FAC expand). Arguments have the shape [terms, rows, length]. The centre c
is the mean of the inputs where the gradients sum to zero, as they do before a batch norm: there the
mean carries no gradient (∇W = Σ g aᵀ = Σ g (a - c)ᵀ); elsewhere, and where it is not asked for, it
is 0. The groups of a convolution share the mean of their input covariances, and G is block
diagonal.

A loss that is a mean over its D terms has gradients g/D. They come in over one or more passes,
whose D is known at the end, where ``close`` ends such a loss. So the factors of several batches are
the mean of those of each, by their terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Products narrower than this are not worth splitting.
MIN_BLOCK = 96
# ‖Σg‖ over what it would be if the g were independent.
SUMS_TO_ZERO = 0.1


@dataclass
class FactorSums:
    """Running sums of one weight's statistics; upper triangles only.

    Attributes:
        a: Σ a aᵀ.
        g: Σ g gᵀ of the losses that are closed.
        sum_a: Σ a.
        sum_g: Σ g of the losses that are closed.
        rows: R.
        terms: D of the losses that are closed.
        open_g: Σ g gᵀ of the loss that is not, with its gradients as they came.
        open_sum: its Σ g.
        groups: of the convolution.
    """

    a: Tensor
    g: Tensor
    sum_a: Tensor
    sum_g: Tensor
    rows: Tensor
    terms: Tensor
    open_g: Tensor
    open_sum: Tensor
    groups: int = 1

    @classmethod
    def empty(cls, weight: Tensor, groups: int = 1) -> FactorSums:
        """Zeros on the weight's device, in float32 or wider.

        The weight is [outputs, inputs, ...].
        """
        dtype = torch.promote_types(weight.dtype, torch.float32)
        m, n = len(weight), weight[0].numel()
        shapes = {"a": (n, n), "sum_a": (n,), "rows": (), "terms": ()}
        shapes |= dict.fromkeys(("g", "open_g"), (m, m)) | dict.fromkeys(
            ("sum_g", "open_sum"), (m,)
        )
        zeros: dict[str, Any] = {
            name: torch.zeros(shape, dtype=dtype, device=weight.device)
            for name, shape in shapes.items()
        }
        return cls(**zeros, groups=groups)

    def add(self, inputs: Tensor, gradients: Tensor, *, share: float = 1.0) -> None:
        """Add terms: inputs [terms, rows, n] and gradients [terms, rows, m].

        ``share``: what each input row counts for where some are left out.
        """
        inputs = inputs.flatten(0, -2).to(self.a.dtype)
        gradients = gradients.flatten(0, -2).to(self.g.dtype)
        _add_gram(self.a, inputs, share)
        self.sum_a.add_(inputs.sum(0), alpha=share)
        if self.groups == 1:
            _add_gram(self.open_g, gradients, 1.0)
        else:
            self.open_g.add_(_block_gram(gradients, self.groups))
        self.open_sum.add_(gradients.sum(0))
        self.rows.add_(len(inputs) * share)

    def close(self, terms: float, *, mean: bool) -> None:
        """End a loss of so many terms: a mean over them, or a sum."""
        scale = terms if mean else 1.0
        self.g.add_(self.open_g, alpha=scale**2)
        self.sum_g.add_(self.open_sum, alpha=scale)
        self.terms.add_(terms)
        self.open_g.zero_()
        self.open_sum.zero_()

    def tensors(self) -> list[Tensor]:
        """What has to be summed over processes, when no loss is open."""
        return [self.a, self.g, self.sum_a, self.sum_g, self.rows, self.terms]

    def finish(self, *, centre: bool = True) -> tuple[Tensor, Tensor]:
        """The factors A and G, in the memory of the sums."""
        for matrix in (self.a, self.g):
            matrix.copy_(matrix.triu() + matrix.triu(1).mT)
        rows = self.rows.clamp_min(1)
        if centre and self.groups == 1:
            centred = self.sum_g.square().sum() < SUMS_TO_ZERO**2 * torch.trace(self.g)
            product = self.sum_a[None, :] * (-centred.to(self.a.dtype) / rows)
            self.a.addmm_(self.sum_a[:, None], product)
        return self.a / rows, self.g / self.terms.clamp_min(1)


def _add_gram(total: Tensor, rows: Tensor, weight: float) -> None:
    """Add ``weight·rowsᵀ rows`` in the upper triangle of blocks only."""
    order = len(total)
    width = order if order < 4 * MIN_BLOCK else -(-order // 4)
    for start in range(0, order, width):
        stop = min(start + width, order)
        total[start:stop, start:].addmm_(rows[:, start:stop].mT, rows[:, start:], alpha=weight)


def _block_gram(rows: Tensor, groups: int) -> Tensor:
    """``rowsᵀ rows`` without the blocks between different groups of columns."""
    blocks = rows.reshape(len(rows), groups, rows.shape[1] // groups).permute(1, 2, 0)
    return torch.block_diag(*(blocks @ blocks.mT))  # type: ignore[no-untyped-call]
