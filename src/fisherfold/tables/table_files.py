"""Tables in files, whatever they hold: found out, unpacked within a limit, decoded, and read.

Nothing is executed and nothing disappears: a line that cannot be a record is refused and counted with its reason, a
file that cannot be a table is refused with a sentence. Text is UTF-8 (a byte order mark is dropped), UTF-16 with a byte
order mark, or what the caller names, and is cut in ``text_tables``. Gzip is unpacked up to a limit.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from fisherfold.plain import counted
from fisherfold.tables.decimals import check_mark
from fisherfold.tables.table_columns import index_of
from fisherfold.tables.table_sources import content, head, opened, spoken
from fisherfold.tables.text_tables import IsData, TextTable, cut, first_line, for_polars, layout_of

FORMATS = ("csv", "tsv", "::", "parquet")
SIZE_LIMIT = 4 * 2**30  # bytes that a packed file may unpack to
GZIP, PACKED = b"\x1f\x8b", {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}


def read_table(
    path: str | Path, *, file_format: str | None = None, header: bool | None = None, encoding: str | None = None,
    decimal: str | None = None, max_bytes: int = SIZE_LIMIT, is_data: IsData | None = None,
) -> TextTable:  # fmt: skip
    """Read a table of any accepted format.

    Args:
        path: the file; ``-`` for standard input.
        file_format: ``csv``, ``tsv``, ``::`` or ``parquet``; found out if not given.
        header: whether the first line names the columns; it does if none of its fields is a number, unless told.
        encoding: of text that is neither UTF-8 nor UTF-16 with a byte order mark.
        decimal: the decimal mark of its numbers, which stay text here; a comma bears on how lines may be cut.
        max_bytes: the most that a packed file, or a Parquet file, may take unpacked.
        is_data: says of the fields of the first line that they are data where nothing else tells.

    Returns:
        The table; columns without a header are called column_1, column_2, ...

    Raises:
        ValueError: if the file is empty, too large unpacked, or no table.
    """
    if file_format is not None and file_format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {file_format!r}")
    check_mark(decimal)
    file, source = spoken(path), opened(path)
    start = head(source, 8)
    with readable(file):
        if is_parquet(file, start, file_format):
            frame = _parquet(file, source, max_bytes)
            return TextTable(frame, frame.columns, index=index_of(source, frame.columns))
        source = _text(file, source, start, encoding, max_bytes)
        first, source = first_line(file, source)
        layout = layout_of(file, first, file_format, header, decimal, is_data)
        return cut(source, layout, header=layout.header)


@contextlib.contextmanager
def readable(file: Path) -> Iterator[None]:
    """Refusals of polars as one sentence.

    Args:
        file: as messages name it.

    Yields:
        Nothing.

    Raises:
        ValueError: if polars refuses what the block reads.
    """
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        reason = (str(error).splitlines() or ["it is damaged"])[0]
        raise ValueError(f"{file} cannot be read as a table: {reason}") from None


def is_parquet(file: Path, start: bytes, file_format: str | None) -> bool:
    """Whether a file is to be read as Parquet.

    Args:
        file: the file.
        start: its first bytes.
        file_format: the format, if it was named.

    Returns:
        What was named, else whether its name or its content says so.
    """
    if file_format is not None:
        return file_format == "parquet"
    return file.suffix.lower() in (".parquet", ".pq") or start.startswith(b"PAR1")


def scanned(source: Path | bytes) -> pl.LazyFrame:
    """A Parquet file that is not read yet.

    Args:
        source: the file, or its content.

    Returns:
        Its table, with the text of categories in their place.
    """
    lazy = pl.scan_parquet(for_polars(source), glob=False, hive_partitioning=False)
    # a way to pack text, of which polars would make no numbers
    packed = [name for name, kind in lazy.collect_schema().items() if kind in (pl.Categorical, pl.Enum)]
    return lazy.with_columns(pl.col(packed).cast(pl.String)) if packed else lazy


def _parquet(file: Path, source: Path | bytes, max_bytes: int) -> pl.DataFrame:
    """A Parquet file, unless a few bytes of it stand for more rows than fit."""
    lazy = scanned(source)
    width = len(lazy.collect_schema())
    rows = int(lazy.select(pl.len()).collect().item())
    if rows * width * 8 > max_bytes:
        raise ValueError(_too_large(file, f"{counted(rows, 'row', form=',')} of {counted(width, 'column')}", max_bytes))
    return lazy.collect()


def flat(column: pl.Series, path: str | Path, *, dates: bool = True) -> pl.Series:
    """Refuse a column of a Parquet file that holds neither text nor numbers nor dates.

    Args:
        column: the column.
        path: where it comes from, for messages.
        dates: whether it may hold dates or times; as numbers they would be counts of days or microseconds.

    Returns:
        The column.

    Raises:
        ValueError: if it holds lists, records, bytes or lengths of time, or dates that it may not.
    """
    if column.dtype.is_temporal() and not dates:
        raise ValueError(f"{path}: column {column.name!r} holds {column.dtype}, numbers are expected")
    if column.dtype.is_nested() or column.dtype in (pl.Binary, pl.Object, pl.Duration):
        raise ValueError(f"{path}: column {column.name!r} holds {column.dtype}, text or numbers are expected")
    return column


def id_text(column: pl.Series, path: str | Path) -> pl.Series:
    """Ids as whole numbers or text: a float that is a whole number is written as one, and NaN is a missing id.

    Args:
        column: the column.
        path: where it comes from, for messages.

    Returns:
        The column if it holds whole numbers, else its text.

    Examples:
        >>> id_text(pl.Series([7.0, 2.5, float("nan")]), "a file").to_list()
        ['7', '2.5', None]
    """
    if column.dtype.is_integer():
        return column
    text = flat(column, path).cast(pl.String)
    if not column.dtype.is_float():
        return text
    # value by value, so that a file read in pieces has the same ids
    whole = column.cast(pl.Int64, strict=False)
    exact = ((whole.cast(column.dtype) == column) & (whole.abs() < 2**53)).fill_null(False)
    return whole.cast(pl.String).zip_with(exact, text.set(~column.is_finite().fill_null(False), None))


def _too_large(file: Path, what: str, max_bytes: int) -> str:
    return f"{file} unpacks to {what}, {max_bytes:,} bytes are allowed; raise the limit (max_bytes, --unpack-limit)"


def _text(file: Path, source: Path | bytes, start: bytes, encoding: str | None, max_bytes: int) -> Path | bytes:
    """The source itself if it is plain UTF-8, else its content as UTF-8."""
    for magic, name in PACKED.items():
        if start.startswith(magic):
            raise ValueError(f"{file} is packed with {name}; unpack it first (only gzip is unpacked here)")
    if start.startswith(GZIP):
        source = _gunzip(file, source, max_bytes)
        start = source[:8]
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        encoding = "utf-16"
    if encoding is not None:
        try:
            return content(source).decode(encoding).encode()
        except LookupError:
            raise ValueError(f"there is no encoding {encoding!r}; latin-1 and utf-16 are examples") from None
        except UnicodeError as error:
            raise ValueError(f"{file} is not {encoding} text: {error}") from None
    return source


def _gunzip(file: Path, source: Path | bytes, max_bytes: int) -> bytes:
    parts, size = [], 0
    try:
        with gzip.open(io.BytesIO(source) if isinstance(source, bytes) else source) as stream:
            while part := stream.read(2**20):
                size += len(part)
                if size > max_bytes:
                    raise ValueError(_too_large(file, "more bytes than that", max_bytes))
                parts.append(part)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file} is a damaged gzip file: {error}") from None
    return b"".join(parts)
