"""What a loss tells of the distribution behind it: the number of its terms, its reduction, and how targets are drawn.

A loss of PyTorch is the negative log-likelihood of a distribution, over a number of terms that only its values tell:
means over samples, over entries, or over those whose targets count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LossFunction = Callable[[Any, Any], Tensor]
Sampler = Callable[[Tensor, Tensor, torch.Generator], Tensor]


def check_loss_function(loss_fn: Any) -> None:
    """Raise unless something can be called with outputs and targets.

    Args:
        loss_fn: what should be a loss.

    Raises:
        TypeError: if it is none, or a class of losses.
    """
    if isinstance(loss_fn, type):
        raise TypeError(f"loss_fn must be a loss, such as {loss_fn.__name__}(), got the class {loss_fn.__name__}")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of outputs and targets, got {loss_fn!r}")


def likelihood(loss_fn: LossFunction) -> LossFunction:
    """The loss of targets that the model itself has drawn: without the smoothing that those of the data get.

    Args:
        loss_fn: the loss.

    Returns:
        The loss, or a cross entropy like it; with smoothed draws the Fisher information would be too small.
    """
    if type(loss_fn) is not nn.CrossEntropyLoss or not loss_fn.label_smoothing:
        return loss_fn
    return nn.CrossEntropyLoss(ignore_index=loss_fn.ignore_index, reduction=loss_fn.reduction)


def summed_axes(outputs: Any, targets: Any, loss_fn: LossFunction, reduction: str) -> tuple[int, ...]:
    """The axes of targets over which a loss is a sum: those of a mean have a term for every entry.

    A cross entropy with shares of classes has one term for all classes, a squared error one for each entry. Of other
    losses it is found out: along an axis over which the mean is taken, doubled data leave the loss as it is.

    Args:
        outputs: what the model returned.
        targets: the targets.
        loss_fn: the loss.
        reduction: ``"mean"`` or ``"sum"``.

    Returns:
        Axes beyond the first.
    """
    if not isinstance(targets, Tensor) or targets.ndim < 2:
        return ()
    cross_entropy = isinstance(loss_fn, nn.CrossEntropyLoss) or loss_fn is functional.cross_entropy
    if cross_entropy:
        return (1,) if targets.is_floating_point() else ()
    if reduction == "sum" or not isinstance(outputs, Tensor):
        return ()
    with torch.no_grad():
        value = float(loss_fn(outputs, targets))
        return tuple(axis for axis in range(1, targets.ndim) if _is_summed(outputs, targets, loss_fn, axis, value))


def form_of(targets: Any) -> tuple[int, bool] | None:
    """What targets of one loss may differ in from batch to batch: classes, and shares of classes where some are mixed.

    Args:
        targets: the targets of a batch.

    Returns:
        The number of axes, and whether they are values; None for what is no tensor.
    """
    return (targets.ndim, targets.is_floating_point()) if isinstance(targets, Tensor) else None


def _is_summed(outputs: Tensor, targets: Tensor, loss_fn: LossFunction, axis: int, value: float) -> bool:
    """Whether data repeated along an axis of the targets are another loss; of class indices, one twice as large."""
    if targets.is_floating_point():
        seen = _doubled(outputs, targets, loss_fn, axis) if outputs.shape == targets.shape else None
        return seen is not None and not _same(seen, value, value)
    # the axis over classes is the second one or the last one of the outputs
    places = [place for place in (axis, axis + 1) if outputs.shape[place : place + 1] == targets.shape[axis : axis + 1]]
    found = [_doubled(outputs, targets, loss_fn, axis, place) for place in places]
    seen = next((loss for loss in found if loss is not None), None)
    return seen is not None and _same(seen, 2 * value, value) and not _same(seen, value, value)


def n_terms(outputs: Any, targets: Any, loss_fn: LossFunction, summed: tuple[int, ...], samples: float) -> float:
    """The number of terms that a mean-reduced loss divides by: targets that are not ignored, or entries of a residual.

    Args:
        outputs: what the model returned.
        targets: class indices, or values of the shape of the outputs.
        loss_fn: its ``ignore_index`` is honoured, -100 by default.
        summed: the axes of targets that are summed over.
        samples: the length of the batch, for targets and outputs that are no tensors.

    Returns:
        At least 1.
    """
    one_for_all = isinstance(targets, Tensor) and targets.ndim == 0 and isinstance(outputs, Tensor) and outputs.ndim > 1
    if not isinstance(targets, Tensor) or one_for_all:
        return len(outputs) if isinstance(outputs, Tensor) else max(samples, 1.0)
    return max(int(terms_of_samples(targets, loss_fn, summed).sum()), 1)


def terms_of_samples(targets: Tensor, loss_fn: LossFunction, summed: tuple[int, ...]) -> Tensor:
    """The number of terms that every sample has in a loss.

    Args:
        targets: class indices, or values.
        loss_fn: its ``ignore_index`` is honoured, -100 by default.
        summed: the axes of targets that are summed over.

    Returns:
        Whole numbers, one per sample; none where all targets of a sample are ignored.
    """
    rows = targets.unsqueeze(0) if targets.ndim == 0 else targets
    if targets.is_floating_point():
        terms = math.prod(n for axis, n in enumerate(rows.shape) if axis and axis not in summed)
        return torch.full((len(rows),), terms, device=targets.device)
    named = getattr(loss_fn, "keywords", {})  # of functools.partial
    ignored = getattr(loss_fn, "ignore_index", named.get("ignore_index", -100))
    counted = rows != ignored
    for axis in summed:
        counted = counted.any(axis, keepdim=True)
    return counted.unsqueeze(-1).flatten(1).sum(1)


def _doubled(
    outputs: Tensor, targets: Tensor, loss_fn: LossFunction, axis: int, place: int | None = None
) -> float | None:
    """The loss of data repeated along an axis; None where something in the loss has the size of that axis."""
    place = axis if place is None else place  # that of the outputs
    try:
        return float(loss_fn(torch.cat([outputs, outputs], place), torch.cat([targets, targets], axis)))
    except (RuntimeError, ValueError, IndexError):
        return None


def _same(seen: float, expected: float, value: float) -> bool:
    return abs(seen - expected) <= 0.05 * abs(value) + 1e-12


def check_reduction(outputs: Any, targets: Any, loss_fn: LossFunction, loss: Tensor, reduction: str) -> None:
    """Raise unless the loss is a scalar, reduced as declared: doubling the batch must keep a mean and double a sum.

    Args:
        outputs: what the model returned.
        targets: the targets.
        loss_fn: the loss.
        loss: its value.
        reduction: ``"mean"`` or ``"sum"``.

    Raises:
        ValueError: if it is not, or there are no samples.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return one number, reduced over the batch, got {shape}")
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or outputs.shape[:1] != targets.shape[:1]:
        return
    with torch.no_grad():
        doubled = _doubled(outputs, targets, loss_fn, 0)
    if not len(outputs):
        raise ValueError(f"a batch must have samples, got outputs of shape {tuple(outputs.shape)}")
    value = float(loss.detach())
    if doubled is None or not math.isfinite(value):  # what has diverged says nothing; its factors are counted as failed
        return
    if not _same(doubled, value if reduction == "mean" else 2 * value, value):
        seen = f"{doubled / value:.3g}" if value else "more than 0"
        raise ValueError(
            f"the loss is not reduced as declared: with reduction={reduction!r} a doubled batch should multiply it by "
            f"{1 if reduction == 'mean' else 2}, got {seen}; pass the other reduction to the optimizer"
        )


def default_sampler(loss_fn: LossFunction) -> Sampler:
    """The predictive distribution that belongs to one of PyTorch's losses.

    Args:
        loss_fn: a cross entropy, mean squared error or binary cross entropy with logits, as module or function.

    Returns:
        A function of outputs, data targets and a generator that draws targets.

    Raises:
        ValueError: if the loss is not one of these.
    """
    if isinstance(loss_fn, nn.CrossEntropyLoss) or loss_fn is functional.cross_entropy:
        ignored = getattr(loss_fn, "ignore_index", -100)
        return lambda z, y, generator: _sample_classes(z, y, generator, ignored)
    if isinstance(loss_fn, nn.MSELoss) or loss_fn is functional.mse_loss:
        # (z - y)² is the negative log-likelihood of a Gaussian with variance ½
        return lambda z, y, generator: (
            z + 0.5**0.5 * torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)
        )
    if isinstance(loss_fn, nn.BCEWithLogitsLoss) or loss_fn is functional.binary_cross_entropy_with_logits:
        return lambda z, y, generator: torch.bernoulli(z.float().sigmoid(), generator=generator).to(z.dtype)
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    raise ValueError(
        f"fisher='mc' has to draw targets from the model's distribution, which {name} does not tell: "
        "pass sampler=f(outputs, targets, generator)"
    )


def _sample_classes(logits: Tensor, targets: Tensor, generator: torch.Generator, ignored: int) -> Tensor:
    probabilities = logits.float().movedim(1, -1).softmax(dim=-1)
    flat = torch.multinomial(probabilities.reshape(-1, probabilities.shape[-1]), 1, generator=generator)
    classes = flat.reshape(probabilities.shape[:-1])
    if targets.is_floating_point():
        return classes
    return torch.where(targets == ignored, targets, classes)
