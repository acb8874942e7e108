"""Model folders: ``model.safetensors`` with everything, and ``model.json`` for people to read.

    save_folder(path, "completion", arrays, meta)      # arrays: tensors or NumPy arrays by name;
    meta: what JSON holds arrays, meta = load_folder(path, "completion")     # checked, finite
        tensors; errors name the file

A model is written into a new folder beside its place, flushed to the disk and exchanged with the
old one in one step. A reader opens a single file of it once, so that it gets the old or the new
model, whatever is written or killed at the same time. Only an empty folder or a model of the same
kind is replaced, and no symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold._version import __version__
from fisherfold.files import (
    flush_folder,
    kind_of,
    make_folder,
    pack_tensors,
    parse_json,
    read_tensors,
    remove_leftovers,
    sound,
    system_errors,
    temporary_beside,
    write_synced,
)
from fisherfold.plain import finite

MODEL = "model.safetensors"
SUMMARY = "model.json"
_TRIES = 100  # of a reader that meets a writer, and of two writers


def model_file(path: str | os.PathLike[str]) -> Path:
    """Give the file of a model folder that holds the model."""
    return Path(path) / MODEL


def check_folder(path: str | os.PathLike[str], kind: str) -> None:
    """Check, before a fit, whether a model may be saved in a folder."""
    folder = Path(path)
    if folder.is_symlink():
        raise FileExistsError(
            f"cannot save into {folder}: it is a symbolic link; name the folder itself"
        )
    if not folder.exists():
        return
    if Path.cwd().is_relative_to(os.path.realpath(folder)):
        raise FileExistsError(
            f"cannot save into {folder}: it is the current folder or one above it; name a folder "
            "in it, such as ./model"
        )
    if not folder.is_dir():
        raise FileExistsError(f"cannot save into {folder}: it is a file, a folder is expected")
    names = set(os.listdir(folder))
    others = sorted(names - {MODEL, SUMMARY}) or [
        name for name in names if (folder / name).is_symlink()
    ]
    if others:
        raise FileExistsError(
            f"cannot save into {folder}: it holds {others[0]}, which is not part of a model; name "
            "a new or empty folder"
        )
    held = kind_of(folder / MODEL) if MODEL in names else None
    foreign = [
        name
        for name in sorted(names)
        if not held or (name == SUMMARY and not _is_summary(folder / name, held))
    ]
    if names and (held != kind or foreign):
        what = f"{foreign[0]}, which fisherfold did not write" if foreign else f"a {held} model"
        raise FileExistsError(
            f"cannot save into {folder}: it holds {what}; name another folder, or remove it"
        )


def _is_summary(path: Path, kind: str) -> bool:
    try:
        return bool(parse_json(path.read_bytes())["kind"] == kind)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def save_folder(
    path: str | os.PathLike[str],
    kind: str,
    arrays: Mapping[str, Any],
    meta: Mapping[str, Any],
    *,
    version: int = 1,
) -> None:
    """Write a model into a folder, completely or not at all."""
    check_folder(path, kind)
    folder = Path(os.path.abspath(path))
    tensors = {name: torch.as_tensor(values) for name, values in arrays.items()}
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise ValueError(f"cannot save the model: its {name} contain NaN or infinity")
    header = {"fisherfold": __version__, **_untimed(finite(meta))}
    content = pack_tensors(tensors, kind=kind, version=version, header=header)
    summary = json.dumps({"kind": kind, "version": version, **header}, indent=1).encode()
    make_folder(folder.parent)
    with system_errors(folder):
        temporary = temporary_beside(folder)
        temporary.mkdir()
        try:
            write_synced(temporary / MODEL, content)
            write_synced(temporary / SUMMARY, summary)
            flush_folder(temporary)
            _put_in_place(temporary, folder, kind)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    remove_leftovers(folder)
    flush_folder(folder.parent)


def _untimed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Leave the seconds out of traces, so that equal fits give equal files."""
    found = dict(meta)
    for name, value in meta.items():
        if isinstance(value, Mapping):
            found[name] = _untimed(value)
        elif name == "trace" and isinstance(value, list):
            found[name] = [_untimed_row(row) for row in value]
    return found


def _untimed_row(row: Any) -> Any:
    """Leave the seconds out of one row of a trace."""
    if not isinstance(row, Mapping):
        return row
    return {name: value for name, value in row.items() if name != "seconds"}


def _put_in_place(new: Path, folder: Path, kind: str) -> None:
    """Rename a new model to its place; exchange it with the one that is there."""
    for _ in range(_TRIES):
        try:
            os.rename(new, folder)  # nothing there, or an empty folder
            return
        except OSError as error:
            if (
                error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.EACCES}
                or not folder.is_dir()
            ):
                raise
        check_folder(folder, kind)
        shutil.copymode(folder, new)
        for name in (MODEL, SUMMARY):
            with contextlib.suppress(FileNotFoundError):
                shutil.copymode(folder / name, new / name)
        if _exchange(new, folder):
            return
        with contextlib.suppress(
            FileNotFoundError
        ):  # file by file where the system has no exchange
            for name in (MODEL, SUMMARY):
                os.replace(new / name, folder / name)
            return
    raise OSError(errno.EBUSY, "other processes keep replacing it")


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step, if the system and the file system can (Linux)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here = -100
    exchange = 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0)


def load_folder(
    path: str | os.PathLike[str], kind: str, *, version: int = 1
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a model from its folder."""
    file = model_file(path)
    for left in reversed(range(_TRIES)):
        if not Path(path).is_dir():
            raise FileNotFoundError(f"there is no model folder {path}")
        try:
            arrays, meta = read_tensors(file, kind=kind, version=version)
            break
        except FileNotFoundError:
            # a writer may have put another folder here between two steps of the system
            if left == 0:
                raise FileNotFoundError(
                    f"there is no model in the folder {path}: it has no {MODEL}"
                ) from None
            time.sleep(1e-3)
    with sound(file, kind):
        for name, tensor in arrays.items():
            if not _is_finite(tensor):
                raise ValueError(f"its {name} contain NaN or infinity")
        if finite(meta) != meta:
            raise ValueError("its parameters contain NaN or infinity")
    return arrays, meta


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def expect(
    arrays: Mapping[str, Tensor],
    name: str,
    shape: tuple[int | None, ...] | None = None,
    *,
    integers: bool = False,
    least: float | None = None,
    positive: bool = False,
) -> Tensor:
    """Take one array of a model, of the shape, type and range that it must have."""
    if name not in arrays:
        raise ValueError(f"it has no {name}")
    tensor = arrays[name]
    if tensor.ndim == 0 or (shape is not None and not _fits(tensor.shape, shape)):
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, {shape} is expected")
    if tensor.dtype not in (
        (torch.int32, torch.int64) if integers else (torch.float32, torch.float64)
    ):
        raise ValueError(
            f"{name} holds {tensor.dtype}, {'integers' if integers else 'float32 or float64'} "
            "expected"
        )
    if not _is_finite(tensor) or (least is not None and bool((tensor < least).any())):
        raise ValueError(
            f"{name} must be finite" + ("" if least is None else f" and at least {least:g}")
        )
    if positive and not bool((tensor > 0).all()):
        raise ValueError(f"{name} must be positive")
    return tensor


def _fits(found: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(found) == len(shape) and all(
        b is None or a == b for a, b in zip(found, shape, strict=True)
    )


def expect_number(
    meta: Mapping[str, Any],
    name: str,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    integer: bool = False,
) -> Any:
    """Take one number of a model's ``meta``."""
    value = meta.get(name)
    kinds = (int,) if integer else (int, float)
    # before math.isfinite: an integer may be too large for a float
    if (
        isinstance(value, bool)
        or not isinstance(value, kinds)
        or not least <= value <= most
        or abs(value) > 1e300
    ):
        what = "an integer" if integer else "a finite number"
        raise ValueError(f"{name} is {str(value)[:40]!r}, {what} of at least {least:g} is expected")
    return value if integer else float(value)


def pack_index(index: Any, prefix: str) -> dict[str, Any]:
    """Give the arrays of an ``IdIndex`` under a prefix, to be saved."""
    return {f"{prefix}.ids.{name}": np.array(values) for name, values in index.to_arrays().items()}


def unpack_index(arrays: Mapping[str, Tensor], prefix: str, size: int) -> Any:
    """Make the ``IdIndex`` again that ``pack_index`` took apart."""
    from fisherfold.tables.ids import IdIndex

    start = f"{prefix}.ids."
    index = IdIndex.from_arrays(
        {n.removeprefix(start): a.numpy() for n, a in arrays.items() if n.startswith(start)}
    )
    if len(index) != size:
        raise ValueError(f"{len(index)} ids of {size} {prefix}")
    return index
