"""The score of a pair of members, its variance and the noise of a new value: the only place for each of them.

    η_ij = b_i + c_j + ⟨u_i, v_j⟩ + d_i(t) + e_j(t),       Var η_ij = k̄ᵀ C_j k̄ + āᵀ R_i ā + tr(R_i C_j)

with k = (u, 1), a = (v, 1), and R, C the posterior covariances of (u_i, b_i) and (v_j, c_j). Mean and variance are
inner products of one vector of the row and one of the column. So the same vectors serve some pairs (their products
are summed) and all pairs of two lists (``every``: one matrix product).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fisherfold.completion.inference.packed import triangle

if TYPE_CHECKING:
    from fisherfold.completion.inference.posterior import CompletionPosterior, Side


class Members:
    """Some rows or columns as scores see them, whatever is known of each.

    A member may be one of the fit, one that has new ratings (``side`` then holds the new members), one of which only
    features are known, or one of which nothing is (its code is -1). ``Side.at`` tells them apart, and nobody else.

    Attributes:
        side: the posterior of the members.
        codes: their numbers there, int64; -1 for unknown ones.
    """

    def __init__(self, side: Side, codes: Tensor) -> None:
        self.side = side
        self.codes = codes

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, part: slice | Tensor) -> Members:
        return Members(self.side, self.codes[part])

    @property
    def mean(self) -> Tensor:
        """The posterior means, the offset last."""
        return self.side.at(self.codes, "mean")

    @property
    def covariance(self) -> Tensor:
        """The packed posterior covariances."""
        return self.side.at(self.codes, "covariance")

    def noise_factor(self, strength: float) -> Tensor:
        """E[1/α] under the Gamma posterior of the noise weights, in float64."""
        amounts = self.side.at(self.codes, "amounts").double()
        if not strength:
            return torch.ones_like(amounts)
        return (strength + self.side.at(self.codes, "weighted_sse")) / (strength + amounts - 2)


def row_vectors(mean: Tensor) -> Tensor:
    """(u, 1, b) of means (u, b)."""
    return torch.cat([mean[:, :-1], torch.ones_like(mean[:, :1]), mean[:, -1:]], dim=1)


def column_vectors(mean: Tensor) -> Tensor:
    """(v, c, 1) of means (v, c): inner products with ``row_vectors`` are scores."""
    return torch.cat([mean, torch.ones_like(mean[:, :1])], dim=1)


def row_spread(mean: Tensor, covariance: Tensor) -> Tensor:
    """(k kᵀ, R) packed, entries off the diagonal twice."""
    k = column_vectors(mean[:, :-1])
    i, j = triangle(k.shape[1], k.device)
    twice = torch.where(i == j, 1.0, 2.0).to(k)
    return torch.cat([k[:, i] * k[:, j] * twice, covariance * twice], dim=1)


def column_spread(mean: Tensor, covariance: Tensor) -> Tensor:
    """(C, a aᵀ + C_vv) packed: inner products with ``row_spread`` are variances."""
    a = column_vectors(mean[:, :-1])
    i, j = triangle(a.shape[1], a.device)
    outer = a[:, i] * a[:, j]
    n_factors = (a.shape[1] - 1) * a.shape[1] // 2  # the packed block of the factors comes first
    outer[:, :n_factors] += covariance[:, :n_factors]
    return torch.cat([covariance, outer], dim=1)


def inner(left: Tensor, right: Tensor, *, every: bool = False) -> Tensor:
    """Inner products of the vectors of pairs, or of all pairs."""
    return left @ right.T if every else (left * right).sum(1)


def score(
    posterior: CompletionPosterior,
    rows: Members,
    columns: Members,
    *,
    times: Tensor | None = None,
    every: bool = False,
) -> Tensor:
    """The expected scores of pairs, or of all pairs of two lists."""
    mean = inner(row_vectors(rows.mean), column_vectors(columns.mean), every=every)
    for shift, _ in drift(posterior, rows, columns, times, every):
        mean = mean + shift
    return mean


def variance(
    posterior: CompletionPosterior,
    rows: Members,
    columns: Members,
    *,
    times: Tensor | None = None,
    every: bool = False,
) -> Tensor:
    """The posterior variances of scores, in float64."""
    left = row_spread(rows.mean.double(), rows.covariance.double())
    right = column_spread(columns.mean.double(), columns.covariance.double())
    spread = inner(left, right, every=every).clamp_(min=0)
    for _, doubt in drift(posterior, rows, columns, times, every):
        spread = spread + doubt
    return spread


def noise(
    posterior: CompletionPosterior, rows: Members, columns: Members, *, every: bool = False
) -> Tensor:
    """The variances of new values around their scores, E[1/α_i] E[1/β_j] / τ, in float64."""
    left, right = (side.noise_factor(posterior.weight_strength) for side in (rows, columns))
    return (left[:, None] * right if every else left * right) / posterior.noise_precision


def drift(
    posterior: CompletionPosterior,
    rows: Members,
    columns: Members,
    times: Tensor | None,
    every: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Means and variances of the effects of time; for all pairs ``times`` is one time."""
    if times is None:
        return
    for k, (effect, members) in enumerate(
        zip(posterior.time_effects, (rows, columns), strict=True)
    ):
        if effect is not None:
            shift, doubt = effect.find(members.codes, times)
            yield (shift[:, None], doubt[:, None]) if every and k == 0 else (shift, doubt)
