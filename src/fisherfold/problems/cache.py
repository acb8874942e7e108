"""What loss, gradient and Fisher information at one point share: the one cache of the problems.

A solver asks for the gradient at a point and then for the Fisher information there. Both need the
same pass over the data, so a problem keeps what it found at its last point, as long as the tensors
of that point and of the batch are the same objects and have not been written to.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

from fisherfold.manifolds.base import Point, leaves

T = TypeVar("T")


class LastPoint(Generic[T]):
    """Something computed at a point, and for a batch, until another is kept.

    Copies and pickles start empty.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._value: T | None = None

    def get(self, x: Point, batch: Tensor | None = None) -> T | None:
        """What was kept for this point and batch."""
        tensors = _tensors(x, batch)
        same = len(tensors) == len(self._tensors) and all(
            a is b for a, b in zip(tensors, self._tensors, strict=True)
        )
        return (
            self._value
            if same and self._versions == [tensor._version for tensor in tensors]
            else None
        )

    def put(self, x: Point, value: T, batch: Tensor | None = None) -> T:
        """Keep a value in place of the last one."""
        tensors = _tensors(x, batch)
        self._tensors, self._value = tensors, value
        # tensors of inference mode count no versions, and nothing can be kept for them
        self._versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
        return value

    def clear(self) -> None:
        """Forget the value."""
        self._tensors, self._versions, self._value = [], [], None

    def __getstate__(self) -> dict[str, object]:
        return {"_tensors": [], "_versions": [], "_value": None}


def _tensors(x: Point, batch: Tensor | None) -> list[Tensor]:
    return [*leaves(x), *([] if batch is None else [batch])]
