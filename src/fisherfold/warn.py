"""Warnings that name the line of the caller, however deep inside they come from."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# frames of these packages are not the caller's: ours, and those that call us back or wrap our
# functions
_INSIDE = frozenset({"fisherfold", "torch", "contextlib", "sklearn"})
_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collect the warnings of this thread (or task) in place of showing them."""
    found: list[str] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn the caller."""
    if (found := _collected.get()) is not None:
        found.append(message)
        return
    frame = sys._getframe()
    level = 1
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE
    ):
        frame = frame.f_back
        level = level + 1
    warnings.warn(message, category, stacklevel=level)
