"""Tensors and a JSON header in one safetensors file.

The file carries a format name, a version, a JSON header and a SHA-256 of all that; no pickle is involved, and nothing
is believed before it is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fisherfold.files.atomic import write_atomically

HEADER = "fisherfold"
HEADER_LIMIT = 32 * 2**20  # bytes of JSON; parsed, it takes some twenty times as much memory
_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"})


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

    Raises:
        ValueError: if the header is larger than a reader would accept.
    """
    # copies, because the format refuses two names for the same memory
    layout = torch.contiguous_format
    plain = {name: tensor.detach().cpu().clone(memory_format=layout) for name, tensor in tensors.items()}
    content = json.loads(json.dumps({"kind": kind, "version": version, "header": dict(header)}))
    signed = json.dumps(content | {"sha256": _signature(plain, content)})
    if len(signed) > HEADER_LIMIT // 2:  # quoted once more inside the file
        raise ValueError(f"cannot write {path}: its header has {len(signed):,} bytes, more than {HEADER_LIMIT // 2:,}")
    write_atomically(path, save(plain, metadata={HEADER: signed}))


def read_tensors(
    path: str | os.PathLike[str], *, kind: str, version: int, device: str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``write_tensors`` wrote, and check it.

    Nothing is allocated on the word of the file: its claims must agree with its true length first, then the checksum
    is computed from the mapped file, then the tensors are copied into memory.

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
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path} cannot be read: its name, or that of its folder, is not UTF-8; rename it") from None
    try:
        _check_size(Path(path))
        with safe_open(str(path), framework="pt") as file:
            content = _checked_content(file, path, kind, version)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if content.pop("sha256", None) != _signature(tensors, content):
                _refuse(f"{path} is damaged: its checksum does not match")
            if not isinstance(content.get("header"), dict):
                raise ValueError("it has no header")
            # copies, because what lies in the file's buffer is not aligned, and sums over it can differ in the last bit
            return {name: tensor.clone().to(device) for name, tensor in tensors.items()}, content["header"]
    except _Refused as error:
        raise ValueError(str(error)) from None
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(f"{path} is damaged or not a {kind} file of fisherfold: {reason}") from None


class _Refused(ValueError):
    """A refusal that is a whole sentence already."""


def _refuse(sentence: str) -> NoReturn:
    raise _Refused(sentence)


def _checked_content(file: Any, path: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """The JSON beside the tensors, of a kind, version and tensor types that are known."""
    content = parse_json((file.metadata() or {}).get(HEADER, "null"))
    if not isinstance(content, dict) or content.get("kind") != kind:
        _refuse(f"{path} is not a {kind} file of fisherfold")
    seen = content["version"]
    if not isinstance(seen, int) or isinstance(seen, bool) or seen < 1 or seen > version:
        _refuse(f"{path} has version {seen} of the {kind} format, at most {version} is known here")
    for name in file.keys():  # noqa: SIM118
        if (dtype := file.get_slice(name).get_dtype()) not in _DTYPES:
            raise ValueError(f"its tensor {name!r} has the type {dtype}")
    return content


def _check_size(path: Path) -> None:
    """Refuse a header or a file too large to be read here before anything is read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        claimed = int.from_bytes(file.read(8), "little")
    if claimed > min(size, HEADER_LIMIT):
        raise ValueError(f"it claims a header of {claimed:,} bytes, {min(size, HEADER_LIMIT):,} are possible")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else size
    if size > memory > 0:
        raise ValueError(f"it has {size:,} bytes, more than the {memory:,} bytes of memory of this machine")


def kind_of(path: Path) -> str | None:
    """What a file of tensors holds, told from its header alone.

    Args:
        path: the file.

    Returns:
        The kind, ``foreign`` if others wrote it; None if there is no file, or none that can be read.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            metadata = parse_json(file.read(length) if length <= HEADER_LIMIT else "").get("__metadata__", {})
        return str(parse_json(metadata[HEADER])["kind"]) if HEADER in metadata else "foreign"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def parse_json(text: str | bytes) -> Any:
    """Read JSON in which no object has the same key twice.

    Args:
        text: the text.

    Returns:
        What it says.

    Raises:
        ValueError: if it is not JSON, repeats a key, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its JSON has the same key twice")
    return found


@contextlib.contextmanager
def sound(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Turn whatever goes wrong while a checked file is put together into a refusal of that file.

    The checksum says that a file is as it was written, not that an honest program wrote it.

    Args:
        path: the file.
        kind: what it holds.

    Yields:
        Nothing.

    Raises:
        ValueError: naming the file and the reason.
    """
    try:
        yield
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        whole = reason.startswith(str(path))
        raise ValueError(reason if whole else f"{path} is not a sound {kind} file: {reason}") from None


def digest(tensors: Iterable[Tensor]) -> str:
    """A fingerprint of data.

    Args:
        tensors: the data.

    Returns:
        The SHA-256 of their shapes and contents.
    """
    found = hashlib.sha256()
    for tensor in tensors:
        array = tensor.detach().cpu().contiguous().numpy()
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(array.data.cast("B") if array.size else b"")
    return found.hexdigest()


def _signature(tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> str:
    found = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
