"""Many small matrices at once against LAPACK, one by one."""

import pytest
import torch

from fisherfold.fisher.blocks import apply_blocks, inverse_blocks, sweep


def positive(count, size, seed=0):
    x = torch.randn(
        count, 2 * size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return x.mT @ x


@pytest.mark.parametrize("size", [1, 3, 7])
def test_the_sweep_inverts_and_gives_the_pivots(size):
    matrices = positive(11, size)
    work = matrices.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
    pivots = sweep(work)
    torch.testing.assert_close(
        -work.permute(2, 0, 1), torch.linalg.inv(matrices), rtol=1e-10, atol=1e-12
    )
    factor = torch.linalg.cholesky(matrices)
    torch.testing.assert_close(
        pivots.T, factor.diagonal(dim1=1, dim2=2) ** 2, rtol=1e-10, atol=1e-12
    )


def test_blocks_of_order_one_are_left_as_they_are():
    blocks = positive(500, 1)
    before = blocks.clone()
    torch.testing.assert_close(inverse_blocks(blocks), 1 / before)
    assert torch.equal(blocks, before)


def test_many_blocks_are_inverted_in_runs_and_few_or_weak_ones_are_left_to_lapack(monkeypatch):
    monkeypatch.setattr("fisherfold.fisher.blocks._ENTRIES", 1)
    blocks = positive(1000, 4)
    torch.testing.assert_close(
        inverse_blocks(blocks), torch.linalg.inv(blocks), rtol=1e-9, atol=1e-12
    )
    assert inverse_blocks(blocks[:100]) is None
    assert inverse_blocks(positive(500, 25)) is None
    blocks[700, 3], blocks[700, :, 3] = blocks[700, 2], blocks[700, :, 2]
    assert inverse_blocks(blocks) is None
    blocks[700] = torch.nan
    assert inverse_blocks(blocks) is None


def test_blocks_times_rows():
    blocks, x = positive(9, 4), torch.arange(36.0, dtype=torch.float64).view(9, 4)
    torch.testing.assert_close(
        apply_blocks(blocks, x), (blocks @ x.unsqueeze(2)).squeeze(2), rtol=0, atol=1e-12
    )
