"""Geometry of weights on spheres: momentum at unit norm, and rotation by an angle.

A block w (a row of a matrix, or several) with norm r moves on the sphere of radius r. P_w d = d -
(<d, w>/<w, w>) w is the projection to its tangent space. With the gradient g, the momentum m and a
direction d,

    s = r g,      m ← β m + s,      u = s + β m,
    w ← r ŵ',     w' = cos θ w - sin θ r P_w d/‖P_w d‖,

where s is the gradient at unit norm and d is made of u. Only d is projected: gradients and momenta
that are projected as well train and generalise worse on convolutional networks (docs/decisions.md).
The angle θ is ``lr`` times ``share``, min(1, 2/(1 - β) ‖s‖/‖u‖): a row turns in steps in which it
has a gradient, and a constant gradient, for which ‖s‖ = (1 - β)‖u‖, turns it by ``lr``.

These functions are the reference for the fused kernels of a GPU. Blocks are the rows of their
arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

# No block turns by more radians in a step.
MAX_ANGLE = 0.5
# Of its angle, a row turns all as long as its gradient is 1/MARGIN of that of a constant gradient.
MARGIN = 2.0
# Binary digits that norms lose when they are rounded: a fixed point of rotations, so that norms
# never drift.
LOST = 6
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def norms(blocks: Tensor) -> Tensor:
    """The norms of rows, as a column."""
    return torch.linalg.vector_norm(blocks, dim=1, keepdim=True)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The inner products of rows, as a column."""
    return (a * b).sum(1, keepdim=True)


def tangent(w: Tensor, d: Tensor) -> Tensor:
    """Project directions onto the tangent spaces of the spheres on which the rows of ``w`` lie."""
    return d - (inner(d, w) / inner(w, w).clamp_min(torch.finfo(w.dtype).tiny)) * w


def radii(w: Tensor) -> Tensor:
    """The norms of rows, rounded so that those of a rotated weight are the same to the last bit."""
    bits = norms(w).view(BITS[w.dtype])
    return ((bits + (1 << LOST - 1)) >> LOST << LOST).view(w.dtype)


def momentum_(
    m: Tensor, w: Tensor, g: Tensor, beta: float, *, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """Take a gradient up into the momentum in place.

    Return u and the share of the angle for every row.
    """
    s = radii(w) * g
    m.mul_(beta).add_(s)
    u = s + beta * m if nesterov else m
    # rows are divided by their largest entry first, since squares of tiny numbers vanish
    size = u.abs().amax(1, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny)
    ratio = norms(s / size) / norms(u / size).clamp_min(torch.finfo(u.dtype).eps)
    return u, (MARGIN / (1 - beta) * ratio).clamp(max=1.0)


def rotate_(w: Tensor, d: Tensor, lr: float | Tensor, *, by_angle: bool = True) -> Tensor:
    """Rotate rows against directions along great circles in place.

    And return the angles before they are limited.

    ``lr``: the angle, or with ``by_angle=False`` what the length of the tangent direction is
    multiplied by.
    """
    eps = torch.finfo(w.dtype).eps
    size = d.abs().amax(1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
    d = d / size
    u = tangent(w, d)
    length = norms(u)
    # what is left of a radial direction is rounding
    moves = (length.square() > 8 * eps * inner(d, d)).to(w.dtype)
    angle = moves * lr if by_angle else moves * lr * size * length
    theta = angle.clamp(max=MAX_ANGLE)
    radius = radii(w)
    along = radius * torch.sin(theta) / length.clamp_min(eps)
    turned = w - 2 * torch.sin(theta / 2).square() * w - along * u
    turned *= radius / norms(turned).clamp_min(torch.finfo(w.dtype).tiny)
    w.copy_(torch.where(theta > 0, turned, w))
    return angle
