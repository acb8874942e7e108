"""Data sets read from a local folder of packed ``.npz`` files, as plain numpy arrays.

The folder is the argument ``folder`` or the environment variable ``FISHERFOLD_DATA``. Files are read with
``allow_pickle=False``; values are exact copies of the originals in a float dtype, ids count from 0.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fisherfold.datasets.kinds import Array, Dataset, Images, Ratings, Table, Tasks, decode
from fisherfold.datasets.official import READERS
from fisherfold.datasets.records import DatasetRecord, record


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the packed data files.

    Args:
        folder: the folder; the environment variable ``FISHERFOLD_DATA`` if not given.

    Returns:
        An existing folder.

    Raises:
        FileNotFoundError: if there is none.
    """
    seen = os.environ.get("FISHERFOLD_DATA", "") if folder is None else os.fspath(folder)
    if not seen:
        raise FileNotFoundError(
            "no data folder: set the environment variable FISHERFOLD_DATA to the folder that holds the packed .npz "
            "files (school.npz, jester1.npz, ...), or pass folder="
        )
    if not Path(seen).is_dir():
        origin = "FISHERFOLD_DATA, the folder of the packed .npz data files," if folder is None else "folder"
        raise FileNotFoundError(f"{origin} is {seen!r}, which is not a folder")
    return Path(seen)


def load(name: str, *, folder: str | os.PathLike[str] | None = None, checked: bool = False) -> Dataset:
    """Read a data set.

    Args:
        name: a name of ``REGISTRY``.
        folder: where the packed files are; the environment variable ``FISHERFOLD_DATA`` if not given.
        checked: compare shapes and checksums with those of the record; a damaged picture may still decode.

    Returns:
        ``Ratings`` for jester and movielens, ``Tasks`` for school, sarcos_7x2000, letter and mhc, ``Table`` for
        sarcos_test, ``Images`` for cifar10 and cifar100.

    Example:
        >>> load("shcool")
        Traceback (most recent call last):
        ...
        ValueError: there is no data set 'shcool'; the names are cifar10, ...
    """
    entry = record(name)
    arrays = read_arrays(entry, find(entry, folder))
    if checked:
        check_arrays(entry, arrays)
    return decode(name, arrays)


def load_tasks(name: str, *, folder: str | os.PathLike[str] | None = None) -> Tasks:
    """Read a multi-task data set.

    Args:
        name: school, sarcos_7x2000, letter or mhc.
        folder: as in ``load``.

    Returns:
        Its rows.

    Raises:
        ValueError: if the data set is of another kind.
    """
    data = load(name, folder=folder)
    if not isinstance(data, Tasks):
        raise ValueError(f"{name} is not a multi-task data set but {type(data).__name__}")
    return data


def load_ratings(name: str, *, folder: str | os.PathLike[str] | None = None) -> Ratings:
    """Read a data set of ratings.

    Args:
        name: jester1, movielens1m or movielens100k.
        folder: as in ``load``.

    Returns:
        Its ratings.

    Raises:
        ValueError: if the data set is of another kind.
    """
    data = load(name, folder=folder)
    if not isinstance(data, Ratings):
        raise ValueError(f"{name} is not a data set of ratings but {type(data).__name__}")
    return data


def load_images(name: str, *, folder: str | os.PathLike[str] | None = None, checked: bool = False) -> Images:
    """Read a data set of images; this needs Pillow.

    Args:
        name: cifar10 or cifar100.
        folder: as in ``load``.
        checked: as in ``load``.

    Returns:
        Its images and labels.

    Raises:
        ValueError: if the data set is of another kind.
    """
    data = load(name, folder=folder, checked=checked)
    if not isinstance(data, Images):
        raise ValueError(f"{name} is not a data set of images but {type(data).__name__}")
    return data


def load_sarcos_file(path: str | os.PathLike[str]) -> Table:
    """Read an original SARCOS file, ``sarcos_inv.mat`` or ``sarcos_inv_test.mat``.

    Args:
        path: a MATLAB file with one matrix of 28 columns: 21 inputs, 7 torques.

    Returns:
        Inputs and torques.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it does not hold such a matrix.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}; SARCOS comes from {record('sarcos_test').source}")
    from scipy.io import loadmat

    with readable(path, "a MATLAB file"):
        content = loadmat(path)
    found = {key: value for key, value in content.items() if not key.startswith("__")}
    matrices = [value for value in found.values() if value.ndim == 2 and value.shape[1] == 28]
    if len(matrices) != 1:
        shapes = {key: value.shape for key, value in found.items()}
        raise ValueError(f"{path} should hold one matrix of 28 columns (21 inputs, 7 torques), got {shapes}")
    values = matrices[0].astype(np.float64)
    return Table(values[:, :21], values[:, 21:])


def stack_outputs(table: Table) -> tuple[Array, Array, Array]:
    """Several outputs over shared inputs as tasks, one per output.

    Args:
        table: inputs and outputs.

    Returns:
        ``X, y, task`` with the inputs repeated for every task.
    """
    outputs = table.Y.shape[1]
    task = np.repeat(np.arange(outputs, dtype=np.int32), len(table.X))
    return np.tile(table.X, (outputs, 1)), table.Y.T.reshape(-1).copy(), task


def verify(name: str, *, folder: str | os.PathLike[str] | None = None) -> None:
    """Compare every decoded array of a data set with its recorded dtype, shape and checksum.

    Args:
        name: a name of ``REGISTRY``.
        folder: as in ``load``.
    """
    entry = record(name)
    check_arrays(entry, read_arrays(entry, find(entry, folder)))


def check_arrays(entry: DatasetRecord, arrays: Mapping[str, Array]) -> None:
    """Compare decoded arrays with the dtypes, shapes and checksums of their record.

    Args:
        entry: the record.
        arrays: the arrays by name.

    Raises:
        ValueError: if an array is missing or differs.
    """
    for key, expected in entry.arrays.items():
        if key not in arrays:
            raise ValueError(f"{entry.name}: array {key!r} is missing")
        array = arrays[key]
        if array.dtype != np.dtype(expected.dtype) or array.shape != expected.shape:
            seen = f"{array.dtype} {array.shape}"
            should = f"should be {expected.dtype} {expected.shape}, got {seen}"
            raise ValueError(f"{entry.name}: array {key!r} {should}; if a file is damaged, {_again(entry)}")
        digest = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
        if digest != expected.sha256:
            differs = f"has the sha256 {digest}, expected {expected.sha256}"
            raise ValueError(f"{entry.name}: array {key!r} {differs}; if a file is damaged, {_again(entry)}")


def cache_folder() -> Path:
    """The folder for fetched data: ``FISHERFOLD_CACHE``, or the user's cache of the operating system.

    Returns:
        A path, which need not exist.
    """
    if given := os.environ.get("FISHERFOLD_CACHE"):
        return Path(given)
    import pooch

    return Path(pooch.os_cache("fisherfold"))


def is_in(entry: DatasetRecord, folder: Path) -> bool:
    """Whether a folder holds a data set, in its packed files or as one fetched file.

    Args:
        entry: the record.
        folder: the folder.

    Returns:
        True if all that is needed is there.
    """
    return all((folder / file).is_file() for file in entry.files) or (folder / f"{entry.name}.npz").is_file()


def find(entry: DatasetRecord, folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder to read a data set from: the one given, else the data folder, else the cache.

    Args:
        entry: the record.
        folder: a folder that must be used.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: if it is in neither.
    """
    given = os.environ.get("FISHERFOLD_DATA")
    if folder is not None or (given and is_in(entry, Path(given))):
        return data_folder(folder)
    if is_in(entry, cache_folder()):
        return cache_folder()
    if not given:
        raise FileNotFoundError(
            f"{entry.name} is not in the cache, and FISHERFOLD_DATA is not set: {_advice(entry)}, or set the "
            f"environment variable FISHERFOLD_DATA to the folder that holds {entry.files[0]}"
        )
    return data_folder()


def _advice(entry: DatasetRecord) -> str:
    """How to get a data set that is not here."""
    if entry.name in READERS:
        return f"run 'fisherfold datasets fetch {entry.name}'"
    return f"make it by hand, 'fisherfold datasets info {entry.name}' names its source and arrays"


def _again(entry: DatasetRecord) -> str:
    """What to do about a damaged file."""
    return f"delete it and get it again ('fisherfold datasets info {entry.name}' says from where)"


def read_arrays(entry: DatasetRecord, folder: Path) -> dict[str, Array]:
    """The arrays of a data set by the names of its record, in their stored dtypes.

    Args:
        entry: the record.
        folder: where its files are.

    Returns:
        The arrays; images decoded.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is damaged or lacks an array.
    """
    fetched = folder / f"{entry.name}.npz"
    for file in () if fetched.is_file() else entry.files:
        if not (folder / file).is_file():
            raise FileNotFoundError(
                f"{entry.name}: there is no file {file} in {folder} (the data folder, FISHERFOLD_DATA); "
                f"the data set comes from {entry.source}, {_advice(entry)}. {entry.licence}"
            )
    if entry.name.startswith("cifar") and not fetched.is_file():
        return _read_images(entry, folder)
    with _packed(fetched, entry) as stored:
        missing = [key for key in entry.arrays if key not in stored.files]
        if missing:
            raise ValueError(f"{fetched} lacks the arrays {missing}, it has {stored.files}")
        return {key: stored[key] for key in entry.arrays}


@contextmanager
def readable(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Turn whatever a reader of files stumbles over into a sentence that names the file.

    Args:
        path: the file.
        kind: what it should be.

    Yields:
        Nothing.

    Raises:
        ValueError: if the file is damaged or something else.
    """
    try:
        yield
    except Exception as error:  # each library has exceptions of its own for a file that it cannot read
        if isinstance(error, (ImportError, MemoryError)) or getattr(error, "errno", None) is not None:
            raise
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        named = reason.startswith((str(path), Path(path).name))
        raise ValueError(reason if named else f"{path} cannot be read as {kind}: {reason}") from error


@contextmanager
def _packed(path: Path, entry: DatasetRecord) -> Iterator[Any]:
    try:
        with readable(path, "a packed data file"):
            if not zipfile.is_zipfile(path):
                raise ValueError("it is cut short, or no .npz file at all")
            with np.load(path, allow_pickle=False) as stored:
                yield stored
    except ValueError as error:
        raise ValueError(f"{error}; {_again(entry)}") from error


def _read_images(entry: DatasetRecord, folder: Path) -> dict[str, Array]:
    # decode the strips of all shards and join all of a split at once
    parts: dict[str, list[Array]] = {key: [] for key in entry.arrays}
    for file in entry.files:
        split = "test" if file.endswith("_test.npz") else "train"
        with _packed(folder / file, entry) as stored:
            parts[f"{split}_images"] += _decode_strips(stored["webp"].data, stored["offsets"])
            for key in ("labels", "coarse_labels"):
                if key in stored.files:
                    parts[f"{split}_{key}"].append(stored[key])
    return {key: np.concatenate(pieces) for key, pieces in parts.items()}


def _decode_strips(buffer: memoryview, offsets: Array) -> list[Array]:
    # images are kept as lossless WebP strips, one image below the other
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading CIFAR needs Pillow with WebP support: pip install pillow") from error
    strips = []
    for start, stop in pairwise(offsets):
        with Image.open(io.BytesIO(buffer[start:stop])) as image:
            strips.append(np.asarray(image.convert("RGB"), dtype=np.uint8).reshape(-1, 32, 32, 3))
    return strips
