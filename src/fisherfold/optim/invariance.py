"""Which weights of a network are scale invariant: asked of the network itself, by Euler's identity.

A block ``w`` of a weight is scale invariant when ``f(c·w) = f(w)`` for every ``c > 0``; differentiating at ``c = 1``
gives ``<w, ∂f/∂w> = 0`` (Euler). For a weight that is *not* invariant and a random cotangent, the statistic

    |cos(w, ∂f/∂w)| · √dim(w)

behaves like |N(0, 1)|; for an invariant one it is zero up to the ε of the normalisation layer. The probe therefore
draws three cotangents, keeps the finest partition of each weight into blocks of rows for which the statistic is below
``EULER_THRESHOLD`` everywhere (rows: batch norm; blocks of rows: group norm; the whole tensor: layer norm), and
confirms each by a finite rescaling. The ε of normalisation layers, which breaks exact invariance, is taken out of the
way for the verdict (divided by 10⁶); its true effect is measured afterwards and reported. The probe works on a float64
copy in training mode, and leaves the model as it was.
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
from torch import Tensor, nn

Kind = Literal["row", "group", "tensor", "none"]
EULER_THRESHOLD = 0.02
RESCALING_THRESHOLD = 1e-3
EPSILON_THRESHOLD = 0.1
N_COTANGENTS = 3


@dataclass(frozen=True)
class Finding:
    """What is known about one parameter.

    Attributes:
        kind: ``row``, ``group``, ``tensor`` or ``none``.
        spheres: the number of blocks of rows that are invariant each on its own; 0 for ``none``.
        statistic: the largest |cos|·√dim over cotangents and blocks; NaN for a guess.
        rescaling: the relative change of the output under random rescaling of the blocks, with the true ε of the
            normalisation layers; NaN if not tried.
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
        # only norms: an ε that multiplies or adds something else is part of the function
        norms = [m for m in self.model.modules() if "Norm" in type(m).__name__]
        self.epsilons = {module: module.eps for module in norms if isinstance(getattr(module, "eps", None), float)}
        self._scale_epsilons(1e-6)
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
            name = type(self.model).__name__
            message = f"example_input (shapes {shapes}) was rejected by {name} in float64 training mode: {error}"
            raise ValueError(message) from error
        outputs = [t for t in outputs if t.is_floating_point()]
        if not any(t.requires_grad for t in outputs):
            raise ValueError(f"{type(self.model).__name__} returned no differentiable tensor for example_input")
        return outputs

    def _gradients(self) -> list[tuple[Tensor | None, ...]]:
        live = [t for t in self.outputs if t.requires_grad]
        found: list[tuple[Tensor | None, ...]] = []
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
        """Rescale all candidates at once; if that changes the output, each by itself; then again with the true ε."""
        names = [name for name, finding in candidates.items() if finding.kind != "none"]
        changes = self._changes(names, candidates, RESCALING_THRESHOLD)
        self._scale_epsilons(1.0)
        true_changes = self._changes(names, candidates, EPSILON_THRESHOLD)
        confirmed = dict(candidates)
        for name in names:
            finding, change, true_change = candidates[name], changes[name], true_changes[name]
            if change >= RESCALING_THRESHOLD:
                reason = f"Euler's identity holds by chance: rescaling changes the output by {change:.1e}"
            elif true_change >= EPSILON_THRESHOLD:
                reason = f"the ε of a norm dominates: rescaling changes the output by {true_change:.1e}"
            else:
                reason = f"Euler's identity holds and rescaling changes the output by {true_change:.0e}"
                confirmed[name] = Finding(finding.kind, finding.spheres, finding.statistic, true_change, reason)
                continue
            confirmed[name] = Finding("none", 0, finding.statistic, change, reason)
        return confirmed

    def _changes(self, names: list[str], findings: Mapping[str, Finding], threshold: float) -> dict[str, float]:
        """The change by each weight, or by all jointly where even that stays below the threshold."""
        if not names:
            return {}
        base = [t.detach() for t in self._forward()]
        joint = self._rescaling_change(names, findings, base)
        if joint < threshold:
            return dict.fromkeys(names, joint)
        return {name: self._rescaling_change([name], findings, base) for name in names}

    def _rescaling_change(self, names: list[str], findings: Mapping[str, Finding], base: list[Tensor]) -> float:
        """The relative change of the outputs when the blocks of the named weights are multiplied by U(½, 2)."""
        saved = {name: self.parameters[name].detach().clone() for name in names}
        for name in names:
            weight, blocks = self.parameters[name], findings[name].spheres
            factors = 0.5 + 1.5 * torch.rand(blocks, 1, generator=self.generator, dtype=weight.dtype)
            weight.data.copy_((saved[name].reshape(blocks, -1) * factors.to(weight.device)).reshape(weight.shape))
        changed = [t.detach() for t in self._forward()]
        for name in names:
            self.parameters[name].data.copy_(saved[name])
        size = sum(float(t.square().sum()) for t in base)
        difference = sum(float((s - t).square().sum()) for s, t in zip(changed, base, strict=True))
        return float((difference / max(size, 1e-300)) ** 0.5)

    def _scale_epsilons(self, factor: float) -> None:
        for module, epsilon in self.epsilons.items():
            module.eps = epsilon * factor  # type: ignore[assignment,operator]


def _euler_statistic(weight: Tensor, gradient: Tensor, spheres: int) -> float:
    """The largest |cos(w, g)|·√dim over the blocks; blocks without a gradient carry no evidence."""
    w, g = weight.reshape(spheres, -1), gradient.reshape(spheres, -1)
    scale = w.norm(dim=1) * g.norm(dim=1)
    alive = g.norm(dim=1) > 1e-12 * gradient.norm()
    cosine = (w * g).sum(dim=1).abs() / scale.clamp_min(1e-300)
    return float((cosine * alive).max()) * w.shape[1] ** 0.5


def _bare_copy(model: nn.Module) -> nn.Module:
    """A float64 copy in training mode, without the user's own hooks (they may write where they should not)."""
    # tensors that a pre-hook recomputes (old-style weight norm) cannot be deep-copied, and need not be
    derived = [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clone = copy.deepcopy(model, {id(t): t.detach() for t in derived}).double().train()
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be copied for the probe: {error}") from error
    for module in clone.modules():
        after = (module._forward_hooks, module._backward_hooks)
        for hooks in (*after, module._forward_pre_hooks, module._backward_pre_hooks):
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
