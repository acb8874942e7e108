"""Parameter groups: which weights are on spheres, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from fisherfold.optim.invariance import find_scale_invariant
from fisherfold.optim.layout import Layout, layout_of
from fisherfold.optim.roles import Use, findings_of
from fisherfold.warn import warn

DIRECTIONS = ("spectral", "gradient", "natural")
REST = ("adamw", "sgd", "kfac")
RULES = ("spheres", *REST)
# Rates of the rest for SGD, and the share of the angle for AdamW: in long and in short runs, over
# the root of their
# number of steps in between.
SGD_RATE = 0.05
LONG, SHORT, PER_ROOT = 0.1, 0.5, 7.0
UNKNOWN = 0.5
# Of the state of an optimizer; 0.2 wrote none.
FORMAT = 3


class Treatment(NamedTuple):
    """How a parameter is moved: on so many spheres, or on none."""

    spheres: int
    layout: Layout
    reason: str


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module under the wrappers of ``torch.compile`` and of DDP."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def treatments_of(
    model: nn.Module, overrides: Mapping[str, str | int], flow: Mapping[int, Use] | None = None
) -> dict[str, Treatment]:
    """The one rule: hidden matrices are on spheres, row by row."""
    found = {}
    for name, finding in findings_of(model, flow).items():
        rows = finding.layout.matrices * finding.layout.rows
        spheres = rows if finding.role == "hidden" else 0
        found[name] = Treatment(spheres, finding.layout, finding.reason)
    return found | _named(model, overrides, found)


def probed(
    model: nn.Module, invariant: str | Mapping[str, str | int] | None, example_input: Any
) -> dict[str, Treatment]:
    """The paper's rule: scale-invariant weights are on spheres, found by the probe."""
    named = invariant if isinstance(invariant, Mapping) else {}
    found = {
        name: Treatment(0, layout_of(p, None, name), "invariant='none'")
        for name, p in model.named_parameters()
    }
    if example_input is not None and invariant != "none":
        for name, finding in find_scale_invariant(model, example_input).items():
            found[name] = Treatment(finding.spheres, found[name].layout, finding.reason)
    elif not named and invariant != "none":
        raise ValueError(
            "the probe for scale-invariant weights needs example_input, a batch that the model "
            "accepts; or pass "
            "invariant={name: 'row', ...} or 'none'"
        )
    found |= _named(model, named, found)
    for name, p in model.named_parameters():
        spheres, layout, _ = found[name]
        if spheres and not bool((p.detach().reshape(spheres, -1).abs().amax(1) > 0).all()):
            found[name] = Treatment(0, layout, "has rows of zero, which have no direction")
    return found


def _named(
    model: nn.Module, kinds: Mapping[str, str | int], known: Mapping[str, Treatment]
) -> dict[str, Treatment]:
    parameters = dict(model.named_parameters())
    unknown = [name for name in kinds if name not in parameters]
    if unknown:
        raise ValueError(
            f"no parameters of the model: {', '.join(unknown)}; see named_parameters()"
        )
    found = {}
    for name, kind in kinds.items():
        parameter, layout = parameters[name], known[name].layout
        rows = layout.matrices * layout.rows
        named = {"row": rows, "tensor": 1, "adamw": 0, "none": 0}
        spheres = named.get(kind, -1) if isinstance(kind, str) else kind
        if spheres < 0 or (spheres and (parameter.ndim < 2 or rows % spheres)):
            raise ValueError(
                f"{name!r} must be 'row', 'tensor', 'adamw' or a number of spheres that divides "
                f"the rows of a "
                f"weight with two or more dimensions, got {kind!r} for shape "
                f"{tuple(parameter.shape)}"
            )
        found[name] = Treatment(spheres, layout, "by name")
    return found


def rest_rate(lr: float, rest: str, total_steps: int | None) -> float:
    """The rate of the rest where none is given: short runs need larger ones."""
    if rest != "adamw":
        return SGD_RATE
    share = UNKNOWN if total_steps is None else min(SHORT, max(LONG, PER_ROOT / total_steps**0.5))
    return lr * share


def groups_of(
    model: nn.Module,
    treatments: Mapping[str, Treatment],
    *,
    rates: Mapping[str, float | None],
    rest: str,
    weight_decay: float | None,
    scales: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups: spheres, other matrices, and vectors without weight decay.

    For each scale of rates.
    """
    scales = scales or {}
    members: dict[tuple[float, str], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        prefixes = [key for key in scales if name == key or name.startswith(key + ".")]
        scale = scales[max(prefixes, key=len)] if prefixes else 1.0
        kind = "matrices" if parameter.ndim > 1 else "vectors"
        kind = "spheres" if treatments[name].spheres else kind
        # where the data flow moves a weight to, there is a group
        for needed in ("spheres", "matrices") if kind != "vectors" else ("vectors",):
            members.setdefault((scale, needed), [])
        members[scale, kind].append((name, parameter))
    groups = []
    for scale, kind in sorted(members, key=lambda key: (-key[0], list(RATES).index(key[1]))):
        named = members[scale, kind]
        rule = "spheres" if kind == "spheres" else rest
        rule = "sgd" if rule == "kfac" and kind == "vectors" else rule
        rate = rates["lr" if kind == "spheres" else "rest_lr"]
        group: dict[str, Any] = {"params": named, "rule": rule, "kind": kind}
        if not named:
            group["param_names"] = []
        group["spheres"] = [treatments[name].spheres for name, _ in named]
        group["layouts"] = [tuple(treatments[name].layout) for name, _ in named]
        group["lr"] = None if rate is None else rate * scale
        if scales and rate is None:  # the schedulers of timm multiply by it
            group["lr_scale"] = scale
        group["weight_decay"] = weight_decay if kind == "matrices" else 0.0
        groups.append(group)
    return groups


RATES = {"spheres": "lr", "matrices": "rest_lr", "vectors": "rest_lr"}


def filled(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A group with the entries that a step needs."""
    given, group = group, {**defaults, **group}
    params = group["params"]
    group["params"] = params = [params] if isinstance(params, Tensor) else list(params)
    choice("rule", group["rule"], RULES)
    choice("direction", group["direction"], DIRECTIONS)
    if given.get("lr") is None:
        group["lr"] = defaults["lr" if group["rule"] == "spheres" else "rest_lr"]
    check_number("lr", group["lr"], least=0.0)
    check_number("momentum", group["momentum"], least=0.0, below=1.0)
    check_number("weight_decay", group["weight_decay"], least=0.0)
    check_number("damping", group["damping"], above=0.0)
    check_number("eps", group["eps"], above=0.0)
    for beta in group["betas"]:
        check_number("betas", beta, least=0.0, below=1.0)
    if not isinstance(group["ns_steps"], int) or group["ns_steps"] < 1:
        raise ValueError(f"ns_steps must be a whole number above 0, got {group['ns_steps']!r}")
    weights = [p[1] if isinstance(p, tuple) else p for p in params]
    layouts = [tuple(layout_of(w, None, "")) for w in weights]
    rows = [a * b if group["rule"] == "spheres" else 0 for a, b, _ in layouts]
    group["spheres"] = list(group.get("spheres") or rows)
    group["layouts"] = list(group.get("layouts") or layouts)
    group.setdefault("kind", "spheres" if group["rule"] == "spheres" else "matrices")
    if group["rule"] == "spheres" and group["weight_decay"]:
        if given.get("weight_decay"):
            warn("weights on spheres keep their norms: their weight_decay is ignored")
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
    """Check the range of a number.

    Tensors are taken as they are, since a look at them is a synchronisation.
    """
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
