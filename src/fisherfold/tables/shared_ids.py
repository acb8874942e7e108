"""One numbering of ids for all processes, without a process that collects everything first.

The processes speak one after the other: each sends the ids that no one before it has named. So every id travels once,
and no process ever holds more than the distinct ids. Numbers are ascending, text is in the order of its first
occurrence, as in one process that reads the shares one after the other.
"""

from __future__ import annotations

import json

import numpy as np
import torch

from fisherfold.distributed import Group
from fisherfold.tables.ids import IdIndex, Ids, objects

_NONE = "none"


def common_kind(labels: Ids, group: Group, name: str) -> str:
    """The kind that the ids of all processes can be brought to.

    Args:
        labels: the distinct ids here.
        group: the processes.
        name: what the ids name, for messages.

    Returns:
        A dtype: ``int64``, ``uint64``, ``float64`` or ``object`` for text.

    Raises:
        TypeError: if there is none.
    """
    with group.together():
        if labels.dtype == object and not all(isinstance(label, str) for label in labels.tolist()):
            odd = next(label for label in labels.tolist() if not isinstance(label, str))
            raise TypeError(
                f"over several processes {name} ids must be numbers or text, got {odd!r} ({type(odd).__name__})"
            )
    kinds = set(group.gather_texts(str(labels.dtype) if len(labels) else _NONE)) - {_NONE}
    if len(kinds) <= 1:
        return next(iter(kinds), "int64")
    if "object" in kinds and "float64" not in kinds:
        return "object"  # whole numbers in one share, names in another: all of them are names
    if kinds == {"int64", "uint64"}:
        with group.together():
            if len(labels) and (least := int(labels.min())) < 0:
                raise TypeError(f"{name} ids go beyond 2**63 on another rank, and are negative here: {least}")
        return "uint64"
    if kinds == {"int64", "float64"}:
        with group.together():
            whole = labels if labels.dtype == np.int64 else labels[:0]
            large = max(int(whole.max(initial=0)), int(whole.min(initial=0)), key=abs)
            if abs(large) >= 2**53:
                raise TypeError(f"{name} ids are floats on another rank, and too large for floats here: {large}")
        return "float64"
    raise TypeError(f"{name} ids are of different kinds on different ranks: {', '.join(sorted(kinds))}")


def cast(ids: Ids, kind: str) -> Ids:
    """Bring ids to the common kind.

    Args:
        ids: ids as made by ``id_array``.
        kind: what ``common_kind`` found.

    Returns:
        The same ids.
    """
    if str(ids.dtype) == kind:
        return ids
    if kind != "object":
        return ids.astype(kind)
    return objects([str(value) for value in ids.tolist()])


def joint_index(labels: Ids, group: Group, name: str) -> IdIndex:
    """The ids of all processes under one numbering.

    Args:
        labels: the distinct ids here, in the order of their first occurrence.
        group: the processes.
        name: what the ids name, for messages.

    Returns:
        The index, the same on every process.
    """
    kind = common_kind(labels, group, name)
    if group.size == 1:
        return IdIndex(cast(labels, kind))
    labels = cast(labels, kind)
    whole = IdIndex(labels[:0])
    for source in range(group.size):
        fresh = labels[whole.numbers(labels, name) < 0] if source == group.rank else labels[:0]
        whole.add(_send(fresh, group, source, kind))
    return IdIndex(np.sort(whole.labels)) if kind != "object" else whole


def _packed(ids: Ids) -> bytes:
    # halves of a pair of UTF-16 are no text in UTF-8, but names that Python has for odd bytes; JSON reads them back
    return json.dumps(ids.tolist(), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _send(ids: Ids, group: Group, source: int, kind: str) -> Ids:
    content = None
    if source == group.rank:
        block = _packed(ids) if kind == "object" else ids.tobytes()
        content = torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.empty(0, dtype=torch.uint8)
    block = group.broadcast(content, source).numpy().tobytes()
    return objects(json.loads(block)) if kind == "object" else np.frombuffer(block, dtype=kind).copy()
