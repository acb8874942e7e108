"""What the processes of one fit must have in common; every one of them must ask."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fisherfold.distributed import Group
from fisherfold.tables.parquet import parquet_files

_BLOCK = 2**20


def check_same_options(options: Mapping[str, Any], group: Group) -> None:
    """Raise unless all processes were given the same options."""
    first, *others = group.gather_objects(dict(options))
    for rank, theirs in enumerate(others, start=1):
        if differing := [name for name in first if theirs.get(name) != first[name]]:
            name = differing[0]
            raise ValueError(
                f"all ranks must be given the same options: {name} is {first[name]} on rank 0 and "
                f"{theirs.get(name)} "
                f"on rank {rank}"
            )


def check_same_file(path: str | Path, group: Group) -> None:
    """Raise unless the file has the same content for all processes."""
    mine = ""
    with group.together():
        if str(path) == "-":
            raise ValueError(
                "standard input cannot be shared by several processes: name a file that all can "
                "read"
            )
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no file {path}")
        if group.size > 1:
            mine = _digest([Path(path)] if Path(path).is_file() else parquet_files(path))
    copies = group.gather_objects((str(path), mine))
    for rank, (name, theirs) in enumerate(copies):
        if theirs != copies[0][1]:
            raise ValueError(
                f"all ranks must read the same file: {copies[0][0]} of rank 0 and {name} of rank "
                f"{rank} differ"
            )


def _digest(paths: list[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                found.update(block)
    return found.hexdigest()
