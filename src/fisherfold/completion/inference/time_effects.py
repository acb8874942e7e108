"""Effects of rows and columns that drift: one for every member and period of time, d ~ N(0, s²) with s² learnt."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class TimeEffects:
    """Effects of the members of one side in periods of time."""

    starts: Tensor  # where each period but the first starts
    keys: Tensor  # member times number of periods plus period, ascending, of those with ratings
    mean: Tensor  # the posterior mean of each
    variance: Tensor  # the posterior variance of each
    prior: float  # s²

    @classmethod
    def start(cls, starts: Tensor, keys: Tensor, like: Tensor) -> TimeEffects:
        """Effects of which nothing is known yet."""
        zero = like.new_zeros(len(keys))
        return cls(starts, keys, zero, zero + 0.01, 0.01)

    def taken_from(self, old: TimeEffects, members: Tensor, times: Tensor) -> TimeEffects:
        """These effects as far as others tell them, from a member and a time of each key."""
        mean, variance = old.find(members, times)
        return replace(self, mean=mean, variance=variance, prior=old.prior)

    def find(self, members: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """The effects of some members at some times."""
        period = torch.bucketize(times, self.starts, right=True)
        key = members.long() * (len(self.starts) + 1) + period
        place = torch.searchsorted(self.keys, key).clamp(max=len(self.keys) - 1)
        known = (self.keys[place] == key) & (members >= 0)
        mean = torch.where(known, self.mean[place], torch.zeros_like(self.mean[place]))
        variance = torch.where(
            known, self.variance[place], torch.full_like(self.mean[place], self.prior)
        )
        timeless = torch.isnan(times)
        return mean.masked_fill(timeless, 0.0), variance.masked_fill(timeless, 0.0)

    def bound(self) -> float:
        """Minus the divergence of q from the prior."""
        share = (self.variance / self.prior).double()
        return 0.5 * float(
            (share.log() + 1 - share - self.mean.double().square() / self.prior).sum()
        )

    def improved(self, place: Tensor, left: Tensor, omega: Tensor) -> TimeEffects:
        """The optimum of the effects given what the other terms leave, then of their prior variance."""
        precision = torch.zeros_like(self.mean).index_add_(0, place, omega)
        pull = torch.zeros_like(self.mean).index_add_(0, place, omega * left)
        variance = 1 / (precision + 1 / self.prior)
        mean = variance * pull
        prior = float((mean.double().square() + variance.double()).mean())
        return replace(self, mean=mean, variance=variance, prior=max(prior, 1e-8))


def periods_of(times: npt.NDArray[np.float64], length: float | None, most: int) -> Tensor:
    """Where periods of time start, of a given length or with about equally many ratings in each."""
    if length is not None:
        days = np.unique(np.floor(times / length))
        if len(days) <= most:
            return torch.from_numpy(
                np.append(days[1:], days[-1] + 1) * length
            )  # after the last day nothing is known
    return torch.from_numpy(np.unique(np.quantile(times, np.linspace(0, 1, most + 1)[1:-1])))
