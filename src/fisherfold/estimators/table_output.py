"""Tables with predictions as files: CSV in UTF-8, packed with gzip where the name ends with .gz."""

from __future__ import annotations

import gzip
from pathlib import Path

import polars as pl

from fisherfold.estimators.table_files import flat
from fisherfold.files import write_atomically

# Whoever opens such a file expects another format than CSV, or another packing than gzip.
_OTHERS = (".parquet", ".pq", ".feather", ".arrow", ".json", ".xlsx", ".xls", ".zip", ".bz2", ".xz", ".zst", ".7z")


def check_csv_name(output: Path) -> None:
    """Look whether a name says what will be in the file, before the work whose result it is to hold.

    Args:
        output: the file to write.

    Raises:
        ValueError: if its ending stands for another format.
    """
    if output.suffix.lower() in _OTHERS:
        raise ValueError(f"--output is written as CSV, in a file such as x.csv or x.csv.gz, got {output}")


def write_csv(frame: pl.DataFrame, source: str | Path, output: Path) -> None:
    """Write a table.

    Args:
        frame: the table.
        source: where it comes from, for the message that names a column which such a file cannot hold.
        output: the file; packed if its name ends with .gz.
    """
    for column in frame:
        flat(column, source)
    content = frame.write_csv().encode()
    # no time in the header: the same table gives the same bytes
    write_atomically(output, gzip.compress(content, mtime=0) if output.suffix.lower() == ".gz" else content)
