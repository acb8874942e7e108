"""The options of the optimizers, checked at the door."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from torch import nn

FISHERS = ("empirical", "mc", "persample")
LOSSES = ("mean", "sum")
CHOICES = {
    "euclidean": ("sgd", "kfac"),
    "damping_mode": ("exact", "factored"),
    "fisher": FISHERS,
    "reduction": ("mean", "sum"),
    "retraction": ("exp", "normalize"),
}


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Raise unless a value is one of a few names.

    Args:
        name: the argument.
        value: what was given.
        allowed: what is accepted.

    Returns:
        The value.

    Raises:
        ValueError: if it is not.
    """
    if value not in tuple(allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return str(value)


def _check_source(given: Mapping[str, Any]) -> None:
    """Refuse what speaks of a module where parameters are given, and the other way round: it would be of no effect."""
    kind, owner = type(given["model"]).__name__, given["model_of_groups"]
    if isinstance(given["model"], nn.Module):
        if owner is not None:
            raise ValueError(f"model_of_groups is for parameter groups, got a module, {kind}, as model")
        return
    # "none" is what every parameter is that no group puts on a manifold
    if given["invariant"] not in (None, "none"):
        raise ValueError(
            f"invariant={given['invariant']!r} needs a module as model, got parameters ({kind}); pass the module "
            "itself, or groups with an entry 'manifold'"
        )
    if given["example_input"] is not None and owner is None:
        raise ValueError(
            f"example_input needs a module as model, got parameters ({kind}); pass the module itself, or "
            "model_of_groups"
        )


def check_options(given: Mapping[str, Any]) -> None:
    """Raise unless the options of the constructor make sense.

    Args:
        given: the constructor's arguments by name.

    Raises:
        TypeError: if the seed is no whole number.
        ValueError: naming the argument, the value and what was expected.
    """
    _check_source(given)
    for name, allowed in CHOICES.items():
        choice(name, given[name], allowed)
    check_number("factor_decay", given["factor_decay"], 0.0, 1.0, below=True)
    check_number("basis_tolerance", given["basis_tolerance"], 0.0, 1.0)
    if given["max_angle"] is not None:
        check_number("max_angle", given["max_angle"], 0.0, math.pi, open_below=True)
    if given["clip"] is not None:
        check_number("clip", given["clip"], 0.0, open_below=True)
    check_number("orthogonality", given["orthogonality"], 0.0)
    if (rows := given["max_rows"]) is not None and (not isinstance(rows, Integral) or rows < 1):
        raise ValueError(f"max_rows must be a whole number above 0, or None, got {rows!r}")
    if not isinstance(given["seed"], Integral):
        raise TypeError(f"seed must be a whole number, got {given['seed']!r}")
    basis = given["basis"]
    if isinstance(basis, str):
        choice("basis", basis, ("auto", "full"))
    else:
        check_number("basis", basis, 0.0, 1.0, open_below=True)
    check_hyperparameters(given)
    check_number("manifold_lr", given["manifold_lr"], 0.0)


def check_hyperparameters(given: Mapping[str, Any]) -> None:
    """Raise unless rate, momentum, weight decay and damping are in their ranges.

    Args:
        given: a group or the constructor's arguments.
    """
    check_number("lr", given["lr"], 0.0)
    check_number("momentum", given["momentum"], 0.0, 1.0, below=True)
    check_number("weight_decay", given["weight_decay"], 0.0)
    check_number("damping", given["damping"], 0.0, open_below=True)


def check_number(
    name: str, value: Any, low: float, high: float = math.inf, *, open_below: bool = False, below: bool = False
) -> None:
    """Raise unless a number lies in an interval.

    Args:
        name: the argument.
        value: what was given.
        low: the lower end.
        high: the upper end.
        open_below: whether the lower end is excluded.
        below: whether the upper end is excluded.

    Raises:
        TypeError: if it is no number.
        ValueError: if it does not.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # of what is no number, of text, and of complex tensors
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    if isinstance(value, str):  # that of a number is none
        raise TypeError(f"{name} must be a number, got {value!r}")
    good = (number > low if open_below else number >= low) and (number < high if below else number <= high)
    if not good or not math.isfinite(number):
        left, right = "(" if open_below else "[", ")" if below or high == math.inf else "]"
        raise ValueError(f"{name} must be in {left}{low:g}, {high:g}{right}, got {number:g}")
