"""Parameters of the estimators, looked at before any data is touched and turned into plain Python values.

Constructors keep what they are given, as scikit-learn wants it. Here a value is accepted in the types that people have
it in (NumPy and torch scalars, paths, random generators) or refused with its name, the value and what is expected.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from fisherfold.tables.ids import plain

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def whole(name: str, value: Any, least: int) -> int:
    """A whole number.

    Args:
        name: the parameter, for the message, as everywhere here.
        value: what was given.
        least: the smallest value allowed.

    Returns:
        The number.

    Raises:
        ValueError: if it is anything else.
    """
    found = plain(value)
    if not isinstance(found, Integral) or isinstance(found, bool) or int(found) < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(found)


def number(name: str, value: Any, expected: str = "a finite number of at least 0", *, above: bool = False) -> float:
    """A finite number of at least 0.

    Args:
        name: the parameter.
        value: what was given.
        expected: what is expected, for the message.
        above: whether 0 itself is refused.

    Returns:
        The number.

    Raises:
        ValueError: if it is anything else.
    """
    found = plain(value)
    good = isinstance(found, Real) and not isinstance(found, bool) and math.isfinite(found)
    if not good or float(found) < 0 or (above and float(found) == 0):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return float(found)


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """One of some words.

    Args:
        name: the parameter.
        value: what was given.
        allowed: the words.

    Returns:
        The word.

    Raises:
        ValueError: if it is anything else.
    """
    if not isinstance(value, str) or value not in tuple(allowed):
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return str(value)


def flag(name: str, value: Any) -> bool:
    """True or False.

    Args:
        name: the parameter.
        value: what was given.

    Returns:
        The same as a bool.

    Raises:
        ValueError: if it is anything else.
    """
    if not isinstance(plain(value), bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def loudness(value: Any) -> bool:
    """The parameter ``verbose``: True, False, or a whole number as elsewhere in scikit-learn.

    Args:
        value: what was given.

    Returns:
        Whether to show anything.
    """
    return flag("verbose", value) if isinstance(plain(value), bool) else whole("verbose", value, 0) > 0


def seed_of(random_state: Any, default: int | None = None) -> int:
    """The seed of a fit.

    Args:
        random_state: a whole number, a NumPy generator to draw one from, or None.
        default: the seed for None; drawn from the system if not given.

    Returns:
        The seed.

    Raises:
        ValueError: if it is anything else.
    """
    if random_state is None and default is not None:
        return default
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    if random_state is None or isinstance(random_state, np.random.Generator):
        return int(np.random.default_rng(random_state).integers(2**31))
    found = plain(random_state)
    if not isinstance(found, Integral) or isinstance(found, bool) or not 0 <= int(found) < 2**63:
        raise ValueError(
            "random_state must be None, a whole number between 0 and 2**63 - 1, or a RandomState or Generator of "
            f"NumPy, got {random_state!r}"
        )
    return int(found)


def check_seed(random_state: Any) -> None:
    """Refuse what ``seed_of`` would, without drawing from a generator.

    Args:
        random_state: what was given.
    """
    if not isinstance(random_state, (np.random.RandomState, np.random.Generator)):
        seed_of(random_state)


def dtype_of(value: Any) -> torch.dtype:
    """The parameter ``dtype``: a name, or a dtype of torch or NumPy.

    Args:
        value: what was given.

    Returns:
        The dtype.

    Raises:
        ValueError: if it is neither float32 nor float64.
    """
    named = value.__name__ if isinstance(value, type) and issubclass(value, np.generic) else str(value)
    if named.removeprefix("torch.") not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {value!r}")
    return DTYPES[named.removeprefix("torch.")]


def device_of(value: Any) -> torch.device:
    """The parameter ``device``, tried out.

    Args:
        value: a name, a ``torch.device`` or None for the CPU.

    Returns:
        The device.

    Raises:
        ValueError: if there is no such device here.
    """
    if value is not None and not isinstance(value, (str, torch.device)):
        raise ValueError(f"device must be None, a name such as cpu or cuda, or a torch.device, got {value!r}")
    try:
        device = torch.device("cpu" if value is None else value)
        torch.zeros(1, device=device).tolist()
    except Exception as error:  # torch raises RuntimeError, AssertionError, NotImplementedError, by kind of device
        raise ValueError(f"device {str(value)!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return device


def jobs(value: Any) -> int | None:
    """The parameter ``n_jobs``.

    Args:
        value: None, -1 or a whole number of at least 1.

    Returns:
        The same.

    Raises:
        ValueError: if it is anything else.
    """
    found = plain(value)
    if found is None:
        return None
    if not isinstance(found, Integral) or isinstance(found, bool) or int(found) == 0 or int(found) < -1:
        raise ValueError(f"n_jobs must be None, -1 or at least 1, got {value!r}")
    return int(found)


def check_path(name: str, value: Any) -> None:
    """A path or None.

    Args:
        name: the parameter.
        value: what was given.

    Raises:
        ValueError: if it is anything else.
    """
    if value is not None and not (isinstance(value, (str, os.PathLike)) and isinstance(os.fspath(value), str)):
        raise ValueError(f"{name} must be a path or None, got {value!r}")


def several(name: str, values: Any) -> list[Any]:
    """A sequence that is not empty.

    Args:
        name: the parameter.
        values: what was given.

    Returns:
        Its entries as plain Python values.

    Raises:
        ValueError: if it is anything else.
    """
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable) or np.ndim(list(values)) != 1:
        raise ValueError(f"{name} must be a sequence such as a tuple or list, got {values!r}")
    found = [plain(value) for value in values]
    if not found:
        raise ValueError(f"{name} must not be empty, got {values!r}")
    return found


def storable(value: Any) -> Any:
    """A parameter as JSON can hold it.

    Args:
        value: a parameter that was accepted.

    Returns:
        A plain value; a random generator, whose state has moved on, becomes None.
    """
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
