"""The machinery of the four-method figures: searching, counting, recording, drawing."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from itertools import pairwise

import pytest
import torch
from threadpoolctl import threadpool_info

from fisherfold.reproduce import figures
from fisherfold.reproduce.figures import (
    AXES,
    FigurePlan,
    FigureResult,
    MethodPlan,
    Run,
    band,
    draw,
    grid_125,
    write_figure,
)
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.tasks import TaskStatistics

STOCHASTIC = {"batch_size": 1, "sampling": "replacement"}


def make(seed: int):
    g = torch.Generator().manual_seed(seed)
    task = torch.arange(80) % 8
    X = torch.randn(80, 6, generator=g, dtype=torch.float64)
    shared = torch.randn(6, 2, generator=g, dtype=torch.float64)
    y = (X @ shared * torch.randn(8, 2, generator=g, dtype=torch.float64)[task]).sum(1)
    y = y + 0.1 * torch.randn(80, generator=g, dtype=torch.float64)
    train, test = (
        TaskStatistics.from_rows(X[rows], y[rows], task[rows])
        for rows in (torch.arange(56), torch.arange(56, 80))
    )
    problem = SubspaceProblem(train, rank=2, ridge=1e-4, factor_damping=1e-6, held_out=test)
    return problem, problem.manifold.random_point(generator=g)


METHODS = (
    MethodPlan("RNGD", "rngd-vr", 2, (0.3,), STOCHASTIC),
    MethodPlan("RSGD", "rsgd", 1, grid_125(0.5, 1e-5), STOCHASTIC),
    MethodPlan("RSVRG", "rsvrg", 3, (0.1, 0.01), STOCHASTIC),
    MethodPlan("RCG", "rcg", 1),
)
PLAN = FigurePlan(
    "small",
    "A small figure",
    make,
    METHODS,
    6,
    {"held_out_nmse": "held-out", "train_nmse": "training"},
    note="a note",
)


def run_figure(plan, folder, **options):
    return figures.run_figure(lambda: plan, folder, **options)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run_figure(PLAN, tmp_path_factory.mktemp("figure"), seeds=3)


def test_grids_are_1_2_5_between_their_ends():
    assert grid_125(2, 5e-3) == (2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
    assert grid_125(1, 1) == (1.0,)


def test_the_step_with_the_lowest_training_loss_is_kept_and_all_are_recorded(result):
    searched = {run.step: run.last("loss") for run in result.searched["RSGD"]}
    best = min(searched, key=searched.get)
    assert result.runs["RSGD"][0].step == best
    decades = {0.1, 0.01, 1e-3, 1e-4, 1e-5}
    assert decades <= set(searched)
    best_decade = min(decades, key=searched.get)
    assert set(searched) - decades == {
        s for s in METHODS[1].steps if s not in decades and 0.1 < s / best_decade < 10
    }
    assert "RNGD" not in result.searched
    assert "RCG" not in result.searched


def test_both_counts_of_gradients(result):
    for label, charge, true_per_epoch in (("RNGD", 2, 3), ("RSGD", 1, 1), ("RSVRG", 3, 3)):
        rows = result.runs[label][0].rows
        assert [row["paper_grads"] for row in rows] == [charge * i for i in range(6 // charge + 1)]
        differences = {round(b["true_grads"] - a["true_grads"], 9) for a, b in pairwise(rows)}
        assert differences == {true_per_epoch}


def test_seeds_differ_and_a_seed_repeats(result, tmp_path):
    ends = [run.last("loss") for run in result.runs["RNGD"]]
    assert len(set(ends)) == 3
    again = run_figure(dataclasses.replace(PLAN, methods=METHODS[:1]), tmp_path, seeds=1)
    assert again.runs["RNGD"][0].last("loss") == ends[0]


def test_the_table_has_the_plain_statistics(result):
    ends = torch.tensor([run.last("train_nmse") for run in result.runs["RCG"]], dtype=torch.float64)
    assert result.final("RCG", "train_nmse") == pytest.approx(
        (float(ends.mean()), float(ends.std()))
    )


def test_a_recorded_run_is_read_and_not_made_again(tmp_path, monkeypatch, result):
    small = dataclasses.replace(PLAN, methods=METHODS[2:])
    first = run_figure(small, tmp_path, seeds=2)

    def refuse(*_args, **_options):
        raise AssertionError("a run was made again")

    monkeypatch.setattr(figures, "minimize", refuse)
    again = run_figure(small, tmp_path, seeds=2)
    assert (again.searched, again.runs) == (first.searched, first.runs)
    for changed in ({"budget": 9}, {"settings": {"rank": 3}}):
        with pytest.raises(AssertionError, match="made again"):
            run_figure(dataclasses.replace(small, **changed), tmp_path, seeds=2)


def test_a_plan_may_ask_for_one_thread(tmp_path):
    seen = []

    def watched(seed: int):
        pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
        seen.append((torch.get_num_threads(), set(pools)))
        return make(seed)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for alone in (False, True):
            plan = dataclasses.replace(PLAN, make=watched, methods=METHODS[-1:], one_thread=alone)
            run_figure(plan, tmp_path / str(alone), seeds=1)
        assert [threads for threads, _ in seen] == [2, 1]
        assert seen[1][1] <= {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_run_that_left_the_finite_numbers_is_never_best():
    good = Run("RSGD", 0.1, 0, "max_iter", [{"loss": 3.0}])
    bad = Run("RSGD", 1.0, 0, "non_finite", [{"loss": math.nan}])
    assert bad.last("loss") == math.inf
    assert figures._best([bad, good]) == 0.1


def figure_of(**ends: list[float]) -> FigureResult:
    """A figure whose methods end at these losses, one per seed."""
    methods = tuple(MethodPlan(label, "rcg", 1) for label in ends)
    plan = dataclasses.replace(PLAN, methods=methods, metrics={"error": "error", "other": "other"})
    counts = {"iteration": 1, "seconds": 0.1, "paper_grads": 1, "true_grads": 1.0, "other": 1.0}
    runs = {
        label: [
            Run(label, None, seed, "max_iter", [counts | {"loss": v, "error": v}])
            for seed, v in enumerate(values)
        ]
        for label, values in ends.items()
    }
    return FigureResult(plan, tuple(range(len(ends["RNGD"]))), {"RSGD": runs["RSGD"]}, runs)


def test_a_seed_that_diverged_has_no_deviation():
    result = figure_of(RNGD=[1.0, 2.0], RSGD=[3.0, math.nan])
    assert result.final("RNGD", "error") == (1.5, pytest.approx(math.sqrt(0.5)))
    assert result.final("RSGD", "error") == (math.inf, None)
    assert band(result.runs["RSGD"], "paper_grads", "error")[1:] == ([math.inf], [3.0], [math.inf])


def test_a_single_seed_and_an_error_that_was_not_measured_have_no_deviation():
    result = figure_of(RNGD=[1.0], RSGD=[2.0])
    assert result.final("RNGD", "error") == (1.0, None)
    two = figure_of(RNGD=[1.0, 2.0], RSGD=[2.0, 3.0])
    for run in two.runs["RSGD"]:
        del run.rows[-1]["other"]
    assert two.final("RSGD", "other") == (None, None)


def test_the_band_keeps_the_last_value_of_a_run_that_ended_early():
    rows = [{"x": float(i), "y": 10.0 - i} for i in range(4)]
    runs = [
        Run("A", None, 0, "max_iter", rows),
        Run("A", None, 1, "converged", [{"x": 0.5, "y": 4.0}]),
    ]
    x, median, least, greatest = band(runs, "x", "y")
    assert x == [0.25, 1.0, 2.0, 3.0]
    assert median == [7.0, 6.5, 6.0, 5.5]
    assert least == [4.0] * 4
    assert greatest == [10.0, 9.0, 8.0, 7.0]


def test_the_picture_has_a_panel_per_error_and_axis_and_says_its_note(result):
    figure = draw(result)
    assert len(figure.axes) == 2 * len(AXES)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert [label.split(" ")[0] for label in labels] == ["RNGD", "RSGD", "RSVRG", "RCG"]
    assert "a note" in figure.get_suptitle()
    assert figure.axes[0].get_ylabel() == "held-out"


def test_files_hold_the_picture_and_the_curves(result, tmp_path):
    write_figure(result, tmp_path / "new")
    assert (tmp_path / "new" / "small.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "new" / "small.csv").read_text())))
    assert len(rows) == sum(len(run.rows) for runs in result.runs.values() for run in runs)
    last = [row for row in rows if row["method"] == "RNGD" and row["seed"] == "2"][-1]
    assert float(last["train_nmse"]) == result.runs["RNGD"][2].last("train_nmse")


def test_quick_is_smaller_and_keeps_the_decades_of_the_grid():
    """0.2.0 kept the middle third, in which the best steps of Jester and MovieLens are not."""
    quick = dataclasses.replace(PLAN, budget=60).quick()
    assert quick.budget == 20
    assert quick.methods[1].steps == (0.1, 0.01, 0.001, 0.0001, 1e-05)
    assert quick.methods[0].steps == METHODS[0].steps


@pytest.mark.parametrize(
    ("step", "told"), [(0.5, True), (1e-5, True), (0.2, False), (2e-5, False), (0.01, False)]
)
def test_a_best_step_at_the_edge_of_its_grid_is_flagged(step, told):
    result = figure_of(RNGD=[1.0], RSGD=[2.0], RSVRG=[2.0], RCG=[3.0])
    best = {
        label: [dataclasses.replace(run, step=step) for run in runs]
        for label, runs in result.runs.items()
    }
    found = FigureResult(PLAN, (0,), best, best).at_the_edge()
    assert [sentence.split(",")[0] for sentence in found] == ["The best step of RSGD"] * told
    assert all("(1e-05 to 0.5): there may be a better one beyond" in each for each in found)
