r"""Lengths of vectors of any size, and angles, with derivatives of every order where they are defined.

    |v| = s |v / s|    for any s > 0

Squares of entries beyond the square root of the largest number are infinite, and those of tiny entries are zero, so s
moves such vectors into the middle of the range. It is a power of two and 1 for all ordinary vectors, which keep their
bits; where a look at the result shows that there are no others, as on a CPU, s is not needed at all. A length has a
kink at zero; the derivatives there are given as 0, not as NaN.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def range_factor(largest: Tensor) -> Tensor:
    """The s of vectors with given largest entries: their squares over s² neither overflow nor vanish.

    Args:
        largest: the largest absolute value of each vector.

    Returns:
        A constant power of two for each.
    """
    info = torch.finfo(largest.dtype)
    up, down = (2.0 ** round(0.65 * math.log2(bound)) for bound in (info.max, info.tiny))
    size = largest.detach()
    tiny = (size < info.tiny**0.3) & (size > 0)
    return torch.where(size > info.max**0.3, up, torch.where(tiny, down, torch.ones_like(size)))


def ordinary(lengths: Tensor) -> bool:
    """Whether lengths are seen to be so far from zero and from the largest number that plain formulas are right.

    Args:
        lengths: as a plain formula gives them.

    Returns:
        False also where nothing can be looked at: on a device that would have to wait, under ``vmap``, in a compiler.
    """
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
    """Whether a condition is met everywhere.

    Args:
        condition: truth values.

    Returns:
        None under ``vmap``, where nothing can be looked at: the caller then takes the way that is right in either case.
    """
    try:
        return bool(condition.all())
    except RuntimeError:
        return None


@lru_cache
def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype)
    return (info.tiny / info.eps) ** 0.5, info.max**0.45


def root(square: Tensor) -> Tensor:
    """The square root, with derivatives 0 instead of infinite at 0.

    Args:
        square: numbers, none negative.

    Returns:
        Their roots.
    """
    zero = square == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())


def length(v: Tensor, *, dim: int | tuple[int, ...] = -1, keepdim: bool = False) -> Tensor:
    """The Euclidean length of vectors of any finite size.

    Args:
        v: the vectors.
        dim: the dimensions that hold their entries.
        keepdim: whether to keep those dimensions.

    Returns:
        One number for each vector; infinite only if the length itself is beyond the largest number.
    """
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
    """The polynomial ``Σ a_k t^k``.

    Args:
        coefficients: a_0, a_1, and so on.
        t: where.

    Returns:
        Its values.
    """
    value = torch.full_like(t, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * t + coefficient
    return value
