"""How far apart medians over a few seeds must be before they differ.

Seeds of one cell of a table differ by chance. If all cells share a standard deviation σ, it is estimated from those
with several seeds together, s² = Σ (n_c - 1) s_c² / Σ (n_c - 1), and medians over n and m seeds are called the same if
they differ by less than

    t s √(v_n + v_m),        v_n the variance of the median of n standard normal numbers,

where t is the 97.5 percent quantile of Student's distribution: of pairs that are the same, one in twenty is told apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit  # Student's quantiles; those of scipy.stats are the same and take a while to load

LEAST_FREEDOM = 5  # below it s says too little, and the quantile is more about that than about σ
MEDIAN_VARIANCES = (1.0, 0.5, 0.4487, 0.2982, 0.2868)  # of one to five numbers; then about π/2n


@dataclass(frozen=True)
class Spread:
    """The standard deviation of seeds."""

    deviation: float
    freedom: int

    @classmethod
    def of(cls, cells: Iterable[Sequence[float]], *, guess: float) -> Spread:
        """The spread that cells share."""
        several = [cell for cell in cells if len(cell) > 1]
        freedom = sum(len(cell) - 1 for cell in several)
        if freedom < LEAST_FREEDOM:
            return cls(guess, 0)
        squares = sum((len(cell) - 1) * statistics.variance(cell) for cell in several)
        return cls(math.sqrt(squares / freedom), freedom)

    def margin(self, first: int, second: int) -> float:
        """By how much two medians must differ to be told apart."""
        quantile = float(stdtrit(self.freedom, 0.975)) if self.freedom else 2.0
        return quantile * self.deviation * math.sqrt(_variance(first) + _variance(second))


def _variance(count: int) -> float:
    return MEDIAN_VARIANCES[count - 1] if count <= len(MEDIAN_VARIANCES) else math.pi / (2 * count)
