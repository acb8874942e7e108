"""What an optimizer does to each parameter, in words and numbers.

The one number that tells whether curvature does anything is cos(V, ∇W) between the preconditioned direction V and the
gradient: at 1 the method is (Riemannian) SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fisherfold.optim import euclidean, groups, on_spheres
from fisherfold.optim.curvature import gradient_matrix
from fisherfold.plain import counted

if TYPE_CHECKING:
    from fisherfold.optim.mkfac import MKFAC


@dataclass(frozen=True)
class Diagnosis:
    """How the curvature of one weight acts on its present gradient.

    Attributes:
        cosine: between the preconditioned direction and the gradient, both tangent where the weight is on spheres.
        radial: the part of the preconditioned direction that points along the weight, before projection.
        gradient_radial: the same of the gradient; near 0 where the weight is really scale invariant.
        top: the largest eigenvalue of A ⊗ G over the damping.
        rank: how many eigenvectors of A and of G are used, and of how many; None for factored damping.
        error: the estimated relative error by truncation.
        age: steps since the last refresh.
    """

    cosine: float
    radial: float
    gradient_radial: float
    top: float
    rank: str | None
    error: float
    age: int


@torch.no_grad()
def diagnose(optimizer: MKFAC) -> dict[str, Diagnosis]:
    """How far the curvature bends the current gradients.

    Args:
        optimizer: after a backward pass.

    Returns:
        One entry per weight with an inverse and a gradient.
    """
    names = groups.names(optimizer)
    found = {}
    for parameter, _, spheres in optimizer._entries():
        layer = optimizer.curvature.by_weight.get(id(parameter))
        if layer is None or layer.inverse is None or parameter.grad is None:
            continue
        with optimizer._products():
            gradient, direction = _gradient_and_direction(optimizer, parameter, spheres)
        weight = parameter.reshape(spheres or len(parameter), -1).to(gradient.dtype)
        radial, flat = _split(weight, direction, bool(spheres))
        gradient_radial, flat_gradient = _split(weight, gradient, bool(spheres))
        basis = layer.inverse
        rank = None
        if basis.coefficients is not None:
            rank = f"{basis.right.shape[1]}/{len(basis.right)} and {basis.left.shape[1]}/{len(basis.left)}"
        found[names[id(parameter)]] = Diagnosis(
            _cosine(flat, flat_gradient), radial, gradient_radial, basis.top, rank, basis.error, int(optimizer._age)
        )
    return found


def _gradient_and_direction(optimizer: MKFAC, parameter: nn.Parameter, spheres: int) -> tuple[Tensor, Tensor]:
    """Both at unit length on spheres; a bias that is joined to the weight is no part of them."""
    gradient = gradient_matrix(parameter)
    if spheres:
        lengths, direction = on_spheres.lengths_and_direction(optimizer, parameter, spheres)
        gradient = gradient.reshape(spheres, -1)
        return gradient if lengths is None else gradient * lengths, direction
    directions = euclidean.directions(optimizer.curvature, [parameter], optimizer._branches, parallel=False)
    direction = directions[id(parameter)]
    return gradient, direction.to(gradient.dtype).reshape(gradient.shape)


def _split(weight: Tensor, vector: Tensor, curved: bool) -> tuple[float, Tensor]:
    """The relative size of the part along the weight, and the rest (everything in Euclidean space)."""
    blocks = vector.reshape(weight.shape)
    unit = weight / torch.linalg.vector_norm(weight, dim=1, keepdim=True).clamp_min(1e-30)
    along = (unit * blocks).sum(dim=1, keepdim=True)
    size = float(blocks.norm())
    return float(along.norm()) / max(size, 1e-30), blocks - along * unit if curved else blocks


def _cosine(u: Tensor, v: Tensor) -> float:
    return float((u * v).sum() / (u.norm() * v.norm()).clamp_min(1e-30))


def treatment_table(optimizer: MKFAC) -> str:
    """How every parameter is treated and why.

    Args:
        optimizer: the optimizer.

    Returns:
        A table as text, with totals in the last line.
    """
    names = groups.names(optimizer)
    rows = [("parameter", "shape", "treatment", "curvature", "KiB", "why")]
    kept = on_spheres.lengths_of_rows(optimizer)
    total = bytes_total = curved = 0
    renewed = any(layer.inverse is not None for layer in optimizer.curvature.layers.values())
    for parameter, _, spheres in optimizer._entries():
        name = names[id(parameter)]
        layer = optimizer.curvature.by_weight.get(id(parameter))
        finding = optimizer.findings.get(name)
        treatment = f"{counted(spheres, 'sphere')} in R^{parameter.numel() // spheres}" if spheres else "Euclidean"
        treatment += ", of other lengths" if name in kept else ""
        curvature = "-" if layer is None else "G {} ⊗ A {}".format(*layer.tracked.sizes)
        why = finding.reason if finding else "group given by the user"
        if name in optimizer.refused:
            why = f"{why}; {optimizer.refused[name]}"
        elif layer is not None and layer.inverse is None and renewed and parameter.requires_grad:
            why = f"{why}; first order so far: its module was not called, or is no product, at the last renewal"
        size = 0 if layer is None else layer.bytes()
        rows.append((name, "×".join(map(str, parameter.shape)), treatment, curvature, f"{size / 1024:.0f}", why))
        total += parameter.numel()
        curved += parameter.numel() if spheres else 0
        bytes_total += size
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]]) for row in rows]
    share, whole = 100 * curved / max(total, 1), counted(total, "parameter")
    lines.append(f"{whole}, {share:.1f} % of them on spheres; curvature takes {bytes_total / 2**20:.1f} MiB")
    return "\n".join(lines)
