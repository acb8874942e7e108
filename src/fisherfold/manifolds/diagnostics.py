r"""Is a retraction what it says it is? Its order, measured.

A curve ``t -> R_x(t v)`` of a retraction of order 1 satisfies ``P_x(R_x(t v) - x - t v) = O(t²)``; of order 2 it is
``O(t³)``, because its tangential acceleration vanishes. A map with ``DR_x(0) ≠ Id`` shows slope 1. Where the
exponential map is known, ``dist(R_x(t v), Exp_x(t v))`` must fall at the same rate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fisherfold.manifolds.base import Manifold, Point, Tangent, combine, leaves, scale
from fisherfold.manifolds.verdict import Verdict, slope, slope_at_least

# From 0.3 down to 1e-5 by a constant ratio: in float64 an error t³ meets its rounding noise on the way.
_STEPS = [0.3 * 10 ** (-k / 4) for k in range(19)]


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
        against: ``"acceleration"`` measures the tangential part of ``R_x(t v) - x - t v``, which is right for the
            ambient metric and the default there; ``"exp"``, the default for others, the distance to the exponential
            map, for manifolds that have both in closed form.
        seed: of the random point and vector.

    Returns:
        A verdict with the measured slope and the declared order plus one; it passes when the slope is not less.

    Raises:
        ValueError: if ``against`` is unknown.

    Examples:
        >>> from fisherfold.manifolds import Stiefel
        >>> print(check_retraction(Stiefel(6, 3)))
        passed: retraction 'polar' is of order 2: the error falls like t^3.00, expected t^3 or faster
    """
    against = ("acceleration" if manifold.ambient_metric else "exp") if against is None else against
    if against not in {"acceleration", "exp"}:
        raise ValueError(f"against must be 'acceleration' or 'exp', got {against!r}")
    generator = torch.Generator().manual_seed(seed)
    x = manifold.random_point(generator=generator) if x is None else x
    v = manifold.random_tangent(x, generator=generator) if v is None else v
    method = manifold.retraction if method is None else method
    errors = []
    for t in _STEPS:
        step = scale(t, v)
        y = manifold.retract(x, step, method=method)
        if against == "exp":
            errors.append(_length(manifold.dist(y, manifold.exp(x, step))))
        else:
            deviation = manifold.project(x, combine(1.0, combine(1.0, y, -1.0, x), -1.0, step))
            errors.append(_length(deviation))
    order = manifold.retractions[method]
    suffix = "" if against == "acceleration" else ", against exp"
    eps = max(torch.finfo(leaf.dtype).eps for leaf in leaves(x))
    noise = 2 * eps * _length(x)
    return slope_at_least(f"retraction {method!r} is of order {order}{suffix}", slope(_STEPS, errors, noise), order + 1)


def _length(tree: Point | Tensor) -> float:
    """The Frobenius norm over all leaves and the whole batch."""
    return math.sqrt(sum(float(leaf.double().square().sum()) for leaf in leaves(tree)))
