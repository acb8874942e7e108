"""Checks of parameters: one table of names and checks per estimator.

A check is a function of a name and a value that returns the value as plain Python, or raises
``ValueError`` with the
name, what is expected and what was given::

    CHECKS = {"rank": integer(1), "ridge": optional(number(0)), "offsets": choice("both", "none"),
    "verbose": flag()} options = check_parameters(self.get_params(deep=False), CHECKS)

Constructors keep what they are given, as scikit-learn wants it; NumPy and torch scalars are
accepted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

Check = Callable[[str, Any], Any]

DTYPES = {"float32": torch.float32, "float64": torch.float64}
LARGEST_NUMBER = 1e30  # of a parameter: float32 holds it
# Parameters of the machine, not of the model: they are neither saved nor taken from a file.
RUN_TIME = frozenset({"checkpoint", "device", "n_jobs", "on_interrupt", "verbose"})


def check_parameters(parameters: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Check parameters by name.

    Example:
        >>> check_parameters({"rank": np.int64(3)}, {"rank": integer(1)})
        {'rank': 3}
        >>> check_parameters({"rank": 0}, {"rank": integer(1)})
        Traceback (most recent call last):
        ...
        ValueError: rank must be a whole number of at least 1, got 0
    """
    if unknown := [name for name in parameters if name not in checks]:
        raise ValueError(
            f"there is no parameter {unknown[0]!r}; the parameters are {', '.join(checks)}"
        )
    return {name: checks[name](name, value) for name, value in parameters.items()}


def plain(value: Any) -> Any:
    """Convert a NumPy or torch scalar to Python."""
    scalar = isinstance(value, np.generic) or (
        isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0
    )
    return value.item() if scalar else value


def _rule(
    good: Callable[[Any], bool], expected: str, convert: Callable[[Any], Any] = lambda found: found
) -> Check:
    """A check for values of which a condition holds."""

    def check(name: str, value: Any) -> Any:
        if not good(found := plain(value)):
            raise ValueError(f"{name} must be {expected}, got {value!r}")
        return convert(found)

    return check


def _whole(value: Any, least: int, most: int) -> bool:
    return (
        isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most
    )


def integer(least: int) -> Check:
    """Check for an integer of at least a bound."""
    return _rule(
        lambda found: _whole(found, least, 2**53), f"a whole number of at least {least}", int
    )


def number(least: float = 0.0, most: float = LARGEST_NUMBER, *, above: bool = False) -> Check:
    """Check for a finite number between two bounds."""

    def check(name: str, value: Any) -> float:
        found = plain(value)
        good = isinstance(found, Real) and not isinstance(found, bool) and math.isfinite(found)
        if not good or not least <= float(found) <= most or (above and float(found) == least):
            lower = f"above {least:g}" if above else f"of at least {least:g}"
            upper = "" if not good or float(found) <= most else f" and at most {most:g}"
            raise ValueError(f"{name} must be a finite number {lower}{upper}, got {value!r}")
        return float(found)

    return check


def choice(*allowed: str) -> Check:
    """Check for one of some words."""
    return _rule(
        lambda found: isinstance(found, str) and found in allowed,
        f"one of {', '.join(allowed)}",
        str,
    )


def flag() -> Check:
    """Check for True or False."""
    return _rule(lambda found: isinstance(found, bool), "True or False")


def verbosity() -> Check:
    """Check for the parameter ``verbose``: True, False or an integer of at least 0."""
    return lambda name, value: bool(
        value if isinstance(plain(value), bool) else integer(0)(name, value)
    )


def optional(check: Check) -> Check:
    """Allow None besides what a check allows."""
    return lambda name, value: None if value is None else check(name, value)


def auto_or(check: Check) -> Check:
    """Allow ``auto`` besides what a check allows."""
    return lambda name, value: (
        value if isinstance(value, str) and value == "auto" else check(name, value)
    )


def each(check: Check) -> Check:
    """Check every entry of a sequence that is not empty."""

    def check_all(name: str, values: Any) -> list[Any]:
        if (
            isinstance(values, (str, bytes, Mapping))
            or not isinstance(values, Iterable)
            or not (found := list(values))
        ):
            raise ValueError(f"{name} must be a sequence of at least one value, got {values!r}")
        return [check(f"each of {name}", value) for value in found]

    return check_all


def seed() -> Check:
    """Check for ``random_state``: None, an integer, or a generator of NumPy."""
    generators = np.random.RandomState, np.random.Generator
    return _rule(
        lambda found: found is None or isinstance(found, generators) or _whole(found, 0, 2**63 - 1),
        "None, a whole number from 0 to 2**63 - 1, or a RandomState or Generator of NumPy",
        lambda found: int(found) if isinstance(found, Integral) else found,
    )


def draw_seed(random_state: Any, default: int | None = None) -> int:
    """Make an integer seed of a ``random_state``."""
    checked = seed()("random_state", random_state)
    if isinstance(checked, int):
        return checked
    if checked is None and default is not None:
        return default
    if isinstance(checked, np.random.RandomState):
        return int(checked.randint(2**31 - 1))
    return int(np.random.default_rng(checked).integers(2**31))


def torch_dtype() -> Check:
    """Check for ``dtype``: float32 or float64, by name or as a dtype of torch or NumPy."""

    def check(name: str, value: Any) -> torch.dtype:
        named = (
            value.__name__
            if isinstance(value, type) and issubclass(value, np.generic)
            else str(value)
        )
        if named.removeprefix("torch.") not in DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, got {value!r}")
        return DTYPES[named.removeprefix("torch.")]

    return check


def torch_device() -> Check:
    """Check for ``device`` by making a tensor there."""

    def check(name: str, value: Any) -> torch.device:
        if value is not None and not isinstance(value, (str, torch.device)):
            raise ValueError(
                f"{name} must be None, a name such as cpu or cuda, or a torch.device, got {value!r}"
            )
        try:
            device = torch.device("cpu" if value is None else value)
            torch.zeros(1, device=device).tolist()
        # torch raises RuntimeError, AssertionError, NotImplementedError, by kind of device
        except Exception as error:
            raise ValueError(
                f"{name} {str(value)!r} cannot be used here: {str(error).splitlines()[0]}"
            ) from None
        return device

    return check


def jobs() -> Check:
    """Check for ``n_jobs``: None, -1 or a number of threads."""
    return _rule(
        lambda found: found is None or _whole(found, -1, -1) or _whole(found, 1, 1024),
        "None, -1 or an integer from 1 to 1024",
        lambda found: None if found is None else int(found),
    )


def storable(value: Any) -> Any:
    """Convert a parameter to what JSON can hold."""
    if isinstance(value, (np.random.RandomState, np.random.Generator)):
        return None
    if isinstance(value, (torch.device, torch.dtype, np.dtype)):
        return str(value).removeprefix("torch.")
    if isinstance(value, type) and issubclass(value, np.generic):
        return value.__name__
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): storable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [storable(entry) for entry in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else plain(value)


def saved_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Give the parameters that a model file keeps: all but those of the machine."""
    return {name: storable(value) for name, value in parameters.items() if name not in RUN_TIME}


def loaded_parameters(parameters: Any, checks: Mapping[str, Check]) -> dict[str, Any]:
    """Take the parameters of a model file: checked, and without run-time settings."""
    if not isinstance(parameters, dict):
        raise ValueError(f"its parameters are {type(parameters).__name__}, a table is expected")
    kept = {name: value for name, value in parameters.items() if name not in RUN_TIME}
    check_parameters(kept, checks)
    return kept
