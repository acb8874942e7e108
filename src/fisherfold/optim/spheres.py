"""Geometry of weights on spheres: rows, blocks of rows, or a whole tensor, of any norm.

A block w with norm r moves on the sphere of radius r. With ŵ = w/r, a direction d and its tangent part u = d - <d,ŵ>ŵ,

    w ← w - r ( (1 - cos θ) ŵ + sin θ u/‖u‖ ),      θ = lr  or  θ = lr ‖u‖.

A scale-invariant weight only has a direction, so its norm is kept as it is: nothing is rescaled when training starts,
and running statistics of batch norms stay right. The gradient at unit norm is r times the gradient at w.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

MAX_ANGLE = 0.5


def norms(blocks: Tensor) -> Tensor:
    """The norms of the last axis, as a column."""
    return torch.linalg.vector_norm(blocks, dim=-1, keepdim=True)


def tangent(w: Tensor, d: Tensor) -> Tensor:
    """Project directions onto the tangent spaces of the spheres on which the rows of ``w`` lie."""
    squared = (w * w).sum(-1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
    return d - ((d * w).sum(-1, keepdim=True) / squared) * w


def rotate(w: Tensor, d: Tensor, lr: float | Tensor, *, by_angle: bool) -> Tensor:
    """Rotate rows against directions along great circles."""
    tiny = torch.finfo(w.dtype).tiny
    d = tangent(w, d)
    length = norms(d)
    # what is left of a radial direction is rounding, and has no direction of its own
    moves = length > 0
    angle = (lr * moves.to(w.dtype) if by_angle else lr * length).clamp(max=MAX_ANGLE)
    along = norms(w) * torch.sin(angle) / length.clamp_min(tiny)
    return w - 2 * torch.sin(angle / 2).square() * w - along * d


def by_shape(tensors: Sequence[Tensor], *keys: Sequence[object]) -> Iterable[list[int]]:
    """Indices of tensors that can be stacked: same shape, dtype and device, and same keys."""
    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kind = (tensor.shape, tensor.dtype, tensor.device, *(key[index] for key in keys))
        groups.setdefault(kind, []).append(index)
    return groups.values()


def rotate_all(ws: Sequence[Tensor], ds: Sequence[Tensor], lr: float | Tensor, *, by_angle: bool) -> list[Tensor]:
    """``rotate`` for many weights, those of equal shapes in one batch."""
    moved: list[Tensor] = list(ws)
    for members in by_shape(ws):
        if len(members) == 1:
            moved[members[0]] = rotate(ws[members[0]], ds[members[0]], lr, by_angle=by_angle)
            continue
        batch = rotate(
            torch.stack([ws[i] for i in members]), torch.stack([ds[i] for i in members]), lr, by_angle=by_angle
        )
        for i, w in zip(members, batch.unbind(), strict=True):
            moved[i] = w
    return moved
