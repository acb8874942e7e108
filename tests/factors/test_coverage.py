"""90 % intervals of rotated loadings hold the truth in 88 to 92 % of samples.

A small draw of each runs always; its coverage, of 36 dependent intervals in each sample, has a
standard error of about one percentage point.
"""

import numpy as np
import pytest
from factor_models import coverage, normal


def heavy_tailed(rng, root, n=800):
    """Rows of a multivariate t distribution: the model is right, the likelihood is not."""
    rows = rng.standard_normal((n, len(root))) @ root.T
    return rows / np.sqrt(rng.chisquare(6, size=(n, 1)) / 4)


def with_holes(rng, root, n=400):
    """Values of later variables are missing where the first is large: at random, given the data."""
    rows = normal(rng, root, n)
    holes = rng.random((n, len(root) - 4)) < 0.4 * (rows[:, :1] > 0)
    rows[:, 4:][holes] = np.nan
    return rows


@pytest.mark.parametrize("rotation", ["varimax", "oblimin"])
def test_a_draw_of_intervals_holds(rotation):
    loadings, _ = coverage(rotation, 20, draw=normal)
    assert 0.86 < loadings < 0.94


@pytest.mark.slow
@pytest.mark.parametrize("rotation", ["varimax", "oblimin", "promax"])
def test_intervals_hold(rotation):
    loadings, correlations = coverage(rotation, 400, draw=normal, seed=1)
    assert 0.88 < loadings < 0.92
    if rotation != "varimax":
        assert 0.86 < correlations < 0.94


@pytest.mark.slow
def test_intervals_of_wrong_likelihoods_hold_with_robust_errors():
    """And do not without: the test could fail."""
    robust, _ = coverage("oblimin", 200, draw=heavy_tailed, seed=2, errors="robust")
    assert 0.87 < robust < 0.93
    expected, _ = coverage("oblimin", 60, draw=heavy_tailed, seed=2, errors="expected")
    assert expected < 0.86


@pytest.mark.slow
def test_intervals_hold_where_values_are_missing():
    loadings, _ = coverage("oblimin", 150, draw=with_holes, seed=3)
    assert 0.87 < loadings < 0.93
