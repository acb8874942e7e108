"""The model that answers: mapped into memory once for all workers, exchanged when its folder is replaced.

A new version is loaded beside the old one, checked as a whole, and then takes its place: a request keeps the model it
began with. A version that cannot be loaded is refused, once, and the old one stays.

Loading checks sums and numbers and takes time and memory, so one worker does it for all: it writes the arrays, each
at a multiple of 64 bytes, into a file of the scratch folder, which the workers map. The pages of a mapped file exist
once in memory, however many processes read them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.completion.base import CompletionBase
from fisherfold.completion.files import KIND, VERSION
from fisherfold.tables.folders import load_folder, model_file

# Arrays begin at multiples of so many bytes, as PyTorch's own memory does.
ALIGNMENT = 64
# Times that a folder is read again that was replaced while it was read.
TRIES = 5
Signature = tuple[int, int, int]


@dataclass(frozen=True)
class Version:
    """A model and its name, the beginning of the checksum of its file."""

    model: Any
    name: str


class ModelStore:
    """Holds the model of a folder and follows the folder.

    Args:
        folder: the model folder.
        scratch: a folder that all workers share.

    Attributes:
        current: the version that answers.
        refused: why the folder's newest version was not taken, or an empty text.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder
        self.scratch = scratch
        self.refused = ""
        self._signature: Signature | None = None
        self.current = self._load()

    def refresh(self) -> bool:
        """Look at the folder; take a new version if there is one that can be loaded.

        Returns:
            Whether the model was exchanged.
        """
        try:
            if _signature(self.folder) == self._signature:
                return False
            version = self._load()
        except (OSError, ValueError) as error:
            with suppress(OSError):
                self._signature = _signature(self.folder)
            self.refused = str(error)
            return False
        changed = version.name != self.current.name
        self.current = version
        self.refused = ""
        return changed

    def replace(self, model: Any) -> Version:
        """Save a model in the folder and answer with it; used by updates, of which one runs at a time."""
        model.save(self.folder)
        self.current = self._load()
        return self.current

    def _load(self) -> Version:
        for _ in range(TRIES):
            signature = _signature(self.folder)
            name = _checksum(model_file(self.folder))
            arrays, meta = self._mapped(name)
            if _signature(self.folder) == signature:
                break
        self._signature = signature
        model = CompletionBase.restore(arrays, meta, source=model_file(self.folder))
        return Version(model, name)

    def _mapped(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The arrays of a version, written for all workers by the first that needs them."""
        path = self.scratch / f"{name}.arrays"
        with (self.scratch / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                arrays, meta = load_folder(self.folder, KIND, version=VERSION)
                write_arrays(path, arrays, meta)
                self._forget_others(path)
        return map_arrays(path)

    def _forget_others(self, kept: Path) -> None:
        """Remove the files of earlier versions; processes that still map them keep their pages."""
        for path in self.scratch.glob("*.arrays"):
            if path != kept:
                path.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write arrays so that they can be mapped: a line of JSON, then the bytes of each array."""
    table = {}
    offset = 0
    for name, tensor in arrays.items():
        table[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    header = json.dumps({"arrays": table, "meta": meta}).encode()
    header += b" " * (-(len(header) + 1) % ALIGNMENT) + b"\n"
    temporary = path.with_suffix(f".{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(header)
        for (_, _, begin), tensor in zip(table.values(), arrays.values(), strict=True):
            file.seek(len(header) + begin)
            file.write(tensor.contiguous().numpy().tobytes())
        file.truncate(len(header) + offset)
    os.replace(temporary, path)


def map_arrays(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Map what ``write_arrays`` wrote; pages that are written to become the process's own."""
    with path.open("rb") as file:
        header = file.readline()
    content = json.loads(header)
    content_bytes = np.memmap(path, np.uint8, "c", offset=len(header))
    arrays = {}
    for name, (dtype, shape, begin) in content["arrays"].items():
        kind = getattr(torch, dtype)
        count = int(np.prod(shape, dtype=np.int64))
        piece = content_bytes[begin : begin + count * kind.itemsize]
        arrays[name] = torch.from_numpy(piece).view(kind).view(shape)
    return arrays, content["meta"]


def _signature(folder: Path) -> Signature:
    """What changes when the model file is replaced."""
    found = os.stat(model_file(folder))
    return found.st_ino, found.st_mtime_ns, found.st_size


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
