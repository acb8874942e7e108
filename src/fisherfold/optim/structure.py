"""The fall-back of the invariance probe: guess scale invariance from the order in which modules feed each other.

Where a model cannot be run on an example input, the one rule is: a matrix layer whose output goes into batch or
instance norms only is invariant row by row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx, nn

from fisherfold.optim.invariance import Finding
from fisherfold.optim.matrix_layers import MATRIX_LAYERS
from fisherfold.optim.replica import unwrap

NORMS_PER_CHANNEL = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
NORMS_PER_SAMPLE = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def guess_from_structure(model: nn.Module) -> dict[str, Finding]:
    """Guess the scale-invariant weights from the data flow between modules, without running the model.

    A matrix layer is called row invariant when every use of its output is a batch or instance norm, and nothing else
    uses its weight: read off the symbolic trace, or, where the model cannot be traced, off neighbours in an
    ``nn.Sequential``. It sees no functional normalisation and no layer or group norm, so it misses more than the probe;
    every verdict is marked as a guess.

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
    pairs, how = uses_of_layers(model)
    elsewhere = {id(layer.weight) for layer, user in pairs if not norms_rows(layer, user)}
    invariant = {id(layer.weight) for layer, _ in pairs} - elsewhere
    findings = {}
    nan = float("nan")
    for name, parameter in model.named_parameters():
        if id(parameter) in invariant:
            reason = f"guess: all its uses are batch or instance norms ({how})"
            findings[name] = Finding("row", parameter.shape[0], nan, nan, reason, guessed=True)
        else:
            findings[name] = Finding("none", 0, nan, nan, f"guess: not seen before a norm ({how})", guessed=True)
    return findings


def norms_rows(layer: Any, user: nn.Module | None) -> bool:
    """Whether a module normalises every row of the layer before it: a norm per channel, with as many channels as rows.

    Args:
        layer: a matrix layer.
        user: what takes its output.

    Returns:
        False for a batch norm over another axis than the layer's outputs.
    """
    return isinstance(user, NORMS_PER_CHANNEL) and user.num_features == len(layer.weight)


def uses_of_layers(model: nn.Module) -> tuple[list[tuple[Any, nn.Module | None]], str]:
    """Where the outputs of matrix layers go.

    Args:
        model: any module.

    Returns:
        Pairs of a matrix layer and a module that takes its output (None: something else does), and how they were found.
    """
    try:
        return _traced(model), "symbolic trace"
    except Exception:  # tracing runs the user's forward on proxies: anything can be raised
        return _in_sequentials(model), "neighbours in nn.Sequential"


def _traced(model: nn.Module) -> list[tuple[Any, nn.Module | None]]:
    modules = dict(model.named_modules())
    layers = {id(m.weight): m for m in modules.values() if isinstance(m, MATRIX_LAYERS)}
    named = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    pairs: list[tuple[Any, nn.Module | None]] = []
    for node in fx.symbolic_trace(model).graph.nodes:
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        taken = _parameters_taken(node, layer, named)
        pairs += [(layers[key], None) for key in taken if key in layers]  # a use besides that of the layer itself
        if isinstance(layer, MATRIX_LAYERS):
            users = [modules.get(str(u.target)) if u.op == "call_module" else None for u in node.users]
            pairs += [(layer, user) for user in users or [None]]
    return pairs


def _parameters_taken(node: fx.Node, module: nn.Module | None, named: Mapping[str, int]) -> Iterable[int]:
    """The parameters that a node uses by themselves, or through a module that is no matrix layer."""
    if node.op == "get_attr":
        return [named[name] for name in (str(node.target),) if name in named]
    return () if module is None or isinstance(module, MATRIX_LAYERS) else map(id, module.parameters())


def _in_sequentials(model: nn.Module) -> list[tuple[Any, nn.Module | None]]:
    chains = [list(container) for container in model.modules() if isinstance(container, nn.Sequential)]
    pairs = [pair for chain in chains for pair in itertools.pairwise(chain)]
    return [(first, second) for first, second in pairs if isinstance(first, MATRIX_LAYERS)]
