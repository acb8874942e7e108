"""Whether a table is a list of entries, row id, column id and value in every line, and not a matrix.

Of a matrix the first three columns can be read as entries too, and mean nothing. It is known where nobody has named the
columns, there are two or more besides those of entries and a time, all behind the first are numbers, and

    the second column, which would be column ids, has fractions, or
    no id in the first column occurs twice: every line is a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import polars as pl

from fisherfold.tables.decimals import parse
from fisherfold.tables.table_columns import is_rating

_ROLES = 3
LOOKED_AT = 1000  # lines that tell what a column holds
_TIMES = ("time", "date", "day", "year", "month")


def unexplained(columns: list[str], read: list[str], *, named: bool) -> list[str]:
    """The columns that were not read and that lists of entries do not commonly have.

    Args:
        columns: those of the table.
        read: those of them that were read.
        named: whether the table itself names them; a single further one without a name is taken for a time.

    Returns:
        Their names; those of times are left out.

    Examples:
        >>> unexplained(["user", "item", "rating", "timestamp", "age"], ["user", "item", "rating"], named=True)
        ['age']
    """
    others = [name for name in columns if name not in read]
    if not named:
        return others if len(others) > 1 else []
    return [name for name in others if not any(word in name.lower() for word in _TIMES) and not is_rating(name)]


def refuse_matrix(
    frame: pl.DataFrame, names: list[str], path: str | Path, every_line_a_row: Callable[[], bool] | None = None
) -> None:  # fmt: skip
    """Refuse a table that is plainly a matrix.

    Args:
        frame: the table, or its start.
        names: its row id, column id and value columns, which nobody has named.
        path: where it comes from, for messages.
        every_line_a_row: whether no row id of the whole table occurs twice; asked where that decides, and where the
            frame is a start.

    Raises:
        ValueError: saying what tells, and what to do.
    """
    if frame.width < _ROLES + 2 or frame.height < 2 or any(is_rating(name) for name in frame.columns):
        return
    start = frame.head(LOOKED_AT)
    behind = [_numbers(start[name]) for name in frame.columns if name != names[0]]
    if any(column is None for column in behind):
        return
    column_ids = _numbers(start[names[1]])
    fractions = [] if column_ids is None else [value for value in column_ids.drop_nulls() if value % 1]
    if fractions:
        sign = f"column {names[1]!r}, which would be column ids, holds {fractions[0]:g}"
    elif all_different(start[names[0]]) and (every_line_a_row or partial(all_different, frame[names[0]]))():
        sign = f"no row id in column {names[0]!r} occurs twice"
    else:
        return
    raise ValueError(
        f"{path} looks like a matrix, not like lines of row id, column id and value: it has {frame.width} columns, "
        f"behind the first of numbers alone, and {sign}; write one line per entry (unpivot in polars, melt in pandas), "
        "fit the matrix in Python (MatrixCompletion().fit(frame)), or name the columns, as in "
        f"--columns {','.join(names)}"
    )


def _numbers(column: pl.Series) -> pl.Series | None:
    """The numbers of a column that holds nothing else, with either decimal mark; None for any other."""
    if column.dtype != pl.String:
        return column.cast(pl.Float64) if column.dtype.is_numeric() or column.dtype == pl.Null else None
    given = column.filter((column.str.strip_chars() != "").fill_null(False))
    return next((found for mark in (".", ",") if not (found := parse(given, mark)).has_nulls()), None)


def all_different(column: pl.Series) -> bool:
    """Whether nothing occurs twice in a column; missing ids count for nothing.

    Args:
        column: of row ids.

    Returns:
        Whether every id stands in one line alone.
    """
    return column.drop_nulls().is_unique().all()
