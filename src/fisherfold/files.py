"""Files that are whole or absent, and tensors with a checked JSON header (safetensors, no pickle).

A file is written under a temporary name in the same folder, flushed to the disk and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

import fisherfold.threads  # noqa: F401  (what a fork does to threads of PyTorch)

HEADER = "fisherfold"
HEADER_LIMIT = 16 * 2**20  # bytes of JSON; parsed, it takes some twenty times as much memory
_DAY = 24 * 3600.0
_LONGEST_NAME = 255 - 14  # bytes, so that a temporary name has room for a dot and its own letters
_DTYPES = frozenset(
    {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}
)


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file completely or not at all.

    Permissions stay, and a link stays with its target written.
    """
    check_place(path, "cannot write")
    target = Path(os.path.realpath(path))
    temporary = temporary_beside(target)
    with system_errors(target):
        try:
            write_synced(temporary, content)
            if target.exists():
                shutil.copymode(target, temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    remove_leftovers(target)
    flush_folder(target.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write bytes and wait until they are on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def temporary_beside(target: Path) -> Path:
    """A name in the folder of a target that nobody else has."""
    return target.with_name(f".{_short(target)}.{secrets.token_hex(6)}")


def _short(target: Path) -> str:
    """The name of a target, or its start where a longer one would be no name."""
    return os.fsencode(target.name)[:_LONGEST_NAME].decode("utf-8", "ignore")


def remove_leftovers(target: Path) -> None:
    """Remove temporary files and folders of a target that are a day old.

    Their writers were killed.
    """
    pattern = re.compile(rf"\.{re.escape(_short(target))}\.[0-9a-f]{{12}}")
    with contextlib.suppress(OSError):
        for left in target.parent.iterdir():
            if pattern.fullmatch(left.name) and time.time() - left.lstat().st_mtime > _DAY:
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def flush_folder(folder: Path) -> None:
    """Make a new name in a folder last through a loss of power, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def system_errors(target: Path) -> Iterator[None]:
    """Turn errors of the system into one sentence that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, PermissionError) and os.access(target.parent, os.W_OK | os.X_OK):
            reason += f"; the folder {target.parent} is writable, so it may be the umask"
        elif isinstance(error, PermissionError):
            reason = f"the folder {target.parent} is read-only"
        told = type(error)(f"cannot write {target}: {reason}")
        told.errno = error.errno
        raise told from None


def check_place(path: str | os.PathLike[str], name: str) -> None:
    """Check whether a file can have this name, before the work whose result it is to hold.

    ``name`` says what it is.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{name} {target}: it is a folder, a file is expected")
    if target.exists() and not target.is_file():
        raise OSError(f"{name} {target}: it is a device or a pipe, a file is expected")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{name} {target}: the folder {target.parent} does not exist")


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Make a folder and those above it, if they do not exist."""
    with system_errors(Path(path)):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def pack_tensors(
    tensors: Mapping[str, Tensor], *, kind: str, version: int, header: Mapping[str, Any]
) -> bytes:
    """Make the bytes of a file of named tensors, with a JSON header and a SHA-256."""
    # copies, because the format refuses two names for the same memory
    layout = torch.contiguous_format
    copies = {
        name: tensor.detach().cpu().clone(memory_format=layout) for name, tensor in tensors.items()
    }
    content = json.loads(json.dumps({"kind": kind, "version": version, "header": dict(header)}))
    signed = json.dumps(content | {"sha256": signature(copies, content)})
    if len(signed) > HEADER_LIMIT:
        raise ValueError(
            f"the header of the file has {len(signed):,} bytes, more than {HEADER_LIMIT:,}"
        )
    return bytes(save(copies, metadata={HEADER: signed}))


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], **how: Any) -> None:
    """Write a file of ``pack_tensors``."""
    write_atomically(path, pack_tensors(tensors, **how))


def read_tensors(
    path: str | os.PathLike[str], *, kind: str, version: int, device: str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``write_tensors`` wrote.

    Raises ``ValueError`` if it is damaged, or of another kind or a newer version.

    The file is opened once, so that one that is replaced at the same time is read as it was or as
    it is.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with sound(path, kind), Path(path).open("rb") as file:
        memory = (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            if hasattr(os, "sysconf")
            else 0
        )
        if 0 < memory < (size := os.fstat(file.fileno()).st_size):
            raise ValueError(
                f"it has {size:,} bytes, more than the {memory:,} bytes of memory of this machine"
            )
        content = _checked_content(_header(file), path, kind, version)
        file.seek(0)
        tensors = load(file.read())
        if content.pop("sha256", None) != signature(tensors, content):
            raise ValueError(f"{path} is damaged: its checksum does not match")
        # copies, because what lies in the file's buffer is not aligned, and sums over it can differ
        # in the last bit
        return {name: tensor.clone().to(device) for name, tensor in tensors.items()}, content[
            "header"
        ]


def _header(file: IO[bytes]) -> dict[str, Any]:
    """The header of an open safetensors file, whose claims must fit the length of the file."""
    length = int.from_bytes(file.read(8), "little")
    size = os.fstat(file.fileno()).st_size
    if length > min(size, 2 * HEADER_LIMIT):
        raise ValueError(
            f"it claims a header of {length:,} bytes, {min(size, 2 * HEADER_LIMIT):,} are possible"
        )
    header = parse_json(file.read(length).decode())
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if max(ends, default=0) != size - 8 - length:
        raise ValueError(
            f"it claims {max(ends, default=0):,} bytes of tensors and has {size - 8 - length:,}"
        )
    return dict(header)


def _checked_content(
    file: dict[str, Any], path: str | os.PathLike[str], kind: str, version: int
) -> dict[str, Any]:
    """The JSON beside the tensors, of a kind, version and tensor types that are known."""
    content = parse_json(file.pop("__metadata__", {}).get(HEADER, "null"))
    if not isinstance(content, dict) or content.get("kind") != kind:
        held = f": it holds a {str(content.get('kind'))[:40]}" if isinstance(content, dict) else ""
        raise ValueError(f"{path} is not a {kind} file of fisherfold{held}")
    seen = content["version"]
    if not isinstance(seen, int) or isinstance(seen, bool) or not 1 <= seen <= version:
        raise ValueError(
            f"{path} has version {seen} of the {kind} format, at most {version} is known here"
        )
    for name, entry in file.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"its tensor {name!r} has the type {entry['dtype']}")
    if not isinstance(content.get("header"), dict):
        raise ValueError("it has no header")
    return content


def kind_of(path: Path) -> str | None:
    """Tell from its header what a file of tensors holds; None if it is no file of ours."""
    if not path.is_file():  # a pipe would wait for someone to write into it
        return None
    with (
        contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError),
        path.open("rb") as file,
    ):
        return str(parse_json(_header(file)["__metadata__"][HEADER])["kind"])
    return None


def parse_json(text: str | bytes) -> Any:
    """Read JSON; raises ``ValueError`` if it is none, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


@contextlib.contextmanager
def sound(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into an error that names it.

    The checksum says that a file is as it was written, not that an honest program wrote it.
    """
    try:
        yield
    except (
        LookupError,
        AttributeError,
        TypeError,
        ValueError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
        SafetensorError,
    ) as error:
        reason = (
            f"it lacks {error}"
            if isinstance(error, KeyError)
            else str(error) or type(error).__name__
        )
        start = (
            ""
            if reason.startswith(str(path))
            else f"{path} is damaged or not a {kind} file of fisherfold: "
        )
        raise ValueError(start + reason) from None


def digest(tensors: Iterable[Tensor]) -> str:
    """Compute a fingerprint of data."""
    return signature({str(place): tensor for place, tensor in enumerate(tensors)}, {})


def signature(tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of named tensors and JSON content."""
    found = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
