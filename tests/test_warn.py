"""Warnings name the caller's line, through however many layers of this library, of PyTorch and of scikit-learn."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sklearn.pipeline import make_pipeline
from torch import nn

from fisherfold import MatrixCompletion
from fisherfold.optim import MKFAC
from fisherfold.warn import warn


def test_a_warning_of_the_caller_names_its_line() -> None:
    with pytest.warns(RuntimeWarning, match="^so it is$") as caught:
        warn("so it is", RuntimeWarning)
    assert caught[0].filename == __file__


def test_rows_of_zero_are_said_where_the_optimizer_is_made_or_they_are_found() -> None:
    net, x = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), torch.randn(8, 5)
    net[0].weight.data[0] = 0.0
    with pytest.warns(UserWarning, match="0.weight: 1 of 6 rows is zero or tiny") as caught:
        optimizer = MKFAC(net, example_input=x)
    net[0].weight.data[1] = 0.0
    nn.functional.cross_entropy(net(x), torch.zeros(8, dtype=torch.int64)).backward()
    with pytest.warns(UserWarning, match="0.weight: 1 of 6 rows is zero or tiny") as later:
        optimizer.step()
    assert [each.filename for each in (*caught, *later)] == [__file__] * 2


def test_a_refresh_and_a_fit_inside_a_pipeline_warn_where_they_are_called() -> None:
    net, x = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), torch.randn(8, 5)
    pairs = np.stack(np.unravel_index(np.arange(60), (10, 6)), 1)
    values = np.random.default_rng(0).normal(size=60)
    values[7] = 1e9
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MKFAC(net, example_input=x).refresh([(x, torch.full((8,), -100))], nn.CrossEntropyLoss())
        make_pipeline(MatrixCompletion(rank=1)).fit(pairs, values)
    assert {each.filename for each in caught} == {__file__}
    assert ["all targets" in str(each.message) for each in caught] == [True, False]
