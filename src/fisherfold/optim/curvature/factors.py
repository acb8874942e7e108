"""The two Kronecker factors of a layer's Fisher block, from its inputs and output gradients.

For a layer s = W a with input rows a_r and gradients δ_r = ∂L/∂s_r (r runs over R samples and positions), and a loss L
that is a mean over D terms,

    A = (1/D) Σ_r (a_r - c)(a_r - c)ᵀ,        G = (1/R) Σ_r (D δ_r)(D δ_r)ᵀ,        F ≈ A ⊗ G,

so that tr(A) tr(G) has the scale of the trace of the Fisher block. For a loss that is a sum, D δ_r is δ_r. The centre
c is the mean of the inputs where the gradients sum to zero, as they do before a batch norm: there the mean carries no
gradient (∇W = Σ δ aᵀ = Σ δ (a - c)ᵀ); elsewhere it is 0. The groups of a convolution share the mean of their input
covariances, and G is block diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fisherfold.optim.curvature.layers import input_rows, output_rows

MIN_BLOCK = 96  # products narrower than this are not worth splitting
SUMS_TO_ZERO = 0.1  # ‖Σδ‖ over what it would be if the δ were independent


@dataclass
class FactorSums:
    """Running sums of one weight's statistics; upper triangles only.

    Attributes:
        a: Σ a aᵀ.
        g: Σ δ δᵀ.
        sum_a: Σ a.
        sum_g: Σ δ.
        rows: R.
        groups: of the convolution.
    """

    a: Tensor
    g: Tensor
    sum_a: Tensor
    sum_g: Tensor
    rows: Tensor
    groups: int = 1

    @classmethod
    def empty(cls, weight: Tensor, groups: int) -> FactorSums:
        """Zeros on the weight's device, in float32 or wider."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        rows, columns = len(weight), weight[0].numel()
        a, g, sum_a, sum_g, count = (
            torch.zeros(size, dtype=dtype, device=weight.device)
            for size in ((columns, columns), (rows, rows), (columns,), (rows,), ())
        )
        return cls(a, g, sum_a, sum_g, count, groups)

    def add(
        self, layer: nn.Module, x: Tensor, gradient: Tensor, *, max_rows: int | None, phase: int
    ) -> None:
        """Add one use of the layer: its input and the gradient with respect to its output."""
        inputs, share = input_rows(layer, x, max_rows=max_rows, phase=phase)
        inputs = inputs.to(self.a.dtype)
        gradients = output_rows(layer, gradient).to(self.g.dtype)
        _add_gram(self.a, inputs, share)
        self.sum_a.add_(inputs.sum(0), alpha=share)
        if self.groups == 1:
            _add_gram(self.g, gradients, 1.0)
        else:
            self.g.add_(_block_gram(gradients, self.groups))
        self.sum_g.add_(gradients.sum(0))
        self.rows.add_(len(gradients))

    def tensors(self) -> list[Tensor]:
        """What has to be summed over processes."""
        return [self.a, self.g, self.sum_a, self.sum_g, self.rows]

    def finish(self, terms: float, *, mean: bool) -> tuple[Tensor, Tensor]:
        """The factors A and G, in the memory of the sums."""
        for matrix in (self.a, self.g):
            matrix.copy_(matrix.triu() + matrix.triu(1).mT)
        if self.groups == 1:
            centred = self.sum_g.square().sum() < SUMS_TO_ZERO**2 * torch.trace(self.g)
            self.a.addmm_(
                self.sum_a[:, None], self.sum_a[None, :] * (-centred.to(self.a.dtype) / self.rows)
            )
        return self.a / terms, self.g * ((terms if mean else 1.0) ** 2 / self.rows.clamp_min(1))


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
