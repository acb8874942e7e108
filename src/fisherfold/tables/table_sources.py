"""Where a table comes from: a file, or a stream, which is read once and then held in memory.

A name of ``-`` stands for standard input, as do ``/dev/stdin`` and ``/dev/fd/0``; other numbers in ``/dev/fd`` are what
a shell gives for ``<(command)``. A stream has no name that tells its format, so its content does.
"""

from __future__ import annotations

import sys
from pathlib import Path

STANDARD_INPUT = Path("-")
_DESCRIPTORS = Path("/dev/fd")
_ITS_NAMES = (STANDARD_INPUT, Path("/dev/stdin"), _DESCRIPTORS / "0")
_SPOKEN = Path("standard input")


def is_standard_input(path: str | Path) -> bool:
    """Whether a name stands for standard input.

    Args:
        path: the name.

    Returns:
        The answer.

    Examples:
        >>> is_standard_input("-"), is_standard_input("ratings.csv")
        (True, False)
    """
    return Path(path) in _ITS_NAMES


def spoken(path: str | Path) -> Path:
    """A table as messages name it.

    Args:
        path: the file, or a name of a stream.

    Returns:
        The file, or the words for a stream.

    Examples:
        >>> str(spoken("/dev/fd/63"))
        'pipe 63'
    """
    if is_standard_input(path):
        return _SPOKEN
    file = Path(path)
    return Path(f"pipe {file.name}") if file.parent == _DESCRIPTORS else file


def opened(path: str | Path) -> Path | bytes:
    """A file that can be read as often as one likes, or the content of a stream, which can not.

    Args:
        path: the file, or a name of standard input.

    Returns:
        The file, or the whole content.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is a folder, a device or a pipe with a name, or if nothing comes through standard input.
    """
    file = Path(path)
    if file != STANDARD_INPUT and file.is_file():
        return file
    if is_standard_input(file):
        return _standard_input()
    if file.parent == _DESCRIPTORS and file.is_fifo():
        return file.read_bytes()
    if file.exists():
        raise ValueError(f"{file} is a {'folder' if file.is_dir() else 'device or a pipe'}, a file is expected")
    raise FileNotFoundError(f"there is no file {file}")


def _standard_input() -> bytes:
    if sys.stdin is None or sys.stdin.closed:
        raise ValueError("standard input is closed; pipe a table into the command, or name a file")
    if sys.stdin.isatty():
        raise ValueError("standard input is a terminal; pipe a table into the command, or name a file")
    return sys.stdin.buffer.read()


def head(source: Path | bytes, size: int) -> bytes:
    """The first bytes of a source.

    Args:
        source: the file, or the content of a stream.
        size: how many.

    Returns:
        As many, or all there are.
    """
    if isinstance(source, bytes):
        return source[:size]
    with source.open("rb") as file:
        return file.read(size)


def content(source: Path | bytes) -> bytes:
    """All bytes of a source.

    Args:
        source: the file, or the content of a stream.

    Returns:
        The bytes.
    """
    return source if isinstance(source, bytes) else source.read_bytes()
