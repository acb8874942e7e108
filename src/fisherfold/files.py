"""Files that are whole or absent: tensors and a JSON header in one safetensors file, written atomically.

A file is written under a temporary name in the same folder, flushed to the disk and renamed, and the folder is flushed
too, so that a reader never sees half of it, whatever is killed or unplugged. It carries a format name, a version, a
JSON header and a SHA-256 of all that; no pickle is involved, and nothing is believed before it is checked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

try:
    import fcntl
except ImportError:  # not on Windows, where leftovers of killed writers stay until someone removes them
    fcntl = None  # type: ignore[assignment]

MODEL = "model.safetensors"  # in the folder of a model
HEADER = "fisherfold"
HEADER_LIMIT = 32 * 2**20  # bytes of JSON; parsed, it takes some twenty times as much memory
_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"})


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that is either complete or not there.

    Temporary files that a killed process has left for the same name are removed. A link stays, and what it points to
    is written.

    Args:
        path: where to write; the folder must exist.
        content: the bytes.

    Raises:
        FileNotFoundError: if the folder does not exist.
        IsADirectoryError: if the path is a folder.
        OSError: if it is a device or a pipe, in whose place a file would be put.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {target}: it is a folder")
    if _is_device(target):
        raise OSError(f"cannot write {target}: it is a device or a pipe, a file is expected")
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: the folder {target.parent} does not exist")
    with _said(target):
        temporary, file = _temporary(target)
        try:
            with file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                if fcntl is None:
                    file.close()  # Windows renames closed files only
                # inside the block, while the lock is held: nobody takes the finished file for a leftover
                temporary.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    _remove_leftovers(target)
    _flush_folder(target.parent)


def _is_device(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _temporary(target: Path) -> tuple[Path, IO[bytes]]:
    """A new file beside the target, locked as long as its writer lives."""
    while True:
        # opened like any new file, so that others may read it as far as the user's umask allows
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
        file = temporary.open("xb")
        if fcntl is None:
            return temporary, file
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes leftovers there either
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if temporary.exists():
            return temporary, file
        file.close()  # taken for a leftover between its creation and its lock


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files of this name whose writer is dead: those that nobody has locked."""
    if fcntl is None:
        return
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{12}}")
    with contextlib.suppress(OSError):
        for entry in os.scandir(target.parent):
            if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError), open(entry.path, "rb+") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)


def _flush_folder(folder: Path) -> None:
    """Make the new name last through a loss of power, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def claimed(path: str | os.PathLike[str]) -> Iterator[bool]:
    """Hold a file for as long as the block runs, against other processes and other holders in this one.

    The claim ends with its process, however that dies. Where the system or the file system has no locks, everyone is
    given one.

    Args:
        path: of the file, which is made, and removed by the last holder; its folder must exist.

    Yields:
        Whether it is ours; if not, somebody else holds it.
    """
    if fcntl is None:
        yield True
        return
    with _said(Path(path)):
        Path(path).touch()
    with Path(path).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            pass
        # a former holder may have removed the name between our opening and our lock
        try:
            yield os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path))
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    os.unlink(path)


@contextlib.contextmanager
def _said(target: Path) -> Iterator[None]:
    """Refusals of the system as one sentence."""
    try:
        yield
    except OSError as error:
        number = error.errno
        if number in {errno.EACCES, errno.EPERM, errno.EROFS}:
            said: OSError = PermissionError(f"cannot write {target}: the folder {target.parent} is read-only")
        else:
            reasons = {
                errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up",
                errno.EFBIG: "it would be larger than is allowed here", errno.ENAMETOOLONG: "its name is too long",
                errno.ENOTDIR: f"{target.parent} is not a folder", errno.EEXIST: "it is a file",
            }  # fmt: skip
            said = OSError(f"cannot write {target}: {reasons.get(number or 0, error.strerror or str(error))}")
        said.errno = number
        raise said from None


def check_place(path: str | os.PathLike[str], name: str) -> None:
    """Look whether a file can have this name, before the hours of work whose result it is to hold.

    Args:
        path: the file.
        name: what it is, for the message.

    Raises:
        FileNotFoundError: if its folder does not exist.
        IsADirectoryError: if it is a folder.
        OSError: if it is a device or a pipe.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{name} {target}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise IsADirectoryError(f"{name} {target} must be a file, it is a folder")
    if _is_device(target):
        raise OSError(f"{name} {target} must be a file, it is a device or a pipe")


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Make a folder and those above it, if they do not exist.

    Args:
        path: the folder.

    Returns:
        The folder.
    """
    folder = Path(path)
    with _said(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_model_folder(path: str | os.PathLike[str], kind: str) -> None:
    """Look whether a model may be saved in a folder: over one of its own kind, but not over anything else.

    Args:
        path: the folder, which need not exist.
        kind: what the model is.

    Raises:
        ValueError: if the path is a file.
        FileExistsError: if the folder holds another kind of model.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot save into {folder}: it is a file, a folder is expected")
    held = _kind_of(folder / MODEL)
    if held not in (None, kind):
        raise FileExistsError(
            f"{folder} holds a {held} model, which a {kind} model would replace; name another folder, or remove it"
        )


def _kind_of(path: Path) -> str | None:
    """What a file of tensors holds, told from its header alone; None if there is none, or none that can be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            metadata = parse_json(file.read(length) if length <= HEADER_LIMIT else "").get("__metadata__", {})
        return str(parse_json(metadata[HEADER])["kind"]) if HEADER in metadata else "foreign"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextlib.contextmanager
def model_folder(path: str | os.PathLike[str], kind: str) -> Iterator[Path]:
    """A folder to write a model into; if it is new and the block fails, no trace of it is left.

    Args:
        path: the folder; it is made, with those above it, if it does not exist.
        kind: what the model is.

    Yields:
        The folder.
    """
    folder = Path(path)
    check_model_folder(folder, kind)
    first = next((above for above in reversed([folder, *folder.parents]) if not above.exists()), None)
    make_folder(folder)
    try:
        yield folder
    except BaseException:
        if first is not None:
            _take_back(folder, first)
        raise


def _take_back(folder: Path, first: Path) -> None:
    """Remove the folders that a failed save has made, up to the first, and nothing that others have put there since."""
    with contextlib.suppress(OSError):
        if not (folder / "model.json").exists():  # it is written last
            (folder / MODEL).unlink(missing_ok=True)
        for made in (folder, *folder.parents):
            made.rmdir()
            if made == first:
                return


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
