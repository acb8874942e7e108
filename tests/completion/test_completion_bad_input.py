"""What is wrong with the data is said at the door, or follows a documented rule."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse as sp

from fisherfold.completion import LowRankImputer, MatrixCompletion, MatrixCompletionCV
from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor

PAIRS = np.array([[0, 0], [0, 1], [1, 0], [1, 2], [2, 1], [2, 2]])
VALUES = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"rank": 0}, "rank must be a whole number of at least 1, got 0"),
        ({"rank": 2.5}, "rank must be a whole number of at least 1, got 2.5"),
        ({"rank": 250}, r"rank must be between 1 and min\(n_rows, n_columns\)=min\(3, 3\)=3, got 250"),
        ({"rank": 1, "ridge": -1.0}, "ridge must be None or a finite number of at least 0, got -1.0"),
        ({"rank": 1, "ridge": float("nan")}, "ridge must be None or a finite number of at least 0, got nan"),
        ({"rank": 1, "ridge": 0}, "ridge must be positive for inference='variational', got 0"),
        ({"rank": 1, "offsets": "some"}, "offsets must be one of both, rows, columns, global, none, got 'some'"),
        ({"rank": 1, "inference": "guess"}, "inference must be one of variational, point, got 'guess'"),
        ({"rank": 1, "unseen": "?"}, r"unseen must be one of prior, nan, error, got '\?'"),
        ({"rank": 1, "dtype": "int8"}, "dtype must be one of float32, float64, got 'int8'"),
        ({"rank": 1, "on_interrupt": "x"}, "on_interrupt must be one of raise, return, got 'x'"),
        ({"rank": 1, "duplicates": "x"}, "duplicates must be one of mean, last, sum, error, got 'x'"),
        ({"rank": 1, "max_iter": 0}, "max_iter must be a whole number of at least 1, got 0"),
        ({"rank": 1, "n_jobs": 0}, "n_jobs must be None, -1 or at least 1, got 0"),
    ],
)
def test_parameters(params, message):
    with pytest.raises(ValueError, match=message):
        MatrixCompletion(**params).fit(PAIRS, VALUES)


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        (PAIRS, VALUES[:3], "X and y must have one length, got 6 pairs and 3 values"),
        (PAIRS[:, :1], VALUES, r"X must have shape \(n, 2\) .* got shape \(6, 1\)"),
        (PAIRS[:0], VALUES[:0], "there are no ratings: found 0 observed entries"),
        (PAIRS, [1, 2, np.nan, 4, 5, 6], r"1 of 6 contain NaN or infinity, the first is nan at row \S*1\S*, col"),
        (PAIRS, np.where(VALUES > 4, np.inf, VALUES), "2 of 6 contain NaN or infinity, the first is inf"),
        (PAIRS, ["1", "2", "three", "4", "5", "6"], "y must hold numbers, got 'three' at position 2"),
        (PAIRS, VALUES + 1j, "Complex data not supported: y must be real"),
        (PAIRS, np.ones((6, 2)), r"y must have one dimension, got shape \(6, 2\)"),
        ([("a", None), ("b", "c")], [1, 2], "column id at position 0 is missing"),
        ([(1.0, 2.0), (np.nan, 3.0)], [1, 2], "row id at position 1 is missing"),
        (np.ma.array(PAIRS, mask=PAIRS == 2), VALUES, "row id at position 4 is missing"),
        (np.full((3, 3), np.nan), None, "there are no ratings"),
        (np.array([["a", "b"]]), None, "a matrix with holes must hold numbers and NaN"),
        (np.zeros(3), None, r"a matrix with holes must have two dimensions, got shape \(3,\)"),
        (np.array([[1.0, np.inf], [np.nan, 1.0]]), None, "contain NaN or infinity"),
        (pd.DataFrame({"a": [1.0, None], "b": ["x", "y"]}), None, "column 'b' must hold numbers, got 'x' at position"),
        (pd.DataFrame({"u": [1], "i": [2], "r": ["bad"]}), None, "column 'r' must hold numbers, got 'bad'"),
        (pd.DataFrame({"u": [1], "i": [2], "r": [3], "s": [4]}), [1.0], "X must have 2 columns .* got 4"),
    ],
)
def test_data(X, y, message):
    with pytest.raises(ValueError, match=message):
        MatrixCompletion(rank=1).fit(X, y)


def test_sparse_pairs_and_unhashable_ids():
    with pytest.raises(TypeError, match="pairs of ids cannot be a sparse matrix"):
        MatrixCompletion(rank=1).fit(sp.csr_array(PAIRS), VALUES)
    ids = np.empty((2, 2), dtype=object)
    ids[:] = "a"
    ids[1, 0] = [1]
    with pytest.raises(TypeError, match="row ids must be hashable, got list"):
        MatrixCompletion(rank=1).fit(ids, [1.0, 2.0])


def test_duplicates_follow_the_rule():
    pairs = np.array([[0, 0], [0, 0], [1, 1]])
    for rule, merged in (("mean", 3.0), ("last", 4.0), ("sum", 6.0)):
        model = MatrixCompletion(rank=1, duplicates=rule, dtype="float64").fit(pairs, [2.0, 4.0, 1.0])
        assert model.n_duplicates_ == 1
        same = MatrixCompletion(rank=1, dtype="float64").fit(pairs[1:], [merged, 1.0])
        ours, theirs = model.model_, same.model_
        assert ours.posterior.n_ratings == theirs.posterior.n_ratings == 2
    names = [("ann", 5), ("ann", 5), ("bob", 3)]
    for ids, named in ((pairs + 70, "row 70, column 70"), (names, "row 'ann', column 5")):
        with pytest.raises(ValueError, match=f"1 entry repeats a pair that was given before, the first is {named};"):
            MatrixCompletion(rank=1, duplicates="error").fit(ids, [2.0, 4.0, 1.0])


def test_explicit_zeros_are_data():
    stored = sp.csr_array((np.array([0.0, 5.0, 5.0, 0.0]), ([0, 0, 1, 1], [0, 1, 0, 1])), shape=(2, 2))
    assert stored.nnz == 4
    model = MatrixCompletion(rank=1).fit(stored)
    assert model.model_.posterior.n_ratings == 4
    assert model.model_.low == 0.0


def test_one_rating_in_all():
    model = MatrixCompletion(rank=1).fit([("a", "b")], [7.0])
    np.testing.assert_allclose(model.predict([("a", "b"), ("c", "d")]), 7.0)
    assert np.isfinite(model.predict([("a", "d")], return_std=True)[1]).all()


@pytest.mark.parametrize("value", [0.0, 4.0, -1e30, 1e-300])
def test_constant_values_are_predicted(value):
    model = MatrixCompletion(rank=2).fit(PAIRS, np.full(6, value))
    np.testing.assert_allclose(model.predict([(0, 2), (9, 9)]), value)


@pytest.mark.parametrize("factor", [1e-20, 1e20, 1e200])
def test_the_unit_does_not_matter(factor):
    base = MatrixCompletion(rank=1).fit(PAIRS, VALUES).predict(PAIRS)
    scaled = MatrixCompletion(rank=1).fit(PAIRS, VALUES * factor).predict(PAIRS)
    np.testing.assert_allclose(scaled, base * factor, rtol=1e-4)


def test_empty_rows_and_columns_have_the_prior():
    holes = np.full((4, 5), np.nan)
    holes[:3, :4] = np.arange(12).reshape(3, 4)
    model = MatrixCompletion(rank=1).fit(holes)
    assert np.isfinite(model.predict([(3, 0), (0, 4), (3, 4)])).all()
    np.testing.assert_allclose(model.predict([(3, 4)]), model.predict([(99, 99)]), atol=1e-5)


def test_large_ids_are_names_not_sizes():
    big = np.array([[2**62, -(2**62)], [2**62 + 1, 5], [7, 5]])
    model = MatrixCompletion(rank=1).fit(big, [1.0, 2.0, 3.0])
    assert len(model.model_.row_ids) == 3
    unsigned = np.array([[2**64 - 1, 0], [2**63, 1]], dtype=np.uint64)
    assert np.isfinite(MatrixCompletion(rank=1).fit(unsigned, [1.0, 2.0]).predict(unsigned)).all()
    huge = np.array([[10**30, 1], [10**30 + 1, 2]], dtype=object)
    model = MatrixCompletion(rank=1, clip=False).fit(huge, [1.0, 2.0])
    assert model.predict([(10**30, 1)])[0] < model.predict([(10**30 + 1, 2)])[0]


def test_mixed_ids_after_growth():
    model = MatrixCompletion(rank=1).fit(PAIRS, VALUES)
    model.partial_fit(np.array([["new", 0], [1, 1]], dtype=object), [3.0, 4.0])
    assert model.model_.row_ids.numbers(np.array([1, "new", "other"], dtype=object)).tolist() == [1, 3, -1]


@pytest.mark.parametrize("inference", ["variational", "point"])
def test_a_stream_whose_ids_have_changed_their_type_is_refused(inference):
    """Users 0 to 2 as numbers, then as text of a file: the model would have each of them twice."""
    model = MatrixCompletion(rank=1, inference=inference).fit(PAIRS, VALUES)
    with pytest.raises(ValueError, match=r"2 of 2 row ids .* another type: got '0' \(str\), fitted with 0 \(int\)"):
        model.partial_fit(PAIRS[:2].astype(str), VALUES[:2])
    assert len(model.model_.row_ids) == 3
    text = MatrixCompletion(rank=1, inference=inference).fit(PAIRS.astype(str), VALUES)
    with pytest.raises(ValueError, match=r"as another type: got 0 \(int\), fitted with '0' \(str\)"):
        text.partial_fit(PAIRS[:2], VALUES[:2])
    # ids of another type that are known in no form are new ones
    assert len(model.partial_fit([("a", "b")], [2.0]).model_.row_ids) == 4


def test_cv_parameters():
    with pytest.raises(ValueError, match="ranks must not be empty"):
        MatrixCompletionCV(ranks=()).fit(PAIRS, VALUES)
    with pytest.raises(ValueError, match=r"ranks must contain one between 1 and min\(n_rows, n_columns\)=3"):
        MatrixCompletionCV(ranks=(10, 20)).fit(PAIRS, VALUES)
    with pytest.raises(ValueError, match="cv must be a whole number of at least 2, got 1"):
        MatrixCompletionCV(cv=1).fit(PAIRS, VALUES)
    with pytest.raises(ValueError, match="cv=9 folds need as many ratings, got 6"):
        MatrixCompletionCV(ranks=(1,), cv=9).fit(PAIRS, VALUES)


def test_cv_leaves_out_the_rank_that_a_solver_does_not_allow():
    table = np.random.default_rng(0).normal(size=(3, 9))
    model = MatrixCompletionCV(ranks=(1, 2, 3), inference="point", solver="rngd", ridges=(0.1,), max_iter=3)
    assert model.fit(table).cv_results_["rank"] == [1, 2]
    with pytest.raises(ValueError, match=r"between 1 and min\(n_rows, n_columns\)=3 less one for rngd, got \(3,\)"):
        model.set_params(ranks=(3,)).fit(table)


def test_lazy_frames_must_be_collected():
    frame = pl.DataFrame({"u": [1, 2], "i": [1, 2], "r": [1.0, 2.0]})
    with pytest.raises(TypeError, match=r"got a LazyFrame; pass X.collect\(\)"):
        MatrixCompletion(rank=1).fit(frame.lazy())
    for estimator in (SubspaceRegressor(rank=1), SubspaceClassifier(rank=1)):
        with pytest.raises(TypeError, match=r"got a LazyFrame; pass X.collect\(\)"):
            estimator.fit(frame.lazy(), [1, 2], task=[0, 1])
    with pytest.raises(TypeError, match=r"got a LazyFrame; pass X.collect\(\)"):
        LowRankImputer(rank=1).fit(frame.lazy())


def test_rows_and_columns_that_were_exchanged_are_refused(tmp_path):
    names = ["user", "item"]
    for frame in (pd.DataFrame(PAIRS, columns=names), pl.DataFrame(PAIRS, schema=names)):
        model = MatrixCompletion(rank=1).fit(frame, VALUES)
        assert model.feature_names_in_.tolist() == names
        model.save(tmp_path)
        for fitted in (model, MatrixCompletion.load(tmp_path)):
            assert fitted.predict(frame).shape == fitted.predict(PAIRS).shape == (6,)
            for refuse in (fitted.predict, lambda X, m=fitted: m.partial_fit(X, VALUES)):
                with pytest.raises(ValueError, match=r"columns of ids were \['user', 'item'\], got \['item', 'user'\]"):
                    refuse(frame[["item", "user"]])
    long = pd.DataFrame(PAIRS, columns=names).assign(stars=VALUES)
    assert model.fit(long).feature_names_in_.tolist() == names
    assert model.score(long) == pytest.approx(model.score(long[names], VALUES))
    with pytest.raises(ValueError, match=r"columns of ids were \['user', 'item'\], got \['item', 'user'\]"):
        model.score(long[["item", "user", "stars"]])
    assert not hasattr(model.fit(PAIRS, VALUES), "feature_names_in_")


def test_entries_of_which_a_value_is_missing_are_not_taken_for_a_matrix():
    entries = {"user": PAIRS[:, 0], "item": PAIRS[:, 1], "stars": [None, *VALUES[1:]]}
    frame = pd.DataFrame(entries)
    for given in (frame, frame.convert_dtypes(), frame.convert_dtypes(dtype_backend="pyarrow"), pl.DataFrame(entries)):
        with pytest.raises(ValueError, match=r"column 'stars' has missing values .* leave such lines out if these are"):
            MatrixCompletion(rank=1).fit(given)
        if hasattr(given, "dropna"):
            assert MatrixCompletion(rank=1).fit(given.dropna()).model_.posterior.n_ratings == 5
    # a matrix of three columns, with holes that ids cannot have or handed over as one
    holes = pd.DataFrame({"a": [1, None, 2], "b": [1, 2, 3], "c": [None, 2, 4]}, dtype="Int64")
    for matrix, count in ((holes, 7), (frame.to_numpy(), 17)):
        assert MatrixCompletion(rank=1).fit(matrix).model_.posterior.n_ratings == count


@pytest.mark.parametrize("kind", [float, int, bool])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_what_a_sparse_frame_does_not_store_is_not_taken_for_zero(kind, width):
    """``from_spmatrix`` fills with 0 what a sparse matrix has not observed; filled with NaN it is a hole."""
    rng = np.random.default_rng(0)
    matrix = sp.coo_array(np.where(rng.random((12, width)) < 0.6, 1 + rng.random((12, width)), 0.0))
    frame = pd.DataFrame.sparse.from_spmatrix(matrix.astype(kind), columns=[f"c{k}" for k in range(width)])
    fill = {float: r"0(\.0)?", int: "0", bool: "(False|0)"}[kind]  # 0 with pandas 2.0
    message = rf"column 'c0' is sparse with the fill value {fill}, .* X\.sparse\.to_coo\(\) .* X\.sparse\.to_dense\(\)"
    for model in (MatrixCompletion(1), MatrixCompletionCV(ranks=(1,), cv=2)):
        with pytest.raises(ValueError, match=message):
            model.fit(frame)
    assert MatrixCompletion(1).fit(frame.sparse.to_coo()).model_.posterior.n_ratings == matrix.nnz
    holes = frame.sparse.to_dense().astype(float).where(matrix.toarray() != 0)
    model = MatrixCompletion(1).fit(holes.astype(pd.SparseDtype(float, np.nan)))
    assert model.model_.posterior.n_ratings == matrix.nnz


def test_point_has_no_error_bars():
    model = MatrixCompletion(rank=1).fit(PAIRS, VALUES)
    model.model_.inference = "point"
    with pytest.raises(ValueError, match="return_std needs inference='variational'"):
        model.predict(PAIRS, return_std=True)


@pytest.mark.parametrize("extra", ["timestamp", None])
def test_a_list_of_entries_that_is_read_as_a_matrix_is_told_how_to_come(extra):
    draw = np.random.default_rng(0)
    entries = {"user": draw.integers(0, 9, 60), "item": draw.integers(0, 9, 60), "rating": draw.integers(1, 6, 60)}
    frame = pd.DataFrame(entries | ({} if extra is None else {extra: np.arange(60)}))
    X = frame if extra else frame.to_numpy()
    with pytest.raises(ValueError, match=r"got 10; choose a smaller one; or, if .* fit\(X\[\['user', 'item'\]\], X"):
        MatrixCompletion().fit(X)
    matrix = np.where(draw.random((60, 4)) < 0.5, np.nan, 1.0)
    with pytest.raises(ValueError, match=r"got 10; choose a smaller one$"):
        MatrixCompletion().fit(matrix)
    MatrixCompletion(rank=2, duplicates="mean").fit(frame[["user", "item"]], frame["rating"])
