"""Float64 for networks that name a narrower precision themselves: ``x.float() / 255``, a softmax in float32.

Weights and inputs of a replica are float64, and a product of those with what the network has cast to float32 is refused
by PyTorch. Inside the mode, casts to narrower numbers, and tensors that are made of them, are float64; what is
narrow from before, such as a matrix that is a plain attribute of a module, is widened where it meets float64. Complex
numbers, such as the ``zeros(..., dtype=torch.cfloat)`` that frequencies are written to, have both parts in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WIDE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}


class Widening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """All arithmetic in float64, whatever precision is asked for.

    Example:
        >>> import torch
        >>> with Widening():
        ...     (torch.ones(2, 2, dtype=torch.float64) @ torch.arange(4).view(2, 2).float()).dtype
        torch.float64
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in WIDE:
            kwargs["dtype"] = WIDE[kwargs["dtype"]]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not given:
            return tree_map(_wide, func(*args, **kwargs))
        # what an operation changes in place must stay the tensor that it is
        if any(t.dtype in WIDE.values() for t in given) and not func._schema.is_mutable:
            args, kwargs = tree_map(_wide, (args, kwargs))
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return value.to(WIDE[value.dtype]) if isinstance(value, Tensor) and value.dtype in WIDE else value
