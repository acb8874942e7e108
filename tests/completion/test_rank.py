"""The rank that is found on held-out ratings."""

from __future__ import annotations

import numpy as np
import pytest

from fisherfold import MatrixCompletion
from fisherfold.completion.inference.rank import USUAL_RANK, without_some
from fisherfold.completion.ratings import Ratings


def rated(rank, *, rows=300, columns=200, share=0.3, noise=0.3, seed=0):
    """Ratings of a table of a given rank: pairs and values."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns)) / rank**0.5
    table += noise * rng.normal(size=table.shape)
    pairs = np.argwhere(rng.random(table.shape) < share)
    return pairs, table[tuple(pairs.T)]


@pytest.mark.parametrize(("true", "least", "most"), [(2, 2, 16), (12, 12, 40), (24, 24, 80)])
def test_the_rank_follows_the_table(true, least, most):
    pairs, values = rated(true, share=0.5)
    assert least <= MatrixCompletion().fit(pairs, values).rank_ <= most


def test_it_is_as_accurate_as_the_best_given_rank():
    pairs, values = rated(20, share=0.4)
    order = np.random.default_rng(1).permutation(len(values))
    train, test = order[3000:], order[:3000]

    def error(rank):
        model = MatrixCompletion(rank).fit(pairs[train], values[train])
        return np.sqrt(np.mean((model.predict(pairs[test]) - values[test]) ** 2))

    best = min(error(rank) for rank in (5, 10, 20, 40))
    assert error("auto") < 1.02 * best
    assert error(5) > 1.2 * best


@pytest.mark.parametrize(
    ("pairs", "values"),
    [
        ([("ann", "tea")], [3.0]),
        ([("ann", "tea"), ("ann", "rum")], [3.0, 4.0]),
        ([(i, j) for i in range(40) for j in range(40)], np.ones(1600)),
        ([(i, 0) for i in range(1500)], np.arange(1500.0)),
        ([(i, 0) for i in range(1500)] + [(0, j) for j in range(1500)], np.arange(3000.0)),
    ],
    ids=["one rating", "one row", "one value", "one column", "a cross"],
)
def test_small_and_strange_tables(pairs, values):
    model = MatrixCompletion().fit(pairs, values)
    assert 1 <= model.rank_ <= USUAL_RANK
    assert np.isfinite(model.predict(pairs[:3])).all()


def test_held_out_ratings_are_a_part():
    pairs, values = rated(3)
    ratings = Ratings(*pairs.T, values, (300, 200))
    part, (rows, columns, held, _) = without_some(ratings)
    assert part.n_ratings + len(held) == ratings.n_ratings
    assert len(held) == round(0.05 * ratings.n_ratings)
    lookup = dict(zip(map(tuple, pairs.tolist()), values, strict=True))
    found = [lookup[pair] for pair in zip(rows.tolist(), columns.tolist(), strict=True)]
    np.testing.assert_array_equal(held, found)


def test_the_fit_is_that_of_the_rank_found():
    pairs, values = rated(20, share=0.4)
    found = MatrixCompletion().fit(pairs, values)
    given = MatrixCompletion(found.rank_).fit(pairs, values)
    np.testing.assert_array_equal(found.predict(pairs), given.predict(pairs))


def test_it_is_found_anew_when_ratings_have_doubled():
    pairs, values = rated(20, share=0.4)
    model = MatrixCompletion().partial_fit(pairs[:2000], values[:2000])
    assert model.rank_ == USUAL_RANK
    assert model.partial_fit(pairs[2000:], values[2000:]).rank_ > USUAL_RANK
    assert model.rank == "auto"


@pytest.mark.parametrize("options", [{"inference": "point"}, {"ridge": 10.0}])
def test_without_a_search_the_usual_rank_is_taken(options):
    pairs, values = rated(3, share=0.2)
    assert MatrixCompletion(**options).fit(pairs, values).rank_ == USUAL_RANK
