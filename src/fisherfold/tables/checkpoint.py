"""Where a fit over several processes stands, in a file.

A fit that was killed goes on from the file to the same bits. The file names the fit it belongs to:
a digest of the data and the options that decide the result. It is written atomically after every
pass and read at the start if it is there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fisherfold.distributed import ALONE, Content, Group
from fisherfold.files import check_place, read_tensors, write_tensors

KIND = "fit-checkpoint"
VERSION = 1


class FitCheckpoint:
    """The checkpoint file of one fit."""

    def __init__(
        self, path: str | os.PathLike[str], identity: Mapping[str, Any], group: Group = ALONE
    ) -> None:
        self.path = Path(path)
        self.group = group
        self.identity = {name: str(value) for name, value in identity.items()}
        with group.together():
            if group.is_first:
                check_place(self.path, "checkpoint")

    def load(self) -> Content | None:
        """What was saved, if the file exists."""
        found: Content | None = None
        with self.group.together():
            if self.group.is_first:
                found = self._read()
        return self.group.tell(found)

    def _read(self) -> Content | None:
        if not self.path.exists():
            return None
        tensors, header = read_tensors(self.path, kind=KIND, version=VERSION)
        theirs = header.get("identity")
        if theirs != self.identity:
            theirs = theirs if isinstance(theirs, dict) else {}
            names = sorted(
                k for k in {*theirs, *self.identity} if theirs.get(k) != self.identity.get(k)
            )
            raise ValueError(
                f"checkpoint {self.path} belongs to another fit, it differs in {', '.join(names)}; "
                "remove the file or name another one"
            )
        return tensors, header["state"]

    def save(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write where the fit stands."""
        header = {"identity": self.identity, "state": dict(state)}
        with self.group.together():
            if self.group.is_first:
                write_tensors(self.path, tensors, kind=KIND, version=VERSION, header=header)
