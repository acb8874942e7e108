"""After ``os.fork`` in a process whose threads have computed: fits and predictions work, tables are an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

fork = pytest.mark.skipif(sys.platform != "linux", reason="fork, and threads by name")

CHILD = """
import os, signal, sys
import numpy as np, polars as pl, torch

import fisherfold
from fisherfold.tables.readers import read_table

torch.set_num_threads(2)
rng = np.random.default_rng(0)
pairs = np.argwhere(rng.random((800, 400)) < 0.2)
values = rng.normal(size=len(pairs))
X, task = rng.normal(size=(9000, 40)), rng.integers(0, 50, 9000)
pl.DataFrame({"a": range(9)}).write_csv(sys.argv[1])


def fit():
    model = fisherfold.MatrixCompletion(rank=8, max_iter=2).fit(pairs, values)
    return model, model.predict(pairs)


def regress():
    model = fisherfold.SubspaceRegressor(3, max_iter=2).fit(X, X[:, 0], task=task)
    return model.predict(X, task=task)


def minimise():
    problem = fisherfold.NLLProblem(
        fisherfold.manifolds.Euclidean(40), lambda x, t: x @ t, fisherfold.Gaussian(),
        torch.tensor(X), torch.tensor(X[:, 0])
    )
    return fisherfold.minimize(problem, torch.zeros(40, dtype=torch.float64), max_iter=2).x


def tables():
    try:
        read_table(sys.argv[1])
    except RuntimeError as error:
        assert "was forked after polars had started its threads" in str(error)
    else:
        raise AssertionError("it was read")


model, before = fit()
regress()
minimise()
read_table(sys.argv[1])
work = {
    "predict": lambda: np.testing.assert_allclose(model.predict(pairs), before, rtol=1e-5, atol=1e-5),
    "recommend": lambda: model.recommend(k=3),
    "fit": fit,
    "regress": regress,
    "minimise": minimise,
    "tables": tables,
}
for name, do in work.items():
    if (pid := os.fork()) == 0:
        signal.alarm(120)  # a child that waits forever ends so
        try:
            do()
        except BaseException as error:
            print(name, error)
            os._exit(1)
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@fork
@pytest.mark.slow
def test_a_child_computes_or_raises(tmp_path):
    """0.2.0 waited forever in all of them."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "x.csv")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.split("\n")[:-1] == [
        f"{name} 0" for name in ("predict", "recommend", "fit", "regress", "minimise", "tables")
    ]
