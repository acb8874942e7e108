"""The folder of a model: what may be saved there, and what is left of it when saving fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fisherfold.files.atomic import check_place, make_folder
from fisherfold.files.tensors import kind_of

MODEL = "model.safetensors"  # in the folder of a model


def check_model_folder(path: str | os.PathLike[str], kind: str) -> None:
    """Look whether a model may be saved in a folder: over one of its own kind, but not over anything else.

    Args:
        path: the folder, which need not exist.
        kind: what the model is.

    Raises:
        ValueError: if the path is a file.
        FileExistsError: if the folder holds another kind of model.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot save into {folder}: it is a file, a folder is expected")
    if folder.is_dir():
        check_place(folder / MODEL, "the model")  # to open a pipe would be to wait for somebody who writes into it
    held = kind_of(folder / MODEL)
    if held not in (None, kind):
        raise FileExistsError(
            f"{folder} holds a {held} model, which a {kind} model would replace; name another folder, or remove it"
        )


@contextlib.contextmanager
def model_folder(path: str | os.PathLike[str], kind: str) -> Iterator[Path]:
    """A folder to write a model into; if it is new and the block fails, no trace of it is left.

    Args:
        path: the folder; it is made, with those above it, if it does not exist.
        kind: what the model is.

    Yields:
        The folder.
    """
    folder = Path(path)
    check_model_folder(folder, kind)
    first = next((above for above in reversed([folder, *folder.parents]) if not above.exists()), None)
    make_folder(folder)
    try:
        yield folder
    except BaseException:
        if first is not None:
            _take_back(folder, first)
        raise


def _take_back(folder: Path, first: Path) -> None:
    """Remove the folders that a failed save has made, up to the first, and nothing that others have put there since."""
    with contextlib.suppress(OSError):
        if not (folder / "model.json").exists():  # it is written last
            (folder / MODEL).unlink(missing_ok=True)
        for made in (folder, *folder.parents):
            made.rmdir()
            if made == first:
                return
