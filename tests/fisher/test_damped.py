"""Damped inverses against torch.linalg.inv, and the errors of what has none."""

import pytest
import torch

from fisherfold.fisher.damped import (
    FactorError,
    KroneckerSpectrum,
    Spectrum,
    damped_blocks,
    damped_inverse,
    eigen,
)


def normal(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def semidefinite(order, rank, seed=0):
    rows = normal(rank, order, seed=seed)
    return rows.mT @ rows


@pytest.mark.parametrize("damping", [0.3, 10.0])
@pytest.mark.parametrize("rank", [2, 6])
def test_a_damped_solve_is_the_dense_inverse(rank, damping):
    rows, g = normal(rank, 6), normal(6, seed=1)
    expected = torch.linalg.solve(rows.mT @ rows + damping * torch.eye(6).double(), g)
    torch.testing.assert_close(Spectrum.of(rows.mT @ rows).solve(g, damping), expected)
    torch.testing.assert_close(Spectrum.of_rows(rows).solve(g, damping), expected)
    inverse = damped_inverse(rows.mT @ rows, damping)
    torch.testing.assert_close(inverse @ g, expected)


def test_without_damping_it_is_the_pseudo_inverse():
    matrix, g = semidefinite(6, 3), normal(6, seed=1)
    expected = torch.linalg.pinv(matrix, rtol=1e-10, hermitian=True) @ g
    torch.testing.assert_close(Spectrum.of(matrix).solve(g, 0.0), expected)


def test_an_indefinite_matrix_keeps_its_signs():
    matrix, g = torch.diag(torch.tensor([-2.0, 1.0, 3.0]).double()), torch.ones(3).double()
    expected = torch.tensor([1 / 3, 1 / 6, 1 / 8]).double()
    torch.testing.assert_close(Spectrum.of(matrix).solve(g, 5.0), expected)


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("damping", [0.5, 4.0])
def test_a_kronecker_product_is_solved_as_its_matrix(keep, damping):
    """Also on leading eigenpairs, which stand for a matrix of lower rank."""
    left, right, g = semidefinite(4, 4), semidefinite(3, 3, seed=1), normal(4, 3, seed=2)
    spectra = []
    for matrix, count in ((left, keep + 1), (right, keep)):
        values, vectors = eigen(matrix)
        spectra.append(Spectrum(values[-count:], vectors[:, -count:]))
    low, high = ((s.vectors * s.values) @ s.vectors.mT for s in spectra)
    full = 0.7 * torch.kron(low.contiguous(), high.contiguous())
    expected = torch.linalg.solve(full + damping * torch.eye(12).double(), g.reshape(-1))
    found = KroneckerSpectrum(*spectra, 0.7).solve(g, damping)
    torch.testing.assert_close(found.reshape(-1), expected)


def test_a_factor_that_is_the_identity():
    right, g = semidefinite(3, 3), normal(4, 3, seed=2)
    spectrum = KroneckerSpectrum(Spectrum.identity(g[:, 0]), Spectrum.of(right))
    expected = g @ torch.linalg.inv(right + 2 * torch.eye(3).double())
    torch.testing.assert_close(spectrum.solve(g, 2.0), expected)


def test_rounding_outside_of_the_range_is_not_divided_by_the_damping():
    matrix = semidefinite(6, 2)
    g = matrix @ normal(6, seed=1)
    found = Spectrum.of(matrix).solve(g, 1e-14)
    expected = torch.linalg.pinv(matrix, rtol=1e-10, hermitian=True) @ g
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [3, 500])
def test_small_blocks_are_inverted_and_singular_ones_told(count):
    rows = normal(count, 5, 4)
    blocks = rows.mT @ rows
    inverse, singular = damped_blocks(blocks, 0.2)
    torch.testing.assert_close(inverse, torch.linalg.inv(blocks + 0.2 * torch.eye(4).double()))
    assert not singular
    blocks[0] = 0
    assert damped_blocks(blocks, 0.0)[1]


def test_what_is_not_finite_is_named():
    broken = torch.full((3, 3), torch.nan, dtype=torch.float64)
    with pytest.raises(FactorError, match=r"no eigendecomposition of A \(order 3\)"):
        eigen(broken, name="A")
    with pytest.raises(FactorError, match=r"Cholesky factorisation of A .* with damping up to 100"):
        damped_inverse(broken, 1.0, name="A")
    assert issubclass(FactorError, torch.linalg.LinAlgError)
