"""The single properties of the manifold kit: each takes a case and adds verdicts to it.

A verdict compares an error with ``case.tolerance``, a thousand rounding units: the defects to be
caught are of order 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fisherfold.manifolds import Manifold, Verdict
from fisherfold.manifolds.base import (
    Point,
    Tangent,
    combine,
    leaves,
    real_product,
    reorder_like,
    scale,
    tolerance,
    tree_map,
)
from fisherfold.manifolds.verdict import at_most


@dataclass
class Case:
    """A manifold with two neighbouring points, two tangent and two ambient vectors at the first."""

    manifold: Manifold
    batch: tuple[int, ...]
    x: Point
    y: Point
    u: Tangent
    v: Tangent
    a: Point
    b: Point
    symmetry: Callable[[Point], Point] | None
    report: list[Verdict] = field(default_factory=list)

    @classmethod
    def random(
        cls,
        manifold: Manifold,
        batch: tuple[int, ...],
        dtype: torch.dtype,
        generator: torch.Generator,
        symmetry: Callable[[Point], Point] | None,
    ) -> Case:
        """Draw the points and vectors; raise at once if a retraction changes shape or dtype."""
        x = manifold.random_point(*batch, generator=generator, dtype=dtype)
        u, v, w = (manifold.random_tangent(x, generator=generator) for _ in range(3))
        y = manifold.retract(x, scale(0.7, w))
        for before, after in pairs(x, y):
            if before.dtype != after.dtype or before.shape != after.shape:
                raise AssertionError(
                    f"{manifold!r} fails: retract must keep shape and dtype "
                    f"{tuple(before.shape)}, {before.dtype}, "
                    f"got {tuple(after.shape)}, {after.dtype}"
                )
        return cls(
            manifold, batch, x, y, u, v, gaussian(x, generator), gaussian(x, generator), symmetry
        )

    @property
    def arguments(self) -> dict[str, Point]:
        """The points and vectors, by name."""
        return {name: getattr(self, name) for name in ("x", "y", "u", "v", "a", "b")}

    @property
    def eps(self) -> float:
        """The rounding unit."""
        return max(float(torch.finfo(leaf.dtype).eps) for leaf in leaves(self.x))

    @property
    def short(self) -> float:
        """The best step of a symmetric difference quotient, whose error is about its square."""
        return self.eps ** (1 / 3)

    @property
    def tolerance(self) -> float:
        """The accepted relative error."""
        return 1e3 * self.eps

    @property
    def label(self) -> str:
        """The dtype and batch shape, for the names of verdicts."""
        return f"{str(leaves(self.x)[0].dtype).removeprefix('torch.')}, batch {self.batch}"

    def has(self, name: str) -> bool:
        """Whether ``exp``, ``log`` or ``dist`` has a closed form, or there is an embedding."""
        try:
            arguments = {"exp": (self.v,), "_embedding": ()}.get(name, (self.y,))
            getattr(self.manifold, name)(self.x, *arguments)
        except NotImplementedError:
            return False
        return True

    def small(self, name: str, error: float, *, bound: float | None = None) -> None:
        """Add the verdict that an error is small."""
        self.report.append(
            at_most(f"{name} [{self.label}]", error, self.tolerance if bound is None else bound)
        )

    def equal(self, name: str, left: Point, right: Point, *, bound: float | None = None) -> None:
        """Add the verdict that two points or vectors are equal up to rounding, entry by entry."""
        self.small(name, tree_gap(left, right), bound=bound)


def gaussian(x: Point, generator: torch.Generator) -> Point:
    """An ambient vector of standard normal entries."""
    return tree_map(
        lambda leaf: torch.randn(
            leaf.shape, generator=generator, dtype=leaf.dtype, device=leaf.device
        ),
        x,
    )


def pairs(u: Point, v: Point) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two points or vectors, side by side."""
    return list(zip(leaves(u), leaves(reorder_like(v, u)), strict=True))


def tree_gap(left: Point, right: Point) -> float:
    """The largest difference of two entries, NaN if there is one."""
    return float(torch.stack([(a - b).abs().amax().double() for a, b in pairs(left, right)]).amax())


def properties(case: Case) -> list[Callable[[Case], None]]:
    """The properties that apply to a case."""
    chosen: list[Callable[[Case], None]] = [
        _membership,
        _projector,
        _metric,
        _gradient,
        _hessian,
        _retraction,
        _transport,
    ]
    exp, log, dist = (case.has(name) for name in ("exp", "log", "dist"))
    chosen += [_geodesic] if exp else []
    chosen += [_speed] if exp and dist else []
    chosen += [_logarithm] if exp and log and dist else []
    chosen += [_quotient] if case.symmetry is not None else []
    return chosen


def _membership(case: Case) -> None:
    manifold = case.manifold
    x = case.x
    case.small(
        "random points are on the manifold",
        manifold.violation(x),
        bound=tolerance(leaves(x)[0].dtype),
    )
    case.equal("random tangent vectors are tangent", manifold.project(x, case.v), case.v)
    length = torch.tensor(
        min(manifold.dim, 1.0), device="cpu"
    )  # of dimension 0 there is the zero vector alone
    case.equal("random tangent vectors have length 1", manifold.norm(x, case.v), length)
    normal = combine(1.0, case.a, -1.0, manifold.project(x, case.a))
    size = float(_dots(normal, normal, case).sum()) ** 0.5
    if size > case.tolerance and manifold.constrained:
        off = manifold.violation(combine(1.0, x, 0.5 / size, normal))
        case.small("violation sees points off the manifold", 1e-3 / max(off, 1e-300), bound=1.0)


def _projector(case: Case) -> None:
    manifold = case.manifold
    x = case.x
    a = case.a
    b = case.b
    image = manifold.project(x, a)
    case.equal("projector is idempotent", manifold.project(x, image), image)
    left = _dots(image, b, case)
    right = _dots(a, manifold.project(x, b), case)
    case.equal("projector is self-adjoint", left, right, bound=case.tolerance * _scale_of(a, b))
    whole = manifold.project(x, combine(2.0, a, 3.0, b))
    case.equal("projector is linear", whole, combine(2.0, image, 3.0, manifold.project(x, b)))
    side = manifold.projector_structure
    name = f"projector acts on the side {side!r}"
    if side == "none":
        case.equal(name, image, a)
    elif side == "left":
        case.equal(name, manifold.project(x, a.flip(-1)), image.flip(-1))
    elif side == "rows":
        first = torch.zeros_like(a)
        first[..., 0, :] = a[..., 0, :]
        case.equal(name, manifold.project(x, first)[..., 0, :], image[..., 0, :])


def _metric(case: Case) -> None:
    manifold = case.manifold
    x = case.x
    u = case.u
    v = case.v
    inner = manifold.inner(x, u, v)
    case.equal("inner product is symmetric", inner, manifold.inner(x, v, u))
    case.equal(
        "inner product is linear",
        manifold.inner(x, u, combine(2.0, u, 3.0, v)),
        2.0 * manifold.inner(x, u, u) + 3.0 * inner,
    )
    if manifold.ambient_metric:
        case.equal("inner product is the ambient one", inner, _dots(u, v, case))
    square = manifold.inner(x, u, u)
    case.small(
        "inner product is positive", 0.0 if bool((square > 0).all()) or not manifold.dim else 1.0
    )
    case.equal("norm² is the inner product", manifold.norm(x, u) ** 2, square)


def _gradient(case: Case) -> None:
    manifold = case.manifold
    x = case.x
    v = case.v
    gradient = manifold.riemannian_gradient(x, case.a)
    case.equal("Riemannian gradient is tangent", manifold.project(x, gradient), gradient)
    case.equal(
        "Riemannian gradient has <g, v> = the derivative along v",
        manifold.inner(x, gradient, v),
        _dots(case.a, v, case),
        bound=case.tolerance * _scale_of(case.a, v),
    )


def _hessian(case: Case) -> None:
    """Of f(y) = <a, y> + ½ <b, y>², along a curve without acceleration too."""
    manifold = case.manifold
    x = case.x
    u = case.u
    v = case.v
    a = case.a
    b = case.b
    along = _dots(b, x, case)

    def spread(number: Tensor, tree: Point) -> Point:
        return tree_map(
            lambda leaf: number.reshape(number.shape + (1,) * (leaf.ndim - number.ndim)) * leaf,
            tree,
        )

    egrad = combine(1.0, a, 1.0, spread(along, b))
    images = [
        manifold.riemannian_hessian(x, egrad, spread(_dots(b, w, case), b), w) for w in (u, v)
    ]
    size = case.tolerance * _scale_of(egrad, egrad)
    case.equal(
        "Riemannian Hessian is tangent", manifold.project(x, images[1]), images[1], bound=size
    )
    if case.symmetry is None:  # f is no function on a quotient
        left = manifold.inner(x, images[0], v)
        right = manifold.inner(x, u, images[1])
        case.equal("Riemannian Hessian is self-adjoint", left, right, bound=size)
    method = next((name for name, order in manifold.retractions.items() if order == 2), None)
    exp = case.has("exp")
    # a second difference needs the digits of float64, and on a quotient the horizontal curve
    if case.eps > 1e-10 or not (exp or (method is not None and case.symmetry is None)):
        return

    def value(t: float) -> Tensor:
        y = manifold.exp(x, scale(t, v)) if exp else manifold.retract(x, scale(t, v), method=method)
        return _dots(a, y, case) + 0.5 * _dots(b, y, case) ** 2

    h = case.eps**0.25
    bend = (value(h) - 2 * value(0.0) + value(-h)) / h**2
    quadratic = manifold.inner(x, images[1], v)
    bound = 300 * h**2 * _scale_of(egrad, egrad)
    case.equal(
        "Riemannian Hessian is the second derivative along a curve", quadratic, bend, bound=bound
    )


def _retraction(case: Case) -> None:
    manifold = case.manifold
    x = case.x
    v = case.v
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
    manifold = case.manifold
    x = case.x
    y = case.y
    v = case.v
    for method in manifold.transports:
        moved = manifold.transport(x, y, v, method=method)
        case.equal(
            f"transport {method!r} lands in the tangent space", manifold.project(y, moved), moved
        )
        case.equal(
            f"transport {method!r} from x to x is the identity",
            manifold.transport(x, x, v, method=method),
            v,
        )
        w = manifold.project(y, case.a)
        back = manifold.transport(y, x, w, method=method)
        there = manifold.inner(y, moved, w)
        here = manifold.inner(x, v, back)
        bound = case.tolerance * (1 + float(there.abs().amax()) + _scale_of(v, w))
        case.equal(f"transport {method!r} there and back are adjoint", there, here, bound=bound)
        if method == "parallel":
            case.equal(
                "parallel transport is an isometry", manifold.norm(y, moved), manifold.norm(x, v)
            )


def _geodesic(case: Case) -> None:
    manifold = case.manifold
    x = case.x
    v = case.v
    h = case.eps**0.25

    def curve(t: float) -> Point:
        return manifold.exp(x, scale(t, v))

    _beginning(case, "exp", "Dexp(0)", curve)
    case.small("exp ends on the manifold", manifold.violation(curve(1.0)))
    if manifold.ambient_metric:
        bend = combine(1.0, combine(1.0, curve(0.5 + h), 1.0, curve(0.5 - h)), -2.0, curve(0.5))
        force = manifold.project(curve(0.5), scale(1 / h**2, bend))
        case.equal(
            "exp has no tangential acceleration", force, scale(0.0, force), bound=100 * h * h
        )


def _speed(case: Case) -> None:
    manifold = case.manifold
    x = case.x
    v = case.v
    lengths = manifold.dist(manifold.exp(x, scale(-0.1, v)), manifold.exp(x, scale(0.4, v)))
    case.equal("exp has constant speed", lengths, 0.5 * manifold.norm(x, v))


def _logarithm(case: Case) -> None:
    manifold = case.manifold
    x = case.x
    y = case.y
    v = case.v
    w = manifold.log(x, y)
    end = manifold.exp(x, w)
    case.small("exp inverts log", float(manifold.dist(end, y).amax()))
    half = scale(0.5, v)
    case.equal("log inverts exp", manifold.log(x, manifold.exp(x, half)), half)
    case.equal("dist is the length of log", manifold.dist(x, y), manifold.norm(x, w))
    case.equal("dist is symmetric", manifold.dist(x, y), manifold.dist(y, x))
    case.small(
        "dist of a point to itself is 0", float(manifold.dist(x, x).amax()), bound=20 * case.eps
    )
    # A distance through the arc cosine would be wrong by its own size here.
    tiny = case.eps**0.5 / 16
    near = manifold.dist(x, manifold.exp(x, scale(tiny, v)))
    case.equal(
        "dist keeps its digits near 0",
        near / tiny,
        torch.full_like(near, min(manifold.dim, 1.0)),
        bound=20 * case.eps / tiny,
    )
    if "parallel" in manifold.transports:
        arrived = manifold.transport(x, y, w, method="parallel")
        case.equal(
            "parallel transport keeps the geodesic's velocity",
            arrived,
            scale(-1.0, manifold.log(y, x)),
        )


def _quotient(case: Case) -> None:
    manifold = case.manifold
    x = case.x
    y = case.y
    v = case.v
    g = case.symmetry
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
    if case.has("log"):
        case.equal(
            "log follows the representative of x", manifold.log(g(x), y), g(manifold.log(x, y))
        )
    if case.has("dist"):
        zero = torch.zeros((), device="cpu")
        case.equal("dist forgets the representative", manifold.dist(x, g(x)), zero)
        case.equal(
            "dist forgets the representative of y", manifold.dist(x, g(y)), manifold.dist(x, y)
        )
        for method in manifold.retractions:
            one = manifold.retract(x, v, method=method)
            other = manifold.retract(g(x), g(v), method=method)
            case.equal(
                f"retraction {method!r} forgets the representative", manifold.dist(one, other), zero
            )


def _dots(u: Point, v: Point, case: Case) -> Tensor:
    """The ambient inner product per batch entry, independent of the manifold's own."""
    keep = len(case.batch)
    parts = []
    for a, b in pairs(u, v):
        products = real_product(a, b)
        parts.append(products.flatten(keep).sum(dim=-1) if a.ndim > keep else products)
    return torch.stack(parts).sum(dim=0)


def _scale_of(u: Point, v: Point) -> float:
    """The size of the products in an inner product, to measure its rounding by."""
    return 1.0 + sum(float((a * b).abs().sum()) for a, b in pairs(u, v))
