"""Values, foreign text and arguments as a person reads or types them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unicodedata import category


def cell(value: Any) -> str:
    """A value as a person reads it.

    Examples:
        >>> cell(True), cell(0.123456), cell({"mean": 1.0, "standard error": 0.25}), cell(float("nan"))
        ('yes', '0.1235', '1.0000 ± 0.2500', 'undefined')
        >>> cell({"mean": 1.4e-9, "standard error": 2e-11})
        '1.4e-09 ± 2e-11'
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "undefined" if value != value else f"{value:{_form(value)}}"
    if isinstance(value, Mapping) and "standard error" in value:
        form = _form(value["mean"])
        return f"{value['mean']:{form}} ± {value['standard error']:{form}}"
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {cell(item)}" for key, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value)) or "none"
    return str(value)


def printable(text: str) -> str:
    r"""What a file holds must not reach the terminal as commands, and names of files that are no text can be shown.

    Examples:
        >>> printable("red \x1b[31m, caf\udce9, é")
        'red ?[31m, caf?, é'
    """
    return "".join("?" if category(c) in {"Cc", "Cs"} and c not in "\t\n" else c for c in text)


def typed(*arguments: object) -> str:
    """Arguments as a shell takes them.

    Examples:
        >>> typed("my model", 42)
        "'my model' 42"
        >>> typed("model", -7)
        '-- model -7'
    """
    words = [str(argument) for argument in arguments]
    return shlex.join(["--", *words] if any(word.startswith("-") for word in words) else words)


def named(what: str, expected: str) -> Callable[[Path | None], Path | None]:
    """Refuse ``-`` where it cannot stand for standard input or output."""

    def checked(given: Path | None) -> Path | None:
        if given == Path("-"):
            raise ValueError(f"{what} must be {expected}, got -, which is standard input or output of tables")
        return given

    return checked


def _form(value: float) -> str:
    return ".4f" if 1e-3 <= abs(value) < 1e6 else ".4g"
