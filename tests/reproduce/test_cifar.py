"""The CIFAR table from recorded runs."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fisherfold.reproduce import cifar
from fisherfold.reproduce.cifar import MEDIAN_VARIANCES, Spread
from fisherfold.reproduce.reproduce import Options, reproduce_cifar, sections

ROOT = Path(__file__).parents[2]


def runs(**best: list[float]) -> pl.DataFrame:
    """Runs of presets on one task, with these best accuracies, one per seed; the last epoch is one point lower."""
    rows = [
        {
            "dataset": "cifar10",
            "model": "vgg16bn",
            "preset": preset.replace("_", "-"),
            "seed": seed,
            "split": "test",
            "images": 50000,
            "epochs": 2,
            "in_table": True,
            "changed": "{}",
            "settings": "{}",
            "ended": "done",
            "accuracy": [value, value - 1],
            "loss": [1.0, 0.5],
            "train_loss": [1.0, 0.5],
            "seconds": [1.0, 1.0],
            "device": "a GPU",
            "date": "2026-01-01",
            "commit": "c",
            "torch": "2",
            "fisherfold": "0",
            "command": "x",
        }
        for preset, values in best.items()
        for seed, value in enumerate(values)
    ]
    return pl.DataFrame(rows)


def cell(frame: pl.DataFrame, preset: str) -> cifar.Cell:
    return cifar.cells(frame)["cifar10", "vgg16bn", preset]


def test_medians_are_over_the_best_epoch_and_the_last_stands_in_brackets():
    found = cell(runs(mkfac=[94.0, 95.0, 93.0]), "mkfac")
    assert found.median == 94.0
    assert found.text() == "94.00 93.00–95.00 (93.00), 3 seeds [94.76]"
    assert cell(runs(mkfac=[94.0]), "sgd").text() == "not run [92.88]"


def test_runs_outside_the_table_are_not_counted():
    frame = runs(mkfac=[94.0, 95.0]).with_columns(in_table=pl.col("seed") == 0)
    assert cell(frame, "mkfac").seeds == 1


@pytest.mark.parametrize(
    ("best", "where"),
    [
        ({"mkfac": [95.0, 95.1, 95.2], "sgd": [93.0, 93.1, 93.2]}, "above"),
        ({"mkfac": [93.0, 93.1, 93.2], "sgd": [95.0, 95.1, 95.2]}, "below"),
        ({"mkfac": [94.0, 94.1, 94.2], "sgd": [94.1, 94.2, 94.3]}, "within noise of"),
        ({"mkfac": [95.0], "sgd": [93.0]}, "within noise of"),
    ],
)
def test_the_verdict_compares_with_the_best_rival(best, where):
    verdict, why = cifar.judge(cifar.cells(runs(**best)))
    assert verdict == ("holds partly" if where == "above" else "does not hold")
    assert f"MKFAC {statistics.median(best['mkfac']):.2f} is {where} the best" in why[1]
    assert "not enough was run" in why[0]


def test_a_run_that_diverged_counts_with_its_best_epoch_and_has_no_last():
    ended = pl.when(pl.col("seed") == 1).then(pl.lit("diverged")).otherwise(pl.lit("done"))
    frame = runs(mkfac=[94.0, 90.0]).with_columns(ended=ended)
    found = cell(frame, "mkfac")
    assert (found.median, found.last, found.seeds) == (92.0, (93.0,), 2)
    assert "1 diverged" in found.text()


def test_the_recorded_runs_become_a_table_a_picture_and_a_section(tmp_path):
    results = ROOT / "results" / "cifar_runs.parquet"
    if not results.exists():
        pytest.skip("the results are not part of an installed package")
    options = Options(output=tmp_path)
    section = reproduce_cifar(options, results)
    own = pl.read_parquet(results).filter("in_table")
    assert sum(cell.seeds for cell in cifar.cells(own).values()) == own.height
    assert own.select("dataset", "model", "preset", "seed").is_duplicated().sum() == 0
    assert set(own["split"]) == {"test"}
    assert (tmp_path / section.picture).read_bytes().startswith(b"\x89PNG")
    assert sections(options)[4].verdict == section.verdict == "does not hold"
    assert all(
        cifar.spread_of(cifar.cells(own), dataset).freedom > 20
        for dataset in ("cifar10", "cifar100")
    )


def test_a_missing_table_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="give their file with --results"):
        reproduce_cifar(Options(output=tmp_path), tmp_path / "none.parquet")


def test_the_spread_is_pooled_from_cells_with_several_seeds() -> None:
    drawn = np.random.default_rng(0).normal(size=(3, 4))
    centred = drawn - drawn.mean(axis=1, keepdims=True)
    found = Spread.of([*drawn.tolist(), [7.0]])
    assert found.freedom == 9
    assert found.deviation == pytest.approx(np.sqrt((centred**2).sum() / 9))


def test_single_seeds_cannot_be_told_apart() -> None:
    assert Spread.of([[3.0], []]).margin(1, 1) == float("inf")


def test_more_seeds_tell_smaller_differences_apart() -> None:
    spread = Spread(0.3, 10)
    margins = [spread.margin(count, count) for count in range(1, 9)]
    assert margins == sorted(margins, reverse=True)
    assert spread.margin(5, 2) == spread.margin(2, 5)


@pytest.mark.parametrize("count", range(1, 7))
def test_variances_of_medians_are_those_of_draws(count: int) -> None:
    medians = np.median(np.random.default_rng(count).normal(size=(400_000, count)), axis=1)
    variance = (*MEDIAN_VARIANCES, np.pi / 12)[count - 1]
    assert medians.var() == pytest.approx(variance, rel=0.01 if count <= 5 else 0.25)


@pytest.mark.parametrize("seeds", [(1, 1), (2, 2), (5, 1), (5, 5)])
def test_one_pair_in_twenty_that_is_the_same_is_told_apart(seeds: tuple[int, int]) -> None:
    """Six cells of two seeds and the pair itself."""
    draws, repeats, apart = np.random.default_rng(3), 1500, 0
    for _ in range(repeats):
        first, second = (draws.normal(5.0, 0.3, size=count).tolist() for count in seeds)
        spread = Spread.of([*draws.normal(3.0, 0.3, size=(6, 2)).tolist(), first, second])
        apart += abs(np.median(first) - np.median(second)) > spread.margin(*seeds)
    assert apart / repeats == pytest.approx(0.05, abs=0.02)
