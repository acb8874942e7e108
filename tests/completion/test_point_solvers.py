"""``MatrixCompletion(inference="point", solver=...)``: the paper's problem by the methods of ``minimize``."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fisherfold import MatrixCompletion, MatrixCompletionCV, minimize
from fisherfold.cli import app
from fisherfold.completion import CompletionProblem, Ratings, point_solvers
from fisherfold.completion.point_completion import fit_point
from fisherfold.completion.point_solvers import SOLVERS

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(40, 2)) @ RNG.normal(size=(2, 25))
SEEN = RNG.random(TABLE.shape) < 0.6
PAIRS, VALUES = np.argwhere(SEEN), TABLE[SEEN]
HELD = np.argwhere(~SEEN)
each_solver = pytest.mark.parametrize("solver", SOLVERS)


def point(**options):
    known = {"rank": 2, "inference": "point", "dtype": "float64", "offsets": "none", "max_iter": 200, "tol": 0.0}
    return MatrixCompletion(**known | options)


def rmse(model):
    return np.sqrt(np.mean((model.predict(HELD) - TABLE[~SEEN]) ** 2)) / TABLE.std()


@each_solver
def test_every_solver_recovers_a_matrix_without_noise(solver):
    assert rmse(point(solver=solver, clip=False).fit(PAIRS, VALUES)) < 1e-3


@each_solver
def test_the_estimator_solves_the_problem_of_minimize(solver):
    """Coefficients are eliminated at the subspace that ``minimize`` ends at, whose loss the trace ends with."""
    noisy = VALUES + 0.3 * RNG.normal(size=len(VALUES))
    model = point(solver=solver, ridge=0.01, max_iter=30, clip=False).fit(PAIRS, noisy)
    scale = np.sqrt(np.mean(noisy**2))
    problem = CompletionProblem(Ratings(*PAIRS.T, noisy / scale, TABLE.shape, dtype=torch.float64), 2, ridge=0.01)
    x0 = problem.manifold.random_point(generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options = point_solvers._OPTIONS.get(solver, {})
    found = minimize(problem, x0, solver, max_iter=30, stop=point_solvers.GradientNorm(1e-10), **options)
    a = problem.fit(found.x).coefficients
    matrix = (a @ found.x.mT if problem.transposed else found.x @ a.mT).numpy() * scale
    np.testing.assert_allclose(model.predict(HELD), matrix[~SEEN], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(min(row["loss"] for row in model.trace_), found.value, rtol=1e-8)


@each_solver
@pytest.mark.parametrize("c", [1e-12, 1e12])
def test_solvers_follow_the_unit_of_the_values(solver, c):
    base, scaled = (point(solver=solver, offsets="both", max_iter=10).fit(PAIRS, k * VALUES) for k in (1.0, c))
    np.testing.assert_allclose(scaled.predict(HELD) / c, base.predict(HELD), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("solver", ["auto", *SOLVERS])
@pytest.mark.parametrize("c", [1e-8, 1e8])
def test_point_fits_of_raw_ratings_follow_their_unit(solver, c):
    def predicted(k):
        ratings = Ratings(*PAIRS.T, k * (1 + VALUES), TABLE.shape, dtype=torch.float64)
        return fit_point(ratings, 2, solver=solver).predict(*torch.from_numpy(HELD.T.copy()))

    torch.testing.assert_close(predicted(c) / c, predicted(1.0), rtol=1e-6, atol=1e-6)


@each_solver
def test_files_folds_and_strangers(solver, tmp_path):
    model = point(solver=solver, dtype="float32", max_iter=5).fit(PAIRS, VALUES)
    model.save(tmp_path / "model")
    again = MatrixCompletion.load(tmp_path / "model")
    assert again.get_params()["solver"] == solver
    assert np.array_equal(again.predict(HELD), model.predict(HELD))
    assert np.isfinite(again.predict_new([3], [1.0], [0, 1])).all()
    assert np.isfinite(again.partial_fit([("new", 3), ("new", 4), (0, "new")], [1.0, 2.0, 1.0]).predict(HELD)).all()


def test_a_stranger_is_folded_into_the_subspace():
    """A new row with many values of the model's own subspace is completed as the subspace says."""
    model = point(solver="rngd", clip=False).fit(PAIRS, VALUES)
    row = TABLE[0] + TABLE[1]
    found = model.predict_new(np.arange(20), row[:20], np.arange(20, 25))
    np.testing.assert_allclose(found, row[20:], atol=0.02 * np.abs(row).max())


@each_solver
def test_a_killed_fit_goes_on_to_the_same_bits(solver, tmp_path, monkeypatch):
    file = tmp_path / "checkpoint"
    whole = point(solver=solver, max_iter=6).fit(PAIRS, VALUES)
    progress = []

    def interrupt(self, record):
        progress.append(record)
        if len(progress) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fisherfold.completion.fit._Show.__call__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            point(solver=solver, max_iter=6, checkpoint=file).fit(PAIRS, VALUES)
    assert file.exists()
    with pytest.raises(ValueError, match=r"checkpoint|tag"):
        point(solver=solver, max_iter=6, checkpoint=file).fit(PAIRS, VALUES + 1)
    resumed = point(solver=solver, max_iter=6, checkpoint=file).fit(PAIRS, VALUES)
    assert np.array_equal(resumed.predict(HELD), whole.predict(HELD))
    assert not file.exists()


def test_an_interrupt_returns_the_model_so_far(monkeypatch):
    def interrupt(self, record):
        if record["iteration"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("fisherfold.completion.fit._Show.__call__", interrupt)
    model = point(solver="rngd", on_interrupt="return").fit(PAIRS, VALUES)
    assert model.interrupted_
    monkeypatch.undo()
    assert np.array_equal(model.predict(HELD), point(solver="rngd", max_iter=2).fit(PAIRS, VALUES).predict(HELD))


@each_solver
def test_constant_values(solver):
    model = MatrixCompletion(1, inference="point", solver=solver).fit(PAIRS, np.full(len(PAIRS), 4.0))
    np.testing.assert_allclose(model.predict([*HELD[:3].tolist(), (99, 99)]), 4.0)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match="solver must be one of auto, rngd, rngd-vr, rcg, rgd, got 'rsgd'"):
        point(solver="rsgd").fit(PAIRS, VALUES)
    with pytest.raises(ValueError, match="solver must be 'auto' for inference='variational', got 'rcg'"):
        MatrixCompletion(2, solver="rcg").fit(PAIRS, VALUES)
    message = r"rank must be less than min\(n_rows, n_columns\)=min\(.*\)=25 for solver='rngd', .*, got 25"
    with pytest.raises(ValueError, match=message):
        point(solver="rngd", rank=25).fit(PAIRS, VALUES)


def test_the_search_takes_a_solver():
    model = MatrixCompletionCV((1, 2), inference="point", solver="rngd", ridges=(0.01,), offsets="none")
    assert model.fit(PAIRS, VALUES).best_rank_ == 2


def test_the_command_line_takes_a_solver(tmp_path):
    path, folder = tmp_path / "ratings.csv", tmp_path / "model"
    path.write_text("\n".join(["u,i,r", *(f"{u},{i},{r}" for (u, i), r in zip(PAIRS, VALUES, strict=True))]))
    words = ["complete", "fit", str(path), "-o", str(folder), "--rank", "2", "--inference", "point"]
    run = CliRunner().invoke(app, [*words, "--solver", "rcg", "--json"])
    assert json.loads(run.stdout)["rank"] == 2
    assert MatrixCompletion.load(folder).solver == "rcg"
    run = CliRunner().invoke(app, [*words, "--solver", "adam"])
    assert run.exit_code == 1
    assert "solver must be one of auto, rngd, rngd-vr, rcg, rgd, got 'adam'" in str(run.exception)
    score = ["complete", "evaluate", str(path), "--rank", "2", "--inference", "point", "--solver", "rngd", "--json"]
    assert json.loads(CliRunner().invoke(app, [*score, "--folds", "2"]).stdout)["rmse"]["mean"] > 0
