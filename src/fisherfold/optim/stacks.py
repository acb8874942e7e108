"""Weights of one shape that move together.

Their matrices, gradients and momentum as stacks [matrices, rows, columns].

The momentum in the state of a parameter is a view of its stack. Of sharded weights a stack holds
the rows of this process where spheres are rows, and whole weights elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fisherfold.optim.distributed import is_sharded, local, part, row_group, share_out, whole
from fisherfold.optim.layout import Entry, Layout
from fisherfold.optim.spectral import orthogonalise

State = dict[str, Tensor]


class Held:
    """What this process works on of a weight on spheres."""

    def __init__(self, entry: Entry, weight: Tensor) -> None:
        self.entry = entry
        self.weight = weight
        self.layout = entry.layout
        self.spheres = entry.spheres
        self.group: Any = None
        self.gathered = False
        p = entry.parameter
        if is_sharded(p):
            self._share(p)
        self.tensor = self.take(weight)

    def _share(self, p: Tensor) -> None:
        group, (matrices, rows, swap) = row_group(p), self.layout
        experts = p.ndim == 3 and matrices == len(p)
        by_row = self.spheres == matrices * rows and (experts or not swap)
        self.gathered = group is None or not by_row
        if self.gathered:
            return
        length = len(local(p))
        self.layout = Layout(length, rows, swap) if experts else Layout(1, length)
        self.spheres = self.layout.matrices * self.layout.rows
        self.group = None if experts else group

    def take(self, t: Tensor) -> Tensor:
        """The part of a tensor in the shape of the weight that is worked on."""
        return whole(t) if self.gathered else local(t)

    def put(self, t: Tensor, value: Tensor) -> None:
        """Write that part back."""
        local(t).copy_(part(value, self.entry.parameter) if self.gathered else value)


class Stack:
    """Weights of one shape, one above the other."""

    def __init__(self, held: Sequence[Held], states: Sequence[State]) -> None:
        self.held = held
        self.states = states
        self.layout = held[0].layout
        self.spheres = len(held) * held[0].spheres
        self.weights = self._stacked([h.tensor for h in held])
        gradients = [h.take(h.entry.parameter.grad) for h in held]  # type: ignore[arg-type]
        self.gradients = self._stacked(gradients).to(self.weights.dtype)
        self.momentum = self._momentum()
        self.share: Tensor | None = None
        self.update: Tensor = self.momentum

    def _stacked(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([self.layout.split(t) for t in tensors])

    def _momentum(self) -> Tensor:
        """The stack of which the buffers are views; it is made where they are not."""
        buffers = [state["momentum"] for state in self.states]
        base, size = buffers[0]._base, buffers[0].numel()
        if is_sharded(buffers[0]):
            return self._stacked([h.take(b) for h, b in zip(self.held, buffers, strict=True)])
        good = base is not None and base.ndim == 3 and base.numel() == size * len(buffers)
        if good and all(
            b._base is base and b.storage_offset() == i * size for i, b in enumerate(buffers)
        ):
            return base  # type: ignore[return-value]
        base = self._stacked(buffers)
        for state, matrices in zip(self.states, base.chunk(len(buffers)), strict=True):
            state["momentum"] = self.layout.join(matrices, state["momentum"].shape)
        return base

    def blocks(self, t: Tensor) -> Tensor:
        """A stack with one sphere per row."""
        return t.reshape(self.spheres, -1) if self.spheres else t.reshape(0, t.shape[-1])

    def parts(self, t: Tensor) -> tuple[Tensor, ...]:
        """A stack by weight."""
        return t.chunk(len(self.held))

    def store(self) -> None:
        """Write the weights, and the momentum where it is a copy, back."""
        for h, state, w, m in zip(
            self.held, self.states, self.parts(self.weights), self.parts(self.momentum), strict=True
        ):
            h.put(h.weight, self.layout.join(w, h.tensor.shape))
            if is_sharded(state["momentum"]):
                h.put(state["momentum"], self.layout.join(m, h.tensor.shape))


def stacks_of(held: Sequence[Held], states: Sequence[State]) -> list[Stack]:
    """Stacks of the weights of equal shape, layout, dtype and device."""
    kinds: dict[object, list[int]] = {}
    for index, h in enumerate(held):
        key = (h.tensor.shape, h.layout, h.spheres, h.group is None, h.gathered)
        kinds.setdefault((*key, h.tensor.dtype, h.tensor.device), []).append(index)
    return [Stack([held[i] for i in ids], [states[i] for i in ids]) for ids in kinds.values()]


def spectral(stacks: Sequence[Stack], steps: int) -> list[Tensor]:
    """The matrix signs of the updates.

    Those of sharded matrices are shared out over their processes.
    """
    found = [
        orthogonalise(s.update, steps) if s.held[0].group is None else s.update for s in stacks
    ]
    groups: dict[Any, list[int]] = {}
    for index, stack in enumerate(stacks):
        if stack.held[0].group is not None:
            groups.setdefault(stack.held[0].group, []).append(index)
    for group, members in groups.items():
        held = [h for i in members for h in stacks[i].held]
        updates = [u for i in members for u in stacks[i].update]

        def sign(index: int, matrix: Tensor, held: list[Held] = held) -> Tensor:
            layout = held[index].entry.layout
            return orthogonalise(layout.split(matrix), steps).reshape(matrix.shape)

        signs = iter(share_out(updates, [len(h.entry.parameter) for h in held], group, sign))
        for i in members:
            found[i] = torch.stack([next(signs) for _ in stacks[i].held])
    return found
