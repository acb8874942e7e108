"""Tables in files, whatever they hold: found out, unpacked within a limit, decoded, and cut into fields.

Nothing is executed and nothing disappears: a line that cannot be a record is refused and counted with its reason, a
file that cannot be a table is refused with a sentence. Text is UTF-8 (a byte order mark is dropped), UTF-16 with a byte
order mark, or what the caller names. Quoted fields may hold separators and line ends. Gzip is unpacked up to a limit.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from fisherfold.estimators.decimals import check_mark, is_comma_number
from fisherfold.estimators.table_columns import index_of
from fisherfold.plain import counted

FORMATS = ("csv", "tsv", "::", "parquet")
SIZE_LIMIT = 4 * 2**30  # bytes that a packed file may unpack to
_SEPARATORS = {"csv": ",", "tsv": "\t", "tab": "\t", "psv": "|"}
_FIRST_LINE = 2**20
_QUOTED_LINES = 100  # a quoted field may run over so many lines
_PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
_UNPACKED_BY_READER = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"x\x01", b"x^", b"x\x9c", b"x\xda")
IsData = Callable[[list[str]], bool]


@dataclass(frozen=True)
class TextTable:
    """What a file held.

    Attributes:
        frame: the records, all of them text unless the file is Parquet.
        header: the names in its first line, or those of a Parquet file; None if it has none.
        refused: how many lines were refused, by reason.
        index: the columns of a Parquet file that were the index of a data frame.
    """

    frame: pl.DataFrame
    header: list[str] | None
    refused: dict[str, int] = field(default_factory=dict)
    index: list[str] = field(default_factory=list)


def read_table(
    path: str | Path, *, file_format: str | None = None, header: bool | None = None, encoding: str | None = None,
    decimal: str | None = None, max_bytes: int = SIZE_LIMIT, is_data: IsData | None = None,
) -> TextTable:  # fmt: skip
    """Read a table of any accepted format.

    Args:
        path: the file.
        file_format: ``csv``, ``tsv``, ``::`` or ``parquet``; found out if not given.
        header: whether the first line names the columns; it does if none of its fields is a number, unless told.
        encoding: of text that is neither UTF-8 nor UTF-16 with a byte order mark.
        decimal: the decimal mark of its numbers, which stay text here; a comma bears on how lines may be cut.
        max_bytes: the most that a packed file, or a Parquet file, may take unpacked.
        is_data: says of the fields of the first line that they are data where nothing else tells.

    Returns:
        The table; columns without a header are called column_1, column_2, ...

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is empty, too large unpacked, or no table, or no file but a folder or a pipe.
    """
    file = Path(path)
    if not file.is_file():
        if file.exists():
            raise ValueError(f"{file} is a {'folder' if file.is_dir() else 'device or a pipe'}, a file is expected")
        raise FileNotFoundError(f"there is no file {file}")
    if file_format is not None and file_format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {file_format!r}")
    check_mark(decimal)
    with file.open("rb") as opened:
        start = opened.read(8)
    try:
        if is_parquet(file, start, file_format):
            frame = _parquet(file, max_bytes)
            return TextTable(frame, frame.columns, index=index_of(file, frame.columns))
        source = _text(file, start, encoding, max_bytes)
        first, source = _first_line(file, source)
        layout = layout_of(file, first, file_format, header, decimal, is_data)
        return cut(source, layout, header=layout.header)
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


def scanned(file: Path) -> pl.LazyFrame:
    """A Parquet file that is not read yet.

    Args:
        file: the file.

    Returns:
        Its table, with the text of categories in their place.
    """
    lazy = pl.scan_parquet(_for_polars(file), glob=False, hive_partitioning=False)
    # a way to pack text, of which polars would make no numbers
    packed = [name for name, kind in lazy.collect_schema().items() if kind in (pl.Categorical, pl.Enum)]
    return lazy.with_columns(pl.col(packed).cast(pl.String)) if packed else lazy


def _parquet(file: Path, max_bytes: int) -> pl.DataFrame:
    """A Parquet file, unless a few bytes of it stand for more rows than fit."""
    lazy = scanned(file)
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


def as_csv(frame: pl.DataFrame, path: str | Path) -> bytes:
    """A table as the content of a CSV file.

    Args:
        frame: the table.
        path: where it comes from, for the message that names a column which such a file cannot hold.

    Returns:
        The content, in UTF-8.
    """
    for column in frame:
        flat(column, path)
    return frame.write_csv().encode()


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


def _text(file: Path, start: bytes, encoding: str | None, max_bytes: int) -> Path | bytes:
    """The file itself if it is plain UTF-8, else its content as UTF-8."""
    for magic, name in _PACKED.items():
        if start.startswith(magic):
            raise ValueError(f"{file} is packed with {name}; unpack it first (only gzip is unpacked here)")
    content = _gunzip(file, max_bytes) if start[:2] == b"\x1f\x8b" else None
    start = start if content is None else content[:8]
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        encoding = "utf-16"
    if encoding is not None:
        content = file.read_bytes() if content is None else content
        try:
            return content.decode(encoding).encode()
        except LookupError:
            raise ValueError(f"there is no encoding {encoding!r}; latin-1 and utf-16 are examples") from None
        except UnicodeError as error:
            raise ValueError(f"{file} is not {encoding} text: {error}") from None
    return file if content is None else content


def _gunzip(file: Path, max_bytes: int) -> bytes:
    parts, size = [], 0
    try:
        with gzip.open(file) as stream:
            while part := stream.read(2**20):
                size += len(part)
                if size > max_bytes:
                    raise ValueError(_too_large(file, "more bytes than that", max_bytes))
                parts.append(part)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file} is a damaged gzip file: {error}") from None
    return b"".join(parts)


@dataclass(frozen=True)
class Layout:
    """How the lines of a text file are cut.

    Attributes:
        separator: what stands between fields.
        names: the names of the columns.
        header: whether the first line holds them.
    """

    separator: str
    names: list[str]
    header: bool


def layout_of(
    file: Path, first: str, file_format: str | None, header: bool | None, decimal: str | None,
    is_data: IsData | None = None,
) -> Layout:  # fmt: skip
    """Find out how a file is cut from its first line.

    Args:
        file: the file.
        first: its first line.
        file_format: ``csv``, ``tsv`` or ``::``; found out if not given.
        header: whether the first line names the columns; found out if not given.
        decimal: the decimal mark, if it was named.
        is_data: says of the fields of the first line that they are data where nothing else tells.

    Returns:
        The layout.

    Raises:
        ValueError: if decimal commas could not be told from those between fields.
    """
    separator = _separator(file, first, file_format)
    fields = (None if separator == "::" else _fields(first, separator)) or first.split(separator)
    if header is None:
        header = _has_header(fields) and not (is_data is not None and is_data(fields))
    if decimal == separator and not header and '"' not in first:
        # cut at every comma, 1,2,3,5 has the value 3 and one column more
        raise ValueError(
            f"{file} is cut at commas and has no header that tells how often: decimal commas need another separator "
            'or quotation marks, as in 1,2,"3,5"; leave decimal (--decimal) out if it has none'
        )
    names = _distinct(fields) if header else [f"column_{k + 1}" for k in range(len(fields))]
    return Layout(separator, names, header)


def cut(source: Path | bytes, layout: Layout, *, header: bool) -> TextTable:
    """Cut a file, or whole lines of one, into fields.

    Args:
        source: where the lines are.
        layout: how they are cut.
        header: whether the first of them holds the names.

    Returns:
        The table.

    Raises:
        ComputeError: inside, where a block is no table for the fast reader; it is then read line by line.
    """
    separator, names = layout.separator, layout.names
    try:
        fast = _lines(source, len(names)) if separator == "::" else _delimited(source, separator)
        frame, refused = fast[int(header) :], dict[str, int]()
        if frame.width != len(names):  # the fields of the first line run over several lines
            raise pl.exceptions.ComputeError("the first line is not a whole record")
        frame.columns = names
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        frame, refused = _slowly(source, separator, names, header)
    blank = frame.select(pl.all_horizontal(pl.all().is_null())).to_series()
    if blank.any():
        refused["blank line"] = int(blank.sum())
        frame = frame.filter(~blank)
    return TextTable(frame, names if header else None, refused)


def _first_line(file: Path, source: Path | bytes) -> tuple[str, Path | bytes]:
    """The first line that holds anything, and the source from there on, with line ends that readers know."""
    if isinstance(source, bytes):
        head = source[:_FIRST_LINE]
    else:
        with source.open("rb") as opened:
            head = opened.read(_FIRST_LINE)
    plain = head.removeprefix(codecs.BOM_UTF8)
    if b"\n" not in plain and b"\r" in plain:
        whole = (source if isinstance(source, bytes) else source.read_bytes()).replace(b"\r", b"\n")
        return _first_line(file, whole)
    if plain[:1] in (b"\n", b"\r"):
        whole = source if isinstance(source, bytes) else source.read_bytes()
        stripped = whole.removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n")
        if stripped:
            return _first_line(file, stripped)
    line = plain.split(b"\n", 1)[0].rstrip(b"\r")
    if not line.strip():
        raise ValueError(f"{file} is empty" if not plain.strip() else f"{file} starts with a blank line")
    if len(line) >= _FIRST_LINE - 4:
        raise ValueError(f"{file} is no table: its first line has more than {_FIRST_LINE:,} bytes")
    return line.decode("utf-8", errors="replace"), source


def _separator(file: Path, first: str, file_format: str | None) -> str:
    if file_format is not None:
        return _SEPARATORS.get(file_format, file_format)
    if "::" in first:
        return "::"
    name = file.name.lower().removesuffix(".gz")
    by_name = _SEPARATORS.get(Path(name).suffix.lstrip("."))
    plain = re.sub('"[^"]*"', "", first)
    for other in "\t;|":
        if other in plain:  # 1;a;3,5 in a .csv has decimal commas, which part no fields
            cut_there = plain.split(other)
            likely = other != "|" and by_name in (None, ",", other) and len(cut_there) > 2
            if likely and any(map(is_comma_number, cut_there)):
                return other  # however many commas a title has
            plain = other.join(text.replace(",", "") if is_comma_number(text) else text for text in cut_there)
    counted = max(("\t", ";", "|", ","), key=plain.count)
    rivals = max(plain.count("\t"), plain.count(";"))  # a | often stands inside fields
    return by_name if by_name is not None and by_name in plain and rivals <= plain.count(by_name) else counted


def _has_header(fields: list[str]) -> bool:
    """A first line is a header if none of its fields is a number; of two fields none may hold a digit either."""
    for text in fields:
        try:
            float(text.strip())
        except ValueError:
            if not is_comma_number(text):
                continue
        return False
    return len(fields) != 2 or not any(character.isdigit() for text in fields for character in text)


def _distinct(names: list[str]) -> list[str]:
    """Column names; one that is empty or occurs again gets its position."""
    found: list[str] = []
    for k, name in enumerate(names, start=1):
        plain = name.strip()
        while not plain or plain in found:
            plain = f"{plain}_{k}" if plain else f"column_{k}"
        found.append(plain)
    return found


def _delimited(source: Path | bytes, separator: str) -> pl.DataFrame:
    # the header is read as data: names that occur twice, or look like paths, are our business
    return pl.read_csv(
        _plain(source), separator=separator, has_header=False, infer_schema=False, encoding="utf8-lossy", glob=False,
    )  # fmt: skip


def _lines(source: Path | bytes, width: int) -> pl.DataFrame:
    """Lines cut at ``::``, which a CSV reader cannot do."""
    lines = pl.read_csv(
        _plain(source), separator="\x1f", has_header=False, infer_schema=False, quote_char=None,
        encoding="utf8-lossy", glob=False,
    )  # fmt: skip
    if lines.width > 1:
        raise pl.exceptions.ComputeError("a line holds the character that was to hold lines together")
    return lines.to_series(0).str.splitn("::", width).struct.unnest()


def _plain(source: Path | bytes) -> Path | bytes:
    """The source for the fast reader, which would unpack on its own, without a limit, what looks packed."""
    if isinstance(source, bytes):
        start = source[:4]
    else:
        with source.open("rb") as opened:
            start = opened.read(4)
    if start.startswith(_UNPACKED_BY_READER):
        raise pl.exceptions.ComputeError("packed twice")
    return _for_polars(source) if isinstance(source, Path) else source


def _for_polars(file: Path) -> Path | bytes:
    """An absolute path, which is nobody's home folder and no address; the content if its name is not UTF-8."""
    found = file.resolve()
    try:
        str(found).encode()
    except UnicodeEncodeError:
        return file.read_bytes()
    return found


def _slowly(
    source: Path | bytes, separator: str, names: list[str], header: bool
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Line by line, for files that the fast reader refuses as a whole: only the broken lines are refused."""
    content = source if isinstance(source, bytes) else source.read_bytes()
    text = content.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="replace")
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    width, refused, rows = len(names), dict[str, int](), list[list[str | None]]()
    for number, fields in enumerate(_records(lines, separator, width)):
        if number == 0 and header:
            continue
        if fields is None or len(fields) > width:
            reason = "broken quotes or line ends" if fields is None else "too many fields"
            refused[reason] = refused.get(reason, 0) + 1
            continue
        rows.append([value or None for value in fields] + [None] * (width - len(fields)))
    return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String), orient="row"), refused


def _records(lines: list[str], separator: str, width: int) -> Iterator[list[str] | None]:
    """The fields of each record; None for a line with quotes that make no sense, and only for that line."""
    place = 0
    while place < len(lines):
        line = lines[place].removesuffix("\r")
        place += 1
        if separator == "::":
            yield line.split("::", width - 1)
            continue
        fields = _fields(line, separator)
        if fields is None and line.count('"') % 2 and (after := _closing(lines, place)) is not None:
            fields = _fields("\n".join([line, *lines[place:after]]), separator)
            place = place if fields is None else after
        yield fields


def _fields(record: str, separator: str) -> list[str] | None:
    try:
        return next(csv.reader(io.StringIO(record, newline=""), delimiter=separator, strict=True), [])
    except csv.Error:
        return None


def _closing(lines: list[str], place: int) -> int | None:
    """Where a quote that is open before a line is closed: the number after that line's."""
    for k in range(place, min(place + _QUOTED_LINES, len(lines))):
        if lines[k].count('"') % 2:
            return k + 1
    return None
