"""Weights that are somewhere else while a gradient is computed there, and back to the bit for the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T", bound="Moved")


class Moved(ABC):
    """Weights that are moved inside a block, and back to the bit on leaving it.

    Args:
        params: parameters; each counts once, and those that ``_takes`` refuses are left alone.

    Raises:
        TypeError: if there is anything but parameters.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        for odd in (p for p in given if not isinstance(p, Tensor)):
            raise TypeError(f"params must be parameters, got a {type(odd).__name__} among them")
        # a weight that two layers share counts once: its second copy would be one of what has been moved
        self._weights = [p for p in dict.fromkeys(given) if self._takes(p)]
        self._kept = [p.detach().clone() for p in self._weights]
        self._written = 0  # how many of the copies are those of this block
        self._versions: list[int] | None = None

    @staticmethod
    @abstractmethod
    def _takes(p: Tensor) -> bool:
        """Whether a parameter can be moved."""

    @abstractmethod
    def _move(self) -> None:
        """Move the weights, each after it has been kept."""

    def _copy_of(self, index: int) -> Tensor:
        """The memory for a weight, new where the model has been cast or moved since."""
        weight, kept = self._weights[index], self._kept[index]
        if (kept.shape, kept.dtype, kept.device) != (weight.shape, weight.dtype, weight.device):
            kept = self._kept[index] = weight.detach().clone()
        return kept

    def _keep(self, index: int) -> Tensor:
        """Copy a weight into its memory; the weights are kept in their order."""
        kept = self._copy_of(index).copy_(self._weights[index])
        self._written = index + 1
        return kept

    def _put_back(self) -> None:
        for weight, kept in zip(self._weights[: self._written], self._kept, strict=False):
            weight.copy_(kept)

    @torch.no_grad()
    def __enter__(self: T) -> T:
        """Move the weights."""
        if self._versions is not None:
            name = type(self).__name__
            raise RuntimeError(f"the weights are moved already: one block of a {name} cannot be inside another")
        self._written = 0
        try:
            self._move()
        except BaseException:
            self._put_back()  # no block is entered, so none will be left
            raise
        self._versions = [weight._version for weight in self._weights]
        torch.clear_autocast_cache()  # an autocast region around the block keeps its casts of the weights
        return self

    @torch.no_grad()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the weights back, to the bit."""
        changed = self._versions != [weight._version for weight in self._weights]
        self._versions = None
        self._put_back()
        torch.clear_autocast_cache()
        if changed and error is None:
            raise RuntimeError(
                "weights were written to while they were moved, and are back at what they were before: "
                "take the step of the optimizer after the block"
            )
