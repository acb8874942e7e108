"""Is a model a function of its parameters, sample by sample, as the loss of a problem must be?

    z_i = f(x_i, θ),    not of other samples, of chance, or of what was computed before

Layers of a network that are known to be none are named; for all others, and for functions, a few
samples are run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fisherfold.manifolds.base import Point

FEW = 4  # samples that a model is looked at with
BELONGS = (
    "numbers that belong to single samples, such as exposures or weights, must be columns of x"
)


@torch.no_grad()
def check_independence(model: Callable[[Any, Any], Tensor], theta: Point, x: Tensor) -> bool:
    """Raise where the first of a few samples has other outputs alone, or the model cannot do without the others."""
    # Its Jacobian, taken alone, would then not be that of the loss, and Fisher matrices would be
    # wrong without a word. A model that only drops the dimension of a single sample is left to
    # those who ask it for one.
    few, whole = x[:FEW], _outputs_of(model, theta, x, FEW)
    rows = len(whole) if isinstance(whole, Tensor) and whole.ndim else 0
    if len(x) < 2 or rows != len(few) or not whole.is_floating_point():
        return True  # what is wrong with all samples is named elsewhere
    alone = _outputs_of(model, theta, x, 1)
    if not isinstance(alone, Tensor) or alone.numel() != whole[:1].numel():
        seen = tuple(alone.shape) if isinstance(alone, Tensor) else type(alone).__name__
        expected = f"{(1, *whole.shape[1:])} for the first sample alone"
        raise ValueError(f"model must return one row per sample, {expected}, got {seen}; {BELONGS}")
    size = float(few.abs().max()) if few.is_floating_point() and few.numel() else 1.0
    rounding = 1e3 * torch.finfo(whole.dtype).eps * max(1.0, size)
    if (
        not bool(whole.isfinite().all())
        or max(float(z.abs().max()) for z in (alone, whole[:1])) <= rounding
    ):
        return False
    if alone.shape != whole[:1].shape or _alike(whole[:1], alone):
        return True
    if not _alike(whole, model(few, theta)):
        raise ValueError(
            "model must give the same outputs twice: nothing in it may be drawn at random, nor "
            "written into its inputs"
        )
    raise ValueError(
        f"model must treat samples independently, got other outputs for the first of {len(few)} "
        "alone: means, standard deviations and the like over the samples must be computed before, "
        "from all of x"
    )


def _outputs_of(model: Callable[[Any, Any], Tensor], theta: Point, x: Tensor, count: int) -> Tensor:
    """The outputs of the first samples."""
    try:
        return model(x[:count], theta)
    except (RuntimeError, IndexError, ValueError) as error:
        model(x, theta)  # what fails with all samples, too, says so itself
        raise ValueError(
            f"model must take any number of samples, but fails with the first {count} of {len(x)} "
            f"({error}); {BELONGS}"
        ) from error


def check_layers(module: nn.Module) -> None:
    """Raise where a batch norm or a dropout is in training mode."""
    for name, part in module.named_modules():
        mixes = isinstance(part, nn.modules.batchnorm._BatchNorm) and (
            part.training or part.running_mean is None
        )
        draws = isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0
        if mixes or draws:
            reason = (
                "batch statistics mix the samples" if mixes else "dropout makes the loss random"
            )
            raise ValueError(
                f"{reason}: {type(part).__name__} {name!r} must be in evaluation mode "
                "(module.eval())"
            )


def _alike(z: Tensor, other: Tensor) -> bool:
    """Equal but for rounding, which is that of other kernels for batches of other sizes."""
    return z.shape == other.shape and bool((z - other).abs().max() <= 1e-2 * z.abs().max())
