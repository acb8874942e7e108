"""Truncated conjugate gradients on the tangent space, which stay conjugate.

In exact arithmetic the residuals r_j of CG are orthogonal in the inner product of the
preconditioner, and d steps solve any system of dimension d. Rounding ends that as soon as a steep
direction is solved for: short recursions then find it again and again, and a system of dimension 30
and condition 1e6 takes more than 300 steps in float32, 100 in float64. So the residuals are kept,
and while all of them fit each new one is freed of what it has of them,

    r ← r - Σ_j r_j <z_j, r> / <z_j, r_j>,    z_j = M⁻¹ r_j

at two passes over what is kept, compared with a product with F that passes over the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fisherfold.manifolds.base import Tangent, combine, flatten, leaves, scale, unflatten

if TYPE_CHECKING:
    from fisherfold.fisher.operators import FisherOperator

# numbers in the residuals that are kept: 128 MB in float64
KEPT_ENTRIES_UP_TO = 2**24


@dataclass(frozen=True)
class Solution:
    """A direction and how it was found.

    Attributes:
        x: the direction d with (F + λ I) d ≈ g.
        method: a name of ``METHODS``.
        decrease: <g, d> - ½ <d, (F + λ I) d>, by how much the quadratic model falls along -d.
        residual: ‖(F + λ I) d - g‖ / ‖g‖ for ``cg``; 0 for the direct methods, which do not measure
            it.
        iterations: products with F that were spent.
        curvature: ``positive``, or ``zero``/``negative`` when ``cg`` met such a direction and
            stopped before it.
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

    Residuals come from a recursion; where rounding may have parted them from g - (F + λ I) x, a
    product is spent on the truth, and CG begins anew from that, until this no longer halves it: no
    smaller residual can be had in this precision, about eps ‖F‖ ‖x‖ / ‖g‖.

    A singular F without damping needs a g in its range (a gradient is); otherwise CG ends with
    curvature ``zero`` and its last iterate, and ``pinv`` is the method to name.
    """
    # in float32 squares of small residuals would vanish
    largest = max(float(leaf.abs().amax()) for leaf in leaves(g))
    unit = largest if 0 < largest < math.inf else 1.0
    run = _Run(operator, scale(1 / unit, g), damping, max_iter)
    before = math.inf
    while True:
        run.recur(rtol * run.size)
        if run.drift <= run.left or run.products >= max_iter:
            break
        run.measure()
        if run.curvature or not run.left < before / 2:
            # without damping F is singular to rounding where x grows and r does not fall
            run.curvature = run.curvature or (
                "zero" if damping == 0 and run.left > rtol * run.size else ""
            )
            break
        before = run.left
    x = scale(unit, run.project(run.x))
    decrease = 0.5 * (run.inner(run.g, run.x) + run.inner(run.r, run.x)) * unit * unit
    residual = run.left / run.size if run.size > 0 else 0.0
    return Solution(x, "cg", decrease, residual, run.products, run.curvature or "positive")


class _Run:
    """x and its residual r in the damped system, with a bound on what rounding has done to r."""

    def __init__(self, operator: FisherOperator, g: Tangent, damping: float, max_iter: int) -> None:
        self.operator, self.damping, self.max_iter, self.products = operator, damping, max_iter, 0
        self.eps = torch.finfo(leaves(g)[0].dtype).eps
        self.g = self.r = self.project(g)
        self.x, self.size = scale(0.0, self.g), self.length(self.g)
        self.left, self.drift, self.steepest, self.curvature = self.size, 0.0, 0.0, ""

    def inner(self, u: Tangent, v: Tangent) -> float:
        return float(self.operator.manifold._inner(self.operator.point, u, v))

    def length(self, v: Tangent) -> float:
        return math.sqrt(self.inner(v, v))

    def project(self, v: Tangent) -> Tangent:
        return self.operator.manifold._project(self.operator.point, v)

    def product(self, v: Tangent) -> Tangent:
        self.products += 1
        return combine(1.0, self.operator._matvec(v), self.damping, v)

    def precondition(self) -> Tangent:
        z = self.operator.precondition(self.r, self.damping)
        return z if z is self.r else self.project(z)

    def measure(self) -> None:
        """Put the true residual in the place of that of the recursion."""
        self.r = self.project(combine(1.0, self.g, -1.0, self.product(self.x)))
        self.left = self.length(self.r)

    def recur(self, goal: float) -> None:
        """Make steps until the residual is small, or no larger than what rounding may have made of it."""
        z, self.drift, count = self.precondition(), 0.0, 0
        p, rz, plain, like = z, self.inner(self.r, z), z is self.r, flatten(self.r)
        room = (
            min(self.max_iter, KEPT_ENTRIES_UP_TO // len(like))
            if self.operator.manifold.ambient_metric
            else 0
        )
        kept = like.new_empty(room, len(like))
        solved = kept if plain else torch.empty_like(kept)
        while self.left > goal and self.drift <= self.left and self.products < self.max_iter:
            # a singular preconditioner has nothing to say about some r: its z is 0, or rounding at
            # right angles to r
            if not plain and rz <= 10 * self.eps * self.left * self.length(z):
                self.curvature = "zero"
                return
            whole = count < room
            if whole:
                kept[count] = flatten(self.r) / math.sqrt(rz)
                if not plain:
                    solved[count] = flatten(z) / math.sqrt(rz)
                count += 1
            product = self.product(p)
            along, square = self.inner(p, product), self.inner(p, p)
            if not math.isfinite(along):
                self.x, self.left = scale(math.nan, self.x), math.nan
                return
            # a curvature at the rounding level of the steepest one seen is none: dividing by it
            # would blow up x
            self.steepest = max(self.steepest, abs(along) / square)
            rounding = 10 * self.eps * self.steepest * square
            if not along > rounding:
                self.curvature = "negative" if along < -rounding else "zero"
                return
            self.x = combine(1.0, self.x, rz / along, p)
            self.r = combine(1.0, self.r, -rz / along, product)
            if whole:
                flat = flatten(self.r)
                parts = solved[:count] @ flat
                self.r = unflatten(flat - parts @ kept[:count], self.r)
                self.drift = math.hypot(self.drift, float(parts.norm()))
            self.r = self.project(self.r)
            self.left = self.length(self.r)
            self.drift = math.hypot(
                self.drift, self.eps * self.steepest * self.length(self.x), self.eps * self.left
            )
            z = self.precondition()
            before, rz = rz, self.inner(self.r, z)
            p = combine(1.0, z, rz / before, p)
