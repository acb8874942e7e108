"""Item-to-item models and the blend: closed forms against dense references, and what they promise when served."""

import numpy as np
import pytest
import scipy.sparse

from fisherfold.completion import ImplicitBlend, ImplicitCompletion, ItemToItem
from fisherfold.completion.item_to_item import dense_weights, sparse_weights
from toy import two_tastes


def random_table(n=40, m=25, seed=0):
    rng = np.random.default_rng(seed)
    dense = (rng.random((n, m)) < 0.3) * rng.uniform(0.5, 2, (n, m))
    dense[0] = 0
    dense[1] = 1
    return dense


@pytest.mark.parametrize("ridge", [0.1, 3.0])
def test_dense_weights_solve_the_regression_of_each_column_on_all_others(ridge):
    dense = random_table()
    found = dense_weights(scipy.sparse.csr_array(dense), ridge).numpy()
    gram = dense.T @ dense
    strength = ridge * gram.diagonal().mean()
    for j in range(gram.shape[0]):
        rest = np.delete(np.arange(gram.shape[0]), j)
        a = gram[np.ix_(rest, rest)] + strength * np.eye(len(rest))
        np.testing.assert_allclose(found[rest, j], np.linalg.solve(a, gram[rest, j]), atol=1e-10)
        assert found[j, j] == 0


@pytest.mark.parametrize(("degrees", "neighbours"), [((0.3, 0.5), 100), ((0.5, 0.3), 4)])
def test_sparse_weights_are_the_gram_matrix_without_degrees(degrees, neighbours):
    dense = random_table()
    found = sparse_weights(scipy.sparse.csr_array(dense), degrees, neighbours).toarray()
    mean = dense[dense > 0].mean()
    rows = np.maximum(dense.sum(1) / mean, 1e-30)
    columns = dense.sum(0) / mean
    full = dense.T @ (rows ** (-2 * degrees[0]) * dense.T).T
    for i in range(len(full)):
        kept = np.argsort(-full[i], kind="stable")[:neighbours]
        expected = np.zeros(len(full))
        expected[kept] = full[i, kept] * columns[i] ** (-2 * degrees[1])
        np.testing.assert_allclose(found[i], expected, atol=1e-12)


MODELS = [
    lambda: ItemToItem("dense"),
    lambda: ItemToItem("sparse"),
    lambda: ImplicitBlend(3),
]


@pytest.mark.parametrize("make", MODELS)
def test_lists_files_new_rows_and_later_pairs(make, tmp_path):
    kept, held = two_tastes()
    model = make().fit(kept)
    lists = model.recommend(k=1)
    assert bool((lists["row"] % 2 == lists["column"] % 2).all())
    assert not set(zip(lists["row"], lists["column"], strict=True)) & set(kept)
    assert model.score(held) > 0.4
    assert set(model.ranking_metrics(held, k=(5, 10))) >= {"ndcg@5", "recall@10"}
    assert bool((model.recommend_new({2: 1.0, 4: 1.0}, k=4)["column"] % 2 == 0).all())
    assert bool((model.similar(3, k=4)["similar"] % 2 == 1).all())
    model.save(tmp_path / "model")
    again = ImplicitCompletion.load(tmp_path / "model")
    assert type(again) is type(model)
    assert np.array_equal(again.predict(held), model.predict(held))
    assert again.recommend(k=1).equals(lists)
    assert again.recommend_new({2: 1.0}).equals(model.recommend_new({2: 1.0}))
    unknown = model.predict([("nobody", 2), (0, "nothing")])
    assert np.isfinite(unknown).all()
    half = make().fit(kept[::2]).partial_fit(kept[1::2])
    assert half.score(held) == pytest.approx(model.score(held), abs=0.1)


def test_a_score_is_that_of_the_list():
    kept, _ = two_tastes()
    model = ItemToItem("sparse").fit(kept)
    lists = model.recommend(0, k=5)
    pairs = lists.select("row", "column").rows()
    np.testing.assert_allclose(model.predict(pairs), lists["prediction"].to_numpy())


def test_the_blend_is_no_worse_than_its_parts_on_the_held_out_part():
    kept, _ = two_tastes(n=200, m=60)
    model = ImplicitBlend(4).fit(kept)
    tried = {record["item_weight"]: record["ndcg"] for record in model.search_}
    assert tried[model.item_weight_] == max(tried.values())
    assert 0.0 in tried


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ItemToItem("both"), "form must be one of auto, dense, sparse"),
        (lambda: ItemToItem(ridge=0.0), "ridge must be"),
        (lambda: ItemToItem(neighbours=0), "neighbours must be"),
        (lambda: ImplicitBlend(item_weight=-1.0), "item_weight must be"),
    ],
)
def test_mistakes_have_clear_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call().fit([(0, 1)])


def test_what_needs_a_posterior_says_so():
    model = ItemToItem().fit(two_tastes()[0])
    with pytest.raises(ValueError, match="no error bars"):
        model.recommend(0, by="upper")
    with pytest.raises(ValueError, match="no posterior to draw from"):
        model.recommend(0, by="sample")


def test_a_table_too_large_for_the_dense_form_takes_the_sparse_one():
    pairs = np.stack([np.arange(20_001) % 50, np.arange(20_001)], axis=1)
    with pytest.warns(UserWarning, match="20001 columns is too large for form='dense'"):
        model = ItemToItem("dense", validation=0).fit(pairs)
    assert model.form_ == "sparse"
