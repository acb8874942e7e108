"""Tiles change where ratings lie, and nothing else: orders, selections, sums and fits are those of the plain layout."""

import numpy as np
import pytest
import torch

from fisherfold.completion import CompletionProblem, Ratings, tiled
from fisherfold.completion import kernels as completion_kernels
from fisherfold.completion.tiled import TiledGrouped
from fisherfold.completion.variational import fit_variational


def entries(kind):
    rng = np.random.default_rng(0)
    rows, columns = np.nonzero(rng.random((53, 17)) < 0.15)
    columns[rows == 5] = 3
    values = rng.integers(1, 6, len(rows)).astype(float) if kind == "codes" else rng.standard_normal(len(rows))
    return rows, columns, values


def both(kind, dtype, monkeypatch):
    """The same ratings plainly and in tiles of four rows, the order by column being the tiled one."""
    plain = Ratings(*entries(kind), shape=(55, 18), dtype=dtype, duplicates="last")
    monkeypatch.setattr(tiled, "WIDTH", 4)
    monkeypatch.setattr(tiled, "_ENOUGH_RATINGS", 1)
    monkeypatch.setattr(tiled, "_SHORTEST_RUN", 0)
    monkeypatch.setattr(tiled, "_GROUP_RUN", 11)
    return plain, Ratings(*entries(kind), shape=(55, 18), dtype=dtype, duplicates="last")


@pytest.mark.parametrize(("kind", "dtype"), [("raw", torch.float32), ("codes", torch.float64)])
def test_tiles_hold_the_same_ratings(kind, dtype, monkeypatch):
    plain, laid_out = both(kind, dtype, monkeypatch)
    one, other = plain.by_column, laid_out.by_column
    assert isinstance(other, TiledGrouped)
    assert len(other.tiles) == 14
    assert not torch.equal(one.stored_indices, other.stored_indices)
    assert torch.equal(one.offsets, other.offsets)
    for start, stop in ((0, None), (3, 40), (17, 18), (5, 5)):
        assert torch.equal(one.indices(start, stop), other.indices(start, stop))
        assert torch.equal(one.values(start, stop), other.values(start, stop))
        assert torch.equal(one.groups(start, stop), other.groups(start, stop))
    chosen = torch.tensor([16, 2, 2, 17])
    for a, b in zip((one.take(chosen),), (other.take(chosen),), strict=True):
        assert torch.equal(a.offsets, b.offsets)
        assert torch.equal(a.stored_indices, b.stored_indices)
        assert torch.equal(a.stored_values, b.stored_values)
    assert laid_out.nbytes - plain.nbytes == 4 * 14 * 19
    elsewhere = other.to("cpu")
    assert type(elsewhere) is type(one)
    assert torch.equal(elsewhere.stored_indices, one.stored_indices)
    assert torch.equal(elsewhere.stored_values, one.stored_values)


@pytest.mark.parametrize(("kind", "dtype"), [("raw", torch.float32), ("codes", torch.float64)])
def test_sums_over_tiles_equal_sums_over_groups(kind, dtype, monkeypatch):
    plain, laid_out = both(kind, dtype, monkeypatch)
    table = torch.randn(55, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)
    for name in ("plain_sum", "value_sum"):
        one, other = (getattr(completion_kernels, name)(r.by_column, table) for r in (plain, laid_out))
        torch.testing.assert_close(one, other)
    squares = [completion_kernels.square_sum(r.by_column, torch.float64) for r in (plain, laid_out)]
    torch.testing.assert_close(*squares)
    part = laid_out.by_column.sums({1: table}, 4, 9)[0]
    torch.testing.assert_close(part, completion_kernels.value_sum(plain.by_column, table)[4:9])


def test_problems_and_fits_do_not_see_the_tiles(monkeypatch):
    plain, laid_out = both("codes", torch.float64, monkeypatch)
    found = []
    for ratings in (plain, laid_out):
        problem = CompletionProblem(ratings, 2, ridge=0.1)
        x = problem.manifold.random_point(generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        v = problem.manifold.random_tangent(x, generator=torch.Generator().manual_seed(1))
        batch = torch.tensor([3, 50, 3])
        posterior = fit_variational(ratings, 2, max_iter=3, tol=0.0)
        found.append([
            *problem.loss_and_gradient(x), *problem.loss_and_gradient(x, batch),
            *(problem.fisher(x, b, kind=kind).matvec(v) for b in (None, batch) for kind in problem.fisher_kinds),
            posterior.rows.mean, posterior.columns.mean,
        ])  # fmt: skip
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_small_tables_are_not_tiled():
    rng = np.random.default_rng(0)
    ratings = Ratings(np.arange(50_000), rng.integers(0, 5, 50_000), rng.random(50_000), dtype=torch.float32)
    assert not isinstance(ratings.by_column, TiledGrouped)
