"""Which data a figure was made from: those of the record, whose checksums are known, or others.

Recorded runs are read again instead of made again, so that data which differ must be another run; and a page that shows
a paper's figure from other data has to say so. Data of the record leave no trace in the settings of a run.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from numpy.typing import NDArray

from fisherfold import datasets
from fisherfold.files import digest

OTHER = " (other data)"  # behind the title of a figure


def checksum(*arrays: NDArray[Any]) -> str:
    """What tells some arrays from others."""
    return digest(map(torch.from_numpy, arrays))[:16]


def departure(
    name: str, *arrays: NDArray[Any], folder: str | os.PathLike[str] | None = None
) -> tuple[dict[str, str], str]:
    """What a plan says of data that are not those of the record."""
    try:
        datasets.verify(name, folder=folder)
    except ValueError:
        return {"data": checksum(*arrays)}, (
            f"Not the data that are known as {name}: 'fisherfold datasets verify {name}' says what differs."
        )
    return {}, ""
