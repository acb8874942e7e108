r"""The inner epoch of variance reduction for columns that see most of the rows.

When a column is nearly full, gathering its rows costs more than reading all of them. The iterate is kept transposed, a
few long vectors, and one step with column i is two products of a small and a tall matrix: the inner products that the
step needs, and the step

    Uᵀ ← Sᵀ[ t X a₀, -t X a, -t X, (I + t E X)ᵀ ] (r₀ᵀ; rᵀ; Gᵀ; Uᵀ),    E = Uᵀ(G + r aᵀ - r₀ a₀ᵀ),  X = (C + λI)⁻¹

with r = m ∘ (U a) - x, r₀ = m ∘ (U₀ a₀) - x on the mask m of the column. The polar factor S is known before the
product, because the Gram matrix of its right-hand side is small algebra: UᵀU = I, and UᵀG follows the recursion of U.
All of it runs in NumPy, whose products of so thin matrices take half the time of a tensor library's and whose calls on
5×5 matrices a quarter; the small algebra is float64.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import lapack
from torch import Tensor

from fisherfold.completion.kernels import fit_columns

if TYPE_CHECKING:
    from fisherfold.completion.epoch import NoAnchor
    from fisherfold.completion.snapshot import CompletionSnapshot

# Multiply-adds up to which a BLAS multiplies thin matrices as they lie.
SMALL_PRODUCT = 10**6

Array = npt.NDArray[Any]
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
        self.values, self.mask = (table.numpy() for table in snapshot.problem.dense_columns())
        n, p = x.shape
        self.size = p
        self.anchor = _numpy(snapshot.x.mT)
        # m ∘ Uᵀ, x, r₀, r, Gᵀ, Uᵀ lie above each other, so that every product reads neighbours; two such stacks take
        # turns, so that no product is written onto its input.
        self.stacks = [np.empty((3 * p + 3, n), dtype=self.anchor.dtype) for _ in range(2)]
        still = _numpy(snapshot.full_gradient.mT)
        for stack in self.stacks:
            stack[p + 3 : 2 * p + 3], stack[2 * p + 3 :] = still, _numpy(x.mT)
        self.chunk = max(64, SMALL_PRODUCT // (p * (2 * p + 2)))
        self.known = _numpy(snapshot.anchor_coefficients)
        self.table = self.known.astype(np.float64)
        self.factor = self.table.T @ self.table / len(self.table)
        # the Gram matrix of r₀, r, G, U, the weights of the step, and a₀, a: filled at every step
        self.gram, self.weights, self.pull = np.eye(2 * p + 2), np.empty((2 * p + 2, p)), np.empty((2, p))
        self.gram[2 : p + 2, 2 : p + 2] = still @ still.T
        self._set_cross(self.stacks[0][2 * p + 3 :] @ still.T)
        self.fit = np.full(p + 1, -1.0, dtype=self.anchor.dtype)
        self.identity = np.eye(p)
        self.weak = float(torch.finfo(x.dtype).eps) ** 0.5
        self.rounding = n * float(torch.finfo(x.dtype).eps)

    def step(self, column: int, size: float) -> None:
        """Move along one column.

        Args:
            column: its number.
            size: t.
        """
        p, stack, gram, weights, pull = self.size, self.stacks[0], self.gram, self.weights, self.pull
        here = stack[2 * p + 3 :]
        np.multiply(here, self.mask[column], out=stack[:p])
        stack[p] = self.values[column]
        np.matmul(self.known[column], self.anchor, out=stack[p + 1])
        np.multiply(stack[p + 1], self.mask[column], out=stack[p + 1])
        np.subtract(stack[p + 1], stack[p], out=stack[p + 1])
        products = np.asarray(stack[: p + 2] @ here.T, dtype=np.float64)
        a = self._coefficients(column, here, products)
        # r = (m ∘ U) a - x, of rows that are already there
        self.fit[:p] = a
        np.matmul(self.fit, stack[: p + 1], out=stack[p + 2])
        against = stack[p + 1 : p + 3] @ stack[p + 1 : 2 * p + 3].T
        gram[:2, : p + 2], gram[: p + 2, :2] = against, against.T
        along = gram[:2, p + 2 :]
        along[0], along[1] = products[p + 1], products[:p] @ a - products[p]
        gram[p + 2 :, :2] = along.T
        np.negative(self.known[column], out=pull[0])
        pull[1] = a
        down = self._inverse(column, a) * -size if self.natural else self.identity * -size
        np.matmul(pull, down, out=weights[:2])
        weights[2 : p + 2] = down
        np.subtract(self.identity, (gram[p + 2 :, 2 : p + 2] + along.T @ pull) @ down, out=weights[p + 2 :])
        image = weights.T @ gram
        turn = _inverse_root(image @ weights)
        self._move((turn @ weights.T).astype(here.dtype, copy=False))
        self._set_cross(turn @ image[:, 2 : p + 2])

    def _move(self, weights: Array) -> None:
        # Chunks that stay below the size at which the product would be packed first.
        p, (old, new) = self.size, self.stacks
        for start in range(0, old.shape[1], self.chunk):
            part = slice(start, start + self.chunk)
            np.matmul(weights, old[p + 1 :, part], out=new[2 * p + 3 :, part])
        self.stacks.reverse()

    def _set_cross(self, cross: Array) -> None:
        p = self.size
        self.gram[p + 2 :, 2 : p + 2], self.gram[2 : p + 2, p + 2 :] = cross, cross.T

    def _coefficients(self, column: int, here: Array, products: Small) -> Small:
        gram = products[: self.size]
        factor, solution, failed = lapack.dposv(gram, products[self.size])
        if failed == 0 and (factor.diagonal() ** 2 > self.weak * gram.diagonal()).all():
            return np.asarray(solution)
        side = self.snapshot.problem.ratings.by_column.take(torch.tensor([column]))
        frame = torch.from_numpy(np.ascontiguousarray(here.T))
        return fit_columns(side, frame, frame.new_zeros(1)).coefficients[0].double().numpy()

    def _inverse(self, column: int, a: Small) -> Small:
        # The rule of CompletionSnapshot for the table of coefficients, then (C + λI)⁻¹.
        stored = self.table[column]
        factor = self.factor + (a[:, None] * a - stored[:, None] * stored) / len(self.table)
        if self.snapshot.table == "persistent":
            self.table[column], self.factor = a, factor
        values, vectors = _spectrum(factor)
        # in ascending order; rounding may leave the least below zero
        if self.damping == 0 and not values[0] > values[-1] * self.rounding:
            inverse = np.divide(1.0, values, out=np.zeros_like(values), where=values > values[-1] * self.rounding)
        else:
            inverse = 1 / (np.maximum(values, 0) + self.damping)
        return np.asarray((vectors * inverse) @ vectors.T)

    def point(self) -> Tensor:
        """The iterate as a frame.

        Returns:
            An n×p tensor.
        """
        return torch.from_numpy(np.ascontiguousarray(self.stacks[0][2 * self.size + 3 :].T))


def _inverse_root(matrix: Small) -> Small:
    lengths, vectors = _spectrum(matrix)
    return np.asarray((vectors / np.sqrt(lengths)) @ vectors.T)


def _spectrum(matrix: Small) -> tuple[Small, Small]:
    # LAPACK itself: the wrappers cost more than the 5×5 problem.
    values, vectors, failed = lapack.dsyevd(matrix)
    if failed or not math.isfinite(values[-1]):
        raise np.linalg.LinAlgError(f"a spectrum did not converge (code {failed})")
    return values, vectors


def _numpy(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().contiguous().numpy())
