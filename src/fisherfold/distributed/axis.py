"""One side of a table over several processes: how many members it has, and which of them are here.

    Σ over all members = Σ over ranks of Σ over the members of a rank

A table with one row per member holds the rows of this process only. A side that is not shared out
(``group`` is ``ALONE``) is here as a whole, and its sums need nothing from others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.distributed.group import ALONE, Group


@dataclass(frozen=True)
class Axis:
    """The members of one side; a table x has a row for each member that is here.

    Attributes:
        size: how many there are on all processes together.
        start: the first one here.
        stop: one past the last one here.
        group: the processes they are shared out over; ``ALONE`` if all are here.
    """

    size: int
    start: int
    stop: int
    group: Group = field(default=ALONE, repr=False, compare=False)

    @classmethod
    def whole(cls, size: int) -> Axis:
        """A side that is here as a whole."""
        return cls(size, 0, size)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_shared(self) -> bool:
        """Whether the members are shared out over several processes."""
        return self.group.size > 1

    def total(self, x: Tensor) -> Tensor:
        """Complete a sum over the members."""
        return self.group.sum(x) if self.is_shared else x

    def add(self, x: Tensor) -> float:
        """Σ over all members and entries, in float64."""
        return float(self.total(x.sum(dtype=torch.float64)))

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the members."""
        return x.mean(0) if not self.is_shared else self.group.sum(x.sum(0)) / self.size

    def second_moment(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Σ x_i y_iᵀ over all members."""
        return self.total(x.mT @ (x if y is None else y))

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all members."""
        return self.group.gather(x) if self.is_shared else x

    def part(self, whole: Tensor) -> Tensor:
        """The rows of the members that are here."""
        return whole[self.start : self.stop] if self.is_shared else whole

    def local(self, members: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some members are here.

        Returns the positions within ``members`` of those that are here, and their numbers here.
        """
        if not self.is_shared:
            return torch.arange(len(members), device=members.device), members
        here = ((members >= self.start) & (members < self.stop)).nonzero().squeeze(1)
        return here, members[here] - self.start

    def check_same(self, x: Tensor) -> None:
        """Look whether a replicated tensor has the same bits on every process.

        Hosts of different kinds may round differently; a difference would let the processes decide
        differently and wait for each other for ever.

        Raises RuntimeError if it is not.
        """
        if not self.is_shared:
            return
        # a copy: a table of one column counts as contiguous whatever its last stride, and is
        # refused by the view
        plain = x.detach().clone(memory_format=torch.contiguous_format)
        whole = plain.view(torch.int32).sum(dtype=torch.int64)
        extremes = self.group.largest(torch.stack([whole, -whole]))
        if int(extremes[0]) != -int(extremes[1]):
            raise RuntimeError(
                "the processes have left the lock step: the iterate differs in its bits between "
                "ranks; run them on hosts of one kind, with one build of torch and one number of "
                "threads"
            )

    def randn(self, width: int, generator: torch.Generator) -> Tensor:
        """Random rows that do not depend on how the members are shared out.

        ``generator``: the source of randomness, in the same state on every process.
        """
        drawn = torch.randn(
            self.size, width, generator=generator, dtype=torch.float64, device="cpu"
        )
        return self.part(drawn).contiguous()

    def orthonormal(self, x: Tensor) -> Tensor:
        """An orthonormal basis of the columns of a table, by QR.

        The whole table is brought together for it, as it is small beside the ratings, so that signs
        are those of one process.
        """
        basis: Tensor = torch.linalg.qr(self.gather(x)).Q
        return self.part(basis).contiguous()


def balanced_cuts(counts: npt.NDArray[np.int64] | Sequence[int], parts: int) -> list[int]:
    """Cut a row of members into runs with about the same sum of counts.

    Where each starts, and the end.

    >>> balanced_cuts([5, 1, 1, 1, 2], 2)
    [0, 1, 5]
    """
    ends = np.cumsum(np.asarray(counts, dtype=np.int64))
    total = int(ends[-1]) if len(ends) else 0
    targets = [total * k / parts for k in range(1, parts)]
    # a member belongs to the run in which its middle lies
    middles = ends - np.asarray(counts, dtype=np.int64) / 2
    inner = np.searchsorted(middles, targets, side="left").tolist()
    return [0, *inner, len(ends)]
