"""Runnable doubts: is the gradient the derivative, and is the Fisher information the metric of KL?

    |Ψ(R_x(t d)) - Ψ(x) - t <g, d>| = O(t²),    |KL(x ‖ R_x(t d)) - ½ t² <d, F d>| = O(t³)

Each check measures the slope of its error in log-log axes and returns a verdict.
"""

from __future__ import annotations

import torch

from fisherfold.manifolds.base import Point, Tangent, leaves, scale
from fisherfold.manifolds.verdict import Verdict, slope, slope_at_least
from fisherfold.problems.base import Problem

_STEPS = [0.3 * 10 ** (-k / 4) for k in range(19)]


def check_gradient(problem: Problem, x: Point | None = None, d: Tangent | None = None, *, seed: int = 0) -> Verdict:
    """Measure how fast the linear model of the loss becomes exact along a retraction.

    Args:
        problem: the problem, in float64.
        x: a point; random if not given.
        d: a unit tangent vector at ``x``; random if not given.
        seed: of the random point and vector.

    Returns:
        A verdict with the measured slope beside 2.

    Examples:
        >>> from fisherfold import Gaussian, NLLProblem
        >>> from fisherfold.manifolds import Sphere
        >>> x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> problem = NLLProblem(Sphere(4), lambda x, w: (x @ w).exp(), Gaussian(), x, x[:, 0])
        >>> bool(check_gradient(problem))
        True
    """
    x, d = _random(problem, x, d, seed)
    manifold = problem.manifold
    value, gradient = problem.loss_and_gradient(x)
    along = float(manifold.inner(x, gradient, d))
    losses = [float(problem.loss(manifold.retract(x, scale(t, d)))) for t in _STEPS]
    errors = [abs(loss - float(value) - t * along) for t, loss in zip(_STEPS, losses, strict=True)]
    noise = torch.finfo(value.dtype).eps * max(abs(float(value)), abs(along) * _STEPS[0])
    return slope_at_least("gradient", slope(_STEPS, errors, noise), 2)


def check_fisher(
    problem: Problem, x: Point | None = None, d: Tangent | None = None, *, kind: str = "exact", seed: int = 0
) -> Verdict:
    """Measure how fast ½ t² <d, F d> becomes the divergence along a retraction: Theorem 1 as a test.

    Args:
        problem: the problem, in float64: an ``NLLProblem``, or one of your own with its divergence as ``kl(x, other)``.
        x: a point; random if not given.
        d: a unit tangent vector at ``x``; random if not given.
        kind: the Fisher information to test; only those that are exact can pass.
        seed: of the random point and vector.

    Returns:
        A verdict with the measured slope beside 3.

    Raises:
        TypeError: if the problem has no divergence.

    Examples:
        >>> from fisherfold import Bernoulli, NLLProblem
        >>> from fisherfold.manifolds import Grassmann
        >>> x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> model = lambda x, u: (x @ u).square().sum(-1)
        >>> problem = NLLProblem(Grassmann(6, 2), model, Bernoulli(), x, (x[:, 0] > 0).double())
        >>> bool(check_fisher(problem))
        True
    """
    divergence = getattr(problem, "kl", None)
    if not callable(divergence):
        kind_of = type(problem).__name__
        raise TypeError(f"problem must have its mean divergence as kl(x, other), as NLLProblem has; {kind_of} has none")
    x, d = _random(problem, x, d, seed)
    manifold = problem.manifold
    length = float(problem.fisher(x, kind=kind).quadratic(d))
    divergences = [float(divergence(x, manifold.retract(x, scale(t, d)))) for t in _STEPS]
    errors = [abs(kl - 0.5 * t**2 * length) for t, kl in zip(_STEPS, divergences, strict=True)]
    # a divergence is a difference of numbers of order one, whatever its own size
    noise = 4 * torch.finfo(leaves(x)[0].dtype).eps * max(1.0, divergences[0])
    return slope_at_least(f"{kind} Fisher information", slope(_STEPS, errors, noise), 3)


def _random(problem: Problem, x: Point | None, d: Tangent | None, seed: int) -> tuple[Point, Tangent]:
    generator = torch.Generator().manual_seed(seed)
    x = problem.manifold.random_point(generator=generator) if x is None else x
    return x, problem.manifold.random_tangent(x, generator=generator) if d is None else d
