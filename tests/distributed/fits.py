"""A fit that several processes share, small, with a way to kill a process in the middle of it."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from fisherfold import MatrixCompletion
from fisherfold.completion.files import pack_posterior
from fisherfold.tables.checkpoint import FitCheckpoint

PASSES = 5
_SAVE = FitCheckpoint.save


def fitted(checkpoint: str | None) -> MatrixCompletion:
    """The model of all processes; every one has its own copy of the file, as on hosts that share no disk."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(30, 2)) @ rng.normal(size=(2, 20)) + 0.1 * rng.normal(size=(30, 20))
    lines = [f"{r},{c},{x[r, c]:.4f}" for r, c in np.argwhere(rng.random(x.shape) < 0.5)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ratings.csv"
        file.write_text("\n".join(["row,column,value", *lines, ""]))
        return MatrixCompletion(rank=2, max_iter=PASSES, tol=0.0).fit_file_share(
            file, checkpoint=checkpoint
        )


def numbers(model: MatrixCompletion) -> dict[str, Any]:
    """All that was learnt."""
    return {
        name: torch.from_numpy(a) for name, a in pack_posterior(model.model_.posterior)[0].items()
    }


def counted(victim: int | None = None, moment: int = 0) -> list[int]:
    """Count the passes from now on; the process with the number ``victim`` kills itself when so many are kept."""
    passes: list[int] = []

    def save_and_count(self: FitCheckpoint, *state: Any) -> None:
        _SAVE(self, *state)
        passes.append(1)
        if distributed.get_rank() == victim and len(passes) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    FitCheckpoint.save = save_and_count  # type: ignore[method-assign]
    return passes


def whole() -> dict[str, Any]:
    return numbers(fitted(None))


def dying(checkpoint: str, victim: int, moment: int) -> None:
    counted(victim, moment)
    fitted(checkpoint)


def resumed(checkpoint: str) -> list[Any]:
    passes = counted()
    return [numbers(fitted(checkpoint)), len(passes)]
