"""Gradients at gains and biases that are scaled, each by a factor of its own, to where the loss is larger.

A row of length one and the gain γ of the batch norm behind it are a filter γw in polar coordinates: ``RowAscent`` turns
it, and here it is made longer or shorter. Every entry p of a parameter with one dimension is replaced by

    p̃ = p e^r,

and among all changes r of the N entries whose root mean square is ρ, the one along which the loss L grows fastest is

    r_j = ρ √N · s_j / ‖s‖,    s_j = p_j ∂L/∂p_j,

s_j being the slope of L in log p_j. Turns and changes have balls of their own: a row has as many slopes as entries, its
gain has one, so that in a common ball next to nothing would be left for gains. That these are what matters most is a
finding of Müller, Vlaar, Rolnick and Hein (arXiv 2306.04226), who have ascents of normalisation layers alone, in the
ball of adaptive sharpness (Kwon et al., arXiv 2102.11600), which is this one for small r.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fisherfold.optim.blocks import Moved
from fisherfold.optim.factors import accumulation_dtype
from fisherfold.optim.options import check_number

LARGEST = 1.0


class ScaleAscent(Moved):
    """Scale gains and biases along their gradients, to where the loss is larger, and back on leaving the block.

    Sharpness-aware minimisation of what stands behind the rows that ``RowAscent`` turns, in the same way: a second
    gradient is computed inside the block, and the step after the block takes it. Both may be used at once, or this one
    alone. Entries of zero stay, as do parameters without gradients, and all do where the gradients are zero or not
    finite. A step with it can be captured in a CUDA graph.

    Args:
        params: parameters; those with another number of dimensions than one, or not of real floating-point numbers, are
            left alone.
        change: the root mean square of the logarithms of the factors, below 1; no factor is above e or below
            1/e.

    Raises:
        TypeError: if there is anything but parameters.
        ValueError: if the change is none of those.

    Example:
        >>> import torch
        >>> from fisherfold.optim import RowAscent
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3))
        >>> x, opt = torch.randn(4, 8), torch.optim.SGD(net.parameters(), lr=0.1)
        >>> rows, scales = RowAscent(net.parameters(), 0.003), ScaleAscent(net.parameters(), 0.03)
        >>> for _ in range(3):
        ...     net(x).square().mean().backward()
        ...     with rows, scales:
        ...         opt.zero_grad()
        ...         net(x).square().mean().backward()
        ...     opt.step()
        ...     opt.zero_grad()
    """

    def __init__(self, params: Iterable[nn.Parameter], change: float) -> None:
        check_number("change", change, 0.0, LARGEST, below=True)
        super().__init__(params)
        self.change = change

    @staticmethod
    def _takes(p: Tensor) -> bool:
        return p.is_floating_point() and p.ndim == 1

    def _move(self) -> None:
        for index in range(len(self._weights)):
            self._keep(index)
        led = [(p, p.grad.to_dense()) for p in self._weights if p.grad is not None and len(p)]
        if not led:
            return
        first = led[0][0].device
        entries = torch.cat([p.to(first, accumulation_dtype(p)) for p, _ in led])
        gradient = torch.cat([g.to(first, accumulation_dtype(p)) for p, g in led])
        moved = entries * changes_uphill(entries, gradient, self.change).exp()
        for (p, _), values in zip(led, torch.split(moved, [len(p) for p, _ in led]), strict=True):
            p.copy_(values)


def changes_uphill(entries: Tensor, gradient: Tensor, change: float) -> Tensor:
    """The changes of logarithms, of a given root mean square, along which a loss grows fastest.

    Args:
        entries: p.
        gradient: ∂L/∂p.
        change: ρ.

    Returns:
        r, cut at ±1; zero where nothing leads uphill, or what does is not finite.
    """
    # slopes of any unit of the loss have a norm
    largest = gradient.abs().amax().clamp_min(torch.finfo(gradient.dtype).tiny)
    slopes = entries * (gradient / largest)
    scale = change * math.sqrt(len(entries)) / torch.linalg.vector_norm(slopes)
    changes = slopes * torch.where(scale.isfinite(), scale, 0.0)
    return changes.nan_to_num(0.0).clamp(-LARGEST, LARGEST)
