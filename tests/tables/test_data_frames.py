"""Frames of every library come apart into columns, and results go back in the caller's kind."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from fisherfold.tables.frames import columns_of, frame_kind, make_frame, numbers

DATA = {"user": ["ann", "bob"], "item": [3, 1], "score": [0.5, 1.5]}
FRAMES = {
    "pandas": pd.DataFrame(DATA),
    "polars": pl.DataFrame(DATA),
    "pyarrow": pa.table(DATA),
    "dict": DATA,
}


@pytest.mark.parametrize("kind", FRAMES)
def test_columns_and_back(kind):
    frame = FRAMES[kind]
    assert frame_kind(frame) == kind
    columns = columns_of(frame)
    assert {name: values.tolist() for name, values in columns.items()} == DATA
    back = make_frame(kind, columns)
    assert type(back) is type(frame)
    assert {name: values.tolist() for name, values in columns_of(back).items()} == DATA


def test_what_is_no_frame_is_named():
    assert frame_kind(np.zeros((2, 2))) is None
    with pytest.raises(TypeError, match=r"expected, got ndarray"):
        columns_of(np.zeros((2, 2)))
    with pytest.raises(TypeError, match=r"pass X.collect\(\)"):
        columns_of(pl.LazyFrame(DATA))
    with pytest.raises(ValueError, match=r"'a' occurs twice"):
        columns_of(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(ValueError, match=r"one length"):
        columns_of({"a": [1], "b": [1, 2]})


@pytest.mark.parametrize(
    "values",
    [
        [1, None, 2.5],
        ["1", None, "2.5"],
        np.ma.array([1, 9, 2.5], mask=[0, 1, 0]),
        pd.Series([1, None, 2.5]),
        pd.Series([1, pd.NA, 2.5], dtype="Float64"),
        pl.Series([1.0, None, 2.5]),
        pa.array([1.0, None, 2.5]),
        torch.tensor([[1.0], [float("nan")], [2.5]]),
    ],
)
def test_numbers_of_every_kind_of_column(values):
    np.testing.assert_array_equal(numbers(values, "y"), [1, np.nan, 2.5])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["1", "x"], "y must hold numbers, got 'x' at position 1"),
        ([1, [2]], "got .2. at position 1"),
        ([1j], "Complex data not supported"),
        ([[1, 2], [3, 4]], "one dimension"),
        (np.array(["2020"], dtype="M8[Y]"), "y must hold numbers"),
    ],
)
def test_what_is_no_number_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        numbers(values, "y")
