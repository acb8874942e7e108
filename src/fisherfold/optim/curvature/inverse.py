"""Damped inverses of A ⊗ G, normalised so that they are the identity for large damping.

Exact damping through the eigenpairs (d_A, Q_A), (d_G, Q_G):

    λ (A ⊗ G + λI)⁻¹ vec(g) = vec( Q_G [ λ (Q_Gᵀ g Q_A) / (d_G d_Aᵀ + λ) ] Q_Aᵀ ).

On leading eigenpairs only it reads g - Q_G[C ∘ (Q_Gᵀ g Q_A)]Q_Aᵀ with C = d_G d_Aᵀ / (d_G d_Aᵀ +
λ), the exact inverse for Ã ⊗ G̃; its relative error is at most (‖A - Ã‖‖G‖ + ‖A‖‖G - G̃‖)/λ, which
``tolerance`` bounds.

Relative damping is a (A + aI)⁻¹ ⊗ b (G + bI)⁻¹ with a = ρ tr A/n and b = ρ tr G/m: no eigenvalues
are needed, and the scale of the factors (the reduction of the loss, tokens, loss scaling,
accumulation) does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fisherfold.fisher.damped import damped_inverse, eigen

SMALL = 64  # below this order a full eigendecomposition is cheaper than looking for leading pairs
TOLERANCE = 0.05  # the accepted relative error of a direction on a truncated basis


@dataclass
class Preconditioner:
    """A normalised damped inverse of A ⊗ G, ready to be applied.

    Attributes:
        left: eigenvectors of G, or its damped inverse where ``coefficients`` is None.
        right: eigenvectors of A, or its damped inverse.
        coefficients: what multiplies the gradient in the eigenbasis.
        base: what multiplies the gradient itself: 1 on a truncated basis, else None.
    """

    left: Tensor
    right: Tensor
    coefficients: Tensor | None = None
    base: Tensor | None = None

    def apply(self, gradient: Tensor) -> Tensor:
        """The preconditioned gradient, a matrix like the gradient."""
        if self.coefficients is None:
            return self.left @ gradient @ self.right
        if self.left.shape[1] < self.right.shape[1]:
            core = ((self.left.mT @ gradient) @ self.right) * self.coefficients
            direction = self.left @ (core @ self.right.mT)
        else:
            core = (self.left.mT @ (gradient @ self.right)) * self.coefficients
            direction = (self.left @ core) @ self.right.mT
        return direction if self.base is None else torch.addcmul(direction, gradient, self.base)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, without those that are None."""
        return {name: value for name, value in vars(self).items() if value is not None}


@contextmanager
def own_precision(device: torch.device) -> Iterator[None]:
    """Matrix products in the precision of their operands, even inside autocast."""
    with torch.autocast(device.type, enabled=False):
        yield


def relative(a: Tensor, g: Tensor, damping: float, *, name: str = "weight") -> Preconditioner:
    """The inverse with damping relative to the mean eigenvalue of each factor.

    The identity for factors that are 0.
    """
    sides = []
    for matrix, label in ((g, "G"), (a, "A")):
        level = damping * float(torch.trace(matrix)) / len(matrix)
        if level == 0:
            sides.append(torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device))
        else:
            sides.append(damped_inverse(matrix, level, name=f"{label} of {name}").mul_(level))
    return Preconditioner(*sides)


def exact(
    a: Tensor,
    g: Tensor,
    damping: float,
    *,
    start: Preconditioner | None = None,
    name: str = "weight",
) -> Preconditioner:
    """The inverse with exact Tikhonov damping.

    On as many leading eigenpairs as ``TOLERANCE`` asks for.
    """
    if max(len(a), len(g)) <= SMALL:
        return dense(a, g, damping, name=name)
    norm_g = spectral_norm(g)
    budget = 0.5 * TOLERANCE * damping
    start_a, start_g = (
        (None, None) if start is None or start.coefficients is None else (start.right, start.left)
    )
    kept_a = leading(a, budget / max(norm_g, 1e-30), start=start_a, name=f"A of {name}")
    norm_a = float(kept_a.values[0])
    if 2 * len(kept_a.values) > len(a) or norm_a * norm_g > 1e4 * damping:
        return dense(
            a, g, damping, name=name, known=kept_a.all
        )  # no saving, or too many digits would cancel
    kept_g = leading(g, budget / max(norm_a, 1e-30), start=start_g, name=f"G of {name}")
    products = kept_g.values[:, None] * kept_a.values[None, :]
    return Preconditioner(
        kept_g.vectors, kept_a.vectors, -products / (products + damping), a.new_ones(())
    )


def dense(
    a: Tensor,
    g: Tensor,
    damping: float,
    *,
    name: str = "weight",
    known: tuple[Tensor, Tensor] | None = None,
) -> Preconditioner:
    """The inverse with exact damping on full bases: what ``exact`` approximates."""
    values_a, right = known or descending(a, name=f"A of {name}")
    values_g, left = descending(g, name=f"G of {name}")
    return Preconditioner(left, right, damping / (values_g[:, None] * values_a[None, :] + damping))


def descending(matrix: Tensor, *, name: str = "factor") -> tuple[Tensor, Tensor]:
    """Eigenvalues, the largest first and not negative, and eigenvectors."""
    values, vectors = eigen(matrix, name=name)
    return values.flip(0).clamp_min(0), vectors.flip(1).contiguous()


@dataclass
class LeadingPairs:
    """The leading eigenpairs of a matrix, the spectral norm of what they leave out.

    And all pairs if they are known.
    """

    values: Tensor
    vectors: Tensor
    residual: float
    all: tuple[Tensor, Tensor] | None = None


def leading(
    matrix: Tensor, threshold: float, *, start: Tensor | None = None, name: str = "factor"
) -> LeadingPairs:
    """Leading eigenpairs by block subspace iteration.

    Until what they leave out is below a threshold.

    The residual ‖M - QΘQᵀ‖ is estimated by a few power iterations; the block doubles while it is
    too large, and beyond a third of the order a full eigendecomposition takes over: at once where
    the eigenvalues are too much alike.
    """
    order = len(matrix)
    generator = torch.Generator(device=matrix.device).manual_seed(order)
    block = max(8, order // 16, 0 if start is None else start.shape[1])
    searching = threshold > 0 and order > SMALL and 3 * block <= order
    searching = searching and not _flat(matrix, block, threshold)
    while searching and 3 * block <= order:
        basis = _start(matrix, block, start, generator)
        for sweep in range(4):
            for _ in range(2 if sweep or start is None else 1):
                basis = torch.linalg.qr(matrix @ basis)[0]
            pairs = _ritz(matrix, basis, generator)
            if pairs.residual <= threshold:
                return _drop(pairs, threshold)
        block *= 2
    values, vectors = descending(matrix, name=name)
    keep = max(1, int((values > threshold).sum()))
    rest = float(values[keep]) if keep < order else 0.0
    return LeadingPairs(values[:keep], vectors[:, :keep].contiguous(), rest, (values, vectors))


def _flat(matrix: Tensor, block: int, threshold: float) -> bool:
    """Whether no block of up to a third of the order n leaves out less than the threshold.

    With T the trace and F the Frobenius norm, the k largest eigenvalues add up to kT/n + √(k(n-k)/n
    · (F² - T²/n)) at most. Any k pairs therefore leave a remainder with at least the rest of T for
    its trace, whose root mean square eigenvalue, below which no power iteration ends, is at least
    an n-th of that.
    """
    order = len(matrix)
    while 6 * block <= order:
        block *= 2
    norm = torch.linalg.vector_norm(matrix, dtype=torch.float64)
    trace, length = torch.stack([matrix.diagonal().double().sum(), norm]).tolist()
    share, spread = block / order, max(length**2 - trace**2 / order, 0.0)
    rest = (1 - share) * trace - (block * (1 - share) * spread) ** 0.5
    return rest > 2 * threshold * order  # twice, for the luck of random probes


def _start(
    matrix: Tensor, columns: int, start: Tensor | None, generator: torch.Generator
) -> Tensor:
    """Random columns, led by those of an earlier basis."""
    basis = torch.randn(
        len(matrix), columns, generator=generator, dtype=matrix.dtype, device=matrix.device
    )
    if start is not None and len(start) == len(matrix):
        shared = min(columns, start.shape[1])
        basis[:, :shared] += 10 * len(matrix) ** 0.5 * start[:, :shared]
    return basis


def _ritz(matrix: Tensor, basis: Tensor, generator: torch.Generator) -> LeadingPairs:
    image = matrix @ basis
    values, rotation = descending(basis.T @ image)
    vectors = basis @ rotation
    probe = torch.randn(
        len(matrix), 16, generator=generator, dtype=matrix.dtype, device=matrix.device
    )
    for _ in range(3):
        probe = matrix @ probe - vectors @ (values[:, None] * (vectors.T @ probe))
        sizes = torch.linalg.vector_norm(probe, dim=0, keepdim=True)
        probe = probe / sizes.clamp_min(torch.finfo(matrix.dtype).tiny)
    return LeadingPairs(values, vectors, 1.1 * float(sizes.max()))  # the estimate is from below


def _drop(pairs: LeadingPairs, threshold: float) -> LeadingPairs:
    """Without the pairs that the threshold does not ask for."""
    keep = max(1, int((pairs.values > threshold).sum()))
    rest = max(pairs.residual, float(pairs.values[keep]) if keep < len(pairs.values) else 0.0)
    return LeadingPairs(pairs.values[:keep], pairs.vectors[:, :keep].contiguous(), rest)


def spectral_norm(matrix: Tensor) -> float:
    """The largest eigenvalue of a positive semi-definite matrix.

    From above by at most a few per cent.
    """
    if len(matrix) <= SMALL:
        return max(float(torch.linalg.eigvalsh(matrix.double())[-1]), 0.0)
    generator = torch.Generator(device=matrix.device).manual_seed(len(matrix))
    probe = torch.randn(
        len(matrix), 4, generator=generator, dtype=matrix.dtype, device=matrix.device
    )
    for _ in range(12):
        probe = matrix @ probe
        sizes = torch.linalg.vector_norm(probe, dim=0, keepdim=True)
        probe = probe / sizes.clamp_min(torch.finfo(matrix.dtype).tiny)
    return 1.05 * float(sizes.max())
