"""Truncated conjugate gradients on the tangent space, which stay conjugate.

In exact arithmetic the residuals r_j of CG are orthogonal in the inner product of the preconditioner, and d steps solve
any system of dimension d. Rounding ends that as soon as a steep direction is solved for: short recursions then find it
again and again, and a system of dimension 30 and condition 1e6 takes more than 300 steps in float32, 100 in float64.
So the residuals are kept while they fit, and each new one is freed of what it has of them,

    r ← r - Σ_j r_j <z_j, r> / <z_j, r_j>,    z_j = M⁻¹ r_j

at two passes over what is kept, compared with a product with F that passes over the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fisherfold.fisher.flat import flatten, unflatten
from fisherfold.manifolds.base import Tangent, combine, dot, leaves, scale

if TYPE_CHECKING:
    from fisherfold.fisher.operators import FisherOperator

# the share of a residual that may lie outside the tangent space
OUTSIDE = 1e-8
# numbers in the residuals that are kept: 128 MB in float64
KEPT_ENTRIES_UP_TO = 2**24


@dataclass(frozen=True)
class Solution:
    """A direction and how it was found.

    Attributes:
        x: the direction d with (F + λ I) d ≈ g.
        method: a name of ``METHODS``.
        decrease: <g, d> - ½ <d, (F + λ I) d>, by how much the quadratic model falls along -d.
        residual: ‖(F + λ I) d - g‖ / ‖g‖ for ``cg``; 0 for the direct methods, which do not measure it.
        iterations: products with F that were spent.
        curvature: ``positive``, or ``zero``/``negative`` when ``cg`` met such a direction and stopped before it.
    """

    x: Tangent
    method: str
    decrease: float
    residual: float = 0.0
    iterations: int = 0
    curvature: str = "positive"


def conjugate_gradients(
    operator: FisherOperator, g: Tangent, damping: float, *, rtol: float, max_iter: int
) -> Solution:
    """Truncated preconditioned conjugate gradients on the tangent space.

    Residuals are projected wherever what rounding has left outside the tangent space, about eps ‖g‖ a step, may count
    beside them: in every step in float32, late ones in float64. They come from a recursion; where rounding may have
    parted it from g - (F + λ I) x, a product is spent on the truth, and CG begins anew from that if it is another one.
    Where beginning anew has not halved it, CG ends: no smaller residual can be had in this precision, about
    eps ‖F‖ ‖x‖ / ‖g‖.

    A singular F without damping needs a g in its range (a gradient is); otherwise CG ends with curvature ``zero`` and
    its last iterate, and ``pinv`` is the method to name.
    """
    # a power of two, which keeps all bits: in float32 squares of small residuals would vanish
    largest = max(float(leaf.abs().amax()) for leaf in leaves(g))
    unit = 2.0 ** min(max(math.frexp(largest)[1], -1000), 1000) if largest < math.inf else 1.0
    g = scale(1 / unit, g)
    space = _TangentSystem(operator, g, damping)
    run = _Recursion(space, rtol)
    while space.products + run.is_doubtful < max_iter and run.curvature == "positive":
        if run.is_due:
            if run.find_the_truth():
                break
        elif run.left <= run.goal:
            break
        else:
            run.step()
    x, r = space.project(run.x), run.r
    if run.is_doubtful and space.products < max_iter:
        r = space.residual(x)
    decrease = 0.5 * (space.inner(g, x) + space.inner(r, x)) * unit * unit
    x = scale(unit, x)
    curvature = "positive" if run.curvature == "not finite" else run.curvature
    return Solution(x, "cg", decrease, space.length(r) / run.size if run.size > 0 else 0.0, space.products, curvature)


class _Recursion:
    """The recursion: x, its residual r and the next direction p, with a bound on what rounding has done to r."""

    def __init__(self, space: _TangentSystem, rtol: float) -> None:
        self.space, self.x = space, scale(0.0, space.g)
        self.curvature, self.steepest, self.goal = "positive", 0.0, 0.0
        self._begin(space.g)
        self.size, self.goal = self.left, rtol * self.left
        # beside a long x along a flat direction rounding may leave more residual than x = 0 has, though x is near
        self.first = math.inf

    def _begin(self, r: Tangent) -> None:
        """Go on from the residual r of x, with no memory."""
        self.r, self.left, self.drift = r, self.space.length(r), 0.0
        self.first = self.left
        self.checked, self.left_then = self.space.products, self.left
        z = self.space.precondition(r)
        self.p, self.rz = z, self.space.inner(r, z)
        self._look_for_rounding(z)
        self.kept = _Residuals(r, is_plain=z is r, ambient=self.space.ambient)
        self.kept.add(r, z, self.rz)

    @property
    def is_doubtful(self) -> bool:
        """Whether the truth may be another one than r."""
        return self.drift > self.left / 2

    @property
    def is_due(self) -> bool:
        """Whether it is time to spend a product on the truth."""
        rested = self.space.products >= 2 * self.checked or self.left <= self.left_then / 4
        return self.is_doubtful and (rested or self.left <= self.goal)

    def find_the_truth(self) -> bool:
        """Believe r if it is near the truth, else go on from that."""
        truth, before = self.space.residual(self.x), self.first
        gap = self.space.length(combine(1.0, truth, -1.0, self.r))
        if gap <= self.left / 2 and self.left > self.goal:
            self.drift, self.checked, self.left_then = gap, self.space.products, self.left
            return False
        self._begin(truth)
        return not self.left < before / 2

    def step(self) -> None:
        """One step, with one product, unless there is no curvature along the direction."""
        space, p = self.space, self.p
        product = space.product(p)
        along, length = space.inner(p, product), space.inner(p, p)
        if not math.isfinite(along):
            self.x, self.curvature = scale(math.nan, self.x), "not finite"
            return
        # a curvature at the rounding level of the steepest one seen is no curvature: dividing by it would blow up x
        self.steepest = max(self.steepest, abs(along) / length) if length > 0 else self.steepest
        rounding = 10 * space.eps * self.steepest * length
        if not along > rounding:
            self.curvature = "negative" if along < -rounding else "zero"
            return
        alpha = self.rz / along
        self.x = combine(1.0, self.x, alpha, p)
        self.r, removed = self.kept.remove(combine(1.0, self.r, -alpha, product))
        self.left = space.length(self.r)
        if space.eps * space.products * self.size > OUTSIDE * self.left:
            self.r = space.project(self.r)
            self.left = space.length(self.r)
        self.drift += space.eps * (self.steepest * space.length(self.x) + self.left) + removed
        z = space.precondition(self.r)
        before, self.rz = self.rz, space.inner(self.r, z)
        self._look_for_rounding(z)
        self.p = combine(1.0, z, self.rz / before, p)
        self.kept.add(self.r, z, self.rz)

    def _look_for_rounding(self, z: Tangent) -> None:
        """A singular preconditioner has nothing to say about some r: its z is 0, or rounding at right angles to r."""
        rounding = 10 * self.space.eps * self.left
        if z is not self.r and self.left > self.goal and self.rz <= rounding * self.space.length(z):
            self.curvature = "zero"


class _TangentSystem:
    """The damped system (F + λ I) d = g, kept on the tangent space, with the products spent on it."""

    def __init__(self, operator: FisherOperator, g: Tangent, damping: float) -> None:
        self.operator, self.damping, self.products = operator, damping, 0
        self.eps, self.ambient = torch.finfo(leaves(g)[0].dtype).eps, operator.manifold.ambient_metric
        self.g = self.project(g)

    def inner(self, u: Tangent, v: Tangent) -> float:
        return float(dot(u, v) if self.ambient else self.operator.manifold.inner(self.operator.point, u, v))

    def length(self, v: Tangent) -> float:
        return self.inner(v, v) ** 0.5

    def project(self, v: Tangent) -> Tangent:
        return self.operator.manifold.project(self.operator.point, v)

    def product(self, v: Tangent) -> Tangent:
        self.products += 1
        return combine(1.0, self.operator._matvec(v), self.damping, v)

    def residual(self, x: Tangent) -> Tangent:
        return self.project(combine(1.0, self.g, -1.0, self.product(x)))

    def precondition(self, r: Tangent) -> Tangent:
        z = self.operator.precondition(r, self.damping)
        return r if z is r else self.project(z)


class _Residuals:
    """The residuals so far, each over its length √<r, z>, as rows; further ones are not kept when there is no room."""

    def __init__(self, like: Tangent, *, is_plain: bool, ambient: bool) -> None:
        self.like, self.is_plain, self.count = like, is_plain, 0
        self.room = KEPT_ENTRIES_UP_TO // max(1, sum(leaf.numel() for leaf in leaves(like))) if ambient else 0
        self.residuals: Tensor | None = None
        self.preconditioned: Tensor | None = None

    def add(self, r: Tangent, z: Tangent, rz: float) -> None:
        """Keep a residual, with z = M⁻¹ r and rz = <r, z>."""
        if self.count >= self.room or not 0 < rz < math.inf:
            return
        self.residuals = self._with(self.residuals, r, rz)
        self.preconditioned = self.residuals if self.is_plain else self._with(self.preconditioned, z, rz)
        self.count += 1

    def _with(self, rows: Tensor | None, v: Tangent, rz: float) -> Tensor:
        flat = flatten(v) / math.sqrt(rz)
        if rows is None or len(rows) == self.count:
            more = flat.new_empty(min(self.room, max(8, 2 * self.count)) - self.count, len(flat))
            rows = more if rows is None else torch.cat([rows, more])
        rows[self.count] = flat
        return rows

    def remove(self, r: Tangent) -> tuple[Tangent, float]:
        """Take its parts along the residuals that are kept off r."""
        if self.residuals is None or self.preconditioned is None:
            return r, 0.0
        flat = flatten(r)
        parts = (self.preconditioned[: self.count] @ flat) @ self.residuals[: self.count]
        return unflatten(flat - parts, self.like), float(parts.norm())
