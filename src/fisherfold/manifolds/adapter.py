r"""Manifolds to and from geoopt, which this package never imports unless asked to export.

The Riemannian Fisher information is defined for the ambient metric, so a foreign manifold is accepted only if it has
three properties: its projector is one (``P² = P``), its retraction moves as told (``DR_x(0) = Id``), and its inner
product is the ambient one. geoopt's default Stiefel manifold has none of them: its projection is the gradient formula
of the canonical metric, ``u - x uᵀ x``, which doubles rotations within the frame.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds import frames
from fisherfold.manifolds.base import Manifold, tolerance
from fisherfold.manifolds.diagnostics import check_retraction
from fisherfold.manifolds.euclidean import Euclidean
from fisherfold.manifolds.grassmann import Grassmann
from fisherfold.manifolds.sphere import Sphere
from fisherfold.manifolds.stiefel import Stiefel


def from_geoopt(source: Any, *, shape: Sequence[int] | None = None, as_grassmann: bool = False) -> Manifold:
    """The manifold of a geoopt ``ManifoldParameter``, or of a geoopt manifold and a shape.

    Spheres, Euclidean spaces and Stiefel manifolds of the Euclidean metric become the ones of this package; leading
    dimensions of the shape are a batch. Any other is wrapped, its retraction's order measured. All are first checked
    for the three properties named above.

    Args:
        source: a ``geoopt.ManifoldParameter``, or a geoopt manifold.
        shape: the shape of the points; taken from the parameter if one is given.
        as_grassmann: read a Stiefel manifold, of any metric, as the Grassmann manifold of the spans of its frames,
            for losses that depend on the subspace only.

    Returns:
        A manifold.

    Raises:
        ValueError: if the manifold lacks one of the properties; the message names each.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():  # geoopt 0.5.1 warns when imported
        ...     warnings.simplefilter("ignore")
        ...     import geoopt
        >>> weight = geoopt.ManifoldParameter(torch.eye(5, 2), manifold=geoopt.Stiefel())
        >>> from_geoopt(weight, as_grassmann=True)
        Grassmann(5, 2)
    """
    foreign, shape = _unpack(source, shape)
    name = type(foreign).__name__
    if as_grassmann:
        if "Stiefel" not in name:
            raise ValueError(f"as_grassmann reads Stiefel manifolds, got geoopt's {name}")
        return Grassmann(*shape[-2:])
    wrapped = GeooptManifold(foreign, shape[len(shape) - foreign.ndim :])
    held = next((t.dtype for t in (*foreign.parameters(), *foreign.buffers()) if t.is_floating_point()), torch.float64)
    defects = _defects(wrapped.cast(torch.float64), max(1e-6, tolerance(held)))
    if defects:
        raise ValueError(_refusal(name, defects, shape))
    ours = _counterpart(foreign, shape)
    if ours is not None:
        return ours
    measured = wrapped.cast(held)  # in the precision of what it holds, whose rounding would look like another order
    x = measured.random_point(generator=torch.Generator().manual_seed(0), dtype=held)
    order = 2 if check_retraction(measured, x) else 1
    return GeooptManifold(foreign, wrapped.shape, order=order)


def require_manifold(manifold: object) -> None:
    """Raise unless an argument is a manifold of this library.

    Args:
        manifold: what was given.

    Raises:
        TypeError: saying what to do with one of geoopt, or with a class.
    """
    if isinstance(manifold, Manifold):
        return
    if _is_foreign(getattr(manifold, "manifold", manifold)):
        what = type(manifold).__name__
        raise TypeError(f"manifold must be one of fisherfold, got geoopt's {what}; pass from_geoopt(...) of it")
    raise TypeError(f"manifold must be a manifold such as Sphere(3), got {manifold!r}")


def _is_foreign(manifold: object) -> bool:
    return any(c.__name__ == "Manifold" and c.__module__.startswith("geoopt.") for c in type(manifold).__mro__)


def _unpack(source: Any, shape: Sequence[int] | None) -> tuple[Any, tuple[int, ...]]:
    """The geoopt manifold and the shape of its points, from a parameter or from both."""
    foreign = getattr(source, "manifold", source)
    if not _is_foreign(foreign):
        raise TypeError(f"source must be a geoopt manifold or ManifoldParameter, got {type(source).__name__}")
    if isinstance(source, Tensor):
        return foreign, tuple(source.shape)
    if shape is None:
        raise ValueError(f"shape is needed: geoopt's {type(foreign).__name__} does not know that of its points")
    return foreign, tuple(shape)


def _counterpart(foreign: Any, shape: tuple[int, ...]) -> Manifold | None:
    """The manifold of this package that is the same as geoopt's, if there is one."""
    if isinstance(getattr(foreign, "ours", None), Grassmann):
        return foreign.ours  # it came from to_geoopt
    if not type(foreign).__module__.startswith("geoopt."):
        return None  # a user's subclass may differ from its parent
    name = type(foreign).__name__
    if name in {"Sphere", "SphereExact"} and foreign.projector is None:
        return Sphere(shape[-1], retraction="exp" if name == "SphereExact" else "normalize")
    if name == "Euclidean":
        return Euclidean(*shape)
    if name in {"EuclideanStiefel", "EuclideanStiefelExact"}:
        return Stiefel(*shape[-2:], retraction="exp" if name == "EuclideanStiefelExact" else "polar")
    return None


@dataclass(frozen=True, repr=False)
class GeooptManifold(Manifold):
    """A geoopt manifold without counterpart in this package, through its own operations.

    Args:
        source: the geoopt manifold.
        shape: the shape of one point.
        order: the measured order of its retraction.
    """

    transports: ClassVar[tuple[str, ...]] = ("geoopt",)

    source: Any
    shape: tuple[int, ...]
    order: int = field(default=2, kw_only=True)
    retraction: str = field(default="geoopt", kw_only=True)
    transport_method: str = field(default="geoopt", kw_only=True)

    @property
    def retractions(self) -> Mapping[str, int]:
        """Only geoopt's own, with the order that was measured."""
        return {"geoopt": self.order}

    @property
    def dim(self) -> int:
        """The trace of the projector at a random point."""
        double = self.cast(torch.float64)
        x = double.random_point(generator=torch.Generator().manual_seed(0))
        trace = 0.0
        for index in range(x.numel()):
            direction = torch.zeros_like(x)
            direction.view(-1)[index] = 1.0
            trace += float(double._project(x, direction).reshape(-1)[index])
        return round(trace)

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one point."""
        return self.shape

    def cast(self, dtype: torch.dtype) -> GeooptManifold:
        """The same manifold on the CPU with what it holds itself (planes, scales) in a dtype, to measure it with.

        Args:
            dtype: a floating dtype.

        Returns:
            A copy.
        """
        return replace(self, source=copy.deepcopy(self.source).to("cpu", dtype))

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        return self.source.proju(x, v)

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        return self.source.retr(x, v)

    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        return self.source.transp(x, y, v)

    def _random(
        self, shape: tuple[int, ...], generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        return self.source.projx(torch.randn(shape, generator=generator, dtype=dtype, device=device))

    def _constraint_error(self, x: Tensor) -> Tensor:
        return (self.source.projx(x) - x).abs().amax()

    def __repr__(self) -> str:
        return f"GeooptManifold({type(self.source).__name__}, {self.shape})"


def _defects(manifold: GeooptManifold, accepted: float) -> list[str]:
    """Which of the three properties do not hold at a random point in float64."""
    generator = torch.Generator().manual_seed(0)
    x = manifold.random_point(generator=generator)
    u = manifold.project(x, torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device))
    u = u / u.norm()
    h = 1e-5
    velocity = (manifold.retract(x, h * u) - manifold.retract(x, -h * u)) / (2 * h)
    errors = {
        "its projector is not idempotent": (manifold.project(x, u) - u).norm(),
        "its retraction does not have DR(0) = Id": (velocity - u).norm(),
        "its inner product is not the ambient one": (manifold.source.inner(x, u, u).sum() - 1).abs(),
    }
    return [f"{name} (relative error {float(e):.1e})" for name, e in errors.items() if not float(e) <= accepted]


def _refusal(name: str, defects: list[str], shape: tuple[int, ...]) -> str:
    """The message, with a way out for the manifolds that have one."""
    message = f"geoopt's {name} cannot carry a Riemannian Fisher information: {', '.join(defects)}"
    if "Stiefel" in name:
        n, p = shape[-2:]
        message += (
            f"; use fisherfold.manifolds.Stiefel({n}, {p}) or geoopt's EuclideanStiefel instead, or as_grassmann=True "
            "if the loss depends only on the span of the columns"
        )
    return message


def to_geoopt(manifold: Grassmann) -> Any:
    """A Grassmann manifold for geoopt's parameters and optimizers, which have none of their own.

    Args:
        manifold: a Grassmann manifold; its retraction and transport are the ones that geoopt's optimizers will use.

    Returns:
        A ``geoopt.manifolds.base.Manifold``.

    Raises:
        TypeError: if ``manifold`` is anything else.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     foreign = to_geoopt(Grassmann(5, 2))
        >>> foreign
        Grassmann(5, 2) manifold
    """
    if not isinstance(manifold, Grassmann):
        raise TypeError(f"manifold must be a Grassmann manifold, got {manifold!r}")
    return _geoopt_grassmann()(manifold)


@cache
def _geoopt_grassmann() -> type:
    """The subclass of geoopt's abstract manifold, made when first asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # geoopt 0.5.1 compiles with torch.jit when imported
        from geoopt.manifolds.base import Manifold as GeooptBase

    class GeooptGrassmann(GeooptBase):  # type: ignore[misc]  # geoopt has no types
        ndim = 2
        reversible = False

        def __init__(self, ours: Grassmann) -> None:
            super().__init__()
            self.ours = ours
            self.name = repr(ours)

        def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> Any:
            error = self.ours.violation(x)
            return error <= max(atol, tolerance(x.dtype)), f"the frame is off by {error:.1e}"

        def _check_vector_on_tangent(self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> Any:
            normal = float((u - self.ours.project(x, u)).abs().max())
            return normal <= max(atol, tolerance(x.dtype)), f"the normal part is {normal:.1e}"

        def projx(self, x: Tensor) -> Tensor:
            return frames.polar(x.mT).mT if self.ours.wide else frames.polar(x)

        def proju(self, x: Tensor, u: Tensor) -> Tensor:
            return self.ours.project(x, u)

        egrad2rgrad = proju

        def retr(self, x: Tensor, u: Tensor) -> Tensor:
            return self.ours.retract(x, u)

        def expmap(self, x: Tensor, u: Tensor) -> Tensor:
            return self.ours.exp(x, u)

        def logmap(self, x: Tensor, y: Tensor) -> Tensor:
            return self.ours.log(x, y)

        def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
            return self.ours.transport(x, y, v)

        def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
            return (u * (u if v is None else v)).sum(dim=(-2, -1), keepdim=keepdim)

        def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
            distance = self.ours.dist(x, y)
            return distance[..., None, None] if keepdim else distance

        def random(self, *size: int, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
            return self.ours.random_point(*size[:-2], dtype=dtype or torch.get_default_dtype(), device=device)

    return GeooptGrassmann
