"""Find a data set: in the data folder, in the user's cache, or at its official address.

A download shows the terms first, goes to the cache of the user through pooch, is decoded from the
official format, compared with the checksums of the record, and only then written, atomically, as
one packed file.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fisherfold.datasets.local import cache_folder, check_arrays, readable, where
from fisherfold.datasets.official import READERS
from fisherfold.datasets.records import DatasetRecord, record
from fisherfold.extras import need
from fisherfold.files import make_folder, write_atomically
from fisherfold.progress import track

Say = Callable[[str], object]


def fetch(
    name: str, *, source: str | os.PathLike[str] | None = None, say: Say = lambda _: None
) -> Path:
    """Make a data set available, downloading it if it is nowhere yet.

    Args:
        name: a name of ``REGISTRY``.
        source: an official file that is already on this machine, to read instead of downloading.
        say: called with the terms before a download, and with what is done.

    Returns:
        The folder that holds it.

    Raises:
        FileNotFoundError: if the set has no official address to download from, or ``source`` does
            not exist.
    """
    entry = record(name)
    if source is None and (found := where(name)) is not None:
        say(f"{name} is already there")
        return found
    if not entry.url and (source is None or name not in READERS):
        raise FileNotFoundError(
            f"{name} is not offered for download as a single file; put {entry.file} into "
            f"FISHERFOLD_DATA (source: {entry.source})"
        )
    if source is not None and not Path(source).is_file():
        raise FileNotFoundError(f"there is no file {source}")
    say(f"{entry.title}. Terms: {entry.licence} Cite: {entry.citation}")
    # a download is not kept: one that turned out to be a page of a proxy would be read again and
    # again
    with tempfile.TemporaryDirectory(prefix="fisherfold-") as passing, track(f"fetching {name}"):
        official = Path(source) if source is not None else _download(entry, Path(passing))
        say(f"reading {official.name}")
        with readable(official, f"the official file of {name}"):
            arrays = READERS[name](official)
    check_arrays(entry, arrays)
    folder = make_folder(cache_folder())
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(folder / entry.file, buffer.getvalue())
    say(f"kept as {folder / entry.file}")
    return folder


def _download(entry: DatasetRecord, folder: Path) -> Path:
    need("pooch")
    import pooch

    pooch.get_logger().setLevel("WARNING")
    # the decoded arrays are what is compared with a checksum, so that another packing of the same
    # data passes
    try:
        return Path(
            pooch.retrieve(entry.url, known_hash=None, path=folder, fname=Path(entry.url).name)
        )
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConnectionError(
            f"{entry.url} cannot be downloaded ({reason}); get it by other means and read it with "
            f"'fisherfold datasets fetch {entry.name} --from FILE'"
        ) from error
