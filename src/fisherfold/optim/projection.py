"""What SGDP and AdamP share: the part of an update along the weight is dropped where it looks scale invariant.

A weight counts as scale invariant in this step when max |cos(w_i, g_i)| < δ/√dim over its rows or, failing that, over
the whole tensor (Heo et al. 2021, as in their code). The published code reads that maximum back to the host once or
twice per weight and step; here the choice is made on the device. For the same reason gradients that are not finite are
looked for only where the host need not wait for them, on a CPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fisherfold.optim.groups import make_dense, refuse_unused, require_finite_gradients
from fisherfold.optim.options import check_number
from fisherfold.optim.streams import Branches


class ProjectedOptimizer(torch.optim.Optimizer):
    """An optimizer whose updates pass through ``drop_radial``; groups have the entries of ``Projection``.

    Args:
        params: parameters or groups.
        defaults: of a group; where ``"fuse"`` is true, updates are compiled and run on side streams of a GPU.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._branches = Branches()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a pickled or saved state, also one from before updates could be compiled."""
        super().__setstate__(state)
        vars(self).setdefault("_branches", Branches())
        for group in self.param_groups:
            group.setdefault("fuse", self.defaults.get("fuse", False))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Args:
            param_group: as for any optimizer.

        Raises:
            ValueError: if there are complex numbers in it, whose angles are others.
        """
        refuse_unused(param_group, ("maximize",))
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if any(parameter.is_complex() for parameter in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise ValueError(f"{type(self).__name__} is for real parameters, got complex ones")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; nothing is changed if one on a CPU is not finite.

        Args:
            closure: reevaluates the model and returns the loss, if given.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        make_dense(self)
        if all(parameter.device.type == "cpu" for group in self.param_groups for parameter in group["params"]):
            require_finite_gradients(self)
        for group in self.param_groups:
            jobs = [(p, p.grad, group) for p in group["params"] if p.grad is not None]
            self._branches.run(self._update, jobs, parallel=group["fuse"])
        return loss

    def _check(self, group: Mapping[str, Any]) -> None:
        """Raise unless the numbers of a complete group are in their ranges."""
        for name in ("lr", "weight_decay", "eps", "delta", "wd_ratio"):
            check_number(name, group[name], 0.0)

    @abstractmethod
    def _update(self, w: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update the state of a parameter, and move it."""


class Projection(NamedTuple):
    """When and how an update loses its radial part, and what becomes of weight decay then.

    Attributes:
        delta: the threshold δ.
        eps: guards the norms.
        wd_ratio: the factor on weight decay where the update was projected.
    """

    delta: float
    eps: float
    wd_ratio: float

    @classmethod
    def of(cls, group: dict[str, Any]) -> Projection:
        """The rule of a parameter group.

        Args:
            group: with an entry per field.

        Returns:
            The rule.
        """
        return cls(group["delta"], group["eps"], group["wd_ratio"])


def move(
    w: Tensor, gradient: Tensor, update: Tensor, rate: float | Tensor, decay: float | Tensor, rule: Projection
) -> None:
    """Move a parameter in place: w ← (1 - decay ρ) w - rate Π(update), with ρ = ``wd_ratio`` where Π acted, else 1.

    Args:
        w: the parameter.
        gradient: of the loss.
        update: the proposed update.
        rate: of the update.
        decay: of the weight; 0 for none.
        rule: of the projection Π, for parameters of two or more dimensions.
    """
    shrink: float | Tensor = decay
    if w.ndim > 1:
        update, projected = drop_radial(w, gradient, update, rule.delta, rule.eps)
        shrink = decay * (1 - (1 - rule.wd_ratio) * projected)
    w.mul_(1 - shrink).sub_(rate * update)


def drop_radial(weight: Tensor, gradient: Tensor, update: Tensor, delta: float, eps: float) -> tuple[Tensor, Tensor]:
    """Project an update where the weight looks scale invariant.

    Tensors are read once for sums over rows, in whatever order the memory has them; the sums of the whole tensor are
    sums of those.

    Args:
        weight: with at least two dimensions.
        gradient: of the weight.
        update: the proposed update.
        delta: the threshold δ.
        eps: guards the norms.

    Returns:
        The update to use, and 1.0 where it was projected, as a tensor without dimensions.
    """
    if weight.numel() == 0:
        return update, torch.zeros((), dtype=weight.dtype, device=weight.device)
    dims = tuple(range(1, weight.ndim))
    length, slope = (torch.linalg.vector_norm(t, dim=dims, keepdim=True) for t in (weight, gradient))
    along, radial = ((weight * t).sum(dims, keepdim=True) for t in (gradient, update))
    by_row, rows_invariant = _radial_part(length, slope, along, radial, weight[0].numel(), delta, eps)
    length, slope = torch.linalg.vector_norm(length), torch.linalg.vector_norm(slope)
    as_whole, whole_invariant = _radial_part(length, slope, along.sum(), radial.sum(), weight.numel(), delta, eps)
    part = torch.where(rows_invariant, by_row, torch.where(whole_invariant, as_whole, 0.0))
    return update - weight * part, (rows_invariant | whole_invariant).to(weight.dtype)


def _radial_part(
    length: Tensor, slope: Tensor, along: Tensor, radial: Tensor, size: int, delta: float, eps: float
) -> tuple[Tensor, Tensor]:
    """⟨w, u⟩/‖w‖², and whether every |cos(w, g)| is below δ/√size, from ‖w‖, ‖g‖, ⟨w, g⟩ and ⟨w, u⟩ of each part."""
    cosine = along.abs() / (length.clamp_min(eps) * slope.clamp_min(eps))
    unit = length + eps
    return radial / (unit * unit), cosine.max() < delta / size**0.5
