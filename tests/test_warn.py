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


def test_an_optimizer_warns_where_it_is_made() -> None:
    net, x = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), torch.randn(8, 5)
    with pytest.warns(UserWarning, match="no weight of Linear") as caught:
        MKFAC(net[2], example_input=net[:2](x).detach())
    assert [each.filename for each in caught] == [__file__]


def test_a_refresh_and_a_fit_inside_a_pipeline_warn_where_they_are_called() -> None:
    net, x = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), torch.randn(8, 5)
    pairs = np.stack(np.unravel_index(np.arange(60), (10, 6)), 1)
    values = np.random.default_rng(0).normal(size=60)
    values[7] = 1e9
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MKFAC(net, example_input=x).refresh(
            [(x * np.nan, torch.zeros(8, dtype=torch.int64))], nn.CrossEntropyLoss()
        )
        make_pipeline(MatrixCompletion(rank=1)).fit(pairs, values)
    assert {each.filename for each in caught} == {__file__}
    assert ["not finite" in str(each.message) for each in caught] == [True, False]
