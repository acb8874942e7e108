"""Saved states of MKFAC and its halves: what they hold, whose they are, and how an optimizer goes on from one.

The curvature has its own place beside the state that ``torch.optim.Optimizer`` keeps, because loading casts that state
to the dtype of the parameters. What keeps ``state`` and ``param_groups`` alone, as ``torch.distributed.checkpoint``
does, finds the same curvature with the parameters, and the same counters with the groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.optim.curvature import Curvature
from fisherfold.optim.factors import accumulation_dtype
from fisherfold.optim.groups import names, place
from fisherfold.plain import counted

if TYPE_CHECKING:
    from fisherfold.optim.mkfac import MKFAC

FACTORS = ("a", "g", "lengths")
INVERSE = ("left", "right", "coefficients", "base")


def with_plain_numbers(packed: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state in which schedules have left no numbers of NumPy, which ``torch.load(weights_only=True)`` refuses.

    Args:
        packed: what ``torch.optim.Optimizer.state_dict`` returns.

    Returns:
        The same, with groups of plain numbers.
    """
    groups = [
        {key: value.item() if isinstance(value, np.generic) else value for key, value in group.items()}
        for group in packed["param_groups"]
    ]
    return {**packed, "param_groups": groups}


def complete(optimizer: MKFAC, packed: Mapping[str, Any], counters: Mapping[str, int]) -> dict[str, Any]:
    """A saved state with the curvature, in its own place and with the parameters that it belongs to.

    ``torch.distributed.checkpoint`` reads a file into the state of a new optimizer, entry by entry, and refuses tensors
    of other shapes. So every parameter that is trained has all its entries here, and its group says whether it has had
    them before. The curvature of each is in a tuple, which is read as a whole: the size of an inverse is not known in
    advance. With ``full_state_dict=True`` what is in a tuple is replaced too: all of them have the same entries.

    Args:
        optimizer: the optimizer.
        packed: what ``torch.optim.Optimizer.state_dict`` returns.
        counters: of its steps and refreshes.

    Returns:
        A new dictionary.
    """
    curvature, known = optimizer.curvature.state(), names(optimizer)
    state: dict[Any, dict[str, Any]] = {}
    groups = []
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        for parameter, spheres, key in zip(group["params"], group["spheres"], saved["params"], strict=True):
            entry = _padded(packed["state"].get(key, {}), parameter, spheres, balanced=optimizer.balanced)
            if (name := known[id(parameter)]) in curvature:
                entry["curvature"] = (_flat(curvature[name], parameter.device),)
            if entry:
                state[key] = entry
        groups.append(
            {
                **saved,
                "counters": dict(counters),
                "started": [bool(packed["state"].get(key)) for key in saved["params"]],
            }
        )
    return {**packed, "state": state, "param_groups": groups, "curvature": curvature, "counters": dict(counters)}


def _padded(entry: Mapping[str, Tensor], parameter: Tensor, spheres: int, *, balanced: bool) -> dict[str, Any]:
    """The state of a parameter with every entry that it may ever have; a frozen one need not have any."""
    if not entry and not parameter.requires_grad:
        return {}
    padded = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)} if not entry else {}
    if spheres:
        padded["alive"] = torch.ones(spheres, 1, dtype=torch.bool, device=parameter.device)
    if spheres and balanced:
        padded["balance"] = torch.zeros(spheres, 2, dtype=accumulation_dtype(parameter), device=parameter.device)
    return {**padded, **entry}


def in_one_place(optimizer: MKFAC, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``complete``: a saved state with the curvature in its own place alone.

    Args:
        optimizer: the optimizer that is to take it.
        saved: its new state, whole or reduced to ``state`` and ``param_groups``.

    Returns:
        A new dictionary; without curvature where there is none in either place.
    """
    groups, state = saved.get("param_groups", ()), saved.get("state", {})
    found = {"curvature": saved["curvature"], "counters": saved["counters"]} if "curvature" in saved else {}
    if not found and groups and all("counters" in group for group in groups):
        found = {"curvature": _with_parameters(optimizer, saved), "counters": groups[0]["counters"]}
    flags = [zip(group["params"], group.get("started", ()), strict=False) for group in groups]
    waiting = {key for keys in flags for key, started in keys if not started}
    return {
        "state": {key: _stripped(entry) for key, entry in state.items() if key not in waiting},
        "param_groups": [{k: v for k, v in group.items() if k not in ("counters", "started")} for group in groups],
        **found,
    }


def _stripped(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter without its curvature, and without ``alive`` where all rows have a direction."""
    return {
        key: value for key, value in entry.items() if key != "curvature" and not (key == "alive" and bool(value.all()))
    }


def _with_parameters(optimizer: MKFAC, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The curvature that a state holds with its parameters; frozen ones may have been left out."""
    found, layers = {}, optimizer.curvature.layers
    for group, other in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        for parameter, key in zip(group["params"], other["params"], strict=False):
            name, held = names(optimizer)[id(parameter)], saved["state"].get(key, {})
            if "curvature" in held:
                found[name] = _nested(*held["curvature"])
            elif name in layers and not parameter.requires_grad:
                nothing = Curvature(optimizer.curvature.options)
                nothing.follow([layers[name].tracked])
                found |= nothing.state()
    return found


def _flat(entry: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The curvature of one weight without nesting, with empty tensors for what there is not."""
    inverse = entry["inverse"] or {}
    tensors = {key: entry[key] for key in FACTORS} | {f"inverse_{key}": inverse.get(key) for key in INVERSE}
    numbers = {key: value for key, value in entry.items() if key not in (*FACTORS, "inverse")}
    return numbers | {key: torch.empty(0, device=device) if t is None else t for key, t in tensors.items()}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``_flat``."""
    there = {key: None if isinstance(value, Tensor) and not value.numel() else value for key, value in flat.items()}
    inverse = {key: there.pop(f"inverse_{key}") for key in INVERSE}
    return there | {"inverse": {key: t for key, t in inverse.items() if t is not None} or None}


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
        for mine, name in zip(group.get("param_names", []), other.get("param_names", []), strict=False):
            if mine != name:
                raise ValueError(
                    "the state is of another architecture, or its groups are in another order: "
                    f"it has {name!r} where {mine!r} is expected"
                )
        for parameter, key in zip(group["params"], other["params"], strict=True):
            state = saved["state"].get(key, {})
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
    mine_tracked = optimizer.curvature.layers.keys()
    if mine_tracked != set(saved["curvature"]):
        odd = min(mine_tracked ^ set(saved["curvature"]))
        raise ValueError(
            f"the state is of another architecture or treatment: only one of the two has curvature for {odd}"
        )
    for name, layer in optimizer.curvature.layers.items():
        entry = saved["curvature"][name]
        inverse = entry["inverse"] or {"left": entry["g"], "right": entry["a"]}
        orders = tuple(len(inverse[side]) for side in ("left", "right") if inverse[side] is not None)
        if orders and orders != layer.tracked.sizes:
            raise ValueError(
                f"the state is of another architecture: the factors of {name} have orders {orders} there, "
                f"expected {layer.tracked.sizes}"
            )


def take_over(optimizer: MKFAC, saved: Mapping[str, Any], rates: Sequence[Any]) -> None:
    """Put back what loading by the base class has left out or cast.

    Args:
        optimizer: with the groups and the state of the base class loaded.
        saved: the whole saved state.
        rates: the learning rates of the groups before that.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(rate, Tensor):  # captured graphs read this tensor
            group["lr"] = rate.copy_(torch.as_tensor(group["lr"]))
    before = [saved["state"].get(key, {}) for group in saved["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, state in zip(parameters, before, strict=True):
        for key, value in state.items():
            # loading has cast them to the dtype of the parameter, and copied nothing that fitted
            kept = value if key in ("alive", "balance") else optimizer.state[parameter][key]
            optimizer.state[parameter][key] = kept.to(parameter.device, copy=True)
    optimizer.curvature.load(saved["curvature"])
