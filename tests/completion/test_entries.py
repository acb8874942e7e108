"""What fit takes: every form of input gives the same entries, and what could be two things is rejected with both."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse as sp
import torch

from fisherfold.completion.entries import read_entries
from fisherfold.completion.ratings import Triplets

RNG = np.random.default_rng(0)
HOLES = np.where(RNG.random((30, 12)) < 0.5, RNG.normal(size=(30, 12)), np.nan)
PAIRS, VALUES = np.argwhere(~np.isnan(HOLES)), HOLES[~np.isnan(HOLES)]
LONG = {"user": PAIRS[:, 0], "item": PAIRS[:, 1], "rating": VALUES}
STORED = sp.coo_array((VALUES, (PAIRS[:, 0], PAIRS[:, 1])), shape=HOLES.shape)
WIDE = pd.DataFrame(HOLES, columns=range(12))
INDICES = torch.from_numpy(PAIRS.T.copy())
TENSOR = torch.sparse_coo_tensor(
    INDICES, torch.from_numpy(VALUES), HOLES.shape, check_invariants=True
)
FORMS = {
    "pairs": (PAIRS, VALUES),
    "lists": (PAIRS.tolist(), VALUES.tolist()),
    "floats": (PAIRS.astype(float), VALUES),
    "text": (PAIRS.astype(str), VALUES),
    "tuples": ([tuple(pair) for pair in PAIRS.tolist()], torch.tensor(VALUES)),
    "array": (HOLES,),
    "masked": (np.ma.masked_invalid(HOLES),),
    "tensor": (torch.from_numpy(HOLES),),
    "coo": (STORED,),
    "csr": (STORED.tocsr(),),
    "sparse tensor": (TENSOR,),
    "pandas": (pd.DataFrame(LONG),),
    "polars": (pl.DataFrame(LONG),),
    "arrow": (pa.table(LONG),),
    "dict": (LONG,),
    "pandas pairs": (pd.DataFrame(LONG)[["user", "item"]], pd.Series(VALUES)),
    "time stamps": (pd.DataFrame(LONG | {"timestamp": 1}),),
    "extra columns": (pl.DataFrame({"index": np.arange(len(VALUES)), "genre": "x"} | LONG),),
    "extra columns with y": (pd.DataFrame(LONG | {"timestamp": 1}), VALUES),
    "nullable": (pd.DataFrame(LONG).convert_dtypes(),),
    "wide pandas": (WIDE,),
    "wide polars": (pl.DataFrame(HOLES, schema=list("abcdefghijkl")),),
    "missing as NA": (WIDE.astype(object).where(~np.isnan(HOLES), pd.NA),),
}

WIDE_FRAMES = ("wide pandas", "wide polars", "missing as NA")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_input_gives_the_same_entries(form):
    entries = read_entries(*FORMS[form], matrix=form in WIDE_FRAMES)
    row_ids, column_ids, i, j = entries.indexed()
    rows = row_ids.decode(i).astype(int)
    names = column_ids.decode(j)
    columns = (
        np.array([ord(x) - ord("a") for x in names]) if form == "wide polars" else names.astype(int)
    )
    order = np.lexsort((columns, rows))
    np.testing.assert_array_equal(np.stack([rows, columns], axis=1)[order], PAIRS)
    np.testing.assert_array_equal(entries.values[order], VALUES)


def test_columns_are_found_by_their_usual_names_or_by_those_given():
    for names in (
        ("user_id", "item_id", "score"),
        ("userId", "movieId", "rating"),
        ("row", "column", "value"),
        ("reviewerID", "asin", "overall"),
        ("user_id", "track_id", "playcount"),
    ):
        frame = pl.DataFrame(
            dict(zip(names, LONG.values(), strict=True)) | {"timestamp": np.arange(len(VALUES))}
        )
        found = read_entries(frame)
        assert (found.names, found.frame) == (names, "polars")
    odd = pd.DataFrame({"reader": LONG["user"], "paper": LONG["item"], "grade": VALUES, "b": 1})
    assert read_entries(odd, columns=("reader", "paper", "b")).values.tolist() == [1.0] * len(
        VALUES
    )


@pytest.mark.parametrize(
    "others", [(), ("timestamp",), ("rated_at_time", "Unnamed: 0"), ("date", "id", "index")]
)
def test_the_single_column_beside_the_ids_holds_the_values_and_times_never_do(others):
    frame = pd.DataFrame({name: np.arange(3) for name in (*others, "user", "item")})
    assert read_entries(frame.assign(liters=0.5)).names == ("user", "item", "liters")
    with pytest.raises(
        ValueError,
        match=r"cannot tell which of the columns \[.*\] is the value: if X holds entries",
    ):
        read_entries(frame)
    pairs = read_entries(frame, implicit=True)
    assert (pairs.names, pairs.values.tolist()) == (("user", "item", "weight"), [1.0] * 3)
    assert read_entries(frame.assign(plays=2), implicit=True).values.tolist() == [2.0] * 3
    with pytest.raises(ValueError, match=r"cannot tell which of the columns .* is the value"):
        read_entries(frame.assign(plays=2, hour=3, price=4), implicit=True)


AMBIGUOUS = {
    "three columns": (
        PAIRS[:, [0, 1, 1]],
        r"X has 3 columns and no y: if .*, pass fit\(X\[:, :2\], X\[:, 2\]\)",
    ),
    "four columns": (PAIRS[:, [0, 1, 1, 0]].astype(float), "X has 4 columns and no y"),
    "list of triples": (PAIRS[:, [0, 1, 1]].tolist(), "X has 3 columns and no y"),
    "a frame of other names": (
        pd.DataFrame(PAIRS[:, [0, 1, 1, 0]], columns=list("abcd")),
        r"cannot tell which of the columns \['a', 'b', 'c', 'd'\] are row id, .* pass fit\(X, columns=",
    ),
    "a frame of two users": (
        pl.DataFrame({"user": [1], "user_id": [1], "item": [2], "rating": [3.0]}),
        "could each be the row id",
    ),
    "ids and titles": (
        pl.DataFrame({"userId": [1], "movieId": [1], "title": ["Up"], "rating": [3.0]}),
        r"the columns 'movieId' and 'title' could each be the column id: if X holds entries, pass fit\(X, columns=",
    ),
    "many columns of other names": (
        pd.DataFrame(HOLES).add_prefix("f"),
        r"cannot tell which of the columns \['f0', ",
    ),
    "many columns without names": (pd.DataFrame(HOLES), r"cannot tell which of the columns \[0, "),
    "features with text": (
        pd.DataFrame({f"f{k}": ["x"] for k in range(12)}),
        "cannot tell which of the columns",
    ),
}


@pytest.mark.parametrize("form", AMBIGUOUS)
def test_what_could_be_entries_or_a_matrix_is_rejected_with_both_ways(form):
    X, message = AMBIGUOUS[form]
    with pytest.raises(ValueError, match=message) as error:
        read_entries(X)
    assert "pass fit(X, matrix=True)" in str(error.value)
    if form in ("three columns", "a frame of other names"):
        assert len(read_entries(X, matrix=True).values) == np.asarray(X).size


@pytest.mark.parametrize("form", ["index", "first column", "numbers of lines", "polars", "text"])
def test_rows_of_a_wide_frame_are_named_by_its_index_or_first_column(form):
    wide = WIDE.set_axis(pd.Index(range(100, 130), name="userId")).rename_axis(columns="film")
    ids, frame = range(100, 130), wide.reset_index()
    if form == "index":
        frame = wide
    elif form == "numbers of lines":
        ids, frame = range(30), WIDE.reset_index(names="Unnamed: 0")
    elif form == "text":
        ids = [f"p{i}" for i in ids]
        frame["userId"] = ids
    elif form == "polars":
        frame = pl.from_pandas(frame.rename(columns=str))
    found = read_entries(frame, matrix=True)
    assert found.names[0] == ("Unnamed: 0" if form == "numbers of lines" else "userId")
    assert found.frame == ("polars" if form == "polars" else "pandas")
    assert list(found.rows) == [ids[i] for i in PAIRS[:, 0]]
    assert [int(j) for j in found.columns] == PAIRS[:, 1].tolist()


def test_a_first_column_of_values_is_data():
    for first in ([1.0, 2.5, 3.0], [1, 1, 2]):
        assert len(read_entries(pd.DataFrame({"user": first, "b": 1.0}), matrix=True).values) == 6
    assert len(read_entries(pd.DataFrame({7: [1, 2, 3], 8: 1.0}), matrix=True).values) == 6


@pytest.mark.parametrize("width", [2, 12])
def test_what_a_sparse_frame_does_not_store_is_not_taken_for_zero(width):
    matrix = sp.coo_array(np.where(RNG.random((12, width)) < 0.6, 1 + RNG.random((12, width)), 0.0))
    frame = pd.DataFrame.sparse.from_spmatrix(matrix, columns=[f"c{k}" for k in range(width)])
    with pytest.raises(
        ValueError, match=r"sparse with the fill value 0.*X\.sparse\.to_coo\(\) .*\.to_dense\(\)"
    ):
        read_entries(frame, matrix=True)
    assert len(read_entries(frame.sparse.to_coo()).values) == matrix.nnz


@pytest.mark.parametrize(
    ("rule", "expected"), [("mean", [2.0, 5.0]), ("last", [3.0, 5.0]), ("sum", [4.0, 5.0])]
)
def test_pairs_given_twice_follow_the_rule(rule, expected):
    entries = read_entries([("a", 1), ("b", 2), ("a", 1)], [1.0, 5.0, 3.0])
    assert entries.merged(rule).values.tolist() == expected
    assert entries.at(np.array([1])).merged(rule).values.tolist() == [5.0]


def test_merging_nothing_changes_nothing():
    found = Triplets(PAIRS[:, 0], PAIRS[:, 1], VALUES).merged("error")
    np.testing.assert_array_equal(np.c_[found.rows, found.columns], PAIRS)
    np.testing.assert_array_equal(found.values, VALUES)
    assert found.amounts is found.spread is None
