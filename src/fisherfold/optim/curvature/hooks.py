"""Hooks that collect Kronecker factors from ordinary forward and backward passes.

Both factors of a layer are formed when the gradient of its output arrives, so that passes without a backward pass, in
evaluation mode or under ``no_grad`` count for neither. The hooks are installed for single steps: between them the model
runs untouched, compiled or not. A compiled model runs eagerly while they are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fisherfold.optim.curvature.factors import FactorSums
from fisherfold.optim.curvature.inverse import own_precision
from fisherfold.optim.curvature.layers import input_rows, is_product, output_rows


class Collector:
    """Collects the factors of some weights while it is attached."""

    def __init__(self, model: nn.Module, layers: Mapping[str, list[nn.Module]], max_rows: int | None = 2048) -> None:
        self.model, self.layers, self.max_rows = model, dict(layers), max_rows
        self.sums: dict[str, FactorSums] = {}
        self.terms = 0.0
        self.refused: set[str] = set()
        self.measured = min(
            (name for name, users in self.layers.items() if getattr(users[0], "groups", 1) == 1),
            key=lambda name: self.layers[name][0].weight.numel(),  # type: ignore[operator]
            default="",
        )
        self.cross: Tensor | None = None
        self._calls = 0
        self._handles: list[RemovableHandle] = []
        self._pending = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies of an optimizer, and of a model with hooks, begin without a collector."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def attached(self) -> bool:
        """Whether the hooks are installed."""
        return bool(self._handles)

    def attach(self) -> None:
        """Install the hooks and forget what was collected."""
        self.detach()
        self.sums, self.terms, self._pending, self.cross = {}, 0.0, 0.0, None
        self._handles = [self.model.register_forward_hook(_ModelHook(self), with_kwargs=True)]
        for name, layers in self.layers.items():
            for layer in layers:
                # before other hooks, which may change the output
                handle = layer.register_forward_hook(_LayerHook(self, name), with_kwargs=True, prepend=True)
                self._handles.append(handle)
        _run_eagerly(True)

    def detach(self) -> None:
        """Remove the hooks."""
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            _run_eagerly(False)

    def factors(self, *, mean: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """The factors A and G by the name of the weight, for a loss that is a mean or a sum."""
        terms = max(self.terms, 1.0)
        return {name: sums.finish(terms, mean=mean) for name, sums in self.sums.items()}

    def see_outputs(self, terms: float) -> None:
        """Count the terms of a loss on these outputs once a gradient arrives from it."""
        self._pending = terms

    def add(self, name: str, layer: nn.Module, x: Tensor, gradient: Tensor) -> None:
        """Add one use of a layer."""
        if not self.attached or torch.is_grad_enabled():
            return  # with create_graph: a gradient that the loss is made of, not that of the loss
        self.terms, self._pending = self.terms + self._pending, 0.0
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if name not in self.sums:
            self.sums[name] = FactorSums.empty(weight, int(getattr(layer, "groups", 1)))
        self._calls += 1
        phase = self._calls // max(len(self.layers), 1)
        with torch.no_grad(), own_precision(x.device):
            self.sums[name].add(layer, x, gradient.detach(), max_rows=self.max_rows, phase=phase)
            if name == self.measured:  # the gradient as it is before anybody scales or clips it
                rows = input_rows(layer, x)[0].to(weight.dtype)
                cross = (output_rows(layer, gradient.detach()).to(rows.dtype).mT @ rows).to(self.sums[name].a.dtype)
                self.cross = cross if self.cross is None else self.cross + cross


class _ModelHook:
    """Counts the terms of the loss: the rows of the model's first output."""

    def __init__(self, collector: Collector | None) -> None:
        self.collector = collector

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModelHook:
        return _ModelHook(None)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.collector is None or not torch.is_grad_enabled():
            return
        output = getattr(output, "logits", output)
        while isinstance(output, Mapping | tuple | list) and len(output):
            output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
        inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim]
        if isinstance(output, Tensor) and output.requires_grad and output.ndim > 1:
            classes = output.shape[1] if output.ndim > 3 else output.shape[-1]
            self.collector.see_outputs(output.numel() / max(classes, 1))
        elif inputs:  # the model returns its loss
            self.collector.see_outputs(float(len(inputs[0])))


class _LayerHook:
    def __init__(self, collector: Collector | None, name: str) -> None:
        self.collector, self.name = collector, name

    def __deepcopy__(self, memo: dict[int, Any]) -> _LayerHook:
        return _LayerHook(None, self.name)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        collector, name = self.collector, self.name
        if collector is None or not layer.training or not (isinstance(output, Tensor) and output.requires_grad):
            return
        x = (args[0] if args else kwargs["input"]).detach()
        if not is_product(layer, x, output.detach()):
            collector.refused.add(name)
            return
        # the root model may not be called at all, only its parts
        if not collector._pending:
            collector.see_outputs(float(len(x)))
        output.register_hook(lambda gradient: collector.add(name, layer, x, gradient))  # type: ignore[no-untyped-call]


def _run_eagerly(eagerly: bool) -> None:
    """Let compiled models run eagerly, so that hooks see their layers."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager" if eagerly else "default")
