"""The property kit of manifolds: everything the solvers rely on, asserted by name.

Projector: ``P² = P = Pᵀ``, of rank dim. Retraction: ``R_x(0) = x``, ``DR_x(0) = Id``, an error
against the geodesic of slope order + 1, and ten thousand float32 steps without leaving the
manifold. Transport: into the tangent space.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fisherfold.manifolds import Manifold, Verdict, check_retraction
from fisherfold.manifolds.base import Point, flatten, require_manifold, scale, tree_map, unflatten
from fisherfold.manifolds.verdict import at_most
from fisherfold.testing.properties import Case, gaussian, properties, tree_gap

# Ten thousand float32 steps may leave an error of a few rounding units, not one that has added up.
DRIFT = 5e-6
# The matrix of the projector is formed only up to this ambient dimension.
MAX_AMBIENT = 1500


def check_manifold(
    manifold: Manifold,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
    batch_shapes: Sequence[tuple[int, ...]] = ((), (2,), (2, 3)),
    steps: int = 10_000,
    symmetry: Callable[[Point], Point] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[Verdict]:
    """Assert every property that the solvers rely on, for each dtype and batch shape.

    Args:
        manifold: the manifold.
        dtypes: the dtypes to try. Orders of retractions are measured in float64 and the long run in
            float32, each if it is among them.
        batch_shapes: the leading dimensions to try.
        steps: the length of the long run with every retraction.
        symmetry: for a quotient manifold, a map that changes the representative of a point, and a
            tangent vector with it, such as ``lambda x: x @ q`` with a fixed rotation ``q``; known
            for those of the library.
        device: the device to try.
        seed: of all random points and vectors.

    Returns:
        One verdict per property, dtype, batch shape and method.

    Raises:
        AssertionError: if a property fails; the message names each of them with what was measured.
        ValueError: if a batch shape holds no point.

    Examples:
        >>> from fisherfold.manifolds import Sphere
        >>> report = check_manifold(Sphere(3), steps=100)
        >>> all(report)
        True
        >>> print(report[0])
        passed: dimension is the rank of the projector: measured 2, expected 2
    """
    require_manifold(manifold)
    if empty := [batch for batch in batch_shapes if 0 in batch]:
        raise ValueError(f"batch_shapes must hold at least one point each, got {empty}")
    generator = torch.Generator(device).manual_seed(seed)
    symmetry = manifold._symmetry(generator) if symmetry is None else symmetry
    report = _dimension(manifold, generator)
    for dtype in dtypes:
        for batch in batch_shapes:
            case = Case.random(manifold, batch, dtype, generator, symmetry)
            before = copy.deepcopy(case.arguments)
            for check in properties(case):
                check(case)
            case.equal(
                "operations leave their arguments as they are", case.arguments, before, bound=0.0
            )
            report += case.report
            if batch:
                report += _one_by_one(case)
            if dtype == torch.float64:
                report += _orders(case)
    if torch.float32 in dtypes:
        report += _long_run(manifold, steps, generator)
    failed = [verdict for verdict in report if not verdict]
    if failed:
        lines = "\n".join(f"  {verdict}" for verdict in failed)
        raise AssertionError(
            f"{manifold!r} fails {len(failed)} of {len(report)} properties:\n{lines}"
        )
    return report


def _dimension(manifold: Manifold, generator: torch.Generator) -> list[Verdict]:
    """The rank of the projector, applied to the whole ambient basis, is the dimension."""
    x = manifold.random_point(generator=generator)
    size = flatten(x).numel()
    if size > MAX_AMBIENT:
        return []
    basis = unflatten(torch.eye(size, dtype=torch.float64, device=generator.device), x)
    image = manifold.project(tree_map(lambda leaf: leaf.expand(size, *leaf.shape), x), basis)
    matrix = flatten(image, batch=1)
    rank = int((torch.linalg.svdvals(matrix) > 1e-6).sum())
    message = f"measured {rank}, expected {manifold.dim}"
    name = "dimension is the rank of the projector"
    return [Verdict(name, rank, manifold.dim, rank == manifold.dim, message)]


def _orders(case: Case) -> list[Verdict]:
    """The order of each retraction, against the geodesic where it is known."""
    report = []
    for method in case.manifold.retractions:
        if case.manifold.ambient_metric or case.has("exp") or case.has("_embedding"):
            report.append(check_retraction(case.manifold, case.x, case.v, method=method))
        if case.manifold.ambient_metric and case.has("exp") and case.has("dist"):
            report.append(
                check_retraction(case.manifold, case.x, case.v, method=method, against="exp")
            )
    return [
        Verdict(f"{r.name} [{case.label}]", r.measured, r.expected, r.passed, r.message)
        for r in report
    ]


def _one_by_one(case: Case) -> list[Verdict]:
    """Every operation on a batch is the operation on its entries."""
    manifold = case.manifold
    operations: dict[str, tuple[Callable[..., Point], tuple[Point, ...]]] = {
        "project": (manifold.project, (case.x, case.a)),
        "inner": (manifold.inner, (case.x, case.u, case.v)),
        "riemannian_gradient": (manifold.riemannian_gradient, (case.x, case.a)),
        "riemannian_hessian": (manifold.riemannian_hessian, (case.x, case.a, case.b, case.v)),
    }
    for method in manifold.retractions:
        operations[f"retract {method!r}"] = (
            partial(manifold.retract, method=method),
            (case.x, case.v),
        )
    for method in manifold.transports:
        operations[f"transport {method!r}"] = (
            partial(manifold.transport, method=method),
            (case.x, case.y, case.v),
        )
    for name in filter(case.has, ("exp", "log", "dist")):
        operations[name] = (getattr(manifold, name), (case.x, case.v if name == "exp" else case.y))
    report = []
    for name, (operation, arguments) in operations.items():
        whole = operation(*arguments)
        worst = 0.0
        for entry in (tuple(0 for _ in case.batch), tuple(size - 1 for size in case.batch)):
            alone = operation(*(_pick(argument, entry) for argument in arguments))
            worst = max(worst, tree_gap(_pick(whole, entry), alone))
        report.append(
            at_most(f"{name} of a batch is one by one [{case.label}]", worst, case.tolerance)
        )
    return report


def _pick(tree: Point, entry: tuple[int, ...]) -> Point:
    return tree_map(lambda leaf: leaf[entry], tree)


def _long_run(manifold: Manifold, steps: int, generator: torch.Generator) -> list[Verdict]:
    """Rounding must not add up over many steps of length 0.1, out and back again."""
    report = []
    for method in manifold.retractions:
        x = manifold.random_point(generator=generator, dtype=torch.float32)
        directions = [gaussian(x, generator) for _ in range(100)]
        for step in range(steps):
            v = manifold.project(x, directions[step // 2 % 100])
            size = 0.1 / max(float(manifold.norm(x, v)), 1e-30)
            x = manifold.retract(x, scale(size if step % 2 else -size, v), method=method)
        name = f"retraction {method!r} stays on the manifold over {steps} float32 steps"
        report.append(at_most(name, manifold.violation(x), DRIFT))
    return report
