r"""The inner epoch of variance reduction at the cost of the sampled ratings alone.

A step moves every row of U, since the anchor's gradient G and the retraction are dense. But both act by p×p matrices,
so the iterate is kept as a product of a tall table and a small matrix,

    U = Z B₁ + G B₂ + U₀ B₃,    Z changes only in the rows that the batch has rated,

and its Gram matrix follows from Γ = [Z G U₀]ᵀ[Z G U₀]. With s the rows of Σ_B (r aᵀ - r₀ a₀ᵀ)/|B|, q the gathered rows
of [Z G U₀], K = U₀ᵀ(Σ_B P_iᵀ r₀ a₀ᵀ)/|B| (zero without ridge), D = (0; I; K), E = Bᵀ(Γ D + Σ q sᵀ) and X = (C + λI)⁻¹:

    B' = B - t (D - B E) X,    Z' = Z - t scatter(s X B₁'⁻¹),    B ← B' (B'ᵀ Γ' B')^{-1/2}     (polar retraction).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.kernels import fit_columns

if TYPE_CHECKING:
    from fisherfold.completion.problem import CompletionProblem
    from fisherfold.completion.snapshot import CompletionSnapshot


# From this share of rated entries on, reading whole columns is quicker than gathering.
CROWDED = 0.3
# Rounding grows with the square of ‖B₁⁻¹‖; beyond this bound U is formed and B starts again from the identity.
_LARGEST_INVERSE = 16.0


class LazyFrame:
    """The iterate U = [Z G U₀] B.

    Args:
        start: the first iterate.
        gradient: G.
        anchor: U₀.

    Attributes:
        moving: Z.
        still: G and U₀ beside each other.
        weights: B.
        gram: Γ.
    """

    def __init__(self, start: Tensor, gradient: Tensor, anchor: Tensor) -> None:
        self.still = torch.cat([gradient, anchor], dim=1)
        self._begin(start.clone())

    def _begin(self, moving: Tensor) -> None:
        size = moving.shape[1]
        self.moving = moving
        self.weights = moving.new_zeros(3 * size, size)
        self.weights[:size] = _identity(moving)
        everything = torch.cat([moving, self.still], dim=1)
        self.gram = everything.mT @ everything

    def rebase(self, index: Tensor, change: Tensor) -> None:
        """Start again with Z = U plus a change of some rows, once B₁ has become too small to be divided by.

        Args:
            index: row numbers.
            change: what to add to these rows of U.
        """
        self._begin(self.dense().index_add_(0, index, change))

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Some rows of Z, of (G, U₀), and of U.

        Args:
            index: row numbers.

        Returns:
            Three tables.
        """
        size = self.weights.shape[1]
        moving, still = self.moving.index_select(0, index), self.still.index_select(0, index)
        return moving, still, torch.addmm(moving @ self.weights[:size], still, self.weights[size:])

    def move(self, index: Tensor, moving: Tensor, change: Tensor, *, distinct: bool) -> None:
        """Add to rows of Z, and renew Γ.

        Args:
            index: row numbers.
            moving: these rows of Z as they are.
            change: what to add to them.
            distinct: whether no row occurs twice.
        """
        size = self.weights.shape[1]
        if distinct:
            fresh = moving + change
            self.moving.index_copy_(0, index.long(), fresh)
            self.gram[:size, :size] += fresh.mT @ fresh - moving.mT @ moving
            cross = change.mT @ self.still.index_select(0, index)
        else:
            before = self.moving.mT @ self.still
            self.moving.index_add_(0, index, change)
            self.gram[:size, :size] = self.moving.mT @ self.moving
            cross = self.moving.mT @ self.still - before
        self.gram[:size, size:] += cross
        self.gram[size:, :size] += cross.mT

    def retract(self) -> None:
        """Make U orthonormal again: B ← B (Bᵀ Γ B)^{-1/2}."""
        values, vectors = torch.linalg.eigh(self.weights.mT @ self.gram @ self.weights)
        self.weights = self.weights @ ((vectors * values.rsqrt()) @ vectors.mT)

    def dense(self) -> Tensor:
        """U as a matrix.

        Returns:
            An n×p tensor.
        """
        size = self.weights.shape[1]
        return torch.addmm(self.moving @ self.weights[:size], self.still, self.weights[size:])


@dataclass(frozen=True)
class NoAnchor:
    """What takes the place of a snapshot when steps are plain: no gradient, no coefficients.

    Attributes:
        problem: the problem.
        x: the first iterate.
        full_gradient: zero.
        anchor_coefficients: zero.
        table: unused.
    """

    problem: CompletionProblem
    x: Tensor
    full_gradient: Tensor
    anchor_coefficients: Tensor
    table: str = "batch"


def lazy_epoch(
    snapshot: CompletionSnapshot | NoAnchor,
    x: Tensor,
    batches: Iterable[Tensor],
    *,
    step: Callable[[int], float],
    natural: bool = False,
    damping: float = 0.0,
) -> Tensor:
    """All inner steps of one epoch.

    Args:
        snapshot: the anchor.
        x: the first iterate.
        batches: column numbers of every step.
        step: t as a function of the number of the step, from 0.
        natural: whether steps are multiplied by (C + λI)⁻¹.
        damping: λ.

    Returns:
        The last iterate, orthonormal to rounding.
    """
    batches = list(batches)
    problem = snapshot.problem
    single = all(len(batch) == 1 for batch in batches) and problem.ridge == 0
    crowded = single and problem.ratings.density >= CROWDED and x.device.type == "cpu"
    walk = _dense_walk if crowded else _lazy_walk
    try:
        last = walk(snapshot, x, batches, step, natural, damping)
    except (torch.linalg.LinAlgError, np.linalg.LinAlgError):  # type: ignore[attr-defined]
        # A step so large that the frame overflows: a point that is not finite, which the solver takes back.
        return torch.full_like(x, torch.nan)
    if not bool(torch.isfinite(last).all()):
        return last
    return problem.manifold.retract(last, torch.zeros_like(last))


def _dense_walk(
    snapshot: CompletionSnapshot | NoAnchor,
    x: Tensor,
    batches: list[Tensor],
    step: Callable[[int], float],
    natural: bool,
    damping: float,
) -> Tensor:
    # SciPy is needed on this road alone
    from fisherfold.completion.dense_epoch import DenseEpoch

    epoch = DenseEpoch(snapshot, x, natural=natural, damping=damping)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for k, batch in enumerate(batches):
            epoch.step(int(batch), step(k))
    return epoch.point()


def _lazy_walk(
    snapshot: CompletionSnapshot | NoAnchor,
    x: Tensor,
    batches: list[Tensor],
    step: Callable[[int], float],
    natural: bool,
    damping: float,
) -> Tensor:
    frame = LazyFrame(x, snapshot.full_gradient, snapshot.x)
    for k, batch in enumerate(batches):
        _step(snapshot, frame, batch, step(k), natural, damping)
    return frame.dense()


def _step(
    snapshot: CompletionSnapshot | NoAnchor,
    frame: LazyFrame,
    batch: Tensor,
    step: float,
    natural: bool,
    damping: float,
) -> None:
    problem, size, count = snapshot.problem, frame.weights.shape[1], len(batch)
    side = problem.ratings.by_column.take(batch)
    index, values = side.indices(), side.values().to(frame.moving.dtype)
    moving, still, here = frame.rows(index)
    local = Grouped(side.offsets, torch.arange(len(index), dtype=torch.int32, device=index.device), values, len(index))
    fresh = fit_columns(local, here, problem.ridges(side.counts, here)).coefficients
    known = snapshot.anchor_coefficients[batch]
    groups = side.groups()
    spread, known_spread = fresh.index_select(0, groups), known.index_select(0, groups)
    residual = (here * spread).sum(1) - values
    anchor_rows = still[:, size:]
    anchor_residual = (anchor_rows * known_spread).sum(1) - values
    there = anchor_residual[:, None] * known_spread
    change = (residual[:, None] * spread - there) / count
    inverse = _identity(frame.weights)
    if natural and not isinstance(snapshot, NoAnchor):
        inverse = snapshot.inverse_factor(batch, fresh, damping)
    drift = frame.weights.new_zeros(3 * size, size)
    drift[size : 2 * size] = _identity(frame.weights)
    drift[2 * size :] = anchor_rows.mT @ there / count
    gathered = torch.cat([moving.mT @ change, still.mT @ change])
    along = frame.weights.mT @ (frame.gram @ drift + gathered)
    frame.weights = frame.weights - step * (drift - frame.weights @ along) @ inverse
    back, _ = torch.linalg.inv_ex(frame.weights[:size])
    if float(back.abs().max()) <= _LARGEST_INVERSE:
        frame.move(index, moving, -step * (change @ (inverse @ back)), distinct=count == 1)
    else:
        frame.rebase(index, -step * (change @ inverse))
    frame.retract()


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[1], dtype=like.dtype, device=like.device)
