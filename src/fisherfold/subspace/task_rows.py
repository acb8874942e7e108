"""Rows of many tasks in the features of the model, and the map to them from the user's.

Features are standardised and the intercept is one more column, z = ((x - μ)/σ, 1), so that all parts of a model live in
one space and are turned back into the user's units at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherfold.distributed import Axis
from fisherfold.subspace.tasks import TaskStatistics

Array = NDArray[Any]

# differences of this part of the numbers are rounding
ROUNDING = 1e-12


@dataclass(frozen=True)
class Rows:
    """Rows in the model's features.

    Attributes:
        Z: features.
        y: targets less their mean.
        task: task numbers.
        weight: row weights, or None.
        keys: a random number per row that a split is made by; drawn from the seed if not given.
    """

    Z: Tensor
    y: Tensor
    task: Tensor
    weight: Tensor | None
    keys: Array | None = None

    def statistics(self, n_tasks: int, axis: Axis | None = None, chosen: Tensor | None = None) -> TaskStatistics:
        """The statistics of these rows, or of some of them.

        Args:
            n_tasks: how many tasks there are here.
            axis: which ones, if tasks are shared out over processes.
            chosen: the numbers of the rows; all if not given.

        Returns:
            The statistics.
        """
        found = TaskStatistics.empty(n_tasks, self.Z.shape[1])
        rows = (self.Z, self.y, self.task) if chosen is None else (self.Z[chosen], self.y[chosen], self.task[chosen])
        weight = self.weight if chosen is None or self.weight is None else self.weight[chosen]
        if len(rows[0]):
            found.add(*rows, sample_weight=weight)
        return found if axis is None else replace(found, axis=axis)


def power_of_two(largest: Array) -> Array:
    """A unit in which numbers have squares that do not vanish; a power of two, so that dividing rounds nothing.

    Args:
        largest: the largest absolute value of each feature.

    Returns:
        The next power of two above each, 1 for 0.

    Example:
        >>> power_of_two(np.array([3.0, 0.0, 0.25])).tolist()
        [4.0, 1.0, 0.5]
    """
    return np.exp2(np.frexp(largest)[1])


@dataclass(frozen=True)
class Scaling:
    """The map from the user's features to the model's, and back for coefficients.

    Attributes:
        center: μ per feature.
        scale: σ per feature; 1 for a constant feature, which becomes 0 and carries no weight.
        offset: the mean target, taken off before fitting; of two classes the log odds of the second.
        intercept: whether a column of ones is added.
        flat: whether each feature was constant, up to rounding, in the rows that this was learnt from.
    """

    center: Array
    scale: Array
    offset: float
    intercept: bool
    flat: Array

    @classmethod
    def learn(cls, X: Array, y: Array, weight: Array | None, *, intercept: bool, scale: bool) -> Scaling:
        """Weighted means and standard deviations.

        Args:
            X: features.
            y: targets, one or several columns.
            weight: row weights.
            intercept: whether to centre and add a column of ones.
            scale: whether to divide by the standard deviation.

        Returns:
            The scaling.
        """
        n = X.shape[1]
        center = np.average(X, axis=0, weights=weight) if intercept else np.zeros(n)
        largest = np.abs(X).max(axis=0)
        unit = power_of_two(largest)
        spread = unit * np.sqrt(np.average(((X - center) / unit) ** 2, axis=0, weights=weight))
        offset = float(np.average(y.reshape(len(y), -1).mean(axis=1), weights=weight)) if intercept else 0.0
        return cls.of(center, spread, largest, offset, intercept=intercept, scale=scale)

    @classmethod
    def of(
        cls, center: Array, spread: Array, largest: Array, offset: float, *, intercept: bool, scale: bool
    ) -> Scaling:
        """The scaling of features with these moments.

        Args:
            center: their means, or zeros.
            spread: their standard deviations about these.
            largest: their largest absolute values.
            offset: the mean target.
            intercept: whether to add a column of ones.
            scale: whether to divide by the standard deviation.

        Returns:
            The scaling.
        """
        # a spread of rounding size is none
        flat = spread <= ROUNDING * np.maximum(largest, 1e-300)
        return cls(center, np.where(flat | (not scale), 1.0, spread), offset, bool(intercept), flat)

    def __call__(self, X: Array) -> Tensor:
        """The model's features of some rows.

        Args:
            X: the user's features.

        Returns:
            A float64 tensor, with the column of ones last.
        """
        shifted = X - self.center
        # what centring leaves of a constant feature is rounding; entry by entry, so that no row depends on others
        shifted[self.flat & (np.abs(shifted) <= ROUNDING * np.abs(self.center))] = 0.0
        Z = shifted / self.scale
        if self.intercept:
            Z = np.concatenate([Z, np.ones((len(Z), 1))], axis=1)
        return torch.from_numpy(np.ascontiguousarray(Z))

    def to_user(self, weights: Tensor) -> tuple[Array, Array]:
        """Coefficients and intercepts in the user's units.

        Args:
            weights: per task in the model's space, shape (tasks, features).

        Returns:
            Coefficients (tasks, features) and intercepts (tasks,).
        """
        values = weights.numpy()
        slopes = (values[:, :-1] if self.intercept else values) / self.scale
        constant = values[:, -1] + self.offset if self.intercept else np.zeros(len(values))
        return slopes, constant - slopes @ self.center
