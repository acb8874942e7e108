"""Rotations against statsmodels and scikit-learn, and the equations that they satisfy."""

import numpy as np
import pytest
import torch
from statsmodels.multivariate.factor_rotation import rotate_factors

from fisherfold.factors import rotate
from fisherfold.factors.rotation import constraints, default_kaiser

GENERATOR = torch.Generator().manual_seed(0)
UNROTATED = torch.randn(10, 3, generator=GENERATOR, dtype=torch.float64) * 0.3
UNROTATED[:, 0] += 0.4


def same_up_to_order_and_sign(found, expected, atol):
    products = np.abs(found.T @ expected)
    order = products.argmax(axis=0)
    signs = np.sign((found[:, order] * expected).sum(axis=0))
    np.testing.assert_allclose(found[:, order] * signs, expected, atol=atol)


@pytest.mark.parametrize(("rotation", "arguments"), [("varimax", ()), ("oblimin", (0, "oblique"))])
def test_statsmodels_agrees(rotation, arguments):
    found, correlations = rotate(UNROTATED, rotation, kaiser=False)
    options = {"algorithm": "gpa", "max_tries": 5000, "tol": 1e-10}
    expected, turn = rotate_factors(UNROTATED.numpy(), rotation, *arguments, **options)
    same_up_to_order_and_sign(found.numpy(), expected, atol=1e-6)
    if rotation == "oblimin":
        theirs = np.sort(np.abs((turn.T @ turn)[np.tril_indices(3, -1)]))
        ours = np.sort(np.abs(correlations.numpy()[np.tril_indices(3, -1)]))
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_promax_is_that_of_its_definition():
    """The regression of the fourth powers on varimax loadings, scaled to factors of variance 1."""
    loadings = rotate(UNROTATED, "varimax")[0].numpy()
    turn = np.linalg.lstsq(loadings, loadings * np.abs(loadings) ** 3, rcond=None)[0]
    turn = turn * np.sqrt(np.diag(np.linalg.inv(turn.T @ turn)))
    found, correlations = rotate(UNROTATED, "promax")
    same_up_to_order_and_sign(found.numpy(), loadings @ turn, atol=1e-12)
    np.testing.assert_allclose(correlations.diagonal(), 1, atol=1e-12)


@pytest.mark.parametrize("kaiser", [False, True])
@pytest.mark.parametrize("rotation", ["varimax", "oblimin", "geomin"])
def test_rotated_loadings_satisfy_their_equations(rotation, kaiser):
    scaled = UNROTATED * 0.5
    loadings, correlations = rotate(scaled, rotation, kaiser=kaiser)
    gap = constraints(loadings, correlations, rotation, kaiser)
    assert float(gap.abs().max()) < 1e-8
    torch.testing.assert_close(loadings @ correlations @ loadings.T, scaled @ scaled.T)
    order = loadings.square().sum(0)
    assert bool((order[:-1] >= order[1:]).all())
    assert bool((loadings.sum(0) >= 0).all())


def test_unknown_rotations_are_named():
    assert default_kaiser("varimax")
    assert not default_kaiser("oblimin")
    with pytest.raises(ValueError, match=r"rotation must be one of .* or None, got 'quartimax'"):
        rotate(UNROTATED, "quartimax")
