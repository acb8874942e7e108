"""Tables with predictions as files: CSV in UTF-8, packed for names in .gz, or Parquet.

A name of ``-`` stands for standard output, which is given CSV.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from fisherfold.files import check_place, kind_of, write_atomically
from fisherfold.tables.folders import MODEL
from fisherfold.threads import check_polars

STANDARD_OUTPUT = Path("-")
_PARQUET = (".parquet", ".pq")
# Whoever opens such a file expects another format, or another packing than gzip.
_OTHERS = (
    ".feather",
    ".arrow",
    ".json",
    ".xlsx",
    ".xls",
    ".zip",
    ".bz2",
    ".xz",
    ".zst",
    ".7z",
    ".safetensors",
)


def check_table_name(output: Path) -> None:
    """Check whether a table can be written to a file of this name."""
    if output == STANDARD_OUTPUT:
        return
    if output.suffix.lower() in _OTHERS:
        raise ValueError(
            f"--output is written as CSV or Parquet, as x.csv, x.csv.gz or x.parquet, got {output}"
        )
    if kind_of(output):
        raise ValueError(
            f"--output {output} is a part of a model, which it would replace; name another file"
        )
    if kind_of(output.parent / MODEL):
        raise ValueError(
            f"--output {output} is in the folder of a model, which holds nothing else; name another"
        )
    check_place(output, "--output")


def add_columns(frame: pl.DataFrame, added: Mapping[str, Any], path: str) -> pl.DataFrame:
    """Add columns to a table."""
    if twice := [name for name in added if name in frame.columns]:
        raise ValueError(
            f"{path} has a column {twice[0]!r} already, which predictions would replace; rename it"
        )
    return frame.with_columns(**{name: pl.Series(values) for name, values in added.items()})


def write_table(frame: pl.DataFrame, output: Path, decimal: str = ".") -> None:
    """Write a table, completely or not at all."""
    check_polars()
    if output.suffix.lower() in _PARQUET:
        buffer = io.BytesIO()
        frame.write_parquet(buffer)
        write_atomically(output, buffer.getvalue())
        return
    if nested := [name for name, dtype in frame.schema.items() if dtype.is_nested()]:
        raise ValueError(
            f"column {nested[0]!r} holds {frame.schema[nested[0]]}, which CSV cannot; write "
            "x.parquet"
        )
    options: dict[str, Any] = {"decimal_comma": True, "separator": ";"} if decimal == "," else {}
    content = frame.write_csv(**options).encode()
    if output == STANDARD_OUTPUT:
        write_standard_output(content)
    else:  # no time in the header of gzip: the same table gives the same bytes
        write_atomically(
            output, gzip.compress(content, mtime=0) if output.suffix.lower() == ".gz" else content
        )


def write_standard_output(content: bytes) -> None:
    """Write all bytes to standard output, of which a slow reader takes some at a time."""
    stream = sys.stdout.buffer
    left = memoryview(content)
    while left:
        with contextlib.suppress(BlockingIOError):
            left = left[stream.write(left) or 0 :]
            continue
        time.sleep(0.01)  # a pipe that does not block, and is full
    stream.flush()
