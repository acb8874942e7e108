"""What a checkpoint belongs to: a problem, a start and a seed; another one's answer is not resumed.

A problem is known by its manifold and number of samples, and by its loss at two points near the
start, which stands for all data, weights and priors.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from fisherfold.manifolds.base import Point, leaves, scale
from fisherfold.problems.base import Problem

# The length of the steps from the start to the two points.
STEP = 0.1


def identity_of(problem: Problem, x0: Point, seed: int) -> dict[str, Any]:
    """The identity of a run, in text and numbers."""
    samples = f"{problem.n_samples} sample{'' if problem.n_samples == 1 else 's'}"
    return {
        "problem": f"{problem.manifold!r} with {samples}",
        "losses": _losses_nearby(problem, x0),
        "start": _digest(x0),
        "seed": int(seed),
    }


def difference(saved: dict[str, Any], now: dict[str, Any], rtol: float) -> str | None:
    """What a checkpoint and a run do not share, as a sentence; None if nothing."""
    if not saved:
        return "it does not say of which problem, start and seed it is"
    if saved.get("problem") != now["problem"]:
        return f"it was of {saved.get('problem')}, this run is of {now['problem']}"
    losses = [float(value) for value in saved.get("losses", [])]
    if len(losses) != len(now["losses"]) or not all(
        map(lambda a, b: _equal(a, b, rtol), losses, now["losses"])
    ):
        return "its loss has other values, so that the data, weights or model are not the same"
    if saved.get("start") != now["start"]:
        return "it was started from another x0"
    if saved.get("seed") != now["seed"]:
        return f"it was started with seed {saved.get('seed')}, this run with {now['seed']}"
    return None


def _losses_nearby(problem: Problem, x0: Point) -> list[float]:
    """The loss at two points near the start; NaN where there is none."""
    generator = torch.Generator(device=leaves(x0)[0].device).manual_seed(0)
    found = []
    for _ in range(2):
        direction = problem.manifold.random_tangent(x0, generator=generator)
        point = problem.manifold.retract(x0, scale(STEP, direction))
        try:
            value = problem.loss(point)
            found.append(float(value.detach() if isinstance(value, Tensor) else value))
        except (ValueError, RuntimeError):  # a point at which the problem has no loss
            found.append(math.nan)
    return found


def _digest(x0: Point) -> str:
    content = hashlib.sha256()
    for leaf in leaves(x0):
        content.update(leaf.detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()


def _equal(a: float, b: float, rtol: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isnan(a) == math.isnan(b) and (math.isnan(a) or a == b)
    return abs(a - b) <= rtol * max(abs(a), abs(b))
