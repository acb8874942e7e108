"""Readers of the official files, as their owners distribute them, into the arrays that the records describe.

Archives are read in memory: nothing is unpacked to the disk, so that no name inside one can point elsewhere. The sum of
what an archive claims to hold is bounded before anything is read. No pickle is read: CIFAR has a binary form.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherfold.datasets.kinds import Array, Table

# bytes that all files of an archive may have together: CIFAR-10 has 185 MB
ARCHIVE_LIMIT = 400 * 2**20


def movielens1m(path: Path) -> dict[str, Array]:
    """Read ``ml-1m.zip`` or its ``ratings.dat`` (``user::movie::rating::time``)."""
    text = _members(path, ["ratings.dat"])[0] if zipfile.is_zipfile(path) else path.read_bytes()
    table = _integers(text.replace(b"::", b"\t"), "ratings.dat")
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    return {
        "user_id": table[:, 0].astype(np.uint16), "movie_id": table[:, 1].astype(np.uint16),
        "rating": table[:, 2].astype(np.uint8), "shape": np.array([6040, 3952], dtype=np.int32),
    }  # fmt: skip


def movielens100k(path: Path) -> dict[str, Array]:
    """Read ``ml-100k.zip`` with ``u.data`` and the five official test parts."""
    names = ["u.data", *(f"u{k}.test" for k in range(1, 6))]
    table, *parts = [_integers(text, name) for text, name in zip(_members(path, names), names, strict=True)]
    position = {(user, item): row for row, (user, item) in enumerate(table[:, :2].tolist())}
    fold = np.zeros(len(table), dtype=np.uint8)
    for number, part in enumerate(parts, start=1):
        rows = [position.get((user, item), -1) for user, item in part[:, :2].tolist()]
        if min(rows) < 0 or fold[rows].any():
            raise ValueError(f"{path.name}: u{number}.test does not fit u.data")
        fold[rows] = number
    if not fold.all():
        raise ValueError(f"{path.name}: the five test parts leave {int((fold == 0).sum())} ratings out")
    return {
        "user_id": table[:, 0].astype(np.uint16), "item_id": table[:, 1].astype(np.uint16),
        "rating": table[:, 2].astype(np.uint8), "timestamp": table[:, 3].astype(np.int32), "test_fold": fold,
    }  # fmt: skip


def jester1(path: Path) -> dict[str, Array]:
    """Read ``jester_dataset_1_1.zip`` or its ``jester-data-1.xls``: a count and 100 ratings a row, 99 = not rated."""
    try:
        from python_calamine import CalamineWorkbook
    except ImportError as error:
        raise ImportError("reading Jester's .xls needs python-calamine: pip install 'fisherfold[data]'") from error
    content = _members(path, ["jester-data-1.xls"])[0] if zipfile.is_zipfile(path) else path.read_bytes()
    sheet = CalamineWorkbook.from_filelike(io.BytesIO(content)).get_sheet_by_index(0).to_python()
    table = np.array(sheet, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != 101:
        raise ValueError(f"{path.name}: a Jester sheet has a count and 100 ratings a row, got shape {table.shape}")
    return {"ratings_x100": np.rint(table[:, 1:] * 100).astype(np.int16)}


def load_sarcos_file(path: str | Path) -> Table:
    """Read an original SARCOS file, ``sarcos_inv.mat`` or ``sarcos_inv_test.mat``.

    It is a MATLAB file with one matrix of 28 columns: 21 inputs, 7 torques.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}; SARCOS comes from http://gaussianprocess.org/gpml/data/")
    from scipy.io import loadmat

    try:
        found = {key: value for key, value in loadmat(path).items() if not key.startswith("__")}
    except Exception as error:  # of many kinds
        raise ValueError(f"{path} cannot be read as a MATLAB file: {error}") from error
    matrices = [value for value in found.values() if value.ndim == 2 and value.shape[1] == 28]
    if len(matrices) != 1:
        shapes = {key: value.shape for key, value in found.items()}
        raise ValueError(f"{path} should hold one matrix of 28 columns (21 inputs, 7 torques), got {shapes}")
    values = matrices[0].astype(np.float64)
    return Table(values[:, :21], values[:, 21:])


def sarcos_test(path: Path) -> dict[str, Array]:
    """Read ``sarcos_inv_test.mat``."""
    table = load_sarcos_file(path)
    return {"micro": np.rint(np.hstack([table.X, table.Y]) * 1e6).astype(np.int32)}


def cifar10(path: Path) -> dict[str, Array]:
    """Read ``cifar-10-binary.tar.gz``."""
    parts = _members(path, [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"])
    images, labels = zip(*(_binary(part, labels=1) for part in parts), strict=True)
    return {
        "train_images": np.concatenate(images[:5]), "train_labels": np.concatenate(labels[:5])[:, 0],
        "test_images": images[5], "test_labels": labels[5][:, 0],
    }  # fmt: skip


def cifar100(path: Path) -> dict[str, Array]:
    """Read ``cifar-100-binary.tar.gz``."""
    arrays: dict[str, Array] = {}
    for split, content in zip(("train", "test"), _members(path, ["train.bin", "test.bin"]), strict=True):
        images, labels = _binary(content, labels=2)
        arrays |= {f"{split}_images": images, f"{split}_labels": labels[:, 1], f"{split}_coarse_labels": labels[:, 0]}
    return arrays


READERS: Mapping[str, Callable[[Path], dict[str, Array]]] = {
    "cifar10": cifar10, "cifar100": cifar100, "jester1": jester1, "movielens100k": movielens100k,
    "movielens1m": movielens1m, "sarcos_test": sarcos_test,
}  # fmt: skip


def _integers(text: bytes, what: str) -> NDArray[np.int64]:
    try:
        table = np.loadtxt(io.BytesIO(text), dtype=np.int64, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{what} should hold 4 integers a line: {error}") from None
    if table.shape[1] != 4:
        raise ValueError(f"{what} should hold 4 integers a line, got {table.shape[1]}")
    return table


def _members(path: Path, names: list[str]) -> list[bytes]:
    """Files of a zip or tar archive by their names, whatever folder they are in."""
    found: dict[str, bytes] = {}
    total = 0
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            _check_size(path, sum(info.file_size for info in infos))
            found = {Path(i.filename).name: archive.read(i) for i in infos if Path(i.filename).name in names}
    else:
        with tarfile.open(path, "r:*") as packed:
            for info in packed:
                total += info.size
                _check_size(path, total)
                if Path(info.name).name in names and info.isfile() and (file := packed.extractfile(info)) is not None:
                    found[Path(info.name).name] = file.read()
    if missing := [name for name in names if name not in found]:
        hint = "; the binary version is expected" if missing[0].endswith(".bin") else ""
        raise ValueError(f"{path.name} holds no file {missing[0]}{hint}")
    return [found[name] for name in names]


def _check_size(path: Path, size: int) -> None:
    if size > ARCHIVE_LIMIT:
        raise ValueError(f"{path.name} claims more than {ARCHIVE_LIMIT / 2**20:.0f} MiB, which no official file has")


def _binary(content: bytes, *, labels: int) -> tuple[Array, Array]:
    """Images and labels of a binary CIFAR file: records of labels and the red, green and blue planes."""
    width = 3072 + labels
    if len(content) % width:
        raise ValueError(f"a binary CIFAR file has records of {width} bytes, got {len(content)} bytes")
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, width)
    images = rows[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), rows[:, :labels].copy()
