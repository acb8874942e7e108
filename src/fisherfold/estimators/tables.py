"""Tables of ratings in files: CSV, TSV, MovieLens ``::`` and Parquet, with an account of what was refused.

A line is refused, and counted with its reason, if an id is missing, or if its value is missing, is not a number or is
not finite. Ids are whole numbers if all of them are, text otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from fisherfold.estimators.ids import Ids

_SEPARATORS = {"csv": ",", "tsv": "\t", "tab": "\t", "psv": "|"}
FORMATS = ("csv", "tsv", "::", "parquet")


@dataclass
class RatingTable:
    """What a file held.

    Attributes:
        rows: row ids.
        columns: column ids.
        values: values, NaN-free; empty if only pairs were wanted.
        names: the names of the columns that were read.
        n_read: how many lines the file has.
        refused: how many lines were refused, by reason.
        kept: the numbers of the lines that were kept.
    """

    rows: Ids
    columns: Ids
    values: npt.NDArray[np.float64]
    names: list[str]
    n_read: int
    refused: dict[str, int] = field(default_factory=dict)
    kept: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def n_refused(self) -> int:
        """How many lines were refused."""
        return sum(self.refused.values())


def read_ratings(
    path: str | Path, *, columns: tuple[str, ...] | None = None, file_format: str | None = None,
    header: bool | None = None,
) -> RatingTable:  # fmt: skip
    """Read (row id, column id, value) lines.

    Args:
        path: the file.
        columns: the three columns by name or by position from 1; the first three if not given.
        file_format: ``csv``, ``tsv``, ``::`` or ``parquet``; found out if not given.
        header: whether the first line names the columns; found out if not given.

    Returns:
        The table.

    Raises:
        ValueError: if nothing usable is left.
    """
    frame = read_frame(path, file_format, header)
    names = _chosen(frame, columns, ("row", "column", "value"), path)
    row, column, raw = (frame[name] for name in names)
    value = raw.cast(pl.Float64, strict=False) if raw.dtype != pl.String else _parse(raw)
    missing_id = _is_missing(row) | _is_missing(column)
    reasons = {
        "missing id": missing_id,
        "missing value": _is_missing(raw) & ~missing_id,
        "value is not a number": value.is_null() & ~_is_missing(raw) & ~missing_id,
        "value is not finite": ~value.is_finite().fill_null(True) & ~missing_id,
    }
    refused = {reason: int(mask.sum()) for reason, mask in reasons.items() if mask.any()}
    good = ~(missing_id | value.is_null() | ~value.is_finite().fill_null(False))
    if not good.any():
        raise ValueError(_nothing_left(path, frame.height, names[2], raw, refused))
    ids = [_ids(side.filter(good)) for side in (row, column)]
    kept = np.flatnonzero(good.to_numpy())
    return RatingTable(ids[0], ids[1], value.filter(good).to_numpy(), names, frame.height, refused, kept)


def read_pairs(
    path: str | Path, *, text: tuple[bool, bool], columns: tuple[str, ...] | None = None,
    file_format: str | None = None, header: bool | None = None,
) -> tuple[pl.DataFrame, Ids, Ids]:  # fmt: skip
    """Read (row id, column id) lines of a file whose other columns are kept.

    Args:
        path: the file.
        text: whether row ids, and column ids, are text in the model that they are meant for.
        columns: the two columns by name or by position from 1; the first two if not given.
        file_format: as for ``read_ratings``.
        header: as for ``read_ratings``.

    Returns:
        The whole table as it stands, the row ids and the column ids.

    Raises:
        ValueError: if an id is missing or is not a whole number where the model has whole numbers.
    """
    frame = read_frame(path, file_format, header)
    names = _chosen(frame, columns, ("row", "column"), path)
    found = []
    for name, as_text in zip(names, text, strict=True):
        side = frame[name]
        if (missing := _is_missing(side)).any():
            line = int(missing.arg_true()[0]) + 1
            raise ValueError(f"{path}: the id in column {name!r} is missing in data line {line}")
        found.append(_objects(side) if as_text else _ids(side))
    return frame, found[0], found[1]


def read_frame(path: str | Path, file_format: str | None = None, header: bool | None = None) -> pl.DataFrame:
    """Read a table of any accepted format; the columns of text formats are text.

    Args:
        path: the file.
        file_format: ``csv``, ``tsv``, ``::`` or ``parquet``; found out if not given.
        header: whether the first line names the columns; it does if none of its fields is a number, unless told.

    Returns:
        The table; columns without a header are called column_1, column_2, ...

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is empty or cannot be read.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    if file_format is not None and file_format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {file_format!r}")
    try:
        if file_format == "parquet" or (file_format is None and file.suffix.lower() in (".parquet", ".pq")):
            return pl.read_parquet(file)
        with file.open(encoding="utf-8", errors="replace") as lines:
            first = lines.readline().rstrip("\n\r")
        if not first:
            raise ValueError(f"{file} is empty")
        separator = _separator(file, first, file_format)
        named = _has_header(first.split(separator)) if header is None else header
        return _split(file, first, named) if separator == "::" else _delimited(file, separator, named)
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{file} cannot be read as a table: {str(error).splitlines()[0]}") from None


def _separator(file: Path, first: str, file_format: str | None) -> str:
    if file_format is not None:
        return _SEPARATORS.get(file_format, file_format)
    if "::" in first:
        return "::"
    by_name = _SEPARATORS.get(file.suffix.lower().lstrip("."))
    if by_name is not None and by_name in first:
        return by_name
    return max(("\t", ";", "|", ","), key=first.count)


def _delimited(file: Path, separator: str, header: bool) -> pl.DataFrame:
    return pl.read_csv(
        file, separator=separator, has_header=header, infer_schema=False, truncate_ragged_lines=True,
        encoding="utf8-lossy",
    )  # fmt: skip


def _split(file: Path, first: str, header: bool) -> pl.DataFrame:
    """Lines cut at ``::``, which a CSV reader cannot do."""
    lines = pl.read_csv(
        file, separator="\x1f", has_header=False, infer_schema=False, quote_char=None, encoding="utf8-lossy"
    ).to_series(0)
    width = first.count("::") + 1
    frame = lines.str.splitn("::", width).struct.unnest()
    names = first.split("::") if header else [f"column_{k + 1}" for k in range(width)]
    frame.columns = names
    return frame[1:] if header else frame


def _has_header(fields: list[str]) -> bool:
    """A first line is a header if none of its fields is a number; of two fields none may hold a digit either."""
    for text in fields:
        try:
            float(text.strip().strip('"'))
        except ValueError:
            continue
        return False
    return len(fields) != 2 or not any(character.isdigit() for text in fields for character in text)


def _chosen(
    frame: pl.DataFrame, columns: tuple[str, ...] | None, roles: tuple[str, ...], path: str | Path
) -> list[str]:
    """The names of the wanted columns."""
    if columns is None:
        if frame.width < len(roles):
            raise ValueError(f"{path} must have {len(roles)} columns ({', '.join(roles)}), got {frame.columns}")
        return frame.columns[: len(roles)]
    if len(columns) != len(roles):
        raise ValueError(f"{len(roles)} columns are wanted ({', '.join(roles)}), got {', '.join(columns)}")
    names = []
    for wanted in columns:
        if wanted in frame.columns:
            names.append(wanted)
        elif wanted.isdigit() and 1 <= int(wanted) <= frame.width:
            names.append(frame.columns[int(wanted) - 1])
        else:
            raise ValueError(
                f"{path} has no column {wanted!r}; it has {frame.columns} (or positions 1 to {frame.width})"
            )
    return names


def _is_missing(column: pl.Series) -> pl.Series:
    if column.dtype == pl.String:
        return column.is_null() | (column.str.strip_chars() == "").fill_null(True)
    return column.is_null()


def _parse(column: pl.Series) -> pl.Series:
    return column.str.strip_chars().cast(pl.Float64, strict=False)


def _ids(column: pl.Series) -> Ids:
    """Whole numbers if all ids are, text otherwise."""
    if column.dtype.is_integer():
        return column.to_numpy()
    if column.dtype == pl.String:
        whole = column.str.strip_chars().cast(pl.Int64, strict=False)
        # "007" and "+7" are names, not numbers
        if not whole.has_nulls() and (whole.cast(pl.String) == column.str.strip_chars()).all():
            return whole.to_numpy()
    return _objects(column)


def _objects(column: pl.Series) -> npt.NDArray[Any]:
    out = np.empty(len(column), dtype=object)
    out[:] = column.cast(pl.String).str.strip_chars().to_list()
    return out


def _nothing_left(path: str | Path, n_read: int, name: str, raw: pl.Series, refused: dict[str, int]) -> str:
    example = next((repr(v) for v in raw.head(100).to_list() if v is not None), "nothing")
    why = ", ".join(f"{count} {reason}" for reason, count in refused.items()) or "no lines"
    return f"{path}: none of {n_read} lines can be used ({why}); the value column {name!r} starts with {example}"
