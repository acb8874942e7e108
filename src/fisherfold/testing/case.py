"""What the properties of the manifold kit are asked of: a manifold with points and vectors, and its verdicts.

A verdict compares an error with ``case.tolerance``, a thousand rounding units: the defects to be caught are of order 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fisherfold.manifolds import Manifold, Verdict
from fisherfold.manifolds.base import Point, Tangent, arranged, leaves, scale, tree_map
from fisherfold.manifolds.verdict import at_most


@dataclass
class Case:
    """A manifold with two neighbouring points, two tangent vectors at the first, and two ambient ones."""

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
        """Draw the points and vectors.

        Args:
            manifold: the manifold.
            batch: the leading dimensions.
            dtype: the dtype.
            generator: the source of randomness.
            symmetry: a change of representative, if the manifold is a quotient.

        Returns:
            The case.

        Raises:
            AssertionError: if a retraction changes shape or dtype, for then nothing else can be compared.
        """
        x = manifold.random_point(*batch, generator=generator, dtype=dtype)
        u, v, w = (manifold.random_tangent(x, generator=generator) for _ in range(3))
        y = manifold.retract(x, scale(0.7, w))
        for before, after in zip(leaves(x), leaves(y), strict=True):
            if before.dtype != after.dtype or before.shape != after.shape:
                raise AssertionError(
                    f"{manifold!r} fails: retract must keep shape and dtype {tuple(before.shape)}, {before.dtype}, "
                    f"got {tuple(after.shape)}, {after.dtype}"
                )
        return cls(manifold, batch, x, y, u, v, gaussian(x, generator), gaussian(x, generator), symmetry)

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
        """The step at which a symmetric difference quotient is best, with an error of about its square."""
        return self.eps ** (1 / 3)

    @property
    def tolerance(self) -> float:
        """The accepted relative error."""
        return 1e3 * self.eps

    @property
    def label(self) -> str:
        """The dtype and batch shape, for the names of verdicts."""
        return f"{str(leaves(self.x)[0].dtype).removeprefix('torch.')}, batch {self.batch}"

    @property
    def has_exp(self) -> bool:
        """Whether the exponential map has a closed form."""
        return _implemented(self.manifold.exp, self.x, self.v)

    @property
    def has_log(self) -> bool:
        """Whether the logarithm has a closed form."""
        return _implemented(self.manifold.log, self.x, self.y)

    @property
    def has_dist(self) -> bool:
        """Whether the distance has a closed form."""
        return _implemented(self.manifold.dist, self.x, self.y)

    def small(self, name: str, error: float, *, bound: float | None = None) -> None:
        """Add the verdict that an error is small.

        Args:
            name: the property.
            error: the error.
            bound: the largest accepted one; ``tolerance`` if not given.
        """
        self.report.append(at_most(f"{name} [{self.label}]", error, self.tolerance if bound is None else bound))

    def equal(self, name: str, left: Point, right: Point, *, bound: float | None = None) -> None:
        """Add the verdict that two points or vectors are equal up to rounding.

        Args:
            name: the property.
            left: the one.
            right: the other.
            bound: the largest accepted difference of an entry; ``tolerance`` if not given.
        """
        self.small(name, tree_gap(left, right), bound=bound)


def gaussian(x: Point, generator: torch.Generator) -> Point:
    """An ambient vector of standard normal entries.

    Args:
        x: a point, for the form of the vector.
        generator: the source of randomness.

    Returns:
        The vector.
    """

    def noise(leaf: Tensor) -> Tensor:
        return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype, device=leaf.device)

    return tree_map(noise, x)


def tree_gap(left: Point, right: Point) -> float:
    """The largest difference of two entries, NaN if there is one.

    Args:
        left: a point or vector.
        right: another.

    Returns:
        The difference.
    """
    gaps = [(a - b).abs().amax().double() for a, b in pairs(left, right)]
    return float(torch.stack(gaps).amax())


def pairs(u: Point, v: Point) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two points or vectors, side by side.

    Args:
        u: a point or vector.
        v: another of the same form.

    Returns:
        One pair for every tensor of u.
    """
    return list(zip(leaves(u), leaves(arranged(v, u)), strict=True))


def _implemented(operation: Callable[..., Point], *arguments: Point) -> bool:
    try:
        operation(*arguments)
    except NotImplementedError:
        return False
    return True
