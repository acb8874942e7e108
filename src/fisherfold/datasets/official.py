"""Readers of the official files, as their owners distribute them, into the arrays that the records describe.

Archives are read in memory: nothing is unpacked to the disk, so that no name inside an archive can point elsewhere, and
what an archive claims to hold is bounded before it is read. No pickle is executed: the Python form of CIFAR goes
through an unpickler that knows arrays and nothing else.
"""

from __future__ import annotations

import io
import pickle  # nosec B403
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fisherfold.plain import counted

Array: TypeAlias = NDArray[Any]

# the largest official member is one CIFAR-100 training file of 154 MB
MEMBER_LIMIT = 400 * 2**20


def movielens1m(path: Path) -> dict[str, Array]:
    """Read ``ml-1m.zip`` or its ``ratings.dat`` (``user::movie::rating::time``).

    Args:
        path: the file.

    Returns:
        The arrays of the record ``movielens1m``, sorted by user and movie.
    """
    text = _member(path, "ratings.dat") if zipfile.is_zipfile(path) else path.read_bytes()
    table = _integers(text.replace(b"::", b"\t"), columns=4, what=f"{path.name}: ratings.dat")
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    return {
        "user_id": table[:, 0].astype(np.uint16), "movie_id": table[:, 1].astype(np.uint16),
        "rating": table[:, 2].astype(np.uint8), "shape": np.array([6040, 3952], dtype=np.int32),
    }  # fmt: skip


def movielens100k(path: Path) -> dict[str, Array]:
    """Read ``ml-100k.zip`` with ``u.data`` and the five official test parts.

    Args:
        path: the archive.

    Returns:
        The arrays of the record ``movielens100k``, in the order of ``u.data``.

    Raises:
        ValueError: if the test parts do not cover the ratings once each.
    """
    table = _integers(_member(path, "u.data"), columns=4, what=f"{path.name}: u.data")
    position = {(user, item): row for row, (user, item) in enumerate(table[:, :2].tolist())}
    fold = np.zeros(len(table), dtype=np.uint8)
    for number in range(1, 6):
        part = _integers(_member(path, f"u{number}.test"), columns=4, what=f"{path.name}: u{number}.test")
        rows = [position.get((user, item), -1) for user, item in part[:, :2].tolist()]
        if min(rows) < 0 or fold[rows].any():
            raise ValueError(f"{path.name}: u{number}.test does not fit u.data")
        fold[rows] = number
    if not fold.all():
        raise ValueError(f"{path.name}: the five test parts leave {counted(int((fold == 0).sum()), 'rating')} out")
    return {
        "user_id": table[:, 0].astype(np.uint16), "item_id": table[:, 1].astype(np.uint16),
        "rating": table[:, 2].astype(np.uint8), "timestamp": table[:, 3].astype(np.int32), "test_fold": fold,
    }  # fmt: skip


def jester1(path: Path) -> dict[str, Array]:
    """Read ``jester_dataset_1_1.zip`` or its ``jester-data-1.xls``: a count and 100 ratings a row, 99 = not rated.

    Args:
        path: the file.

    Returns:
        The array of the record ``jester1``.

    Raises:
        ImportError: if the reader of ``.xls`` files is not installed.
        ValueError: if the sheet does not have 101 columns.
    """
    try:
        from python_calamine import CalamineWorkbook
    except ImportError as error:
        raise ImportError("reading Jester's .xls needs python-calamine: pip install 'fisherfold[data]'") from error
    content = _member(path, "jester-data-1.xls") if zipfile.is_zipfile(path) else path.read_bytes()
    sheet = CalamineWorkbook.from_filelike(io.BytesIO(content)).get_sheet_by_index(0).to_python()
    table = np.array(sheet, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != 101:
        raise ValueError(f"{path.name}: a Jester sheet has a count and 100 ratings a row, got shape {table.shape}")
    return {"ratings_x100": np.rint(table[:, 1:] * 100).astype(np.int16)}


def sarcos_test(path: Path) -> dict[str, Array]:
    """Read ``sarcos_inv_test.mat``: 21 inputs and 7 torques a row.

    Args:
        path: the file.

    Returns:
        The array of the record ``sarcos_test``.
    """
    from fisherfold.datasets.local import load_sarcos_file

    table = load_sarcos_file(path)
    return {"micro": np.rint(np.hstack([table.X, table.Y]) * 1e6).astype(np.int32)}


def cifar10(path: Path) -> dict[str, Array]:
    """Read ``cifar-10-binary.tar.gz`` or ``cifar-10-python.tar.gz``.

    Args:
        path: the archive.

    Returns:
        The arrays of the record ``cifar10``.
    """
    members = _tar(path)
    if "data_batch_1.bin" in members:
        train = [_binary(members[f"data_batch_{i}.bin"], labels=1) for i in range(1, 6)]
        test = _binary(members["test_batch.bin"], labels=1)
    else:
        train = [_python(members[f"data_batch_{i}"], ("labels",)) for i in range(1, 6)]
        test = _python(members["test_batch"], ("labels",))
    return {
        "train_images": np.concatenate([part[0] for part in train]),
        "train_labels": np.concatenate([part[1][:, 0] for part in train]),
        "test_images": test[0], "test_labels": test[1][:, 0],
    }  # fmt: skip


def cifar100(path: Path) -> dict[str, Array]:
    """Read ``cifar-100-binary.tar.gz`` or ``cifar-100-python.tar.gz``.

    Args:
        path: the archive.

    Returns:
        The arrays of the record ``cifar100``.
    """
    members = _tar(path)
    arrays: dict[str, Array] = {}
    for split in ("train", "test"):
        if f"{split}.bin" in members:
            images, labels = _binary(members[f"{split}.bin"], labels=2)
        else:
            images, labels = _python(members[split], ("coarse_labels", "fine_labels"))
        arrays |= {f"{split}_images": images, f"{split}_labels": labels[:, 1], f"{split}_coarse_labels": labels[:, 0]}
    return arrays


READERS: Mapping[str, Callable[[Path], dict[str, Array]]] = {
    "cifar10": cifar10, "cifar100": cifar100, "jester1": jester1, "movielens100k": movielens100k,
    "movielens1m": movielens1m, "sarcos_test": sarcos_test,
}  # fmt: skip


def _integers(text: bytes, *, columns: int, what: str) -> NDArray[np.int64]:
    try:
        table = np.loadtxt(io.BytesIO(text), dtype=np.int64, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{what} should hold {columns} integers a line: {error}") from None
    if table.shape[1] != columns:
        raise ValueError(f"{what} should hold {columns} integers a line, got {table.shape[1]}")
    return table


def _member(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if Path(info.filename).name == name:
                _check_size(path, name, info.file_size)
                return archive.read(info)
    raise ValueError(f"{path.name} holds no file {name}")


def _tar(path: Path) -> dict[str, bytes]:
    members = {}
    with tarfile.open(path, "r:*") as archive:
        for info in archive:
            if info.isfile() and (file := archive.extractfile(info)) is not None:
                _check_size(path, info.name, info.size)
                members[Path(info.name).name] = file.read()
    return members


def _check_size(path: Path, name: str, size: int) -> None:
    if size > MEMBER_LIMIT:
        raise ValueError(f"{path.name}: {name} claims {size / 2**20:.0f} MiB, more than any official file has")


def _planes(pixels: Array) -> Array:
    """Rows of 3072 bytes, the red, green and blue planes, as images."""
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _binary(content: bytes, *, labels: int) -> tuple[Array, Array]:
    width = 3072 + labels
    if len(content) % width:
        raise ValueError(f"a binary CIFAR file has records of {width} bytes, got {counted(len(content), 'byte')}")
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, width)
    return _planes(rows[:, labels:]), rows[:, :labels].copy()


class _ArraysOnly(pickle.Unpickler):  # noqa: S301  (it refuses every name but those of arrays)
    """Knows how arrays are put together and refuses everything else."""

    _ALLOWED = frozenset({
        ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"),
        ("numpy", "dtype"), ("_codecs", "encode"),
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise ValueError(f"a CIFAR file should hold arrays only, found {module}.{name}")
        return super().find_class(module, name)


def _python(content: bytes, keys: tuple[str, ...]) -> tuple[Array, Array]:
    batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
    return _planes(np.asarray(batch["data"])), np.stack([np.asarray(batch[key], np.uint8) for key in keys], axis=1)
