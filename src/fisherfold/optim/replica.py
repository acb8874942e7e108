"""A copy of a network to experiment on: float64, in training mode, without side effects on the original.

Every forward pass of the copy starts from the same buffers and from a stated random state. The ε of its normalisation
layers, which breaks exact scale invariance, can be divided out of the way.
"""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fisherfold.optim.fuse import eager
from fisherfold.optim.rebinding import rebind, runs_through
from fisherfold.optim.widening import Widening

SMALL_EPSILON = 1e-9
RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module under the wrappers of ``torch.compile`` and ``DistributedDataParallel``.

    Args:
        model: a module, wrapped or not.

    Returns:
        The innermost module.
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model on a tensor or packed sequence, a tuple of positional or a mapping of keyword arguments.

    Args:
        model: the module.
        inputs: what to give it.

    Returns:
        What it returns.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    several = isinstance(inputs, tuple | list) and not isinstance(inputs, PackedSequence)
    return model(*inputs) if several else model(inputs)


@contextmanager
def uncompiled() -> Iterator[None]:
    """A context in which compiled models run eagerly, so that hooks see their layers.

    Yields:
        Nothing.

    Raises:
        RuntimeError: if it is itself in a function that is compiled, where it would come too late.
    """
    if "torch._dynamo" not in sys.modules:  # not importing the compiler where nobody uses it saves seconds
        yield
        return
    stance = _eager_stance()
    try:
        stance.__enter__()
    except RuntimeError as error:
        _end(stance)
        raise RuntimeError(
            "curvature is collected by hooks, of which a function that torch.compile has compiled knows nothing: "
            "compile the model or the loss, and call statistics() outside of what is compiled"
        ) from error
    try:
        yield
    finally:
        _end(stance)


@eager
def _eager_stance() -> AbstractContextManager[None]:
    return torch.compiler.set_stance("force_eager")


@eager
def _end(stance: AbstractContextManager[None]) -> None:
    stance.__exit__(None, None, None)


def own_draws(model: nn.Module) -> AbstractContextManager[None]:
    """A context whose draws leave the random state of the host, and of the devices that a model is on, alone.

    Args:
        model: the module.

    Returns:
        A context manager.
    """
    return torch.random.fork_rng(devices=sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda}))


class Buffers:
    """The buffers of a model as they are now, to be put back later, also where the model assigns new tensors to them.

    Those that it makes, or makes anew in another size, while it runs (masks, tables of angles) are its own business.

    Args:
        model: the module.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
        self._saved = [(module, name, buffer, buffer.clone()) for module, name, buffer in named]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give every buffer its old value, in its old memory."""
        for module, name, buffer, value in self._saved:
            now = getattr(module, name, None)
            if isinstance(now, Tensor) and now.shape == value.shape:
                buffer.copy_(value)
                if now.data_ptr() != buffer.data_ptr():
                    setattr(module, name, buffer)


class Replica:
    """A float64 copy of a model with an input for it.

    Args:
        model: the original, which stays as it is.
        example_input: a batch that it accepts.
        seed: of the random state in which every forward pass begins.
    """

    def __init__(self, model: nn.Module, example_input: Any, seed: int) -> None:
        self.model = _bare_copy(model)
        # reentrant checkpoints look whether an input requires gradients
        self.input = _map_tensors(example_input, lambda t: _widened(t.detach()).requires_grad_(t.requires_grad))
        self.seed = seed
        self._widens = self._ran = False
        self._original = model
        self.parameters = dict(self.model.named_parameters())
        self._buffers = Buffers(self.model)
        # only norms: an ε that multiplies or adds something else is part of the function
        norms = [m for m in self.model.modules() if "Norm" in type(m).__name__]
        self._epsilons = {module: module.eps for module in norms if isinstance(getattr(module, "eps", None), float)}

    def forward(self, variant: int = 0) -> list[Tensor]:
        """The floating outputs, from the same buffers every time.

        Args:
            variant: which of the random states to begin in (dropout, stochastic depth).

        Returns:
            At least one of them is differentiable.

        Raises:
            ValueError: if the model rejects its input, returns nothing differentiable, nothing at all, or runs the
                original.
        """
        name = type(self.model).__name__
        kept = None if self._ran else Buffers(self._original)
        try:
            outputs = self._outputs(variant)
        except Exception as error:
            if kept is not None:
                kept.put_back()
            shapes = [tuple(t.shape) for t in tensors_in(self.input)]
            message = f"example_input (shapes {shapes}) was rejected by {name} in float64 training mode: {error}"
            raise ValueError(message) from error
        if kept is not None and runs_through(outputs, self._original.parameters()):
            kept.put_back()
            raise ValueError(
                f"{name} cannot be copied for the probe: its copy runs parts of the original, to which a function "
                "among its attributes holds on; make that a method, or give invariant='modules' or a mapping"
            )
        self._ran = True
        outputs = [torch.view_as_real(t) if t.is_complex() else t for t in outputs]
        outputs = [t for t in outputs if t.is_floating_point()]
        if not any(t.requires_grad for t in outputs):
            raise ValueError(f"{name} returned no differentiable tensor for example_input")
        if not any(t.numel() for t in outputs):
            shapes = [tuple(t.shape) for t in tensors_in(self.input)]
            raise ValueError(f"example_input (shapes {shapes}) has no samples: {name} returned nothing for it")
        return outputs

    def _outputs(self, variant: int) -> list[Tensor]:
        """What the model returns; the first time, it may turn out that its casts to float32 are in the way."""
        try:
            return self._run(variant)
        except Exception:
            if self._ran or self._widens:
                raise
            self._widens = True
            return self._run(variant)  # where it fails again, this says why

    def _run(self, variant: int) -> list[Tensor]:
        torch.manual_seed(self.seed + variant)
        self._buffers.put_back()
        with uncompiled(), self.widening():  # parts of it may be compiled: nobody trains in float64
            return tensors_in(call(self.model, self.input))

    def widening(self) -> AbstractContextManager[Any]:
        """A context for what belongs to a forward pass, such as its backward pass.

        Returns:
            One in which casts to float32 are casts to float64, where the model has them and cannot do without.
        """
        return Widening() if self._widens else nullcontext()  # type: ignore[no-untyped-call]

    @contextmanager
    def scaled(self, factors: Mapping[str, Tensor]) -> Iterator[None]:
        """Multiply blocks of rows of parameters by factors, until the context ends.

        Args:
            factors: one per block, by the name of the parameter.

        Yields:
            Nothing.
        """
        saved = {name: self.parameters[name].detach().clone() for name in factors}
        for name, factor in factors.items():
            blocks = saved[name].reshape(len(factor), -1) * factor.to(saved[name]).reshape(-1, 1)
            self.parameters[name].data.copy_(blocks.reshape(saved[name].shape))
        try:
            yield
        finally:
            for name, value in saved.items():
                self.parameters[name].data.copy_(value)

    @torch.no_grad()
    def begin_from(self, change: Callable[[dict[str, Tensor]], None]) -> None:
        """Let forward passes begin from other buffers.

        Args:
            change: changes those from which they began, in place.
        """
        self._buffers.put_back()
        change(dict(self.model.named_buffers()))
        self._buffers = Buffers(self.model)

    def buffers_beside(self, name: str) -> dict[str, Tensor]:
        """What the owners of a parameter keep in floating-point buffers, running statistics of norms left out.

        Args:
            name: of the parameter.

        Returns:
            The buffers as the last forward pass has left them, those of parts of the owners among them.
        """
        parameter = self.parameters[name]
        owners = [(prefix, m) for prefix, m in self.model.named_modules() if _owns(m, parameter)]
        found = [
            (f"{prefix}.{key}", b.clone()) for prefix, m in owners for key, b in m.named_buffers(remove_duplicate=False)
        ]
        return {key: b for key, b in found if b.is_floating_point() and key.split(".")[-1] not in RUNNING_STATISTICS}

    def scale_epsilons(self, factor: float) -> None:
        """Set the ε of all normalisation layers to a multiple of their own.

        Args:
            factor: 1 for the original's.
        """
        for module, epsilon in self._epsilons.items():
            module.eps = epsilon * factor  # type: ignore[assignment,operator]


def _owns(module: nn.Module, parameter: Tensor) -> bool:
    return any(p is parameter for p in module._parameters.values())


class _LocalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """What SyncBatchNorm becomes in a replica: no messages, and on any device."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def _bare_copy(model: nn.Module) -> nn.Module:
    """A float64 copy in training mode, without the user's own hooks (they may write where they should not)."""
    # tensors that a pre-hook recomputes (old-style weight norm) cannot be deep-copied, and need not be
    derived = [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            memo: dict[int, Any] = {id(t): t.detach() for t in derived}
            clone = copy.deepcopy(model, memo).train()
            rebind(clone, memo)
            clone._apply(_widened)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be copied for the probe: {error}") from error
    for module in clone.modules():
        after = (module._forward_hooks, module._backward_hooks)
        for hooks in (*after, module._forward_pre_hooks, module._backward_pre_hooks):
            # hooks that are objects (weight norm, spectral norm) are part of the model; functions are the user's
            for key in [k for k, h in hooks.items() if isinstance(h, types.FunctionType | types.MethodType | partial)]:
                del hooks[key]
        module._compiled_call_impl = None
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = _LocalBatchNorm  # type: ignore[assignment]
    for parameter in clone.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(True)
        parameter.grad = None
    return clone


def _widened(t: Tensor) -> Tensor:
    return t.to(torch.complex128) if t.is_complex() else t.double() if t.is_floating_point() else t


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and data classes.

    Args:
        tree: what a model takes or returns.

    Returns:
        All of them, in order.
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [t for value in tree.values() for t in tensors_in(value)]
    if isinstance(tree, tuple | list):
        return [t for value in tree for t in tensors_in(value)]
    if is_dataclass(tree):
        return [t for field in fields(tree) for t in tensors_in(getattr(tree, field.name, None))]
    return []


def _map_tensors(tree: Any, function: Any) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        mapped = [_map_tensors(value, function) for value in tree]
        named = hasattr(tree, "_fields")  # a packed sequence, for one
        return type(tree)(*mapped) if named else mapped if isinstance(tree, list) else tuple(mapped)
    return tree
