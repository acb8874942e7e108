"""Damped inverses (F + λ I)⁻¹ of symmetric matrices.

Of one, of a Kronecker product, and of many small ones.

With the eigenvalues s ≠ 0 and eigenvectors V of F, and λ ≥ 0,

    (F + λ I)⁻¹ g = V [(Vᵀ g) / (s + λ)] + (g - V Vᵀ g) / λ            F† g for λ = 0

and for F = R ⊗ L, that is F g = L g R of matrices g, with the eigenpairs (l, Q) of L and (r, V) of
R

    (F + λ I)⁻¹ g = Q [(Qᵀ g V) / (l rᵀ + λ)] Vᵀ + (g - Q Qᵀ g V Vᵀ) / λ

Both hold for all eigenpairs and for the leading ones alone. Eigenvalues at or below
``rounding_share`` of the largest one are rounding, and count as 0; so does a part of g outside the
range of F that is rounding, which 1/λ would blow up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fisherfold.fisher.blocks import gram, inverse_blocks, rounding_share

# A part of the right-hand side of so many rounding units of its length is none.
_PART_UNITS = 1e2
# By how much the damping grows where a Cholesky factorisation fails.
_MORE_DAMPING = (1.0, 10.0, 100.0)
# Entries of VᵀV - I beyond which eigenvectors are not orthonormal: GPU solvers have returned such.
_SKEW = 1e-3


class FactorError(torch.linalg.LinAlgError):  # type: ignore[misc, name-defined]  # not listed by torch
    """A matrix is not finite, or no factorisation of it succeeded."""


def eigen(matrix: Tensor, *, name: str = "matrix") -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of a symmetric matrix.

    Tries float64 and then the CPU before it raises FactorError. ``name``: of the matrix in that
    error.
    """
    for dtype, device in _attempts(matrix):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(device, dtype))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        if bool(torch.isfinite(values).all()) and _is_orthonormal(vectors):
            return values.to(matrix), vectors.to(matrix)
    raise FactorError(
        f"no eigendecomposition of {name} (order {len(matrix)}) succeeded; it is not finite, or "
        "far from symmetric"
    )


def damped_inverse(matrix: Tensor, damping: float, *, name: str = "matrix") -> Tensor:
    """The inverse (M + λ I)⁻¹ as a matrix, by Cholesky.

    Tries more damping (up to 100 λ), float64 and then the CPU before it raises FactorError.
    """
    for dtype, device in _attempts(matrix):
        for factor in _MORE_DAMPING:
            damped = matrix.to(device, dtype, copy=True)
            damped.diagonal().add_(damping * factor)
            root, info = torch.linalg.cholesky_ex(damped)
            if int(info) == 0:
                inverse = torch.cholesky_inverse(root)
                if bool(torch.isfinite(inverse).all()):
                    return inverse.to(matrix)
    most = _MORE_DAMPING[-1] * damping
    raise FactorError(
        f"no Cholesky factorisation of {name} (order {len(matrix)}) succeeded with damping up to "
        f"{most:g}"
    )


def _attempts(matrix: Tensor) -> list[tuple[torch.dtype, torch.device]]:
    own = (matrix.dtype, matrix.device)
    return [own, (torch.float64, matrix.device), (torch.float64, torch.device("cpu"))]


def _is_orthonormal(vectors: Tensor) -> bool:
    product = vectors.mT @ vectors
    product.diagonal().sub_(1.0)
    return not product.numel() or bool(product.abs().max() < _SKEW)


@dataclass(frozen=True)
class Spectrum:
    """Eigenpairs of a symmetric matrix, all of them or the leading ones.

    Attributes:
        values: the eigenvalues s; 0 where they are rounding.
        vectors: orthonormal eigenvectors as columns; None for the identity matrix.
    """

    values: Tensor
    vectors: Tensor | None

    @classmethod
    def of(cls, matrix: Tensor, *, name: str = "matrix") -> Spectrum:
        """All eigenpairs of a matrix, which may be indefinite."""
        values, vectors = eigen((matrix + matrix.mT) / 2, name=name)
        return cls(torch.where(values.abs() > _cutoff(values), values, 0.0), vectors)

    @classmethod
    def of_rows(cls, rows: Tensor) -> Spectrum:
        """The eigenpairs of WᵀW with s > 0, from those of W Wᵀ, for W of few rows."""
        values, vectors = eigen(gram(rows.mT), name="W Wᵀ")
        keep = values > _cutoff(values)
        return cls(values[keep], rows.mT @ (vectors[:, keep] / values[keep].sqrt()))

    @classmethod
    def identity(cls, like: Tensor) -> Spectrum:
        """That of the identity matrix, of the order of a vector."""
        return cls(torch.ones_like(like), None)

    @property
    def is_whole(self) -> bool:
        """Whether these are all eigenpairs."""
        return self.vectors is None or self.vectors.shape[0] == self.vectors.shape[1]

    def coordinates(self, v: Tensor) -> Tensor:
        """Vᵀ v."""
        return v if self.vectors is None else self.vectors.mT @ v

    def combination(self, c: Tensor) -> Tensor:
        """V c."""
        return c if self.vectors is None else self.vectors @ c

    def solve(self, g: Tensor, damping: float, *, whole: Tensor | None = None) -> Tensor:
        """(F + λ I)⁻¹ g; F† g for λ = 0.

        ``whole``: the right-hand side of which g is what an earlier solve has left; its rounding is
        that of g.
        """
        seen = self.values != 0
        inner = self.coordinates(g)
        inside = torch.where(seen, inner, 0.0)
        found = self.combination(torch.where(seen, inside / (self.values + damping), 0.0))
        outside = g - self.combination(inside)
        # twice: what the first projection has left of a large g is rounding
        outside = outside - self.combination(torch.where(seen, self.coordinates(outside), 0.0))
        if damping > 0 and _length(outside) > _part_rounding(g if whole is None else whole):
            found = found + outside / damping
        return found


@dataclass(frozen=True)
class KroneckerSpectrum:
    """Eigenpairs of v ↦ c L v R, positive semi-definite, from those of its factors.

    Attributes:
        left: of L.
        right: of R.
        factor: the number c.
    """

    left: Spectrum
    right: Spectrum
    factor: float = 1.0

    @property
    def values(self) -> Tensor:
        """The products c l rᵀ, a matrix."""
        return self.factor * self.left.values[:, None].clamp(min=0) * self.right.values.clamp(min=0)

    @property
    def is_whole(self) -> bool:
        """Whether these are all eigenpairs."""
        return self.left.is_whole and self.right.is_whole

    def is_singular(self, damping: float) -> bool:
        """Whether an eigenvalue is rounding, and the damping lost in it."""
        values = self.values
        floor = values.max() * rounding_share(max(values.shape), values.dtype)
        return damping <= float(floor) and bool((values <= floor).any())

    def coordinates(self, v: Tensor) -> Tensor:
        """Qᵀ v V."""
        return self.right.coordinates(self.left.coordinates(v).mT).mT

    def combination(self, c: Tensor) -> Tensor:
        """Q c Vᵀ."""
        return self.right.combination(self.left.combination(c).mT).mT

    def solve(self, g: Tensor, damping: float) -> Tensor:
        """(c R ⊗ L + λ I)⁻¹ g; the pseudo-inverse for λ = 0."""
        values, inner = self.values, self.coordinates(g)
        if not self.is_whole and damping > 0:
            # (g - Q [l rᵀ/(l rᵀ + λ) ∘ (Qᵀ g V)] Vᵀ)/λ: what the bases leave out is divided by λ
            return (g - self.combination(inner * values / (values + damping))) / damping
        flat = values == 0
        if damping == 0:
            flat = values <= values.max() * rounding_share(max(g.shape), g.dtype)
        elif _length(torch.where(flat, inner, 0.0)) > _part_rounding(g):
            flat = torch.zeros_like(flat)
        damped = torch.where(flat, 1.0, values + damping)
        return self.combination(torch.where(flat, 0.0, inner / damped))


def damped_blocks(blocks: Tensor, damping: float) -> tuple[Tensor, bool]:
    """(B_j + λ I)⁻¹ of many small positive semi-definite matrices, and whether one is singular without its λ.

    Without λ a singular block has its pseudo-inverse. A λ below the rounding of a block does not
    make it regular: the inverse along flat directions would be anything.
    """
    order = blocks.shape[-1]
    rounding = rounding_share(order, blocks.dtype)
    sizes = blocks.diagonal(dim1=1, dim2=2).amax(1)
    # a row without data has no size of its own
    unseen = bool((sizes == 0).any()) and damping <= rounding * float(sizes.max())
    damped = blocks + damping * torch.eye(order, dtype=blocks.dtype, device=blocks.device)
    inverse = inverse_blocks(damped)
    if inverse is None:
        factors, info = torch.linalg.cholesky_ex(damped)
        inverse = torch.cholesky_inverse(factors) if bool((info == 0).all()) else None
    if inverse is not None:
        # λ_min/λ_max ≥ 1/(tr B tr B⁻¹): rounding can hide in neither, as it can in the pivots of
        # Cholesky
        traces = damped.diagonal(dim1=1, dim2=2).sum(1) * inverse.diagonal(dim1=1, dim2=2).sum(1)
        if bool((rounding * traces < 1).all()):
            return inverse, unseen
    values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)
    least = rounding * values.amax(1, keepdim=True)
    values = torch.where(values > least, values, 0.0) + damping
    inverse = torch.where(values > 0, 1 / torch.where(values > 0, values, 1.0), 0.0)
    return (vectors * inverse.unsqueeze(1)) @ vectors.mT, unseen or bool((values <= least).any())


def _cutoff(values: Tensor) -> float:
    if not len(values):
        return 0.0
    return max(float(values[-1]), 0.0) * rounding_share(len(values), values.dtype)


def _length(v: Tensor) -> float:
    return float(torch.linalg.vector_norm(v))


def _part_rounding(g: Tensor) -> float:
    return _PART_UNITS * torch.finfo(g.dtype).eps * _length(g)
