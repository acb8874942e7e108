"""Parameter groups: which weights are on spheres, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from fisherfold.optim.directions import DIRECTIONS
from fisherfold.optim.distributed import is_sharded
from fisherfold.optim.invariance import Finding, find_scale_invariant, guess_from_structure
from fisherfold.warn import warn

REST = ("auto", "adamw", "sgd", "muon", "kfac")
RULES = ("spheres", "adamw", "sgd", "muon", "kfac")
RATES = {"adamw": 2e-3, "muon": 2e-3, "sgd": 0.05, "kfac": 0.05}
MATRICES = (nn.Linear, nn.modules.conv._ConvNd)
LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


class Entry(NamedTuple):
    """A parameter with what its group says about it."""

    parameter: nn.Parameter
    name: str
    spheres: int
    splits: int


def entries_of(group: Mapping[str, Any]) -> list[Entry]:
    """The entries of a group."""
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
    return [
        Entry(*e)
        for e in zip(group["params"], names, group["spheres"], group["splits"], strict=True)
    ]


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module under the wrappers of ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def findings_of(
    model: nn.Module, invariant: str | Mapping[str, str | int] | None, example_input: Any
) -> dict[str, Finding]:
    """What is known about the scale invariance of every parameter."""
    if isinstance(invariant, Mapping):
        return {**findings_of(model, None, example_input), **_named(model, invariant)}
    if invariant is None:
        invariant = "modules" if example_input is None else "probe"
    if invariant == "probe":
        if example_input is None:
            raise ValueError(
                "invariant='probe' needs example_input, a batch that the model accepts"
            )
        return find_scale_invariant(model, example_input)
    if invariant == "modules":
        return guess_from_structure(model)
    if invariant == "none":
        return {
            name: Finding("none", 0, "invariant='none'") for name, _ in model.named_parameters()
        }
    raise ValueError(
        f"invariant must be 'probe', 'modules', 'none' or a mapping from names to kinds, got {invariant!r}"
    )


def _named(model: nn.Module, kinds: Mapping[str, str | int]) -> dict[str, Finding]:
    parameters = dict(model.named_parameters())
    unknown = [name for name in kinds if name not in parameters]
    if unknown:
        raise ValueError(f"invariant names no parameters of the model: {', '.join(unknown)}")
    found = {}
    for name, kind in kinds.items():
        parameter = parameters[name]
        rows = len(parameter) if parameter.ndim else 0
        named = {"row": rows, "tensor": 1, "none": 0}
        spheres = named.get(kind, kind) if isinstance(kind, str) else kind
        if (
            not isinstance(spheres, int)
            or spheres < 0
            or (spheres and (parameter.ndim < 2 or len(parameter) % spheres))
        ):
            raise ValueError(
                f"invariant[{name!r}] must be 'row', 'tensor', 'none' or a number of spheres that divides the rows of "
                f"a weight with two or more dimensions, got {kind!r} for shape {tuple(parameter.shape)}"
            )
        word = (
            "none"
            if not spheres
            else "row"
            if spheres == len(parameter)
            else "tensor"
            if spheres == 1
            else "group"
        )
        found[name] = Finding(word, spheres, "given by the user")  # type: ignore[arg-type]
    return found


def split_of(model: nn.Module) -> dict[str, int]:
    """Into how many matrices the rows of each weight fall: groups of convolutions, queries, keys and values."""
    found = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            if parameter is None or parameter.ndim < 2:
                continue
            joint = key == "in_proj_weight" or prefix.split(".")[-1] in {
                "qkv",
                "in_proj",
                "query_key_value",
            }
            if isinstance(module, nn.modules.conv._ConvNd) and not module.transposed:
                found[name] = module.groups
            elif joint and len(parameter) == 3 * parameter.shape[1]:
                found[name] = 3
    return found


def hidden_matrices(model: nn.Module) -> set[str]:
    """Weights of linear maps that are neither an embedding nor the last layer: those that Muon is for."""
    shared = {id(m.weight) for m in model.modules() if isinstance(m, LOOKUPS)}
    found: list[tuple[str, Tensor]] = []
    for prefix, module in model.named_modules():
        linear = isinstance(module, MATRICES) or type(module).__name__ == "Conv1D"
        for key, parameter in module._parameters.items():
            wanted = (linear and key == "weight") or (
                isinstance(module, nn.MultiheadAttention) and "proj" in key
            )
            if (
                wanted
                and parameter is not None
                and parameter.ndim >= 2
                and min(parameter.flatten(1).shape) > 1
            ):
                found.append((f"{prefix}.{key}" if prefix else key, parameter))
    return {name for name, parameter in found[:-1] if id(parameter) not in shared}


def groups_of(
    model: nn.Module,
    findings: Mapping[str, Finding],
    *,
    lr: float | None,
    rest: str,
    rest_lr: float | None,
    weight_decay: float | None,
) -> list[dict[str, Any]]:
    """Parameter groups: spheres, hidden matrices, other matrices, and vectors without weight decay."""
    hidden, splits = hidden_matrices(model), split_of(model)
    named: dict[str, list[tuple[str, nn.Parameter]]] = {
        "spheres": [],
        "hidden": [],
        "matrices": [],
        "vectors": [],
    }
    for name, parameter in model.named_parameters():
        finding = findings.get(name)
        spheres = finding.spheres if finding else 0
        if spheres and not _directed(parameter, spheres):
            warn(
                f"{name} has rows of zero or NaN, which have no direction: it is not put on spheres"
            )
            spheres = 0
        kind = (
            "spheres"
            if spheres
            else "hidden"
            if name in hidden
            else "matrices"
            if parameter.ndim > 1
            else "vectors"
        )
        named[kind].append((name, parameter))
    other = "sgd" if rest in {"sgd", "kfac"} else "adamw"
    rules = {"spheres": "spheres", "hidden": other, "matrices": other, "vectors": other}
    if rest in {"muon", "kfac"}:
        rules["hidden"] = rest
    if rest == "kfac":
        rules["matrices"] = "kfac"
    groups: list[dict[str, Any]] = []
    for kind, members in named.items():
        if not members:
            continue
        group: dict[str, Any] = {"params": members, "rule": rules[kind]}
        group["spheres"] = [findings[n].spheres if kind == "spheres" else 0 for n, _ in members]
        group["splits"] = [splits.get(n, 1) for n, _ in members]
        group["lr"] = (
            lr if kind == "spheres" else rest_lr if rest_lr is not None else RATES[rules[kind]]
        )
        group["weight_decay"] = 0.0 if kind in {"spheres", "vectors"} else weight_decay
        groups.append(group)
    return groups


def _directed(parameter: Tensor, spheres: int) -> bool:
    if parameter.is_meta or is_sharded(parameter):
        return True
    largest = parameter.detach().reshape(spheres, -1).abs().amax(dim=1)
    return bool(((largest > 0) & largest.isfinite()).all())


def filled(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A group with the entries that a step needs."""
    given, group = group, {**defaults, **group}
    params = group["params"]
    group["params"] = params = [params] if isinstance(params, Tensor) else list(params)
    if group["rule"] not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {group['rule']!r}")
    choice("direction", group["direction"], DIRECTIONS)
    check_number("lr", group["lr"], above=0.0)
    check_number("momentum", group["momentum"], least=0.0, below=1.0)
    check_number("weight_decay", group["weight_decay"], least=0.0)
    check_number("damping", group["damping"], above=0.0)
    weights = [p[1] if isinstance(p, tuple) else p for p in params]
    rows = [len(w) if group["rule"] == "spheres" else 0 for w in weights]
    group["spheres"] = list(group.get("spheres") or rows)
    group["splits"] = list(group.get("splits") or [1] * len(params))
    if group["rule"] == "spheres" and group["weight_decay"]:
        if given.get("weight_decay"):
            warn(
                "weight decay has no meaning for weights on spheres, whose norms are fixed; it is ignored there"
            )
        group["weight_decay"] = 0.0
    return group


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
) -> None:
    """Check the range of a number; tensors are taken as they are, since a look at them is a synchronisation."""
    if isinstance(value, Tensor):
        return
    limits = (("above", above), ("at least", least), ("below", below))
    bounds = [f"{word} {limit:g}" for word, limit in limits if limit is not None]
    good = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    good = good and (above is None or value > above) and (least is None or value >= least)
    if not good or (below is not None and value >= below):
        raise ValueError(f"{name} must be {' and '.join(bounds)}, got {value!r}")


def choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Check that an option is one of those known."""
    known = tuple(known)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
