"""What an example input must be, so that outputs tell of the weights before a batch norm: three samples, not all alike.

A batch norm makes -1 and 1 of two values per channel, and 0 of one value everywhere, whatever the weights before it.
What is left of their gradients are the ε of the norm and rounding errors, for which no identity holds: a network all of
whose weights are scale invariant would look as if it had none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fisherfold.optim.replica import Replica, tensors_in

NO_VARIANCE = 1e-20


def refuse_two_samples(replica: Replica) -> None:
    """Run a model on its example input, and raise if a batch norm sees two values per channel.

    Args:
        replica: the model with its input.

    Raises:
        ValueError: naming the norm.
    """
    norm = _first_norm(replica, lambda x: x.numel() == 2 * x.shape[1])
    if norm is not None:
        raise ValueError(
            f"example_input has too few samples: batch norm {norm!r} sees two values per channel, and makes -1 and 1 "
            "of them whatever the weights before it: give three samples or more"
        )


def refuse_no_numbers(replica: Replica) -> None:
    """Raise if the outputs of a model are NaN: no identity holds for them, and all weights would look Euclidean.

    Args:
        replica: the model with its input.

    Raises:
        ValueError: saying so.
    """
    if any(bool(t.isnan().any()) for t in replica.forward()):
        raise ValueError(
            f"{type(replica.model).__name__} returned NaN for example_input: look for NaN in the input and in the "
            "parameters, or give invariant='modules' or a mapping"
        )


def samples_are_alike(replica: Replica) -> bool:
    """Whether all samples of an example input are the same, as those of zeros or ones are.

    Args:
        replica: a model with its input.

    Returns:
        True for a single sample too.
    """
    return all(bool((t == t[:1]).all()) for t in tensors_in(replica.input) if t.ndim)


def refuse_constant_inputs(replica: Replica) -> None:
    """Run a model on samples that are all alike, and raise if they leave a batch norm without any variance.

    Args:
        replica: the model with its input, at generic values of its parameters.

    Raises:
        ValueError: naming the norm.
    """
    norm = _first_norm(replica, _is_constant)
    if norm is not None:
        shapes = [tuple(t.shape) for t in tensors_in(replica.input)]
        raise ValueError(
            f"the samples of example_input (shapes {shapes}) are all alike: batch norm {norm!r} sees one value per "
            "channel, and makes 0 of it whatever the weights before it: give samples of data, or torch.randn"
        )


def _is_constant(x: Tensor) -> bool:
    rows = x.detach().movedim(1, 0).flatten(1)
    spread = (rows - rows.mean(dim=1, keepdim=True)).square().sum(dim=1)
    return bool((spread <= NO_VARIANCE * rows.square().sum(dim=1)).all())


def _first_norm(replica: Replica, found: Callable[[Tensor], bool]) -> str | None:
    """The name of the first batch norm with an input of some kind, among those that normalise by their batch."""
    seen: list[str] = []

    def hook(name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        def look(norm: Any, given: tuple[Any, ...]) -> None:
            if norm.training and given and given[0].numel() and found(given[0]):
                seen.append(name)

        return look

    norms = [(n, m) for n, m in replica.model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    handles = [norm.register_forward_pre_hook(hook(name)) for name, norm in norms]
    try:
        replica.forward()
    finally:
        for handle in handles:
            handle.remove()
    return seen[0] if seen else None
