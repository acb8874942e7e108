"""Pictures show the numbers of the fit."""

import matplotlib
import numpy as np
import pytest
import torch

matplotlib.use("Agg")

from fisherfold import Bernoulli, MatrixCompletion, NLLProblem, minimize
from fisherfold.manifolds import Sphere
from fisherfold.plots import plot_calibration, plot_convergence, plot_factors


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)
    pairs = [(i, j) for i in range(30) for j in range(20) if rng.random() < 0.6]
    return MatrixCompletion(rank=2).fit(pairs, rng.normal(size=len(pairs)))


def test_calibration_of_normal_errors_lies_on_the_diagonal():
    rng = np.random.default_rng(0)
    line = plot_calibration(rng.normal(size=20_000), np.zeros(20_000), np.ones(20_000)).lines[1]
    assert np.abs(line.get_xdata() - line.get_ydata()).max() < 1.5


def test_convergence_draws_the_trace_of_a_run_and_of_an_estimator(model):
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    problem = NLLProblem(Sphere(3), lambda x, w: x @ w, Bernoulli(), x, (x[:, 0] > 0).double())
    result = minimize(problem, torch.eye(3, dtype=torch.float64)[2])
    assert list(plot_convergence(result).lines[0].get_ydata()) == list(result.trace["loss"])
    column = next(iter(model.trace_[0]))
    assert len(plot_convergence(model, y=column).lines[0].get_ydata()) == len(model.trace_)
    with pytest.raises(ValueError, match="the trace has no column 'nothing'"):
        plot_convergence(result, y="nothing")


def test_factors_are_drawn_on_their_principal_axes(model):
    ax = plot_factors(model, [f"film {i}" for i in range(20)])
    points = ax.collections[0].get_offsets()
    assert points.shape == (20, 2)
    assert points[:, 0].var() >= points[:, 1].var()
    assert len(ax.texts) == 20
    with pytest.raises(ValueError, match="side must be"):
        plot_factors(model, side="left")
