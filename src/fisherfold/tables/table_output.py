"""Tables with predictions as files: CSV in UTF-8, packed with gzip where the name ends with .gz, or Parquet.

A name of ``-`` stands for standard output, which is given CSV.
"""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from fisherfold.files import write_atomically
from fisherfold.tables.decimals import written
from fisherfold.tables.table_files import flat

STANDARD_OUTPUT = Path("-")
_PARQUET = (".parquet", ".pq")
# Whoever opens such a file expects another format, or another packing than gzip.
_OTHERS = (".feather", ".arrow", ".json", ".xlsx", ".xls", ".zip", ".bz2", ".xz", ".zst", ".7z")


def check_name(output: Path) -> None:
    """Look whether a name says what will be in the file, before the work whose result it is to hold.

    Args:
        output: the file to write.

    Raises:
        ValueError: if its ending stands for another format.
    """
    if output.suffix.lower() in _OTHERS:
        raise ValueError(f"--output is written as CSV or Parquet, as x.csv, x.csv.gz or x.parquet, got {output}")


def write_predictions(
    frame: pl.DataFrame, added: Mapping[str, Any], source: str | Path, output: Path, mark: str
) -> None:  # fmt: skip
    """Write a table with columns added to it.

    Args:
        frame: the table.
        added: the columns, by name and in order.
        source: where the table comes from, for the message that names a column which a file of text cannot hold.
        output: the file; Parquet if its name says so, else CSV, packed if its name ends with .gz; or standard output.
        mark: the decimal mark of numbers in text.
    """
    if output.suffix.lower() in _PARQUET:
        buffer = io.BytesIO()
        frame.with_columns(**{name: pl.Series(values) for name, values in added.items()}).write_parquet(buffer)
        write_atomically(output, buffer.getvalue())
        return
    frame = frame.with_columns(**{name: written(values, mark) for name, values in added.items()})
    for column in frame:
        flat(column, source)
    content = frame.write_csv().encode()
    if output == STANDARD_OUTPUT:
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        return
    # no time in the header: the same table gives the same bytes
    write_atomically(output, gzip.compress(content, mtime=0) if output.suffix.lower() == ".gz" else content)
