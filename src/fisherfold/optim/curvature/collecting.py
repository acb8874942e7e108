"""Curvature that collects itself.

When hooks are installed, running means of the factors, and their inverses.

Factors, running means and inverses are kept in the state of the optimizer, by parameter, so that
checkpoints, copies and wrappers see them. Factors are collected in the second step and then in
every ``every``-th; inverses are renewed after collections number 1, 2, 4, 8, 16 and then after
every tenth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fisherfold.fisher.damped import FactorError
from fisherfold.fisher.rows import MATRIX_LAYERS
from fisherfold.optim.curvature.hooks import Collector
from fisherfold.optim.curvature.inverse import (
    Preconditioner,
    exact,
    own_precision,
    relative,
)
from fisherfold.optim.distributed import any_process, is_sharded, sum_over_processes
from fisherfold.warn import warn

DECAY = 0.95  # of the running means
MAX_ORDER = 8192  # of a factor: a vocabulary has none
PATIENCE = 50  # steps without curvature before a warning
SHARDED = (
    "direction='natural' and 'kfac' do not work with sharded parameters (FSDP2); use "
    "direction='spectral'"
)
BOUND = 2.2  # of the gradient at the logits, in the 1-norm: 2 for a mean of cross-entropies
INVERSE = ("left", "right", "coefficients", "base")
State = dict[str, Tensor]


class Curvature:
    """The curvature of the weights whose direction is natural."""

    def __init__(
        self, every: int, process_group: Any, *, relative: bool, mean: bool = True
    ) -> None:
        self.every, self.group, self.relative, self.mean = every, process_group, relative, mean
        self.collector: Collector | None = None
        self.layers: dict[str, list[nn.Module]] = {}
        self.model: nn.Module | None = None
        self.refused: dict[str, str] = {}
        self.doubted = False
        # what has scaled the losses of ordinary steps
        self.scaler: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "group": None, "collector": None}

    def follow(self, model: nn.Module | None, entries: Mapping[str, Any]) -> None:
        """Find the layers of the weights to follow."""
        if model is None or not entries:
            return
        if any(is_sharded(entry.parameter) for entry in entries.values()):
            raise NotImplementedError(SHARDED)
        self.model, self.layers, self.refused, self.collector = model, {}, {}, None
        names = {id(entry.parameter): name for name, entry in entries.items()}
        users: dict[str, list[nn.Module | None]] = {}
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in names:
                    good = isinstance(module, MATRIX_LAYERS) and key == "weight"
                    users.setdefault(names[id(parameter)], []).append(module if good else None)
        for name, modules in users.items():
            order = max(len(entries[name].parameter), entries[name].parameter[0].numel())
            if any(module is None for module in modules):
                self.refused[name] = "no Linear or convolution: first order"
            elif order > MAX_ORDER:
                self.refused[name] = f"a factor would have order {order}: first order"
            else:
                self.layers[name] = modules  # type: ignore[assignment]

    # ------------------------------------------------------------------ inside of step

    def prepare(self, first: dict[str, Any]) -> None:
        """Install the hooks if the next step is one that collects; the first group counts steps."""
        if self.collector is not None:
            self.collector.detach()
        steps = first.get("steps", 0)
        if self.every and (steps == 1 or (steps and steps % self.every == 0)):
            first["due"] = 1
        if self.layers and first.get("due"):
            self._collector().attach()

    def take_up(self, optimizer: Any, steps: int) -> None:
        """Take up what the passes since the last step have collected."""
        curved = optimizer._curved() if steps == PATIENCE else {}
        if curved and not any("A" in optimizer.state[e.parameter] for e in curved.values()):
            warn(
                "no curvature has been collected in 50 steps, so the direction is that of the "
                "gradient; train through "
                "the module that the optimizer was given, or call refresh(batches, loss_fn); "
                "report() says more"
            )
        first = optimizer.param_groups[0]
        if not self.layers or not first.get("due"):
            return
        collector = self._collector()
        lost = any_process(not collector.attached, self.group)
        collector.detach()
        if lost:  # the model has been evaluated in between, in some process: the next step collects
            return
        first["due"] = 0
        entries = optimizer._curved()
        if any(is_sharded(e.parameter) for e in entries.values()):
            raise NotImplementedError(SHARDED)
        with own_precision(next(iter(entries.values())).parameter.device):
            self._fold(optimizer, entries, DECAY)

    def _collector(self) -> Collector:
        if self.collector is None:
            assert self.model is not None
            self.collector = Collector(self.model, self.layers)
        return self.collector

    def _fold(self, optimizer: Any, entries: Mapping[str, Any], decay: float) -> None:
        """Merge new factors into the running means.

        And renew the inverses when it is their turn.
        """
        collector = self._collector()
        for name in collector.refused:
            self.refused[name] = "its module does not multiply by its weight: first order"
        bad = not all(
            bool(torch.isfinite(t).all())
            for s in collector.sums.values()
            for t in (s.sum_a, s.sum_g)
        )
        if any_process(bad, self.group):
            if not decay:  # with a GradScaler some steps are not finite
                warn("the curvature of these batches is not finite; the last one stays")
            return
        if not any_process(bool(collector.sums), self.group):
            return
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        if decay:
            if not self.relative:
                self._check_terms(collector, scale)
            collector.close(mean=self.mean)
        self._share(collector)
        for name, sums in collector.sums.items():
            a, g = sums.finish()
            entry, state = entries[name], optimizer.state[entries[name].parameter]
            if decay:
                g.div_(scale**2)
            if entry.spheres:  # at unit norm
                blocks = entry.parameter.detach().reshape(entry.spheres, -1).to(g.dtype)
                lengths = torch.linalg.vector_norm(blocks, dim=1).repeat_interleave(
                    len(g) // entry.spheres
                )
                g.mul_(lengths[:, None]).mul_(lengths[None, :])
            if decay and "A" in state:
                state["A"].lerp_(a, 1 - decay)
                state["G"].lerp_(g, 1 - decay)
                state["collections"] += 1
            else:
                state["A"], state["G"], state["collections"] = a, g, torch.ones((), device="cpu")
            count = int(state["collections"])
            if not decay or count % 10 == 0 or (count < 20 and math.log2(count).is_integer()):
                self._invert(state, name, optimizer)
        collector.sums = {}

    def _invert(self, state: State, name: str, optimizer: Any) -> None:
        damping = float(
            next(g["damping"] for g in optimizer.param_groups if name in g.get("param_names", ()))
        )
        try:
            if self.relative:
                inverse = relative(state["A"], state["G"], damping, name=name)
            else:
                inverse = exact(
                    state["A"], state["G"], damping, start=self.inverse(state), name=name
                )
        except FactorError as error:
            warn(f"{error}; the last inverse stays")
            return
        found = inverse.tensors()
        for key in INVERSE:
            if key in state and key in found and state[key].shape == found[key].shape:
                state[key].copy_(found[key])  # a captured CUDA graph reads this memory
            elif key in found:
                state[key] = found[key]
            else:
                state.pop(key, None)

    def inverse(self, state: State) -> Preconditioner | None:
        """The damped inverse in the state of a parameter, if there is one."""
        return Preconditioner(*(state.get(key) for key in INVERSE)) if "left" in state else None  # type: ignore[arg-type]

    def _share(self, collector: Collector) -> None:
        """Sum statistics over processes, in the same order everywhere."""
        names = sorted(collector.sums)
        sum_over_processes([t for n in names for t in collector.sums[n].tensors()], self.group)

    def _check_terms(self, collector: Collector, scale: float) -> None:
        if self.mean and collector.unsure:
            self._doubt(
                "the model returns nothing but its loss, so that the number of its terms is not "
                "known"
            )
        elif self.mean and collector.size > BOUND * scale:
            self._doubt(
                "the loss is no mean over its terms, or it is scaled: divide it by the number of "
                "micro-batches, say "
                "reduction='sum', or pass grad_scaler="
            )

    def _doubt(self, reason: str) -> None:
        if not self.doubted:
            self.doubted = True
            warn(
                f"{reason}; absolute damping may be off. The damping of "
                f"SphereOptimizer(direction='natural') is "
                "relative and needs none of this"
            )

    # ------------------------------------------------------------------ on demand

    def refresh(
        self, optimizer: Any, batches: Iterable[Any], loss_fn: Callable[..., Tensor], sampler: Any
    ) -> None:
        """Collect from whole batches and renew the inverses at once.

        See ``SphereOptimizer.refresh``.
        """
        if not self.layers or self.model is None:
            raise ValueError(
                "no weight of this optimizer has a natural direction: there is nothing to refresh"
            )
        draw = _sampler(sampler, loss_fn)
        entries, collector = optimizer._curved(), self._collector()
        with (
            _untouched(self.model, [e.parameter for e in optimizer._entries()]),
            torch.enable_grad(),
        ):
            collector.attach()
            try:
                for batch in batches:
                    _backward(self.model, batch, loss_fn, draw)
                    collector.close(mean=self.mean)
            finally:
                collector.detach()
        if not any_process(bool(collector.sums), self.group):
            raise ValueError("refresh got no batch that reaches a weight with a natural direction")
        with torch.no_grad(), own_precision(next(iter(entries.values())).parameter.device):
            self._fold(optimizer, entries, 0.0)


def _backward(
    model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor], draw: Callable[..., Tensor] | None
) -> None:
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise ValueError(f"refresh takes pairs of inputs and targets, got {type(batch).__name__}")
    inputs, targets = batch[0], batch[1]
    outputs = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    if draw is not None:
        with torch.no_grad():
            targets = draw(outputs.detach())
    loss_fn(outputs, targets).backward()  # type: ignore[no-untyped-call]


def _sampler(sampler: Any, loss_fn: Any) -> Callable[..., Tensor] | None:
    """What draws targets from outputs."""
    if sampler is None or callable(sampler):
        return sampler
    if sampler != "mc":
        raise ValueError(f"sampler must be 'mc' or a function of the outputs, got {sampler!r}")
    if isinstance(loss_fn, nn.CrossEntropyLoss) or loss_fn is nn.functional.cross_entropy:
        return lambda z: torch.distributions.Categorical(logits=z.movedim(1, -1).float()).sample()  # type: ignore[no-untyped-call]
    if (
        isinstance(loss_fn, nn.BCEWithLogitsLoss)
        or loss_fn is nn.functional.binary_cross_entropy_with_logits
    ):
        return lambda z: torch.bernoulli(torch.sigmoid(z))
    if isinstance(loss_fn, nn.MSELoss) or loss_fn is nn.functional.mse_loss:
        return lambda z: z + torch.randn_like(z)
    raise ValueError(
        f"no way is known to sample the targets of {loss_fn!r}: give sampler=, a function of the "
        f"outputs"
    )


@contextmanager
def _untouched(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[None]:
    """A context that leaves gradients, buffers and modes of a model as they were."""
    gradients = [p.grad for p in parameters]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    for p in parameters:
        p.grad = None
    model.train()
    try:
        yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for module, training in modes:
            module.training = training
