"""Geometry of weights on spheres: rows, blocks of rows, or a whole tensor, of any norm.

A block w with norm r moves on the sphere of radius r. With ŵ = w/r, a direction d and its tangent part u = d - <d,ŵ>ŵ,

    w ← w - r ( (1 - cos θ) ŵ + sin θ u/‖u‖ ),      θ = lr  or  θ = lr ‖u‖.

A scale-invariant weight only has a direction, so its norm is kept as it is: nothing is rescaled when training starts,
and running statistics of batch norms stay right. The gradient at unit norm is r times the gradient at w.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fisherfold.optim.distributed import local, part, shares_rows, whole

MAX_ANGLE = 0.5


def norms(blocks: Tensor) -> Tensor:
    """The norms of what each entry of the first axis holds, ready to be broadcast."""
    return torch.linalg.vector_norm(blocks, dim=tuple(range(1, blocks.ndim)), keepdim=True)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The inner products of what each entry of the first axis holds, ready to be broadcast."""
    return (a * b).sum(tuple(range(1, a.ndim)), keepdim=True)


def tangent(w: Tensor, d: Tensor) -> Tensor:
    """Project directions onto the tangent spaces of the spheres on which the blocks of ``w`` lie."""
    return d - (inner(d, w) / inner(w, w).clamp_min(torch.finfo(w.dtype).tiny)) * w


def rotate(w: Tensor, d: Tensor, lr: float, *, by_angle: bool) -> Tensor:
    """Rotate blocks against directions along great circles: the formula, as a reference for ``rotate_all_``."""
    d = tangent(w, d)
    length = norms(d)
    angle = (lr * (length > 0) if by_angle else lr * length).clamp(max=MAX_ANGLE)
    along = norms(w) * torch.sin(angle) / length.clamp_min(torch.finfo(w.dtype).tiny)
    return w - 2 * torch.sin(angle / 2).square() * w - along * d


class Spheres:
    """The geometry of one weight: its blocks, which are rows of it or several; gathered where rows are sharded."""

    def __init__(self, weight: Tensor, entry: Any) -> None:
        self.parameter, self.own = entry.parameter, local(weight)
        by_row = entry.spheres == len(entry.parameter)
        self.gathered = not shares_rows(entry.parameter) or (self.own is not weight and not by_row)
        blocks = whole(self.own, entry.parameter) if self.gathered else self.own
        self.blocks = blocks if by_row else blocks.reshape(entry.spheres, -1)
        self.radius = norms(self.blocks)

    def at_unit_norm(self, gradient: Tensor) -> Tensor:
        """The gradient times r: the part of this process, in the shape of the parameter."""
        g = whole(local(gradient), self.parameter) if self.gathered else local(gradient)
        scaled = (g.to(self.blocks.dtype).reshape(self.blocks.shape) * self.radius).reshape(g.shape)
        return part(scaled, self.parameter) if self.gathered else scaled

    def arrange(self, direction: Tensor) -> Tensor:
        """A direction in the shape of the blocks."""
        d = direction.reshape(self.own.shape)
        return (whole(d, self.parameter) if self.gathered else d).reshape(self.blocks.shape)

    def store(self) -> None:
        """Write the blocks back where they are not the weight's own memory."""
        if self.gathered:
            self.own.copy_(part(self.blocks.reshape(self.parameter.shape), self.parameter))
        elif self.blocks.data_ptr() != self.own.data_ptr():
            self.own.copy_(self.blocks.reshape(self.own.shape))


def rotate_all_(
    ws: Sequence[Tensor],
    ds: Sequence[Tensor],
    radii: Sequence[Tensor],
    lr: float | Tensor,
    *,
    by_angle: bool,
) -> None:
    """``rotate`` for many weights of one device in place: two reductions and one update each, all angles at once.

    With the length ℓ of d and its cosine c with w, ‖u‖ = ℓ√(1 - c²), and the new w is a multiple of w and one of d.
    """
    radius = torch.cat([r.flatten() for r in radii])
    eps, tiny = torch.finfo(radius.dtype).eps, torch.finfo(radius.dtype).tiny
    length = torch.cat([norms(d).flatten() for d in ds]).clamp_min(tiny)
    cosine = (
        torch.cat([inner(d, w).flatten() for d, w in zip(ds, ws, strict=True)])
        / radius.clamp_min(tiny)
        / length
    )
    rest = 1 - cosine.square()
    moves = ((rest > 8 * eps) & (length > tiny)).to(
        radius
    )  # what is left of a radial direction is rounding
    sine_of_d = rest.clamp_min(eps).sqrt()
    angle = (moves * lr if by_angle else moves * lr * length * sine_of_d).clamp(max=MAX_ANGLE)
    sine = torch.sin(angle) / sine_of_d
    kept = 1 - 2 * torch.sin(angle / 2).square() + sine * cosine
    taken = sine * radius / length
    shares = (torch.split(t, [len(w) for w in ws]) for t in (kept, taken))
    for w, d, r, a, b in zip(ws, ds, radii, *shares, strict=True):
        w.mul_(a.view_as(r)).addcmul_(d, b.view_as(r), value=-1)
