"""Readers of the official files, into the arrays that the records describe.

Archives are read in memory: nothing is unpacked to the disk, so that no name inside one can point
elsewhere. The sum of what an archive claims to hold is bounded before anything is read, and no file
of it can give more than it claims.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherfold.datasets.kinds import Array, Table

ARCHIVE_LIMIT = 100 * 2**20  # bytes of all files of an archive together: MovieLens-1M has 25 MB


def movielens1m(path: Path) -> dict[str, Array]:
    """Read ``ml-1m.zip`` or its ``ratings.dat`` (``user::movie::rating::time``)."""
    text = _members(path, ["ratings.dat"])[0] if zipfile.is_zipfile(path) else path.read_bytes()
    table = _integers(text.replace(b"::", b"\t"), "ratings.dat")
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    return {
        "user_id": table[:, 0].astype(np.uint16),
        "movie_id": table[:, 1].astype(np.uint16),
        "rating": table[:, 2].astype(np.uint8),
        "shape": np.array([6040, 3952], dtype=np.int32),
    }


def movielens100k(path: Path) -> dict[str, Array]:
    """Read ``ml-100k.zip`` with ``u.data`` and the five official test parts."""
    names = ["u.data", *(f"u{k}.test" for k in range(1, 6))]
    table, *parts = [
        _integers(text, name) for text, name in zip(_members(path, names), names, strict=True)
    ]
    position = {(user, item): row for row, (user, item) in enumerate(table[:, :2].tolist())}
    fold = np.zeros(len(table), dtype=np.uint8)
    for number, part in enumerate(parts, start=1):
        fold[[position[user, item] for user, item in part[:, :2].tolist()]] = number
    return {
        "user_id": table[:, 0].astype(np.uint16),
        "item_id": table[:, 1].astype(np.uint16),
        "rating": table[:, 2].astype(np.uint8),
        "timestamp": table[:, 3].astype(np.int32),
        "test_fold": fold,
    }


def jester1(path: Path) -> dict[str, Array]:
    """Read ``jester-data-1.xls`` saved as CSV: a count and 100 ratings a row, 99 = not rated."""
    if zipfile.is_zipfile(path) or path.suffix.lower() == ".xls":
        raise ValueError(
            f"{path.name} holds a spreadsheet: open jester-data-1.xls, save it as CSV and name that"
        )
    sheet = np.loadtxt(path, delimiter=",", ndmin=2)
    if sheet.shape[1] != 101:
        raise ValueError(f"{path.name} should hold 101 columns, got {sheet.shape[1]}")
    return {"ratings_x100": np.rint(sheet[:, 1:] * 100).astype(np.int16)}


def load_sarcos_file(path: str | Path) -> Table:
    """Read an original SARCOS file, ``sarcos_inv.mat`` or ``sarcos_inv_test.mat``.

    It is a MATLAB file with one matrix of 28 columns: 21 inputs, 7 torques.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"there is no file {path}; SARCOS comes from http://gaussianprocess.org/gpml/data/"
        )
    from scipy.io import loadmat

    try:
        found = {key: value for key, value in loadmat(path).items() if not key.startswith("__")}
    except Exception as error:  # of many kinds
        raise ValueError(f"{path} cannot be read as a MATLAB file: {error}") from error
    matrices = [value for value in found.values() if value.ndim == 2 and value.shape[1] == 28]
    if len(matrices) != 1:
        shapes = {key: value.shape for key, value in found.items()}
        raise ValueError(
            f"{path} should hold one matrix of 28 columns (21 inputs, 7 torques), got {shapes}"
        )
    values = matrices[0].astype(np.float64)
    return Table(values[:, :21], values[:, 21:])


def sarcos_test(path: Path) -> dict[str, Array]:
    """Read ``sarcos_inv_test.mat``."""
    table = load_sarcos_file(path)
    return {"micro": np.rint(np.hstack([table.X, table.Y]) * 1e6).astype(np.int32)}


READERS: Mapping[str, Callable[[Path], dict[str, Array]]] = {
    "jester1": jester1,
    "movielens100k": movielens100k,
    "movielens1m": movielens1m,
    "sarcos_test": sarcos_test,
}


def _integers(text: bytes, what: str) -> NDArray[np.int64]:
    try:
        table = np.loadtxt(io.BytesIO(text), dtype=np.int64, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{what} should hold 4 integers a line: {error}") from None
    if table.shape[1] != 4:
        raise ValueError(f"{what} should hold 4 integers a line, got {table.shape[1]}")
    return table


def _members(path: Path, names: list[str]) -> list[bytes]:
    """Files of a zip archive by their names, whatever folder they are in."""
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        if sum(info.file_size for info in infos) > ARCHIVE_LIMIT:
            raise ValueError(
                f"{path.name} claims more than {ARCHIVE_LIMIT / 2**20:.0f} MiB, which no official "
                "file has"
            )
        found = {
            Path(i.filename).name: archive.read(i) for i in infos if Path(i.filename).name in names
        }
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{path.name} holds no file {missing[0]}")
    return [found[name] for name in names]
