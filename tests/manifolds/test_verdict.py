import math

import pytest

from fisherfold.manifolds.verdict import Verdict, at_most, slope, slope_at_least

STEPS = [0.3 * 10 ** (-k / 4) for k in range(25)]


def jitter(k):
    """Rounding noise in (0, 1e-16], reproducible."""
    return 1e-16 * (0.1 + 0.9 * ((k * 0.6180339887) % 1))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_slope_finds_the_power_between_curvature_and_noise(order):
    errors = [t**order * (1 + 2 * t) + jitter(k) for k, t in enumerate(STEPS)]
    assert slope(STEPS, errors, 1e-16) == pytest.approx(order, abs=0.03)


def test_slope_takes_the_longest_piece_not_the_first():
    # steep at large steps, slope 2 below
    errors = [100 * t**6 + t**2 for t in STEPS]
    assert slope(STEPS, errors, 1e-16) == pytest.approx(2, abs=0.03)


def test_slope_of_rounding_is_infinite_and_of_nan_is_nan():
    assert slope(STEPS, [jitter(k) for k in range(25)], 1e-16) == math.inf
    assert math.isnan(slope(STEPS, [math.nan] + [1.0] * 24, 1e-16))


def test_verdicts_are_true_when_they_pass():
    assert at_most("gap", 1e-9, 1e-8)
    assert not at_most("gap", 1e-7, 1e-8)
    assert not at_most("gap", math.nan, 1e-8)
    assert slope_at_least("order", 2.9, 3)
    assert slope_at_least("order", math.inf, 3)
    assert not slope_at_least("order", 2.5, 3)
    assert not slope_at_least("order", math.nan, 3)


def test_verdicts_speak():
    assert (
        str(at_most("gap", 1.0, 0.5)) == "FAILED: gap: measured 1.00e+00, expected at most 5.00e-01"
    )
    assert (
        slope_at_least("order", 2.0, 3).message
        == "the error falls like t^2.00, expected t^3 or faster"
    )
    assert "is only rounding" in slope_at_least("order", math.inf, 3).message
    assert Verdict("a", 1, 2, True, "m").measured == 1
