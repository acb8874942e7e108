"""Keys of entries, so that a stream may deliver some of them again.

An entry whose key was seen before is left out; one that has another value than before is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from fisherfold.tables.ids import as_ids, integer_of

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Events:
    """The keys of entries, hashed to 64 bits, ascending, and their values."""

    keys: npt.NDArray[np.int64]
    values: Floats

    @classmethod
    def of(cls, keys: Any, values: Floats) -> tuple[Events, npt.NDArray[np.bool_]]:
        """The events of a batch, and which entries are the first of their key."""
        return cls(np.zeros(0, dtype=np.int64), np.zeros(0)).extended(keys, values)

    def extended(self, keys: Any, values: Floats) -> tuple[Events, npt.NDArray[np.bool_]]:
        """With the events of a batch, and which of its entries are new."""
        hashed = _hashes(keys)
        found, first, place = np.unique(hashed, return_index=True, return_inverse=True)
        before = np.searchsorted(self.keys, found)
        known = np.zeros(len(found), dtype=bool)
        inside = before < len(self.keys)
        known[inside] = self.keys[before[inside]] == found[inside]
        expected = values[first]
        expected[known] = self.values[before[known]]
        if (other := np.flatnonzero(values != expected[place])).size:
            k = int(other[0])
            raise ValueError(
                f"the entry with the key {np.asarray(keys, dtype=object)[k]!r} had the value "
                f"{expected[place][k]:g} before and has {values[k]:g} now: a key names one value for ever"
            )
        fresh = np.zeros(len(values), dtype=bool)
        fresh[first[~known]] = True
        joint = np.concatenate([self.keys, found[~known]])
        order = np.argsort(joint, kind="stable")
        joint_values = np.concatenate([self.values, expected[~known]])
        return Events(joint[order], joint_values[order]), fresh


def _hashes(keys: Any) -> npt.NDArray[np.int64]:
    """Keys as integers; the text of an integer is that integer, other text is hashed."""
    ids = as_ids(keys, "event")
    if ids.dtype != object:
        return ids
    return np.array([_hash(text) for text in ids.tolist()], dtype=np.int64)


def _hash(text: str) -> int:
    number = integer_of(text)
    if number is not None:
        return number
    return int.from_bytes(
        blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big", signed=True
    )
