"""Sufficient statistics of many small regressions, accumulated in one streaming pass.

For task t with rows X_t, targets y_t and row weights s:   A_t = X_tᵀ S X_t,  b_t = X_tᵀ S y_t,  c_t = y_tᵀ S y_t

Everything that the subspace problems need follows from these in float64, so that a pass over the data costs the same
whatever the number of rows. Rows are gathered by task into padded blocks of similar size: batched products, no loop
over tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fisherfold.distributed import Axis

_BLOCK_ENTRIES = 2**22
_PADDING = 1.25


@dataclass(frozen=True)
class TaskStatistics:
    """Gram matrices and cross products per task, all float64; ``add`` accumulates in place.

    Attributes:
        gram: A_t, shape (tasks, features, features).
        cross: b_t, shape (tasks, features).
        power: c_t, shape (tasks,).
        sums: the weighted sum of the targets, shape (tasks,).
        counts: the sum of the row weights, the number of rows if there are none, shape (tasks,).
        axis: which tasks are here, if they are shared out over processes; all of them if not given.
        kept: the last products of every kind, with what they were made from; None to keep none.

    Examples:
        >>> X = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
        >>> statistics = TaskStatistics.from_rows(X, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 1]))
        >>> statistics.counts.tolist(), statistics.gram[1].tolist()
        ([1.0, 2.0], [[2.0, 3.0], [3.0, 5.0]])
    """

    gram: Tensor
    cross: Tensor
    power: Tensor
    sums: Tensor
    counts: Tensor
    axis: Axis | None = field(default=None, kw_only=True)
    kept: dict[str, list[tuple[Tensor, Tensor, Tensor]]] | None = field(
        default=None, kw_only=True, repr=False, compare=False
    )

    @classmethod
    def empty(cls, n_tasks: int, n_features: int, *, device: torch.device | str | None = None) -> TaskStatistics:
        """Statistics of no rows.

        Args:
            n_tasks: how many tasks.
            n_features: how many features.
            device: where they live.

        Returns:
            Zeros.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        per_task = (zeros(n_tasks) for _ in range(3))
        return cls(zeros(n_tasks, n_features, n_features), zeros(n_tasks, n_features), *per_task)

    @classmethod
    def from_rows(
        cls, X: Tensor, y: Tensor, task: Tensor, *, n_tasks: int | None = None, sample_weight: Tensor | None = None
    ) -> TaskStatistics:
        """Statistics of a table of rows.

        Args:
            X: features, one row per sample.
            y: targets.
            task: the task of each row, integers from 0.
            n_tasks: how many tasks; one more than the largest id if not given.
            sample_weight: a weight per row; 1 if not given.

        Returns:
            The statistics.

        Raises:
            ValueError: if there is no row.
        """
        if len(X) == 0:
            raise ValueError("X has no rows")
        tasks = int(task.max()) + 1 if n_tasks is None else n_tasks
        statistics = cls.empty(tasks, X.shape[1], device=X.device)
        statistics.add(X, y, task, sample_weight=sample_weight)
        return statistics

    @property
    def n_tasks(self) -> int:
        """The number of tasks that are here."""
        return self.gram.shape[0]

    @property
    def all_tasks(self) -> Axis:
        """The tasks of all processes, and which of them are here."""
        return Axis.whole(self.n_tasks) if self.axis is None else self.axis

    @property
    def n_features(self) -> int:
        """The number of features."""
        return self.gram.shape[1]

    def add(self, X: Tensor, y: Tensor, task: Tensor, *, sample_weight: Tensor | None = None) -> None:
        """Take in more rows.

        Args:
            X: features, one row per sample.
            y: targets.
            task: the task of each row, integers from 0.
            sample_weight: a weight per row; 1 if not given.
        """
        self._check_rows(X, y, task, sample_weight)
        weight = torch.ones_like(y, dtype=torch.float64) if sample_weight is None else sample_weight.double()
        order = torch.argsort(task, stable=True)
        X, y, weight = X[order].double(), y[order].double(), weight[order]
        sizes = torch.bincount(task, minlength=self.n_tasks)
        starts = sizes.cumsum(0) - sizes
        for tasks, width in _blocks(sizes, self.n_features):
            offsets = torch.arange(width, device=X.device)
            inside = offsets < sizes[tasks, None]
            index = (starts[tasks, None] + offsets).clamp(max=len(y) - 1)
            w = torch.where(inside, weight[index], 0.0)
            rows, targets = X[index], y[index]
            weighted = (rows * w[..., None]).mT
            self.gram[tasks] += weighted @ rows
            self.cross[tasks] += (weighted @ targets[..., None]).squeeze(-1)
            self.power[tasks] += (w * targets * targets).sum(-1)
            self.sums[tasks] += (w * targets).sum(-1)
            self.counts[tasks] += w.sum(-1)

    def _check_rows(self, X: Tensor, y: Tensor, task: Tensor, sample_weight: Tensor | None) -> None:
        if X.ndim != 2 or X.shape[1] != self.n_features:
            raise ValueError(f"X must have shape (rows, {self.n_features}), got {tuple(X.shape)}")
        for name, vector in (("y", y), ("task", task), ("sample_weight", sample_weight)):
            if vector is not None and vector.shape != X.shape[:1]:
                raise ValueError(f"{name} must have one entry per row of X ({len(X)}), got shape {tuple(vector.shape)}")
        for name, values in (("X", X), ("y", y), ("sample_weight", sample_weight)):
            if values is not None and not bool(torch.isfinite(values).all()):
                raise ValueError(f"{name} must be finite, got NaN or infinite entries")
        if sample_weight is not None and bool((sample_weight < 0).any()):
            raise ValueError(f"sample_weight must not be negative, got {float(sample_weight.min())}")
        if len(task) and not (int(task.min()) >= 0 and int(task.max()) < self.n_tasks):
            raise ValueError(
                f"task must lie between 0 and {self.n_tasks - 1}, got {int(task.min())} to {int(task.max())}"
            )

    def extended(self, n_tasks: int) -> TaskStatistics:
        """The same with empty tasks appended.

        Args:
            n_tasks: the new number of tasks.

        Returns:
            A copy.
        """
        more = TaskStatistics.empty(n_tasks - self.n_tasks, self.n_features, device=self.gram.device)
        return TaskStatistics(*(torch.cat([old, new]) for old, new in zip(self.parts(), more.parts(), strict=True)))

    def select(self, tasks: Tensor) -> TaskStatistics:
        """The statistics of some tasks.

        Args:
            tasks: their indices.

        Returns:
            A copy.
        """
        return TaskStatistics(*(part[tasks] for part in self.parts()))

    def pooled(self) -> TaskStatistics:
        """All rows as one task, those of other processes included.

        Returns:
            Statistics of a single task.
        """
        return TaskStatistics(*(self.all_tasks.total(part.sum(0, keepdim=True)) for part in self.parts()))

    def keeping(self) -> TaskStatistics:
        """The same rows, for updates in a row that ask for the same products: the last two of every kind are kept.

        Returns:
            Statistics that share their tensors with these, and must not be added to.
        """
        return replace(self, kept={})

    def times(self, vectors: Tensor) -> Tensor:
        """A_t V for vectors that all tasks share: the one pass over the Gram matrices that a frame or a mean needs.

        Args:
            vectors: V, shape (features,) or (features, columns).

        Returns:
            A tensor of shape (tasks, features) or (tasks, features, columns).
        """
        shape, flat = (self.n_tasks, *vectors.shape), self.gram.reshape(-1, self.n_features)
        # one memory layout: the bits then follow from the values alone, wherever the product was made
        return self._kept(f"times {vectors.ndim}", vectors, lambda: (flat @ vectors.contiguous()).reshape(shape))

    def scaled_gram(self, noise: Tensor) -> Tensor:
        """Σ_t A_t/s_t² over the tasks that are here.

        Args:
            noise: s_t², one per task.

        Returns:
            A matrix of the size of the features.
        """
        return self._kept("scaled", noise, lambda: torch.einsum("t,tij->ij", 1 / noise, self.gram))

    def _kept(self, kind: str, argument: Tensor, make: Callable[[], Tensor]) -> Tensor:
        if self.kept is None:
            return make()
        known = [entry for entry in self.kept.get(kind, []) if entry[0] is self.gram]
        for _, asked, product in known:
            if asked.shape == argument.shape and torch.equal(asked, argument):
                return product
        made = make()
        self.kept[kind] = [(self.gram, argument.clone(), made), *known[:1]]
        return made

    def residual_power(self, weights: Tensor) -> Tensor:
        """‖X_t v_t - y_t‖² for a coefficient vector per task, or one for all.

        Args:
            weights: v_t, shape (tasks, features), or (features,) for one.

        Returns:
            A tensor of shape (tasks,), not negative.
        """
        moved = self.times(weights) if weights.ndim == 1 else (self.gram @ weights[..., None]).squeeze(-1)
        quadratic = (moved * weights).sum(-1)
        return (self.power - 2 * (self.cross * weights).sum(-1) + quadratic).clamp(min=0)

    def target_variance(self) -> Tensor:
        """The variance of the targets of each task with the divisor n - 1; NaN for a single row.

        Returns:
            A tensor of shape (tasks,).
        """
        centred = (self.power - self.sums**2 / self.counts).clamp(min=0)
        # what is left of a constant target after cancellation is rounding, not variance
        centred = torch.where(centred <= 8 * torch.finfo(torch.float64).eps * self.power, 0.0, centred)
        return centred / (self.counts - 1).clamp(min=0)

    def nmse(self, weights: Tensor) -> Tensor:
        """The mean over tasks of ‖X_t v_t - y_t‖² / (n_t var(y_t)).

        Tasks with fewer than two rows or a constant target have no variance to compare with and are left out.

        Args:
            weights: v_t, shape (tasks, features).

        Returns:
            A tensor without dimensions; NaN if no task is left.
        """
        variance = self.target_variance()
        defined = (self.counts >= 2) & (variance > 0)
        ratios = self.residual_power(weights)[defined] / (self.counts * variance)[defined]
        if not self.all_tasks.is_shared:
            return ratios.mean()
        known = self.all_tasks.total(torch.stack([ratios.sum(), defined.sum().double()]))
        return known[0] / known[1]

    def parts(self) -> tuple[Tensor, ...]:
        """The tensors.

        Returns:
            Gram matrices, cross products, squares, sums and counts.
        """
        return self.gram, self.cross, self.power, self.sums, self.counts


def rounding(sizes: Any, x: Any) -> Any:
    """What rounding leaves of the zero eigenvalues of UᵀA_tU: n ε ‖|U|ᵀ√diag(A_t)‖², on tensors or on arrays.

    It follows A_t, not UᵀA_tU, which is small where the rows of a task are nearly orthogonal to the subspace.

    Args:
        sizes: √diag(A_t), the last axis over features.
        x: the frame U.

    Returns:
        One number per task.
    """
    return len(x) * torch.finfo(torch.float64).eps * ((sizes @ abs(x)) ** 2).sum(-1)


def _blocks(sizes: Tensor, n_features: int) -> Iterator[tuple[Tensor, int]]:
    """Tasks of similar size and the width of their padded block, smallest first, blocks of bounded memory."""
    order = torch.argsort(sizes)
    ordered = sizes[order].tolist()
    start = next((i for i, size in enumerate(ordered) if size > 0), len(ordered))
    while start < len(ordered):
        limit = max(ordered[start] + 1, math.floor(_PADDING * ordered[start]))
        most = max(1, _BLOCK_ENTRIES // (limit * n_features))
        stop = start
        while stop < len(ordered) and stop - start < most and ordered[stop] <= limit:
            stop += 1
        yield order[start:stop], ordered[stop - 1]
        start = stop
