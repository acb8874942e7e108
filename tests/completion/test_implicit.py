"""Implicit feedback: the loss over all pairs against a dense reference, and the estimator against its promises."""

import itertools
import json

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
from fisherfold.completion.inference.gram import moments
from fisherfold.completion.inference.implicit import _update_side, fit_implicit, new_rows
from fisherfold.completion.inference.packed import pack, unpack
from fisherfold.completion.inference.posterior import Side
from toy import two_tastes

N, M, RANK, ALPHA = 7, 6, 2, 1.5


def table(seed=0):
    rng = np.random.default_rng(seed)
    seen = np.nonzero(rng.random((N, M)) < 0.4)
    return Ratings(*seen, rng.uniform(0.5, 2.0, len(seen[0])), shape=(N, M)), np.random.default_rng(
        1
    )


def side(rng, n, counts):
    mean, root = (
        torch.from_numpy(rng.normal(size=(n, RANK + 1))),
        rng.normal(size=(n, RANK + 1, RANK + 1)),
    )
    found = Side.start(mean, counts, torch.ones(RANK + 1), has_offset=True)
    found.covariance = pack(torch.from_numpy(root @ root.transpose(0, 2, 1)))
    found.center = torch.from_numpy(rng.normal(size=RANK + 1))
    return found


def test_an_update_is_the_optimum_over_all_pairs():
    """Row by row with every column written out: weight w of "1" where observed, weight alpha of "0" everywhere."""
    ratings, rng = table()
    rows, columns = side(rng, N, ratings.row_counts), side(rng, M, ratings.column_counts)
    tau, (mean_v, cov_v) = 3.0, (columns.mean.clone(), unpack(columns.covariance))
    _, loss = _update_side(rows, moments(mean_v, columns.covariance), ratings.by_row, tau, ALPHA)
    weights = torch.zeros(N, M, dtype=torch.float64)
    i, j, w = ratings.entries()
    weights[i.long(), j.long()] = w
    for r in range(N):
        precision, pull = rows.precision.clone(), rows.precision @ rows.center
        for c in range(M):
            one = torch.cat([mean_v[c, :-1], torch.ones(1, dtype=torch.float64)])
            second, known = torch.outer(one, one), mean_v[c, -1] * one
            second[:-1, :-1] += cov_v[c][:-1, :-1]
            known[:-1] += cov_v[c][:-1, -1]
            precision = precision + tau * (weights[r, c] + ALPHA) * second
            pull = pull + tau * (weights[r, c] * one - (weights[r, c] + ALPHA) * known)
        torch.testing.assert_close(
            unpack(rows.covariance)[r], torch.linalg.inv(precision), rtol=0, atol=1e-10
        )
        torch.testing.assert_close(
            rows.mean[r], torch.linalg.solve(precision, pull), rtol=0, atol=1e-10
        )
    # the expected loss, by draws from both posteriors
    generator, draws = torch.Generator().manual_seed(0), 40_000
    u, v = (
        mean[:, None]
        + torch.randn(len(mean), draws, RANK + 1, generator=generator, dtype=torch.float64)
        @ root.mT
        for mean, root in (
            (rows.mean, torch.linalg.cholesky(unpack(rows.covariance))),
            (mean_v, torch.linalg.cholesky(cov_v)),
        )
    )
    p = (
        torch.einsum("rdk,cdk->rcd", u[..., :-1], v[..., :-1])
        + u[:, None, :, -1]
        + v[None, :, :, -1]
    )
    drawn = (weights[..., None] * (1 - p) ** 2 + ALPHA * p**2).sum(1)
    error = 5 * drawn.std(1) / draws**0.5
    assert bool(((drawn.mean(1) - loss).abs() < error).all())


def test_the_bound_rises_and_the_fit_is_repeatable():
    ratings, _ = table()
    posterior = fit_implicit(ratings, RANK, max_iter=30, tol=0.0)
    bounds = [row["bound"] for row in posterior.trace]
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(bounds))
    assert torch.equal(
        posterior.rows.mean, fit_implicit(ratings, RANK, max_iter=30, tol=0.0).rows.mean
    )


def test_a_row_of_the_fit_folded_in_again_is_the_same():
    ratings, _ = table()
    posterior = fit_implicit(ratings, RANK, max_iter=300, tol=1e-12)
    again = new_rows(posterior, ratings, 4.0)
    rated = ratings.row_counts > 0
    torch.testing.assert_close(again.mean[rated], posterior.rows.mean[rated], rtol=0, atol=1e-3)
    nobody = new_rows(posterior, ratings.like(*(torch.zeros(0),) * 3), 4.0)
    torch.testing.assert_close(
        nobody.mean, posterior.rows.center.expand(N, -1).to(nobody.mean), rtol=0, atol=0
    )


@pytest.fixture(scope="module")
def fitted():
    kept, held = two_tastes()
    return ImplicitCompletion(rank=3).fit(kept), kept, held


def test_recommendations_follow_the_taste(fitted):
    model, kept, held = fitted
    lists = model.recommend(k=1)
    assert bool((lists["row"] % 2 == lists["column"] % 2).all())
    assert not set(zip(lists["row"].to_list(), lists["column"].to_list(), strict=True)) & set(kept)
    assert model.score(held) > 3 * ImplicitCompletion(rank=1).fit(
        [(0, i) for i in range(20)]
    ).score(held)
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
        found.predict(np.array(held)), model.predict(np.array(held)), rtol=1e-3, atol=1e-4
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
    np.testing.assert_allclose(half.predict(held), model.predict(held), rtol=1e-2, atol=1e-3)


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
            "weights of observed pairs must be positive, got 0; leave",
        ),
        (
            lambda: ImplicitCompletion(unobserved_weight=0).fit([(0, 1)]),
            "unobserved_weight must be",
        ),
        (lambda: ImplicitCompletion(rank=0).fit([(0, 1)]), "rank must be"),
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
        ImplicitCompletion().fit(two_tastes()[0])


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
