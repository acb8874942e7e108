"""Data sets read from a folder of packed ``.npz`` files, as plain NumPy arrays.

The folder is the argument ``folder``, the variable ``FISHERFOLD_DATA`` or the cache of ``fetch``.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from fisherfold.datasets.kinds import Array, Dataset, Ratings, Table, Tasks, decode
from fisherfold.datasets.records import DatasetRecord, record

Kind = TypeVar("Kind", Tasks, Ratings)
Folder = str | os.PathLike[str] | None
_SET_IT = (
    "set the environment variable FISHERFOLD_DATA to the folder that holds the packed .npz files"
)


def data_folder(folder: Folder = None) -> Path:
    """Give the folder of the packed data files, which must exist.

    The one given, else ``FISHERFOLD_DATA``.
    """
    seen = os.environ.get("FISHERFOLD_DATA", "") if folder is None else os.fspath(folder)
    if not seen:
        raise FileNotFoundError(
            f"no data folder: {_SET_IT} (school.npz, jester1.npz, ...), or pass folder="
        )
    if not Path(seen).is_dir():
        origin = (
            "FISHERFOLD_DATA, the folder of the packed .npz data files,"
            if folder is None
            else "folder"
        )
        raise FileNotFoundError(f"{origin} is {seen!r}, which is not a folder")
    return Path(seen)


def cache_folder() -> Path:
    """Give the folder for fetched data.

    ``FISHERFOLD_CACHE``, or the user's cache of the operating system.
    """
    if given := os.environ.get("FISHERFOLD_CACHE"):
        return Path(given)
    import platformdirs

    try:
        return platformdirs.user_cache_path("fisherfold")
    except (
        RuntimeError,
        OSError,
        KeyError,
    ):  # a container whose user has neither a home nor an account
        return Path(tempfile.gettempdir()) / "fisherfold-cache"


def load(name: str, *, folder: Folder = None, checked: bool = False) -> Dataset:
    """Read a data set.

    Args:
        name: a name of ``REGISTRY``.
        folder: where the packed files are; ``FISHERFOLD_DATA`` or the cache if not given.
        checked: compare shapes and checksums with those of the record.

    Returns:
        ``Ratings`` for jester and movielens, ``Tasks`` for school, sarcos_7x2000, letter and mhc,
        ``Table`` for sarcos_test.

    Example:
        >>> load("shcool")
        Traceback (most recent call last):
        ...
        ValueError: there is no data set 'shcool'; the names are jester1, ...
    """
    entry = record(name)
    arrays = _read(entry, _find(entry, folder))
    if checked:
        check_arrays(entry, arrays)
    return decode(name, arrays)


def load_tasks(name: str, *, folder: Folder = None) -> Tasks:
    """Read a multi-task data set.

    School, sarcos_7x2000, letter or mhc. Arguments as in ``load``.
    """
    return _of_kind(load(name, folder=folder), name, Tasks)


def load_ratings(name: str, *, folder: Folder = None) -> Ratings:
    """Read a data set of ratings.

    Jester1, movielens1m or movielens100k. Arguments as in ``load``.
    """
    return _of_kind(load(name, folder=folder), name, Ratings)


def _of_kind(data: Dataset, name: str, kind: type[Kind]) -> Kind:
    if not isinstance(data, kind):
        raise ValueError(f"{name} is not a data set of {kind.__name__} but {type(data).__name__}")
    return data


def stack_outputs(table: Table) -> tuple[Array, Array, Array]:
    """Make one task of each of several outputs over shared inputs.

    X, y and task, inputs repeated for every task.
    """
    outputs = table.Y.shape[1]
    task = np.repeat(np.arange(outputs, dtype=np.int32), len(table.X))
    return np.tile(table.X, (outputs, 1)), table.Y.T.reshape(-1).copy(), task


def verify(name: str, *, folder: Folder = None) -> None:
    """Compare every decoded array of a data set with its recorded dtype, shape and checksum."""
    load(name, folder=folder, checked=True)


def check_arrays(entry: DatasetRecord, arrays: Mapping[str, Array]) -> None:
    """Compare decoded arrays with the dtypes, shapes and checksums of their record."""
    for key, expected in entry.arrays.items():
        if key not in arrays:
            raise ValueError(f"{entry.name}: array {key!r} is missing")
        array = arrays[key]
        wrong = ""
        if array.dtype != np.dtype(expected.dtype) or array.shape != expected.shape:
            wrong = f"should be {expected.dtype} {expected.shape}, got {array.dtype} {array.shape}"
        elif (
            digest := hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
        ) != expected.sha256:
            wrong = f"has the sha256 {digest}, expected {expected.sha256}"
        if wrong:
            raise ValueError(
                f"{entry.name}: array {key!r} {wrong}; if a file is damaged, {_again(entry)}"
            )


def where(name: str) -> Path | None:
    """Find the folder that holds a data set.

    The data folder, else the cache; None if it is in neither.
    """
    given = os.environ.get("FISHERFOLD_DATA")
    folders = [*([Path(given)] if given else []), cache_folder()]
    return next((folder for folder in folders if (folder / record(name).file).is_file()), None)


def _find(entry: DatasetRecord, folder: Folder) -> Path:
    """The packed file: in the folder given, else in the data folder, else in the cache."""
    found = where(entry.name) if folder is None else data_folder(folder)
    if found is not None and (found / entry.file).is_file():
        return found / entry.file
    advice = f"make it by hand, 'fisherfold datasets info {entry.name}' names its source and arrays"
    if entry.url:
        advice = f"run 'fisherfold datasets fetch {entry.name}'"
    if folder is None and not os.environ.get("FISHERFOLD_DATA"):
        raise FileNotFoundError(f"{entry.name} is not in the cache: {advice}, or {_SET_IT}")
    raise FileNotFoundError(
        f"{entry.name}: there is no file {entry.file} in {data_folder(folder)} (the data folder, "
        f"FISHERFOLD_DATA); the data set comes from {entry.source}, {advice}. {entry.licence}"
    )


def _read(entry: DatasetRecord, path: Path) -> dict[str, Array]:
    """The arrays of a data set by the names of its record, in their stored dtypes."""
    try:
        with readable(path, "a packed data file"):
            if not zipfile.is_zipfile(path):
                raise ValueError("it is cut short, or no .npz file at all")
            with np.load(path, allow_pickle=False) as file:
                stored = dict(file)
    except ValueError as error:
        raise ValueError(f"{error}; {_again(entry)}") from error
    if missing := [key for key in entry.arrays if key not in stored]:
        raise ValueError(f"{path} lacks the arrays {missing}, it has {list(stored)}")
    return {key: stored[key] for key in entry.arrays}


def _again(entry: DatasetRecord) -> str:
    return f"delete it and get it again ('fisherfold datasets info {entry.name}' says from where)"


@contextmanager
def readable(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Turn whatever a reader of files raises into an error that names the file."""
    try:
        yield
    except (
        Exception
    ) as error:  # each library has exceptions of its own for a file that it cannot read
        if (
            isinstance(error, (ImportError, MemoryError))
            or getattr(error, "errno", None) is not None
        ):
            raise
        raise ValueError(
            f"{path} cannot be read as {kind}: {error or type(error).__name__}"
        ) from error
