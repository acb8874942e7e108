"""Slim model files: the same predictions without ratings and without covariances of rows."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from fisherfold.completion import ImplicitCompletion, MatrixCompletion
from fisherfold.tables.folders import model_file


def ratings():
    rng = np.random.default_rng(0)
    pairs = np.argwhere(rng.random((60, 20)) < 0.4)
    return pairs, np.round(np.clip(3 + rng.normal(size=len(pairs)), 1, 5))


@pytest.mark.parametrize("likelihood", ["gaussian", "ordered"])
def test_a_slim_model_serves_as_the_whole_one(likelihood, tmp_path):
    pairs, values = ratings()
    model = MatrixCompletion(4, likelihood=likelihood, max_iter=8).fit(pairs, values)
    model.save(tmp_path / "whole")
    model.save(tmp_path / "slim", slim=True)
    whole, small = (model_file(tmp_path / name).stat().st_size for name in ("whole", "slim"))
    assert small < whole
    slim = MatrixCompletion.load(tmp_path / "slim")
    for again in (slim, pickle.loads(pickle.dumps(slim))):
        asked = np.array([(i, j) for i in (0, 7, 999) for j in (1, 2, 999)])
        np.testing.assert_array_equal(again.predict(asked), model.predict(asked))
        lists = again.recommend(k=5, exclude_seen=False)
        assert lists.equals(model.recommend(k=5, exclude_seen=False))
        new = {1: 5.0, 2: 1.0}
        assert again.recommend_new(new).equals(model.recommend_new(new))
        with pytest.raises(ValueError, match="does not keep the ratings"):
            again.recommend(3)
        with pytest.raises(ValueError, match="does not keep the ratings"):
            again.partial_fit(pairs[:3], values[:3])
        if likelihood == "gaussian":
            with pytest.raises(ValueError, match="which a slim model does not keep"):
                again.predict(asked, return_std=True)
            with pytest.raises(ValueError, match="which a slim model does not keep"):
                again.recommend(3, by="upper", exclude_seen=False)
            assert not hasattr(again, "row_covariances_")
        else:
            again.predict(asked, return_std=True)


def test_models_of_observed_pairs_have_no_slim_form(tmp_path):
    model = ImplicitCompletion(1).fit(ratings()[0])
    with pytest.raises(ValueError, match="they have no slim form"):
        model.save(tmp_path / "m", slim=True)
    assert not (tmp_path / "m").exists()
