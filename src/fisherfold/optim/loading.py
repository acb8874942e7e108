"""States and changes of groups.

Validated as a whole, parameters moved between groups and adopted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fisherfold.optim.grouping import FORMAT, Treatment
from fisherfold.optim.layout import layout_of

LISTS = ("params", "param_names", "spheres", "layouts")
SHAPED = {"momentum", "exp_avg", "exp_avg_sq", "master", "average"}
RULES = ("rule", "kind", "direction")


def regroup(optimizer: Any, treatments: Mapping[str, Treatment]) -> None:
    """Move parameters without state between the groups of spheres and of other matrices."""
    for group in list(optimizer.param_groups):
        if group["kind"] not in {"spheres", "matrices"} or "param_names" not in group:
            continue
        for index in reversed(range(len(group["params"]))):
            treatment = treatments.get(group["param_names"][index])
            if treatment is None:
                continue
            group["spheres"][index] = treatment.spheres
            group["layouts"][index] = tuple(treatment.layout)
            wanted = "spheres" if treatment.spheres else "matrices"
            target = _partner(optimizer, group, wanted)
            if wanted != group["kind"] and target is not None:
                for key in LISTS:
                    target[key].insert(0, group[key].pop(index))


def _partner(optimizer: Any, group: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """The group of the other kind beside a group."""
    groups = optimizer.param_groups
    place = next(i for i, g in enumerate(groups) if g is group)
    near = groups[place - 1 : place] if kind == "spheres" else groups[place + 1 : place + 2]
    return next((g for g in near if g["kind"] == kind), None)


def adopt(optimizer: Any) -> tuple[list[str], list[str]]:
    """Put parameters that have taken the place of others into their groups.

    Return their names and those unknown.
    """
    named = dict(optimizer.model.named_parameters())
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    modules = dict(optimizer.model.named_modules())
    new = {n: p for n, p in named.items() if id(p) not in owned and p.requires_grad}
    adopted = []
    for group in optimizer.param_groups:
        for index, name in enumerate(group.get("param_names", [])):
            if name not in new:
                continue
            optimizer.state.pop(group["params"][index], None)
            parameter = new.pop(name)
            group["params"][index] = parameter
            layout = layout_of(parameter, modules.get(name.rpartition(".")[0]), name)
            group["layouts"][index] = tuple(layout)
            if group["spheres"][index]:
                group["spheres"][index] = layout.matrices * layout.rows
            adopted.append(name)
    return adopted, [name for name, p in new.items() if p.grad is not None]


# ---------------------------------------------------------------------- states


def validated(optimizer: Any, state_dict: Mapping[str, Any]) -> list[list[str]]:
    """Check a state as a whole; return the names of each of its groups."""
    groups = state_dict.get("param_groups", [])
    if groups and groups[0].get("format") != FORMAT:
        if "splits" not in groups[0]:
            raise ValueError("the state is that of another optimizer or of another model")
        raise ValueError(
            "the state was written by fisherfold 0.2, whose momentum is another one: start the "
            "optimizer anew, the "
            "weights of the model can be kept"
        )
    own = {e.name: e for e in optimizer._entries()}
    saved = sum(len(group["params"]) for group in groups)
    if saved != len(own) or len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the state is that of another model: {saved} parameters, {len(own)} expected"
        )
    order = []
    for theirs, mine in zip(groups, optimizer.param_groups, strict=True):
        names = theirs.get("param_names") or mine.get("param_names") or []
        names = names or [e.name for e in optimizer._entries()][: len(theirs["params"])]
        order.append(list(names))
        if len(names) != len(theirs["params"]):
            raise ValueError("the state is damaged: a group has not as many names as parameters")
        for key in RULES:
            if theirs.get(key) != mine[key] and (key != "direction" or mine["rule"] == "spheres"):
                raise ValueError(
                    f"the state is that of another optimizer: {key}={theirs.get(key)!r} where "
                    f"{mine[key]!r} is expected"
                )
        for index, name in zip(theirs["params"], names, strict=True):
            if name not in own and theirs.get("param_names"):
                raise ValueError(f"the state is that of another model: it has {name}")
            if name in own:
                _check_tensors(own[name], state_dict["state"].get(index, {}))
    return order


def _check_tensors(entry: Any, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if key in SHAPED and value.shape != entry.parameter.shape:
            shapes = f"{tuple(value.shape)}, expected {tuple(entry.parameter.shape)}"
            raise ValueError(f"the state is that of another model: {entry.name} has shape {shapes}")
        if not bool(torch.isfinite(value).all()):
            raise ValueError(
                f"the state is damaged: {key} of {entry.name} is not finite; nothing was loaded"
            )


def arrange(optimizer: Any, order: list[list[str]]) -> None:
    """Put parameters into the groups in which a state has them."""
    groups = optimizer.param_groups
    if not all("param_names" in group for group in groups):
        return
    rows = {
        name: [group[key][i] for key in LISTS]
        for group in groups
        for i, name in enumerate(group["param_names"])
    }
    for group, names in zip(groups, order, strict=True):
        for key, values in zip(
            LISTS, zip(*(rows[name] for name in names), strict=True), strict=False
        ):
            group[key] = list(values)
        if not names:
            group.update({key: [] for key in LISTS})


def restore_dtypes(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Undo the cast of states to the dtype of their parameter."""
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    for index, entry in zip(saved, optimizer._entries(), strict=True):
        for key, value in state_dict["state"].get(index, {}).items():
            mine = optimizer.state[entry.parameter].get(key)
            if isinstance(value, Tensor) and isinstance(mine, Tensor) and value.dtype != mine.dtype:
                optimizer.state[entry.parameter][key] = value.detach().clone().to(mine.device)


def follow_(master: Tensor, narrow: Tensor) -> None:
    """Take a narrow weight over where it is not its rounded copy: loaded, or changed by others."""
    master.copy_(torch.where(master.to(narrow.dtype) == narrow, master, narrow.float()))
