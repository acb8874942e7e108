r"""The inner epoch of variance reduction for columns that see most of the rows.

When a column is nearly full, gathering its rows costs more than reading all of them. The iterate is kept transposed, a
few long vectors, and one step with column i is a single product of a small and a tall matrix,

    Uᵀ ← Sᵀ[ (I + t E X)ᵀ, -t X, -t X a, t X a₀ ] (Uᵀ; Gᵀ; rᵀ; r₀ᵀ),    E = Uᵀ(G + r aᵀ - r₀ a₀ᵀ),  X = (C + λI)⁻¹

with r = m ∘ (U a) - x, r₀ = m ∘ (U₀ a₀) - x on the mask m of the column. The polar factor S is known before the
product, because the Gram matrix of its right-hand side is small algebra: UᵀU = I, and UᵀG follows the recursion of U.
That algebra is done in float64 with NumPy, whose calls on 5×5 matrices cost a quarter of a tensor library's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.problems.completion_kernels import fit_columns

if TYPE_CHECKING:
    from fisherfold.problems.completion_epoch import NoAnchor
    from fisherfold.problems.completion_snapshot import CompletionSnapshot

Small = npt.NDArray[np.float64]


class DenseEpoch:
    """One epoch of single-column steps without a ridge, on the CPU.

    Args:
        snapshot: the anchor.
        x: the first iterate.
        natural: whether steps are multiplied by (C + λI)⁻¹.
        damping: λ.
    """

    def __init__(self, snapshot: CompletionSnapshot | NoAnchor, x: Tensor, *, natural: bool, damping: float) -> None:
        self.snapshot, self.natural, self.damping = snapshot, natural, damping
        n, p = x.shape
        self.size = p
        self.anchor = snapshot.x.mT.contiguous()
        # Uᵀ, Gᵀ, r, r₀ lie above each other; two such stacks take turns, so that no product is written onto its input.
        self.stacks = [x.new_empty(2 * p + 2, n) for _ in range(2)]
        for stack in self.stacks:
            stack[:p], stack[p : 2 * p] = x.mT, snapshot.full_gradient.mT
        still = self.stacks[0][p : 2 * p]
        self.masked = torch.empty_like(still)
        self.known_tensor = snapshot.anchor_coefficients
        self.known = _small(snapshot.anchor_coefficients)
        self.table = self.known.copy()
        self.factor = self.table.T @ self.table / len(self.table)
        self.gram = np.eye(2 * p + 2)
        self.gram[p : 2 * p, p : 2 * p] = _small(still @ still.mT)
        self._set_cross(_small(self.stacks[0][:p] @ still.mT))
        self.weak = torch.finfo(x.dtype).eps ** 0.5

    def step(self, column: int, size: float) -> None:
        """Move along one column.

        Args:
            column: its number.
            size: t.
        """
        p, stack = self.size, self.stacks[0]
        values, mask = (table[column] for table in self.snapshot.problem.dense_columns())
        a = self._coefficients(column, stack[:p], values, mask)
        tail = stack[2 * p :]
        for out, frame, coefficients in (
            (tail[0], stack[:p], torch.from_numpy(a).to(stack.dtype)),
            (tail[1], self.anchor, self.known_tensor[column]),
        ):
            torch.mv(frame.mT, coefficients, out=out)
            out.mul_(mask).sub_(values)
        against = _small(tail @ stack.mT)
        pull = np.stack([a, -self.known[column]])
        inverse = self._inverse(column, a) if self.natural else np.eye(p)
        self.gram[2 * p :], self.gram[:, 2 * p :] = against, against.T
        along = self.gram[:p, p : 2 * p] + against[:, :p].T @ pull
        pieces = [np.eye(p) + size * along @ inverse, -size * inverse]
        weights = np.concatenate([*pieces, -size * (pull @ inverse)]).T
        image = weights @ self.gram
        lengths, vectors = np.linalg.eigh(image @ weights.T)
        turn = (vectors / np.sqrt(lengths)) @ vectors.T
        torch.mm(torch.from_numpy(turn @ weights).to(stack.dtype), stack, out=self.stacks[1][:p])
        self._set_cross(turn @ image[:, p : 2 * p])
        self.stacks.reverse()

    def _set_cross(self, cross: Small) -> None:
        p = self.size
        self.gram[:p, p : 2 * p], self.gram[p : 2 * p, :p] = cross, cross.T

    def _coefficients(self, column: int, here: Tensor, values: Tensor, mask: Tensor) -> Small:
        torch.mul(here, mask, out=self.masked)
        gram = _small(self.masked @ here.mT)
        try:
            factor = np.linalg.cholesky(gram)
            pivots = np.diagonal(factor) ** 2 / np.diagonal(gram)
        except np.linalg.LinAlgError:
            pivots = np.zeros(1)
        if pivots.min() > self.weak:
            return np.linalg.solve(gram, _small(here @ values))
        chosen = torch.tensor([column])
        side = self.snapshot.problem.ratings.by_column.take(chosen)
        return _small(fit_columns(side, here.mT.contiguous(), here.new_zeros(1)).coefficients[0])

    def _inverse(self, column: int, a: Small) -> Small:
        # The rule of CompletionSnapshot for the table of coefficients, then (C + λI)⁻¹.
        stored = self.table[column]
        factor = self.factor + (np.outer(a, a) - np.outer(stored, stored)) / len(self.table)
        if self.snapshot.table == "persistent":
            self.table[column], self.factor = a, factor
        values, vectors = np.linalg.eigh(factor)
        values = np.maximum(values, 0) + self.damping
        floor = values.max() * self.masked.shape[1] * torch.finfo(self.masked.dtype).eps if self.damping == 0 else 0.0
        inverse = np.divide(1.0, values, out=np.zeros_like(values), where=values > floor)
        return (vectors * inverse) @ vectors.T

    def point(self) -> Tensor:
        """The iterate as a frame.

        Returns:
            An n×p tensor.
        """
        return self.stacks[0][: self.size].mT.contiguous()


def _small(x: Tensor) -> Any:
    return x.double().numpy()
