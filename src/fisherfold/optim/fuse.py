"""What the compiler is for here, and what it is kept away from.

Updates are compiled into a few kernels, with the plain ones where the compiler fails. What looks at the versions and
addresses of tensors, or puts hooks on modules, is run as it is written.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from fisherfold.warn import warn

Update = Callable[..., None]
Given = ParamSpec("Given")
Returned = TypeVar("Returned")
SCHEDULED = ("lr", "momentum", "beta1", "weight_decay")


@lru_cache
def fused(update: Update) -> Update:
    """An update of one parameter compiled, one kernel or few per shape; all optimizers of a process share them.

    Kernels for fixed shapes are faster than one for all, and a network has more shapes of weights than the compiler's
    usual limit of recompilations allows, beyond which it would go on uncompiled. Numbers are constants of a kernel, and
    every value of a schedule would be compiled: learning rates are handed over as tensors, and so are the others of
    ``SCHEDULED`` once they have been seen to change.

    Args:
        update: a function of a parameter and other tensors, some of which it changes in place, and of numbers, of
            which it takes those of ``SCHEDULED`` as tensors without dimensions too (``alpha`` of torch does not).

    Returns:
        The same function, compiled.
    """
    import torch._dynamo  # not before it is needed: it takes a while

    compiled, failed = torch.compile(update, dynamic=False), False
    names, seen = list(inspect.signature(update).parameters), {"lr": math.nan}

    def handed(name: str, value: Any) -> Any:
        if name not in SCHEDULED or isinstance(value, torch.Tensor) or seen.setdefault(name, value) == value:
            return value
        seen[name] = math.nan  # which no value equals
        return torch.tensor(value, dtype=torch.float64, device="cpu")  # kernels of any device read it, without waiting

    def run(*arguments: Any) -> None:
        nonlocal failed
        if failed or arguments[0].ndim == 0:  # torch 2.13 loses what is written to a float64 number
            update(*arguments)
            return
        try:
            with torch._dynamo.config.patch(recompile_limit=256):
                compiled(*(handed(name, value) for name, value in zip(names, arguments, strict=True)))
        except torch._dynamo.exc.TorchDynamoException as error:
            # nothing has run yet: a compiler that fails does so before the first kernel
            reason = str(error).splitlines()[0]
            warn(f"fuse=True: the compiler failed ({reason}); going on without it")
            failed = True
            update(*arguments)

    return run


def eager(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """A function that is run as it is written, also where what ``torch.compile`` compiles calls it.

    Args:
        function: any function.

    Returns:
        The same function; the compiler goes around it.
    """
    @wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        left_alone: Callable[Given, Returned] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return left_alone(*args, **kwargs)

    return run
