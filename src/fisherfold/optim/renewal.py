"""The renewal of curvature: what passes through the network are collected, and what inverses are made of them.

The gradients of a loss that is divided by a number of micro-batches, or multiplied by a loss scale, are brought back to
those of L = (1/D) Σ ℓ. Where several losses are added, their Fisher matrices add up: each loss has the share 1/D in the
sums of both factors, so that all of them count alike, and G is multiplied by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import nn

from fisherfold.optim.factors import Collector, Pass
from fisherfold.optim.groups import names
from fisherfold.optim.norms import norms_in_training
from fisherfold.optim.on_spheres import constrain_freed, lengths_of_rows
from fisherfold.optim.options import check_number
from fisherfold.optim.tracking import refuse_replaced
from fisherfold.warn import warn

if TYPE_CHECKING:
    from fisherfold.optim.mkfac import MKFAC


def module_of(optimizer: MKFAC) -> nn.Module:
    """The module that curvature is taken from.

    Args:
        optimizer: which may know parameters alone.

    Returns:
        The module.

    Raises:
        RuntimeError: if it is not known.
    """
    if optimizer.model is None:
        raise RuntimeError("curvature needs the modules: pass model_of_groups=model along with parameter groups")
    return optimizer.model


@contextmanager
def collecting(optimizer: MKFAC, model: nn.Module) -> Iterator[Collector]:
    """Watch over the norms that make the weights before them scale invariant, where such weights are trained.

    Args:
        optimizer: whose curvature is renewed.
        model: its module.

    Yields:
        What collects, with its hooks not installed yet.
    """
    curved = any(spheres and parameter.requires_grad for parameter, _, spheres in optimizer._entries())
    with norms_in_training(model) if curved else nullcontext():
        constrain_freed(optimizer)
        refuse_replaced(model, optimizer.curvature.live)
        yield Collector(
            model,
            optimizer.curvature.live,
            max_rows=optimizer.max_rows,
            allow_tf32=optimizer.allow_tf32,
            calls=optimizer.curvature.calls,
            lengths=lengths_of_rows(optimizer),
        )


def passes_of_training(reduction: str, losses: str, samples: int | None, scale: float) -> Callable[[int], Pass]:
    """How passes begin whose loss is not seen.

    Args:
        reduction: of the loss over its terms, ``"mean"`` or ``"sum"``.
        losses: what the losses of several passes are parts of: a ``"mean"`` or a ``"sum"``.
        samples: the number of terms, if it is not that of the samples.
        scale: what gradients are to be multiplied by.

    Returns:
        A function of the number of samples.
    """

    def begin(length: int) -> Pass:
        terms = samples or length
        share = 1.0 if losses == "mean" else 1.0 / max(terms, 1)
        return Pass(terms, scale if reduction == "mean" else scale / max(terms, 1), share=share)

    return begin


def add_up(collector: Collector, accumulation: int) -> None:
    """Make the sum over losses of what is their mean: each has its share in it, and their number is made up for.

    Args:
        collector: after its passes, which began with ``losses="sum"``.
        accumulation: by how many micro-batches each loss is divided.
    """
    for sums in collector.sums.values():
        sums.g.mul_(sums.passes / accumulation)


def fold(optimizer: MKFAC, collector: Collector, decay: float, *, invert: bool, forgive: bool) -> None:
    """Fold what was collected into the factors, and make new inverses of them.

    Args:
        optimizer: whose curvature is renewed.
        collector: after its passes.
        decay: β of the running mean.
        invert: False only updates the factors.
        forgive: do not count factors that are not finite.
    """
    curvature = optimizer.curvature
    if curvature.live and not collector.sums:
        _refuse_or_warn_of_nothing([tracked.name for tracked in curvature.live], collector.no_products)
    dampings = _dampings(optimizer)
    renewed = curvature.fold(collector.sums, decay, lengths=collector.lengths, forgive=forgive)
    if invert:
        curvature.invert({name: dampings[name] for name in renewed})
        optimizer._age.zero_()


def _refuse_or_warn_of_nothing(followed: list[str], no_products: set[str]) -> None:
    """Raise if no layer was passed through, by a mistake of the caller; warn if none has curvature to collect."""
    if not no_products.issuperset(followed):
        raise RuntimeError(
            "no curvature was collected: no backward pass ran through a tracked layer of this model "
            "(was another copy of the model used, or was backward called outside, or with create_graph=True?)"
        )
    warn(
        f"no curvature was collected: layers have a forward of their own, which does not multiply their input by their "
        f"weight ({followed[0]} for one), and steps go on without curvature, as those of SGDG do"
    )


def _dampings(optimizer: MKFAC) -> dict[str, float]:
    """λ by name of the parameter, as groups say it now."""
    for group in optimizer.param_groups:  # a schedule may have changed it
        check_number("damping", group["damping"], 0.0, open_below=True)
    known = names(optimizer)
    return {known[id(parameter)]: float(group["damping"]) for parameter, group, _ in optimizer._entries()}
