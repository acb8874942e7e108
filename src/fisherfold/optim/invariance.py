"""Which weights of a network are scale invariant: asked of the network itself, by Euler's identity.

A block ``w`` of a weight is scale invariant when ``f(c·w) = f(w)`` for every ``c > 0``; differentiating at ``c = 1``
gives ``<w, ∂f/∂w> = 0`` (Euler). For a weight that is *not* invariant and a random cotangent, the statistic

    |cos(w, ∂f/∂w)| · √dim(w)

behaves like |N(0, 1)|; for an invariant one it is zero up to the ε of the normalisation layer. The probe therefore
draws three cotangents, keeps the finest partition of each weight into blocks of rows for which the statistic is below
``EULER_THRESHOLD`` everywhere (rows: batch norm; blocks of rows: group norm; the whole tensor: layer norm), and confirms
each by a finite rescaling. It works on a float64 copy in training mode, and leaves the model as it was.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

Kind = Literal["row", "group", "tensor", "none"]
EULER_THRESHOLD = 0.02
RESCALING_THRESHOLD = 1e-3
N_COTANGENTS = 3

NORMS_PER_CHANNEL = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
MATRIX_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Finding:
    """What is known about one parameter.

    Attributes:
        kind: ``row``, ``group``, ``tensor`` or ``none``.
        spheres: the number of blocks of rows that are invariant each on its own; 0 for ``none``.
        statistic: the largest |cos|·√dim over cotangents and blocks; NaN for a guess.
        rescaling: the relative change of the output under random rescaling of the blocks; NaN if not tried.
        reason: one sentence.
        guessed: whether it was concluded from the module structure instead of measured.
    """

    kind: Kind
    spheres: int
    statistic: float
    rescaling: float
    reason: str
    guessed: bool = False


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module under the wrappers of ``torch.compile`` and ``DistributedDataParallel``.

    Args:
        model: a module, wrapped or not.

    Returns:
        The innermost module.
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model on a tensor, a tuple of positional or a mapping of keyword arguments.

    Args:
        model: the module.
        inputs: what to give it.

    Returns:
        What it returns.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def find_scale_invariant(model: nn.Module, example_input: Any, *, seed: int = 0) -> dict[str, Finding]:
    """Find the scale-invariant weights of a network by probing it.

    Args:
        model: any module; it is copied, and neither its parameters, buffers, gradients, hooks nor the random state
            are touched.
        example_input: a batch that the model accepts: a tensor, a tuple of positional arguments or a mapping of keyword
            arguments. At least two samples, as for training with batch norm.
        seed: of the random cotangents and factors.

    Returns:
        One finding per parameter name, in the order of ``named_parameters()``.

    Raises:
        ValueError: if the model has no parameters, cannot be copied, rejects the example input or returns no
            differentiable output.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
        >>> {name: f.kind for name, f in find_scale_invariant(net, torch.randn(8, 5)).items() if "weight" in name}
        {'0.weight': 'row', '1.weight': 'none', '3.weight': 'none'}
    """
    model = unwrap(model)
    if next(model.parameters(), None) is None:
        raise ValueError(f"model must have parameters, {type(model).__name__} has none")
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        probe = _Probe(model, example_input, seed)
        candidates = {name: probe.classify(name) for name in probe.parameters}
        return probe.confirm(candidates)


class _Probe:
    """A float64 copy of a model with its outputs' gradients along random cotangents."""

    def __init__(self, model: nn.Module, example_input: Any, seed: int) -> None:
        self.model = _bare_copy(model)
        self.input = _map_tensors(example_input, lambda t: t.detach().double() if t.is_floating_point() else t.detach())
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = dict(self.model.named_parameters())
        self.buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        self.outputs = self._forward()
        self.gradients = self._gradients()

    def _forward(self) -> list[Tensor]:
        """The floating outputs, from the same random state and buffers every time."""
        torch.manual_seed(self.seed)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name])
        try:
            outputs = _tensors(call(self.model, self.input))
        except Exception as error:
            shapes = [tuple(t.shape) for t in _tensors(self.input)]
            raise ValueError(
                f"example_input (shapes {shapes}) was rejected by {type(self.model).__name__} in float64 training mode: {error}"
            ) from error
        outputs = [t for t in outputs if t.is_floating_point()]
        if not any(t.requires_grad for t in outputs):
            raise ValueError(f"{type(self.model).__name__} returned no differentiable tensor for example_input")
        return outputs

    def _gradients(self) -> list[tuple[Tensor | None, ...]]:
        live = [t for t in self.outputs if t.requires_grad]
        found = []
        for index in range(N_COTANGENTS):
            cotangents = [torch.randn(t.shape, generator=self.generator, dtype=t.dtype).to(t.device) for t in live]
            found.append(
                torch.autograd.grad(
                    live,
                    list(self.parameters.values()),
                    cotangents,
                    retain_graph=index + 1 < N_COTANGENTS,
                    allow_unused=True,
                )
            )
        return found

    def classify(self, name: str) -> Finding:
        """The finest invariant partition of one parameter that Euler's identity allows."""
        weight = self.parameters[name].detach()
        if weight.ndim < 2:
            return Finding("none", 0, float("nan"), float("nan"), "a vector: gains, shifts and biases stay Euclidean")
        position = list(self.parameters).index(name)
        gradients = [g for g in (row[position] for row in self.gradients) if g is not None]
        if not gradients or not any(bool(g.abs().max() > 0) for g in gradients):
            return Finding("none", 0, 0.0, float("nan"), "the output does not depend on it")
        rows = weight.shape[0]
        coarsest = 0.0
        for spheres in [s for s in range(rows, 0, -1) if rows % s == 0]:
            coarsest = max(_euler_statistic(weight, g, spheres) for g in gradients)
            if coarsest < EULER_THRESHOLD:
                kind: Kind = "row" if spheres == rows else "tensor" if spheres == 1 else "group"
                return Finding(kind, spheres, coarsest, float("nan"), "Euler's identity holds")
        return Finding("none", 0, coarsest, float("nan"), f"Euler's identity fails: |cos|·√dim = {coarsest:.2g}")

    def confirm(self, candidates: dict[str, Finding]) -> dict[str, Finding]:
        """Rescale all candidates at once; if that changes the output, each by itself."""
        names = [name for name, finding in candidates.items() if finding.kind != "none"]
        joint = self.rescaling_change(names, candidates) if names else 0.0
        confirmed = dict(candidates)
        for name in names:
            finding = candidates[name]
            change = joint if joint < RESCALING_THRESHOLD else self.rescaling_change([name], candidates)
            if change < RESCALING_THRESHOLD:
                reason = f"Euler's identity holds and rescaling changes the output by {change:.0e}"
                confirmed[name] = Finding(finding.kind, finding.spheres, finding.statistic, change, reason)
            else:
                reason = f"Euler's identity holds by chance: rescaling changes the output by {change:.1e}"
                confirmed[name] = Finding("none", 0, finding.statistic, change, reason)
        return confirmed

    def rescaling_change(self, names: list[str], findings: Mapping[str, Finding]) -> float:
        """The relative change of the outputs when the blocks of the named weights are multiplied by U(½, 2)."""
        saved = {name: self.parameters[name].detach().clone() for name in names}
        with torch.no_grad():
            for name in names:
                weight, blocks = self.parameters[name], findings[name].spheres
                factors = 0.5 + 1.5 * torch.rand(blocks, 1, generator=self.generator, dtype=weight.dtype)
                weight.copy_((saved[name].reshape(blocks, -1) * factors.to(weight.device)).reshape(weight.shape))
            changed = self._forward_without_graph()
            for name in names:
                self.parameters[name].copy_(saved[name])
        base = sum(float(t.detach().square().sum()) for t in self.outputs)
        difference = sum(float((s - t.detach()).square().sum()) for s, t in zip(changed, self.outputs, strict=True))
        return (difference / max(base, 1e-300)) ** 0.5

    def _forward_without_graph(self) -> list[Tensor]:
        with torch.enable_grad():
            return [t.detach() for t in self._forward()]


def _euler_statistic(weight: Tensor, gradient: Tensor, spheres: int) -> float:
    """The largest |cos(w, g)|·√dim over the blocks; blocks without a gradient carry no evidence."""
    w, g = weight.reshape(spheres, -1), gradient.reshape(spheres, -1)
    scale = w.norm(dim=1) * g.norm(dim=1)
    alive = g.norm(dim=1) > 1e-12 * gradient.norm()
    cosine = (w * g).sum(dim=1).abs() / scale.clamp_min(1e-300)
    return float((cosine * alive).max()) * w.shape[1] ** 0.5


def _bare_copy(model: nn.Module) -> nn.Module:
    """A float64 copy in training mode, without the user's own hooks (they may write where they should not)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clone = copy.deepcopy(model).double().train()
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be copied for the probe: {error}") from error
    for module in clone.modules():
        for hooks in (module._forward_hooks, module._backward_hooks, module._forward_pre_hooks, module._backward_pre_hooks):
            # hooks that are objects (weight norm, spectral norm) are part of the model; functions are the user's
            for key in [k for k, h in hooks.items() if isinstance(h, types.FunctionType | types.MethodType | partial)]:
                del hooks[key]
        module._compiled_call_impl = None
    for parameter in clone.parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
    return clone


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and objects with attributes."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [t for value in tree.values() for t in _tensors(value)]
    if isinstance(tree, tuple | list):
        return [t for value in tree for t in _tensors(value)]
    if hasattr(tree, "__dataclass_fields__"):
        return [t for value in vars(tree).values() for t in _tensors(value)]
    return []


def _map_tensors(tree: Any, function: Any) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(_map_tensors(value, function) for value in tree)
    return tree


def guess_from_structure(model: nn.Module) -> dict[str, Finding]:
    """Guess the scale-invariant weights from the data flow between modules, without running the model.

    A matrix layer is called row invariant when every use of its output is a batch or instance norm: read off the
    symbolic trace, or, where the model cannot be traced, off neighbours in an ``nn.Sequential``. It sees no functional
    normalisation and no layer or group norm, so it misses more than the probe; every verdict is marked as a guess.

    Args:
        model: any module.

    Returns:
        One finding per parameter name.

    Raises:
        ValueError: if the model has no parameters.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
        >>> guess_from_structure(net)["0.weight"].reason
        'guess: all its uses are batch or instance norms (symbolic trace)'
    """
    model = unwrap(model)
    if next(model.parameters(), None) is None:
        raise ValueError(f"model must have parameters, {type(model).__name__} has none")
    try:
        invariant, how = _traced(model), "symbolic trace"
    except Exception:  # tracing runs the user's forward on proxies: anything can be raised
        invariant, how = _in_sequentials(model), "neighbours in nn.Sequential"
    findings = {}
    nan = float("nan")
    for name, parameter in model.named_parameters():
        if id(parameter) in invariant:
            reason = f"guess: all its uses are batch or instance norms ({how})"
            findings[name] = Finding("row", parameter.shape[0], nan, nan, reason, guessed=True)
        else:
            findings[name] = Finding("none", 0, nan, nan, f"guess: not seen before a norm ({how})", guessed=True)
    return findings


def _traced(model: nn.Module) -> set[int]:
    graph = fx.symbolic_trace(model).graph
    modules = dict(model.named_modules())
    verdicts: dict[int, bool] = {}
    for node in graph.nodes:
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, MATRIX_LAYERS):
            users = [modules.get(str(u.target)) if u.op == "call_module" else None for u in node.users]
            normed = bool(users) and all(isinstance(u, NORMS_PER_CHANNEL) for u in users)
            verdicts[id(layer.weight)] = verdicts.get(id(layer.weight), True) and normed
    return {key for key, normed in verdicts.items() if normed}


def _in_sequentials(model: nn.Module) -> set[int]:
    found: set[int] = set()
    for container in model.modules():
        if isinstance(container, nn.Sequential):
            children = list(container)
            found |= {
                id(first.weight)
                for first, second in zip(children, children[1:], strict=False)
                if isinstance(first, MATRIX_LAYERS) and isinstance(second, NORMS_PER_CHANNEL)
            }
    return found
