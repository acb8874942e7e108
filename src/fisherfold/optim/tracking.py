"""Which weights have curvature: those that matrix layers, and nothing else, multiply their inputs by.

A parameter is one tensor with a name, and any number of modules may own it. Its Fisher block is a Kronecker product
where all of them are linear layers or convolutions of one kind; for the rest there is a reason in words.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from torch import Tensor, nn

from fisherfold.optim.factors import TrackedWeight
from fisherfold.optim.matrix_layers import MATRIX_LAYERS


def track(
    model: nn.Module, wanted: Mapping[int, str], *, join_bias: Container[int] = (), moved: Container[int] = ()
) -> tuple[list[TrackedWeight], dict[str, str]]:
    """Find the modules behind parameters whose curvature is wanted.

    Args:
        model: the module that owns them.
        wanted: the names of the weights by ``id``.
        join_bias: the ``id`` of the weights whose bias may join them as a last column.
        moved: the ``id`` of what is optimised: a bias that is not must not have a say in the direction of its weight.

    Returns:
        What can be tracked, and for the rest the reason why not, by name.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, attribute))
    tracked, refused = [], {}
    for key, name in wanted.items():
        uses = owners.get(key, [])
        layers = tuple(
            module for module, attribute in uses if attribute == "weight" and isinstance(module, MATRIX_LAYERS)
        )
        if not layers or len(layers) < len(uses):
            kinds = ", ".join(sorted({type(module).__name__ for module, _ in uses})) or "no module"
            refused[name] = f"first order: a parameter of {kinds}"
            continue
        if layers[0].weight.is_complex() or not layers[0].weight.numel():
            refused[name] = "first order: " + ("its numbers are complex" if layers[0].weight.numel() else "it is empty")
            continue
        if len({(type(layer), getattr(layer, "groups", 1)) for layer in layers}) > 1:
            refused[name] = "first order: tied between different kinds of layers"
            continue
        bias = layers[0].bias if len(layers) == 1 and key in join_bias and _moves(layers[0], moved) else None
        tracked.append(TrackedWeight(name, layers[0].weight, layers, bias))  # type: ignore[arg-type]
    return tracked, refused


def _moves(layer: nn.Module, moved: Container[int]) -> bool:
    """Whether the bias of a layer moves when its weight does: one that is frozen alone makes up for no step of it."""
    weight, bias = layer.weight, layer.bias
    return isinstance(bias, Tensor) and id(bias) in moved and (bias.requires_grad or not weight.requires_grad)


def refuse_replaced(model: nn.Module, weights: Iterable[TrackedWeight]) -> None:
    """Raise if a layer has got another weight than the one that is followed, and moved, or the model another layer.

    Args:
        model: the module that owned them.
        weights: those that are not frozen.

    Raises:
        RuntimeError: naming the weight.
    """
    now = dict(model.named_parameters())
    for tracked in weights:
        # reparametrised and pruned layers have theirs under another name
        kept = all(any(p is tracked.weight for p in layer.parameters()) for layer in tracked.layers)
        if not kept or now.get(tracked.name, tracked.weight) is not tracked.weight:
            raise RuntimeError(
                f"{tracked.name} is no longer the parameter that the optimizer was given, and is not moved by it "
                "(load_state_dict(assign=True), weight_norm and another layer in its place, for example, replace "
                "parameters): make a new optimizer, or hand it a new layer with add_param_group"
            )
