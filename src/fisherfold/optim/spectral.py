"""Linear algebra of positive semi-definite factors that does not give up.

Full eigendecompositions and Cholesky inverses escalate (damping, float64, CPU) before they fail with a named error;
leading eigenpairs come from block subspace iteration with Rayleigh-Ritz, M ≈ QΘQᵀ, with the spectral norm of the rest
M - QΘQᵀ estimated by power iterations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALL = 64  # below this order a full eigendecomposition is cheaper than looking for leading pairs


class FactorError(RuntimeError):
    """A Kronecker factor is not finite, or no factorisation of it succeeded."""


def eigen(matrix: Tensor, *, name: str = "factor") -> tuple[Tensor, Tensor]:
    """Eigenvalues (descending, not negative) and eigenvectors, trying float64 and then the CPU before giving up.

    Args:
        matrix: a symmetric positive semi-definite matrix.
        name: what to call it in the error.

    Returns:
        The eigenvalues and the matrix of eigenvectors, in the dtype of the matrix.

    Raises:
        FactorError: if no attempt gave finite, orthonormal eigenvectors.
    """
    attempts = [(matrix.dtype, matrix.device), (torch.float64, matrix.device), (torch.float64, torch.device("cpu"))]
    for dtype, device in attempts:
        try:
            values, vectors = torch.linalg.eigh(matrix.to(device, dtype))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        if _orthonormal(vectors) and bool(torch.isfinite(values).all()):
            values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
            return values.to(matrix), vectors.to(matrix).contiguous()
    raise FactorError(
        f"no eigendecomposition of {name} (order {len(matrix)}) succeeded in float32, float64 or on the CPU"
    )


def _orthonormal(vectors: Tensor) -> bool:
    """Whether the columns are orthonormal; GPU solvers have been seen to return ones that are not."""
    gram = vectors.T @ vectors
    gram.diagonal().sub_(1.0)
    return bool(gram.abs().max() < 1e-3)


def damped_inverse(matrix: Tensor, damping: float, *, name: str = "factor") -> Tensor:
    """The inverse of ``matrix + damping·I`` by Cholesky: more damping, then float64, then the CPU before giving up.

    Args:
        matrix: a symmetric positive semi-definite matrix.
        damping: what to add to the diagonal.
        name: what to call it in the error.

    Returns:
        The inverse, in the dtype of the matrix.

    Raises:
        FactorError: if no attempt succeeded.
    """
    attempts = [(matrix.dtype, matrix.device), (torch.float64, matrix.device), (torch.float64, torch.device("cpu"))]
    for dtype, device in attempts:
        for escalation in (1.0, 10.0, 100.0):
            damped = matrix.to(device, dtype, copy=True)
            damped.diagonal().add_(damping * escalation)
            root, info = torch.linalg.cholesky_ex(damped)
            if int(info) == 0:
                inverse = torch.cholesky_inverse(root)
                if bool(torch.isfinite(inverse).all()):
                    return inverse.to(matrix)
    order = len(matrix)
    raise FactorError(
        f"no Cholesky factorisation of {name} (order {order}) succeeded with damping up to {100 * damping:g}"
    )


@dataclass
class LeadingPairs:
    """The leading eigenpairs of a matrix, the spectral norm of what they leave out, and all pairs if they are known."""

    values: Tensor
    vectors: Tensor
    residual: float
    all: tuple[Tensor, Tensor] | None = None


def leading(
    matrix: Tensor, threshold: float, *, rank: int | None = None, start: Tensor | None = None, name: str = "factor"
) -> LeadingPairs:
    """Leading eigenpairs by block subspace iteration, until what they leave out is below a threshold.

    The residual ‖M - QΘQᵀ‖ is estimated by a few power iterations; the block doubles while it is too large, and beyond
    a third of the order a full eigendecomposition takes over: at once where the eigenvalues are too much alike.

    Args:
        matrix: a symmetric positive semi-definite matrix of order n.
        threshold: the accepted spectral norm of the residual.
        rank: keep so many instead, whatever they leave out.
        start: vectors that are likely to span the leading space.
        name: what to call it in an error.

    Returns:
        At least one eigenpair.
    """
    order = len(matrix)
    generator = torch.Generator(device=matrix.device).manual_seed(order)
    if rank is not None and order > SMALL and 3 * rank <= order:
        basis = _start(matrix, rank, start, generator)
        for _ in range(5 if start is None else 2):
            basis = orthonormalise(matrix @ basis)
        return _ritz(matrix, basis, generator)
    block = max(8, order // 16, 0 if start is None else start.shape[1])
    searching = rank is None and threshold > 0 and order > SMALL and 3 * block <= order
    searching = searching and not _flat(matrix, block, threshold)
    while searching and 3 * block <= order:
        basis = _start(matrix, block, start, generator)
        for sweep in range(4):
            for _ in range(2 if sweep or start is None else 1):
                basis = orthonormalise(matrix @ basis)
            pairs = _ritz(matrix, basis, generator)
            if pairs.residual <= threshold:
                return _drop(pairs, threshold)
        block *= 2
    values, vectors = eigen(matrix, name=name)
    keep = min(rank, order) if rank is not None else max(1, int((values > threshold).sum()))
    rest = float(values[keep]) if keep < order else 0.0
    return LeadingPairs(values[:keep], vectors[:, :keep].contiguous(), rest, (values, vectors))


def _flat(matrix: Tensor, block: int, threshold: float) -> bool:
    """Whether it is certain that no block of up to a third of the order n leaves out less than the threshold.

    With T the trace and F the Frobenius norm, the k largest eigenvalues add up to kT/n + √(k(n-k)/n · (F² - T²/n)) at
    most. Any k pairs therefore leave a remainder with at least the rest of T for its trace, whose root mean square
    eigenvalue, below which no power iteration ends, is at least an n-th of that.

    Args:
        matrix: a symmetric positive semi-definite matrix.
        block: the smallest that is tried; it is doubled.
        threshold: the accepted spectral norm of the remainder.

    Returns:
        False where only trying can tell.
    """
    order = len(matrix)
    while 6 * block <= order:
        block *= 2
    norm = torch.linalg.vector_norm(matrix, dtype=torch.float64)
    trace, length = torch.stack([matrix.diagonal().double().sum(), norm]).tolist()
    share, spread = block / order, max(length**2 - trace**2 / order, 0.0)
    rest = (1 - share) * trace - (block * (1 - share) * spread) ** 0.5
    return rest > 2 * threshold * order  # twice, for the luck of random probes


def _start(matrix: Tensor, columns: int, start: Tensor | None, generator: torch.Generator) -> Tensor:
    """Random columns, led by those of an earlier basis."""
    basis = torch.randn(len(matrix), columns, generator=generator, dtype=matrix.dtype, device=matrix.device)
    if start is not None and len(start) == len(matrix):
        shared = min(columns, start.shape[1])
        basis[:, :shared] += 10 * len(matrix) ** 0.5 * start[:, :shared]
    return basis


def _ritz(matrix: Tensor, basis: Tensor, generator: torch.Generator) -> LeadingPairs:
    image = matrix @ basis
    values, rotation = eigen(basis.T @ image)
    vectors = basis @ rotation
    probe = torch.randn(len(matrix), 16, generator=generator, dtype=matrix.dtype, device=matrix.device)
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


def orthonormalise(vectors: Tensor) -> Tensor:
    """An orthonormal basis of the span of the columns.

    On a GPU twice by Cholesky in float64, which is a few products instead of a Householder QR.

    Args:
        vectors: a tall matrix.

    Returns:
        A matrix of the same shape with orthonormal columns.
    """
    if vectors.is_cuda:
        basis = vectors.double()
        for _ in range(2):
            gram = basis.T @ basis
            gram.diagonal().add_(1e-14 * torch.trace(gram))
            root, info = torch.linalg.cholesky_ex(gram)
            basis = torch.linalg.solve_triangular(root.T, basis, upper=True, left=False)
        if int(info) == 0 and bool(torch.isfinite(basis).all()):
            return basis.to(vectors.dtype)
    return torch.linalg.qr(vectors)[0]


def spectral_norm(matrix: Tensor) -> float:
    """The largest eigenvalue of a positive semi-definite matrix, from above by at most a few per cent.

    Args:
        matrix: a symmetric positive semi-definite matrix.

    Returns:
        A number.
    """
    if len(matrix) <= SMALL:
        return max(float(torch.linalg.eigvalsh(matrix.double())[-1]), 0.0)
    generator = torch.Generator(device=matrix.device).manual_seed(len(matrix))
    probe = torch.randn(len(matrix), 4, generator=generator, dtype=matrix.dtype, device=matrix.device)
    for _ in range(12):
        probe = matrix @ probe
        sizes = torch.linalg.vector_norm(probe, dim=0, keepdim=True)
        probe = probe / sizes.clamp_min(torch.finfo(matrix.dtype).tiny)
    return 1.05 * float(sizes.max())
