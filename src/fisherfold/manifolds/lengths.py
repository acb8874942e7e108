r"""Lengths of vectors, with derivatives of every order where they are defined.

A length has a kink at zero; the derivatives there are given as 0, not as NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def holds(condition: Tensor) -> bool | None:
    """Whether a condition is met everywhere; None under ``vmap``, where nothing can be looked at."""
    try:
        return bool(condition.all())
    except RuntimeError:
        return None


def root(square: Tensor) -> Tensor:
    """The square root, with derivatives 0 instead of infinite at 0."""
    zero = square == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())


def length(v: Tensor, *, dim: int | tuple[int, ...] = -1, keepdim: bool = False) -> Tensor:
    """The Euclidean length of vectors."""
    zero = (v.detach() == 0).all(dim=dim, keepdim=True)
    # a constant in place of zero vectors, so that nothing is differentiated at the kink
    found = torch.linalg.vector_norm(torch.where(zero, 1.0, v), dim=dim, keepdim=True)
    found = torch.where(zero, 0.0, found)
    return found if keepdim else found.squeeze(dim)


def series(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    """The polynomial ``Σ a_k t^k``."""
    value = torch.full_like(t, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * t + coefficient
    return value
