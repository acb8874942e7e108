r"""Lengths of vectors of any size, with derivatives of every order where they are defined.

    |v| = s |v / s|    for any s > 0

Squares of huge entries are infinite and those of tiny ones zero, so s moves such vectors into the middle of the range.
It is a power of two and 1 for all ordinary vectors, which keep their bits. A length has a kink at zero; the derivatives
there are given as 0, not as NaN.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def range_factor(largest: Tensor) -> Tensor:
    """The s of vectors with given largest entries, a constant power of two: squares over s² stay in the range."""
    info = torch.finfo(largest.dtype)
    up, down = (2.0 ** round(0.65 * math.log2(bound)) for bound in (info.max, info.tiny))
    size = largest.detach()
    tiny = (size < info.tiny**0.3) & (size > 0)
    return torch.where(size > info.max**0.3, up, torch.where(tiny, down, torch.ones_like(size)))


def ordinary(lengths: Tensor) -> bool:
    """Whether lengths are seen to be in the range where plain formulas are right; False where nothing can be seen."""
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    low, high = _bounds(lengths.dtype)
    seen = lengths.detach()
    try:
        if seen.numel() == 1:
            return low < float(seen) < high
        return bool(((seen > low) & (seen < high)).all())
    except RuntimeError:  # under vmap
        return False


def holds(condition: Tensor) -> bool | None:
    """Whether a condition is met everywhere; None under ``vmap``, where nothing can be looked at."""
    try:
        return bool(condition.all())
    except RuntimeError:
        return None


@lru_cache
def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype)
    return (info.tiny / info.eps) ** 0.5, info.max**0.45


def root(square: Tensor) -> Tensor:
    """The square root, with derivatives 0 instead of infinite at 0."""
    zero = square == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())


def length(v: Tensor, *, dim: int | tuple[int, ...] = -1, keepdim: bool = False) -> Tensor:
    """The Euclidean length of vectors of any finite size; infinite only if it is beyond the largest number."""
    plain = torch.linalg.vector_norm(v, dim=dim, keepdim=keepdim)
    if ordinary(plain):
        return plain
    largest = v.abs().amax(dim=dim, keepdim=True)
    factor = range_factor(largest)
    # a constant in place of zero vectors, so that nothing is differentiated at the kink
    zero = largest.detach() == 0
    scaled = torch.linalg.vector_norm(torch.where(zero, 1.0, v / factor), dim=dim, keepdim=True)
    found = torch.where(zero, 0.0, factor * scaled)
    return found if keepdim else found.squeeze(dim)


def series(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    """The polynomial ``Σ a_k t^k``."""
    value = torch.full_like(t, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * t + coefficient
    return value
