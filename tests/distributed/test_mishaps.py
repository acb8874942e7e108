"""What goes wrong where several machines meet: every process ends, with one sentence, and no work is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fisherfold import MatrixCompletion, SubspaceRegressor
from fisherfold.distributed import Group

from ranks import compare, on_ranks, same_bits  # isort: skip
from test_shared_subspace import rows  # isort: skip

TABLE = np.random.default_rng(0)
VALUES = 3 + TABLE.normal(size=(23, 2)) @ TABLE.normal(size=(2, 13)) + 0.1 * TABLE.normal(size=(23, 13))
PAIRS = np.argwhere(TABLE.random(VALUES.shape) < 0.6)


def ratings(group: Group) -> tuple[Any, Any]:
    """A run of the entries for each process, so that all of them are in the order of one process."""
    cut = [len(PAIRS) * k // group.size for k in range(group.size + 1)]
    mine = PAIRS[cut[group.rank] : cut[group.rank + 1]]
    return mine, VALUES[mine[:, 0], mine[:, 1]]


def of_rank_one() -> list[Any]:
    """The smallest model of each kind: its tables have one column."""
    group, (X, y, task) = Group(), rows()
    found: list[Any] = []
    for options in ({}, {"inference": "point"}, {"inference": "point", "solver": "rngd"}):
        model = MatrixCompletion(rank=1, max_iter=3, dtype="float64", **options).fit_share(*ratings(group))
        found.append(torch.from_numpy(model.predict(PAIRS)))
    mine = slice(len(y) * group.rank // group.size, len(y) * (group.rank + 1) // group.size)
    for options in ({}, {"inference": "point", "ridge": 0.5}):
        subspace = SubspaceRegressor(rank=1, max_iter=3, **options).fit_share(X[mine], y[mine], task[mine])
        found.append(torch.from_numpy(np.asarray(subspace.coef_)))
    return found


def test_models_of_rank_one_are_those_of_one_process(tmp_path: Path) -> None:
    ranks = on_ranks(2, tmp_path, of_rank_one)
    same_bits(ranks)
    compare(on_ranks(1, tmp_path, of_rank_one)[0], ranks[0], rtol=1e-7, atol=1e-8)
