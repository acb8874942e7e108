"""Parquet files, decoded in a process of their own, which a damaged one may end.

The decoder of polars trusts what a file says of its sizes, and aborts where it cannot allocate
them. So a worker decodes the files under a limit of memory, counts the bytes of what it has
decoded, and passes the rows on as Arrow IPC, some at a time. Each message of the worker is its
length, a letter for its kind, and its content.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import polars as pl

_BATCH = 2**20  # rows that are passed on at a time
_ROOM = 4 * 2**30  # bytes of address space besides those of the table: libraries, threads, the file
_LENGTH = 8  # bytes of the length of a message
_FILE = b"f"  # a message with the name of the file that is decoded next
_ROWS = b"r"  # a message with rows
_ERROR = b"e"  # a message with what was wrong with the file
_DONE = b"d"  # the last message


def parquet_files(path: str | Path) -> list[Path]:
    """Give the part files of a folder, without what is hidden or ``_temporary``."""
    folder = Path(path)
    return sorted(
        found
        for found in folder.rglob("*.parquet")
        if not any(name.startswith((".", "_")) for name in found.relative_to(folder).parts)
    )


def read_parquet(
    source: Path | bytes, name: str, max_bytes: int, part: tuple[int, int] = (0, 1)
) -> pl.DataFrame:
    """Read one part of the rows of a file, of the files of a folder, or of the bytes of a file.

    Raises ValueError if a file is damaged, has other columns than the first, or takes too many
    bytes unpacked.
    """
    content = source if isinstance(source, bytes) else b""
    files = [] if isinstance(source, bytes) else _absolute(source)
    order = json.dumps({"files": files, "max_bytes": max_bytes, "part": part}).encode()
    frames: list[pl.DataFrame] = []
    file = ""
    reason = f"it is damaged, or takes far more than {max_bytes:,} bytes unpacked"
    for kind, message in _messages(order + b"\n" + content):
        if kind == _DONE:
            return pl.concat(frames)
        if kind == _ROWS:
            frames.append(pl.read_ipc_stream(io.BytesIO(message)))
        elif kind == _FILE:
            file = message.decode()
        else:
            reason = message.decode()
    where = f"{name}: its part {file}" if len(files) > 1 and file else name
    raise ValueError(f"{where} cannot be read as Parquet: {reason}")


def _absolute(path: Path) -> list[str]:
    files = parquet_files(path) if path.is_dir() else [path]
    return [os.path.abspath(file) for file in files]


def _messages(order: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Start a worker with an order, and give its whole messages until it ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fisherfold.tables.parquet"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # where a decoder that aborts speaks of itself
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, contextlib.suppress(BrokenPipeError):  # it has ended already
        try:
            process.stdin.write(order)
            process.stdin.close()
            while len(head := process.stdout.read(_LENGTH)) == _LENGTH:
                size = int.from_bytes(head, "little")
                if len(message := process.stdout.read(size)) == size:
                    yield message[:1], message[1:]
        finally:
            process.kill()


def _send(kind: bytes, content: bytes = b"") -> None:
    size = len(kind) + len(content)
    sys.stdout.buffer.write(size.to_bytes(_LENGTH, "little") + kind + content)
    sys.stdout.buffer.flush()


def _work(order: IO[bytes]) -> None:
    """Be the worker."""
    what = json.loads(order.readline())
    content = order.read()
    _limit_memory(3 * what["max_bytes"] + len(content) + _ROOM)
    try:
        _decode(what["files"] or [io.BytesIO(content)], what["max_bytes"], what["part"])
    except BaseException as error:  # also PanicException of polars, which is no Exception
        _send(_ERROR, " ".join(str(error).split())[:200].encode())
    else:
        _send(_DONE)


def _decode(sources: list[Any], max_bytes: int, part: tuple[int, int]) -> None:
    """Send the rows of one part of the files that are counted by all."""
    tables: list[pl.LazyFrame] = []
    counts: list[int] = []
    for source in sources:
        _send(_FILE, str(source).encode())
        tables.append(_scan(source))
        _check_columns(tables[-1], tables[0])
        counts.append(int(tables[-1].select(pl.len()).collect().item()))
    columns = max(1, len(tables[0].collect_schema()))
    _check_bytes(8 * columns * sum(counts), max_bytes)
    start, end = cut(sum(counts), part)
    taken = 0
    for source, table, count in zip(sources, tables, counts, strict=True):
        _send(_FILE, str(source).encode())
        frame = table.slice(max(start, 0), max(0, min(end, count) - max(start, 0))).collect()
        taken += sum(_decoded_bytes(column) for column in frame)
        _check_bytes(taken, max_bytes)
        for first in range(0, max(1, frame.height), _BATCH):
            batch = io.BytesIO()
            frame[first : first + _BATCH].write_ipc_stream(batch)
            _send(_ROWS, batch.getvalue())
        start -= count
        end -= count


def _scan(source: Any) -> pl.LazyFrame:
    return pl.scan_parquet(source, glob=False, hive_partitioning=False)


def cut(count: int, part: tuple[int, int]) -> tuple[int, int]:
    """Give the first line of a part, and the first after it."""
    return count * part[0] // part[1], count * (part[0] + 1) // part[1]


def _check_columns(table: pl.LazyFrame, first: pl.LazyFrame) -> None:
    found = dict(table.collect_schema())
    expected = dict(first.collect_schema())
    if found != expected:
        raise ValueError(
            f"its columns are {_columns(found)}, those of the first part {_columns(expected)}"
        )


def _columns(schema: dict[str, pl.DataType]) -> str:
    return ", ".join(f"{name} ({dtype})" for name, dtype in schema.items())


def _check_bytes(count: int, most: int) -> None:
    if count > most:
        raise ValueError(
            f"it takes more than {most:,} bytes unpacked; --unpack-limit raises the limit"
        )


def _decoded_bytes(column: pl.Series) -> int:
    """What a column takes where each cell has bytes of its own."""
    kind = column.dtype
    if isinstance(kind, pl.List | pl.Array):
        return 8 * len(column) + _decoded_bytes(column.explode())
    if isinstance(kind, pl.Struct):
        return sum(_decoded_bytes(field) for field in column.struct.unnest())
    if kind in (pl.Categorical, pl.Enum):
        column = column.cast(pl.String)
    sizes = column.str.len_bytes() if column.dtype == pl.String else None
    sizes = column.bin.size() if column.dtype == pl.Binary else sizes
    return 8 * len(column) + (0 if sizes is None else int(sizes.cast(pl.UInt64).sum()))


def _limit_memory(size: int) -> None:
    """Let this process take so many bytes more, where the system can limit them."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + size if most == resource.RLIM_INFINITY else min(used + size, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))


if __name__ == "__main__":
    _work(sys.stdin.buffer)
