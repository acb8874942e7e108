"""The model that answers: mapped into memory once for all workers, exchanged with its folder.

A new version is loaded beside the old one, checked as a whole, and then takes its place: a request
keeps the model it began with. A version that cannot be loaded is refused, once, and the old one
stays.

Loading checks sums and numbers and takes time and memory, so one process does it for all: it
writes the arrays, each at a multiple of 64 bytes, into a file of the scratch folder, which the
workers map. The pages of a mapped file exist once in memory, however many processes read them.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
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
# Bytes that are read at a time for a checksum.
CHUNK = 1 << 20
Signature = tuple[int, int, int]


@dataclass(frozen=True)
class Version:
    """A model and its name, the beginning of the checksum of its file."""

    model: Any
    name: str


@dataclass(frozen=True)
class Event:
    """A new rating, with the key that makes its delivery idempotent."""

    row: Any
    column: Any
    value: float
    key: str


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
        self._tried: Signature | None = None
        self._changing = threading.Lock()
        self.current = self._load()

    def refresh(self) -> bool:
        """Look at the folder; take a new version if there is one that can be loaded.

        Returns:
            Whether the model was exchanged.
        """
        with self._changing:
            return self._refresh()

    def _refresh(self) -> bool:
        try:
            if _signature(self.folder) == self._tried:
                return False
            version = self._load()
        except (OSError, ValueError) as error:
            self.refused = str(error)
            return False
        changed = version.name != self.current.name
        self.current = version
        self.refused = ""
        return changed

    def update(self, events: Sequence[Event]) -> Version:
        """Take new ratings into a copy of the model, save the copy and answer with it.

        Args:
            events: the ratings; what was delivered before, by its key, is left out.

        Returns:
            The version that answers from now on.

        Raises:
            ValueError: if the model cannot take them; nothing is changed then.
        """
        with self._changing:
            self._refresh()
            if self.refused:
                raise ValueError(f"the model folder cannot be read: {self.refused}")
            model = copy.copy(self.current.model)
            _check_keys(model)
            pairs = [(event.row, event.column) for event in events]
            values = [event.value for event in events]
            model.partial_fit(pairs, values, ids=[event.key for event in events])
            model.save(self.folder)
            self.current = self._load()
            return self.current

    def _load(self) -> Version:
        for _ in range(TRIES):
            before = _signature(self.folder)
            self._tried = before
            name = _checksum(model_file(self.folder))
            found = self._mapped(name, before)
            if found is not None:
                arrays, meta = found
                source = model_file(self.folder)
                return Version(CompletionBase.restore(arrays, meta, source=source), name)
        self._tried = None
        raise OSError(f"{self.folder} is replaced faster than it can be read")

    def _mapped(
        self, name: str, before: Signature
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The arrays of a version, written for all by who needs them first; None if it has gone."""
        path = self.scratch / f"{name}.arrays"
        with (self.scratch / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                arrays, meta = load_folder(self.folder, KIND, version=VERSION)
                if _signature(self.folder) != before:
                    return None
                CompletionBase.restore(arrays, meta, source=model_file(self.folder))
                write_arrays(path, arrays, meta)
                self._forget_others(path)
            # mapped before the next worker may remove the file
            return map_arrays(path)

    def _forget_others(self, kept: Path) -> None:
        """Remove the files of earlier versions; processes that still map them keep their pages."""
        for path in self.scratch.glob("*.arrays"):
            if path != kept:
                path.unlink(missing_ok=True)


def _check_keys(model: Any) -> None:
    """Raise if a model cannot tell events that it has had from new ones."""
    if not hasattr(model, "predict_interval"):
        raise ValueError(
            f"{type(model).__name__} keeps no keys of events and takes no updates here: fit it "
            "again and replace its folder"
        )


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
    try:
        found = os.stat(model_file(folder))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no model in the folder {folder}") from None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()[:12]
