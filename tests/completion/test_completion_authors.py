"""Jester from the split, start and samples of the paper's released code, run under GNU Octave: the same path.

All four methods follow the recorded runs. Train, held-out (W from the training ratings) and refit errors are compared
after every epoch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fisherfold import datasets, minimize
from fisherfold.completion import CompletionProblem, Ratings

ANCHORS = Path(os.environ.get("FISHERFOLD_DATA", "")).parent / "anchors" / "authors_octave"
pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not (os.environ.get("FISHERFOLD_DATA") and ANCHORS.is_dir()),
        reason="FISHERFOLD_DATA is not set or has no recorded runs (anchors/authors_octave) beside it",
    ),
]
COLUMNS = {
    "train": "train_mse",
    "held_out": "test_mse_trainfit",
    "refit": "test_mse",
    "gradient_norm": "gradnorm",
}
METHODS = {
    "rngd": ("rngd-vr", {"step": 0.05, "fisher": "kronecker", "batch_size": 1}, "samples_rngd"),
    "rsvrg": ("rsvrg", {"step": 1e-6, "batch_size": 1}, "samples_rsvrg"),
    "rsgd": ("rsgd", {"step": 2e-7, "decay": 0.1, "batch_size": 1}, "samples_rsgd"),
    "rcg": ("rcg", {}, None),
}


@pytest.fixture(scope="module")
def jester():
    with np.load(ANCHORS / "jester_split_init.npz") as file:
        stored = dict(file)
    data = datasets.load_ratings("jester1")
    held = np.zeros(data.shape, dtype=bool)
    held[stored["test_user"], stored["test_item"]] = True
    test = held[data.rows, data.cols]
    train, held_out = (
        Ratings(data.rows[part], data.cols[part], data.values[part].astype(float), data.shape)
        for part in (~test, test)
    )
    return train, held_out, stored


def follow(jester, solver, epochs):
    train, held_out, stored = jester
    problem = CompletionProblem(train, 5, orientation="rows", held_out=held_out, table="batch")
    method, options, samples = METHODS[solver]
    if samples is not None:
        options = options | {"stream": torch.from_numpy(stored[samples].astype(np.int64))}
    start = torch.from_numpy(stored["U0"])
    result = minimize(problem, start, method, max_iter=epochs, **options)
    run = json.loads((ANCHORS / f"jester_{solver}.json").read_text())
    worst = {}
    for ours, theirs in COLUMNS.items():
        recorded = np.array(run[theirs][: epochs + 1])
        worst[ours] = float(np.max(np.abs(np.array(result.trace[ours]) / recorded - 1)))
    return worst


@pytest.mark.parametrize(("solver", "epochs"), [("rngd", 3), ("rsvrg", 3), ("rsgd", 1), ("rcg", 4)])
def test_the_first_epochs_are_those_of_the_released_code(jester, solver, epochs):
    worst = follow(jester, solver, epochs)
    assert max(worst[c] for c in ("train", "held_out", "refit")) < 1e-11
    assert worst["gradient_norm"] < 1e-9


@pytest.mark.slow
@pytest.mark.hours
@pytest.mark.parametrize(
    ("solver", "epochs"), [("rngd", 18), ("rsvrg", 12), ("rsgd", 36), ("rcg", 36)]
)
def test_whole_runs_are_those_of_the_released_code(jester, solver, epochs):
    worst = follow(jester, solver, epochs)
    assert max(worst[c] for c in ("train", "held_out", "refit")) < 1e-10, worst


@pytest.mark.slow
@pytest.mark.hours
def test_float32_reaches_the_recorded_loss_to_three_digits(jester):
    train, _, stored = jester
    single = Ratings(*train.entries(), train.shape, dtype=torch.float32)
    problem = CompletionProblem(single, 5, orientation="rows", table="batch")
    stream = torch.from_numpy(stored["samples_rngd"].astype(np.int64))
    start = torch.from_numpy(stored["U0"]).float()
    result = minimize(
        problem,
        start,
        "rngd-vr",
        max_iter=18,
        step=0.05,
        fisher="kronecker",
        batch_size=1,
        stream=stream,
    )
    recorded = json.loads((ANCHORS / "jester_rngd.json").read_text())["train_mse"]
    assert result.trace["train"][-1] == pytest.approx(recorded[-1], rel=1e-3)
