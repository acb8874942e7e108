"""Scale invariance guessed from where the outputs of layers go, for models without an example input.

A matrix layer is invariant row by row when all that becomes of its output is a batch or instance norm, directly or
through what commutes with positive factors per channel (ReLU, pooling, dropout, concatenation of channels). The flow is
read off the symbolic trace of the model, or of each of its parts where the whole cannot be traced.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from fisherfold.optim.invariance.finding import Finding, kind_of

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
PER_CHANNEL = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
PER_SAMPLE = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# f(c x) = c f(x) for c > 0, channel by channel; those of the second line keep shifts as well
HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Identity)
HOMOGENEOUS_FUNCTIONS: set[Any] = {F.relu, torch.relu, "relu", "relu_", F.leaky_relu}
POOL_FUNCTIONS: set[Any] = {
    F.max_pool2d,
    F.avg_pool2d,
    F.adaptive_avg_pool2d,
    torch.cat,
    "contiguous",
}


def guess_from_structure(model: nn.Module) -> dict[str, Finding]:
    """Guess the scale-invariant weights from the data flow between modules, without running the model.

    It sees norms that are modules; the probe (``find_scale_invariant``) sees all of them.

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
        'guess: all its uses are norms (symbolic trace)'
    """
    if next(model.parameters(), None) is None:
        raise ValueError(f"model must have parameters, {type(model).__name__} has none")
    uses: dict[int, list[tuple[int, str]]] = {}
    _collect(
        model, lambda weight, spheres, way: uses.setdefault(id(weight), []).append((spheres, way))
    )
    findings = {}
    for name, parameter in model.named_parameters():
        found = uses.get(id(parameter), [])
        spheres = found[0][0] if len({spheres for spheres, _ in found}) == 1 else 0
        if spheres:
            reason = f"guess: all its uses are norms ({found[0][1]})"
        else:
            reason = "guess: not seen before a norm"
        findings[name] = Finding(
            kind_of(len(parameter) if parameter.ndim else 1, spheres), spheres, reason
        )
    return findings


Report = Callable[[Any, int, str], None]


class _Tracer(fx.Tracer):
    """Norms with an activation of their own, as in timm, are norms."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, PER_CHANNEL + PER_SAMPLE) or super().is_leaf_module(
            m, module_qualified_name
        )


def _collect(model: nn.Module, report: Report) -> None:
    """Report the number of spheres (0: none) for every use of a weight."""
    try:
        graph = _Tracer().trace(model)
    except Exception:  # tracing runs the user's forward on proxies: anything can be raised
        _neighbours(model, report)
        for child in model.children():
            if not isinstance(child, LAYERS):
                _collect(child, report)
        return
    modules = dict(model.named_modules())
    known = {id(p): p for p in model.parameters()}
    for node in graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, LAYERS):
            for spheres in _uses(node, module, modules, set(), shifted=module.bias is not None):
                report(module.weight, spheres, "symbolic trace")
        elif node.op == "get_attr":  # a use besides that of the layer itself
            value: Any = model
            for key in str(node.target).split("."):
                value = getattr(value, key, None)
            if id(value) in known:
                report(value, 0, "symbolic trace")
        elif module is not None and not isinstance(module, LAYERS):
            for parameter in module.parameters():
                report(parameter, 0, "symbolic trace")


def _uses(
    node: fx.Node, layer: Any, modules: dict[str, Any], seen: set[fx.Node], *, shifted: bool
) -> list[int]:
    """What every path from a layer's output ends in: the number of spheres that it makes of the layer's rows."""
    found: list[int] = []
    for user in node.users:
        if user in seen:
            continue
        seen.add(user)
        module = modules.get(str(user.target)) if user.op == "call_module" else None
        target = user.target if user.op in {"call_function", "call_method"} else None
        if isinstance(module, PER_CHANNEL):
            found.append(len(layer.weight) if _channels_match(module, layer, node) else 0)
        elif isinstance(module, PER_SAMPLE) and node.op == "call_module":
            found.append(_blocks(module, layer, shifted))
        elif isinstance(module, HOMOGENEOUS) or (target in HOMOGENEOUS_FUNCTIONS):
            # relu(w·x + b) is not homogeneous in w alone
            found += [0] if shifted else _uses(user, layer, modules, seen, shifted=shifted)
        elif isinstance(module, POOLS) or (target in POOL_FUNCTIONS and _keeps_channels(user)):
            found += _uses(user, layer, modules, seen, shifted=shifted)
        else:
            found.append(0)
    return found or [0]


def _keeps_channels(node: fx.Node) -> bool:
    if node.target is not torch.cat:
        return True
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return bool(axis == 1)


def _channels_match(norm: Any, layer: Any, node: fx.Node) -> bool:
    """Whether a norm per channel is over the layer's outputs; after a concatenation it has more channels."""
    same: bool = norm.num_features == len(layer.weight)
    return same or _after_cat(node)


def _after_cat(node: fx.Node) -> bool:
    """Whether a node is a concatenation, or has one right before it along the way from a layer."""
    return node.target is torch.cat or any(
        isinstance(a, fx.Node) and _after_cat(a) for a in node.args[:1]
    )


def _blocks(norm: Any, layer: Any, shifted: bool) -> int:
    """The spheres that a norm over several channels makes: a bias in front of it would have to be scaled along."""
    if shifted:
        return 0
    rows = len(layer.weight)
    if isinstance(norm, nn.GroupNorm):
        return norm.num_groups if norm.num_channels == rows else 0
    return int(isinstance(layer, nn.Linear) and tuple(norm.normalized_shape) == (rows,))


def _neighbours(model: nn.Module, report: Report) -> None:
    """Pairs of a layer and the norm that follows in an ``nn.Sequential``; elsewhere nobody knows what follows."""
    for child, following in pairwise([*model.children(), None]):
        if isinstance(child, LAYERS):
            rows = len(child.weight)
            normed = (
                isinstance(model, nn.Sequential)
                and isinstance(following, PER_CHANNEL)
                and following.num_features == rows
            )
            report(child.weight, rows if normed else 0, "order in nn.Sequential")
