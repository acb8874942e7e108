"""The two factors of a layer's Fisher block, from the inputs and the output gradients of matrix layers.

For a layer s = W a with rows a_r and g_r (r runs over samples and positions), a loss L = (1/D) Σ ℓ and R rows in all,

    A = (1/D) Σ_r a_r a_rᵀ,        G = (1/R) Σ_r (D ∂L/∂s_r)(D ∂L/∂s_r)ᵀ,        F ≈ A ⊗ G,

so that tr(A) tr(G) has the scale of the trace of the Fisher block whatever the reduction, the number of positions and
the number of times that a module is used. Of a weight on spheres they are those at unit length: where a row is r long,
∂L/∂s is multiplied by r. Where terms have weights m, rows of both sums and R have them, and D is the
denominator of the weighted loss. The groups of a convolution share the mean of their input covariances, and
G is then block diagonal. Everything is accumulated in float32 (float64 for float64 weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fisherfold.optim.matrix_layers import input_rows, is_product, output_rows
from fisherfold.optim.precondition import products

MIN_BLOCK = 96  # products narrower than this are not worth splitting


def accumulation_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of a weight's factors: float64 for float64 weights, float32 for everything narrower.

    Args:
        weight: the weight.

    Returns:
        A dtype of at least single precision.
    """
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


@dataclass
class Pass:
    """One forward and backward pass.

    Attributes:
        samples: D, by which the loss divides: the number of its terms, or the sum of their weights.
        gradient_scale: the factor on its gradients.
        weights: of the samples, where the terms are weighted; gradients have their roots in them already.
        share: how much its rows and samples count in sums over passes.
    """

    samples: float = 0.0
    gradient_scale: float = 1.0
    weights: Tensor | None = None
    share: float = 1.0


@dataclass
class FactorSums:
    """Running sums of one weight's statistics; ``finish`` turns them into the factors.

    Attributes:
        a: Σ a aᵀ, complete in its upper triangle.
        g: Σ (D ∂L/∂s)(D ∂L/∂s)ᵀ, complete in its upper triangle.
        samples: Σ D over passes.
        rows: R, the number of rows over passes and uses, or the sum of their weights.
        paired: whether the sums are over whole per-sample gradients, which fix only the product of the two scales.
        passes: how many passes there were.
    """

    a: Tensor
    g: Tensor
    samples: float = 0.0
    rows: float = 0.0
    paired: bool = False
    passes: int = 0
    last_pass: Pass | None = field(default=None, repr=False)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Turn the sums into the factors A and G, in their own memory.

        Returns:
            Two symmetric matrices whose Kronecker product approximates the Fisher block.
        """
        for matrix in (self.a, self.g):  # only the upper triangle has been filled for sure
            matrix.copy_(matrix.triu() + matrix.triu(1).T)
        if self.paired:  # F ≈ (A' ⊗ G') / t with t = tr A' = tr G' the exact trace
            root = (torch.trace(self.a) / self.samples).sqrt().clamp_min(1e-30)
            return self.a.div_(self.samples * root), self.g.div_(self.samples * root)
        return self.a.div_(self.samples), self.g.div_(self.rows)

    def tensors(self) -> list[Tensor]:
        """What has to be summed over processes: the two sums and the two counts.

        Returns:
            Three tensors; the last holds the counts.
        """
        return [self.a, self.g, torch.tensor([self.samples, self.rows], dtype=torch.float64, device=self.a.device)]


@dataclass(frozen=True)
class TrackedWeight:
    """A weight with the modules that use it.

    Attributes:
        name: the parameter's name.
        weight: the parameter.
        layers: every module that owns it.
        bias: the bias that joins the weight as a last column, if any.
    """

    name: str
    weight: nn.Parameter
    layers: tuple[nn.Module, ...]
    bias: nn.Parameter | None = None

    @property
    def groups(self) -> int:
        """The number of groups of the convolution, 1 for a Linear."""
        return int(getattr(self.layers[0], "groups", 1))

    @property
    def sizes(self) -> tuple[int, int]:
        """The orders of G and A."""
        columns = self.weight[0].numel() + (self.bias is not None)
        return self.weight.shape[0], columns

    def new_sums(self) -> FactorSums:
        """Empty sums on the weight's device.

        Returns:
            Zeros.
        """
        rows, columns = self.sizes
        dtype, device = accumulation_dtype(self.weight), self.weight.device
        return FactorSums(
            torch.zeros(columns, columns, dtype=dtype, device=device),
            torch.zeros(rows, rows, dtype=dtype, device=device),
        )


class Collector:
    """Hooks that fill factor sums while they are installed; use it as a context manager.

    A forward hook puts a tensor hook on the output (module backward hooks break on in-place activations), and both
    factors are formed when the gradient arrives, so that a use without a gradient counts for neither.

    A pass begins when the model is called, and ends with its backward pass: calls on as many samples before that (the
    two views of a contrastive loss, real and generated data) are uses in the terms of one loss. Where the model takes
    no tensors, or only parts of it are called (the encoder of one network, the two networks of another), the first
    layer that is reached tells how many samples there are.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: list[TrackedWeight],
        *,
        max_rows: int | None,
        allow_tf32: bool,
        calls: dict[str, int],
        lengths: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model = model
        self.weights = weights
        self.max_rows = max_rows
        self.allow_tf32 = allow_tf32
        self.calls = calls
        self.lengths = lengths or {}
        self.sums: dict[str, FactorSums] = {}
        self.no_products: set[str] = set()
        self._handles: list[RemovableHandle] = []
        self.begin_by(lambda samples: Pass(samples))

    def begin_by(self, new_pass: Callable[[int], Pass]) -> None:
        """Begin all passes from now on with a function; none that has begun goes on.

        Args:
            new_pass: makes a pass over so many samples.
        """
        self._new_pass = new_pass
        self._current: Pass | None = None
        self._length = 0
        self._ended = self._begun_by_layer = False

    def __enter__(self) -> Collector:
        self._handles = [self.model.register_forward_pre_hook(self._start_pass, with_kwargs=True)]
        for tracked in self.weights:
            for layer in tracked.layers:
                hook = self._forward_hook(tracked)
                # before other hooks, which may change the output
                self._handles.append(layer.register_forward_hook(hook, with_kwargs=True, prepend=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _start_pass(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [v for value in (*args, *kwargs.values()) for v in _entries(value)]
        tensors = [t for t in given if isinstance(t, Tensor) and t.ndim]
        length = len(tensors[0]) if tensors else self._length
        if self._ended or length != self._length:
            self._current = None
        if tensors and self._current is None:
            self._begin(length, by_layer=False)

    def _begin(self, length: int, *, by_layer: bool) -> Pass:
        self._current, self._length = self._new_pass(length), length
        self._ended, self._begun_by_layer = False, by_layer
        return self._current

    def _pass_of_layer(self, length: int) -> Pass:
        """The pass that a layer is reached in; where no call of the model begins passes, the layer may be its first."""
        # checkpoints compute layers once more in the middle of the backward pass, for the pass that it is of
        recomputed = torch._C._current_graph_task_id() != -1
        if self._current is None or (self._begun_by_layer and self._ended and not recomputed):
            return self._begin(length, by_layer=True)
        return self._current

    def _forward_hook(self, tracked: TrackedWeight) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if not (isinstance(output, Tensor) and output.requires_grad):
                return
            x = (args[0] if args else kwargs["input"]).detach()
            if not is_product(layer, x, output.detach()):
                self.no_products.add(tracked.name)
                return
            this_pass = self._pass_of_layer(len(x) if x.ndim > 1 else 1)
            add = partial(self._add, tracked, layer, x, this_pass)
            output.register_hook(add)  # type: ignore[no-untyped-call]

        return hook

    def _add(self, tracked: TrackedWeight, layer: nn.Module, x: Tensor, this_pass: Pass, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            return  # with create_graph: a gradient that the loss is made of (a penalty on it), not that of the loss
        if this_pass is self._current:
            self._ended = True
        sums = self.sums.get(tracked.name) or tracked.new_sums()
        self.sums[tracked.name] = sums
        phase = self.calls.get(tracked.name, 0)
        self.calls[tracked.name] = phase + 1
        # a backward pass may run inside the caller's autocast region
        with torch.no_grad(), products(x.device, allow_tf32=self.allow_tf32):
            weights = this_pass.weights
            if weights is not None and len(x) != len(weights):  # no telling which rows are of which sample
                weights = None
            rows, weight = input_rows(layer, x, max_rows=self.max_rows, phase=phase, weights=weights)
            rows = rows.to(sums.a.dtype)
            if tracked.bias is not None:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
            if isinstance(weight, Tensor):
                rows, weight = rows * weight.sqrt().to(rows.dtype).unsqueeze(1), 1.0
            gradients = output_rows(layer, gradient.detach()).to(sums.g.dtype)
            if tracked.name in self.lengths:
                gradients = gradients * self.lengths[tracked.name]
            _add_gram(sums.a, rows, weight * this_pass.share)
            scale = this_pass.share * (this_pass.samples * this_pass.gradient_scale) ** 2
            if tracked.groups == 1:
                _add_gram(sums.g, gradients, scale)
            else:
                sums.g.add_(_block_gram(gradients, tracked.groups), alpha=scale)
        count = len(gradients) if weights is None else len(gradients) * float(weights.mean())
        sums.rows += this_pass.share * count
        if sums.last_pass is not this_pass:
            sums.samples += this_pass.share * this_pass.samples
            sums.passes += 1
            sums.last_pass = this_pass


def _entries(value: Any) -> list[Any]:
    """What a batch consists of: the entries of a mapping, or itself; the tensors of a list may be samples or inputs."""
    return list(value.values()) if isinstance(value, Mapping) else [value]


def _add_gram(total: Tensor, rows: Tensor, weight: float) -> None:
    """Add ``weight·rowsᵀ rows`` in the upper triangle of blocks only: ``finish`` completes the symmetric matrix."""
    order = len(total)
    width = order if order < 4 * MIN_BLOCK else -(-order // 4)
    for start in range(0, order, width):
        stop = min(start + width, order)
        total[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:], alpha=weight)


def _block_gram(rows: Tensor, groups: int) -> Tensor:
    """``rowsᵀ rows`` without the blocks between different groups of columns."""
    blocks = rows.reshape(len(rows), groups, rows.shape[1] // groups).permute(1, 2, 0)
    return torch.block_diag(*(blocks @ blocks.transpose(1, 2)))  # type: ignore[no-untyped-call]
