"""One momentum step on a product of unit spheres, in as few passes over the memory as it takes.

With rows w, momentum b and direction v, one step of size η is

    b ← P_w(μ b + v),   θ = η‖b‖,   w' = cos θ · w - sin θ · b/‖b‖,   b' = cos θ · b + sin θ ‖b‖ · w,

where P_w is the tangent projection: the exponential map and the parallel transport along it. Normalising w - η b
instead is the same formula with tan θ = η‖b‖, and transporting by projection multiplies b' by cos θ. Both agree with
``fisherfold.manifolds.Oblique``; here they are fused, without checks and without a host synchronisation.

Balanced steps divide v, row by row, by the running root mean square r of ‖P_w v‖ and multiply it by √(1 - μ²): with
uncorrelated directions ‖b‖ then has the root mean square 1, so that η is the angle by which every row turns per step.
That is the turning which weight decay brings about in SGD at its equilibrium, here without waiting for it.

Rows may have any lengths r, as those have that are loaded into the network in the middle of a run. What is invariant in
them has at w/r the gradient r∇f(w): there the step is taken, and r is put back. Nothing else in the network, such as
the running statistics of a norm, has to know.

On a sphere weight decay has no meaning; what can be penalised there is how alike the rows are. With W of unit rows,

    Φ(W) = ω/2 ‖W Wᵀ - I‖²,    ∇Φ(W) = 2ω (W Wᵀ - I) W,

and ∇Φ is added to the direction, to the balanced one where steps are balanced (Cho and Lee, arXiv 1709.09603, add it to
the gradient). Last, rows of the direction that are longer than a given length c are cut to it, which keeps θ below
ηc/(1 - μ).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fisherfold.optim.factors import accumulation_dtype

TINY_ROW = 1e-10
BALANCE_DECAY = 0.99


def tangent(w: Tensor, v: Tensor) -> Tensor:
    """The tangent projection of the rows of v at the unit rows of w.

    Args:
        w: unit rows.
        v: any rows.

    Returns:
        The rows of v without their radial parts.
    """
    return torch.addcmul(v, (w * v).sum(dim=1, keepdim=True), w, value=-1)


def sphere_step(
    w: Tensor,
    v: Tensor,
    b: Tensor,
    lr: float | Tensor,
    momentum: float | Tensor,
    exponential: bool,
    max_angle: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of every row on its unit sphere.

    Args:
        w: unit rows, one point per row.
        v: the directions to go against; radial parts are removed.
        b: the momentum, tangent at w.
        lr: the step size η.
        momentum: the factor μ.
        exponential: the exponential map with parallel transport, or normalisation with projection.
        max_angle: the largest angle by which a row may turn, if any.

    Returns:
        The new points and the momentum carried to them.
    """
    b = v + momentum * b if isinstance(momentum, Tensor) else torch.add(v, b, alpha=momentum)
    b.addcmul_((w * b).sum(dim=1, keepdim=True), w, value=-1)
    speed = torch.linalg.vector_norm(b, dim=1, keepdim=True)
    angle = speed * lr
    if not exponential:
        angle = torch.atan(angle)
    if max_angle is not None:
        angle = angle.clamp(max=max_angle)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    # sin θ/‖b‖ has the limit η at 0, which the guarded quotient misses, where b = 0 makes it irrelevant
    moved = (cosine * w).addcmul_(sine / speed.clamp_min(torch.finfo(b.dtype).tiny), b, value=-1)
    # the guard keeps rows that nobody knows to be zero from becoming NaN where nothing moves them
    moved.div_(torch.linalg.vector_norm(moved, dim=1, keepdim=True).clamp_min(torch.finfo(b.dtype).tiny))
    shrink = 1.0 if exponential else cosine
    return moved, b.mul_(shrink * cosine).addcmul_(shrink * sine * speed, w)


def balance(w: Tensor, v: Tensor, sums: Tensor, momentum: float | Tensor) -> Tensor:
    """Scale every row of a direction so that it turns its weight by the same angle as all others, on average.

    Args:
        w: unit rows.
        v: their directions.
        sums: per row the running sum of ‖P_w v‖² and of the weights in that sum; updated in place.
        momentum: the factor μ of the step to come.

    Returns:
        The scaled rows, tangent at w.
    """
    v = tangent(w, v)
    squared = (v * v).sum(dim=1, keepdim=True)
    sums.lerp_(torch.cat([squared, torch.ones_like(squared)], dim=1).to(sums.dtype), 1 - BALANCE_DECAY)
    mean = (sums[:, :1] / sums[:, 1:]).to(v.dtype)
    return v * ((1 - momentum**2) ** 0.5 * mean.clamp_min(torch.finfo(v.dtype).tiny).rsqrt())


def clipped(w: Tensor, v: Tensor, clip: float) -> Tensor:
    """Cut the rows of a direction to a length.

    Args:
        w: unit rows.
        v: their directions.
        clip: the length beyond which rows are shortened.

    Returns:
        Rows tangent at w, none of them longer.
    """
    v = tangent(w, v)
    return v * (clip / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(clip))


def decorrelation(w: Tensor, orthogonality: float) -> Tensor:
    """The gradient of the penalty ω/2 ‖W Wᵀ - I‖² on correlations between rows.

    Args:
        w: unit rows, no more than columns: more cannot be orthogonal.
        orthogonality: ω.

    Returns:
        2ω (W Wᵀ - I) W.
    """
    correlations = w @ w.T
    correlations.fill_diagonal_(0.0)
    return (correlations @ w).mul_(2 * orthogonality)


def unit_rows(w: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scale rows to unit length; rows that are zero or tiny have no direction and stay as they are.

    Args:
        w: any rows.

    Returns:
        The scaled rows, and a column that is False at the rows left alone (None if there are none).
    """
    norms = _lengths(w, w.dtype).unsqueeze(1)
    alive = directed(w)
    scaled = torch.where(alive, w / norms.clamp_min(TINY_ROW), w)
    return scaled, None if bool(alive.all()) else alive


def directed(w: Tensor) -> Tensor:
    """Which rows have a direction.

    Args:
        w: any rows.

    Returns:
        A column that is False at rows that are zero or tiny.
    """
    return torch.linalg.vector_norm(w, dim=1, keepdim=True) > TINY_ROW


def unit_factors(w: Tensor) -> Tensor:
    """By what ``unit_rows`` multiplies each row.

    Args:
        w: any rows.

    Returns:
        A float64 vector, 1 at the rows left alone.
    """
    norms = _lengths(w, torch.float64)
    return torch.where(norms > TINY_ROW, 1 / norms.clamp_min(TINY_ROW), torch.ones_like(norms))


def block_lengths(parameter: Tensor, spheres: int, alive: Tensor | None) -> Tensor:
    """The lengths of blocks of rows.

    Args:
        parameter: any shape.
        spheres: the number of blocks.
        alive: a column that is False at blocks that have no direction, if there are any.

    Returns:
        A column, 1 for blocks without a direction.
    """
    norms = _lengths(parameter.reshape(spheres, -1), accumulation_dtype(parameter)).unsqueeze(1)
    known = norms > TINY_ROW if alive is None else alive & (norms > TINY_ROW)
    return torch.where(known, norms, 1.0)


def _lengths(w: Tensor, dtype: torch.dtype) -> Tensor:
    """The lengths of rows, and 1 for what a step leaves of it: a network that is loaded again keeps its bits."""
    norms = torch.linalg.vector_norm(w, dim=1, dtype=dtype)
    # entries are rounded to the dtype of the weight, sums of their squares to that of the computation
    rounding = torch.finfo(w.dtype).eps + w.shape[1] ** 0.5 * torch.finfo(accumulation_dtype(w)).eps
    return torch.where((norms - 1).abs() <= rounding, torch.ones_like(norms), norms)


Number = float | Tensor
Rules = tuple[Number, Number, bool, float | None, float | None, float]
Advance = Callable[
    [Tensor, Tensor, Tensor, Number, Number, bool, float | None, float | None, float, Tensor | None], None
]


def advance(
    parameter: Tensor,
    direction: Tensor,
    buffer: Tensor,
    lr: float | Tensor,
    momentum: float | Tensor,
    exponential: bool,
    max_angle: float | None,
    clip: float | None,
    orthogonality: float,
    balanced: Tensor | None,
) -> None:
    """Move a parameter and its momentum, both in place and in any memory layout; compiled, it is one or two kernels.

    Args:
        parameter: any shape, in unit blocks of rows.
        direction: one row per block; its dtype is that of the computation.
        buffer: the momentum, in the shape of the parameter.
        lr: the step size.
        momentum: the factor μ.
        exponential: the exponential map with parallel transport, or normalisation with projection.
        max_angle: the largest angle by which a row may turn, if any.
        clip: the greatest length of the tangent direction of a row, if any.
        orthogonality: ω of the penalty on correlations between rows; 0 for none.
        balanced: the running sums of ``balance``, if steps are balanced; updated in place.
    """
    w = parameter.reshape(direction.shape).to(direction.dtype)
    b = buffer.reshape(direction.shape).to(direction.dtype)
    if balanced is not None:
        direction = balance(w, direction, balanced, momentum)
    if orthogonality:
        direction = direction + decorrelation(w, orthogonality)
    if clip is not None:
        direction = clipped(w, direction, clip)
    moved, carried = sphere_step(w, direction, b, lr, momentum, exponential, max_angle)
    parameter.copy_(moved.view(parameter.shape))
    buffer.copy_(carried.view(parameter.shape))


def update_on_spheres(
    parameter: Tensor,
    direction: Tensor,
    state: dict[str, Tensor],
    step: Advance,
    rules: Rules,
    lengths: Tensor | None = None,
) -> None:
    """Move a parameter and its momentum buffer, both in place.

    Args:
        parameter: any shape, in blocks of rows.
        direction: one row per block, where it has unit length; its dtype is that of the computation.
        state: holds ``momentum_buffer``, ``alive`` where some blocks have no direction, and ``balance`` where steps are
            balanced.
        step: ``advance``, compiled or not.
        rules: learning rate, momentum, whether to use the exponential map, the largest angle, the greatest length
            of a direction, and ω.
        lengths: what ``block_lengths`` returns, kept in the step; 1 if not given.
    """
    if lengths is None:
        _update_unit(parameter, direction, state, step, rules)
        return
    rows = lengths.expand(-1, len(parameter) // len(lengths)).reshape(-1, *[1] * (parameter.ndim - 1))
    parameter.div_(rows)
    _update_unit(parameter, direction, state, step, rules)
    parameter.mul_(rows)


def _update_unit(parameter: Tensor, direction: Tensor, state: dict[str, Tensor], step: Advance, rules: Rules) -> None:
    buffer, balanced = state["momentum_buffer"], state.get("balance")
    if "alive" not in state:
        step(parameter, direction, buffer, *rules, balanced)
        return
    # blocks without a direction go on as in Euclidean space
    lr, momentum = rules[:2]
    w, b = (t.reshape(direction.shape).to(direction.dtype).clone() for t in (parameter, buffer))
    pushed = direction + momentum * b
    step(parameter, direction, buffer, *rules, balanced)
    for target, other in ((parameter, w - lr * pushed), (buffer, pushed)):
        rows = target.reshape(direction.shape).to(direction.dtype)
        target.copy_(torch.where(state["alive"], rows, other).view(parameter.shape))
