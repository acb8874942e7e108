"""The fall-back of the invariance probe: guess scale invariance from the order in which modules feed each other.

Where a model cannot be run on an example input, the one rule is: a matrix layer whose output goes into batch or
instance norms only is invariant row by row.
"""

from __future__ import annotations

import itertools

from torch import fx, nn

from fisherfold.optim.invariance import Finding
from fisherfold.optim.replica import unwrap

NORMS_PER_CHANNEL = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
MATRIX_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


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
                for first, second in itertools.pairwise(children)
                if isinstance(first, MATRIX_LAYERS) and isinstance(second, NORMS_PER_CHANNEL)
            }
    return found
