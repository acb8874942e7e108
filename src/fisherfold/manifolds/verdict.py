"""What a check returns, how slopes are measured, and whether a retraction is what it says it is.

An error that behaves like ``C tᵏ`` is a straight line of slope k in log-log axes, but only between
two ends: large steps are not yet asymptotic, small ones drown in rounding. ``slope`` finds the
straight piece by itself.

A curve ``t -> R_x(t v)`` of a retraction of order 1 satisfies ``P_x(R_x(t v) - x - t v) = O(t²)``;
of order 2 it is ``O(t³)``, because its tangential acceleration vanishes. A map with ``DR_x(0) ≠
Id`` shows slope 1. Where the exponential map is known, ``dist(R_x(t v), Exp_x(t v))`` must fall at
the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fisherfold.manifolds.base import (
    Manifold,
    Point,
    Tangent,
    as_real,
    combine,
    leaves,
    scale,
    tree_map,
    unflatten_like,
)

# From 0.3 down to 1e-5 by a constant ratio: in float64 an error t³ meets its rounding noise on the
# way.
_STEPS = [0.3 * 10 ** (-k / 4) for k in range(19)]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check. It is true when the check passed.

    Attributes:
        name: the property that was checked.
        measured: the number found.
        expected: the number it was compared with.
        passed: whether the comparison holds.
        message: what was compared, in a sentence.
    """

    name: str
    measured: float
    expected: float
    passed: bool
    message: str

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return f"{'passed' if self.passed else 'FAILED'}: {self.name}: {self.message}"


def at_most(name: str, measured: float, bound: float) -> Verdict:
    """The verdict that a number does not exceed a bound."""
    return Verdict(
        name,
        measured,
        bound,
        measured <= bound,
        f"measured {measured:.2e}, expected at most {bound:.2e}",
    )


def slope_at_least(name: str, measured: float, expected: float, *, slack: float = 0.2) -> Verdict:
    """The verdict that an error falls at least as fast as a power of the step."""
    found = "is only rounding" if math.isinf(measured) else f"falls like t^{measured:.2f}"
    passed = measured >= expected - slack
    return Verdict(
        name, measured, expected, passed, f"the error {found}, expected t^{expected:g} or faster"
    )


def slope(
    steps: Sequence[float], errors: Sequence[float], noise: float, *, bend: float = 0.05
) -> float:
    """The slope of ``log error`` over ``log step``, on the longest straight piece."""
    if not all(map(math.isfinite, errors)):
        return math.nan
    points = [
        (math.log(t), math.log(e)) for t, e in zip(steps, errors, strict=True) if e > 10 * noise
    ]
    if len(points) < 3:
        return math.inf
    local = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    best = local[:1]
    for start in range(len(local)):
        stop = start + 1
        while (
            stop < len(local)
            and max(local[start : stop + 1]) - min(local[start : stop + 1]) <= bend
        ):
            stop += 1
        # Among equally long pieces the one at smaller steps is nearer to the limit.
        if stop - start >= len(best):
            best = local[start:stop]
    return sum(best) / len(best)


def check_retraction(
    manifold: Manifold,
    x: Point | None = None,
    v: Tangent | None = None,
    *,
    method: str | None = None,
    against: str | None = None,
    seed: int = 0,
) -> Verdict:
    """Measure the order of a retraction and compare it with the declared one.

    Args:
        manifold: the manifold.
        x: a point in float64; random if not given.
        v: a unit tangent vector at ``x``; random if not given.
        method: the name of the retraction; the manifold's own choice if not given.
        against: ``"acceleration"`` measures the tangential part of ``R_x(t v) - x - t v``, which is
            right for the ambient metric and the default there; ``"exp"``, the default for others,
            the distance to the exponential map, for manifolds that have both in closed form;
            ``"embedding"`` the first in the space in which a metric is the ambient one.
        seed: of the random point and vector.

    Returns:
        A verdict with the measured slope and the declared order plus one; it passes when the slope
        is not less.

    Raises:
        ValueError: if ``against`` is unknown.
    """
    generator = torch.Generator().manual_seed(seed)
    x = manifold.random_point(generator=generator) if x is None else x
    against = _standard(manifold, x) if against is None else against
    if against not in {"acceleration", "exp", "embedding"}:
        raise ValueError(f"against must be 'acceleration', 'exp' or 'embedding', got {against!r}")
    v = manifold.random_tangent(x, generator=generator) if v is None else v
    method = manifold.retraction if method is None else method
    errors = []
    for t in _STEPS:
        step = scale(t, v)
        y = manifold.retract(x, step, method=method)
        if against == "exp":
            errors.append(_length(manifold.dist(y, manifold.exp(x, step))))
        elif against == "embedding":
            errors.append(_length(_embedded_deviation(manifold, x, y, step)))
        else:
            deviation = manifold.project(x, combine(1.0, combine(1.0, y, -1.0, x), -1.0, step))
            errors.append(_length(deviation))
    order = manifold.retractions[method]
    suffix = "" if against == "acceleration" else ", against exp"
    eps = max(torch.finfo(leaf.dtype).eps for leaf in leaves(x))
    noise = 2 * eps * _length(x)
    return slope_at_least(
        f"retraction {method!r} is of order {order}{suffix}",
        slope(_STEPS, errors, noise),
        order + 1,
    )


def _standard(manifold: Manifold, x: Point) -> str:
    if manifold.ambient_metric:
        return "acceleration"
    try:
        manifold._embedding(x)
    except NotImplementedError:
        return "exp"
    return "embedding"


def _embedded_deviation(manifold: Manifold, x: Point, y: Point, step: Tangent) -> Tensor:
    """The length of the tangential part of ``E(y) - E(x)`` less the step, E the embedding."""
    variables = tree_map(lambda leaf: leaf.detach().requires_grad_(), x)
    with torch.enable_grad():
        image = manifold._embedding(variables)
        ends = torch.autograd.grad(
            image, leaves(variables), manifold._embedding(y) - image.detach()
        )
    tangential = manifold.riemannian_gradient(x, unflatten_like(ends, x))
    return manifold.norm(x, combine(1.0, tangential, -1.0, step))


def _length(tree: Point | Tensor) -> float:
    """The Frobenius norm over all leaves and the whole batch."""
    return math.sqrt(sum(float(as_real(leaf).double().square().sum()) for leaf in leaves(tree)))
