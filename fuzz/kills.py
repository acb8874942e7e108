"""SIGKILL at random moments of a fit and of its save.

The old model or the new one is always there, whole.

    python fuzz/kills.py --kills 200

A process that has imported everything forks one child for each kill. A child fits and saves a
completion model over the last one; every other child fits with ``minimize`` and a checkpoint, and
goes on from it. After each kill the model must load and predict as one of the two that were being
written, and the checkpoint must be absent or whole. At the end one run that is left alone must
leave nothing but the model, and ``minimize`` must come to the bits of a run without kills.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from fisherfold import Gaussian, NLLProblem, minimize
from fisherfold.completion import MatrixCompletion
from fisherfold.files import read_tensors
from fisherfold.manifolds import Sphere

_RNG = np.random.default_rng(0)
_ROWS, _COLUMNS = np.nonzero(_RNG.random((60, 40)) < 0.4)
PAIRS = np.array([(f"u{i}", f"i{j}") for i, j in zip(_ROWS, _COLUMNS, strict=True)], dtype=object)
VALUES = _RNG.normal(size=len(PAIRS))


def fit_and_save(folder: Path, sign: float, repeats: int = 4) -> None:
    """A few saves for one fit, so that about half of the kills come while files are written."""
    model = MatrixCompletion(rank=2, max_iter=3).fit(PAIRS, sign * VALUES)
    for _ in range(repeats):
        model.save(folder / "model")


def predictions(folder: Path) -> bytes:
    return np.ascontiguousarray(MatrixCompletion.load(folder / "model").predict(PAIRS)).tobytes()


def solve(folder: Path | None) -> torch.Tensor:
    """Thirty iterations; from the checkpoint if there is one."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=g, dtype=torch.float64)
    w, start = (Sphere(6).random_point(generator=g) for _ in range(2))
    problem = NLLProblem(
        Sphere(6), lambda x, w: torch.tanh(x @ w), Gaussian(), x, torch.tanh(x @ w)
    )
    kept = (
        {}
        if folder is None
        else {"checkpoint": folder / "c", "checkpoint_every": 1, "resume": True}
    )
    return minimize(problem, start, "rsgd", step=0.05, max_iter=30, seed=0, **kept).x


def in_child(work, *args) -> int:
    """Start a piece of work in a child that has imported everything."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work(*args)
            code = 0
        finally:
            os._exit(code)
    return pid


def kill_after(pid: int, seconds: float) -> bool:
    """Whether the child was still alive."""
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def left_alone(pid: int) -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def kills(folder: Path, count: int, seed: int) -> dict[str, int]:
    """Kill ``count`` children; raises AssertionError if anything is not whole."""
    chance = random.Random(seed)
    hit = 0
    whole: dict[str, float] = {}
    known = []
    for name, work in (
        ("save", lambda: fit_and_save(folder, 1.0)),
        ("solve", lambda: solve(folder)),
    ):
        began = time.monotonic()
        left_alone(in_child(work))
        whole[name] = time.monotonic() - began
    known.append(predictions(folder))
    left_alone(in_child(fit_and_save, folder, -1.0))
    known.append(predictions(folder))
    (folder / "c").unlink(missing_ok=True)
    for k in range(count):
        if k % 2:
            alive = kill_after(in_child(solve, folder), after := chance.uniform(0, whole["solve"]))
            # it ended before: on a machine that is less busy now it takes less time
            hit = hit + alive
            whole["solve"] = whole["solve"] if alive else after
            if (folder / "c").exists():
                read_tensors(folder / "c", kind="checkpoint", version=9)
        else:
            pid = in_child(fit_and_save, folder, 1.0 if k % 4 else -1.0)
            alive = kill_after(pid, after := chance.uniform(0, whole["save"]))
            hit = hit + alive
            whole["save"] = whole["save"] if alive else after
            assert predictions(folder) in known, "a model that nobody wrote"
    leftovers = [path for path in folder.iterdir() if path.name.startswith(".")]
    for path in leftovers:
        os.utime(path, (0, 0))  # leftovers are removed when they are a day old
    left_alone(in_child(fit_and_save, folder, 1.0))
    assert predictions(folder) == known[0]
    assert torch.equal(solve(folder), solve(None)), (
        "another result than that of a run that was not killed"
    )
    (folder / "c").unlink()
    solve(folder)
    assert {path.name for path in folder.iterdir()} <= {"model", "c"}, "leftovers of killed writers"
    return {"kills": count, "alive when killed": hit, "temporary files left": len(leftovers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(kills(Path(folder), options.kills, options.seed))


if __name__ == "__main__":
    if not hasattr(os, "fork"):
        sys.exit("this needs fork")
    main()
