"""The single properties of the manifold kit: each takes a case (a manifold, points and vectors) and adds verdicts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fisherfold.manifolds import Grassmann, Manifold, Product
from fisherfold.manifolds.base import Point, Tangent, combine, leaves, scale, tolerance, tree_map
from fisherfold.testing.case import Case, pairs, tree_gap


def properties(case: Case) -> list[Callable[[Case], None]]:
    """The properties that apply to a case.

    Args:
        case: the case.

    Returns:
        Functions that take the case and add verdicts to it.
    """
    chosen: list[Callable[[Case], None]] = [_randomness, _membership, _projector, _metric, _retraction, _transport]
    if case.has_exp:
        chosen.append(_geodesic)
    if case.has_log:
        chosen.append(_log_of_a_step)
    if case.has_dist:
        chosen.append(_length_of_a_step)
    if case.has_exp and case.has_log and case.has_dist:
        chosen.append(_logarithm)
    if case.symmetry is not None:
        chosen.append(_quotient)
    if isinstance(case.manifold, Product):
        chosen.append(_factors)
    return chosen


def _randomness(case: Case) -> None:
    manifold, leaf = case.manifold, leaves(case.x)[0]

    def draw(seed: int) -> tuple[Point, Tangent]:
        generator = torch.Generator(leaf.device).manual_seed(seed)
        x = manifold.random_point(2, generator=generator, dtype=leaf.dtype)
        return x, manifold.random_tangent(x, generator=generator)

    (x, v), (same, again), (other, _) = draw(0), draw(0), draw(1)
    case.equal("random points come from the generator", same, x)
    case.equal("random tangent vectors come from the generator", again, v)
    if manifold.dim:
        swapped = tree_map(lambda t: t.flip(0), x)
        case.small("random points differ", float(0.0 in (tree_gap(x, other), tree_gap(x, swapped))))


def _membership(case: Case) -> None:
    manifold, x = case.manifold, case.x
    case.small("random points are on the manifold", manifold.violation(x), bound=tolerance(leaves(x)[0].dtype))
    case.equal("random tangent vectors are tangent", manifold.project(x, case.v), case.v)
    length = torch.tensor(min(manifold.dim, 1.0), device="cpu")  # of dimension 0 there is the zero vector alone
    case.equal("random tangent vectors have length 1", manifold.norm(x, case.v), length)
    normal = combine(1.0, case.a, -1.0, manifold.project(x, case.a))
    size = float(_dots(normal, normal, case).sum()) ** 0.5
    if size > case.tolerance:
        off = manifold.violation(combine(1.0, x, 0.5 / size, normal))
        case.small("violation sees points off the manifold", 1e-3 / max(off, 1e-300), bound=1.0)


def _projector(case: Case) -> None:
    manifold, x, a, b = case.manifold, case.x, case.a, case.b
    image = manifold.project(x, a)
    case.equal("projector is idempotent", manifold.project(x, image), image)
    left, right = _dots(image, b, case), _dots(a, manifold.project(x, b), case)
    case.equal("projector is self-adjoint", left, right, bound=case.tolerance * _scale_of(a, b))
    whole = manifold.project(x, combine(2.0, a, 3.0, b))
    case.equal("projector is linear", whole, combine(2.0, image, 3.0, manifold.project(x, b)))


def _metric(case: Case) -> None:
    manifold, x, u, v = case.manifold, case.x, case.u, case.v
    inner = manifold.inner(x, u, v)
    case.equal("inner product is symmetric", inner, manifold.inner(x, v, u))
    case.equal("inner product is the ambient one", inner, _dots(u, v, case))
    square = manifold.inner(x, u, u)
    case.small("inner product is positive", 0.0 if bool((square > 0).all()) or not manifold.dim else 1.0)
    case.equal("norm² is the inner product", manifold.norm(x, u) ** 2, square)


def _retraction(case: Case) -> None:
    manifold, x, v = case.manifold, case.x, case.v
    for method in manifold.retractions:

        def curve(t: float, method: str = method) -> Point:
            return manifold.retract(x, scale(t, v), method=method)

        _beginning(case, f"retraction {method!r}", "DR(0)", curve)
        case.small(f"retraction {method!r} ends on the manifold", manifold.violation(curve(3.0)))


def _beginning(case: Case, name: str, derivative: str, curve: Callable[[float], Point]) -> None:
    """A curve along v starts at x with velocity v."""
    case.equal(f"{name} starts at x", curve(0.0), case.x)
    h = case.short
    velocity = combine(0.5 / h, curve(h), -0.5 / h, curve(-h))
    case.equal(f"{name} has {derivative} = Id", velocity, case.v, bound=100 * h * h)


def _transport(case: Case) -> None:
    manifold, x, y, v = case.manifold, case.x, case.y, case.v
    for method in manifold.transports:
        moved = manifold.transport(x, y, v, method=method)
        case.equal(f"transport {method!r} lands in the tangent space", manifold.project(y, moved), moved)
        case.equal(f"transport {method!r} from x to x is the identity", manifold.transport(x, x, v, method=method), v)
        w = manifold.project(y, case.a)
        back = manifold.transport(y, x, w, method=method)
        case.equal(
            f"transport {method!r} there and back are adjoint",
            _dots(moved, w, case),
            _dots(v, back, case),
            bound=case.tolerance * _scale_of(v, w),
        )
        if method == "parallel":
            case.equal("parallel transport is an isometry", manifold.norm(y, moved), manifold.norm(x, v))


def _geodesic(case: Case) -> None:
    manifold, x, v = case.manifold, case.x, case.v
    h = case.eps**0.25

    def curve(t: float) -> Point:
        return manifold.exp(x, scale(t, v))

    _beginning(case, "exp", "Dexp(0)", curve)
    case.small("exp ends on the manifold", manifold.violation(curve(1.0)))
    bend = combine(1.0, combine(1.0, curve(0.5 + h), 1.0, curve(0.5 - h)), -2.0, curve(0.5))
    force = manifold.project(curve(0.5), scale(1 / h**2, bend))
    case.equal("exp has no tangential acceleration", force, scale(0.0, force), bound=100 * h * h)


def _log_of_a_step(case: Case) -> None:
    manifold, x, v, h = case.manifold, case.x, case.v, case.short
    w = manifold.log(x, case.y)
    case.equal("log is tangent", manifold.project(x, w), w)
    ahead, behind = (manifold.log(x, manifold.retract(x, scale(t, v))) for t in (h, -h))
    case.equal("log is the step where it is short", combine(0.5 / h, ahead, -0.5 / h, behind), v, bound=100 * h * h)


def _length_of_a_step(case: Case) -> None:
    manifold, x, v, h = case.manifold, case.x, case.v, case.short
    ahead, behind = (manifold.dist(x, manifold.retract(x, scale(t, v))) for t in (h, -h))
    case.equal("dist is the length of a short step", (ahead + behind) / (2 * h), manifold.norm(x, v), bound=100 * h * h)


def _logarithm(case: Case) -> None:
    manifold, x, y, v = case.manifold, case.x, case.y, case.v
    w = manifold.log(x, y)
    end = manifold.exp(x, w)
    case.small("exp inverts log", float(manifold.dist(end, y).amax()))
    half = scale(0.5, v)
    case.equal("log inverts exp", manifold.log(x, manifold.exp(x, half)), half)
    case.equal("dist is the length of log", manifold.dist(x, y), manifold.norm(x, w))
    case.equal("dist is symmetric", manifold.dist(x, y), manifold.dist(y, x))
    case.small("dist of a point to itself is 0", float(manifold.dist(x, x).amax()), bound=20 * case.eps)
    # A distance through the arc cosine would be wrong by its own size here.
    tiny = case.eps**0.5 / 16
    near = manifold.dist(x, manifold.exp(x, scale(tiny, v)))
    case.equal("dist keeps its digits near 0", near / tiny, torch.ones_like(near), bound=20 * case.eps / tiny)
    if "parallel" in manifold.transports:
        arrived = manifold.transport(x, y, w, method="parallel")
        case.equal("parallel transport keeps the geodesic's velocity", arrived, scale(-1.0, manifold.log(y, x)))


def _quotient(case: Case) -> None:
    manifold, x, y, v, g = case.manifold, case.x, case.y, case.v, case.symmetry
    assert g is not None
    turned = manifold.project(g(x), g(case.a))
    case.equal("projector commutes with the symmetry", turned, g(manifold.project(x, case.a)))
    for method in manifold.transports:
        turned = manifold.transport(x, g(y), v, method=method)
        moved = g(manifold.transport(x, y, v, method=method))
        case.equal(f"transport {method!r} follows the representative of y", turned, moved)
        turned = manifold.transport(g(x), y, g(v), method=method)
        moved = manifold.transport(x, y, v, method=method)
        case.equal(f"transport {method!r} forgets the representative of x", turned, moved)
    if case.has_log:
        case.equal("log follows the representative of x", manifold.log(g(x), y), g(manifold.log(x, y)))
    if case.has_dist:
        zero = torch.zeros((), device="cpu")
        case.equal("dist forgets the representative", manifold.dist(x, g(x)), zero)
        case.equal("dist forgets the representative of y", manifold.dist(x, g(y)), manifold.dist(x, y))
        for method in manifold.retractions:
            one, other = manifold.retract(x, v, method=method), manifold.retract(g(x), g(v), method=method)
            case.equal(f"retraction {method!r} forgets the representative", manifold.dist(one, other), zero)


def _factors(case: Case) -> None:
    manifold, x, y, u, v = case.manifold, case.x, case.y, case.u, case.v
    assert isinstance(manifold, Product)
    projected, stepped, moved = manifold.project(x, case.a), manifold.retract(x, v), manifold.transport(x, y, v)
    total = torch.zeros((), device="cpu")
    for key, factor in manifold.items:
        case.equal(f"product projects {key!r} like its factor", projected[key], factor.project(x[key], case.a[key]))
        case.equal(f"product retracts {key!r} like its factor", stepped[key], factor.retract(x[key], v[key]))
        case.equal(f"product transports {key!r} like its factor", moved[key], factor.transport(x[key], y[key], v[key]))
        total = total + factor.inner(x[key], u[key], v[key])
    case.equal("product adds the inner products of its factors", manifold.inner(x, u, v), total)
    order = min(factor.retraction_order for _, factor in manifold.items)
    case.small("product has the lowest order of its factors", abs(manifold.retraction_order - order))


def applicable(manifold: Manifold, generator: torch.Generator) -> Callable[[Point], Point] | None:
    """A random change of representative, where the library knows one: a rotation of Grassmann frames.

    Args:
        manifold: a manifold.
        generator: the source of randomness.

    Returns:
        A map of points and tangent vectors, or None where points have one representative.
    """
    if isinstance(manifold, Product):
        parts = {key: applicable(factor, generator) for key, factor in manifold.items}
        if not any(parts.values()):
            return None
        return lambda tree: {key: part(tree[key]) if part else tree[key] for key, part in parts.items()}
    if not isinstance(manifold, Grassmann):
        return None
    normal = torch.randn(manifold.p, manifold.p, generator=generator, dtype=torch.float64, device=generator.device)
    rotation = torch.linalg.qr(normal).Q
    if manifold.wide:
        return lambda tree: rotation.to(tree.dtype) @ tree
    return lambda tree: tree @ rotation.to(tree.dtype)


def _dots(u: Point, v: Point, case: Case) -> Tensor:
    """The ambient inner product per batch entry, independent of the manifold's own."""
    keep = len(case.batch)
    parts = [(a * b).flatten(keep).sum(dim=-1) if a.ndim > keep else a * b for a, b in pairs(u, v)]
    return torch.stack(parts).sum(dim=0)


def _scale_of(u: Point, v: Point) -> float:
    """The size of the products in an inner product, to measure its rounding by."""
    return 1.0 + sum(float((a * b).abs().sum()) for a, b in pairs(u, v))
