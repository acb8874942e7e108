"""Passes over batches from which curvature is taken: with hooks, with sampled targets, with per-sample gradients.

The empirical Fisher uses the targets of the data; the Monte-Carlo Fisher draws them from the model's own predictive
distribution, which is the Fisher information; both see, under batch norm in training mode, hook gradients that leave
out how a sample moves the batch's statistics. The per-sample Fisher takes the true gradients ∇ψ_n through
``torch.func`` and costs N backward passes: for study, on small networks. Weighted losses are taken as in ``weighting``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fisherfold.optim.factors import Collector, Pass
from fisherfold.optim.losses import (
    LossFunction,
    Sampler,
    check_reduction,
    form_of,
    likelihood,
    n_terms,
    summed_axes,
    terms_of_samples,
)
from fisherfold.optim.outputs import graph_nodes
from fisherfold.optim.replica import Buffers, call, own_draws, uncompiled
from fisherfold.optim.weighting import weighted_terms
from fisherfold.warn import warn


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Leave buffers (running statistics) and the random state as they were.

    Args:
        model: the module that will be run.

    Yields:
        Nothing.
    """
    buffers = Buffers(model)
    with own_draws(model):
        try:
            yield
        finally:
            buffers.put_back()


def pairs(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Batches, looked at before they are taken apart: two samples, or the two keys of a mapping, are no pair.

    Args:
        batches: what should be pairs of inputs and targets.

    Yields:
        The pairs.

    Raises:
        TypeError: if something else is among them.
        ValueError: if there are none.
    """
    try:
        remaining = iter(batches)
    except TypeError:
        raise TypeError(f"batches must be pairs of inputs and targets, such as [(x, y)], got {batches!r}") from None
    empty = True
    for batch in remaining:
        empty = False
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            size = tuple(batch.shape) if isinstance(batch, Tensor) else len(batch) if hasattr(batch, "__len__") else "?"
            raise TypeError(
                "batches must hold pairs of inputs and targets, such as [(x, y)], "
                f"got a {type(batch).__name__} of size {size} among them"
            )
        yield batch[0], batch[1]
    if empty:
        raise ValueError("batches is empty: give at least one pair of inputs and targets, not an iterator at its end")


def telling_pairs(collector: Collector, batches: Iterable[Any], loss_fn: LossFunction) -> Iterator[tuple[Any, Any]]:
    """Batches without those whose targets are all ignored: no gradient of theirs would look like one of zero.

    Args:
        collector: gets empty sums, to which other processes may add theirs, where no batch is left.
        batches: what should be pairs of inputs and targets.
        loss_fn: its ``ignore_index`` is honoured.

    Yields:
        The pairs.
    """
    told = False
    for inputs, targets in pairs(batches):
        classes = isinstance(targets, Tensor) and not targets.is_floating_point()
        if classes and targets.numel() and not bool(terms_of_samples(targets, loss_fn, ()).any()):
            continue
        told = True
        yield inputs, targets
    if not told:
        collector.sums |= {tracked.name: tracked.new_sums() for tracked in collector.weights}
        warn("all targets are ignored by the loss: no curvature was taken from them")


def add_batches(
    collector: Collector,
    batches: Iterable[tuple[Any, Any]],
    loss_fn: LossFunction,
    reduction: str,
    draw: Sampler | None,
    generator: torch.Generator,
) -> None:
    """Add the factors that hooks see in forward and backward passes, which leave ``.grad`` and the model alone.

    Args:
        collector: the model, what is tracked, and the sums to add to.
        batches: pairs of inputs and targets.
        loss_fn: the loss.
        reduction: how it is declared to be reduced; the first batch tells whether it is.
        draw: draws targets in place of those of the data, if they are to be drawn.
        generator: the source of those draws.
    """
    weights = [tracked.weight for tracked in collector.weights]
    summed: dict[Any, tuple[int, ...]] = {}
    with preserved(collector.model), uncompiled(), torch.enable_grad(), collector:
        for index, (inputs, targets) in enumerate(telling_pairs(collector, batches, loss_fn)):
            this_pass = Pass()
            collector.begin_by(partial(_begun, this_pass))
            outputs = call(collector.model, inputs)
            known = outputs.detach() if isinstance(outputs, Tensor) else outputs
            drawn = None if draw is None else draw(known, targets, generator)
            goals = targets if drawn is None else drawn
            if index == 0:
                check_reduction(outputs, targets, loss_fn, loss_fn(outputs, targets), reduction)
            # classes have an axis less than the shares in whose place they are drawn, or that other batches have
            if (form := form_of(goals)) not in summed:
                summed[form] = summed_axes(outputs, goals, loss_fn, reduction)
            if (weighted := weighted_terms(loss_fn, targets)) is None:
                this_pass.samples = n_terms(outputs, goals, loss_fn, summed[form], this_pass.samples)
                this_pass.gradient_scale = 1.0 if reduction == "mean" else 1.0 / this_pass.samples
                loss = loss_fn(outputs, goals) if drawn is None else likelihood(loss_fn)(outputs, drawn)
            else:
                # the square of √m ∇ℓ has m in it
                losses = weighted.plain(outputs, weighted.targets if drawn is None else drawn)
                this_pass.samples, this_pass.weights = weighted.total, weighted.of_samples()
                loss = (weighted.weights.sqrt() * losses).sum() / weighted.total
            if weights:
                _run_backward(collector.model, loss, weights)


def _run_backward(model: nn.Module, loss: Tensor, weights: list[nn.Parameter]) -> None:
    """Go through the backward pass for the sake of hooks, and leave ``.grad`` alone."""
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn must return a number that depends on what the model computed, got one without a gradient "
            "(were outputs detached, or computed inside torch.no_grad?)"
        )
    if all(type(node).__name__ != "CheckpointFunctionBackward" for node in graph_nodes([loss])):
        torch.autograd.grad(loss, weights, allow_unused=True)
        return
    # reentrant checkpoints run a backward pass of their own inside, and refuse one that is for some tensors only
    if any(parameter._post_accumulate_grad_hooks for parameter in model.parameters()):
        raise RuntimeError(
            "refresh would run the hooks of parameters that wait for their gradients (an optimizer in the backward "
            "pass?): give the model's checkpoints use_reentrant=False, or collect curvature with statistics()"
        )
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _begun(this_pass: Pass, samples: int) -> Pass:
    """One pass per batch, however many calls it takes; the first says how many samples there are."""
    this_pass.samples = this_pass.samples or samples
    return this_pass


def add_true_gradients(
    collector: Collector, batches: Iterable[tuple[Any, Any]], loss_fn: LossFunction, reduction: str
) -> None:
    """Add the factors of true per-sample gradients D_n: Σ D_nᵀD_n and Σ D_n D_nᵀ.

    A sample's gradient is that of the sum of its terms, whatever the reduction: the terms are those of the other Fisher
    matrices, and so is the number that their sum is divided by.

    Args:
        collector: the model, what is tracked, and the sums to add to; its hooks are not used.
        batches: pairs of inputs and targets.
        loss_fn: the loss; it is applied to one sample at a time.
        reduction: how it is declared to be reduced; the first batch tells whether it is.
    """
    summed: dict[Any, tuple[int, ...]] = {}
    with preserved(collector.model), uncompiled():
        for inputs, targets in telling_pairs(collector, batches, loss_fn):
            if (form := form_of(targets)) not in summed:
                summed[form] = _looked_at(collector.model, inputs, targets, loss_fn, reduction)
            _add_per_sample(collector.model, collector, inputs, targets, loss_fn, reduction, summed[form])


@torch.no_grad()
def _looked_at(model: nn.Module, inputs: Any, targets: Any, loss_fn: LossFunction, reduction: str) -> tuple[int, ...]:
    """The axes that a loss sums over, once it is reduced as declared."""
    with preserved(model):
        outputs = call(model, inputs)
    for what, given in (("outputs", outputs), ("targets", targets)):
        if not isinstance(given, Tensor) or not given.ndim:
            raise TypeError(
                f"fisher='persample' takes samples apart, for which {what} must be a tensor with one entry or row per "
                f"sample, got {'a number' if isinstance(given, Tensor) else f'a {type(given).__name__}'}: take "
                "fisher='empirical'"
            )
    check_reduction(outputs, targets, loss_fn, loss_fn(outputs, targets), reduction)
    return summed_axes(outputs, targets, loss_fn, reduction)


@torch.no_grad()  # transforms of torch.func differentiate all the same
def _add_per_sample(
    model: nn.Module,
    collector: Collector,
    inputs: Any,
    targets: Tensor,
    loss_fn: LossFunction,
    reduction: str,
    summed: tuple[int, ...],
) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = {names[id(p)]: p.detach() for t in collector.weights for p in (t.weight, t.bias) if p is not None}
    weighted = weighted_terms(loss_fn, targets)
    counts = terms_of_samples(targets, loss_fn, summed)
    samples = max(float(counts.sum()), 1.0) if weighted is None else weighted.total

    def losses(parameters: dict[str, Tensor]) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        state = {f"model.{name}": value for name, value in (parameters | buffers).items()}
        outputs = torch.func.functional_call(_Caller(model), state, (inputs,))
        if weighted is not None:
            terms = weighted.weights.sqrt() * weighted.plain(outputs, weighted.targets)
            return terms.reshape(len(terms), -1).sum(1)
        each = torch.vmap(lambda z, y: loss_fn(z[None], y[None]))(outputs, targets)
        return each * counts.to(each.dtype) if reduction == "mean" else each

    gradients = _gradients(losses, chosen)
    with torch.autocast(targets.device.type, enabled=False):
        for tracked in collector.weights:
            entry = collector.sums.setdefault(tracked.name, tracked.new_sums())
            stack = gradients[names[id(tracked.weight)]].flatten(2).to(entry.a.dtype)
            if tracked.bias is not None:
                stack = torch.cat([stack, gradients[names[id(tracked.bias)]].to(entry.a.dtype).unsqueeze(2)], dim=2)
            if tracked.name in collector.lengths:
                stack = stack * collector.lengths[tracked.name].unsqueeze(1)
            entry.a += torch.einsum("nij,nik->jk", stack, stack)
            entry.g += torch.einsum("nij,nkj->ik", stack, stack)
            entry.samples += samples
            entry.rows += len(stack)
            entry.paired = True


def _gradients(losses: Callable[[dict[str, Tensor]], Tensor], at: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of all losses, stacked: in one pass, or one after the other."""
    try:
        values, pullback = torch.func.vjp(losses, at)  # type: ignore[misc]
        (stacks,) = torch.vmap(pullback)(torch.eye(len(values), dtype=values.dtype, device=values.device))
    except RuntimeError:  # not every operation knows these transforms: recurrent layers, norms under autocast
        leaves = {name: value.requires_grad_() for name, value in at.items()}
        with torch.enable_grad():
            each = losses(leaves).unbind()
        gradient = partial(torch.autograd.grad, inputs=list(leaves.values()), retain_graph=True, materialize_grads=True)
        stacks = dict(zip(leaves, map(torch.stack, zip(*map(gradient, each), strict=True)), strict=True))
    return stacks


class _Caller(nn.Module):
    """Calls a module on a batch in any of the accepted forms."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return call(self.model, inputs)
