"""Spectral directions: the matrix sign of the momentum, by Newton-Schulz iterations (Muon).

With M = U S Vᵀ, five iterations X ← aX + bXXᵀX + c(XXᵀ)²X from M/‖M‖ bring all singular values near 1: the result is
close to U Vᵀ, the steepest direction in the spectral norm. The coefficients are those of airbench's Muon.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fisherfold.optim.distributed import part, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def spectral(
    momenta: list[Tensor], entries: Sequence[Any], inverses: Sequence[Any] = ()
) -> list[Tensor]:
    """The matrix signs; sharded matrices are gathered for them."""
    wholes = [whole(m, entry.parameter) for m, entry in zip(momenta, entries, strict=True)]
    signs = orthogonalise_all(
        [w.reshape(len(w), -1) for w in wholes], [entry.splits for entry in entries]
    )
    return [
        part(s.reshape(e.parameter.shape), e.parameter) for s, e in zip(signs, entries, strict=True)
    ]


def orthogonalise(matrix: Tensor, steps: int = STEPS) -> Tensor:
    """The matrix sign, roughly: singular values between 0.7 and 1.2; matrices may be batched along leading axes."""
    a, b, c = COEFFICIENTS
    x = (matrix.bfloat16() if matrix.is_cuda else matrix).reshape(-1, *matrix.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    # a norm of zero gives zero; entries are divided by the largest first, since squares of tiny numbers vanish
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrix.shape).to(matrix.dtype)


def orthogonalise_all(matrices: Sequence[Tensor], groups: Sequence[int]) -> list[Tensor]:
    """``orthogonalise`` for many matrices, those of equal shapes in one batch."""
    found: list[Tensor] = list(matrices)
    for members in by_shape(matrices, groups):
        shape, blocks = matrices[members[0]].shape, groups[members[0]]
        batch = torch.stack([matrices[i].reshape(blocks, -1, shape[-1]) for i in members])
        for i, block in zip(members, orthogonalise(batch).unbind(), strict=True):
            found[i] = block.reshape(shape)
    return found


def by_shape(tensors: Sequence[Tensor], *keys: Sequence[object]) -> Iterable[list[int]]:
    """Indices of tensors that can be stacked: same shape, dtype and device, and same keys."""
    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kind = (tensor.shape, tensor.dtype, tensor.device, *(key[index] for key in keys))
        groups.setdefault(kind, []).append(index)
    return groups.values()
