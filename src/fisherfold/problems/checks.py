"""Runnable doubts: is the gradient the derivative, and is the Fisher information the metric of KL?

    <g, d> = d/dt Ψ(R_x(t d)) at t = 0,    |KL(x ‖ R_x(t d)) - ½ t² <d, F d>| = O(t³)

The derivative is measured by central differences D(t) with one step of Richardson extrapolation, (4
D(t/2) - D(t))/3, together with its error, which is what the gradient may be off by; of the
divergence the slope of the error in log-log axes is measured. Each check returns a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fisherfold.manifolds.base import Point, Tangent, leaves, scale
from fisherfold.manifolds.verdict import Verdict, slope, slope_at_least
from fisherfold.problems.base import Problem

_STEPS = [0.3 * 10 ** (-k / 4) for k in range(19)]
_LARGE = 0.05  # a divergence at which, and below, its quadratic model holds
_NO_STEPS = [
    1e-9 * 0.8**k for k in range(8)
]  # a divergence has 1e-17 of that of the first step there: all is rounding
_MARGIN = (
    5.0  # of a measured error, of which derivatives of smooth losses are off by less than half
)
_HALVINGS = 30  # of the step of a difference
_SUMS = 1e3  # roundings of a gradient, in units of the precision


def check_gradient(
    problem: Problem, x: Point | None = None, d: Tangent | None = None, *, seed: int = 0
) -> Verdict:
    """Compare a gradient with the derivative of the loss along a retraction.

    In float64 a gradient that is off by 1e-6 of its length is found out, mostly one that is off by
    1e-9.

    Args:
        problem: the problem, in float64.
        x: a point; random if not given.
        d: a tangent vector at ``x``, along which the loss is looked at; random if not given.
        seed: of the random point and vector.

    Returns:
        A verdict with the difference beside the largest that rounding can explain.

    Raises:
        ValueError: if ``d`` is zero or not finite.
    """
    given = d is not None
    x, d = _random(problem, x, d, seed)
    manifold = problem.manifold
    size = _size(x)
    length = float(manifold.norm(x, d))
    if given and not 0 < length < math.inf:  # a manifold of dimension 0 has no other vectors
        raise ValueError(
            f"d must be a tangent vector of positive length, got one of length {length}"
        )
    value, gradient = problem.loss_and_gradient(x)
    problem.check_representatives(x, float(value))
    along, steepest = float(manifold.inner(x, gradient, d)), float(manifold.norm(x, gradient))
    precision = max(torch.finfo(value.dtype).eps, torch.finfo(leaves(x)[0].dtype).eps)
    found, error = _derivative(
        lambda t: float(problem.loss(manifold.retract(x, scale(t, d)))),
        longest=_STEPS[0] * max(1.0, size) / (length or 1.0),
        rounding=precision * (abs(float(value)) + steepest * size),
    )
    bound, off = _MARGIN * error + _SUMS * precision * steepest * length, abs(along - found)
    told = f"differences of the loss are {found:.10g} within {bound:.1e}, the gradient says {along:.10g}"
    return Verdict("gradient", off, bound, off <= bound < math.inf, told)


def check_fisher(
    problem: Problem,
    x: Point | None = None,
    d: Tangent | None = None,
    *,
    kind: str = "exact",
    seed: int = 0,
) -> Verdict:
    """Measure how fast ½ t² <d, F d> becomes the divergence along a retraction.

    Theorem 1 as a test.

    Args:
        problem: the problem, in float64: an ``NLLProblem``, or one of your own with its divergence
            as ``kl(x, other)``.
        x: a point; random if not given.
        d: a tangent vector at ``x``; a random one of unit length if not given.
        kind: the Fisher information to test; only those that are exact can pass.
        seed: of the random point and vector.

    Returns:
        A verdict with the measured slope beside 3.

    Raises:
        TypeError: if the problem has no divergence.
    """
    divergence = getattr(problem, "kl", None)
    if not callable(divergence):
        kind_of = type(problem).__name__
        raise TypeError(
            f"problem must have its mean divergence as kl(x, other), as NLLProblem has; {kind_of} "
            "has none"
        )
    x, d = _random(problem, x, d, seed)
    manifold = problem.manifold
    length, eps = (
        float(problem.fisher(x, kind=kind).quadratic(d)),
        torch.finfo(leaves(x)[0].dtype).eps,
    )

    def divergence_at(t: float) -> float:
        return float(divergence(x, manifold.retract(x, scale(t, d))))

    share = _share(divergence_at, length)
    steps = [share * t for t in _STEPS]
    divergences = [divergence_at(t) for t in steps]
    errors = [abs(kl - 0.5 * t**2 * length) for t, kl in zip(steps, divergences, strict=True)]
    # its own rounding, and that of the differences of large numbers that it may be: only steps of
    # no length tell that
    own = eps * max(1.0, _size(x) / steps[0]) * abs(divergences[0])
    noise = 4 * max(
        own, *(abs(divergence_at(t * max(share, 1e10 * eps * _size(x)))) for t in _NO_STEPS)
    )
    return slope_at_least(f"{kind} Fisher information", slope(steps, errors, noise), 3)


def _derivative(
    f: Callable[[float], float], *, longest: float, rounding: float
) -> tuple[float, float]:
    """f'(0) and its error, at the step where the two are nearest to each other and rounding counts least."""
    value, error = math.nan, math.inf
    for k in range(_HALVINGS):
        t = longest * 0.5**k
        wide, narrow = ((f(s) - f(-s)) / (2 * s) for s in (t, t / 2))
        found = (4 * narrow - wide) / 3
        own = abs(found - narrow) + 2 * rounding / t
        if own < error:
            value, error = found, own
    return value, error


def _share(divergence_at: Callable[[float], float], length: float) -> float:
    """By how much steps must be shorter where they are far too long for the units of the parameters."""
    share = 1.0
    while math.isfinite(length):
        model = 0.5 * (share * _STEPS[0]) ** 2 * length
        if model <= _LARGE or 0.5 * model <= divergence_at(share * _STEPS[0]) <= 2 * model:
            break
        share /= 4
    return share


def _size(x: Point) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(leaf)) for leaf in leaves(x)))


def _random(
    problem: Problem, x: Point | None, d: Tangent | None, seed: int
) -> tuple[Point, Tangent]:
    device = "cpu" if x is None else leaves(x)[0].device
    generator = torch.Generator(device=device).manual_seed(seed)
    # drawn in any case: of the numbers that a given point was made of, on a sphere, no tangent
    # vector would be left
    drawn = problem.manifold.random_point(generator=generator)
    x = drawn if x is None else x
    return x, problem.manifold.random_tangent(x, generator=generator) if d is None else d
