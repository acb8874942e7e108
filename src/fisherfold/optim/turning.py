"""Gradients at weights whose rows are turned: at random, further along their last step, or towards growing loss.

While a gradient is computed, every row w of a weight is replaced by

    w̃ = cos θ · w + sin θ · ‖w‖ u,    u a unit vector orthogonal to w,

that is, it goes the angle θ along a geodesic of the sphere on which it lies. The step is taken from w.

With u uniform (``RowNoise``), what is minimised is the mean of the loss over such turns, which is small where the loss
is small all around: noise on weights in proportion to the length of a filter (Li et al., arXiv 2211.11489), without the
growth of that length, so that the running statistics of a batch norm behind the weight are those of weights of the same
length.

With u along the last step (``RowAhead``), the gradient is that of a point further on. At θ = μ times the last turn this
is Nesterov's momentum, to first order; at ten times as much, across a narrow valley, it is the wall on the other side
that the gradient sees, and training turns to wide ones: sharpness-aware minimisation without a second gradient (Becker,
Altrock and Risse, arXiv 2401.12033, with one length for all weights), here with the same angle for every row.

With u along a gradient that is there already (``RowAscent``), the second gradient is that of sharpness-aware
minimisation (Foret et al., arXiv 2010.01412) on a product of spheres: among all turns of the R rows whose angles have
root mean square θ, the one along which the loss L grows fastest has the angles

    θ_i = θ √R · s_i / ‖s‖,    s_i = ‖w_i‖ ‖P_i ∇_i L‖,    P_i = I - w_i w_iᵀ/‖w_i‖²,

s_i being the slope of L in the angle of row i. It does not depend on the lengths of rows on which L does not depend;
adaptive sharpness (Kwon et al., arXiv 2102.11600) rescales a ball in the space of weights for that, row by row, and
on rows of length one it is the same ball.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fisherfold.optim.blocks import Moved
from fisherfold.optim.factors import accumulation_dtype
from fisherfold.optim.fuse import fused
from fisherfold.optim.options import check_number


class _Turned(Moved):
    """Rows that are turned inside a block."""

    def __init__(self, params: Iterable[nn.Parameter], angle: float, *, fuse: bool = False) -> None:
        check_number("angle", angle, 0.0, math.pi / 2, below=True)
        super().__init__(params)
        self.angle, self.fuse = angle, fuse

    @staticmethod
    def _takes(p: Tensor) -> bool:
        return p.is_floating_point() and p.ndim > 1 and p.numel() > len(p)

    @abstractmethod
    def _directions(self, weight: Tensor, kept: Tensor) -> Tensor:
        """Towards which to turn a weight that was ``kept`` in the block before; their dtype computes."""

    def _angles(self) -> Sequence[float | Tensor]:
        """By how much to turn each weight, or each of its rows."""
        return [self.angle] * len(self._weights)

    def _least(self, weight: Tensor) -> float:
        """What share of its length a row must be led sideways to be turned."""
        return 0.0

    def _move(self) -> None:
        turn = fused(turn_rows) if self.fuse else turn_rows
        for index, (weight, angle) in enumerate(zip(self._weights, self._angles(), strict=True)):
            directions = self._directions(weight, self._copy_of(index))
            turn(weight, self._keep(index), directions, angle, self._least(weight))


class RowNoise(_Turned):
    """Turn the rows of weights by an angle in random directions, and back on leaving the block.

    It works with any optimizer, whose step is taken after the block: what is written to the weights inside is undone,
    which is an error. Memory is allocated once, so that a step with it can be captured in a CUDA graph.

    Args:
        params: parameters; those with fewer than two dimensions, with rows of one entry, or not of real floating-point
            numbers are left alone.
        angle: θ in radians, below π/2.
        fuse: compile the turning of a weight with ``torch.compile``.

    Raises:
        TypeError: if there is anything but parameters.
        ValueError: if the angle is none of those.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(8, 3)
        >>> noise, opt = RowNoise(net.parameters(), 0.1), torch.optim.SGD(net.parameters(), lr=0.1)
        >>> before = net.weight.detach().clone()
        >>> with noise:
        ...     net(torch.randn(4, 8)).square().mean().backward()
        >>> torch.equal(net.weight, before)
        True
        >>> opt.step()
    """

    def _directions(self, weight: Tensor, kept: Tensor) -> Tensor:
        return torch.randn_like(kept, dtype=accumulation_dtype(kept))


class RowAhead(_Turned):
    """Turn the rows of weights by an angle further along their last step, and back on leaving the block.

    The last step is the way from where the block before began to where this one does, so that it works with any
    optimizer; rows that have not turned since, by more than rounding, stay, and so do all in the first block.
    Micro-batches whose gradients add up to one step therefore belong into one block. As with ``RowNoise``, steps are
    taken after the block, and memory is allocated once.

    Args:
        params: as for ``RowNoise``.
        angle: θ in radians, below π/2.
        fuse: as for ``RowNoise``, whose errors are raised.

    Example:
        >>> import torch
        >>> net, x = torch.nn.Linear(8, 3), torch.randn(4, 8)
        >>> ahead, opt = RowAhead(net.parameters(), 0.1), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        >>> for _ in range(3):
        ...     opt.zero_grad()
        ...     with ahead:
        ...         net(x).square().mean().backward()
        ...     opt.step()
    """

    def _directions(self, weight: Tensor, kept: Tensor) -> Tensor:
        dtype = accumulation_dtype(weight)
        return weight.to(dtype) - kept.to(dtype)

    def _least(self, weight: Tensor) -> float:
        # a row that weight decay has only made shorter leaves rounding errors orthogonal to it
        return torch.finfo(weight.dtype).eps

    @torch.no_grad()
    def forget(self) -> None:
        """Let the next block be a first one, as after weights have been loaded."""
        for index, weight in enumerate(self._weights):
            self._copy_of(index).copy_(weight)


class RowAscent(_Turned):
    """Turn the rows of weights along their gradients, to where the loss is larger, and back on leaving the block.

    Sharpness-aware minimisation on spheres: after a gradient, a second one is computed inside the block, of the same
    batch, and the step after the block takes that one. Rows turn by different angles, in proportion to their slopes,
    with the given root mean square. It works with any optimizer. Parameters without gradients stay, and all do where
    the gradients are zero or not finite. A step with it can be captured in a CUDA graph.

    Args:
        params: as for ``RowNoise``.
        angle: the root mean square of the rows' angles, in radians, below π/2; no row is turned by more than π/2.
        fuse: as for ``RowNoise``, whose errors are raised.

    Example:
        >>> import torch
        >>> net, x = torch.nn.Linear(8, 3), torch.randn(4, 8)
        >>> ascent, opt = RowAscent(net.parameters(), 0.01), torch.optim.SGD(net.parameters(), lr=0.1)
        >>> for _ in range(3):
        ...     net(x).square().mean().backward()
        ...     with ascent:
        ...         opt.zero_grad()
        ...         net(x).square().mean().backward()
        ...     opt.step()
        ...     opt.zero_grad()
    """

    def _directions(self, weight: Tensor, kept: Tensor) -> Tensor:
        if weight.grad is None:
            return torch.zeros_like(kept, dtype=accumulation_dtype(kept))
        return weight.grad.to_dense().to(accumulation_dtype(kept))

    def _angles(self) -> Sequence[float | Tensor]:
        slope = fused(slopes_into) if self.fuse else slopes_into
        found = []
        for weight in self._weights:
            length = (len(weight), *(1 for _ in weight.shape[1:]))
            slopes = weight.new_zeros(length, dtype=accumulation_dtype(weight))
            if weight.grad is not None:
                slope(slopes, weight.detach(), self._directions(weight, weight))
            found.append(slopes)
        here = [slopes for weight, slopes in zip(self._weights, found, strict=True) if weight.grad is not None]
        if not here:
            return [0.0] * len(found)
        total = torch.linalg.vector_norm(torch.cat([slopes.flatten().to(here[0]) for slopes in here]))
        scale = self.angle * math.sqrt(sum(map(len, here))) / total
        scale = torch.where(scale.isfinite(), scale, 0.0)
        return [(slopes.nan_to_num(0.0) * scale.to(slopes)).clamp_max(math.pi / 2) for slopes in found]


def slopes_into(slopes: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """The derivatives of a loss in the angles of rows, along the steepest turns.

    Args:
        slopes: filled with ‖w‖ ‖P_w g‖, one per row, and with 0 where P_w g is what rounding leaves of a g along w.
        weight: with rows w along the first dimension.
        gradient: with rows g; its dtype is that of the computation.
    """
    _, length, size = _sideways(weight.to(gradient.dtype), gradient)
    whole = torch.linalg.vector_norm(gradient, dim=tuple(range(1, gradient.ndim)), keepdim=True)
    # at most twice the precision is seen; asked this way round, what is not a number stays
    rounding = length <= 4 * torch.finfo(weight.dtype).eps * whole
    slopes.copy_(torch.where(rounding, 0.0, size * length))


def _sideways(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of rows u orthogonal to rows w, their lengths, and those of w."""
    dims = tuple(range(1, w.ndim))
    squared = (w * w).sum(dims, keepdim=True)
    inner = (u * w).sum(dims, keepdim=True)
    t = torch.addcmul(u, inner / squared.clamp_min(torch.finfo(w.dtype).tiny), w, value=-1)
    return t, torch.linalg.vector_norm(t, dim=dims, keepdim=True), squared.sqrt()


def turn_rows(weight: Tensor, kept: Tensor, directions: Tensor, angle: float | Tensor, least: float) -> None:
    """Replace a weight by its turned copy, in place.

    Args:
        weight: with rows along the first dimension.
        kept: its copy.
        directions: towards which to turn; their dtype is that of the computation.
        angle: in radians, for all rows or one for each, as for ``turned``.
        least: as for ``turned``.
    """
    weight.copy_(turned(kept.to(directions.dtype), directions, angle, least))


def turned(w: Tensor, u: Tensor, angle: float | Tensor, least: float = 0.0) -> Tensor:
    """Turn every row by an angle towards a direction.

    Args:
        w: rows along the first dimension; those of zero stay.
        u: directions of the same shape, whose parts along w do not matter; rows with none stay.
        angle: in radians, for all rows or one for each, with as many dimensions as w.
        least: rows whose direction has no more than this share of ‖w‖ orthogonal to w stay too.

    Returns:
        cos θ · w + sin θ · ‖w‖ t/‖t‖ with t the part of u orthogonal to w.
    """
    t, length, size = _sideways(w, u)
    cos, sin = (angle.cos(), angle.sin()) if isinstance(angle, Tensor) else (math.cos(angle), math.sin(angle))
    moved = (cos * w).addcmul_(sin * size / length.clamp_min(torch.finfo(w.dtype).tiny), t)
    return torch.where(length > least * size, moved, w)
