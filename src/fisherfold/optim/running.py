"""Running statistics of batch norms, carried along when the weights before them are scaled to unit length.

In training mode the scale of an invariant weight does not matter. In evaluation mode a batch norm divides by what it
has averaged at the old scale. If scaling turns channel k of its input into c_k x + d_k, then

    mean_k ← c_k mean_k + d_k,        var_k ← c_k² var_k

leaves its output as it was, up to the ε beside the variance (d_k is there because the bias of a layer is not scaled:
d = (1 - c) b). Both are measured on an example input: c at generic values of the parameters, where every channel is
alive, and d at the model's own. Without an example the norm directly after a layer takes them from the layer.

With an example the outputs tell whether all is the same at unit length. It is not where the ε of a norm is large beside
what unit rows make of small inputs, or where a norm that is written by hand has averages of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fisherfold.optim.generic import Points
from fisherfold.optim.invariance import EPSILON_THRESHOLD
from fisherfold.optim.outputs import relative_change, size_of, unmasked
from fisherfold.optim.replica import SMALL_EPSILON, Replica, own_draws
from fisherfold.optim.rows import unit_factors
from fisherfold.optim.structure import NORMS_PER_SAMPLE, norms_rows, uses_of_layers
from fisherfold.warn import warn

MAX_COLUMNS = 4096
TOLERANCE = 1e-4
ROUGHLY = 1e-2  # the ε of norms that are functions has its part at the model's own values
Pairs = dict[str, list[tuple[Tensor, Tensor]]]
NO_CHANGE = 1e-6
# where a function takes the running mean, and what its sixth argument is called that makes it look at its input
MEAN_AND_FLAG: dict[Any, tuple[int, str, bool]] = {
    functional.batch_norm: (1, "training", False),
    functional.instance_norm: (1, "use_input_stats", True),
    torch.batch_norm: (3, "training", False),
    torch.instance_norm: (3, "use_input_stats", True),
}


@dataclass(frozen=True)
class Change:
    """What scaling does to the input x of a norm: c x + d, channel by channel.

    Attributes:
        factor: c.
        shift: d.
    """

    factor: Tensor
    shift: Tensor


SAME = Change(torch.ones((), device="cpu"), torch.zeros((), device="cpu"))


def carry_over(model: nn.Module, factors: Mapping[int, Tensor], example_input: Any, seed: int) -> bool:
    """Change the running statistics of a model as if its weights had always had the scale that they will get.

    Norms whose change cannot be found are named in a warning, unless they have never been used.

    Args:
        model: its buffers are changed in place, its weights are not.
        factors: by what the blocks of rows of a weight will be multiplied, by the ``id`` of the weight.
        example_input: a batch that the model accepts, or None.
        seed: of the generic values.

    Returns:
        False where the model would compute something else on the example with weights of that scale; nothing is changed
        then.
    """
    factors = {id(p): factors[id(p)] for p in model.parameters() if id(p) in factors}
    if all(bool(((c - 1).abs() < NO_CHANGE).all()) for c in factors.values()):
        return True
    scaled = {name: factors[id(p)] for name, p in model.named_parameters() if id(p) in factors}
    buffers = dict(model.named_buffers())
    means = {n.removesuffix("running_mean"): b for n, b in buffers.items() if n.split(".")[-1] == "running_mean"}
    norms = {n: (mean, buffers[n + "running_var"]) for n, mean in means.items() if n + "running_var" in buffers}
    changes: dict[str, Change | None] | None = None if norms else {}
    if norms and example_input is not None:
        changes = _measured(model, norms.keys(), scaled, example_input, seed)
    if changes is None:
        changes = _from_structure(model, norms.keys(), factors)
    if example_input is not None and not _computes_the_same(model, scaled, changes, example_input, seed):
        return False
    for name, change in changes.items():
        if change is not None:
            _apply(change, *norms[name])
    lost = [n.removesuffix(".") or "the model" for n, c in changes.items() if c is None and not _is_new(*norms[n])]
    if lost:
        hint = "" if example_input is not None else "; with example_input they can be measured"
        warn(
            f"weights are scaled to unit length, and the running statistics of {', '.join(lost)} could not be carried "
            f"over: the output in evaluation mode changes until training has renewed them{hint}",
        )
    return True


def _apply(change: Change, mean: Tensor, variance: Tensor) -> None:
    factor, shift = change.factor.to(mean.device), change.shift.to(mean.device)
    with torch.no_grad():
        mean.copy_(factor * mean.double() + shift)
        variance.copy_(factor.square() * variance.double())


def _is_new(mean: Tensor, variance: Tensor) -> bool:
    return bool((mean == 0).all() & (variance == 1).all())


# ---------------------------------------------------------------------- with an example


class _Watch(TorchFunctionMode):
    """Keeps the inputs of all norms that average their statistics, whether they are modules or functions."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.inputs: dict[str, list[Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MEAN_AND_FLAG:
            place, flag, default = MEAN_AND_FLAG[func]
            mean = args[place] if len(args) > place else kwargs.get("running_mean")
            normalises = args[5] if len(args) > 5 else kwargs.get(flag, default)
            if normalises and id(mean) in self.names:
                x = args[0] if args else kwargs["input"]
                rows = x.detach().movedim(1, 0).flatten(1)
                thinned = rows[:, :: max(1, rows.shape[1] // MAX_COLUMNS)].clone()
                self.inputs.setdefault(self.names[id(mean)], []).append(thinned)
        return func(*args, **kwargs)


def _measured(
    model: nn.Module, norms: Any, scaled: Mapping[str, Tensor], example_input: Any, seed: int
) -> dict[str, Change | None] | None:
    """The change of every norm, None for one that is not of this form; None if the model cannot be run at all."""
    with own_draws(model), torch.enable_grad():
        try:
            replica = Replica(model, example_input, seed)
            replica.scale_epsilons(SMALL_EPSILON)
            points = Points(replica.model, seed)
            replica.forward()  # the first pass may be run twice, which no watch should see
            own = _before_and_after(replica, norms, scaled)
        except ValueError:
            return None
        generic = _generic_pairs(replica, points, norms, scaled) or own
    return {name: _change(generic.get(name, []), own.get(name, [])) for name in norms}


def _generic_pairs(replica: Replica, points: Points, norms: Any, scaled: Mapping[str, Tensor]) -> Pairs:
    """Inputs before and after at generic values, from so many draws that every channel varies in one of them."""
    pairs: Pairs = {}
    for manner, draw in (("free", 0), ("free", 1), ("free", 2), ("gentle", 0)):
        points.move(manner, draw)
        try:
            found = _before_and_after(replica, norms, scaled)
        except ValueError:
            continue
        if all(bool(torch.isfinite(t).all()) for entry in found.values() for pair in entry for t in pair):
            pairs = {name: pairs.get(name, []) + entry for name, entry in found.items()}
            varying = [[~_factor(*pair).isnan() for pair in entry] for entry in pairs.values()]
            if all(bool(torch.stack(seen).any(dim=0).all()) for seen in varying):
                break
    return pairs


def _before_and_after(replica: Replica, norms: Any, scaled: Mapping[str, Tensor]) -> Pairs:
    """The inputs of every norm, call by call, before and after the weights are scaled."""
    buffers = dict(replica.model.named_buffers())
    seen = []
    for factors in ({}, scaled):
        watch = _Watch({id(buffers[name + "running_mean"]): name for name in norms})
        with replica.scaled(factors), watch:
            replica.forward()
        seen.append(watch.inputs)
    before, after = seen
    return {name: list(zip(before[name], after.get(name, []), strict=False)) for name in before}


def _change(generic: list[tuple[Tensor, Tensor]], own: list[tuple[Tensor, Tensor]]) -> Change | None:
    """The one change that fits all calls of a norm; no calls, no change."""
    if not generic or not own:
        return SAME
    factors = torch.stack([_factor(before, after) for before, after in generic])
    if bool(factors.isinf().any()):
        return None
    factor = factors.nanmean(dim=0).nan_to_num(nan=1.0)
    factor = torch.where((factor - 1).abs() < NO_CHANGE, torch.ones_like(factor), factor)
    if bool(((factors - factor).abs() > TOLERANCE * factor).any()):
        return None
    # a factor that depends on the values of weights (spectral norm) is not that of the architecture
    here = torch.stack([_factor(before, after) for before, after in own])
    if bool((here.isfinite() & ((here - factor).abs() > ROUGHLY * factor)).any()):
        return None
    shifts = torch.stack([after.mean(dim=1) - factor * before.mean(dim=1) for before, after in own])
    sizes = own[0][0].square().mean(dim=1).sqrt()
    shift = shifts.mean(dim=0)
    if bool(((shifts - shift).abs() > TOLERANCE * sizes).any()):
        return None
    return Change(factor, torch.where(shift.abs() <= NO_CHANGE * sizes, torch.zeros_like(shift), shift))


def _factor(before: Tensor, after: Tensor) -> Tensor:
    """The c of after = c · before + d by channel: NaN without variance, infinite where it is not of this form."""
    x, y = (t - t.mean(dim=1, keepdim=True) for t in (before, after))
    old, new = x.square().sum(dim=1), y.square().sum(dim=1)
    factor = torch.where(old > 1e-20 * before.square().sum(dim=1), (new / old).sqrt(), float("nan"))
    misfit = (y - factor.unsqueeze(1) * x).square().sum(dim=1)
    return torch.where(misfit > TOLERANCE**2 * new, float("inf"), factor)


def _computes_the_same(
    model: nn.Module,
    scaled: Mapping[str, Tensor],
    changes: Mapping[str, Change | None],
    example_input: Any,
    seed: int,
) -> bool:
    """Whether the outputs stay as they are, in training and in evaluation mode; True where the model cannot be run."""

    def change(buffers: dict[str, Tensor]) -> None:
        for name, found in changes.items():
            if found is not None:
                _apply(found, buffers[name + "running_mean"], buffers[name + "running_var"])

    with own_draws(model), torch.enable_grad():
        try:
            replica = Replica(model, example_input, seed)
        except ValueError:
            return True
        points = Points(replica.model, seed)
        points.move("free", 0, only=points.hiding(but=scaled))
        if not all(bool(t.isfinite().all()) for t in _outputs(replica, training=True)):
            points.restore()
        before = [_outputs(replica, training=training) for training in (True, False)]
        replica.begin_from(change)
        with replica.scaled(scaled):
            after = [_outputs(replica, training=training) for training in (True, False)]
        # at directions that training does not change: the answer should be the same when a run goes on
        points.move("free", 0)
        units = {n: unit_factors(replica.parameters[n].detach().reshape(len(c), -1)) for n, c in scaled.items()}
        before.append(_outputs(replica, training=True))
        with replica.scaled(units):
            after.append(_outputs(replica, training=True))
    return all(_alike(*pair) for pair in zip(before, after, strict=True))


def _outputs(replica: Replica, *, training: bool) -> list[Tensor]:
    """What a replica returns in a mode; nothing where it cannot be run, as some cannot on inputs of the other mode."""
    replica.model.train(training)
    try:
        return [t.detach() for t in replica.forward()]
    except ValueError:
        return []


def _alike(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether outputs are the same up to what is small; True where they cannot be compared."""
    if [t.shape for t in before] != [t.shape for t in after] or not math.isfinite(size_of(unmasked(before))):
        return True
    return relative_change(before, after) < EPSILON_THRESHOLD


# ---------------------------------------------------------------------- without one


def _from_structure(model: nn.Module, norms: Any, factors: Mapping[int, Tensor]) -> dict[str, Change | None]:
    """The change of every norm that directly follows a scaled layer; None where some weight goes elsewhere."""
    modules = {id(module): name + "." if name else "" for name, module in model.named_modules()}
    pairs, _ = uses_of_layers(model)
    followed = {id(layer.weight) for layer, _ in pairs}
    everywhere = factors.keys() <= followed
    found: dict[str, list[Change]] = {}
    for layer, user in pairs:
        if id(layer.weight) not in factors or isinstance(user, NORMS_PER_SAMPLE):
            continue
        if norms_rows(layer, user):
            change = _change_by_layer(layer, factors[id(layer.weight)])
            found.setdefault(modules[id(user)], []).append(change)
        else:
            everywhere = False
    unknown = SAME if everywhere else None
    return {n: (found[n][0] if len(found[n]) == 1 else None) if n in found else unknown for n in norms}


def _change_by_layer(layer: Any, factors: Tensor) -> Change:
    rows = len(layer.weight)
    factor = factors.double().reshape(-1, 1).expand(-1, rows // len(factors)).reshape(-1)
    bias = torch.zeros_like(factor) if layer.bias is None else layer.bias.detach().double()
    return Change(factor, (1 - factor) * bias)
