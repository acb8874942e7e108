"""``score`` of a matrix alone: its rows are new rows, each part of their values predicted from the rest."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse as sp
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, cross_val_score

from fisherfold import MatrixCompletion, MatrixCompletionCV

RNG = np.random.default_rng(0)
WHOLE = RNG.normal(size=(60, 2)) @ RNG.normal(size=(2, 20)) + 0.1 * RNG.normal(size=(60, 20))
TABLE = np.where(RNG.random(WHOLE.shape) < 0.6, WHOLE, np.nan)
SPARSE = sp.csr_array(np.nan_to_num(TABLE))


@pytest.mark.parametrize("options", [{}, {"inference": "point"}, {"rated_sets": False, "offsets": "rows"}])
def test_it_is_the_score_of_predict_new_row_by_row(options):
    model = MatrixCompletion(2, dtype="float64", **options).fit(TABLE[:40])
    new, parts = TABLE[40:44], 5
    rows, columns = np.nonzero(~np.isnan(new))
    values = new[rows, columns]
    found = model.model_.from_the_rest(rows, columns, values, parts=parts, clip=True)
    order = np.lexsort((np.random.default_rng(0).random(len(rows)), rows))
    place = np.empty(len(rows), dtype=int)
    place[order] = np.concatenate([np.arange(n) for n in np.bincount(rows)])
    for k, (row, column) in enumerate(zip(rows, columns, strict=True)):
        rest = (rows == row) & (place % parts != place[k] % parts)
        np.testing.assert_allclose(found[k], model.predict_new(columns[rest], values[rest], [column])[0], atol=1e-8)
    assert model.score(new) == r2_score(values, found)


@pytest.mark.parametrize("table", [TABLE, SPARSE, pd.DataFrame(TABLE, index=[f"r{k}" for k in range(60)])])
def test_grid_search_over_the_rows_finds_the_rank(table):
    search = GridSearchCV(MatrixCompletion(), {"rank": [1, 2]}, cv=3).fit(table)
    assert search.best_params_ == {"rank": 2}
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_score_ > 0.9
    assert (cross_val_score(MatrixCompletion(2), table, cv=3) > 0.9).all()


def test_noise_alone_scores_nothing():
    noise = RNG.normal(size=(80, 15))
    assert np.mean(cross_val_score(MatrixCompletion(2), noise, cv=3)) < 0.1


def test_a_row_with_one_value_is_predicted_from_the_prior():
    model = MatrixCompletion(2).fit(TABLE)
    alone = np.full((2, 20), np.nan)
    alone[0, 3], alone[1, 4] = 1.0, -1.0
    expected = r2_score([1.0, -1.0], model.predict([(999, 3), (999, 4)]))
    np.testing.assert_allclose(model.score(alone), expected, rtol=1e-5)


def test_entries_of_known_rows_are_scored_as_predict_does():
    pairs, values = np.argwhere(~np.isnan(TABLE)), TABLE[~np.isnan(TABLE)]
    model = MatrixCompletionCV((1, 2), max_iter=5).fit(pairs, values)
    expected = r2_score(values, model.predict(pairs))
    assert model.score(pairs, values) == expected
    columns = {"r": pairs[:, 0], "c": pairs[:, 1], "v": values}
    assert model.score(pd.DataFrame(columns)) == model.score(pl.DataFrame(columns)) == expected


def test_scoring_changes_nothing_and_says_what_it_cannot():
    model = MatrixCompletion(2).fit(TABLE[:40])
    before = model.predict(np.argwhere(np.ones((40, 20))))
    model.score(TABLE)
    assert np.array_equal(model.predict(np.argwhere(np.ones((40, 20)))), before)
    assert model.model_.posterior.n_ratings == int((~np.isnan(TABLE[:40])).sum())
    with pytest.raises(ValueError, match="sample_weight needs pairs of ids with y, got X alone"):
        model.score(TABLE, sample_weight=np.ones(60))
    with pytest.raises(ValueError, match="R² needs at least 2 values, got 1"):
        model.score(np.array([[1.0, np.nan]]))


def test_pairs_without_a_prediction_have_no_score():
    pairs = np.argwhere(~np.isnan(TABLE))
    values = TABLE[tuple(pairs.T)]
    model = MatrixCompletion(2, unseen="nan").fit(pairs, values)
    asked, given = [(0, 0), (99, 0), (1, 1), (0, 99)], [1.0, 2.0, 3.0, 4.0]
    frame = pd.DataFrame(asked).assign(value=given)
    for score in (lambda: model.score(asked, given), lambda: model.score(frame)):
        with pytest.raises(ValueError, match=r"got NaN for 2 of 4, of ids not seen in fit .* set unseen='prior'"):
            score()
    weight = np.arange(1.0, len(values) + 1)
    assert model.score(pairs, values, weight) == r2_score(values, model.predict(pairs), sample_weight=weight)
