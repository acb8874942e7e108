"""Whether a saved state is one of this optimizer: of the same parameters, in the same order, treated in the same way.

States are told apart by what they hold: the sizes and names of groups, shapes of momentum, orders of factors. The first
difference is an error, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fisherfold.optim.groups import names, place
from fisherfold.plain import counted

if TYPE_CHECKING:
    from fisherfold.optim.mkfac import MKFAC


def by_names(optimizer: MKFAC, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state whose curvature goes by the names of the parameters.

    Groups given with their module once had no names, and curvature went by the places of the parameters in them.

    Args:
        optimizer: the optimizer that is to take it.
        saved: its new state.

    Returns:
        The state, with other keys where it is of that time.

    Raises:
        ValueError: if it is from then, and a weight has another manifold at its place: nothing else tells them apart.
    """
    if "curvature" not in saved or any("param_names" in group for group in saved["param_groups"]):
        return dict(saved)
    known: dict[str, str] = {}
    for number, (group, other) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=False)):
        mine = [names(optimizer)[id(parameter)] for parameter in group["params"]]
        known |= {place(number, index): name for index, name in enumerate(mine)}
        for name, here, there in zip(mine, group["spheres"], other.get("spheres", []), strict=False):
            if here != there:
                raise ValueError(
                    f"the state is of another treatment, or its groups are in another order: {name} is on "
                    f"{counted(here, 'sphere')}, and what has its place there on {there}"
                )
    return {**saved, "curvature": {known.get(key, key): entry for key, entry in saved["curvature"].items()}}


def check_same_architecture(optimizer: MKFAC, saved: Mapping[str, Any]) -> None:
    """Raise unless a saved state belongs to the same parameters.

    Args:
        optimizer: the optimizer that is to take it.
        saved: its new state.

    Raises:
        ValueError: naming the first difference.
    """
    if "curvature" not in saved:
        raise ValueError(
            f"the state has no curvature: it was not saved by {type(optimizer).__name__}.state_dict(), or by something "
            "that keeps the entries of other optimizers alone, as flatten_optimizer_state_dict=True does"
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != theirs:
        raise ValueError(f"the state is of another architecture: groups of {theirs} parameters, expected {sizes}")
    for group, other in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        _check_group(optimizer, group, other, saved["state"])
    _check_curvature(optimizer, saved["curvature"])


def _check_group(
    optimizer: MKFAC, group: Mapping[str, Any], other: Mapping[str, Any], states: Mapping[Any, Mapping[str, Any]]
) -> None:
    """Names, and the shapes of what goes with parameters."""
    for mine, name in zip(group.get("param_names", []), other.get("param_names", []), strict=False):
        if mine != name:
            raise ValueError(
                "the state is of another architecture, or its groups are in another order: "
                f"it has {name!r} where {mine!r} is expected"
            )
    for parameter, key in zip(group["params"], other["params"], strict=True):
        state = states.get(key, {})
        if group["manifold"] != "none" and state and ("balance" in state) != optimizer.balanced:
            raise ValueError(
                f"the state was saved with balanced={'balance' in state}, where manifold_lr has another meaning, "
                f"expected balanced={optimizer.balanced}"
            )
        buffer = state.get("momentum_buffer")
        if buffer is not None and buffer.shape != parameter.shape:
            name = names(optimizer)[id(parameter)]
            raise ValueError(
                f"the state is of another architecture: {name} has shape {tuple(buffer.shape)} there, "
                f"expected {tuple(parameter.shape)}"
            )


def _check_curvature(optimizer: MKFAC, saved: Mapping[str, Any]) -> None:
    """Which weights have it, and of what orders their factors are."""
    mine = optimizer.curvature.layers.keys()
    if mine != set(saved):
        odd = min(mine ^ set(saved))
        raise ValueError(
            f"the state is of another architecture or treatment: only one of the two has curvature for {odd}"
        )
    for name, layer in optimizer.curvature.layers.items():
        entry = saved[name]
        inverse = entry["inverse"] or {"left": entry["g"], "right": entry["a"]}
        orders = tuple(len(inverse[side]) for side in ("left", "right") if inverse[side] is not None)
        if orders and orders != layer.tracked.sizes:
            raise ValueError(
                f"the state is of another architecture: the factors of {name} have orders {orders} there, "
                f"expected {layer.tracked.sizes}"
            )
