"""How an optimizer treats each parameter, and how far curvature bends its direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fisherfold.optim.curvature.inverse import own_precision
from fisherfold.optim.spheres import tangent
from fisherfold.plain import counted


@dataclass(frozen=True)
class Diagnosis:
    """How the curvature of one weight acts on its present gradient.

    Attributes:
        cosine: between the natural direction and the gradient, both tangent where the weight is on
            spheres; at 1 the curvature does nothing.
        radial: the part of the gradient along the weight; near 0 where the weight is scale
            invariant.
    """

    cosine: float
    radial: float


@torch.no_grad()
def diagnose(optimizer: Any) -> dict[str, Diagnosis]:
    """One diagnosis per weight that has an inverse and a gradient."""
    found = {}
    for name, entry in optimizer._curved().items():
        p = entry.parameter
        inverse = optimizer.curvature.inverse(optimizer.state[p])
        if inverse is None or p.grad is None:
            continue
        dtype = inverse.right.dtype
        gradient = p.grad.reshape(len(p), -1).to(dtype)
        with own_precision(p.device):
            direction = inverse.apply(gradient)
        blocks = p.detach().reshape(entry.spheres or 1, -1).to(dtype)
        flat = gradient.reshape(blocks.shape)
        along = (flat - tangent(blocks, flat)).norm() / flat.norm().clamp_min(1e-30)
        if entry.spheres:
            flat, direction = (
                tangent(blocks, flat),
                tangent(blocks, direction.reshape(blocks.shape)),
            )
        found[name] = Diagnosis(_cosine(direction, flat), float(along))
    return found


def _cosine(u: Tensor, v: Tensor) -> float:
    return float((u.reshape(-1) @ v.reshape(-1)) / (u.norm() * v.norm()).clamp_min(1e-30))


def treatment_table(optimizer: Any) -> str:
    """A table with one row per parameter, and totals in the last line."""
    rows = [("parameter", "shape", "treatment", "rate", "why")]
    total = on_spheres = with_curvature = 0
    curved = optimizer._curved()
    for group in optimizer.param_groups:
        names = group.get("param_names") or ["?"] * len(group["params"])
        for p, name, spheres in zip(group["params"], names, group["spheres"], strict=True):
            why = optimizer._reasons.get(name, "group given by the user")
            treatment = group["rule"]
            if not p.requires_grad:
                treatment = f"frozen ({treatment})"
            elif spheres:
                where = f"{counted(spheres, 'sphere')} in R^{p.numel() // spheres}"
                treatment = f"{where}, {group['direction']}"
                on_spheres += p.numel()
            if name in curved:
                has = "left" in optimizer.state.get(p, {})
                with_curvature += has
                refused = optimizer.curvature.refused.get(name)
                why += f"; {refused}" if refused else "" if has else "; no curvature yet"
            rows.append(
                (name, "×".join(map(str, p.shape)), treatment, f"{float(group['lr']):g}", why)
            )
            total += p.numel() if p.requires_grad else 0
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]
    share = 100 * on_spheres / max(total, 1)
    last = f"{counted(total, 'trained parameter')}, {share:.1f} % of them on spheres"
    if curved:
        last += (
            f"; curvature: {with_curvature} of {counted(len(curved), 'weight')}"
            if with_curvature
            else "; no curvature yet"
        )
    return "\n".join([*lines, last])
