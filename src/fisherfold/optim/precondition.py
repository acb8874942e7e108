"""Damped inverses of A ⊗ G, applied to a gradient.

Exact Tikhonov damping through the eigenpairs (d_A, Q_A), (d_G, Q_G):

    (A ⊗ G + λI)⁻¹ vec(g) = vec( Q_G [ (Q_Gᵀ g Q_A) / (d_G d_Aᵀ + λ) ] Q_Aᵀ ).

On leading eigenpairs only it reads g/λ - Q_G[C ∘ (Q_Gᵀ g Q_A)]Q_Aᵀ with C = d_G d_Aᵀ / (λ (d_G d_Aᵀ + λ)), the exact
inverse for Ã ⊗ G̃; its relative error is at most (‖A - Ã‖‖G‖ + ‖A‖‖G - G̃‖)/λ, which ``tolerance`` bounds. Factored
damping is (A + π√λ I)⁻¹ ⊗ (G + √λ/π I)⁻¹ with π² = (tr A/n)/(tr G/m): half the work, and another direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fisherfold.optim.spectral import SMALL, damped_inverse, eigen, leading, spectral_norm


@dataclass
class Preconditioner:
    """A damped inverse of A ⊗ G, ready to be applied.

    Attributes:
        left: eigenvectors of G, or its damped inverse where ``coefficients`` is None.
        right: eigenvectors of A, or its damped inverse.
        coefficients: what multiplies the gradient in the eigenbasis.
        base: what multiplies the gradient itself: 1/λ on a truncated basis, else 0.
        top: the largest eigenvalue of A ⊗ G over λ.
        error: an estimate of the relative error by truncation.
    """

    left: Tensor
    right: Tensor
    coefficients: Tensor | None
    base: Tensor | None
    top: float
    error: float

    def apply(self, gradient: Tensor) -> Tensor:
        """The preconditioned gradient.

        Args:
            gradient: an m×n matrix.

        Returns:
            An m×n matrix.
        """
        if self.coefficients is None:
            return self.left @ gradient @ self.right
        if self.left.shape[1] < self.right.shape[1]:
            core = (self.left.T @ gradient) @ self.right
        else:
            core = self.left.T @ (gradient @ self.right)
        core = core * self.coefficients
        if self.left.shape[1] < self.right.shape[1]:
            direction = self.left @ (core @ self.right.T)
        else:
            direction = (self.left @ core) @ self.right.T
        return direction if self.base is None else torch.addcmul(direction, gradient, self.base)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name.

        Returns:
            Those that are not None.
        """
        named = {"left": self.left, "right": self.right, "coefficients": self.coefficients, "base": self.base}
        return {key: value for key, value in named.items() if value is not None}

    def with_headroom(self) -> Preconditioner:
        """The same inverse in memory for half as many eigenvectors again, so that a later one fits.

        Returns:
            A new preconditioner with zero columns; itself where the basis is not truncated.
        """
        if self.coefficients is None or self.base is None:
            return self
        left = min(len(self.left), 32 * math.ceil(1.5 * self.left.shape[1] / 32))
        right = min(len(self.right), 32 * math.ceil(1.5 * self.right.shape[1] / 32))
        roomy = Preconditioner(
            self.left.new_empty(len(self.left), left),
            self.right.new_empty(len(self.right), right),
            self.coefficients.new_empty(left, right),
            torch.empty_like(self.base),
            self.top,
            self.error,
        )
        roomy.write(self)
        return roomy

    def fits(self, other: Preconditioner) -> bool:
        """Whether another one can be written into this one's memory.

        Args:
            other: the newer inverse.

        Returns:
            True if it has the same tensors, none of them larger.
        """
        mine, theirs = self.tensors(), other.tensors()
        same = mine.keys() == theirs.keys()
        return same and all(all(s >= t for s, t in zip(mine[k].shape, theirs[k].shape, strict=True)) for k in mine)

    def write(self, other: Preconditioner) -> None:
        """Copy a newer inverse into this one's memory, so that captured graphs see it; unused columns become zero.

        Args:
            other: an inverse that fits.
        """
        for key, mine in self.tensors().items():
            theirs = other.tensors()[key]
            mine.zero_()
            mine[tuple(slice(0, size) for size in theirs.shape)].copy_(theirs)
        self.top, self.error = other.top, other.error


@contextmanager
def products(device: torch.device, *, allow_tf32: bool) -> Iterator[None]:
    """Matrix products in the precision of their operands, even inside autocast, or in TF32 on CUDA where allowed.

    Args:
        device: where they run.
        allow_tf32: whether float32 products on CUDA may be rounded to TF32.

    Yields:
        Nothing.
    """
    with torch.autocast(device.type, enabled=False):
        if not (allow_tf32 and device.type == "cuda"):
            yield
            return
        backend = torch.backends.cuda.matmul
        name, value = ("fp32_precision", "tf32") if hasattr(backend, "fp32_precision") else ("allow_tf32", True)
        before = getattr(backend, name)
        setattr(backend, name, value)
        try:
            yield
        finally:
            setattr(backend, name, before)


def factored(a: Tensor, g: Tensor, damping: float, *, name: str = "factor") -> Preconditioner:
    """The inverse with factored (π-split) damping.

    Args:
        a: the input factor.
        g: the gradient factor.
        damping: λ.
        name: of the weight.

    Returns:
        The preconditioner.
    """
    mean_a, mean_g = float(torch.trace(a)) / len(a), float(torch.trace(g)) / len(g)
    pi = (max(mean_a, 1e-30) / max(mean_g, 1e-30)) ** 0.5 if mean_a > 0 and mean_g > 0 else 1.0
    right = damped_inverse(a, damping**0.5 * pi, name=f"A of {name}")
    left = damped_inverse(g, damping**0.5 / pi, name=f"G of {name}")
    return Preconditioner(left, right, None, None, spectral_norm(a) * spectral_norm(g) / damping, 0.0)


def exact(
    a: Tensor,
    g: Tensor,
    damping: float,
    *,
    rank: float | None = None,
    tolerance: float | None = None,
    start: Preconditioner | None = None,
    name: str = "factor",
) -> Preconditioner:
    """The inverse with exact Tikhonov damping, on the full basis or on the leading eigenpairs.

    Args:
        a: the input factor.
        g: the gradient factor.
        damping: λ.
        rank: the fraction of the eigenpairs of A to keep (all of G, and of A up to order 64); as many of both as
            ``tolerance`` asks for if not given.
        tolerance: the accepted relative error of the direction; without it and without a rank the basis is full.
        start: an earlier inverse, whose bases the search starts from.
        name: of the weight.

    Returns:
        The preconditioner.
    """
    if (rank is None and tolerance is None) or max(len(a), len(g)) <= SMALL:
        return _full(a, g, damping, name)
    norm_g = spectral_norm(g)
    budget = 0.5 * (tolerance or 0.0) * damping
    # a start from explicit inverses, or from another order, is no basis
    warm = start if start is not None and start.coefficients is not None else None
    columns = rows = None
    if rank is not None:
        columns, rows = len(a) if len(a) <= SMALL else max(1, round(rank * len(a))), len(g)
    start_a, start_g = (warm.right, warm.left) if warm else (None, None)
    kept_a = leading(a, budget / max(norm_g, 1e-30), rank=columns, start=start_a, name=f"A of {name}")
    norm_a = float(kept_a.values[0])
    top = norm_a * norm_g / damping
    if rank is None and (2 * len(kept_a.values) > len(a) or top > 1e4):
        return _full(a, g, damping, name, known=kept_a.all)  # no saving, or g/λ would cancel too many digits
    kept_g = leading(g, budget / max(norm_a, 1e-30), rank=rows, start=start_g, name=f"G of {name}")
    products = kept_g.values[:, None] * kept_a.values[None, :]
    coefficients = -products / (damping * (products + damping))
    base = torch.full((), 1.0 / damping, dtype=a.dtype, device=a.device)
    error = (kept_a.residual * norm_g + norm_a * kept_g.residual) / damping
    return Preconditioner(kept_g.vectors, kept_a.vectors, coefficients, base, top, error)


def _full(
    a: Tensor, g: Tensor, damping: float, name: str, known: tuple[Tensor, Tensor] | None = None
) -> Preconditioner:
    """The inverse on full bases; the one of A may be known already."""
    values_a, right = known or eigen(a, name=f"A of {name}")
    values_g, left = eigen(g, name=f"G of {name}")
    coefficients = 1.0 / (values_g[:, None] * values_a[None, :] + damping)
    return Preconditioner(left, right, coefficients, None, float(values_a[0] * values_g[0]) / damping, 0.0)
