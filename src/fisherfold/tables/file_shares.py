"""The share of a file that one process reads: a range of bytes of a text file, a range of rows of a Parquet file.

A line belongs to the process in whose range it starts. Where a range begins inside a quoted field, a line break there
is not the end of a line; whether it does is known from the number of quotation marks before it, which the processes
count together, each in its own range. So they do with decimal marks: what the values of all shares tell decides.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from fisherfold.distributed import Group
from fisherfold.tables import decimals, tables
from fisherfold.tables.ids import Ids
from fisherfold.tables.shared_ids import joint_index
from fisherfold.tables.table_columns import chosen, index_of
from fisherfold.tables.table_files import FORMATS, GZIP, PACKED, is_parquet, readable, scanned
from fisherfold.tables.table_shapes import LOOKED_AT, all_different, refuse_matrix, unexplained
from fisherfold.tables.table_sources import is_standard_input
from fisherfold.tables.text_tables import Layout, TextTable, cut, layout_of, reject_binary

BLOCK = 2**24
BATCH = 2**19
_BEYOND = 2**16
_LONGEST_LINE = 2**20


class Batch(NamedTuple):
    """Some entries of a share: row ids, column ids and finite values."""

    rows: Ids
    columns: Ids
    values: npt.NDArray[np.float64]


def joint_counts(counts: dict[str, int], group: Group) -> dict[str, int]:
    """Add up counts by name.

    Args:
        counts: this process's counts.
        group: the processes.

    Returns:
        The sums over all processes.
    """
    total: dict[str, int] = {}
    for text in group.gather_texts(json.dumps(counts)):
        for name, number in json.loads(text).items():
            total[name] = total.get(name, 0) + number
    return total


class FileShare:
    """A table in a file, of which this process reads a part, a bounded piece at a time.

    Args:
        path: a CSV, TSV, ``::`` or Parquet file that every process can read; text in UTF-8, not packed.
        group: the processes.
        file_format: ``csv``, ``tsv``, ``::`` or ``parquet``; found out if not given.
        header: whether the first line names the columns; found out if not given.
        decimal: the decimal mark of numbers; found out by ``decimal_mark`` if not given.

    Attributes:
        columns: the names of the columns.
        header: the names in the first line, or those of a Parquet file; None if the line was read as data.
        index: the columns of a Parquet file that were the index of a data frame.
    """

    def __init__(
        self, path: str | Path, group: Group, *, file_format: str | None = None, header: bool | None = None,
        decimal: str | None = None,
    ) -> None:  # fmt: skip
        self.path, self._layout, self._in_quotes, self._lead = Path(path), None, False, 0
        self.header: list[str] | None = None
        self.index: list[str] = []
        self._decimal = decimal
        with group.together():
            if is_standard_input(self.path):
                raise ValueError("standard input cannot be shared by several processes: name a file that all can read")
            if not self.path.is_file():
                raise FileNotFoundError(f"there is no file {self.path}")
            if file_format is not None and file_format not in FORMATS:
                raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {file_format!r}")
            decimals.check_mark(decimal)
            with self.path.open("rb") as opened:
                start = opened.read(4)
            if is_parquet(self.path, start, file_format):
                self.columns, size = self._parquet()
                self.header, self.index = self.columns, index_of(self.path, self.columns)
            else:
                self._layout = _layout(self.path, file_format, header, decimal)
                self.columns, size = self._layout.names, self.path.stat().st_size
                self.header = self.columns if self._layout.header else None
                self._lead = _blank_lead(self.path)
        self._check_copies(size, group)
        # cut behind blank lines at the start: the process that reads the first line must know it for the header
        cuts = [self._lead + (size - self._lead) * k // group.size for k in range(1, group.size + 1)]
        self._range = ([0, *cuts][group.rank], cuts[group.rank])
        if self._layout is not None and self._layout.separator != "::":
            self._in_quotes = _begins_in_quotes(self.path, self._range, group)

    def _parquet(self) -> tuple[list[str], int]:
        with readable(self.path):
            frame = scanned(self.path)
            schema = frame.collect_schema()
            self._texts = {name for name, kind in schema.items() if kind == pl.String}
            return schema.names(), int(frame.select(pl.len()).collect().item())

    def _check_copies(self, size: int, group: Group) -> None:
        """Look whether every process has the same file: its host may have another copy of it."""
        unit = "rows" if self._layout is None else "bytes"
        first, *others = group.gather_texts(f"{size} {unit} and the columns {', '.join(self.columns)}")
        for rank, theirs in enumerate(others, start=1):
            if theirs != first:
                raise ValueError(
                    f"all ranks must read the same file: {self.path} has {first} on rank 0, and {theirs} on rank {rank}"
                )

    def pieces(self) -> Iterator[TextTable]:
        """Go through the lines of this share.

        Yields:
            Some lines; the columns of text formats are text.
        """
        if self._layout is None:
            lazy = scanned(self.path)
            for start in range(self._range[0], self._range[1], BATCH):
                # a slice reads the row groups that it touches, and no others
                with readable(self.path):
                    rows = lazy.slice(start, min(BATCH, self._range[1] - start)).collect()
                yield TextTable(rows, None)
            return
        first = self._range[0] <= self._lead
        quoted = self._layout.separator != "::"
        for block in _lines(self.path, *self._range, quoted=quoted, inside=self._in_quotes):
            lines = block.removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n") if first else block
            if lines:
                # readers drop one at the start of what they are given: inside a file it belongs to an id
                inner = not first and lines.startswith(codecs.BOM_UTF8)
                lines = codecs.BOM_UTF8 + lines if inner else lines
                yield cut(lines, self._layout, header=first and self._layout.header)
                first = False

    def start(self) -> pl.DataFrame:
        """The first lines of the whole file, the same on every process.

        Returns:
            Some lines that tell what its columns hold.
        """
        if self._layout is None:
            with readable(self.path):
                return scanned(self.path).head(LOOKED_AT).collect()
        with self.path.open("rb") as file:
            lines, ended = file.read(_LONGEST_LINE), not file.peek(1)
        ends = _line_ends(lines, quoted=self._layout.separator != "::")
        whole = lines if ended or not len(ends) else lines[: int(ends[-1])]
        whole = whole.removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n")
        return cut(whole, self._layout, header=self._layout.header).frame

    def decimal_mark(self, names: Sequence[str], group: Group) -> str:
        """The decimal mark of the whole table; every process must ask.

        Args:
            names: its columns of numbers.
            group: the processes.

        Returns:
            The mark.
        """
        if self._decimal is not None:
            return self._decimal
        with group.together():
            suspect = self._may_hold_commas(names)
        if not group.largest(torch.tensor([int(suspect)])).item():
            return "."
        found, lines = decimals.Forms(), 0
        with group.together():
            for piece in self.pieces():
                found = decimals.earliest(found, decimals.forms((piece.frame[name] for name in names), lines))
                lines += piece.frame.height
        joint, before = decimals.Forms(), 0
        for told in map(json.loads, group.gather_texts(json.dumps([lines, found]))):
            here = {form: (before + line, column, text) for form, (line, column, text) in told[1].items()}
            joint, before = decimals.earliest(joint, here), before + told[0]
        return decimals.settle(joint, self.path)

    def _may_hold_commas(self, names: Sequence[str]) -> bool:
        """Whether a field of this share may have a comma; a quick look that spares most files a pass."""
        if self._layout is None:
            return any(name in self._texts for name in names)
        sign = b'"' if self._layout.separator == "," else b","
        return any(sign in block for block in _blocks(self.path, *self._range))


class RatingShare:
    """The ratings of a share of a file.

    Args:
        file: the share.
        group: the processes.
        columns: the three columns by name or by position from 1; the first three if not given.

    Attributes:
        names: the names of the columns that are read.
        unexplained: those of columns that are not and that are no times.
        decimal: the decimal mark of the values.
        n_read: how many lines this process has read in the last pass.
        refused: how many of them it refused, by reason.
    """

    def __init__(self, file: FileShare, group: Group, columns: tuple[str, ...] | None = None) -> None:
        self.file, self.n_read, self.refused = file, 0, dict[str, int]()
        with group.together():
            roles = ("row", "column", "value")
            self.names = chosen(file.columns, columns, roles, file.path, file.header, file.index)
            start = file.start() if columns is None else pl.DataFrame()
        if columns is None:
            refuse_matrix(start, self.names, file.path, lambda: self._every_line_a_row(group))
        self.unexplained = unexplained(file.columns, self.names, named=file.header is not None)
        self.decimal = file.decimal_mark(self.names[2:], group)

    def _every_line_a_row(self, group: Group) -> bool:
        """Whether no row id occurs twice in the whole file; every process must ask."""
        seen, different = pl.Series(dtype=pl.String), True
        with group.together():
            for piece in self.file.pieces():
                seen.append(piece.frame[self.names[0]].drop_nulls().cast(pl.String))
                different = all_different(seen)
                if not different:
                    break
        if group.largest(torch.tensor([int(not different)])).item():
            return False
        return len(joint_index(tables.text_ids(seen), group, "row")) == int(group.sum(torch.tensor([len(seen)])))

    def batches(self) -> Iterator[Batch]:
        """Go through the ratings.

        Yields:
            Entries whose ids are there and whose values are finite numbers; the rest is counted in ``refused``.
        """
        self.n_read, self.refused = 0, {}
        for piece in self.file.pieces():
            rows, columns, values, refused, _ = tables.accepted(piece.frame, self.names, self.file.path, self.decimal)
            self.n_read += piece.frame.height + sum(piece.refused.values())
            for found in (piece.refused, refused):
                for reason, count in found.items():
                    self.refused[reason] = self.refused.get(reason, 0) + count
            for start in range(0, len(values), BATCH):
                part = slice(start, start + BATCH)
                row_ids, column_ids = (tables.whole_or_text(side[part]) for side in (rows, columns))
                yield Batch(row_ids, column_ids, values[part].to_numpy())


def _layout(path: Path, file_format: str | None, header: bool | None, decimal: str | None) -> Layout:
    """How a text file is cut, if it can be read in parts at all."""
    with path.open("rb") as file:
        start = file.read(_LONGEST_LINE)
    for magic, kind in {GZIP: "gzip", **PACKED}.items():
        if start.startswith(magic):
            raise ValueError(f"{path} is packed with {kind} and cannot be read in parts; unpack it first")
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise ValueError(f"{path} is UTF-16 text and cannot be read in parts; convert it to UTF-8 first")
    plain = start.removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n")
    line = plain.split(b"\n", 1)[0].rstrip(b"\r")
    if not line.strip():
        raise ValueError(f"{path} is empty")
    reject_binary(path, plain, line)
    if b"\r" in line or (b"\n" not in plain and len(start) == _LONGEST_LINE):
        raise ValueError(f"{path} has no line ends that it could be cut at; convert it to Unix line ends first")
    return layout_of(path, line.decode("utf-8", errors="replace"), file_format, header, decimal)


def _blank_lead(path: Path) -> int:
    """How many bytes come before the first line that is not blank."""
    with path.open("rb") as file:
        start = file.read(_LONGEST_LINE)
    plain = start.removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n")
    return start.rfind(b"\n", 0, len(start) - len(plain)) + 1


def _begins_in_quotes(path: Path, part: tuple[int, int], group: Group) -> bool:
    """Whether the range begins inside a quoted field: an odd number of quotation marks lies before it."""
    count = sum(block.count(b'"') for block in _blocks(path, *part))
    counts = group.gather(torch.tensor([count]))
    return bool(int(counts[: group.rank].sum()) % 2)


def _blocks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """A range of bytes, a bounded piece at a time."""
    with path.open("rb") as file:
        file.seek(start)
        for place in range(start, stop, BLOCK):
            yield file.read(min(BLOCK, stop - place))


def _lines(path: Path, start: int, stop: int, *, quoted: bool, inside: bool) -> Iterator[bytes]:
    """The lines that begin in a range of bytes, in pieces of whole lines."""
    if start >= stop:
        return
    with path.open("rb") as file:
        if start > 0:
            file.seek(start - 1)
            starts_line = file.read(1) == b"\n" and not inside
            if not starts_line:
                start += _skip_line(file, quoted, inside)
        held, inside = b"", False
        file.seek(start)
        while start < stop and (block := file.read(min(BLOCK, max(stop - start - len(held), _BEYOND)))):
            held += block
            ends = _line_ends(held, quoted)
            # lines that begin before the stop, the last one to its own end
            enough = int(np.searchsorted(ends, stop - start)) if len(ends) else 0
            last = int(ends[min(enough, len(ends) - 1)]) if len(ends) else 0
            if not file.peek(1) and enough >= len(ends):
                last = len(held)
            yield held[:last]
            start, held = start + last, held[last:]


def _skip_line(file: BinaryIO, quoted: bool, inside: bool) -> int:
    """How many bytes are left of the line that the file stands in."""
    length = 0
    while piece := file.read(2**16):
        ends = _line_ends(piece, quoted, inside)
        if len(ends):
            return length + int(ends[0])
        length += len(piece)
        inside ^= quoted and bool(piece.count(b'"') % 2)
    return length


def _line_ends(block: bytes, quoted: bool, inside: bool = False) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """One past each line break of a block that is not inside quotation marks."""
    content = np.frombuffer(block, dtype=np.uint8)
    breaks = np.flatnonzero(content == 10)
    if quoted and (inside or b'"' in block):
        marks = np.searchsorted(np.flatnonzero(content == 34), breaks)
        breaks = breaks[(marks + inside) % 2 == 0]
    return breaks + 1
