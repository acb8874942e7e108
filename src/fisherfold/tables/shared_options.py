"""Options of a fit over several processes: they must be the same everywhere.

The processes call the same operations in the same order only if they take the same decisions. One pass more on one of
them, or a checkpoint that the others know nothing of, and they wait for each other for ever, or add up what does not
belong together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fisherfold.distributed import Group
from fisherfold.tables.parameters import storable

# What each process may decide for itself; a checkpoint may have another path on another host.
_FREE = frozenset({"verbose", "n_jobs", "device", "checkpoint"})


def check_agreement(options: Mapping[str, Any], group: Group) -> None:
    """Look whether all processes were given the same options; every one of them must ask.

    Args:
        options: by name, accepted on this process.
        group: the processes.

    Raises:
        ValueError: naming an option, and two processes that differ in it.
    """
    known = {name: storable(value) for name, value in options.items() if name not in _FREE}
    if "checkpoint" in options:
        known["checkpoint"] = "None" if options["checkpoint"] is None else "a file"
    text = json.dumps(known, default=lambda value: getattr(value, "__qualname__", type(value).__name__))
    first, *others = map(json.loads, group.gather_texts(text))
    for rank, theirs in enumerate(others, start=1):
        for name, value in first.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"all ranks must be given the same options: {name} is {_short(value)} on rank 0 and "
                    f"{_short(theirs.get(name))} on rank {rank}"
                )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
