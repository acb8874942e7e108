"""Medians over a few seeds: when they differ."""

from __future__ import annotations

import numpy as np
import pytest

from fisherfold.reproduce.cifar import MEDIAN_VARIANCES, Spread


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
