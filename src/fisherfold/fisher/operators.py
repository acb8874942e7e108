"""The Fisher information as a linear operator on the tangent space.

    F^R = (1/N) Σ_i E_{y ~ p(·|z_i)} [grad ψ_i grad ψ_iᵀ] = (1/N) Σ_i J_iᵀ F_L(z_i) J_i,
    with the Riemannian Jacobians J_i

An operator knows its point and its manifold, maps tangent vectors to tangent vectors, is symmetric
and positive semi-definite, carries the factor 1/N of a mean over samples, and says in
``approximates`` what it stands for. ``solve`` gives (F + λ I)⁻¹ g on the tangent space by the
method that the rule of ``fisherfold.fisher.solve`` picks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.fisher.conjugate import Solution
from fisherfold.fisher.damped import Spectrum
from fisherfold.fisher.solve import coordinates, solve, tangent_basis
from fisherfold.manifolds.base import (
    Manifold,
    Point,
    Tangent,
    combine,
    flatten,
    leaves,
    reorder_like,
    scale,
    tolerance,
    unflatten,
)
from fisherfold.warn import warn


class FisherOperator(ABC):
    """A symmetric positive semi-definite operator on the tangent space at a point.

    A subclass implements ``_matvec`` for a tangent vector that has been checked. It may offer two
    things more, which ``solve`` uses: ``rows``, a factor W with F = WᵀW (one row per sample and
    output), and ``structured_solve``, a direct solver that exploits its structure.

    Attributes:
        manifold: the manifold.
        point: the point whose tangent space it acts on.
        approximates: a sentence with the formula, for people.
        n_rows: how many rows the factor W has, or None if there is none.
        preconditioner: an operator near this one that is easily inverted, or None.
        targets: those that were drawn for it, a tensor for each draw; None where none are.
        work: floating point operations of one evaluation of what it is made of, to judge the cost
            of a product.
    """

    approximates: ClassVar[str]
    n_rows: int | None = None
    preconditioner: FisherOperator | None = None
    targets: list[Tensor] | None = None
    work: float = 0.0

    @property
    def is_structured(self) -> bool:
        """Whether ``structured_solve`` gives the exact damped solve."""
        return False

    def __init__(self, manifold: Manifold, point: Point) -> None:
        self.manifold = manifold
        # points are dictionaries of any order, flat vectors have that of the manifold
        self.point = reorder_like(point, manifold.point_shape)

    @abstractmethod
    def _matvec(self, v: Tangent) -> Tangent:
        """The product with a tangent vector, not checked."""

    def _check_vector(self, v: Tangent, name: str) -> None:
        """Raise unless ``v`` is one tangent vector.

        A batch of them would be taken for something else.
        """
        self.manifold.check_tangent(self.point, v, name=name)
        for leaf, like in zip(leaves(reorder_like(v, self.point)), leaves(self.point), strict=True):
            if leaf.shape != like.shape:
                raise ValueError(
                    f"{name} must be a single tangent vector like the point, of shape "
                    f"{tuple(like.shape)}, got {tuple(leaf.shape)}"
                )

    def matvec(self, v: Tangent) -> Tangent:
        """The product with a tangent vector."""
        self._check_vector(v, "v")
        return self._matvec(reorder_like(v, self.point))

    def __matmul__(self, v: Tangent) -> Tangent:
        return self.matvec(v)

    def quadratic(self, v: Tangent) -> Tensor:
        """The squared Fisher length <v, F v>."""
        return self.manifold.inner(self.point, v, self.matvec(v))

    def rows(self) -> Tensor:
        """The factor W of F = WᵀW, a matrix with ``n_rows`` flattened tangent vectors as its rows.

        Raises TypeError if the operator has no such factor.
        """
        raise TypeError(f"{type(self).__name__} has no factor in sample space")

    def in_basis(self, basis: Tensor) -> Tensor:
        """The matrix <b_i, F b_j> in an orthonormal basis, whose vectors are rows.

        A product for each of them.
        """
        images = torch.stack([flatten(self._matvec(unflatten(b, self.point))) for b in basis])
        matrix = coordinates(self.manifold, self.point, basis, images)
        return (matrix + matrix.mT) / 2

    def structured_solve(self, g: Tangent, damping: float) -> Tangent | None:
        """A direct solve that uses the operator's structure, or None if it has no structure to use."""
        return None

    def precondition(self, v: Tangent, damping: float) -> Tangent:
        """A cheap approximation of (F + λ I)⁻¹ v for truncated CG.

        That of ``preconditioner``, else the identity.
        """
        return v if self.preconditioner is None else self.preconditioner.precondition(v, damping)

    def variance_reduced(
        self, anchor_batch: FisherOperator, batch: FisherOperator, samples: Tensor, weight: float
    ) -> FisherOperator:
        """This operator over all samples, with the samples of a batch moved to another point.

        ``anchor_batch``: the operator over the batch at this point, of the same drawn targets: what
        is taken away must be a part of what is there, or the rest were not positive. ``batch``: the
        operator over the batch at the other point. ``samples``: the indices of the batch, each
        once. ``weight``: |B|/N, the share of the batch. Returns an operator at the other point; one
        of the same structure where sums keep it.
        """
        return VarianceReducedFisher(self, anchor_batch, batch, weight)

    def solution(
        self, g: Tangent, damping: float = 0.0, *, method: str = "auto", **options: float
    ) -> Solution:
        """Solve (F + λ I) d = g on the tangent space and say how.

        ``damping``: λ ≥ 0; with 0 a singular operator is inverted on its range, where ``cg`` needs
        g to lie. ``method``: ``auto``, ``structured``, ``woodbury``, ``dense``, ``cg`` or ``pinv``.
        ``**options``: for truncated CG: ``rtol``, ``max_iter``.
        """
        self._check_vector(g, "g")
        return solve(self, g, damping, method=method, **options)

    def solve(
        self, g: Tangent, damping: float = 0.0, *, method: str = "auto", **options: float
    ) -> Tangent:
        """Solve (F + λ I) d = g on the tangent space, with a warning where CG has found no solution.

        Without damping a singular F has one for g in its range only. ``auto`` takes ``cg`` for more
        than 128 dimensions, and for operators without a factor W; ``pinv`` gives F† g for any g, by
        forming a matrix.

        Arguments as of ``solution``.
        """
        found = self.solution(g, damping, method=method, **options)
        rounding = torch.finfo(leaves(self.point)[0].dtype).eps ** 0.5
        # where F g is 0 at once, 0 is F† g
        moved = any(bool(leaf.any()) for leaf in leaves(found.x))
        if found.curvature != "positive" and found.residual > rounding and moved:
            warn(
                f"cg ended before a direction of {found.curvature} curvature with a relative "
                f"residual of {found.residual:.1e}: F + λ I with λ = {float(damping):g} is "
                "singular or indefinite, and this d is no solution; use more damping, or "
                "method='pinv' for F† g",
                RuntimeWarning,
            )
        return found.x

    def dense(self) -> Tensor:
        """The matrix of the operator on flattened ambient vectors, P F P.

        The slow reference, for small problems.
        """
        like = flatten(self.point)
        columns = [
            flatten(self._matvec(self.manifold.project(self.point, unflatten(e, self.point))))
            for e in torch.eye(like.numel(), dtype=like.dtype, device=like.device)
        ]
        return torch.stack(columns, dim=1)


class DenseFisher(FisherOperator):
    """A given matrix on flattened ambient vectors, restricted to the tangent space: P M P.

    The reference that every other operator is tested against; also a way to bring one's own matrix.

    Args:
        manifold: the manifold.
        point: a point of it.
        matrix: M, symmetric, of the dtype and on the device of the point.

    Raises:
        ValueError: if the matrix is of another kind: solvers read one half of it, or go astray.
    """

    approximates = "P M P for a given symmetric matrix M, <v, F v> = vᵀ M v in any metric"

    def __init__(self, manifold: Manifold, point: Point, matrix: Tensor) -> None:
        super().__init__(manifold, point)
        size = flatten(point).numel()
        if matrix.shape != (size, size):
            raise ValueError(
                f"matrix must have shape ({size}, {size}) for this point, got {tuple(matrix.shape)}"
            )
        like = flatten(point)
        if (matrix.dtype, matrix.device) != (like.dtype, like.device):
            seen = f"{matrix.dtype} on {matrix.device}"
            raise ValueError(
                f"matrix must be {like.dtype} on {like.device} like the point, got {seen}"
            )
        skew, largest = (float(part.abs().max()) for part in (matrix - matrix.mT, matrix))
        if skew > tolerance(matrix.dtype) * largest:
            raise ValueError(
                "matrix must be symmetric, got entries that differ from their mirror images by up "
                f"to {skew:.2e}"
            )
        self.matrix = matrix

    def _matvec(self, v: Tangent) -> Tangent:
        return self.manifold.riemannian_gradient(
            self.point, unflatten(self.matrix @ flatten(v), self.point)
        )


class PreconditionedFisher(FisherOperator):
    """An operator with the eigenpairs of a nearby one as its preconditioner.

    Args:
        operator: the operator.
        nearby: one that costs little to make dense, such as that of some of the samples.
    """

    approximates = "nothing: the operator itself"

    def __init__(self, operator: FisherOperator, nearby: FisherOperator) -> None:
        super().__init__(operator.manifold, operator.point)
        self.operator, self.nearby = operator, nearby
        self.basis = tangent_basis(self.manifold, self.point).mT
        spectrum = Spectrum.of(nearby.in_basis(self.basis))
        seen = spectrum.values > 0
        # along flat directions no better than along the flattest other one
        least = spectrum.values[seen].min() if bool(seen.any()) else 1.0
        self.spectrum = Spectrum(torch.where(seen, spectrum.values, least), spectrum.vectors)

    @override
    def _matvec(self, v: Tangent) -> Tangent:
        return self.operator._matvec(v)

    @override
    def precondition(self, v: Tangent, damping: float) -> Tangent:
        c = coordinates(self.manifold, self.point, self.basis, flatten(v)[None])[0]
        return unflatten(self.spectrum.solve(c, damping) @ self.basis, self.point)


class VarianceReducedFisher(FisherOperator):
    """The batch at the iterate, all other samples at the anchor.

    F = w F_B(x) + T [F(x₀) - w F_B(x₀)] T*,  w = |B|/N, T the manifold's transport from x₀ to x and
    T* its adjoint: for the projection as for the parallel transport, the transport back.
    """

    approximates = "the samples of the batch at the iterate, all others at the anchor"

    def __init__(
        self,
        anchor: FisherOperator,
        anchor_batch: FisherOperator,
        batch: FisherOperator,
        weight: float,
    ) -> None:
        super().__init__(batch.manifold, batch.point)
        self.anchor, self.anchor_batch, self.batch, self.weight = (
            anchor,
            anchor_batch,
            batch,
            weight,
        )

    def _matvec(self, v: Tangent) -> Tangent:
        at_anchor = self.manifold.transport(self.point, self.anchor.point, v)
        rest = combine(
            1.0, self.anchor._matvec(at_anchor), -self.weight, self.anchor_batch._matvec(at_anchor)
        )
        back = self.manifold.transport(self.anchor.point, self.point, rest)
        return combine(1.0, back, 1.0, scale(self.weight, self.batch._matvec(v)))
