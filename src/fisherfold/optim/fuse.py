"""Updates compiled into a few kernels, with the plain ones where the compiler fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

Update = Callable[..., None]


@lru_cache
def fused(update: Update) -> Update:
    """An update of one parameter compiled, one kernel or few per shape; all optimizers of a process share them.

    Kernels for fixed shapes are faster than one for all, and a network has more shapes of weights than the compiler's
    usual limit of recompilations allows, beyond which it would go on uncompiled.

    Args:
        update: a function of tensors, some of which it changes in place, and numbers.

    Returns:
        The same function, compiled.
    """
    import torch._dynamo  # not before it is needed: it takes a while

    steps: list[Any] = [torch.compile(update, dynamic=False)]

    def run(*arguments: Any) -> None:
        try:
            with torch._dynamo.config.patch(recompile_limit=256):
                steps[0](*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            # nothing has run yet: a compiler that fails does so before the first kernel
            reason = str(error).splitlines()[0]
            warnings.warn(f"fuse=True: the compiler failed ({reason}); going on without it", stacklevel=2)
            steps[0] = update
            update(*arguments)

    return run
