"""Features and targets in extreme units: the same answer, an error, or a warning that digits are gone."""

import numpy as np
import pytest

from fisherfold import SubspaceClassifier, SubspaceRegressor
from fisherfold.tables.ranges import kept_digits
from toy import related_tasks

ROWS = related_tasks(12, 20, 4)


def predictions(X=ROWS.X, y=ROWS.y, fresh=ROWS.fresh):
    model = SubspaceRegressor(2, max_iter=50, random_state=0).fit(X, y, task=ROWS.task)
    return model.predict(fresh, task=ROWS.task)


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.std(expected))


@pytest.mark.parametrize("unit", [1e-90, 1e-12, 1e12, 1e90])
def test_units_within_the_range_do_not_matter(unit):
    expected = predictions()
    close(predictions(unit * ROWS.X, fresh=unit * ROWS.fresh), expected)
    close(predictions(y=unit * ROWS.y) / unit, expected)


@pytest.mark.parametrize("unit", [1e-160, 1e155, 1e200])
@pytest.mark.parametrize("kind", [SubspaceRegressor, SubspaceClassifier])
def test_squares_that_leave_the_range_are_an_error(kind, unit):
    """0.2.0 fitted zeros without a word."""
    X = ROWS.X * [1, unit, 1, 1]
    with pytest.raises(ValueError, match=r"features must be .* in column 1; choose another unit"):
        kind(2).fit(X, ROWS.y > 0, task=ROWS.task)
    if kind is SubspaceRegressor:
        with pytest.raises(ValueError, match="targets must be"):
            kind(2).fit(ROWS.X, unit * ROWS.y, task=ROWS.task)


def test_a_small_spread_far_from_zero_is_a_feature():
    """Nanoseconds since 1970 over a tenth of a second; 0.2.0 left the column out as a constant."""
    start, seconds = 1_700_000_000_000_000_000, np.random.default_rng(0).random(240) / 10
    time = start + (1e9 * seconds).astype(np.int64)
    X = np.column_stack([ROWS.X, time.astype(np.float64)])
    y = ROWS.y + 50 * seconds
    close(
        predictions(X, y, X),
        predictions(np.column_stack([ROWS.X, seconds]), y, np.column_stack([ROWS.X, seconds])),
    )


@pytest.mark.parametrize("what", ["features", "targets"])
def test_digits_that_are_gone_are_a_warning(what):
    X, y = (ROWS.X + 1e15, ROWS.y) if what == "features" else (ROWS.X, ROWS.y + 1e15)
    with pytest.warns(UserWarning, match=rf"{what}.* differ in their last"):
        SubspaceRegressor(2, max_iter=3).fit(X, y, task=ROWS.task)
    assert kept_digits(np.zeros((3, 2))).tolist() == [np.inf, np.inf]
