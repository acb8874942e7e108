"""The parameter groups of the optimizers, checked and brought into one form.

Every parameter group carries ``spheres``, one number per parameter: into how many equal blocks of rows it is cut, each
of unit length; 0 for a Euclidean parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fisherfold.optim import distributed
from fisherfold.optim.invariance import Finding, find_scale_invariant
from fisherfold.optim.options import check_hyperparameters, choice
from fisherfold.optim.structure import guess_from_structure
from fisherfold.plain import counted
from fisherfold.warn import warn

AS_TOLD = "as told"


def findings(model: nn.Module, invariant: Any, example_input: Any, seed: int) -> dict[str, Finding]:
    """Decide which weights are on spheres.

    Args:
        model: the module.
        invariant: as for ``MKFAC``.
        example_input: a batch for the probe.
        seed: of the probe.

    Returns:
        One finding per parameter.

    Raises:
        ValueError: if a name, a kind or a number of spheres does not fit the model, or the probe has no example input.
    """
    if invariant is None:
        invariant = "probe" if example_input is not None else "modules"
    nan = float("nan")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ValueError(f"model must have parameters, {type(model).__name__} has none")
    _require_values(parameters.items())
    if isinstance(invariant, Mapping):
        unknown = sorted(set(invariant) - set(parameters))
        if unknown:
            raise ValueError(f"invariant names {unknown[0]!r}, which is no parameter of {type(model).__name__}")
        counts = {name: sphere_count(name, p, invariant.get(name, "none")) for name, p in parameters.items()}
        return {name: Finding(_kind(parameters[name], s), s, nan, nan, AS_TOLD) for name, s in counts.items()}
    if choice("invariant", invariant, ("probe", "modules", "none")) == "none":
        return {name: Finding("none", 0, nan, nan, AS_TOLD) for name in parameters}
    if invariant == "modules":
        return guess_from_structure(model)
    if example_input is None:
        raise ValueError("invariant='probe' needs example_input, a batch that the model accepts")
    return find_scale_invariant(model, example_input, seed=seed)


def _require_values(parameters: Iterable[tuple[str, Any]]) -> None:
    """Refuse what cannot be scaled: anything but tensors, and tensors that are yet to get their values."""
    for name, parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"a parameter group must hold parameters, got a {type(parameter).__name__} among them")
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} has no shape yet: call the model on a batch first, then make the optimizer")
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values: load the model first")


def _kind(parameter: Tensor, spheres: int) -> Any:
    return "none" if spheres == 0 else "row" if spheres == len(parameter) else "tensor" if spheres == 1 else "group"


def sphere_count(name: str, parameter: Tensor, manifold: str | int) -> int:
    """The number of spheres that a description means for a parameter.

    Args:
        name: of the parameter.
        parameter: the parameter.
        manifold: ``"none"``, ``"row"``, ``"tensor"`` or a number of blocks of rows.

    Returns:
        0 for Euclidean.

    Raises:
        ValueError: if it does not fit the shape.
    """
    if manifold == "none":
        return 0
    if parameter.ndim < 2:
        raise ValueError(f"{name} has shape {tuple(parameter.shape)}: only weights with rows can be put on spheres")
    if not parameter.is_floating_point():
        raise ValueError(f"{name} is of {parameter.dtype}: only real weights can be put on spheres")
    if isinstance(manifold, int) and not isinstance(manifold, bool):
        if manifold < 1 or len(parameter) % manifold:
            rows, wanted = counted(len(parameter), "row"), counted(manifold, "sphere")
            raise ValueError(f"{name} has {rows}, which cannot be cut into {wanted}")
        return manifold
    return len(parameter) if choice(f"manifold of {name}", manifold, ("none", "row", "tensor")) == "row" else 1


def split(model: nn.Module, found: Mapping[str, Finding]) -> list[dict[str, Any]]:
    """Two groups, Euclidean first; a group without parameters is left out.

    Args:
        model: the module.
        found: a finding per parameter.

    Returns:
        Groups for an optimizer.
    """
    named = list(model.named_parameters())
    flat = [(name, p) for name, p in named if not found[name].spheres]
    curved = [(name, p) for name, p in named if found[name].spheres]
    result: list[dict[str, Any]] = []
    if flat:
        result.append({"params": flat, "manifold": "none"})
    if curved:
        counts = [found[name].spheres for name, _ in curved]
        result.append({"params": curved, "manifold": "spheres", "spheres": counts, "weight_decay": 0.0})
    return result


def warn_of_sgd(kind: str, model: nn.Module, found: Mapping[str, Finding]) -> None:
    """Warn where a network was looked through and nothing in it is on spheres: what is left is SGD with momentum.

    Args:
        kind: of the optimizer.
        model: the module.
        found: a finding per parameter.
    """
    if any(finding.spheres or finding.reason == AS_TOLD for finding in found.values()):
        return
    guessed = all(finding.guessed for finding in found.values())
    looked = "guessed from its modules, of which example_input lets it see more" if guessed else "report() says why"
    warn(
        f"no weight of {type(model).__name__} was found to be scale invariant ({looked}): {kind} moves all of it by "
        "SGD; MKFAC with euclidean='kfac', or KFAC, has curvature for such networks too",
    )


def explicit(given: Iterable[Any], owner: nn.Module | None) -> list[Any]:
    """Groups as the user wrote them.

    Args:
        given: dictionaries, or parameters, or named parameters.
        owner: the module that owns them, if it is known.

    Returns:
        Groups for an optimizer.

    Raises:
        ValueError: if there is nothing to optimise.
    """
    items = list(given)
    if not items:
        raise ValueError("model must be a module or parameter groups with at least one parameter, got nothing")
    if owner is None and not any(isinstance(item, dict) and "manifold" in item for item in items):
        warn(
            "parameters alone are moved by SGD: spheres and curvature are found in the module, so pass model in place "
            "of model.parameters(), or groups with an entry 'manifold'",
        )
    return items


def prepared(
    group: Mapping[str, Any], defaults: Mapping[str, Any], manifold_lr: float, *, capturable: bool
) -> dict[str, Any]:
    """A group with its numbers of spheres, before the optimizer takes it.

    Args:
        group: as given.
        defaults: what it does not say.
        manifold_lr: its learning rate if it does not say one and is on spheres.
        capturable: turn the learning rate into a tensor.

    Returns:
        A new group.

    Raises:
        ValueError: if it has no parameters.
    """
    given = group.get("params", ())
    full = {**group, "params": [given] if isinstance(given, Tensor) else list(given)}
    if not full["params"]:
        raise ValueError("a parameter group must have at least one parameter, got none")
    _require_values(p if isinstance(p, tuple) else ("a parameter", p) for p in full["params"])
    pairs = [p if isinstance(p, tuple) else (f"parameter of shape {tuple(p.shape)}", p) for p in full["params"]]
    distributed.refuse_sharded([p for _, p in pairs])
    manifold = full.get("manifold", defaults["manifold"])
    if "spheres" not in full:
        full["spheres"] = [sphere_count(name, p, manifold) for name, p in pairs]
    full.setdefault("lr", manifold_lr if any(full["spheres"]) else defaults["lr"])
    if capturable and not isinstance(full["lr"], Tensor):
        full["lr"] = torch.tensor(float(full["lr"]), dtype=torch.float32, device=pairs[0][1].device)
    if any(full["spheres"]) and "weight_decay" not in full:
        full["weight_decay"] = 0.0
    return full


def named(parameters: Iterable[Any], model: nn.Module | None, number: int) -> list[tuple[str, Tensor]]:
    """Parameters with names: given ones, those in the model, or made up from their places.

    Args:
        parameters: with names or without.
        model: where to look for names.
        number: of the group.

    Returns:
        Pairs of names and parameters.
    """
    known = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    return [
        p if isinstance(p, tuple) else (known.get(id(p), place(number, index)), p) for index, p in enumerate(parameters)
    ]


def refuse_unused(group: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse entries that other optimizers know and that would be of no effect here.

    Args:
        group: as given.
        names: of the entries.

    Raises:
        ValueError: naming the first that says something else than that it is not wanted.
    """
    for name in names:
        if group.get(name):
            raise ValueError(f"a parameter group cannot have {name} here, got {name}={group[name]!r}")


def check_group(group: Mapping[str, Any]) -> None:
    """Raise unless a complete group is sound.

    Args:
        group: the group.
    """
    refuse_unused(group, ("maximize", "nesterov", "dampening"))
    check_hyperparameters(group)
    refuse_decay_on_spheres(group)


def refuse_decay_on_spheres(group: Mapping[str, Any]) -> None:
    """Raise if a group on spheres has weight decay, from the start or since a schedule has set it.

    Args:
        group: a complete group.

    Raises:
        ValueError: saying so.
    """
    if any(group["spheres"]) and group["weight_decay"] != 0:
        raise ValueError(
            f"weight_decay must be 0 for a group on spheres, where only directions count, got {group['weight_decay']:g}"
        )


def place(number: int, index: int) -> str:
    """What a parameter is called that has no name.

    Args:
        number: of its group.
        index: in the group.

    Returns:
        Words.
    """
    return f"group {number}, parameter {index}"


def names(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The name of every parameter by ``id``, made up from its place where it has none.

    Args:
        optimizer: any optimizer.

    Returns:
        Names.
    """
    found: dict[int, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [place(number, index) for index in range(len(group["params"]))]
        found |= {id(p): name for name, p in zip(given, group["params"], strict=True)}
    return found


def make_dense(optimizer: torch.optim.Optimizer) -> None:
    """Replace sparse gradients by dense ones: momentum and curvature touch every row anyway.

    Args:
        optimizer: any optimizer.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()


def require_finite_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a gradient has an infinity or a NaN, before anything is changed.

    Args:
        optimizer: any optimizer.

    Raises:
        FloatingPointError: naming the first such parameter.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not gradients or bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients))):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                name = names(optimizer)[id(parameter)]
                raise FloatingPointError(f"the gradient of {name} is not finite; no parameter was changed")
