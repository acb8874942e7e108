"""Means and standard deviations of entries that were not seen.

    E[x_ij] = b̄_i + c̄_j + ⟨ū_i, v̄_j⟩
    Var[x_ij] = k̄ᵀ A k̄ + āᵀ B ā + tr(A B) + E[1/α_i] E[1/β_j] / τ

with A, B the covariances of a_j = (v_j, c_j, 1) and k_i = (u_i, 1, b_i). A row or column that was never seen has the
number -1 and takes part as any of those that were.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fisherfold.completion.sides import Side
from fisherfold.completion.stream import unknown_member
from fisherfold.completion.variational import CompletionPosterior
from fisherfold.completion.variational_step import layout, moments

_CHUNK = 2**15


def predict_pairs(
    posterior: CompletionPosterior, rows: Tensor, columns: Tensor, *, with_std: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The predictive mean, and if wanted the standard deviation, of some entries.

    Args:
        posterior: the fitted posterior.
        rows: row numbers, -1 for a row never seen.
        columns: column numbers, -1 for a column never seen.
        with_std: whether the standard deviations are computed.

    Returns:
        The means, and the standard deviations or None.
    """
    left, right = _with_unknown(posterior.rows), _with_unknown(posterior.columns)
    # written in place: small results kept between the large tables of the chunks would hold on to their memory
    mean = left.mean.new_empty(len(rows))
    spread = torch.empty_like(mean, dtype=torch.float64) if with_std else None
    for start in range(0, len(rows), _CHUNK):
        part = slice(start, start + _CHUNK)
        i, j = _places(posterior.rows, rows[part]), _places(posterior.columns, columns[part])
        u, v = left.mean[i], right.mean[j]
        mean[part] = (u[:, :-1] * v[:, :-1]).sum(1) + u[:, -1] + v[:, -1]
        if spread is not None:
            second = _second_moment(left, right, i, j)
            noise = _noise(left, i, posterior) * _noise(right, j, posterior) / posterior.noise_precision
            spread[part] = ((second - mean[part] * mean[part]).clamp(min=0) + noise).sqrt()
    return mean, spread


def _with_unknown(side: Side) -> Side:
    """The side with one more member, last, about which nothing is known."""
    unknown = unknown_member(side)
    return replace(
        unknown, mean=torch.cat([side.mean, unknown.mean]), covariance=torch.cat([side.covariance, unknown.covariance]),
        shortfall=torch.cat([side.shortfall, unknown.shortfall]), counts=torch.cat([side.counts, unknown.counts]),
    )  # fmt: skip


def _places(side: Side, index: Tensor) -> Tensor:
    """Where members stand in ``_with_unknown``: one without ratings has no rated set, it is a stranger like others."""
    unknown = index < 0
    if side.set_effects is not None:
        unknown = unknown | (side.counts[index.clamp(min=0).long()] == 0)
    return torch.where(unknown, len(side.mean), index.long())


def _second_moment(left: Side, right: Side, i: Tensor, j: Tensor) -> Tensor:
    """E[(k_i · a_j)²] = ⟨E[k kᵀ], E[a aᵀ]⟩ in float64, because the squared mean is subtracted from it."""
    a = moments(right.mean[j].double(), right.covariance[j].double())
    b = moments(left.mean[i].double(), left.covariance[i].double())
    _, _, twin, factor = layout(left.mean.shape[1], left.mean.device)
    return (a * b[:, twin]) @ factor.double()


def _noise(side: Side, index: Tensor, posterior: CompletionPosterior) -> Tensor:
    """E[1/α] under the Gamma posterior of a noise weight."""
    strength = posterior.weight_strength
    if not strength:
        return torch.ones_like(side.counts[index])
    return (strength + side.shortfall[index]) / (strength + side.counts[index] - 2)
