"""Saved states of MKFAC and its halves: what they hold, and how an optimizer goes on from one.

The curvature has its own place beside the state that ``torch.optim.Optimizer`` keeps, because loading casts that state
to the dtype of the parameters. What keeps ``state`` and ``param_groups`` alone, as ``torch.distributed.checkpoint``
does, finds the same curvature with the parameters, and the same counters with the groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.optim.curvature import Curvature
from fisherfold.optim.factors import accumulation_dtype
from fisherfold.optim.groups import names
from fisherfold.optim.precondition import Preconditioner

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
    curvature, known = _curvature_state(optimizer.curvature), names(optimizer)
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
    found, layers, known = {}, optimizer.curvature.layers, names(optimizer)
    for group, other in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        for parameter, key in zip(group["params"], other["params"], strict=False):
            name, held = known[id(parameter)], saved["state"].get(key, {})
            if "curvature" in held:
                found[name] = _nested(*held["curvature"])
            elif name in layers and not parameter.requires_grad:
                nothing = Curvature(optimizer.curvature.options)
                nothing.follow([layers[name].tracked])
                found |= _curvature_state(nothing)
    return found


def _curvature_state(curvature: Curvature) -> dict[str, Any]:
    """All that curvature needs to go on, by the names of weights: plain containers, numbers and tensors."""
    return {
        name: {
            "a": layer.a,
            "g": layer.g,
            "mass": layer.mass,
            "failures": layer.failures,
            "lengths": layer.lengths,
            "calls": curvature.calls.get(name, 0),
            "inverse": None if layer.inverse is None else dict(layer.inverse.tensors()),
            "top": math.nan if layer.inverse is None else layer.inverse.top,
            "error": math.nan if layer.inverse is None else layer.inverse.error,
        }
        for name, layer in curvature.layers.items()
    }


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
    _load_curvature(optimizer.curvature, saved["curvature"])


def _load_curvature(curvature: Curvature, saved: Mapping[str, Any]) -> None:
    """Take over what ``_curvature_state`` returned, keeping its dtypes."""
    for name, layer in curvature.layers.items():
        entry = saved[name]
        device = layer.tracked.weight.device
        # copies: what was saved may belong to an optimizer that goes on by itself
        layer.a, layer.g = (None if t is None else t.to(device, copy=True) for t in (entry["a"], entry["g"]))
        lengths = entry.get("lengths")
        layer.lengths = None if lengths is None else lengths.to(device, copy=True)
        layer.mass, layer.failures = float(entry["mass"]), int(entry["failures"])
        curvature.calls[name] = int(entry["calls"])
        tensors = {key: t.to(device, copy=True) for key, t in (entry["inverse"] or {}).items()}
        layer.inverse = None
        if tensors:
            layer.inverse = Preconditioner(
                tensors["left"], tensors["right"], tensors.get("coefficients"), tensors.get("base"),
                float(entry["top"]), float(entry["error"]),
            )  # fmt: skip
