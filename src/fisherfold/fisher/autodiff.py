"""Forward-mode products, typed, and quiet on first use.

The first forward-mode product of a process makes PyTorch compile tables of its own, which warns in some versions; that
is not the user's business, so it happens once with the warnings off.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fisherfold.manifolds.trees import tree_map


def jvp(function: Callable[[Any], Tensor], at: Any, v: Any) -> Tensor:
    """The forward-mode product Df(at) v."""
    _load_forward_mode()
    # an expanded tensor, such as one output for all samples, is refused by forward mode: its entries share memory
    at, v = (tree_map(Tensor.contiguous, tree) for tree in (at, v))
    return cast("Tensor", torch.func.jvp(function, (at,), (v,))[1])


@functools.cache
def _load_forward_mode() -> None:
    one = torch.ones(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.func.jvp(torch.sin, (one,), (one,))
