"""Implicit feedback: the loss over all cells against a dense reference, and the estimator against its promises."""

import itertools
import json
import math

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
import torch
from typer.testing import CliRunner

from fisherfold import ImplicitCompletion, MatrixCompletion
from fisherfold.cli import app
from fisherfold.completion import Ratings
from fisherfold.completion.implicit_search import HeldOut
from fisherfold.completion.inference.implicit import Blocks, HalfPass, ImplicitFit, Loss, half_pass
from fisherfold.completion.metrics import ranking_metrics
from toy import two_tastes

N, M, RANK = 9, 7, 3


def table(seed=0, share=0.4):
    """A small table with weights, a quarter of them dislikes, one row without pairs and one with all."""
    rng = np.random.default_rng(seed)
    seen = rng.random((N, M)) < share
    seen[0], seen[1] = False, True
    i, j = np.nonzero(seen)
    weights = rng.uniform(0.5, 2.0, len(i)) * np.where(rng.random(len(i)) < 0.25, -1, 1)
    return Ratings(i, j, weights, shape=(N, M))


@pytest.mark.parametrize("prior", [False, True])
@pytest.mark.parametrize("rank", [2, RANK, 12])
def test_rows_and_their_variances_are_those_of_the_normal_equations(rank, prior):
    """Long rows, short ones in the space of their pairs, and rows without any, against a dense solution."""
    ratings, generator = table(), torch.Generator().manual_seed(1)
    v = torch.randn(M, rank, generator=generator, dtype=torch.float64)
    t = torch.rand(M, generator=generator, dtype=torch.float64) + 0.5
    alpha = torch.rand(N, generator=generator, dtype=torch.float64)
    mean = torch.randn(N, rank, generator=generator, dtype=torch.float64) if prior else None
    problem = HalfPass(v, Blocks(ratings.by_row), alpha, 0.7, t, mean)
    found, variances = problem.solve(), problem.variances()
    basis = torch.linalg.eigh((v * t[:, None]).T @ v)[1]
    dense = torch.zeros(N, M, dtype=torch.float64)
    groups = ratings.by_row
    dense[groups.groups().long(), groups.indices().long()] = groups.values()
    for i in range(1, N):
        weights = dense[i].abs()
        ridge = 0.7 * torch.eye(rank, dtype=torch.float64)
        a = v.T @ ((weights + alpha[i] * t)[:, None] * v) + ridge
        b = v.T @ (weights * (dense[i] > 0))
        b = b if mean is None else b + 0.7 * mean[i]
        torch.testing.assert_close(found[i], torch.linalg.solve(a, b), rtol=1e-9, atol=1e-9)
        if rank <= M:  # else the basis of the null space is not determined
            turned = (basis.T @ torch.linalg.inv(a) @ basis).diagonal()
            expected = basis.square() @ turned
            torch.testing.assert_close(variances[i], expected, rtol=1e-9, atol=1e-9)


def loss_of(factors, ratings, loss):
    """The loss with every cell written out."""
    dense = torch.zeros(ratings.shape, dtype=torch.float64)
    groups = ratings.by_row
    dense[groups.groups().long(), groups.indices().long()] = groups.values()
    p = factors.rows @ factors.columns.T
    missing = factors.alpha * (factors.column_missing * p.square()).sum()
    observed = (dense.abs() * ((dense > 0).double() - p).square()).sum()
    norms = factors.rows.square().sum() + factors.columns.square().sum()
    return float(missing + observed), float(missing + observed + factors.ridge * norms)


def test_every_pass_lowers_the_loss_and_the_fit_is_repeatable():
    ratings, loss = table(), Loss(3.0, 0.2, 0.5)
    found = []
    fit = ImplicitFit(ratings, loss, RANK, seed=3)
    factors = fit.run(8, lambda _, f: found.append(loss_of(f, ratings, loss)[1]))
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(found))
    total = float(ratings.by_row.values().abs().sum())
    cells = factors.alpha * N * M
    assert cells == pytest.approx(3.0 * total)
    assert factors.noise == pytest.approx(loss_of(factors, ratings, loss)[0] / (total + cells))
    again = ImplicitFit(ratings, loss, RANK, seed=3).run(8)
    assert torch.equal(factors.rows, again.rows)


def test_the_unit_of_weights_does_not_matter():
    ratings = table()
    i, j, w = (part.numpy() for part in ratings.entries())
    large = Ratings(i, j, 1e6 * w, shape=(N, M))
    one, two = (ImplicitFit(each, Loss(3.0, 0.2, 0.5), RANK).run(5) for each in (ratings, large))
    torch.testing.assert_close(one.rows @ one.columns.T, two.rows @ two.columns.T)


def test_threads_change_nothing_but_rounding():
    rng = np.random.default_rng(0)
    i, j = np.nonzero(rng.random((400, 300)) < 0.05)
    ratings = Ratings(i, j, np.ones(len(i)), shape=(400, 300))
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(ImplicitFit(ratings, Loss(10.0, 1.0, 0.25), 8).run(3).rows)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_a_row_of_the_fit_folded_in_again_is_the_same():
    ratings = table()
    factors = ImplicitFit(ratings, Loss(3.0, 0.2, 0.5), RANK).run(400)
    again = half_pass(factors, Blocks(ratings.by_row), of_columns=False).solve()
    torch.testing.assert_close(again, factors.rows, rtol=0, atol=1e-3)


def test_the_held_out_metric_is_that_of_ranking_metrics():
    rng = np.random.default_rng(0)
    i, j = np.nonzero(rng.random((40, 30)) < 0.4)
    ratings = Ratings(i, j, np.ones(len(i)), shape=(40, 30))
    held = HeldOut(ratings, 0.3, 0)
    scores = torch.from_numpy(rng.random((40, 30)))
    rest = held.rest.by_row
    masked = scores.clone()
    masked[rest.groups().long(), rest.indices().long()] = -math.inf
    order = masked.argsort(1, descending=True)[:, :20]
    pairs = [(r, int(c)) for r in range(40) for c in order[r] if masked[r, c] > -math.inf]
    relevant = np.divmod(held.keys.numpy(), 30)
    expected = ranking_metrics(tuple(zip(*pairs, strict=True)), relevant, 20)["ndcg"]
    assert held.ndcg(lambda rows: scores[rows].clone()) == pytest.approx(expected)
    assert held.n_pairs + held.rest.n_ratings == len(i)


def groups_of_taste(n=300, m=120, groups=6, seed=0):
    """Rows of six tastes take some columns of their taste and few others."""
    rng = np.random.default_rng(seed)
    own = np.arange(n)[:, None] % groups == np.arange(m) % groups
    return np.argwhere(rng.random((n, m)) < np.where(own, 0.6, 0.03)), groups


def test_settings_are_learnt_and_lists_are_as_good_as_the_truth():
    pairs, groups = groups_of_taste()
    rng = np.random.default_rng(1)
    held = rng.random(len(pairs)) < 0.2
    model = ImplicitCompletion().fit(pairs[~held])
    assert model.rank_ <= 120
    assert {"ridge", "unobserved_weight", "popularity", "rank", "ndcg"} <= set(model.search_[0])
    truth = [(u, i) for u in range(300) for i in range(120) if u % groups == i % groups]
    known = set(map(tuple, pairs[~held].tolist()))
    lists = tuple(zip(*[pair for pair in truth if pair not in known], strict=True))
    best = ranking_metrics(lists, tuple(pairs[held].T), 5)["recall"]
    found = model.ranking_metrics(pairs[held], k=(5, 10))
    assert found["recall@5"] > 0.9 * best
    assert found["recall@10"] >= found["recall@5"]
    folds = ImplicitCompletion(rank=8, validation=0).cross_validate(pairs, k=5)
    assert len(folds) == 3
    assert all(fold["recall"] > 0.1 for fold in folds)
    times = rng.random(len(pairs))
    assert len(ImplicitCompletion(rank=8, validation=0).cross_validate(pairs, time=times)) == 3


def test_features_place_columns_and_rows_that_have_no_pairs():
    pairs, groups = groups_of_taste()
    pairs = pairs[(pairs[:, 1] >= 12) & (pairs[:, 0] >= 6)]
    of_columns = np.arange(120), np.eye(groups)[np.arange(120) % groups]
    of_rows = np.arange(300), np.eye(groups)[np.arange(300) % groups]
    model = ImplicitCompletion(rank=8, validation=0)
    model.fit(pairs, row_features=of_rows, column_features=of_columns)
    lists = model.recommend(range(60), 2, candidates=range(12)).to_numpy()
    assert (lists[:, 0] % groups == lists[:, 1] % groups).all()


def test_known_dislikes_lower_scores():
    pairs, _ = groups_of_taste()
    weights = np.ones(len(pairs) + 1)
    weights[-1] = -50.0
    asked = [(0, 6)]
    kept = pairs[~((pairs == asked[0]).all(1))]
    model = ImplicitCompletion(rank=8, validation=0)
    before = model.fit(kept).predict(asked)
    after = model.fit(np.concatenate([kept, asked]), weights[-len(kept) - 1 :])
    assert after.predict(asked) < 0.7 * before
    assert (0, 6) not in set(map(tuple, after.recommend(0, 50).to_numpy()[:, :2].astype(int)))


def test_draws_have_the_means_and_error_bars_of_the_scores():
    pairs, _ = groups_of_taste()
    model = ImplicitCompletion(rank=8, validation=0).fit(pairs)
    draws = [model.recommend(0, 120, by="sample", seed=seed).sort("column") for seed in range(200)]
    scores = np.array([draw["score"].to_numpy() for draw in draws])
    asked = [(0, column) for column in draws[0]["column"].to_list()]
    mean, std = model.predict(asked, return_std=True)
    assert np.abs(scores.mean(0) - mean).max() < 5 * std.max() / 200**0.5
    np.testing.assert_allclose(scores.std(0), std, rtol=0.35)


@pytest.fixture(scope="module")
def fitted():
    kept, held = two_tastes()
    return ImplicitCompletion(rank=3).fit(kept), kept, held


def test_recommendations_follow_the_taste(fitted):
    model, kept, held = fitted
    lists = model.recommend(k=1)
    assert bool((lists["row"] % 2 == lists["column"] % 2).all())
    assert not set(zip(lists["row"].to_list(), lists["column"].to_list(), strict=True)) & set(kept)
    assert model.score(held) > 0.5
    fresh = model.recommend_new({2: 1.0, 4: 1.0}, k=5)
    assert bool((fresh["column"] % 2 == 0).all())
    assert bool((model.similar(3, k=4)["similar"] % 2 == 1).all())
    for by in ("upper", "sample"):
        assert len(model.recommend(1, k=3, by=by, seed=0)) == 3


@pytest.mark.parametrize(
    "kind",
    ["pairs", "array", "pandas", "polars", "named", "times", "weights", "sparse", "with weights"],
)
def test_every_form_of_input_gives_the_same_fit(fitted, kind):
    model, kept, held = fitted
    users, items = (list(part) for part in zip(*kept, strict=True))
    ones = np.ones(len(users))
    given = {
        "pairs": (kept,),
        "array": (np.array(kept),),
        "weights": (np.array(kept), ones),
        "pandas": (pd.DataFrame({"user": users, "item": items}),),
        "polars": (pl.DataFrame({"user": users, "item": items}),),
        "with weights": (pl.DataFrame({"user": users, "item": items, "rating": ones}),),
        "times": (pd.DataFrame({"timestamp": range(len(users)), "item": items, "user": users}),),
        "named": (pl.DataFrame({"when": users, "who": users, "what": items}),),
        "sparse": (scipy.sparse.csr_array((ones, (users, items)), shape=(60, 20)),),
    }[kind]
    options = {"columns": ("who", "what")} if kind == "named" else {}
    found = ImplicitCompletion(rank=3).fit(*given, **options)
    np.testing.assert_allclose(
        found.predict(np.array(held)), model.predict(np.array(held)), rtol=0.05, atol=0.02
    )


def test_files_and_later_pairs(fitted, tmp_path):
    model, kept, held = fitted
    model.save(tmp_path / "model")
    for loader in (ImplicitCompletion, MatrixCompletion):
        again = loader.load(tmp_path / "model")
        assert type(again) is ImplicitCompletion
        assert again.get_params() == model.get_params()
        assert np.array_equal(again.predict(held), model.predict(held))
        assert again.recommend_new({2: 1.0}).equals(model.recommend_new({2: 1.0}))
        new = again.recommend_new(
            pl.DataFrame({"item": [2, 3], "user": ["ann", "bob"], "timestamp": [5, 6]}), 4
        )
        assert (new["column"] % 2).to_list() == [0] * 4 + [1] * 4
    half = ImplicitCompletion(rank=3).partial_fit(kept[::2]).partial_fit(kept[1::2])
    assert half.score(held) == pytest.approx(model.score(held), abs=0.1)


def test_repeated_pairs_add_up():
    kept, held = two_tastes()
    twice = ImplicitCompletion(rank=2).fit(kept + kept)
    weighted = ImplicitCompletion(rank=2).fit(kept, np.full(len(kept), 2.0))
    np.testing.assert_allclose(twice.predict(held), weighted.predict(held), rtol=1e-4, atol=1e-5)
    assert twice.n_duplicates_ == len(kept)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ImplicitCompletion().fit([(0, 1)], [0.0]),
            r"weights of pairs must lie between 1e-12 and 1e\+12 .*, got 0; leave",
        ),
        (
            lambda: ImplicitCompletion(unobserved_weight=0).fit([(0, 1)]),
            "unobserved_weight must be",
        ),
        (lambda: ImplicitCompletion(rank=0).fit([(0, 1)]), "rank must be"),
        (lambda: ImplicitCompletion().fit([(0, 1)], [1e300]), "got 1e[+]300; .*by their median"),
        (lambda: ImplicitCompletion().fit([(0, 1)], [1e-300]), "got 1e-300; .*by their median"),
        (lambda: ImplicitCompletion().fit([(0, 1)], [-1.0]), "no observed pairs: all weights are"),
        (
            lambda: ImplicitCompletion(duplicates="error").fit([(0, 1)]),
            "duplicates must be one of sum, mean",
        ),
        (lambda: ImplicitCompletion().recommend(0), "not fitted"),
        (lambda: ImplicitCompletion().fit_share([(0, 1)]), "one process"),
    ],
)
def test_mistakes_have_clear_messages(call, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        call()


def test_a_rank_above_the_table_is_reduced_with_a_warning():
    with pytest.warns(
        UserWarning, match="rank=32 is more than a table of 60 x 20 allows; rank=20 is used"
    ):
        ImplicitCompletion(rank=32).fit(two_tastes()[0])


def test_the_command_line_fits_and_recommends(tmp_path):
    path, folder = tmp_path / "plays.csv", tmp_path / "model"
    path.write_text("\n".join(["user,item,plays", *(f"{u},{i},1" for u, i in two_tastes()[0])]))
    words = ["complete", "fit", str(path), "-o", str(folder), "--implicit", "--rank", "3"]
    run = CliRunner().invoke(app, [*words, "--json"])
    assert json.loads(run.stdout)["rank"] == 3
    assert ImplicitCompletion.load(folder).names_ == ("user", "item", "plays")
    run = CliRunner().invoke(app, ["complete", "recommend", str(folder), "4", "-k", "2", "-o", "-"])
    assert run.exit_code == 0
    assert len(run.stdout.splitlines()) == 3
    run = CliRunner().invoke(app, [*words, "--inference", "point"])
    assert "--inference is for ratings and has no meaning with --implicit" in str(run.exception)


def test_ratings_for_weights_are_remarked_upon():
    kept, _ = two_tastes()
    stars = np.random.default_rng(0).choice(
        [1.0, 2.0, 3.0, 4.0, 5.0], len(kept), p=[0.1, 0.1, 0.2, 0.3, 0.3]
    )
    with pytest.warns(
        UserWarning, match="5 steps from 1 to 5, as ratings are: here every pair counts"
    ):
        ImplicitCompletion(rank=2).fit(kept, stars)
