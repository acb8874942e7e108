"""What a fit has found is not lost because its folder cannot be written."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def check_output(output: Path, kind: str) -> None:
    """Look whether a model can be written, and what it would replace, before it is fitted.

    Args:
        output: the folder.
        kind: what the model is.

    Raises:
        ValueError: if it is a file.
    """
    from fisherfold.files import check_model_folder

    if output.exists() and not output.is_dir():
        raise ValueError(f"--output must be a folder, {output} is a file")
    check_model_folder(output, kind)


def write_or_rescue(write: Callable[[Path], None], output: Path) -> None:
    """Write a model; where its folder cannot be written, write it to a temporary one, and say so.

    Args:
        write: writes the model into a folder.
        output: the folder.

    Raises:
        OSError: if the folder cannot be written; it says where the model is instead, if anywhere.
    """
    try:
        write(output)
    except OSError as error:
        place = _elsewhere(write)
        if place is None:
            raise
        raise OSError(f"{error}; the fitted model is in {place}, move it where it should be") from error


def _elsewhere(write: Callable[[Path], None]) -> Path | None:
    """Where the model is now, unless there is no room for it anywhere."""
    with contextlib.suppress(OSError):
        folder = Path(tempfile.mkdtemp(prefix="fisherfold-"))
        try:
            write(folder / "model")
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder / "model"
    return None
