"""Functions that hold on to a module, in a copy of that module.

``copy.deepcopy`` takes functions as they are: a lambda in an attribute (``self.block = lambda x: self.norm(x)``) or a
wrapper in the place of ``forward`` (``model.forward = wrapped(model.forward)``, as tools for mixed precision set it)
would run the original inside its copy.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from fisherfold.optim.outputs import graph_nodes


def rebind(clone: nn.Module, memo: dict[int, Any]) -> None:
    """Let functions among the attributes of copied modules hold on to what was copied.

    Args:
        clone: the copy.
        memo: of ``copy.deepcopy``, the copies by the ``id`` of their originals.
    """
    for module in clone.modules():
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType):
                vars(module)[name] = _rebound(value, memo)


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """What stands for a value in the copy: of a function one with other values in its closure."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in memo:
        return types.MethodType(_rebound(value.__func__, memo), memo[id(value.__self__)])
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    cells = tuple(types.CellType() for _ in value.__closure__)
    function = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    function.__kwdefaults__ = value.__kwdefaults__
    vars(function).update(vars(value))
    memo[id(value)] = function  # before its closure, which may hold the function itself
    for new, old in zip(cells, value.__closure__, strict=True):
        with contextlib.suppress(ValueError):  # where nothing has been put there yet
            new.cell_contents = _rebound(old.cell_contents, memo)
    return function


def runs_through(outputs: Iterable[Tensor], parameters: Iterable[Tensor]) -> bool:
    """Whether outputs depend on one of some parameters, by their graph.

    Args:
        outputs: of a forward pass.
        parameters: leaves of graphs.

    Returns:
        The answer; reentrant checkpoints hide what is inside.
    """
    # by their memory: those of scripted modules are other objects every time
    wanted = {parameter.data_ptr() for parameter in parameters if parameter.numel()}
    leaves = (node.variable for node in graph_nodes(outputs) if hasattr(node, "variable"))
    return any(leaf.data_ptr() in wanted for leaf in leaves)
