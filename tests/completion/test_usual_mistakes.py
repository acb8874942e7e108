"""The usual mistakes of users: each is one error that says what was wrong, what is expected and what to do."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse as sp
from sklearn.exceptions import NotFittedError

from fisherfold import LowRankImputer, MatrixCompletion, MatrixCompletionCV

PAIRS = np.array([[0, 0], [0, 1], [1, 0], [1, 2], [2, 1], [2, 2]])
VALUES = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
FRAME = pd.DataFrame({"user": PAIRS[:, 0], "item": PAIRS[:, 1], "rating": VALUES})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"rank": 0}, "rank must be a whole number of at least 1, got 0"),
        ({"ridge": -1.0}, "ridge must be a finite number of at least 0, got -1.0"),
        (
            {"ridge": 0},
            "ridge must be positive for inference='variational', got 0; None lets it be learnt",
        ),
        ({"inference": "guess"}, "inference must be one of variational, point, got 'guess'"),
        ({"solver": "rngd"}, "solver must be 'auto' for inference='variational', got 'rngd'"),
        ({"device": "abacus"}, "device 'abacus' cannot be used here"),
    ],
)
def test_parameters(params, message):
    with pytest.raises(ValueError, match=message):
        MatrixCompletion(**{"rank": 1} | params).fit(PAIRS, VALUES)


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        (PAIRS, VALUES[:3], "X and y must have one length, got 6 pairs and 3 values"),
        (PAIRS[:, :1], VALUES, r"X must have shape \(n, 2\) .* got shape \(6, 1\)"),
        (PAIRS[:0], VALUES[:0], "there are no ratings: found 0 observed entries"),
        (
            PAIRS,
            [1, 2, np.nan, 4, 5, 6],
            r"1 of 6 contain NaN or infinity, the first is nan at row 1, column 0",
        ),
        (
            PAIRS,
            np.where(VALUES > 4, np.inf, VALUES),
            "2 of 6 contain NaN or infinity, the first is inf",
        ),
        (
            PAIRS,
            ["1", "2", "three", "4", "5", "6"],
            "y must hold numbers, got 'three' at position 2",
        ),
        (PAIRS, VALUES + 1j, "Complex data not supported: y must be real"),
        (PAIRS, np.ones((6, 2)), r"y must have one dimension, got shape \(6, 2\)"),
        (PAIRS, VALUES * 1e300, r"absolute value 1e\+300 at most, got 6e\+300"),
        ([("a", None), ("b", "c")], [1, 2], "column id at position 0 is missing"),
        ([(1.0, 2.0), (np.nan, 3.0)], [1, 2], "row id at position 1 is missing"),
        (np.full((3, 7), np.nan), None, "there are no ratings"),
        (np.array([list("abcdef")]), None, "a matrix with holes must hold numbers and NaN"),
        (
            np.zeros(3),
            None,
            r"X must be pairs with y, a data frame of entries or a matrix, got shape \(3,\)",
        ),
        (
            FRAME.assign(rating=[1, 2, "bad", 4, 5, 6]),
            None,
            "column 'rating' must hold numbers, got 'bad'",
        ),
        (
            FRAME.assign(rating=[1, 2, None, 4, 5, 6]),
            None,
            "1 of 6 contain NaN or infinity, .* leave such entries out",
        ),
        (
            FRAME.assign(z=1)[["user", "rating", "z"]],
            VALUES,
            r"X must have 2 columns .* is the column id",
        ),
        (FRAME[["user", "rating"]], None, r"cannot tell which of the columns \['user', 'rating'\]"),
    ],
)
def test_data(X, y, message):
    with pytest.raises(ValueError, match=message):
        MatrixCompletion(rank=1).fit(X, y)


def test_types_that_cannot_be_ids_or_tables():
    with pytest.raises(TypeError, match="pairs of ids cannot be a sparse matrix"):
        MatrixCompletion(rank=1).fit(sp.csr_array(PAIRS), VALUES)
    with pytest.raises(
        TypeError, match=r"row ids must be integers or text, got 0.5 .* convert them to text"
    ):
        MatrixCompletion(rank=1).fit(PAIRS + 0.5, VALUES)
    for estimator in (MatrixCompletion(rank=1), LowRankImputer(rank=1)):
        with pytest.raises(TypeError, match=r"got a LazyFrame; pass X.collect\(\)"):
            estimator.fit(pl.from_pandas(FRAME).lazy())
    with pytest.raises(
        ValueError, match=r"there is no column 'stars'; the data frame has \['user', "
    ):
        MatrixCompletion().fit(FRAME, columns=("user", "item", "stars"))
    with pytest.raises(
        ValueError, match=r"columns must name 3 columns \(row, column, value\), got 'user'"
    ):
        MatrixCompletion().fit(FRAME, columns="user")


def test_repeated_pairs_are_named_by_their_ids():
    with pytest.raises(
        ValueError, match=r"1 entry repeats a pair .* row 'ann', column 5; choose duplicates='mean'"
    ):
        MatrixCompletion(rank=1, duplicates="error").fit(
            [("ann", 5), ("ann", 5), ("bob", 3)], [2.0, 4.0, 1.0]
        )


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.predict(PAIRS),
        lambda m: m.recommend(0),
        lambda m: m.save("nowhere"),
        lambda m: m.row_factors_,
        lambda m: m.predict_new([0], [1.0], [1]),
        lambda m: m.similar(0),
        lambda m: m.recommend_new({0: 1.0}),
    ],
)
def test_asked_before_fit(call):
    with pytest.raises(NotFittedError, match="not fitted yet"):
        call(MatrixCompletion())


def test_a_rank_above_the_size_of_the_table_is_lowered_with_a_warning():
    with pytest.warns(
        UserWarning, match="rank=10 is more than a table of 3 x 3 allows; rank=3 is used"
    ):
        model = MatrixCompletion(10).fit(PAIRS, VALUES)
    assert model.row_factors_.shape == (3, 3)
    with pytest.warns(UserWarning, match="allows; rank=2 is used"):
        MatrixCompletion(10, inference="point", solver="rngd", max_iter=2).fit(PAIRS, VALUES)
    with pytest.warns(
        UserWarning,
        match=r"all of ranks=\(10, 20\) are more than a table of 3 x 3 allows; 3 is used",
    ):
        assert (
            MatrixCompletionCV(ranks=(10, 20), cv=2, max_iter=2).fit(PAIRS, VALUES).best_rank_ == 3
        )


def test_the_search():
    with pytest.raises(ValueError, match="ranks must be a sequence of at least one value"):
        MatrixCompletionCV(ranks=()).fit(PAIRS, VALUES)
    with pytest.raises(ValueError, match="cv must be a whole number of at least 2, got 1"):
        MatrixCompletionCV(cv=1).fit(PAIRS, VALUES)
    with pytest.raises(ValueError, match="cv=9 folds need as many ratings, got 6"):
        MatrixCompletionCV(ranks=(1,), cv=9).fit(PAIRS, VALUES)
    with pytest.raises(ValueError, match="ridge must be positive"):
        MatrixCompletionCV(ranks=(1,), ridges=(None, 0.0)).fit(PAIRS, VALUES)


def test_requests():
    model = MatrixCompletion(rank=1).fit(FRAME)
    with pytest.raises(ValueError, match=r"k must be a whole number of at least 1, got 0"):
        model.recommend(0, 0)
    with pytest.raises(
        ValueError, match="none of the candidates was seen in fit, there is nothing to recommend"
    ):
        model.recommend(0, candidates=["x", "y"])
    with pytest.raises(ValueError, match="none of the candidates was seen"):
        model.recommend(0, candidates=[])
    with pytest.raises(ValueError, match="by must be one of mean, upper, sample, got 'best'"):
        model.recommend(0, by="best")
    with pytest.raises(ValueError, match=r"1 column id was not seen in fit, the first is 'x'"):
        model.similar("x")
    with pytest.raises(ValueError, match="rated and values must have one length, got 2 and 1"):
        model.predict_new([0, 1], [1.0], [2])
    with pytest.raises(ValueError, match="the values must be finite, got nan"):
        model.predict_new([0], [np.nan], [2])
    with pytest.raises(
        ValueError, match=r"X must have 2 columns .*, got 3: .* \['a', 'b', 'c'\] are row id and"
    ):
        model.predict(pd.DataFrame(np.ones((2, 3)), columns=list("abc")))
    with pytest.raises(
        ValueError, match=r"the values must lie within .* times the spread .* so far, got 1e"
    ):
        model.partial_fit([(0, 2)], [1e250])
    with pytest.raises(
        ValueError, match=r"fitted without times: fit it with times, or predict without them"
    ):
        model.predict(PAIRS, time=5.0)
    assert len(model.recommend(0, 99)) == 1
    assert model.set_params(unseen="nan").predict([("x", 0)]).tolist() == pytest.approx(
        [np.nan], nan_ok=True
    )
    with pytest.warns(
        UserWarning, match=r"1 row id was .* no list \(unseen='nan'\), the first is 'x'"
    ):
        assert set(model.recommend(["x", 0, 1])["user"]) == {0, 1}
    with pytest.raises(
        ValueError,
        match="1 row id was not seen in fit, the first is 'x'; use unseen='prior' or 'nan'",
    ):
        model.set_params(unseen="error").predict([("x", 0), (0, 0)])
    point = MatrixCompletion(rank=1, inference="point").fit(FRAME)
    for call in (
        lambda: point.predict(PAIRS, return_std=True),
        lambda: point.recommend(0, by="upper"),
    ):
        with pytest.raises(
            ValueError, match="needs inference='variational': a point estimate has no error bars"
        ):
            call()
    model.model_.seen = None
    with pytest.raises(
        ValueError, match=r"does not keep the ratings .* recommend with exclude_seen=False"
    ):
        model.recommend(0)
    assert len(model.recommend(0, exclude_seen=False)) == 3


def test_model_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no model folder"):
        MatrixCompletion.load(tmp_path / "nothing")
    MatrixCompletion(rank=1).fit(FRAME).save(tmp_path / "m")
    with pytest.raises(
        ValueError, match=r"m/model.safetensors is not .* imputer file .* it holds a completion"
    ):
        LowRankImputer.load(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        MatrixCompletion.load(tmp_path / "m")


def test_a_value_far_from_all_others_is_named_and_takes_no_digits():
    draw = np.random.default_rng(0)
    table = 3 + draw.normal(size=(60, 2)) @ draw.normal(size=(2, 40))
    pairs = np.argwhere(draw.random(table.shape) < 0.5)
    values = table[tuple(pairs.T)]
    values[0] = 1e5
    noise = []
    for dtype in ("float32", "float64"):
        with pytest.warns(
            UserWarning,
            match=r"most values lie between .* but 100000 is .* times their spread away",
        ):
            noise.append(MatrixCompletion(rank=2, dtype=dtype).fit(pairs, values).noise_)
    assert noise[0] == pytest.approx(noise[1], rel=1e-9)


def test_folds_of_sorted_ratings_warn():
    from sklearn.model_selection import KFold, cross_val_score

    rng = np.random.default_rng(0)
    pairs = np.argwhere(rng.random((40, 12)) < 0.6)
    values = rng.normal(size=len(pairs))
    with pytest.warns(
        UserWarning, match=r"the row ids of \d+ of \d+ pairs were not .*KFold\(shuffle=True\)"
    ):
        cross_val_score(MatrixCompletion(rank=1, max_iter=2), pairs, values, cv=KFold(3))
