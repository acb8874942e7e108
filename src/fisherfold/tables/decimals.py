"""The decimal mark of the numbers in a table, a point or a comma: one for the whole table, whatever reads it.

A value with a comma is looked at where it is no number with a decimal point:

    3,5   0,125   ,5   1,5e3        a decimal comma
    1,234   -12,345                 a decimal comma or a thousands separator: another value must tell
    1.234,5   1,234.5   1,234,567   thousands separators, which are not read

The mark is the comma if some value has one of the first form, none has the last, and none has a decimal point. Values
that could be read in two ways are refused with their lines, all of the table. A mark that is named leaves nothing to
decide: what is written otherwise is then no number. Only numbers are looked at and changed, never ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

MARKS = (".", ",")
# understood alike by Python and by polars
_COMMA = r"^[+-]?(?:[0-9]+,[0-9]*|,[0-9]+)(?:[eE][+-]?[0-9]+)?$"
_GROUP = r"[.,'’\s]"
_GROUPED = rf"^[+-]?[1-9][0-9]{{0,2}}(?:{_GROUP}[0-9]{{2,3}})*{_GROUP}[0-9]{{3}}(?:[.,][0-9]*)?$"

Forms = dict[str, tuple[int, str, str]]
"""The first value of each form (point, comma, either, grouped): its data line from 1, column and text."""


def check_mark(decimal: str | None) -> None:
    """Refuse what is no decimal mark.

    Args:
        decimal: what was given.

    Raises:
        ValueError: if it is neither None nor a mark.
    """
    if decimal is not None and decimal not in MARKS:
        raise ValueError(f"decimal must be '.' or ',', got {decimal!r}")


def is_comma_number(text: str) -> bool:
    """Whether a field looks like a number that has a comma, as decimal mark or between thousands.

    Args:
        text: the field.

    Returns:
        The answer.

    Examples:
        >>> [is_comma_number(text) for text in ("3,5", "1.234,50", "1,2,3", "3.5", "tea, green")]
        [True, True, False, False, False]
    """
    plain = text.strip()
    return "," in plain and any(re.match(form, plain) is not None for form in (_COMMA, _GROUPED))


def parse(column: pl.Series, mark: str) -> pl.Series:
    """Numbers of a column.

    Args:
        column: text, or numbers of any type.
        mark: the decimal mark of text.

    Returns:
        Numbers in float64, null where there is none.
    """
    if column.dtype != pl.String:
        return column.cast(pl.Float64, strict=False)
    text = column.str.strip_chars()
    if mark == ",":
        # a point becomes a comma: 1.5 is no number here
        text = text.str.replace_many([".", ","], [",", "."])
    return text.cast(pl.Float64, strict=False)


def forms(columns: Iterable[pl.Series], before: int = 0) -> Forms:
    """What the values of some columns tell about the decimal mark.

    Args:
        columns: columns of numbers, of one table or one piece of it.
        before: how many lines of the table come before.

    Returns:
        The first value of each form that occurs.
    """
    found: Forms = {}
    for column in (each for each in columns if each.dtype == pl.String):
        plain = parse(column, ".").is_not_null()
        text = column.str.strip_chars()
        odd = ~plain & text.str.contains(",", literal=True)
        comma, grouped = odd & text.str.contains(_COMMA), odd & text.str.contains(_GROUPED)
        masks = {
            "point": plain & text.str.contains(".", literal=True),
            "comma": comma & ~grouped, "either": comma & grouped, "grouped": grouped & ~comma,
        }  # fmt: skip
        places = {form: mask.arg_true() for form, mask in masks.items()}
        here = {
            form: (before + int(place[0]) + 1, column.name, str(text[int(place[0])]))
            for form, place in places.items() if len(place)
        }  # fmt: skip
        found = earliest(found, here)
    return found


def earliest(*parts: Forms) -> Forms:
    """Join what parts of a table tell.

    Args:
        *parts: forms of them.

    Returns:
        The first value of each form.
    """
    joint: Forms = {}
    for part in parts:
        for form, value in part.items():
            joint[form] = min(value, joint.get(form, value), key=lambda seen: seen[0])
    return joint


def settle(found: Forms, path: str | Path) -> str:
    """The decimal mark of a table.

    Args:
        found: what all of its values tell.
        path: where it comes from, for messages.

    Returns:
        The mark.

    Raises:
        ValueError: if some values could be read in two ways, or have thousands separators.
    """
    commas = [found[form] for form in ("comma", "either") if form in found]
    name_it = "name the decimal mark (decimal, --decimal), and what is written otherwise counts as no number"
    if "grouped" in found:
        where = _where(found["grouped"])
        raise ValueError(f"{path}: {where} has thousands separators; write numbers without them, or {name_it}")
    if commas and "point" in found:
        seen = f"{_where(min(commas))} has a comma, {_where(found['point'])} a point"
        raise ValueError(f"{path}: {seen}; write all decimal marks alike, or {name_it}")
    if commas and "comma" not in found:
        where = _where(found["either"])
        raise ValueError(f"{path}: {where} may be a decimal or thousands, and no other value tells; {name_it}")
    return "," if commas else "."


def _where(seen: tuple[int, str, str]) -> str:
    line, column, text = seen
    return f"{text!r} (column {column!r}, data line {line})"


def numbers(columns: Sequence[pl.Series], path: str | Path, decimal: str | None) -> tuple[list[pl.Series], str]:
    """The numbers of a whole table.

    Args:
        columns: all of its columns of numbers.
        path: where it comes from, for messages.
        decimal: the decimal mark; found out if None.

    Returns:
        Columns in float64, null where there is no number, and the decimal mark.
    """
    parsed = [parse(column, decimal or ".") for column in columns]
    if decimal is not None or not any(map(_is_suspect, columns, parsed)):
        return parsed, decimal or "."
    mark = settle(forms(columns), path)
    return (parsed if mark == "." else [parse(column, mark) for column in columns]), mark


def _is_suspect(column: pl.Series, parsed: pl.Series) -> bool:
    """Whether a value with a comma is no number; next to nothing to ask of a column in which all are."""
    if column.dtype != pl.String or parsed.null_count() == column.null_count():
        return False
    return bool(column.filter(parsed.is_null()).str.contains(",", literal=True).any())


def written(values: Any, mark: str) -> pl.Series:
    """Predictions as a table with this decimal mark has them.

    Args:
        values: an array of them.
        mark: the decimal mark.

    Returns:
        Numbers, or their text where a point would not do.
    """
    column = pl.Series(values)
    if mark == "," and column.dtype.is_float():
        return column.cast(pl.String).str.replace(".", ",", literal=True)
    return column
