"""The lengths of rows on spheres, which are 1 unless somebody else has changed the weight.

Steps leave rows at unit length. Weights that are loaded into the network in the middle of a run may have any lengths r;
PyTorch counts the changes of a tensor, so that they are looked for only where there was one besides the steps; it does
not count what is written into ``parameter.data``, but another tensor in its place lies elsewhere in memory. Rows of
zero that come that way have no direction, and go on as in Euclidean space.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fisherfold.optim.rows import block_lengths


class Lengths:
    """Knows which weights have unit rows; copies and pickles know nothing and look again."""

    def __init__(self) -> None:
        self._unit_at: dict[int, tuple[int, int]] = {}
        self._left_at: dict[int, tuple[int, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What is known is about tensors of this process."""
        return vars(Lengths())

    def changed(self, parameter: Tensor) -> bool:
        """Whether anything but its last step has changed a parameter.

        Args:
            parameter: any parameter.

        Returns:
            True also where nothing is known; False in a step that is captured in a CUDA graph, which cannot look.
        """
        captured = parameter.is_cuda and torch.cuda.is_current_stream_capturing()
        return not captured and self._left_at.get(id(parameter)) != _stamp(parameter)

    def other(self, parameter: Tensor, spheres: int, alive: Tensor | None) -> Tensor | None:
        """The lengths of the blocks of a parameter, if they are not all 1.

        A step that is captured in a CUDA graph goes on with what the steps before it found.

        Args:
            parameter: any shape.
            spheres: the number of blocks.
            alive: a column that is False at blocks that have no direction, if there are any.

        Returns:
            A column, 1 for blocks without a direction; or None.
        """
        known = self._unit_at.get(id(parameter))
        captured = parameter.is_cuda and torch.cuda.is_current_stream_capturing()
        if known is not None and (captured or known == _stamp(parameter)):
            return None
        lengths = block_lengths(parameter, spheres, alive)
        return None if not captured and bool((lengths == 1).all()) else lengths

    def moved(self, parameter: Tensor, lengths: Tensor | None) -> None:
        """Note what a step leaves.

        Args:
            parameter: after the step.
            lengths: those of its blocks, or None for 1.
        """
        self._left_at[id(parameter)] = _stamp(parameter)
        if lengths is None:
            self._unit_at[id(parameter)] = _stamp(parameter)
        else:
            self._unit_at.pop(id(parameter), None)


def _stamp(parameter: Tensor) -> tuple[int, int]:
    """What is another one once a parameter has been written to, or has been given another tensor (``p.data = t``)."""
    return parameter._version, parameter.data_ptr()
