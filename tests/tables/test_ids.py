"""Ids are integers or text: found again in every form they come in, and back from arrays as they were."""

import copy
import pickle

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from fisherfold.tables.ids import IdIndex, as_ids

TEXTS = ["", " ", "a", "a\0", "é", "e\u0301", "\ud800", "x" * 10_000, "007", "7", "-0", str(2**70)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([3, True, np.int64(5)], [3, 1, 5]),
        ([2.0, -1.0], [2, -1]),
        (np.array([3, 1], dtype=np.uint64), [3, 1]),
        (torch.tensor([4, 2]), [4, 2]),
        (pd.Series(["b", "a"]), ["b", "a"]),
        (pd.Series([1, 2], dtype="Int64"), [1, 2]),
        (pd.Categorical(["b", "a"]), ["b", "a"]),
        (pl.Series(["b", "a"]), ["b", "a"]),
        (pl.Series(["b", "a"]).cast(pl.Categorical), ["b", "a"]),
        (pa.chunked_array([["b"], ["a"]]), ["b", "a"]),
        (pa.array([1, 2]), [1, 2]),
        ([1, "a", 2.0], ["1", "a", "2"]),
        ([2**63, 1], [str(2**63), "1"]),
        (np.array([2**63, 1], dtype=np.uint64), [str(2**63), "1"]),
        ([], []),
    ],
)
def test_ids_of_every_kind_of_column(given, expected):
    found = as_ids(given)
    assert found.tolist() == expected
    assert found.dtype == (object if expected and isinstance(expected[0], str) else np.int64)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("abc", TypeError, "row ids must be a sequence, got 'abc' .str."),
        ({"a": 1}, TypeError, "must be a sequence"),
        (["a", None], ValueError, "row id at position 1 is missing .got None."),
        ([1.0, float("nan")], ValueError, "position 1 is missing"),
        (np.array([1.0, np.nan]), ValueError, "position 1 is missing"),
        (pd.Series([1, pd.NA], dtype="Int64"), ValueError, "position 1 is missing"),
        (pl.Series(["a", None]), ValueError, "position 1 is missing"),
        (np.ma.array([1, 2], mask=[False, True]), ValueError, "position 1 is missing"),
        (
            [1.5],
            TypeError,
            "must be integers or text, got 1.5 .float. at position 0; convert them to text",
        ),
        ([float(2**60)], TypeError, "must be integers or text"),
        ([("a", 1)], TypeError, "got ..a., 1. .tuple."),
        ([b"a"], TypeError, "got b'a'"),
        ([1j], TypeError, "got 1j"),
        (np.array(["2020-01-01"], dtype="M8[D]"), TypeError, "must be integers or text"),
        (np.zeros((2, 2), dtype=int), ValueError, "one dimension"),
    ],
)
def test_what_is_no_id_is_named(given, kind, message):
    with pytest.raises(kind, match=message):
        as_ids(given)


@pytest.mark.parametrize(
    "labels", [TEXTS, [5, -3, 2**62, 0, -(2**63) + 1], list(range(100, 0, -1)), []]
)
def test_positions_are_found_again_after_arrays_pickles_and_copies(labels):
    index, codes = IdIndex.fit(labels * 2)
    assert index.decode(codes).tolist() == labels * 2
    assert len(index) == len(labels)
    tensors = {
        name: torch.from_numpy(np.array(values)) for name, values in index.to_arrays().items()
    }
    for again in (
        IdIndex.from_arrays(tensors),
        pickle.loads(pickle.dumps(index)),
        copy.copy(index),
    ):
        assert again.labels.tolist() == index.labels.tolist()
        assert again.encode(labels).tolist() == codes[: len(labels)].tolist()
        assert again.encode(["no such id", -(2**40)]).tolist() == [-1, -1]


def test_an_integer_and_its_text_are_one_id():
    numbers, texts = IdIndex([7, 10]), IdIndex(["b", "7"])
    assert numbers.encode(["7", "07", " 7", "x", "+7", "7.0", str(2**70)]).tolist() == [
        0,
        -1,
        -1,
        -1,
        -1,
        -1,
        -1,
    ]
    assert texts.encode([7, 8]).tolist() == [1, -1]
    assert numbers.extend(["7", "a", 10]).tolist() == [0, 2, 1]
    assert numbers.labels.tolist() == ["7", "10", "a"]
    assert numbers.encode([10]).tolist() == [1]


def test_integers_keep_their_positions_when_others_come():
    index = IdIndex([30, 10])
    assert index.extend([20, 30, 20]).tolist() == [2, 1, 2]
    assert index.labels.tolist() == [10, 30, 20]
    clone = copy.copy(index)
    clone.extend([99])
    assert index.encode([99, 20]).tolist() == [-1, 2]


@pytest.mark.parametrize(
    "arrays",
    [
        {"integers": np.array([1, 1])},
        {"integers": np.array([1.0])},
        {"integers": np.array([[1]])},
        {"text": np.frombuffer(b"aa", np.uint8), "ends": np.array([1, 2])},
        {"text": np.frombuffer(b"ab", np.uint8), "ends": np.array([2, 1])},
        {"text": np.frombuffer(b"ab", np.uint8), "ends": np.array([1, 3])},
        {"text": np.frombuffer(b"\xff\xff", np.uint8), "ends": np.array([1, 2])},
        {"text": np.frombuffer(b"ab", np.uint8)},
        {},
    ],
)
def test_arrays_that_are_no_index_are_rejected(arrays):
    with pytest.raises(ValueError, match=r"id|ends|decode"):
        IdIndex.from_arrays(arrays)
