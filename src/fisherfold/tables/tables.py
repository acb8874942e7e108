"""Tables of ratings in files: CSV, TSV, MovieLens ``::`` and Parquet, with an account of what was refused.

A line is refused, and counted with its reason, if it is no record, if an id is missing or not text of the encoding, or
if its value is missing, is not a number or is not finite. Ids are whole numbers if all of them are, text otherwise;
text is compared code point by code point after white space around it is dropped, so that é as one code point and é as
two are different ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from fisherfold.plain import counted
from fisherfold.tables.decimals import numbers
from fisherfold.tables.ids import Ids, objects
from fisherfold.tables.inputs import LARGEST
from fisherfold.tables.table_columns import chosen
from fisherfold.tables.table_files import SIZE_LIMIT, flat, id_text, read_table
from fisherfold.tables.table_shapes import refuse_matrix, unexplained
from fisherfold.tables.table_sources import spoken
from fisherfold.tables.text_tables import IsData, TextTable


@dataclass
class RatingTable:
    """What a file held.

    Attributes:
        rows: row ids.
        columns: column ids.
        values: values, NaN-free.
        names: the names of the columns that were read.
        n_read: how many records the file has, those refused included.
        refused: how many of them were refused, by reason.
        header: the names in the first line, or those of a Parquet file; None if the line was read as data.
        decimal: the decimal mark of the values.
        unexplained: the names of columns that were not read and that are no times.
    """

    rows: Ids
    columns: Ids
    values: npt.NDArray[np.float64]
    names: list[str]
    n_read: int
    refused: dict[str, int]
    header: list[str] | None
    decimal: str
    unexplained: list[str]


def read_ratings(
    path: str | Path, *, columns: tuple[str, ...] | None = None, file_format: str | None = None,
    header: bool | None = None, encoding: str | None = None, decimal: str | None = None,
    max_bytes: int = SIZE_LIMIT,
) -> RatingTable:  # fmt: skip
    """Read (row id, column id, value) lines.

    Args:
        path: the file, gzip included; ``-`` for standard input.
        columns: the three columns by name or by position from 1; the first three if not given, ids from the index of a
            data frame before them.
        file_format: ``csv``, ``tsv``, ``::`` or ``parquet``; found out if not given.
        header: whether the first line names the columns; found out if not given.
        encoding: of text that is neither UTF-8 nor UTF-16 with a byte order mark.
        decimal: the decimal mark of the values, ``.`` or ``,``; found out from all of them if not given.
        max_bytes: the most that a packed file may take unpacked.

    Returns:
        The table.

    Raises:
        ValueError: if nothing usable is left, decimal marks cannot be told, or the table is a matrix.
    """
    found = read_table(
        path, file_format=file_format, header=header, encoding=encoding, decimal=decimal, max_bytes=max_bytes
    )
    frame, path = found.frame, spoken(path)
    names = chosen(frame.columns, columns, ("row", "column", "value"), path, found.header, found.index)
    if columns is None:
        refuse_matrix(frame, names, path)
    row, column, value, refused, mark = accepted(frame, names, path, decimal)
    refused = found.refused | refused
    n_read = frame.height + sum(found.refused.values())
    if not len(value):
        raise ValueError(_nothing_left(path, n_read, names[2], frame[names[2]], refused))
    others = unexplained(frame.columns, names, named=found.header is not None)
    return RatingTable(
        whole_or_text(row), whole_or_text(column), value.to_numpy(), names, n_read, refused, found.header, mark, others
    )


def accepted(
    frame: pl.DataFrame, names: list[str], path: str | Path, decimal: str | None
) -> tuple[pl.Series, pl.Series, pl.Series, dict[str, int], str]:
    """Sort the lines of a table into those that can be used and those that are refused.

    Args:
        frame: the table.
        names: its row id, column id and value columns.
        path: where it comes from, for messages.
        decimal: the decimal mark of the values; None if the frame is the whole table and is to tell.

    Returns:
        Row ids, column ids and values of the good lines, how many lines were refused by reason, and the decimal mark.
    """
    row, column = (id_text(frame[name], path) for name in names[:2])
    raw = flat(frame[names[2]], path, dates=False)
    (value,), mark = numbers([raw], path, decimal)
    missing_id = _is_missing(row) | _is_missing(column)
    broken_id = (_is_broken(row) | _is_broken(column)) & ~missing_id
    bad_id = missing_id | broken_id
    too_large = (value.is_finite() & (value.abs() > LARGEST)).fill_null(False)
    reasons = {
        "missing id": missing_id,
        "id is not UTF-8 text": broken_id,
        "missing value": _is_missing(raw) & ~bad_id,
        "value is not a number": value.is_null() & ~_is_missing(raw) & ~bad_id,
        "value is not finite": ~value.is_finite().fill_null(True) & ~bad_id,
        f"value is beyond {LARGEST:g}": too_large & ~bad_id,
    }
    refused = {reason: int(mask.sum()) for reason, mask in reasons.items() if mask.any()}
    good = ~(bad_id | too_large | value.is_null() | ~value.is_finite().fill_null(False))
    return row.filter(good), column.filter(good), value.filter(good), refused, mark


def read_pairs(
    path: str | Path, *, text: tuple[bool, bool], columns: tuple[str, ...] | None = None,
    file_format: str | None = None, header: bool | None = None, encoding: str | None = None,
    max_bytes: int = SIZE_LIMIT, is_data: IsData | None = None,
) -> tuple[TextTable, Ids, Ids]:  # fmt: skip
    """Read (row id, column id) lines of a file whose other columns are kept.

    Args:
        path: the file; ``-`` for standard input.
        text: whether row ids, and column ids, are text in the model that they are meant for.
        columns: the two columns by name or by position from 1; the first two if not given.
        file_format: as for ``read_ratings``.
        header: as for ``read_ratings``.
        encoding: as for ``read_ratings``.
        max_bytes: as for ``read_ratings``.
        is_data: says of the fields of the first line that they are data, where nothing else tells.

    Returns:
        The whole table as it stands, the row ids and the column ids; one that is missing or not UTF-8 is refused.
    """
    table = read_table(
        path, file_format=file_format, header=header, encoding=encoding, max_bytes=max_bytes, is_data=is_data
    )
    path = spoken(path)
    names = chosen(table.frame.columns, columns, ("row", "column"), path, table.header, table.index)
    found = []
    for name, as_text in zip(names, text, strict=True):
        side = id_text(table.frame[name], path)
        require_ids(side, f"{path}: the id in column {name!r}")
        found.append(text_ids(side) if as_text else whole_or_text(side, (pl.Int64, pl.UInt64)))
    return table, found[0], found[1]


def require_ids(column: pl.Series, what: str, before: int = 0) -> None:
    """Refuse a column in which an id is missing, or was not decoded.

    Args:
        column: as ``id_text`` makes it.
        what: the id, in the words of the message.
        before: how many lines come before it.

    Raises:
        ValueError: if there is such an id; it names the line.
    """
    for fault, mask in (("missing", _is_missing(column)), ("not UTF-8 text", _is_broken(column))):
        if mask.any():
            raise ValueError(f"{what} is {fault} in data line {before + int(mask.arg_true()[0]) + 1}")


def _is_missing(column: pl.Series) -> pl.Series:
    if column.dtype == pl.String:
        return column.is_null() | (column.str.strip_chars() == "").fill_null(True)
    return column.is_null()


def _is_broken(column: pl.Series) -> pl.Series:
    """Ids with the sign that a decoder puts where bytes made no sense: different ids would become one."""
    if column.dtype == pl.String:
        return column.str.contains("\ufffd", literal=True).fill_null(False)
    return pl.Series([False]).new_from_index(0, len(column))


def whole_or_text(column: pl.Series, kinds: tuple[type[pl.DataType], ...] = (pl.Int64,)) -> Ids:
    """Whole numbers if all ids are, text otherwise.

    Args:
        column: as ``id_text`` makes it.
        kinds: of numbers that text may be taken for, in the order in which they are tried.

    Returns:
        The ids.
    """
    if column.dtype.is_integer():
        # the types of ids in memory and in model files; a Parquet file has smaller and larger ones
        whole = column.cast(pl.UInt64 if column.dtype == pl.UInt64 else pl.Int64, strict=False)
        if not whole.has_nulls():
            return whole.to_numpy()
    if column.dtype == pl.String:
        text = column.str.strip_chars()
        for kind in kinds:
            whole = text.cast(kind, strict=False)
            # "007" and "+7" are names, not numbers
            if not whole.has_nulls() and (whole.cast(pl.String) == text).all():
                return whole.to_numpy()
    return text_ids(column)


def text_ids(column: pl.Series) -> Ids:
    """Ids as text, without blanks around it.

    Args:
        column: as ``id_text`` makes it.

    Returns:
        An array of objects.
    """
    return objects(column.cast(pl.String).str.strip_chars().to_list())


def _nothing_left(path: str | Path, n_read: int, name: str, raw: pl.Series, refused: dict[str, int]) -> str:
    example = next((repr(v) for v in raw.head(100).to_list() if v is not None), "nothing")
    why = ", ".join(f"{count} {reason}" for reason, count in refused.items()) or "no lines"
    lines = counted(n_read, "line")
    return f"{path}: none of {lines} can be used ({why}); the value column {name!r} starts with {example}"
