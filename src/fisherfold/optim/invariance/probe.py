"""Which weights of a network are scale invariant: asked of the network itself, by Euler's identity.

A block ``w`` of a weight is scale invariant when ``f(c·w) = f(w)`` for every ``c > 0``;
differentiating at ``c = 1`` gives ``<w, ∂f/∂w> = 0``. For a weight that is *not* invariant and a
random cotangent, the statistic

    |cos(w, ∂f/∂w)| · √dim(w)

behaves like |N(0, 1)|; for an invariant one it is zero up to rounding and the ε of the
normalisation layer, which is divided by 10⁹ for the verdict. The finest partition of a weight into
blocks of rows for which the statistic is below a threshold in all draws (rows: batch norm; blocks:
group norm; the whole tensor: layer norm) is confirmed by rescaling all blocks at once, and the true
ε by rescaling them at the model's own values.

The verdict is about the architecture, not about the start: parameters are at generic values, where
no identities hold but those of the architecture (at the start biases are zero, and the last layer
or gain of a branch may be). All runs on a float64 copy in training mode and on a small slice of the
example: two draws, forward and backward, and four forward passes; where a rescaling is seen, two
more forward and four backward passes tell by which weights.
"""

from __future__ import annotations

import copy
import math
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fisherfold.optim.invariance.finding import Finding, kind_of
from fisherfold.progress import track

DRAWS = 2
SAMPLES = 4
COTANGENTS = 4
SIDE = 64  # images are cropped to this side where the model takes them
SMALL_EPSILON = 1e-9
EULER = {torch.float64: 1e-2, torch.float32: 2e-2}  # functional norms keep their ε
RESCALING = {torch.float64: 1e-3, torch.float32: 1e-2}
TRUE_RESCALING = 0.1
LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def find_scale_invariant(model: nn.Module, example_input: Any) -> dict[str, Finding]:
    """Find the scale-invariant weights of a network by probing it.

    The verdict holds for the architecture: it does not depend on the values of the parameters, on
    which of them are frozen, nor on the values of the example.

    Args:
        model: any module; it is copied, and neither its parameters, buffers, gradients, hooks nor
            the random state are touched.
        example_input: a batch that the model accepts: a tensor, a tuple of positional arguments or
            a mapping of keyword arguments. A few samples of it are used.

    Returns:
        One finding per parameter name, in the order of ``named_parameters()``.

    Raises:
        TypeError: if it is no module.
        ValueError: if the model has no parameters, cannot be copied, rejects the example input or
            returns no differentiable output.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
        >>> found = find_scale_invariant(net, torch.randn(8, 5))
        >>> {name: f.kind for name, f in found.items() if "weight" in name}
        {'0.weight': 'row', '1.weight': 'none', '3.weight': 'none'}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, not its parameters, got {type(model).__name__}"
        )
    if next(model.parameters(), None) is None:
        raise ValueError(f"model must have parameters, {type(model).__name__} has none")
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    told = track(f"probing {type(model).__name__} for scale-invariant weights")
    with (
        told,
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        copied = _Copy(model, example_input)
        return _classify(copied)


class _Copy:
    """A float64 copy of a model in training mode, with an input that it accepts."""

    def __init__(self, model: nn.Module, example_input: Any) -> None:
        self.name = type(model).__name__
        self.model = _bare_copy(model)
        self.parameters = dict(self.model.named_parameters())
        self.buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        self.epsilons = {m: m.eps for m in self.model.modules() if 0 < _epsilon(m) < 1e-2}
        self.own = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.dtype, self.input = self._accepted(example_input)

    def _accepted(self, example: Any) -> tuple[torch.dtype, Any]:
        """The smallest slice that the model accepts, in float64 if it can."""
        first: Exception | None = None
        for dtype in (torch.float64, torch.float32):
            if dtype == torch.float32:
                self.cast(dtype)
            for side in (SIDE, None):
                given = _slice(example, dtype, side)
                if side is not None and given is None:
                    continue
                self.input = given
                try:
                    self.forward(0)
                except Exception as error:  # of the user's own code: anything can be raised
                    first = first or error
                    continue
                return dtype, given
        self.input = example
        try:  # as it is
            self.forward(0)
        except Exception as error:
            shapes = [tuple(t.shape) for t in pytree.tree_leaves(example) if isinstance(t, Tensor)]
            raise ValueError(
                f"example_input (shapes {shapes}) was rejected by {self.name}: {error}"
            ) from first
        return torch.float32, example

    def cast(self, dtype: torch.dtype) -> None:
        """Change the dtype of the copy."""
        self.model.to(dtype)
        self.own = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in self.own.items()
        }
        self.buffers = {name: b.clone() for name, b in self.model.named_buffers()}

    def forward(self, draw: int) -> list[Tensor]:
        """The differentiable outputs, from the same buffers and random state every time."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self.buffers and self.buffers[name].shape == buffer.shape:
                    buffer.copy_(self.buffers[name])
        torch.manual_seed(draw)
        given = self.input
        if isinstance(given, Mapping):
            outputs = self.model(**given)
        else:
            outputs = self.model(*given) if isinstance(given, tuple | list) else self.model(given)
        found = [t for t in _leaves(outputs) if t.is_floating_point() and t.requires_grad]
        if not found or not any(t.numel() for t in found):
            raise ValueError("it returned no differentiable tensor")
        return found

    def scale_epsilons(self, factor: float) -> None:
        """Set the ε of all layers to a multiple of their own."""
        for module, epsilon in self.epsilons.items():
            module.eps = epsilon * factor  # type: ignore[operator,assignment]

    @torch.no_grad()
    def place(self, draw: int | None) -> None:
        """Put all parameters at generic values, or back at their own."""
        generator = torch.Generator().manual_seed(draw or 0)
        lookups = {
            id(p)
            for m in self.model.modules()
            if isinstance(m, LOOKUPS)
            for p in m.parameters(recurse=False)
        }
        for name, parameter in self.parameters.items():
            value = self.own[name]
            if draw is not None and value.is_floating_point() and value.numel():
                value = _generic(value, generator, vector=id(parameter) in lookups)
            parameter.copy_(value)

    @contextmanager
    def rescaled(self, findings: Mapping[str, Finding]) -> Iterator[None]:
        """Multiply the blocks of weights by factors from U(½, 2)."""
        generator = torch.Generator().manual_seed(1)
        saved = {}
        for name, finding in findings.items():
            parameter = self.parameters[name]
            saved[name] = parameter.detach().clone()
            factors = 0.5 + 1.5 * torch.rand(
                finding.spheres, 1, generator=generator, dtype=parameter.dtype
            )
            blocks = saved[name].reshape(finding.spheres, -1) * factors.to(parameter.device)
            parameter.data.copy_(blocks.reshape(parameter.shape))
        try:
            yield
        finally:
            for name, value in saved.items():
                self.parameters[name].data.copy_(value)


def _classify(copied: _Copy) -> dict[str, Finding]:
    threshold = EULER[copied.dtype]
    copied.scale_epsilons(SMALL_EPSILON if copied.dtype == torch.float64 else 1.0)
    statistics, draw = _statistics(copied)
    candidates: dict[str, Finding] = {}
    for name, parameter in copied.parameters.items():
        if parameter.ndim < 2:
            candidates[name] = Finding(
                "none", 0, "a vector: gains, shifts and biases are not on spheres"
            )
        elif name not in statistics:
            candidates[name] = Finding(
                "none", 0, "the output does not depend on it, for this example_input"
            )
        else:
            found = statistics[name]
            good = next((s for s in sorted(found, reverse=True) if found[s] < threshold), 0)
            value = found[good or min(found)]
            reason = "Euler's identity " + ("holds" if good else f"fails: |cos|·√dim = {value:.2g}")
            candidates[name] = Finding(kind_of(len(parameter), good), good, reason, value)
    if draw is not None:
        copied.place(draw)
    changes = _changes(copied, candidates, draw or 0, RESCALING[copied.dtype])
    for name, change in changes.items():
        if not change < RESCALING[copied.dtype]:
            reason = (
                f"Euler's identity holds by chance: rescaling changes the output by {change:.1e}"
            )
            candidates[name] = Finding("none", 0, reason, candidates[name].statistic, change)
    copied.scale_epsilons(1.0)
    copied.place(None)
    for name, change in _changes(copied, candidates, 0, TRUE_RESCALING).items():
        found = candidates[name]  # type: ignore[assignment]
        if change >= TRUE_RESCALING:
            reason = f"the ε of a norm dominates: rescaling changes the output by {change:.1e}"
            candidates[name] = Finding("none", 0, reason, found.statistic, change)  # type: ignore[attr-defined]
        else:
            reason = f"{found.reason}, and rescaling changes the output by {change:.0e}"  # type: ignore[attr-defined]
            candidates[name] = Finding(found.kind, found.spheres, reason, found.statistic, change)  # type: ignore[attr-defined]
    return candidates


def _statistics(copied: _Copy) -> tuple[dict[str, dict[int, float]], int | None]:
    """The largest statistics over generic points by number of blocks, and the last point.

    None for the model's own.
    """
    largest: dict[str, dict[int, float]] = {}
    place: int | None = None
    for draw in range(DRAWS + 1):
        own = draw == DRAWS
        if own and place is not None:
            break
        copied.place(None if own else draw)
        try:
            outputs = copied.forward(draw)
            found = _euler(copied, outputs, draw)
        except Exception:
            if own:
                raise
            continue
        if own or all(math.isfinite(v) for values in found.values() for v in values.values()):
            place = None if own else draw
            for name, values in found.items():
                known = largest.setdefault(name, {})
                largest[name] = {s: max(v, known.get(s, 0.0)) for s, v in values.items()}
    return largest, place


def _cotangents(outputs: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    drawn = [torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) for t in outputs]
    return [torch.where(t.detach().isfinite(), c, 0.0) for t, c in zip(outputs, drawn, strict=True)]


def _euler(copied: _Copy, outputs: list[Tensor], draw: int) -> dict[str, dict[int, float]]:
    generator = torch.Generator().manual_seed(100 + draw)
    torch.autograd.backward(outputs, _cotangents(outputs, generator))
    found = {}
    for name, parameter in copied.parameters.items():
        gradient, parameter.grad = parameter.grad, None
        if (
            parameter.ndim < 2
            or gradient is None
            or not parameter.is_floating_point()
            or not parameter.numel()
        ):
            continue
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if bool(gradient.abs().max() > 0):
            found[name] = _by_partition(parameter.detach(), gradient)
    return found


def _by_partition(weight: Tensor, gradient: Tensor) -> dict[int, float]:
    """The largest |cos(w, g)|·√dim over blocks, for every partition into equal blocks.

    No gradient, no vote.
    """
    rows = len(weight)
    w, g = weight.reshape(rows, -1), gradient.reshape(rows, -1) / gradient.abs().max()
    products, lengths, slopes = (w * g).sum(1), w.square().sum(1), g.square().sum(1)
    counts = [s for s in range(rows, 0, -1) if rows % s == 0]
    largest = []
    for spheres in counts:
        along, length, slope = (t.reshape(spheres, -1).sum(1) for t in (products, lengths, slopes))
        cosine = along.abs() / (length * slope).sqrt().clamp_min(1e-300)
        largest.append(torch.where(slope > 1e-18 * slopes.sum(), cosine, 0.0).max())
    values = torch.stack(largest).tolist()
    return {s: v * (weight.numel() / s) ** 0.5 for s, v in zip(counts, values, strict=True)}


def _changes(
    copied: _Copy, candidates: Mapping[str, Finding], draw: int, threshold: float
) -> dict[str, float]:
    """The relative change of the outputs when blocks are rescaled.

    All at once, or each if that is not small.
    """
    positive = {name: finding for name, finding in candidates.items() if finding.spheres}
    if not positive:
        return {}
    base = [t.detach() for t in copied.forward(draw)]

    def change(of: Mapping[str, Finding]) -> float:
        with copied.rescaled(of):
            return _relative_change(base, [t.detach() for t in copied.forward(draw)])

    together = change(positive)
    if together < threshold:
        return dict.fromkeys(positive, together)
    slopes = _slopes(copied, positive, draw)
    good = {name: finding for name, finding in positive.items() if slopes[name] < threshold}
    explained = 2 * sum(slopes[name] ** 2 for name in good) ** 0.5  # many small changes
    if good and change(good) < max(threshold, explained):
        return slopes
    return {name: change({name: finding}) for name, finding in positive.items()}


def _slopes(copied: _Copy, positive: Mapping[str, Finding], draw: int) -> dict[str, float]:
    """To first order, the relative change of the outputs when each weight is rescaled.

    For cotangents v ~ N(0, I), E <v, Jd>² = ‖Jd‖²; factors from U(½, 2) are 1 ± ½ in the root mean
    square.
    """
    outputs = copied.forward(draw)
    size = _size([t.detach() for t in outputs])
    weights = [copied.parameters[name] for name in positive]
    generator = torch.Generator().manual_seed(2)
    squares = dict.fromkeys(positive, 0.0)
    for _ in range(COTANGENTS):
        gradients = torch.autograd.grad(
            outputs, weights, _cotangents(outputs, generator), retain_graph=True
        )
        for (name, finding), w, g in zip(positive.items(), weights, gradients, strict=True):
            along = (w.detach() * g).reshape(finding.spheres, -1).sum(1)
            squares[name] += float(along.square().sum()) / COTANGENTS
    return {
        name: 0.5 * square**0.5 / size if size else math.inf for name, square in squares.items()
    }


def _relative_change(before: list[Tensor], after: list[Tensor]) -> float:
    """The norm of the difference over that of what varies.

    Infinite entries, such as masks, are the same ones.
    """
    if [t.shape for t in before] != [t.shape for t in after]:
        return math.inf
    squares = sum(
        float(torch.where(s == t, 0.0, s - t).square().sum())
        for s, t in zip(after, before, strict=True)
    )
    size = _size(before)
    if not size:  # a last layer that is zero
        return 0.0 if squares < 1e-20 else math.inf
    return squares**0.5 / size


def _size(outputs: list[Tensor]) -> float:
    """The norm of what varies between samples, which the bias of the last layer does not.

    Of a loss its value.
    """
    finite = [torch.where(t.isfinite(), t, 0.0) for t in outputs]
    varying = sum(
        float((t - t.mean(0, keepdim=True) if t.ndim else t).square().sum()) for t in finite
    )
    square = max(varying, 1e-12 * sum(float(t.square().sum()) for t in finite))
    return square**0.5 if square >= 1e-20 else 0.0


def _generic(own: Tensor, generator: torch.Generator, *, vector: bool) -> Tensor:
    """A tensor like another, of a usual size and without entries that are zero.

    Tensors of one sign keep it.
    """
    flat = vector or own.ndim < 2 or len(own) == 1
    usual = 1.0 if flat else (len(own) / own.numel()) ** 0.5
    rms = float(own.double().square().mean().sqrt())
    size = max(rms, 0.3) if flat else rms if 0.1 * usual <= rms <= 10 * usual else usual
    draws = torch.empty(own.shape, dtype=torch.float32).uniform_(-1, 1, generator=generator).to(own)
    signs, base = draws.sign(), own * (size / rms) if rms > 1e-150 else torch.zeros_like(own)
    small = base.abs() <= 0.05 * size
    lengths = torch.where(small, size, base.abs()).mul_(draws.abs().add_(0.5))
    lowest, highest = torch.aminmax(base.masked_fill_(small, 0.0))
    if lowest >= 0 and highest > 0:
        return lengths
    if highest <= 0 and lowest < 0:
        return lengths.neg_()
    return lengths.mul_(signs)


def _slice(example: Any, dtype: torch.dtype, side: int | None) -> Any:
    """A few samples of an example, never alike and never constant.

    None where no image is larger than the side.
    """
    tensors = [t for t in pytree.tree_leaves(example) if isinstance(t, Tensor) and t.ndim]
    length = len(tensors[0]) if tensors else 0
    if side is not None and not any(t.ndim == 4 and min(t.shape[2:]) > side for t in tensors):
        return None
    generator = torch.Generator().manual_seed(0)

    def few(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        t = t.detach()
        if t.ndim and len(t) == length and length:
            t = t[torch.arange(max(SAMPLES, min(length, SAMPLES)), device=t.device) % length]
        if side is not None and t.ndim == 4:
            t = t[:, :, :side, :side]
        if not t.is_floating_point():
            return t
        t = t.to(dtype)
        if not t.ndim or not t.numel():
            return t
        spread = float(t.std()) if t.numel() > 1 else 0.0
        noise = torch.randn(t.shape, generator=generator, dtype=dtype).to(t.device)
        return t + (0.5 * spread or 1.0) * noise

    return pytree.tree_map(few, example)


def _leaves(outputs: Any) -> list[Tensor]:
    """The tensors in outputs, also in data classes and mappings of any kind."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            found.append(torch.view_as_real(leaf) if leaf.is_complex() else leaf)
        elif isinstance(leaf, Mapping):
            found += _leaves(dict(leaf))
        elif hasattr(leaf, "__dataclass_fields__"):
            found += _leaves([getattr(leaf, key, None) for key in leaf.__dataclass_fields__])
    return found


def _epsilon(module: nn.Module) -> float:
    epsilon = getattr(module, "eps", None)
    return epsilon if isinstance(epsilon, float) else 0.0


def _bare_copy(model: nn.Module) -> nn.Module:
    """A float64 copy in training mode, without the user's own hooks."""
    # tensors that a hook recomputes (old-style weight norm) cannot be deep-copied, and need not be
    derived = [
        t
        for m in model.modules()
        for t in vars(m).values()
        if isinstance(t, Tensor) and not t.is_leaf
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clone = copy.deepcopy(model, {id(t): t.detach() for t in derived}).train()
            clone = (
                clone.to(torch.float64)
                if not any(p.is_complex() for p in clone.parameters())
                else clone
            )
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied for the probe: {error}; pass "
            f"invariant='modules' or a mapping"
        ) from error
    for module in clone.modules():
        for hooks in (
            module._forward_hooks,
            module._backward_hooks,
            module._forward_pre_hooks,
            module._backward_pre_hooks,
        ):
            # hooks that are objects (weight norm, spectral norm) are part of the model; functions
            # are the user's
            for key in [
                k
                for k, h in hooks.items()
                if isinstance(h, types.FunctionType | types.MethodType | partial)
            ]:
                del hooks[key]
        module._compiled_call_impl = None
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = _LocalBatchNorm  # type: ignore[assignment]
    for parameter in clone.parameters():
        parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        parameter.grad = None
    return clone


class _LocalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """What SyncBatchNorm becomes in a copy: no messages, and on any device."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass
