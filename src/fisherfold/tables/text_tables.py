"""Tables as text: how lines are cut is found out from the first of them, then they are cut, fast or line by line.

Quoted fields may hold separators and line ends. A line that cannot be a record is refused and counted with its reason.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from fisherfold.tables.decimals import is_comma_number
from fisherfold.tables.table_sources import content, head

_SEPARATORS = {"csv": ",", "tsv": "\t", "tab": "\t", "psv": "|"}
_FIRST_LINE = 2**20
_QUOTED_LINES = 100  # a quoted field may run over so many lines
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


def first_line(file: Path, source: Path | bytes) -> tuple[str, Path | bytes]:
    """The first line that holds anything, and the source from there on, with line ends that readers know.

    Args:
        file: the file, for messages.
        source: the file itself, or its content.

    Returns:
        The line, and the source.

    Raises:
        ValueError: if there is no such line, or one that no table has.
    """
    plain = head(source, _FIRST_LINE).removeprefix(codecs.BOM_UTF8)
    if b"\n" not in plain and b"\r" in plain:
        return first_line(file, content(source).replace(b"\r", b"\n"))
    if plain[:1] in (b"\n", b"\r"):
        stripped = content(source).removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n")
        if stripped:
            return first_line(file, stripped)
    line = plain.split(b"\n", 1)[0].rstrip(b"\r")
    if not line.strip():
        raise ValueError(f"{file} is empty" if not plain.strip() else f"{file} starts with a blank line")
    reject_binary(file, plain, line)
    if len(line) >= _FIRST_LINE - 4:
        raise ValueError(f"{file} is no table: its first line has more than {_FIRST_LINE:,} bytes")
    return line.decode("utf-8", errors="replace"), source


def reject_binary(file: Path, start: bytes, line: bytes) -> None:
    """Refuse a picture, a program or a pickle, of which decoding with replacements would make one odd column.

    Args:
        file: the file, for messages.
        start: its first bytes.
        line: those of its first line.

    Raises:
        ValueError: if the line has NUL bytes, or they follow on a line that is not UTF-8; ids below may have them.
    """
    if b"\0" in line or (b"\0" in start and "\ufffd" in line.decode("utf-8", errors="replace")):
        raise ValueError(
            f"{file} is binary, not text: NUL bytes are at its start; if it is UTF-16 without a byte order mark, name "
            "that (encoding, --encoding utf-16-le)"
        )


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
    if head(source, 4).startswith(_UNPACKED_BY_READER):
        raise pl.exceptions.ComputeError("packed twice")
    return for_polars(source)


def for_polars(source: Path | bytes) -> Path | bytes:
    """A file as polars may be told of it.

    Args:
        source: the file, or its content.

    Returns:
        An absolute path, which is nobody's home folder and no address; the content if its name is not UTF-8.
    """
    if isinstance(source, bytes):
        return source
    found = source.resolve()
    try:
        str(found).encode()
    except UnicodeEncodeError:
        return source.read_bytes()
    return found


def _slowly(
    source: Path | bytes, separator: str, names: list[str], header: bool
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Line by line, for files that the fast reader refuses as a whole: only the broken lines are refused."""
    text = content(source).removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="replace")
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
            # the line as it stands: the carriage return before a quoted line end belongs to the field
            fields = _fields("\n".join(lines[place - 1 : after]), separator)
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
