"""Files that are whole or absent: tensors and a JSON header in one safetensors file, written atomically.

A file is written under a temporary name in the same folder, flushed to the disk and renamed, so that a reader never
sees half of it. It carries a format name, a version, a JSON header and a SHA-256 of all that; no pickle is involved.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

HEADER = "fisherfold"


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that is either complete or not there.

    Args:
        path: where to write; the folder must exist.
        content: the bytes.

    Raises:
        FileNotFoundError: if the folder does not exist.
        IsADirectoryError: if the path is a folder.
        PermissionError: if the folder cannot be written to.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {target}: it is a folder")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: the folder {target.parent} does not exist")
    # opened like any new file, so that others may read it as far as the user's umask allows
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise PermissionError(f"cannot write {target}: the folder {target.parent} is read-only") from None
        raise


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], *, kind: str, version: int, header: Mapping[str, Any]
) -> None:
    """Write named tensors with a JSON header.

    Args:
        path: where to write.
        tensors: the tensors by name.
        kind: what the file holds, checked when it is read.
        version: the version of that kind's format.
        header: anything that JSON can hold; floats keep all their digits.
    """
    # copies, because the format refuses two names for the same memory
    layout = torch.contiguous_format
    plain = {name: tensor.detach().cpu().clone(memory_format=layout) for name, tensor in tensors.items()}
    content = json.loads(json.dumps({"kind": kind, "version": version, "header": dict(header)}))
    signed = content | {"sha256": _digest(plain, content)}
    write_atomically(path, save(plain, metadata={HEADER: json.dumps(signed)}))


def read_tensors(
    path: str | os.PathLike[str], *, kind: str, version: int, device: str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``write_tensors`` wrote, and check it.

    Args:
        path: the file.
        kind: what it must hold.
        version: the newest version of that kind that the caller understands.
        device: where to put the tensors.

    Returns:
        The tensors and the header.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, of another kind, or of a newer version.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            content = json.loads(metadata.get(HEADER, "null"))
            if not isinstance(content, dict) or content.get("kind") != kind:
                raise ValueError(f"{path} is not a {kind} file of fisherfold")
            seen = content["version"]
            if not isinstance(seen, int) or seen > version:
                raise ValueError(f"{path} has version {seen} of the {kind} format, at most {version} is known here")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{path} is damaged or not a {kind} file of fisherfold: {error}") from None
    if content.pop("sha256", None) != _digest(tensors, content):
        raise ValueError(f"{path} is damaged: its checksum does not match")
    # copies, because what lies in the file's buffer is not aligned, and sums over it can differ in their last bit
    return {name: tensor.clone().to(device) for name, tensor in tensors.items()}, content["header"]


def _digest(tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()
