"""Sufficient statistics of many small regressions: Gram matrices and cross products per task.

For task t with rows X_t, targets y_t and row weights S:   A_t = X_tᵀ S X_t,  b_t = X_tᵀ S y_t,  c_t
= y_tᵀ S y_t

Everything that the subspace problems need follows from these in float64, so the cost of a pass does
not depend on the number of rows. Rows are grouped by task into padded blocks of similar size:
batched products, no loop over tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fisherfold.distributed import Axis

EPS = torch.finfo(torch.float64).eps
_BLOCK_ENTRIES = 2**22
_PADDING = 1.25


@dataclass(frozen=True)
class TaskStatistics:
    """Gram matrices and cross products per task, all float64; ``add`` accumulates in place.

    Examples:
        >>> X = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
        >>> y, task = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 1])
        >>> statistics = TaskStatistics.from_rows(X, y, task)
        >>> statistics.counts.tolist(), statistics.gram[1].tolist()
        ([1.0, 2.0], [[2.0, 3.0], [3.0, 5.0]])
    """

    gram: Tensor  # A_t, shape (tasks, features, features)
    cross: Tensor  # b_t, shape (tasks, features)
    power: Tensor  # c_t, shape (tasks,)
    sums: Tensor  # the weighted sum of the targets, shape (tasks,)
    counts: Tensor  # the sum of the row weights, or the number of rows, shape (tasks,)
    # which tasks this process holds if they are distributed; all of them by default
    axis: Axis | None = field(default=None, kw_only=True)
    # the last two products of every kind (see ``cached``); None to keep none
    cache: dict[str, list[tuple[Tensor, Tensor]]] | None = field(
        default=None, kw_only=True, repr=False, compare=False
    )

    @classmethod
    def empty(cls, n_tasks: int, n_features: int) -> TaskStatistics:
        """Statistics of no rows."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        n = n_tasks
        d = n_features
        return cls(zeros(n, d, d), zeros(n, d), zeros(n), zeros(n), zeros(n))

    @classmethod
    def from_rows(
        cls,
        X: Tensor,
        y: Tensor,
        task: Tensor,
        *,
        n_tasks: int | None = None,
        sample_weight: Tensor | None = None,
    ) -> TaskStatistics:
        """Statistics of a table of rows."""
        if len(X) == 0:
            raise ValueError("X has no rows")
        tasks = int(task.max()) + 1 if n_tasks is None else n_tasks
        statistics = cls.empty(tasks, X.shape[1])
        statistics.add(X, y, task, sample_weight=sample_weight)
        return statistics

    @property
    def n_tasks(self) -> int:
        """The number of tasks on this process."""
        return self.gram.shape[0]

    @property
    def n_features(self) -> int:
        """The number of features."""
        return self.gram.shape[1]

    @property
    def all_tasks(self) -> Axis:
        """The tasks of all processes, and which of them are here."""
        return Axis.whole(self.n_tasks) if self.axis is None else self.axis

    @property
    def n_rows(self) -> float:
        """The sum of the row weights over the tasks of all processes."""
        return self.all_tasks.add(self.counts)

    def parts(self) -> tuple[Tensor, ...]:
        """The tensors."""
        return self.gram, self.cross, self.power, self.sums, self.counts

    def add(
        self, X: Tensor, y: Tensor, task: Tensor, *, sample_weight: Tensor | None = None
    ) -> None:
        """Add rows in place."""
        self._check_rows(X, y, task, sample_weight)
        if len(y) == 0:
            return
        weight = (
            torch.ones_like(y, dtype=torch.float64)
            if sample_weight is None
            else sample_weight.double()
        )
        order = torch.argsort(task, stable=True)
        X = X[order].double()
        y = y[order].double()
        weight = weight[order]
        sizes = torch.bincount(task, minlength=self.n_tasks)
        starts = sizes.cumsum(0) - sizes
        for tasks, width in _blocks(sizes, self.n_features):
            offsets = torch.arange(width)
            inside = offsets < sizes[tasks, None]
            index = (starts[tasks, None] + offsets).clamp(max=len(y) - 1)
            w = torch.where(inside, weight[index], 0.0)
            rows = X[index]
            targets = y[index]
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
                raise ValueError(
                    f"{name} must have one entry per row of X ({len(X)}), got shape "
                    f"{tuple(vector.shape)}"
                )
        for name, values in (("X", X), ("y", y), ("sample_weight", sample_weight)):
            if values is not None and not bool(torch.isfinite(values).all()):
                raise ValueError(f"{name} must be finite, got NaN or infinite entries")
        if sample_weight is not None and bool((sample_weight < 0).any()):
            raise ValueError(
                f"sample_weight must not be negative, got {float(sample_weight.min())}"
            )
        if len(task) and not (int(task.min()) >= 0 and int(task.max()) < self.n_tasks):
            raise ValueError(
                f"task must lie between 0 and {self.n_tasks - 1}, got {int(task.min())} to "
                f"{int(task.max())}"
            )

    def extended(self, n_tasks: int) -> TaskStatistics:
        """A copy with empty tasks appended."""
        more = TaskStatistics.empty(n_tasks - self.n_tasks, self.n_features)
        return TaskStatistics(
            *(torch.cat([old, new]) for old, new in zip(self.parts(), more.parts(), strict=True))
        )

    def select(self, tasks: Tensor) -> TaskStatistics:
        """The statistics of some tasks."""
        return TaskStatistics(*(part[tasks] for part in self.parts()))

    def pooled(self) -> TaskStatistics:
        """All rows as one task, those of other processes included."""
        return TaskStatistics(
            *(self.all_tasks.total(part.sum(0, keepdim=True)) for part in self.parts())
        )

    def cached(self) -> TaskStatistics:
        """The same statistics, sharing tensors, with the last two products of every kind cached."""
        return replace(self, cache={})

    def times(self, vectors: Tensor) -> Tensor:
        """A_t V for vectors that all tasks share."""
        shape = (self.n_tasks, *vectors.shape)
        flat = self.gram.reshape(-1, self.n_features)
        # contiguous: the bits then follow from the values alone
        return self._from_cache(
            f"times {vectors.ndim}", vectors, lambda: (flat @ vectors.contiguous()).reshape(shape)
        )

    def scaled_gram(self, noise: Tensor) -> Tensor:
        """Σ_t A_t/s_t² over the tasks of this process."""
        return self._from_cache(
            "scaled", noise, lambda: torch.einsum("t,tij->ij", 1 / noise, self.gram)
        )

    def _from_cache(self, kind: str, argument: Tensor, make: Callable[[], Tensor]) -> Tensor:
        if self.cache is None:
            return make()
        known = self.cache.get(kind, [])
        for asked, product in known:
            if asked.shape == argument.shape and torch.equal(asked, argument):
                return product
        made = make()
        self.cache[kind] = [(argument.clone(), made), *known[:1]]
        return made

    def residual_power(self, weights: Tensor) -> Tensor:
        """‖X_t v_t - y_t‖² for a coefficient vector per task, or one for all."""
        moved = (
            self.times(weights)
            if weights.ndim == 1
            else (self.gram @ weights[..., None]).squeeze(-1)
        )
        quadratic = (moved * weights).sum(-1)
        return (self.power - 2 * (self.cross * weights).sum(-1) + quadratic).clamp(min=0)

    def target_variance(self) -> Tensor:
        """The variance of the targets of each task with the divisor n - 1; NaN for a single row."""
        centred = (self.power - self.sums**2 / self.counts).clamp(min=0)
        # what is left of a constant target after cancellation is rounding, not variance
        centred = torch.where(centred <= 8 * EPS * self.power, 0.0, centred)
        return centred / (self.counts - 1).clamp(min=0)

    def nmse(self, weights: Tensor) -> Tensor:
        """The mean over tasks of ‖X_t v_t - y_t‖² / (n_t var(y_t)).

        Tasks with fewer than two rows or a constant target are left out.
        """
        variance = self.target_variance()
        defined = (self.counts >= 2) & (variance > 0)
        ratios = self.residual_power(weights)[defined] / (self.counts * variance)[defined]
        total = self.all_tasks.total(torch.stack([ratios.sum(), defined.sum().double()]))
        return total[0] / total[1]

    def with_unit_targets(self) -> tuple[TaskStatistics, float]:
        """The same rows with targets of mean square 1, so that y's unit does not matter."""
        power = self.all_tasks.add(self.power)
        rows = self.n_rows
        unit = math.sqrt(power / rows) if power > 0 else 1.0
        return replace(
            self, cross=self.cross / unit, power=self.power / unit**2, sums=self.sums / unit
        ), unit


def check_whole(batch: Tensor | None) -> None:
    """Raise for a batch: all tasks together are one pass over their statistics."""
    if batch is not None:
        raise ValueError("this problem takes all tasks at once; leave out batch_size")


def zero_threshold(sizes: Any, x: Any) -> Any:
    """Eigenvalues of UᵀA_tU up to n ε ‖|U|ᵀ√diag(A_t)‖² count as zero, on tensors or arrays."""
    return len(x) * EPS * ((sizes @ abs(x)) ** 2).sum(-1)


def _blocks(sizes: Tensor, n_features: int) -> Iterator[tuple[Tensor, int]]:
    """Tasks of similar size and the width of their padded block, smallest first."""
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
