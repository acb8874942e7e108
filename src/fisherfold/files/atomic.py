"""Files that are whole or absent, and files that one process holds at a time; both rest on the locks of the system.

A file is written under a temporary name in the same folder, flushed to the disk and renamed, and the folder is flushed
too, so that a reader never sees half of it, whatever is killed or unplugged. The writer has its temporary file locked,
so that what a dead one left can be told from what a living one writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # not on Windows, where leftovers of killed writers stay until someone removes them
    fcntl = None  # type: ignore[assignment]


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that is either complete or not there.

    Temporary files that a killed process has left for the same name are removed. A link stays, and what it points to
    is written. A file that is replaced hands on its permissions: what was kept from others stays so.

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
                _hand_on_permissions(target, file)
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


def _hand_on_permissions(target: Path, file: IO[bytes]) -> None:
    if hasattr(os, "fchmod"):
        with contextlib.suppress(OSError):  # a file that is new, or a file system without permissions
            # the owner may write, or nobody could tell by its lock whether it is a leftover
            os.fchmod(file.fileno(), target.stat().st_mode & 0o777 | 0o200)


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
