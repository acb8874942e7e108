"""Same data, same seed, same machine and number of threads: same bits, whatever ran before."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest
import torch
from fitted import FITS, NAMES, TASK, VALUES, X, Y, answers
from torch import nn
from typer.testing import CliRunner

from fisherfold import MKFAC, Gaussian, NLLProblem, minimize
from fisherfold.cli import app
from fisherfold.files import read_tensors
from fisherfold.manifolds import Sphere
from fisherfold.optim import KFAC, SGDG, SphereOptimizer
from fisherfold.solvers.loop import METHODS
from fisherfold.tables.folders import MODEL, SUMMARY


@pytest.mark.parametrize("name", list(FITS))
def test_estimators(name, tmp_path):
    """A second fit, after others drew random numbers, gives the same bits and files, and draws no global ones."""
    first = FITS[name]()
    first.save(tmp_path / "first")
    torch.manual_seed(123)
    np.random.seed(123)  # noqa: NPY002  (the global one is what is tested)
    before = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # noqa: NPY002
    model = FITS[name]()
    after = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # noqa: NPY002
    assert answers(model) == answers(first)
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    model.save(tmp_path / "second")
    for file in (MODEL, SUMMARY):
        files = [(tmp_path / folder / file).read_bytes() for folder in ("first", "second")]
        assert files[0] == files[1], file


OPTIONS = {
    "rngd": {},
    "rngd-vr": {"step": 0.2, "batch_size": 10},
    "rsgd": {"step": 0.1, "batch_size": 10},
    "rsvrg": {"step": 0.1, "batch_size": 10},
    "rcg": {},
    "rgd": {},
    "trust-region": {},
    "lbfgs": {},
}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_solvers(method):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(100, 5, generator=g, dtype=torch.float64)
    w, start = (Sphere(5).random_point(generator=g) for _ in range(2))

    def run(seed):
        torch.randn(7)
        y = torch.tanh(x @ w) + 0.1 * x[:, 0]
        problem = NLLProblem(Sphere(5), lambda x, w: torch.tanh(x @ w), Gaussian(), x, y)
        result = minimize(problem, start, method, max_iter=4, seed=seed, **OPTIONS[method])
        return result.last.numpy().tobytes(), result.trace["loss"]

    assert run(3) == run(3)
    if OPTIONS[method]:
        assert run(3) != run(4)


@pytest.mark.parametrize(
    "kind", [MKFAC, KFAC, SGDG, SphereOptimizer], ids=lambda kind: kind.__name__
)
def test_optimizers(kind):
    def run():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
        )
        x, y = torch.randn(64, 8), torch.randint(3, (64,))
        options = {} if kind in (KFAC, SphereOptimizer) else {"example_input": x[:8]}
        optimizer = kind(model, lr=0.05, **options)
        for _ in range(6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return [p.detach().numpy().tobytes() for p in model.parameters()]

    assert run() == run()


@pytest.mark.slow
def test_command_line(tmp_path):
    frame = pl.DataFrame(
        {"user": NAMES[:, 0].tolist(), "item": NAMES[:, 1].tolist(), "rating": VALUES}
    )
    frame.write_csv(tmp_path / "r.csv")
    features = pl.DataFrame(X, schema=list("abcdef")).with_columns(
        y=pl.Series(Y), task=pl.Series(TASK)
    )
    features.write_csv(tmp_path / "t.csv")
    commands = {
        "completion": ["complete", "fit", "r.csv", "--rank", "2", "--seed", "5"],
        "point": ["complete", "fit", "r.csv", "--rank", "2", "--inference", "point"],
        "auto": ["complete", "fit", "r.csv", "--rank", "auto", "--max-iter", "3"],
        "subspace": ["subspace", "fit", "t.csv", "--target", "y", "--task", "task", "--rank", "2"],
    }
    for name, words in commands.items():
        files = []
        for time in ("first", "second"):
            folder = tmp_path / f"{name}-{time}"
            words[2] = str(tmp_path / words[2].split("/")[-1])
            result = CliRunner().invoke(app, [*words, "-o", str(folder), "--json"])
            assert result.exit_code == 0, result.exception
            kind = "subspace" if name == "subspace" else "completion"
            tensors, _ = read_tensors(folder / "model.safetensors", kind=kind, version=9)
            files.append({key: tensor.numpy().tobytes() for key, tensor in tensors.items()})
        assert files[0] == files[1], name
    words = [
        "complete",
        "evaluate",
        str(tmp_path / "r.csv"),
        "--rank",
        "2",
        "--folds",
        "3",
        "--json",
    ]
    one, two = (json.loads(CliRunner().invoke(app, words).stdout) for _ in range(2))
    assert one == two


def test_two_threads_differ_by_rounding_only():
    """Sums over ratings are cut differently; how much that changes is on the page on trust."""
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(FITS["completion, float64"]().predict(NAMES))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-9)
