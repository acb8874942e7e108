"""The sweep inverse of many small matrices."""

from __future__ import annotations

import pytest
import torch

from fisherfold.completion.inference.packed import invert_batch_last, pack, solve_batch_last, unpack


@pytest.mark.parametrize("size", [1, 2, 5, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_and_determinant(size, dtype):
    g = torch.Generator().manual_seed(size)
    root = torch.randn(30, size, 2 * size, generator=g, dtype=torch.float64)
    matrices = root @ root.mT
    inverse, log_det = invert_batch_last(matrices.permute(1, 2, 0).to(dtype))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    found = inverse.permute(2, 0, 1).double()
    torch.testing.assert_close(found, torch.linalg.inv(matrices), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(log_det.double(), torch.logdet(matrices), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("size", [3, 90])  # swept entry by entry, and in blocks
def test_solutions_are_those_of_a_dense_solver(size):
    g = torch.Generator().manual_seed(size)
    root = torch.randn(70, size, 2 * size, generator=g, dtype=torch.float64)
    matrices, pull = root @ root.mT, torch.randn(size, 70, generator=g, dtype=torch.float64)
    mean, packed, log_det = solve_batch_last(matrices.permute(1, 2, 0), pull)
    inverse = torch.linalg.inv(matrices)
    torch.testing.assert_close(packed.T, pack(inverse))
    torch.testing.assert_close(mean.T, (inverse @ pull.T[:, :, None])[:, :, 0])
    torch.testing.assert_close(log_det, torch.logdet(matrices))


def test_singular_to_single_precision_is_inverted_in_double():
    # the nearest float32 to 1/3 lies above it, so the matrix is positive definite, but its second pivot rounds to zero
    matrix = torch.tensor([[3.0, 1.0], [1.0, 1 / 3]], dtype=torch.float32)
    inverse, _ = invert_batch_last(matrix[:, :, None])
    exact = torch.linalg.inv(matrix.double())
    torch.testing.assert_close(inverse[:, :, 0].double(), exact, rtol=0.05, atol=0)


def test_indefinite_is_refused():
    with pytest.raises(ArithmeticError, match="not positive definite"):
        invert_batch_last(torch.tensor([[1.0, 2.0], [2.0, 1.0]])[:, :, None])


def test_pack_and_unpack_are_inverse():
    matrices = torch.randn(4, 3, 3)
    matrices = matrices + matrices.mT
    assert torch.equal(unpack(pack(matrices)), matrices)
