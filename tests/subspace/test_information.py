"""The information of what all tasks share, strip by strip, against the dense matrices of all tasks."""

from __future__ import annotations

import pytest
import torch

from fisherfold.subspace import noise as subspace_noise
from fisherfold.subspace.marginal import SubspacePrior, posterior
from fisherfold.subspace.noise import _spent, shared_information
from fisherfold.subspace.tasks import TaskStatistics


def case(tasks: int, rows: int, n: int, p: int) -> tuple[TaskStatistics, SubspacePrior]:
    draw = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    root = normal(p, p)
    prior = SubspacePrior(
        normal(n), torch.linalg.qr(normal(n, p))[0], root @ root.mT, 0.5 + normal(tasks) ** 2
    )
    task = torch.arange(tasks).repeat_interleave(rows)
    return TaskStatistics.from_rows(normal(len(task), n), normal(len(task)), task), prior


def dense_information(statistics: TaskStatistics, prior: SubspacePrior) -> torch.Tensor:
    """F entry by entry of its definition, with S_t as it stands there."""
    n, p = prior.frame.shape
    information = torch.zeros(1 + p, n, 1 + p, n, dtype=torch.float64)
    found = posterior(statistics, prior)
    for gram, noise, spread in zip(statistics.gram, prior.noise, found.covariance, strict=True):
        G = gram @ prior.frame / noise
        S, right, reach = gram / noise - G @ spread @ G.mT, prior.covariance - spread, G @ spread
        information[0, :, 0, :] += S
        information[1:, :, 1:, :] += torch.einsum("kl,ij->kilj", right, S)
        information[1:, :, 1:, :] += torch.einsum("il,jk->kilj", reach, reach)
    return information


@pytest.mark.parametrize("entries", [1, 100, 2**18])
@pytest.mark.parametrize(
    ("tasks", "rows", "n", "p"), [(5, 3, 7, 2), (4, 9, 6, 6), (1, 4, 5, 1), (9, 1, 1, 1)]
)
def test_chunks_of_any_size_give_the_dense_matrices(
    tasks: int, rows: int, n: int, p: int, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subspace_noise, "_CHUNK_ENTRIES", entries)
    statistics, prior = case(tasks, rows, n, p)
    found = posterior(statistics, prior)
    dense = dense_information(statistics, prior)
    torch.testing.assert_close(
        shared_information(statistics, prior, found), dense, rtol=1e-12, atol=1e-12
    )
    half = torch.randn(
        (1 + p) * n, (1 + p) * n, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    covariance = (half @ half.mT).reshape(1 + p, n, 1 + p, n)

    def inner(log_noise: torch.Tensor) -> torch.Tensor:
        there = SubspacePrior(prior.mean, prior.frame, prior.covariance, log_noise.exp())
        return (covariance * dense_information(statistics, there)).sum()

    expected = -torch.autograd.functional.jacobian(inner, prior.noise.log())
    spent = _spent(statistics, prior, found, covariance)
    torch.testing.assert_close(spent, expected, rtol=1e-10, atol=1e-10)


def test_gram_matrices_are_left_as_they_are() -> None:
    statistics, prior = case(5, 3, 7, 2)
    before, found = statistics.gram.clone(), posterior(statistics, prior)
    information = shared_information(statistics, prior, found)
    _spent(statistics, prior, found, information)
    assert torch.equal(statistics.gram, before)
