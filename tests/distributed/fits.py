"""The fits that several processes can share, small, with a way to kill a process in the middle of one."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from fisherfold import MatrixCompletion
from fisherfold.completion.files import pack_posterior
from fisherfold.solvers import loop
from fisherfold.tables.checkpoint import FitCheckpoint

PASSES = 5
_SAVE, _ADVANCE = FitCheckpoint.save, loop._advance
_COMPLETION = {"rank": 2, "max_iter": PASSES, "tol": 0.0}
_POINT = {"inference": "point", "ridge": 0.5}
FITS: dict[str, Callable[..., Any]] = {
    "completion variational": lambda **kept: MatrixCompletion(**_COMPLETION, **kept),
}
# their states are kept by different code
KINDS = ["completion variational"]


def fitted(kind: str, checkpoint: str | None) -> Any:
    """The model of all processes of the default group, which share its data unevenly."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    rng = np.random.default_rng(3)
    model = FITS[kind]()
    if isinstance(model, MatrixCompletion):
        x = rng.normal(size=(30, 2)) @ rng.normal(size=(2, 20)) + 0.1 * rng.normal(size=(30, 20))
        pairs = np.argwhere(rng.random(x.shape) < 0.5)
        if model.inference == "variational":
            return _from_file(model, checkpoint, [f"{r},{c},{x[r, c]:.4f}" for r, c in pairs])
        mine = pairs[pairs[:, 0] % (world + 1) % world == rank]
        return model.fit_share(mine, x[mine[:, 0], mine[:, 1]])
    task, X = rng.integers(0, 9, 180), rng.normal(size=(180, 5))
    y = (X * (rng.normal(size=(9, 2)) @ rng.normal(size=(2, 5)))[task]).sum(1) + 0.3 * rng.normal(size=180)
    mine = np.arange(180) % (world + 1) % world == rank
    return model.fit_share(X[mine], y[mine], task[mine])


def _from_file(model: MatrixCompletion, checkpoint: str | None, lines: list[str]) -> MatrixCompletion:
    """Every process has its own copy, as on hosts that share no disk, and reads its part of it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ratings.csv"
        file.write_text("\n".join(["row,column,value", *lines, ""]))
        return model.fit_file_share(file, checkpoint=checkpoint)


def numbers(model: Any) -> dict[str, Any]:
    """All that was learnt."""
    if isinstance(model, MatrixCompletion):
        return {name: torch.from_numpy(a) for name, a in pack_posterior(model.model_.posterior)[0].items()}
    found = {"coef": model.coef_, "intercept": model.intercept_, "components": model.components_}
    losses = [float(row["loss"]) for row in model.trace_]
    return {"losses": losses, **{name: torch.from_numpy(np.asarray(part)) for name, part in found.items()}}


def counted(kind: str, victim: int | None = None, moment: int = 0) -> list[int]:
    """Count the passes from now on; the process with the number ``victim`` kills itself when so many are kept."""
    passes: list[int] = []
    save, advance = _SAVE, _ADVANCE

    def check() -> None:
        if distributed.get_rank() == victim and len(passes) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def save_and_count(self: FitCheckpoint, *state: Any) -> None:
        save(self, *state)
        passes.append(1)
        check()

    def check_and_advance(*state: Any) -> None:
        # a solver keeps its state after the step, on the first process only
        check()
        advance(*state)
        passes.append(1)

    by_solver = kind.startswith("subspace point")
    FitCheckpoint.save = save if by_solver else save_and_count  # type: ignore[method-assign]
    loop._advance = check_and_advance if by_solver else advance
    return passes


def whole(kinds: list[str]) -> dict[str, Any]:
    return {kind: numbers(fitted(kind, None)) for kind in kinds}


def dying(kind: str, folder: str, victim: int, moment: int) -> None:
    counted(kind, victim, moment)
    fitted(kind, str(Path(folder) / kind))


def going_on(kinds: list[str], folder: str) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        passes = counted(kind)
        model = fitted(kind, str(Path(folder) / kind))
        found[kind] = [len(passes), numbers(model)]
    return found
