"""The posterior of a completion as named tensors and a header, for model files and for checkpoints.

What is read is checked before it is used: the shapes must belong together, every number must be finite and those that
must be positive are. A file that was written by an honest program always passes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fisherfold.completion.posterior import CompletionPosterior, Side
from fisherfold.completion.prior_mean import SetEffects

_SET_TENSORS = ("effects", "sums", "shares")
_POSITIVE = ("weight", "start_variance")


def _side_shapes(n: int, q: int) -> dict[str, tuple[int, ...]]:
    return {
        "mean": (n, q), "covariance": (n, q * (q + 1) // 2), "weight": (n,), "shortfall": (n,), "counts": (n,),
        "precision": (q, q), "center": (q,), "start_variance": (q,), "log_det": (n,),
    }  # fmt: skip


def pack_posterior(posterior: CompletionPosterior) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take a posterior apart.

    Args:
        posterior: the posterior.

    Returns:
        Its tensors by name, and its numbers.
    """
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {
        "noise_precision": posterior.noise_precision, "weight_strength": posterior.weight_strength,
        "n_ratings": posterior.n_ratings, "fixed_ridge": posterior.fixed_ridge, "misfit": posterior.misfit,
        "converged": posterior.converged, "trace": posterior.trace, "has_offset": [],
    }  # fmt: skip
    for name, side in (("rows", posterior.rows), ("columns", posterior.columns)):
        tensors |= {f"{name}.{key}": getattr(side, key) for key in _side_shapes(1, 1)}
        if side.set_effects is not None:
            tensors |= {f"{name}.set.{key}": getattr(side.set_effects, key) for key in _SET_TENSORS}
        header["has_offset"].append(side.has_offset)
    return tensors, header


def unpack_posterior(tensors: dict[str, Tensor], header: dict[str, Any]) -> CompletionPosterior:
    """Put a posterior together again.

    Args:
        tensors: the tensors by name; others are left alone.
        header: the numbers.

    Returns:
        The posterior.

    Raises:
        ValueError: if the parts do not belong together or are not finite.
    """
    numbers = dict(header)
    has_offset, trace = numbers.pop("has_offset"), numbers.pop("trace")
    sizes = [len(take(tensors, f"{name}.counts", None)) for name in ("rows", "columns")]
    q = take(tensors, "rows.mean", None).shape[-1]
    sides = [
        _side(tensors, name, sizes[k], sizes[1 - k], q, has_offset[k]) for k, name in enumerate(("rows", "columns"))
    ]
    for name in ("noise_precision", "weight_strength", "misfit", "n_ratings", "fixed_ridge"):
        value = numbers[name]
        if name == "fixed_ridge" and value is None:
            continue
        finite_number(name, value, least=0.0)
    if not numbers["noise_precision"] > 0 or not isinstance(numbers["n_ratings"], int):
        raise ValueError(f"a noise precision of {numbers['noise_precision']} from {numbers['n_ratings']} ratings")
    return CompletionPosterior(sides[0], sides[1], trace=check_trace(trace), **numbers)


def _side(tensors: dict[str, Tensor], name: str, n: int, others: int, q: int, has_offset: Any) -> Side:
    if not isinstance(has_offset, bool):
        raise ValueError(f"has_offset of {name} is {has_offset!r}")
    parts: dict[str, Any] = {}
    for key, shape in _side_shapes(n, q).items():
        parts[key] = take(tensors, f"{name}.{key}", shape)
        if key in _POSITIVE and not bool((parts[key] > 0).all()):
            raise ValueError(f"{name}.{key} must be positive")
    effects = None
    if f"{name}.set.effects" in tensors:
        shapes = {"effects": (others, q), "sums": (n, q), "shares": (others,)}
        effects = SetEffects(**{key: take(tensors, f"{name}.set.{key}", shape) for key, shape in shapes.items()})
    return Side(**parts, has_offset=has_offset, set_effects=effects)


def take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...] | None, *, whole: bool = False) -> Tensor:
    """One tensor of a file, of the shape and kind that it must have.

    Args:
        tensors: the tensors of the file.
        name: which.
        shape: its shape, None if any will do.
        whole: whole numbers are expected, else finite float32 or float64.

    Returns:
        The tensor.

    Raises:
        ValueError: if it is missing or another one.
    """
    if name not in tensors:
        raise ValueError(f"it has no {name}")
    tensor = tensors[name]
    if tensor.ndim == 0 or (shape is not None and tuple(tensor.shape) != shape):
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, {shape} is expected")
    if whole:
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} holds {tensor.dtype}, whole numbers are expected")
    elif tensor.dtype not in (torch.float32, torch.float64) or not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} must hold finite float32 or float64 numbers")
    return tensor


def finite_number(name: str, value: Any, *, least: float = -math.inf) -> float:
    """A number of a header.

    Args:
        name: what it is, for messages.
        value: what the file says.
        least: the smallest value allowed.

    Returns:
        The number.

    Raises:
        ValueError: if it is not a finite number, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
        raise ValueError(f"{name} is {str(value)[:40]!r}, a finite number is expected")
    return float(value)


def check_trace(trace: Any) -> list[dict[str, float]]:
    """The rows of a trace.

    Args:
        trace: what the file says.

    Returns:
        The rows, each a dictionary of numbers; NaN is allowed there.

    Raises:
        ValueError: if they are anything else.
    """
    good = isinstance(trace, list) and all(
        isinstance(row, dict) and all(isinstance(value, (int, float)) for value in row.values()) for row in trace
    )
    if not good:
        raise ValueError("its trace is not a table of numbers")
    return list(trace)
