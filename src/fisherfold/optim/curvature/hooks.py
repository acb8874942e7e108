"""Hooks that collect Kronecker factors from ordinary forward and backward passes.

Both factors of a layer are formed when the gradient of its output arrives, so that passes without a
backward pass, in evaluation mode or under ``no_grad`` count for neither. The hooks are installed
for single steps: between them the model runs untouched, compiled or not. A compiled model runs
eagerly while they are installed. They go when the optimizer goes and when the model is called in
evaluation mode.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fisherfold.fisher.collector import FactorSums
from fisherfold.fisher.rows import input_rows, is_product, output_rows
from fisherfold.optim.curvature.inverse import own_precision

SUMS_TO_ZERO = 1e-2  # of a gradient over its classes, with the rounding of half precision


class Collector:
    """Collects the factors of some weights while it is attached."""

    def __init__(
        self, model: nn.Module, layers: Mapping[str, list[nn.Module]], max_rows: int | None = 1024
    ) -> None:
        self.model, self.layers, self.max_rows = model, dict(layers), max_rows
        self.sums: dict[str, FactorSums] = {}
        self.terms = 0.0
        self.refused: set[str] = set()
        self.unsure = False
        self.size = 0.0
        self._calls = 0
        self._pending = self._counted = 0.0
        self.attached = False
        self._installed = ExitStack()
        weakref.finalize(self, self._installed.close).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies of an optimizer, and of a model with hooks, begin without a collector."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def attach(self) -> None:
        """Install the hooks and forget what was collected."""
        self.detach()
        self.sums = {}
        self.terms = 0.0
        self._pending = 0.0
        self.unsure = False
        self.size = 0.0
        mine, self.attached = weakref.ref(self), True
        handles = [
            self.model.register_forward_pre_hook(_EvaluationHook(mine)),
            self.model.register_forward_hook(_ModelHook(mine), with_kwargs=True),
        ]
        for name, layers in self.layers.items():  # before other hooks, which may change the output
            hook = _LayerHook(mine, name)
            handles += [
                layer.register_forward_hook(hook, with_kwargs=True, prepend=True)
                for layer in layers
            ]
        for handle in handles:
            self._installed.callback(handle.remove)
        if (
            "torch._dynamo" in sys.modules
        ):  # hooks see the layers of compiled models only where these run eagerly
            self._installed.enter_context(torch.compiler.set_stance("force_eager"))

    def detach(self) -> None:
        """Remove the hooks."""
        self._installed.close()
        self.attached = False

    def close(self, *, mean: bool) -> None:
        """End a loss, which is a mean or a sum over all terms since the last one."""
        for sums in self.sums.values():
            sums.close(self.terms, mean=mean)
        self.terms = 0.0

    def see_outputs(self, terms: float, *, unsure: bool = False) -> None:
        """Count the terms of a loss on these outputs once a gradient arrives from it."""
        self._pending = terms
        self.unsure |= unsure

    def see_logits(self, gradient: Tensor) -> None:
        """Count the terms exactly, those with a gradient.

        If the loss is one whose gradients sum to zero over classes.

        For a mean of cross-entropies ‖∂L/∂z‖₁ ≤ 2, whatever the weights of its terms.
        """
        if not self.attached or torch.is_grad_enabled():
            return
        gradient = gradient.detach().float()
        size = gradient.abs().sum()
        for axis in {1, gradient.ndim - 1}:
            if gradient.sum(axis).abs().sum() < SUMS_TO_ZERO * size:
                exact = float((gradient.abs().amax(axis) > 0).sum())
                if self._pending:
                    self._pending = exact
                else:  # the last layer has been there before
                    self.terms += exact - self._counted
                self.size += float(size)
                return

    def add(self, name: str, layer: nn.Module, x: Tensor, gradient: Tensor) -> None:
        """Add one use of a layer."""
        if not self.attached or torch.is_grad_enabled():
            return  # with create_graph: a gradient that the loss is made of, not that of the loss
        if self._pending:
            self.terms += self._pending
            self._counted, self._pending = self._pending, 0.0
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if name not in self.sums:
            self.sums[name] = FactorSums.empty(weight, int(getattr(layer, "groups", 1)))
        self._calls += 1
        phase = self._calls // max(len(self.layers), 1)
        with torch.no_grad(), own_precision(x.device):
            inputs, share = input_rows(layer, x, max_rows=self.max_rows, phase=phase)
            self.sums[name].add(inputs, output_rows(layer, gradient.detach()), share=share)


class _Hook:
    """Knows its collector as long as that lives.

    Copies of a model and saved ones have hooks that do nothing.
    """

    def __init__(self, collector: Any, name: str = "") -> None:
        self.collector, self.name = collector, name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_nobody, self.name)


def _nobody() -> None:
    return None


class _EvaluationHook(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        collector = self.collector()
        if collector is not None and not module.training:
            collector.detach()


class _ModelHook(_Hook):
    """Counts the terms of the loss.

    The rows of the logits, or of the largest of the model's outputs.
    """

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        collector = self.collector()
        if collector is None or not torch.is_grad_enabled():
            return
        found = (
            output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        )
        tensors = [
            t
            for t in pytree.tree_leaves(output if found is None else found)
            if isinstance(t, Tensor)
        ]
        tensors = [t for t in tensors if t.requires_grad and t.ndim > 1]
        inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim]
        if tensors:
            logits = max(tensors, key=Tensor.numel)
            classes = logits.shape[1] if logits.ndim > 3 else logits.shape[-1]
            collector.see_outputs(logits.numel() / max(classes, 1))
            logits.register_hook(lambda gradient: collector.see_logits(gradient))  # type: ignore[no-untyped-call]
        elif inputs:  # the model returns its loss
            collector.see_outputs(float(len(inputs[0])), unsure=True)


class _LayerHook(_Hook):
    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        collector, name = self.collector(), self.name
        if (
            collector is None
            or not layer.training
            or not (isinstance(output, Tensor) and output.requires_grad)
        ):
            return
        x = (args[0] if args else kwargs["input"]).detach()
        if not is_product(layer, x, output.detach()):
            collector.refused.add(name)
            return
        if not collector._pending:  # the root model may not be called at all, only its parts
            collector.see_outputs(float(len(x)))
        output.register_hook(lambda gradient: collector.add(name, layer, x, gradient))  # type: ignore[no-untyped-call]
