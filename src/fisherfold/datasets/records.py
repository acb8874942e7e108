"""What is known of each data set.

Its source, terms, citation and a checksum per array, from ``records.json``.

A checksum is the sha256 of the C-ordered bytes of the decoded array with the dtype shown, so that
another packing of the same data passes too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple


class ArrayRecord(NamedTuple):
    """The identity of one decoded array."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class DatasetRecord:
    """One data set and where it comes from."""

    name: str
    title: str
    source: str  # the official page
    licence: str  # the terms that the data set states
    citation: str
    arrays: Mapping[str, ArrayRecord]
    url: str = ""  # of the official file, if there is a single one
    megabytes: float = 0.0  # of that file, roughly

    @property
    def file(self) -> str:
        """The packed file in the data folder."""
        return f"{self.name}.npz"


def _records() -> dict[str, DatasetRecord]:
    content = json.loads(
        resources.files("fisherfold.datasets").joinpath("records.json").read_text(encoding="utf-8")
    )
    for entry in content.values():
        for key, (dtype, shape, digest) in entry["arrays"].items():
            entry["arrays"][key] = ArrayRecord(dtype, tuple(map(int, shape.split("x"))), digest)
    return {name: DatasetRecord(name, **entry) for name, entry in content.items()}


REGISTRY: Mapping[str, DatasetRecord] = _records()


def record(name: str) -> DatasetRecord:
    """What is known of a data set, a name of ``REGISTRY``.

    Example:
        >>> record("school").arrays["x"].shape
        (15362, 28)
    """
    if name not in REGISTRY:
        raise ValueError(
            f"there is no data set {name!r}; the names are {', '.join(sorted(REGISTRY))}"
        )
    return REGISTRY[name]
