"""Tables that are mostly full: the dense road gives what the sparse one does; steps that overflow are taken back."""

import numpy as np
import pytest
import torch

from fisherfold import minimize
from fisherfold.completion import CompletionProblem, Ratings
from fisherfold.completion import kernels as kernels
from fisherfold.completion.crowded import CrowdedGrouped, crowded_sum, dense_form, with_dense_form
from fisherfold.completion.packed import outer_table, unpack


def crowded_table(dtype=torch.float64, rows=40, columns=15, share=0.7):
    rng = np.random.default_rng(0)
    seen = np.nonzero(rng.random((rows, columns)) < share)
    return Ratings(*seen, rng.standard_normal(len(seen[0])), shape=(rows, columns), dtype=dtype)


@pytest.mark.parametrize("orientation", ["rows", "columns"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_the_dense_form_changes_no_result(monkeypatch, orientation, dtype, atol):
    ratings = crowded_table(dtype)
    sparse = CompletionProblem(ratings, 3, orientation=orientation)
    monkeypatch.setattr("fisherfold.completion.crowded._FEWEST_CELLS", 0)
    dense = CompletionProblem(ratings, 3, orientation=orientation)
    assert not isinstance(sparse.ratings.by_row, CrowdedGrouped)
    assert isinstance(dense.ratings.by_row, CrowdedGrouped)
    assert isinstance(dense.ratings.by_column, CrowdedGrouped)
    x = sparse.manifold.random_point(generator=torch.Generator().manual_seed(0), dtype=dtype)
    h = sparse.manifold.random_tangent(x, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(dense.loss(x), sparse.loss(x), rtol=0, atol=atol)
    torch.testing.assert_close(dense.gradient(x), sparse.gradient(x), rtol=0, atol=atol)
    for kind in sparse.fisher_kinds:
        mine, other = (problem.fisher(x, kind=kind)._matvec(h) for problem in (dense, sparse))
        torch.testing.assert_close(mine, other, rtol=0, atol=atol)


@pytest.mark.parametrize("small_product", [1, 500, 10**6])
@pytest.mark.parametrize("shape", [(5, 200), (200, 5), (70, 70)])
def test_thin_products_in_pieces(monkeypatch, small_product, shape):
    monkeypatch.setattr("fisherfold.completion.crowded.SMALL_PRODUCT", 64 * small_product)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
    table = torch.randn(shape[1], 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(crowded_sum(matrix, table), matrix @ table, rtol=0, atol=1e-12)
    torch.testing.assert_close(crowded_sum(matrix.T.contiguous().T, table), matrix @ table, rtol=0, atol=1e-12)


def test_which_tables_get_a_dense_form(monkeypatch):
    ratings = crowded_table()
    assert with_dense_form(ratings) is ratings
    monkeypatch.setattr("fisherfold.completion.crowded._FEWEST_CELLS", 0)
    assert with_dense_form(crowded_table(share=0.2)).by_row is not None
    assert not isinstance(with_dense_form(crowded_table(share=0.2)).by_row, CrowdedGrouped)
    whole = with_dense_form(ratings)
    assert with_dense_form(whole) is whole
    filled, mask = dense_form(whole)
    assert dense_form(whole)[0] is filled
    assert int(mask.sum()) == ratings.n_ratings
    assert float(filled.sum()) == pytest.approx(float(ratings.entries()[2].sum()))
    monkeypatch.setattr("fisherfold.completion.crowded._MOST_CELLS", 100)
    assert with_dense_form(ratings) is ratings


def test_products_with_packed_matrices_run_by_run(monkeypatch):
    monkeypatch.setattr("fisherfold.completion.kernels._ROWS", 7)
    generator = torch.Generator().manual_seed(0)
    a, x = torch.randn(2, 30, 4, generator=generator, dtype=torch.float64)
    packed = outer_table(a) + outer_table(a.flip(1))
    expected = (unpack(packed) @ x.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(kernels.matvec(packed, x), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("share", [0.9, 0.25])
@pytest.mark.parametrize("method", ["rsgd", "rsvrg"])
def test_an_epoch_that_overflows_is_taken_back(share, method):
    """A step of 1e300 leaves the finite numbers in crowded and in sparse tables; the run goes on with a smaller one."""
    problem = CompletionProblem(crowded_table(share=share), 2, orientation="rows")
    x = problem.manifold.random_point(generator=torch.Generator().manual_seed(0))
    result = minimize(problem, x, method, step=1e300, batch_size=1, max_iter=3)
    assert result.status in {"max_iter", "non_finite"}
    assert bool(torch.isfinite(result.x).all())
    assert float(problem.loss(result.x)) <= float(problem.loss(x))
