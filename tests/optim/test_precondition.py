"""Damped inverses against dense ones in float64, the error bound of a truncated basis, and solvers that fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fisherfold.optim import precondition, spectral
from fisherfold.optim.precondition import Preconditioner, exact, factored
from fisherfold.optim.spectral import FactorError, damped_inverse, eigen, leading, orthonormalise, spectral_norm


def factor(order: int, *, decay: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random covariance with eigenvalues k^(-decay)."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(order, order, generator=generator, dtype=torch.float64))
    values = torch.arange(1, order + 1, dtype=torch.float64) ** -decay
    return ((q * values) @ q.T).to(dtype)


def gradient(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


def dense_direction(a: Tensor, g: Tensor, damping: float, v: Tensor) -> Tensor:
    system = torch.kron(g, a) + damping * torch.eye(v.numel(), dtype=v.dtype)
    return torch.linalg.solve(system, v.flatten()).reshape(v.shape)


@pytest.mark.parametrize("damping", [1e-6, 0.1, 10.0])
def test_full_basis_is_exact_tikhonov(damping: float) -> None:
    a, g, v = factor(9), factor(6, seed=1), gradient(6, 9)
    inverse = exact(a, g, damping)
    torch.testing.assert_close(inverse.apply(v), dense_direction(a, g, damping, v))
    assert inverse.top == pytest.approx(1 / damping)


def test_factored_damping_is_the_pi_split() -> None:
    a, g, v = factor(9), 4 * factor(6, seed=1), gradient(6, 9)
    pi = float((torch.trace(a) / 9 / (torch.trace(g) / 6)).sqrt())
    left = torch.linalg.inv(g + 0.1**0.5 / pi * torch.eye(6, dtype=torch.float64))
    right = torch.linalg.inv(a + 0.1**0.5 * pi * torch.eye(9, dtype=torch.float64))
    torch.testing.assert_close(factored(a, g, 0.1).apply(v), left @ v @ right)


@pytest.mark.parametrize("tolerance", [0.3, 0.05, 0.01])
@pytest.mark.parametrize("decay", [1.0, 2.0])
def test_truncated_basis_keeps_its_error_bound(tolerance: float, decay: float) -> None:
    """The relative error of the direction is below the tolerance, for any gradient; the estimate says so."""
    a, g = factor(240, decay=decay), factor(96, decay=decay, seed=1)
    reference = exact(a, g, 0.05)
    inverse = exact(a, g, 0.05, tolerance=tolerance)
    for v in (gradient(96, 240), torch.outer(eigen(g)[1][:, 3], eigen(a)[1][:, 5])):
        wanted = reference.apply(v)
        assert float((inverse.apply(v) - wanted).norm() / wanted.norm()) <= tolerance
    assert inverse.error <= 1.1 * tolerance
    if inverse.base is not None:
        assert inverse.right.shape[1] < 120


def test_truncation_saves_where_the_damping_is_large() -> None:
    a, g = factor(240, decay=1.5), factor(96, decay=1.5, seed=1)
    ranks = [exact(a, g, damping, tolerance=0.05).right.shape[1] for damping in (10.0, 0.3, 1e-5)]
    assert ranks[0] < ranks[1] < ranks[2] == 240


def test_fixed_rank_reports_what_it_leaves_out() -> None:
    a, g = factor(320), factor(16, seed=1)
    inverse = exact(a, g, 0.05, rank=1 / 16, tolerance=0.05)
    assert inverse.right.shape == (320, 20)
    assert inverse.left.shape == (16, 16)
    assert inverse.error == pytest.approx(1 / 21 / 0.05, rel=0.2)  # the 21st eigenvalue of A over the damping
    small = exact(factor(32), g, 0.05, rank=1 / 16, tolerance=0.05)
    assert small.right.shape == (32, 32)


def test_a_warm_start_finds_the_same_space_when_the_factor_has_moved() -> None:
    a, g = factor(240, decay=2.0), factor(16, decay=2.0, seed=1)
    first = exact(a, g, 0.05, tolerance=0.05)
    moved = a + 0.05 * factor(240, decay=2.0, seed=5)
    warm, v = exact(moved, g, 0.05, tolerance=0.05, start=first), gradient(16, 240)
    wanted = exact(moved, g, 0.05).apply(v)
    assert float((warm.apply(v) - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leading_pairs_are_eigenpairs(dtype: torch.dtype) -> None:
    matrix = factor(200, decay=2.0, dtype=dtype)
    pairs = leading(matrix, 2e-3)
    values = torch.arange(1, 201, dtype=dtype) ** -2.0
    count = len(pairs.values)
    assert 20 <= count <= 25  # eigenvalues above 2e-3: k < 22.4
    torch.testing.assert_close(pairs.values[:15], values[:15], atol=1e-5, rtol=1e-2)
    assert pairs.residual <= 2.2e-3
    torch.testing.assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(count, dtype=dtype), atol=1e-5, rtol=0)


def test_spectral_norm_is_an_upper_estimate() -> None:
    for order in (20, 300):
        assert 1.0 <= spectral_norm(factor(order)) <= 1.06


def test_orthonormal_basis_of_the_same_span() -> None:
    vectors = gradient(50, 7)
    basis = orthonormalise(vectors)
    torch.testing.assert_close(basis.T @ basis, torch.eye(7, dtype=torch.float64))
    torch.testing.assert_close(basis @ (basis.T @ vectors), vectors)


def test_eigensolver_that_fails_or_lies_is_escalated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in float32, then eigenvectors that are not orthonormal in float64: the CPU has the last word."""
    matrix = factor(8, dtype=torch.float32)
    true, seen = torch.linalg.eigh, []

    def faulty(m: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(m.dtype)
        if len(seen) == 1:
            raise torch.linalg.LinAlgError("failed to converge")
        values, vectors = true(m)
        return (values, 2 * vectors) if len(seen) == 2 else (values, vectors)

    monkeypatch.setattr(torch.linalg, "eigh", faulty)
    values, vectors = eigen(matrix)
    assert seen == [torch.float32, torch.float64, torch.float64]
    torch.testing.assert_close((vectors * values) @ vectors.T, matrix)
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (_ for _ in ()).throw(torch.linalg.LinAlgError("no")))
    with pytest.raises(FactorError, match=r"no eigendecomposition of A of conv \(order 8\) succeeded"):
        eigen(matrix, name="A of conv")


def test_cholesky_escalates_damping_then_precision_then_gives_up() -> None:
    indefinite = torch.diag(torch.tensor([1.0, -0.05]))
    inverse = damped_inverse(indefinite, 0.01)  # 0.01 is too little, 0.1 is enough
    torch.testing.assert_close(inverse, torch.diag(torch.tensor([1 / 1.1, 1 / 0.05])), rtol=1e-4, atol=0)
    with pytest.raises(FactorError, match=r"no Cholesky factorisation of G of fc \(order 2\) succeeded"):
        damped_inverse(torch.diag(torch.tensor([1.0, -50.0])), 0.01, name="G of fc")


def test_static_memory_takes_smaller_inverses_and_refuses_larger_ones() -> None:
    a, g, v = factor(240, decay=2.0), factor(96, decay=2.0, seed=1), gradient(96, 240)
    first = exact(a, g, 0.05, tolerance=0.1).with_headroom()
    again = exact(a, g, 0.06, tolerance=0.1)
    place = first.right.data_ptr()
    assert first.fits(again)
    first.write(again)
    assert first.right.data_ptr() == place
    torch.testing.assert_close(first.apply(v), again.apply(v))
    assert not first.fits(exact(a, g, 0.05))


def test_order_of_products_does_not_matter() -> None:
    a, g, v = factor(9), factor(6, seed=1), gradient(6, 9)
    full = exact(a, g, 0.1)
    wide = Preconditioner(full.left, full.right[:, :3], full.coefficients[:, :3], None, 1.0, 0.0)
    narrow = Preconditioner(full.left[:, :2], full.right, full.coefficients[:2], None, 1.0, 0.0)
    for inverse in (wide, narrow):
        direct = inverse.left @ (inverse.coefficients * (inverse.left.T @ v @ inverse.right)) @ inverse.right.T
        torch.testing.assert_close(inverse.apply(v), direct)


def test_small_orders_use_the_full_solver() -> None:
    assert spectral.SMALL >= 32
    pairs = leading(factor(20), 0.21)
    assert len(pairs.values) == 4
    assert pairs.residual == pytest.approx(1 / 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_flat_spectrum_is_seen_without_trying_and_nothing_else_changes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where blocks are not even tried, trying them would have ended with the same full decomposition, to the bit."""
    cases = [(factor(n, decay=d, dtype=dtype), t) for n in (96, 150) for d in (0.0, 0.3, 1.0) for t in (0.01, 0.1, 0.5)]
    seen = [spectral._flat(matrix, 8, threshold) for matrix, threshold in cases]
    assert any(seen)
    assert not all(seen)
    found = [leading(matrix, threshold) for matrix, threshold in cases]
    monkeypatch.setattr(spectral, "_flat", lambda *_: False)
    for (matrix, threshold), mine in zip(cases, found, strict=True):
        tried = leading(matrix, threshold)
        assert torch.equal(mine.values, tried.values)
        assert torch.equal(mine.vectors, tried.vectors)
        assert mine.residual == tried.residual


@pytest.mark.parametrize("decay", [0.0, 0.5, 2.0])
def test_what_is_called_flat_has_large_eigenvalues_beyond_a_third(decay: float) -> None:
    """The bound on what a third of the pairs leaves out is a true one, and tight where all eigenvalues are equal."""
    matrix = factor(96, decay=decay)
    assert not spectral._flat(matrix, 8, 33.0**-decay / 2)
    assert spectral._flat(matrix, 8, 0.3) == (decay == 0.0)


def test_a_full_basis_takes_one_decomposition_of_each_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[int] = []

    def counted(matrix: Tensor, **options: str) -> tuple[Tensor, Tensor]:
        orders.append(len(matrix))
        return eigen(matrix, **options)

    monkeypatch.setattr(spectral, "eigen", counted)
    monkeypatch.setattr(precondition, "eigen", counted)
    a, g = factor(120, decay=0.1), factor(80, decay=0.1, seed=1)
    inverse = exact(a, g, 0.01, tolerance=0.05)
    assert inverse.base is None
    assert orders == [120, 80]
    torch.testing.assert_close(inverse.apply(gradient(80, 120)), exact(a, g, 0.01).apply(gradient(80, 120)))
