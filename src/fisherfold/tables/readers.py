r"""Tables in files: CSV with any separator, MovieLens ``::``, gzip of both, Parquet.

A first line in which a field is a number is data, else a header, unless ``header`` says so. With a
header, ids and values are in the columns with usual names, without in the first ones, unless
``columns`` says so. The separator is the one of ``, ; tab | ::`` that the first line has most of,
unless it is given. Text is UTF-8 (or ``encoding``). A line is rejected, and counted with its
reason, if it has more fields than the first, or lacks an id or a finite value; more than 1 % of
such lines is an error unless ``skip_bad_lines``. Ids are integers if the whole column is (``007``
is not one), else text without the blanks around it.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from fisherfold.tables.ids import Ids, objects
from fisherfold.tables.parquet import cut, parquet_files, read_parquet
from fisherfold.tables.roles import ENTRIES, PAIRS, check_half_known, usual_columns
from fisherfold.tables.times import seconds
from fisherfold.threads import check_polars

LARGEST = 1e300  # of a value: the sum of many is finite
SIZE_LIMIT = 4 * 2**30  # bytes that a packed file may take unpacked
BAD_SHARE = 0.01  # of the lines may be rejected
_SEPARATORS = (",", "\t", ";", "|", "::")
_UNIT = b"\x1f"  # stands for "::", as polars takes separators of one byte only


@dataclass(frozen=True)
class Table:
    """A table that was read."""

    frame: pl.DataFrame  # its good lines; columns of text, or as a Parquet file has them
    path: str  # where it comes from, for messages
    header: (
        list[str] | None
    )  # the names in its first line or of the Parquet file; None if the first line was data
    n_lines: int  # how many lines there are below the header, those rejected included
    rejected: dict[str, int] = field(
        default_factory=dict
    )  # how many of them were rejected, by reason


@dataclass(frozen=True)
class RatingTable:
    """Ratings that were read."""

    rows: Ids  # row ids
    columns: Ids  # column ids
    values: npt.NDArray[np.float64]  # finite values; 1 where there are none
    has_values: bool  # whether there are
    times: (
        npt.NDArray[np.float64] | None
    )  # when, if a column of times was asked for: numbers, finite
    names: list[str]  # the names of the columns that were read
    header: list[str] | None  # the names in the first line; None if it was data
    n_lines: int  # how many lines there are, those rejected included
    rejected: dict[str, int]  # how many of them were rejected, by reason
    others: list[str]  # the columns that were not read
    weights: npt.NDArray[np.float64] | None = None  # if a column of weights was asked for
    keys: Ids | None = None  # what identifies each, if a column of keys was asked for


def read_table(
    path: str | Path,
    *,
    separator: str | None = None,
    header: bool | None = None,
    encoding: str | None = None,
    max_bytes: int = SIZE_LIMIT,
    part: tuple[int, int] = (0, 1),
    skip_bad_lines: bool = True,
) -> Table:
    """Read a table with all its columns, or one part of its lines of so many."""
    check_polars()
    name = "standard input" if str(path) == "-" else str(path)
    content, is_parquet = _content(path, name, max_bytes)
    if content is None or is_parquet:
        frame = read_parquet(Path(path) if content is None else content, name, max_bytes, part)
        table = Table(frame, name, frame.columns, frame.height)
    else:
        table = _read_text(content, name, _TextFormat(separator, header, encoding), part)
    if table.n_lines == 0 and part[0] == 0:
        raise ValueError(f"{name} has no lines" + (" below its header" if table.header else ""))
    check_rejected(name, table.rejected, table.n_lines, skip_bad_lines)
    return table


def read_ratings(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    known: Sequence[str] = (),
    time: str | None = None,
    weight: str | None = None,
    key: str | None = None,
    implicit: bool = False,
    decimal: str = ".",
    skip_bad_lines: bool = False,
    part: tuple[int, int] = (0, 1),
    **how: Any,
) -> RatingTable:
    """Read lines of row id, column id and value.

    ``columns`` are these three, by name or position; ``known`` are their names in a table before
    this one, which count if all of them are there. ``time`` is a column with the time of each
    value, ``weight`` one with its weight, ``key`` one that identifies it. With ``implicit`` pairs
    without values will do, and each of them gets the value 1. ``how`` is what ``read_table`` takes.
    """
    table = read_table(path, part=part, **how)
    names = choose(table, columns, ENTRIES, known=known, optional=implicit)
    row, column = (_id_column(table.frame[name], table.path) for name in names[:2])
    others = {
        name: (numbers(table.frame[name], decimal, table.path), "value") for name in names[2:]
    }
    if time is not None:
        (name,) = find_columns(table, [time])
        others[name] = seconds(table.frame[name]), "time"
        names = [*names, name]
    if weight is not None:
        (name,) = find_columns(table, [weight])
        others[name] = numbers(table.frame[name], decimal, table.path), "weight"
        names = [*names, name]
    reasons = {"missing id": _is_missing(row) | _is_missing(column)}
    keys = None
    if key is not None:
        (name,) = find_columns(table, [key])
        keys = _id_column(table.frame[name], table.path)
        names = [*names, name]
        reasons["missing key"] = _is_missing(keys)
    for name, (parsed, what) in others.items():
        missing = _is_missing(table.frame[name])
        finite = parsed.is_finite().fill_null(False)
        reasons |= {
            f"missing {what}": missing,
            f"{what} is not a number": parsed.is_null() & ~missing,
            f"{what} is not finite": parsed.is_not_null() & ~finite,
            f"{what} is beyond {LARGEST:g}": finite & (parsed.abs() > LARGEST).fill_null(False),
        }
    good = pl.repeat(True, table.frame.height, eager=True)
    rejected = dict(table.rejected)
    for reason, mask in reasons.items():
        if count := int((mask & good).sum()):
            rejected[reason] = count
        good &= ~mask
    check_rejected(table.path, rejected, table.n_lines, skip_bad_lines)
    if part == (0, 1) and not good.any():
        raise ValueError(f"{table.path} has no ratings: {_reasons(rejected)}")
    kept = {what: parsed.filter(good).to_numpy(writable=True) for parsed, what in others.values()}
    return RatingTable(
        _id_array(row.filter(good)),
        _id_array(column.filter(good)),
        kept.get("value", np.ones(int(good.sum()))),
        "value" in kept,
        kept.get("time"),
        names,
        table.header,
        table.n_lines,
        rejected,
        [n for n in table.frame.columns if n not in names],
        kept.get("weight"),
        None if keys is None else _id_array(keys.filter(good)),
    )


def read_pairs(
    path: str | Path, *, columns: Sequence[str] | None = None, known: Sequence[str] = (), **how: Any
) -> tuple[Table, Ids, Ids]:
    """Read a table, and row id and column id in each of its lines."""
    table = read_table(path, **how)
    if table.rejected:
        raise ValueError(
            f"{table.path}: {_reasons(table.rejected)}; every line must be a pair of ids"
        )
    row, column = (
        ids(table.frame[name], table.path) for name in choose(table, columns, PAIRS, known=known)
    )
    return table, row, column


def choose(
    table: Table,
    columns: Sequence[str] | None,
    roles: Sequence[str],
    *,
    known: Sequence[str] = (),
    optional: bool = False,
) -> list[str]:
    """Find the columns of ids and values: as given, by known or usual names, or first."""
    names = table.frame.columns
    least = 2 if optional else len(roles)
    if columns is None and table.header is not None and known:
        check_half_known(names, known)
    if columns is not None:
        chosen = find_columns(table, columns)
    elif known and set(known) <= set(names):
        chosen = list(known)
    elif table.header is None:
        chosen = names[: len(roles)]
    else:
        named = [name for name, given in zip(names, table.header, strict=True) if given]
        try:
            chosen = usual_columns(named, roles, optional=optional)
        except LookupError as error:
            if len(named) == least == 2:
                return named
            way = ",".join(("user", "item", "rating")[: len(roles)])
            raise ValueError(f"{table.path}: {error}; name them, as in --columns {way}") from None
    if not least <= len(chosen) <= len(roles) or len(set(chosen)) < len(chosen):
        wanted = ", ".join(("row id", "column id", "value")[:least])
        raise ValueError(
            f"{table.path}: {least} different columns are needed ({wanted}), got {_few(chosen)}"
        )
    return chosen


def find_columns(table: Table, columns: Sequence[str]) -> list[str]:
    """Give the names of columns that were named, or numbered from 1."""
    names = table.frame.columns
    found = [
        names[int(c) - 1] if c not in names and c.isdecimal() and 0 < int(c) <= len(names) else c
        for c in map(str.strip, columns)
    ]
    if absent := [name for name in found if name not in names]:
        raise ValueError(f"{table.path} has no column {absent[0]!r}; its columns are {_few(names)}")
    return found


def check_rejected(path: str, rejected: dict[str, int], n_lines: int, skip_bad_lines: bool) -> None:
    """Raise an error if too many lines were rejected."""
    count = sum(rejected.values())
    if count > BAD_SHARE * n_lines and not skip_bad_lines:
        share = f"{count:,} of {n_lines:,} lines ({count / n_lines:.1%})"
        raise ValueError(
            f"{path}: {share} cannot be used: {_reasons(rejected)}; correct them, name other "
            "--columns or another "
            "--separator or --decimal mark, or leave such lines out with --skip-bad-lines"
        )


def numbers(column: pl.Series, decimal: str = ".", path: str = "the table") -> pl.Series:
    """Convert a column to floats."""
    if decimal not in (".", ","):
        raise ValueError(f"--decimal must be . or , got {decimal!r}")
    if column.dtype == pl.String:
        text = column.str.strip_chars()
        if decimal == ",":
            # "1.5" and "1.234,5" are no numbers with a decimal comma
            text = pl.select(pl.when(~text.str.contains(".", literal=True)).then(text)).to_series()
            text = text.str.replace(",", ".", literal=True)
        return text.cast(pl.Float64, strict=False).alias(column.name)
    if column.dtype.is_numeric() or column.dtype in (pl.Boolean, pl.Null):
        return column.cast(pl.Float64)
    raise ValueError(f"{path}: column {column.name!r} holds {column.dtype}, numbers are expected")


def ids(column: pl.Series, path: str = "the table") -> Ids:
    """Convert a column of ids, none of which may be missing."""
    found = _id_column(column, path)
    if (missing := _is_missing(found)).any():
        line = int(missing.arg_true()[0]) + 1
        raise ValueError(f"{path}: the id in column {column.name!r} is missing in data line {line}")
    return _id_array(found)


def _id_column(column: pl.Series, path: str) -> pl.Series:
    """Ids as Int64 or as text without blanks around it."""
    if column.dtype in (pl.Categorical, pl.Enum, pl.UInt64):
        column = column.cast(pl.String)
    if column.dtype == pl.String:
        return column.str.strip_chars()
    if column.dtype.is_integer() or column.dtype in (pl.Boolean, pl.Null):
        return column.cast(pl.Int64)
    if (
        column.dtype.is_float()
        and not ((whole := column.cast(pl.Int64, strict=False)) != column).any()
    ):
        return whole
    raise ValueError(
        f"{path}: column {column.name!r} holds {column.dtype}; ids must be integers or text"
    )


def _id_array(column: pl.Series) -> Ids:
    if column.dtype == pl.String:
        whole = column.cast(pl.Int64, strict=False)
        if not (whole.cast(pl.String) != column).fill_null(True).any():  # "007" and "+7" are text
            return whole.to_numpy()
        return objects(column.to_list())
    return column.to_numpy()


def _is_missing(column: pl.Series) -> pl.Series:
    empty = column.is_null()
    return (
        empty | (column.str.strip_chars() == "").fill_null(False)
        if column.dtype == pl.String
        else empty
    )


def _content(path: str | Path, name: str, max_bytes: int) -> tuple[bytes | None, bool]:
    """The unpacked bytes of a file, None for Parquet on the disk; whether it is Parquet."""
    if str(path) == "-":
        if sys.stdin.isatty():
            raise ValueError(
                "- reads a table from standard input, which is a terminal: pipe a file into it"
            )
        content = sys.stdin.buffer.read()
    else:
        if Path(path).is_dir():
            if not parquet_files(path):
                raise IsADirectoryError(
                    f"{name} is a folder without Parquet files, a table is expected"
                )
            return None, True
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no file {name}")
        with Path(path).open("rb") as file:
            start = file.read(4)
            if start == b"PAR1" and file.seekable():
                return None, True
            content = start + file.read()
    if content[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
                content = packed.read(max_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{name} is a damaged gzip file: {error}") from None
        if len(content) > max_bytes:
            raise ValueError(
                f"{name} takes more than {max_bytes:,} bytes unpacked; --unpack-limit raises the "
                "limit"
            )
    return content, content[:4] == b"PAR1"


@dataclass(frozen=True)
class _TextFormat:
    """How a text is read; None is detected."""

    separator: str | None
    header: bool | None
    encoding: str | None


def _read_text(content: bytes, name: str, how: _TextFormat, part: tuple[int, int]) -> Table:
    content = _as_utf8(content, name, how.encoding)
    content, line, mark = _separated(content, name, how.separator)
    quote = None if mark == _UNIT.decode() else '"'
    fields = _fields(line, name, mark, quote)
    header = how.header
    if header is None:
        header = not any(_is_number(text) for text in fields)
    body = content[len(line) :].lstrip(b"\r\n") if header else content
    # one column more than the first line has, for the surplus of lines that are too long; and names
    # of ours, so that the first bytes of a file are never taken for a packed one
    n = len(fields)
    body = mark.join(f"c{k}" for k in range(n + 1)).encode() + b"\n" + body
    frame = _csv(body, name, quote, mark)
    broken = frame is None
    if frame is None:  # a quote that is never closed: quotes are text, and such lines rejected
        frame = _csv(body, name, None, mark)
    if frame is None:
        raise ValueError(f"{name} cannot be read as text with the separator {mark!r}")
    frame = frame.filter(~pl.all_horizontal(pl.all().is_null()))
    start, end = cut(frame.height, part)
    frame, rejected = _good_lines(frame[start:end], f"c{n}", broken)
    frame.columns = _names(fields) if header else [f"column_{k + 1}" for k in range(n)]
    return Table(frame, name, fields if header else None, end - start, rejected)


def _as_utf8(content: bytes, name: str, encoding: str | None) -> bytes:
    """The text of a file without marks and empty lines at its start."""
    if encoding is None and content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    if encoding is not None:
        try:
            content = content.decode(encoding).encode()
        except (UnicodeError, LookupError) as error:
            raise ValueError(f"{name} is not text in {encoding}: {error}") from None
    return content.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")


def _separated(content: bytes, name: str, separator: str | None) -> tuple[bytes, bytes, str]:
    """The text, its first line, and the separator of one byte that both have."""
    line = content[: content.find(b"\n") % (len(content) + 1)].rstrip(b"\r")
    if not line.strip():
        raise ValueError(f"{name} is empty")
    try:
        first = line.decode()
    except UnicodeDecodeError:
        raise _not_utf8(name) from None
    mark = separator or max(_SEPARATORS, key=lambda each: first.count(each) * len(each))
    if mark == "::":
        if _UNIT in content:
            raise ValueError(f"{name} has the separator :: and the control character 0x1F")
        return content.replace(b"::", _UNIT), line.replace(b"::", _UNIT), _UNIT.decode()
    if len(mark.encode()) != 1:
        raise ValueError(f"--separator must be one character or ::, got {mark!r}")
    return content, line, mark


def _fields(line: bytes, name: str, mark: str, quote: str | None) -> list[str]:
    """The fields of the first line."""
    first = line.decode()
    if quote is None:
        return [text.strip() for text in first.split(mark)]
    try:
        found = next(csv.reader([first.replace("\r", " ")], delimiter=mark))
    except csv.Error as error:
        raise ValueError(f"{name}: the first line cannot be read: {error}") from None
    return [text.strip() for text in found]


def _good_lines(
    frame: pl.DataFrame, surplus: str, broken: bool
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Lines without a surplus field or, if quotes are ``broken``, a quote; counts of others."""
    rejected = {}
    long = frame[surplus].is_not_null()
    if count := int(long.sum()):
        rejected["too many fields"] = count
    frame = frame.filter(~long).drop(surplus)
    if broken:
        marks = pl.all().str.contains('"', literal=True).fill_null(False)
        quoted = frame.select(pl.any_horizontal(marks)).to_series()
        rejected["malformed quotes"] = int(quoted.sum())
        frame = frame.filter(~quoted)
    return frame, rejected


def _csv(content: bytes, name: str, quote: str | None, mark: str) -> pl.DataFrame | None:
    """The columns of a text; None if its quotes are malformed."""
    try:
        return pl.read_csv(
            io.BytesIO(content),
            quote_char=quote,
            separator=mark,
            infer_schema=False,
            truncate_ragged_lines=True,
        )
    except pl.exceptions.PolarsError as error:
        if "utf" in str(error):
            raise _not_utf8(name) from None
        return None


def _names(fields: list[str]) -> list[str]:
    """Names of columns: without a name the place, for the second of a name a number."""
    names = [text or f"column_{place}" for place, text in enumerate(fields, start=1)]
    seen = Counter[str]()
    for place, text in enumerate(names):
        seen[text] += 1
        if seen[text] > 1:
            names[place] = f"{text}_{seen[text]}"
    return (
        names
        if len(set(names)) == len(names)
        else [f"{text}_{k}" for k, text in enumerate(names, start=1)]
    )


def _is_number(text: str) -> bool:
    try:
        float(text.strip().replace(",", "."))
    except ValueError:
        return False
    return True


def _not_utf8(name: str) -> ValueError:
    return ValueError(
        f"{name} is not UTF-8 text; name its --encoding, for example latin-1, or unpack it if it "
        "is packed"
    )


def _reasons(rejected: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in rejected.items()) or "it is empty"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
