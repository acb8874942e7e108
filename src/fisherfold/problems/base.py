"""What a solver sees: a manifold, a finite sum of losses on it, its gradient and its Fisher information.

    Ψ(x) = (1/N) Σ_i ψ_i(x),    ψ_i(x) = -log p(y_i | f(x_i, x))

Batches are index tensors into the N samples; ``None`` means all of them. Every quantity over a
batch B carries the factor 1/|B|, so that it estimates the one over all samples. A ``Snapshot`` is
what variance reduction needs: the full quantities at an anchor point, and the corrected batch
estimates elsewhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fisherfold.distributed import ALONE, Group
from fisherfold.fisher.covariance import not_a_function, other_representative
from fisherfold.fisher.hessian import Hessian, PriorFisher
from fisherfold.fisher.jacobian import ClusterFisher, EmpiricalFisher
from fisherfold.fisher.operators import FisherOperator
from fisherfold.fisher.solve import solve
from fisherfold.manifolds.base import (
    Manifold,
    Point,
    Tangent,
    combine,
    is_finite,
    leaves,
    scale,
    tolerance,
)

# rounding of a loss, in units of the precision
LOSS_ROUNDING = 1e3


class Problem(ABC):
    """A loss over a manifold as a finite sum, with its Riemannian gradient and Fisher information.

    A ``batch`` holds indices of samples, and stands for all of them if it is None.

    Attributes:
        manifold: where the parameter lives.
        n_samples: the number N of terms.
        fisher_kinds: the names that ``fisher`` accepts, the default first.
        random_kinds: those of them that are estimated from drawn targets, anew at every call.
        generator: the source of those targets; ``minimize`` lends that of the run.
        any_representative: whether the loss has to be the same for all representatives of a point
            of a quotient; a problem that keeps more in the coordinates of a frame says no.
        group: the processes that the samples are shared out over; every quantity is over all of
            them.
    """

    manifold: Manifold
    n_samples: int
    group: Group = ALONE
    fisher_kinds: ClassVar[tuple[str, ...]] = ("exact",)
    random_kinds: ClassVar[tuple[str, ...]] = ()
    any_representative: ClassVar[bool] = False
    generator: torch.Generator | None = None

    @abstractmethod
    def loss(self, x: Point, batch: Tensor | None = None) -> Tensor:
        """The mean loss over a batch."""

    def gradient(self, x: Point, batch: Tensor | None = None) -> Tangent:
        """The Riemannian gradient of ``loss``; a subclass has this or ``loss_and_gradient``."""
        return self.loss_and_gradient(x, batch)[1]

    def fisher(
        self, x: Point, batch: Tensor | None = None, *, kind: str = "exact"
    ) -> FisherOperator:
        """The Fisher information at ``x`` as an operator on the tangent space.

        ``kind``: one of ``fisher_kinds``. Raises NotImplementedError if the problem has none.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no Fisher information; use a method without, such as "
            "'trust-region' or 'lbfgs'"
        )

    def fisher_of_part(self, whole: FisherOperator, batch: Tensor, *, kind: str) -> FisherOperator:
        """The share of some samples in an operator over all, at its point.

        Of the same drawn targets.
        """
        return self.fisher(whole.point, batch, kind=kind)

    def hessian(self, x: Point, batch: Tensor | None = None) -> FisherOperator:
        """The Riemannian Hessian of the loss at ``x``.

        The kind ``observed`` if there is one, else by autodiff.

        Returns the operator, which may be indefinite.
        """
        if "observed" in self.fisher_kinds:
            return self.fisher(x, batch, kind="observed")
        return Hessian(self.manifold, x, lambda theta: self.loss(theta, batch))

    def scores(self, x: Point, groups: Any = None) -> FisherOperator:
        """The second moment of the gradients of the samples: the filling of a sandwich.

        ``groups``: a label for every sample, such that samples of different labels are independent;
        all are if not given. Raises ValueError if the problem has no gradients of single samples,
        or groups of another length.
        """
        if "empirical" not in self.fisher_kinds:
            raise ValueError(
                "robust=True needs the gradients of samples (the Fisher kind 'empirical'), "
                f"{type(self).__name__} has {list(self.fisher_kinds)}"
            )
        found = self.fisher(x, kind="empirical")
        found = found.data if isinstance(found, PriorFisher) else found
        if groups is None:
            return found
        if not isinstance(found, EmpiricalFisher):
            raise ValueError(f"{type(self).__name__} has no gradients of single samples for groups")
        numbers = cluster_numbers(groups, self.n_samples).to(found.z.device)
        return ClusterFisher(found, numbers, getattr(self, "weights", None))

    def loss_and_gradient(self, x: Point, batch: Tensor | None = None) -> tuple[Tensor, Tangent]:
        """Both at once, for problems that share work between them."""
        if type(self).gradient is Problem.gradient:
            raise NotImplementedError(f"{type(self).__name__} needs gradient or loss_and_gradient")
        return self.loss(x, batch), self.gradient(x, batch)

    def loss_rounding(self, x: Point, loss: float) -> float:
        """The size of the rounding error of a loss.

        Below it, solvers compare gradients instead of losses.

        A problem whose loss is a small difference of large numbers overrides this.

        ``x``: a point, for its dtype. Returns a thousand units in the last place of the loss.
        """
        return LOSS_ROUNDING * torch.finfo(leaves(x)[0].dtype).eps * abs(loss)

    def _tangent(self, x: Point, ambient: Tangent) -> Tangent:
        """The Riemannian gradient of a Euclidean one."""
        return self.manifold.riemannian_gradient(x, ambient)

    def snapshot(self, x: Point) -> Snapshot:
        """Anchor a variance-reduced epoch at ``x``."""
        return Snapshot(self, x)

    def descend(
        self, x: Point, batches: Iterable[Tensor], *, step: Callable[[int], float]
    ) -> Point:
        """Make one plain gradient step per batch: x ← R_x(-η_k g_B(x)).

        A problem whose steps are tiny overrides this to fuse them.

        ``step``: η_k as a function of the number of the step, from 0. Returns the point after the
        last step; steps end where the iterate leaves the finite numbers.
        """
        for k, batch in enumerate(batches):
            x = self.manifold.retract(x, scale(-step(k), self.gradient(x, batch)))
            if not is_finite(x):
                break
        return x

    def check_representatives(self, x: Point, loss: float) -> None:
        """Raise unless the loss has one value for all representatives of a point of a quotient.

        ``loss``: at ``x``. One random representative is tried, of x and then of a point near it:
        where a fit is perfect the loss is nothing but rounding.
        """
        off = self._off(x, loss)
        if off == 0:
            return
        generator = torch.Generator(device=leaves(x)[0].device).manual_seed(1)
        step = scale(0.1, self.manifold.random_tangent(x, generator=generator))
        nearby = self.manifold.retract(x, step)
        off = self._off(nearby, self._value(nearby))
        if off > 0:
            raise ValueError(not_a_function(self.manifold, "the loss", off))

    def _off(self, x: Point, loss: float) -> float:
        """By how much more than rounding the loss of another representative differs."""
        if not self.any_representative:
            return 0.0
        other = other_representative(self.manifold, x)
        if other is None:
            return 0.0
        off = abs(self._value(other) - loss)
        rounding = tolerance(leaves(x)[0].dtype) * abs(loss) + self.loss_rounding(x, loss)
        return off if math.isfinite(off) and off > rounding else 0.0

    def _value(self, x: Point) -> float:
        value = self.loss(x)
        return float(value.detach() if isinstance(value, Tensor) else value)

    def metrics(self, x: Point) -> dict[str, float]:
        """Further numbers to record in the trace, such as a held-out error.

        Returns names, other than those of the trace itself such as ``loss``, and values; nothing by
        default.
        """
        return {}


class Snapshot:
    """Variance-reduced estimates around an anchor point x₀ (RSVRG and its natural-gradient form).

    gradient: g = g_B(x) + T(g(x₀) - g_B(x₀)), T the manifold's transport from x₀ to x; Fisher:   F
    = (|B|/N) F_B(x) + T [F(x₀) - (|B|/N) F_B(x₀)] T*, that is, the samples of the batch are moved
    to x and all others stay at x₀, which keeps F positive semi-definite; for F a sample that the
    batch holds twice counts once.
    """

    def __init__(self, problem: Problem, x: Point) -> None:
        self.problem = problem
        self.x = x
        self.loss, self.full_gradient = problem.loss_and_gradient(x)
        self._full_fisher: dict[str, FisherOperator] = {}

    def gradient(self, x: Point, batch: Tensor) -> Tangent:
        """The variance-reduced gradient at ``x``."""
        manifold = self.problem.manifold
        correction = combine(1.0, self.full_gradient, -1.0, self.problem.gradient(self.x, batch))
        found = combine(
            1.0, self.problem.gradient(x, batch), 1.0, manifold.transport(self.x, x, correction)
        )
        # near a minimum the parts cancel, and what their rounding has left outside the tangent
        # space would count
        return manifold.project(x, found)

    def fisher(self, x: Point, batch: Tensor, *, kind: str) -> FisherOperator:
        """The variance-reduced Fisher information at ``x``.

        ``kind``: one of the problem's ``fisher_kinds``.
        """
        if kind not in self._full_fisher:
            self._full_fisher[kind] = self.problem.fisher(self.x, kind=kind)
        drawn = torch.unique(batch)
        full = self._full_fisher[kind]
        at_anchor = self.problem.fisher_of_part(full, drawn, kind=kind)
        at_x = self.problem.fisher(x, drawn, kind=kind)
        share = len(drawn) / self.problem.n_samples
        return full.variance_reduced(at_anchor, at_x, drawn, share)

    def epoch(
        self,
        x: Point,
        batches: Iterable[Tensor],
        *,
        step: float,
        kind: str | None = None,
        damping: float = 0.0,
    ) -> Point:
        """Make the inner steps of one epoch.

        X ← R_x(-t d) with d = g, or d = (F + λ I)⁻¹ g when a kind is given.

        A problem whose steps are tiny overrides this to fuse them.

        ``step``: t. ``kind``: one of the problem's ``fisher_kinds``; None for plain gradient steps.
        Returns the point after the last step; steps end where the iterate leaves the finite
        numbers.
        """
        manifold = self.problem.manifold
        for batch in batches:
            direction = self.gradient(x, batch)
            if kind is not None and is_finite(direction):
                try:
                    direction = solve(self.fisher(x, batch, kind=kind), direction, damping).x
                except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # a Fisher information that is not finite
                    direction = scale(math.nan, direction)
            x = manifold.retract(x, scale(-step, direction))
            if not is_finite(x):
                break
        return x


def cluster_numbers(groups: Any, n_samples: int) -> Tensor:
    """The labels of samples as numbers from 0 on."""
    labels = groups.cpu().numpy() if isinstance(groups, Tensor) else np.asarray(groups)
    if labels.shape != (n_samples,):
        raise ValueError(
            f"groups must be a label for each of the {n_samples} samples, got shape {labels.shape}"
        )
    found, numbers = np.unique(labels, return_inverse=True)
    if len(found) < 2:
        raise ValueError(
            "groups must name at least two clusters of samples: one cluster alone says nothing "
            "about its variance"
        )
    return torch.from_numpy(numbers.astype(np.int64))


def check_data(**columns: Any) -> None:
    """Raise unless all columns are finite tensors of the same number of samples on one device."""
    first, like = next(iter(columns.items()))
    for name, data in columns.items():
        if not isinstance(data, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(data).__name__}")
        if data.ndim == 0 or len(data) == 0:
            raise ValueError(f"{name} must hold at least one sample, got shape {tuple(data.shape)}")
        if len(data) != len(like):
            counts = f"{len(like)} and {len(data)}"
            raise ValueError(
                f"{first} and {name} must have the same number of samples, got {counts}"
            )
        if data.device != like.device:
            raise ValueError(
                f"{first} and {name} must be on one device, got {like.device} and {data.device}"
            )
        if data.is_floating_point() and not bool(torch.isfinite(data).all()):
            raise ValueError(f"{name} must be finite, got NaN or infinite entries")


def check_theta(manifold: Manifold, theta: Point, data: Sequence[Tensor]) -> None:
    """Raise unless theta is a point on the device and of the floating dtype of the data."""
    floating = [part.dtype for part in data if part.is_floating_point()]
    for leaf in filter(torch.is_tensor, leaves(theta)):
        if data and leaf.device != data[0].device:
            raise ValueError(f"theta must be on {data[0].device} like the data, got {leaf.device}")
        if floating and leaf.dtype.to_real() != floating[0].to_real():
            raise ValueError(
                f"theta must have the dtype {floating[0]} of the data x, got {leaf.dtype}"
            )
    manifold.check_point(theta, name="theta")


def check_batch(batch: Tensor, n_samples: int) -> None:
    """Raise unless the batch is a non-empty vector of sample indices."""
    if not isinstance(batch, Tensor):
        raise TypeError(f"batch must be a tensor of sample indices, got {type(batch).__name__}")
    # bytes are a mask to PyTorch, not indices, and other short integers nothing at all
    if batch.ndim != 1 or batch.dtype not in {torch.int64, torch.int32}:
        seen = f"{batch.dtype} of shape {tuple(batch.shape)}"
        raise ValueError(f"batch must be a vector of int64 or int32 indices, got {seen}")
    if len(batch) == 0:
        raise ValueError("batch must hold at least one sample, got none")
    if int(batch.min()) < 0 or int(batch.max()) >= n_samples:
        raise ValueError(
            f"batch must lie in 0..{n_samples - 1}, got {int(batch.min())}..{int(batch.max())}"
        )
