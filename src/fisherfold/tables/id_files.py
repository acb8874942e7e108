"""Ids in files without pickle: numbers as a tensor, all others as JSON with the name of their kind.

Text, numbers and truth values are JSON as they stand. The others are an object with one field, such as
``{"date": "2020-02-01"}`` or ``{"tuple": ["a", 1]}``: what is read is equal to what was written, and of the same type.
Lengths of time are whole numbers of a unit; a period of pandas is its number among those of its frequency, and a file
that holds one needs pandas to be read.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import uuid
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.plain import counted
from fisherfold.tables.ids import Ids, objects, plain
from fisherfold.tables.posterior_files import take

_NUMBERS = (torch.int64, torch.uint64, torch.float64)


def _ticks(time: Any) -> str:
    unit, step = np.datetime_data(time.dtype)
    return f"{time.astype(np.int64)} {step}{unit}"


def _from_ticks(kind: Any, stored: str) -> Any:
    count, unit = stored.split()
    found = kind(int(count), unit)
    if np.isnat(found):
        raise ValueError(f"an id is {stored!r}, a time is expected")
    return found


def _from_period(stored: str) -> Any:
    try:
        import pandas
    except ImportError:
        raise ValueError("ids of this file are periods of pandas, which is not installed") from None
    number, frequency = stored.split()
    return pandas.Period(ordinal=int(number), freq=frequency)


_KINDS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "decimal": (Decimal, str, Decimal),
    "uuid": (uuid.UUID, str, uuid.UUID),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda span: str(span // datetime.timedelta(microseconds=1)),
        lambda stored: datetime.timedelta(microseconds=int(stored)),
    ),
    "datetime64": (np.datetime64, _ticks, partial(_from_ticks, np.datetime64)),
    "timedelta64": (np.timedelta64, _ticks, partial(_from_ticks, np.timedelta64)),
}


def to_json(label: Any, name: str) -> Any:
    """An id as JSON can hold it.

    Args:
        label: the id.
        name: what the ids name, for messages.

    Returns:
        Text, a number, a truth value, or an object of one field.

    Raises:
        TypeError: if ids of this kind cannot be kept in a file.

    Example:
        >>> to_json(("a", datetime.date(2020, 2, 1)), "rows")
        {'tuple': ['a', {'date': '2020-02-01'}]}
    """
    label = plain(label)
    kind = type(label)
    if kind in {str, int, float, bool}:
        return label
    if kind is tuple:
        return {"tuple": [to_json(part, name) for part in label]}
    for key, (found, write, _) in _KINDS.items():
        if kind is found:
            return {key: write(label)}
    if _is_period(kind):
        return {"period": f"{label.ordinal} {label.freqstr}"}
    raise TypeError(
        f"ids of {name} can be saved if they are text, numbers, tuples, bytes, dates, times, lengths of time, "
        f"decimals, UUIDs or periods of pandas, got {label!r} ({kind.__name__})"
    )


def _is_period(kind: type) -> bool:
    """Whether this is the class of pandas, which need not be there."""
    return kind.__name__ == "Period" and kind.__module__.partition(".")[0] == "pandas"


def from_json(stored: Any) -> Any:
    """An id that ``to_json`` wrote.

    Args:
        stored: what the file says.

    Returns:
        The id.

    Raises:
        ValueError: if it is no id.
    """
    if isinstance(stored, str | int) or (isinstance(stored, float) and math.isfinite(stored)):
        return stored
    if isinstance(stored, dict) and len(stored) == 1:
        [(key, content)] = stored.items()
        if key == "tuple" and isinstance(content, list):
            return tuple(map(from_json, content))
        if key in _KINDS and isinstance(content, str):
            return _KINDS[key][2](content)
        if key == "period" and isinstance(content, str):
            return _from_period(content)
    raise ValueError(f"an id is {str(stored)[:40]!r}, text, a number or a named kind of id is expected")


def pack_ids(labels: Ids, name: str) -> tuple[str, dict[str, Tensor]]:
    """Ids as tensors.

    Args:
        labels: the ids.
        name: what they name.

    Returns:
        Their kind and the tensors that hold them.
    """
    if labels.dtype != object:
        return str(labels.dtype), {"numbers": torch.from_numpy(np.ascontiguousarray(labels))}
    blocks = [
        json.dumps(to_json(label, name), ensure_ascii=False).encode("utf-8", "surrogatepass")
        for label in labels.tolist()
    ]
    ends = np.cumsum([len(block) for block in blocks])
    return "json", {"bytes": torch.from_numpy(np.frombuffer(b"".join(blocks), np.uint8).copy()),
                    "ends": torch.from_numpy(ends.astype(np.int64))}  # fmt: skip


def unpack_ids(tensors: dict[str, Tensor], name: str, kind: str) -> Ids:
    """The ids that ``pack_ids`` made tensors of.

    Args:
        tensors: the tensors of the file.
        name: what they name.
        kind: their kind.

    Returns:
        The ids.

    Raises:
        ValueError: if they do not hold together.
    """
    if kind != "json":
        stored = tensors[f"{name}.ids.numbers"]
        if stored.ndim != 1 or stored.dtype not in _NUMBERS or not bool(torch.isfinite(stored.double()).all()):
            raise ValueError(f"{name}.ids.numbers must be finite numbers")
        return stored.numpy()
    block = tensors[f"{name}.ids.bytes"].numpy().tobytes()
    ends = take(tensors, f"{name}.ids.ends", None, whole=True)
    bounds = [0, *ends.tolist()]
    if bounds != sorted(bounds) or bounds[-1] != len(block):
        raise ValueError(f"{name}.ids.ends does not cut {counted(len(block), 'byte')} into ids")
    return objects([from_json(json.loads(block[a:b])) for a, b in itertools.pairwise(bounds)])
