"""The collector of Kronecker factors against sums written out."""

from __future__ import annotations

import pytest
import torch

from fisherfold.fisher.collector import FactorSums
from toy import normal


@pytest.mark.parametrize("groups", [1, 2])
def test_factors_are_the_sums_that_they_stand_for(groups):
    """Two losses that are means, of 3 and 5 terms with 4 rows each."""
    sums = FactorSums.empty(normal(6, 5), groups)
    a, g = normal(8, 4, 5), normal(8, 4, 6, seed=1)
    for part, terms in ((slice(0, 3), 3), (slice(3, 8), 5)):
        sums.add(a[part], g[part] / terms)
        sums.close(terms, mean=True)
    left, right = sums.finish()[::-1]
    rows, flat = a.flatten(0, 1), g.flatten(0, 1)
    expected = flat.T @ flat / 8
    if groups == 2:
        expected[:3, 3:] = 0.0
        expected[3:, :3] = 0.0
    torch.testing.assert_close(left, expected)
    torch.testing.assert_close(right, rows.T @ rows / 32)


def test_inputs_are_centred_where_gradients_sum_to_zero():
    a, g = 3 + normal(20, 1, 5), normal(20, 1, 6, seed=1)
    g = g - g.mean(0)
    sums = FactorSums.empty(normal(6, 5))
    sums.add(a, g)
    sums.close(20, mean=False)
    flat = a[:, 0] - a[:, 0].mean(0)
    torch.testing.assert_close(sums.finish()[0], flat.T @ flat / 20)
