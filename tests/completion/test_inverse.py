"""The sweep inverse of many small matrices."""

from __future__ import annotations

import pytest
import torch

from fisherfold.completion.inference.packed import pack, solve_batch, unpack


@pytest.mark.parametrize("size", [1, 5, 12, 90])  # swept entry by entry, and in blocks
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_solutions_are_those_of_a_dense_solver(size, dtype):
    g = torch.Generator().manual_seed(size)
    root = torch.randn(70, size, 2 * size, generator=g, dtype=torch.float64)
    matrices, pull = root @ root.mT, torch.randn(70, size, generator=g, dtype=torch.float64)
    mean, packed, log_det = (
        part.double() for part in solve_batch(matrices.to(dtype), pull.to(dtype))
    )
    inverse = torch.linalg.inv(matrices)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(packed, pack(inverse), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        mean, (inverse @ pull[:, :, None])[:, :, 0], atol=tolerance, rtol=tolerance
    )
    torch.testing.assert_close(log_det, torch.logdet(matrices), atol=tolerance, rtol=tolerance)


def test_singular_to_single_precision_is_inverted_in_double():
    # the nearest float32 to 1/3 lies above it, so the matrix is positive definite, but its second pivot rounds to zero
    matrix = torch.tensor([[3.0, 1.0], [1.0, 1 / 3]], dtype=torch.float32)
    _, packed, _ = solve_batch(matrix[None], torch.ones(1, 2))
    exact = torch.linalg.inv(matrix.double())
    torch.testing.assert_close(unpack(packed)[0].double(), exact, rtol=0.05, atol=0)


def test_indefinite_is_refused():
    with pytest.raises(ArithmeticError, match="not positive definite"):
        solve_batch(torch.tensor([[[1.0, 2.0], [2.0, 1.0]]]), torch.ones(1, 2))


def test_pack_and_unpack_are_inverse():
    matrices = torch.randn(4, 3, 3)
    matrices = matrices + matrices.mT
    assert torch.equal(unpack(pack(matrices)), matrices)
