"""Which weights of a network are scale invariant: asked of the network itself, by Euler's identity.

A block ``w`` of a weight is scale invariant when ``f(c·w) = f(w)`` for every ``c > 0``; differentiating at ``c = 1``
gives ``<w, ∂f/∂w> = 0`` (Euler). For a weight that is *not* invariant and a random cotangent, the statistic

    |cos(w, ∂f/∂w)| · √dim(w)

behaves like |N(0, 1)|; for an invariant one it is zero up to the ε of the normalisation layer. The probe therefore
draws three cotangents, keeps the finest partition of each weight into blocks of rows for which the statistic is below
``EULER_THRESHOLD`` everywhere (rows: batch norm; blocks of rows: group norm; the whole tensor: layer norm), and
confirms each by a finite rescaling.

A weight may have buffers beside it that follow it in training alone: the vectors of a spectral norm turn with the
scales of rows, and in evaluation mode they stay behind. Blocks whose scales move such a buffer are joined to larger
ones.

The verdict is about the architecture, not about the start: all parameters are at generic values (``optim.generic``),
other ones for each cotangent, since zero biases, gains or last layers make identities that end with the first step.
The ε of normalisation layers, which breaks exact invariance, is taken out of the way for the verdict (divided by 10⁹).
Its true effect is measured afterwards, at the model's own values, and once more with parameters that are nearly zero
made visible; the larger one is reported. The probe works on a float64 copy in training mode, and leaves the model as it
was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fisherfold.optim.examples import refuse_constant_inputs, refuse_no_numbers, refuse_two_samples, samples_are_alike
from fisherfold.optim.generic import Points
from fisherfold.optim.outputs import relative_change, size_of, unmasked
from fisherfold.optim.replica import SMALL_EPSILON, Replica, own_draws, unwrap

Kind = Literal["row", "group", "tensor", "none"]
Statistics = dict[str, dict[int, float]]
EULER_THRESHOLD = 0.01
RESCALING_THRESHOLD = 1e-3
EPSILON_THRESHOLD = 0.1
INFLUENCE_THRESHOLD = 1e-8
N_COTANGENTS = 3


@dataclass(frozen=True)
class Finding:
    """What is known about one parameter.

    Attributes:
        kind: ``row``, ``group``, ``tensor`` or ``none``.
        spheres: the number of blocks of rows that are invariant each on its own; 0 for ``none``.
        statistic: the largest |cos|·√dim over cotangents and blocks; NaN for a guess.
        rescaling: the relative change of the output under random rescaling of the blocks, with the true ε of the
            normalisation layers; NaN if not tried.
        reason: one sentence.
        guessed: whether it was concluded from the module structure instead of measured.
    """

    kind: Kind
    spheres: int
    statistic: float
    rescaling: float
    reason: str
    guessed: bool = False


def find_scale_invariant(model: nn.Module, example_input: Any, *, seed: int = 0) -> dict[str, Finding]:
    """Find the scale-invariant weights of a network by probing it.

    The verdict holds for the architecture: it does not depend on the values of the parameters (zero-initialised layers
    or gains, zero biases), nor on which of them are frozen.

    Args:
        model: any module; it is copied, and neither its parameters, buffers, gradients, hooks nor the random state
            are touched.
        example_input: a batch that the model accepts: a tensor, a tuple of positional arguments or a mapping of keyword
            arguments. Three samples or more, not all alike: of fewer a batch norm may hide what is before it.
        seed: of the generic values, the random cotangents and factors.

    Returns:
        One finding per parameter name, in the order of ``named_parameters()``.

    Raises:
        TypeError: if it is no module.
        ValueError: if the model has no parameters, cannot be copied, rejects the example input or returns no
            differentiable output, or if a batch norm sees too little of an input to tell.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
        >>> {name: f.kind for name, f in find_scale_invariant(net, torch.randn(8, 5)).items() if "weight" in name}
        {'0.weight': 'row', '1.weight': 'none', '3.weight': 'none'}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not its parameters, got {type(model).__name__}")
    model = unwrap(model)
    if next(model.parameters(), None) is None:
        raise ValueError(f"model must have parameters, {type(model).__name__} has none")
    with own_draws(model), torch.enable_grad():
        probe = _Probe(Replica(model, example_input, seed))
        candidates = {name: probe.classify(name) for name in probe.parameters}
        return probe.confirm(candidates)


class _Probe:
    """Statistics of Euler's identity for all weights of a replica."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.parameters = replica, replica.parameters
        self.generator = torch.Generator().manual_seed(replica.seed)
        refuse_two_samples(replica)  # complaints about the input come from the model's own values
        replica.scale_epsilons(SMALL_EPSILON)
        self.points = Points(replica.model, replica.seed)
        self.size = self.smallest = 0.0
        self.place, self.statistics = self._measure()
        if samples_are_alike(replica):
            if self.place is not None:
                self.points.move(*self.place)
            refuse_constant_inputs(replica)

    def _measure(self) -> tuple[tuple[str, int] | None, Statistics]:
        """The largest statistics over generic points, and one of these points; None where only the own values work."""
        for manner in ("free", "gentle"):
            found: Statistics = {}
            place = None
            if manner == "free" and not self._biases_are_measured():
                continue
            for draw in range(N_COTANGENTS):
                self.points.move(manner, draw)
                seen = self._finite_statistics(draw)
                if seen is not None:
                    found, place = _largest(found, seen), (manner, draw)
            if place is not None:
                return place, found
        self.points.restore()
        refuse_no_numbers(self.replica)
        found = {}
        for draw in range(N_COTANGENTS):
            found = _largest(found, self._statistics(draw))
        return None, found

    def _biases_are_measured(self) -> bool:
        try:
            self.points.measure_biases(self.replica.forward)
        except ValueError:
            return False
        return True

    def _finite_statistics(self, draw: int) -> Statistics | None:
        """None where the model fails or overflows: a scale below zero, an exponent too large."""
        try:
            found = self._statistics(draw)
        except (ValueError, RuntimeError):
            return None
        finite = all(math.isfinite(value) for entry in found.values() for value in entry.values())
        return found if finite else None

    def _statistics(self, draw: int) -> Statistics:
        """For every weight that the output depends on, the statistic by number of blocks."""
        live = [t for t in self.replica.forward(draw) if t.requires_grad]
        draw_one = partial(torch.randn, generator=self.generator, device="cpu")
        cotangents = [draw_one(t.shape, dtype=t.dtype).to(t.device) for t in live]
        real = {n: p for n, p in self.parameters.items() if p.requires_grad and p.is_floating_point()}
        weights = {n: p for n, p in real.items() if p.ndim >= 2 and p.numel() > 0}
        if not weights:
            return {}
        with self.replica.widening():
            torch.autograd.backward(live, cotangents)  # reentrant checkpoints refuse autograd.grad
        gradients = [w.grad.to_dense() if w.grad is not None and w.grad.is_sparse else w.grad for w in weights.values()]
        self.replica.model.zero_grad()
        size = size_of(unmasked(live))
        return {
            name: _euler_statistics(weight.detach(), gradient, size)
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
            if gradient is not None and bool(gradient.abs().max() != 0)
        }

    def classify(self, name: str) -> Finding:
        """The finest invariant partition of one parameter that Euler's identity allows."""
        weight, nan = self.parameters[name], float("nan")
        if weight.ndim < 2:
            return Finding("none", 0, nan, nan, "a vector: gains, shifts and biases stay Euclidean")
        if not weight.is_floating_point() or weight.numel() == 0:
            kind_of_numbers = "complex numbers" if weight.is_complex() else str(weight.dtype)
            reason = f"{kind_of_numbers} of shape {tuple(weight.shape)}: stays Euclidean"
            return Finding("none", 0, nan, nan, reason)
        if name not in self.statistics:
            return Finding("none", 0, 0.0, nan, "the output does not depend on it, for this example_input")
        coarsest = 0.0
        for spheres, coarsest in self.statistics[name].items():
            if coarsest < EULER_THRESHOLD:
                return Finding(_kind(weight, spheres), spheres, coarsest, nan, "Euler's identity holds")
        return Finding("none", 0, coarsest, nan, f"Euler's identity fails: |cos|·√dim = {coarsest:.2g}")

    def confirm(self, candidates: dict[str, Finding]) -> dict[str, Finding]:
        """Rescale all candidates at once; if that changes the output, each by itself; then again with the true ε."""
        draw = 0
        if self.place is not None:
            draw = self.place[1]
            self.points.move(*self.place)
        candidates = {name: self._joined(name, finding, draw) for name, finding in candidates.items()}
        names = [name for name, finding in candidates.items() if finding.kind != "none"]
        changes = self._changes(names, candidates, RESCALING_THRESHOLD, draw)
        # an output that vanishes at the model's own values consists of rounding errors
        self.smallest = 1e-6 * self.size
        true_changes = self._true_changes(names, candidates)
        confirmed = dict(candidates)
        for name in names:
            finding, change, true_change = candidates[name], changes[name], true_changes[name]
            if not (math.isfinite(change) and math.isfinite(true_change)):
                reason = "Euler's identity holds, but the output is not finite at the model's own values"
            elif change >= RESCALING_THRESHOLD:
                reason = f"Euler's identity holds by chance: rescaling changes the output by {change:.1e}"
            elif true_change >= EPSILON_THRESHOLD:
                reason = f"the ε of a norm dominates: rescaling changes the output by {true_change:.1e}"
            else:
                reason = f"{finding.reason} and rescaling changes the output by {true_change:.0e}"
                confirmed[name] = Finding(finding.kind, finding.spheres, finding.statistic, true_change, reason)
                continue
            confirmed[name] = Finding("none", 0, finding.statistic, change, reason)
        return confirmed if self.place is not None else {n: _with_caveat(f) for n, f in confirmed.items()}

    def _joined(self, name: str, finding: Finding, draw: int) -> Finding:
        """The finest of the invariant partitions whose scales leave the buffers beside the weight alone."""
        if finding.kind == "none" or not self.replica.buffers_beside(name):
            return finding
        weight, moved = self.parameters[name], None
        for spheres, statistic in self.statistics[name].items():
            if spheres > finding.spheres or statistic >= EULER_THRESHOLD:
                continue
            last, moved = moved, self._moved_buffer(name, spheres, draw)
            if moved is None:
                reason = finding.reason if last is None else f"{finding.reason}; {last} follows smaller blocks;"
                return Finding(_kind(weight, spheres), spheres, statistic, float("nan"), reason)
        return replace(finding, kind="none", spheres=0, reason=f"its scale moves {moved}, which is not carried over")

    def _moved_buffer(self, name: str, spheres: int, draw: int) -> str | None:
        """The name of a buffer beside a weight that a rescaling of its blocks changes, if there is one."""
        factors = self._random_factors(name, spheres)
        self.replica.forward(draw)
        base = self.replica.buffers_beside(name)
        with self.replica.scaled({name: factors}):
            self.replica.forward(draw)
        for key, after in self.replica.buffers_beside(name).items():
            before = base.get(key)
            if before is None or before.shape != after.shape:
                continue
            if float((after - before).norm()) > RESCALING_THRESHOLD * float(before.norm()):
                return key
        return None

    def _random_factors(self, name: str, spheres: int) -> Tensor:
        """U(½, 2) for every block."""
        weight = self.parameters[name]
        return 0.5 + 1.5 * torch.rand(spheres, 1, generator=self.generator, dtype=weight.dtype, device="cpu")

    def _true_changes(self, names: list[str], findings: Mapping[str, Finding]) -> dict[str, float]:
        """With the true ε: at the model's own values, and with what is nearly zero there made visible."""
        self.replica.scale_epsilons(1.0)
        self.points.restore()
        changes = self._changes(names, findings, EPSILON_THRESHOLD, 0)
        hidden = [name for name in self.points.own if name not in names and self.points.asleep(name)]
        if names and hidden and self.place is not None:
            self.points.move(*self.place, only=hidden)
            shown = self._changes(names, findings, EPSILON_THRESHOLD, self.place[1])
            changes = {name: max(changes[name], shown[name]) for name in names}
        return changes

    def _changes(
        self, names: list[str], findings: Mapping[str, Finding], threshold: float, draw: int
    ) -> dict[str, float]:
        """The change by each weight, or by all jointly where even that stays below the threshold."""
        if not names:
            return {}
        base = [t.detach() for t in self.replica.forward(draw)]
        self.size = size_of(unmasked(base))
        joint = self._rescaling_change(names, findings, base, draw)
        if joint < threshold:
            return dict.fromkeys(names, joint)
        return {name: self._rescaling_change([name], findings, base, draw) for name in names}

    def _rescaling_change(
        self, names: list[str], findings: Mapping[str, Finding], base: list[Tensor], draw: int
    ) -> float:
        """The relative change of the outputs when the blocks of the named weights are multiplied by U(½, 2)."""
        factors = {name: self._random_factors(name, findings[name].spheres) for name in names}
        with self.replica.scaled(factors):
            changed = [t.detach() for t in self.replica.forward(draw)]
        return relative_change(base, changed, self.smallest)


def _kind(weight: Tensor, spheres: int) -> Kind:
    return "row" if spheres == len(weight) else "tensor" if spheres == 1 else "group"


def _with_caveat(finding: Finding) -> Finding:
    if math.isnan(finding.statistic):
        return finding
    reason = f"{finding.reason} (at the model's own values; at others it fails or overflows)"
    return Finding(finding.kind, finding.spheres, finding.statistic, finding.rescaling, reason)


def _largest(first: Statistics, second: Statistics) -> Statistics:
    """The larger value of each statistic; where only one has seen a gradient, it decides."""
    joint = {name: dict(entry) for name, entry in first.items()}
    for name, entry in second.items():
        mine = joint.setdefault(name, dict(entry))
        for spheres, value in entry.items():
            mine[spheres] = max(mine[spheres], value)
    return joint


def _euler_statistics(weight: Tensor, gradient: Tensor, size: float) -> dict[int, float]:
    """The largest |cos(w, g)|·√dim over blocks, from the finest partition on; no gradient, no vote."""
    rows, largest = len(weight), gradient.abs().max()
    w, g = weight.reshape(rows, -1), gradient.reshape(rows, -1) / largest
    products, lengths, slopes = (w * g).sum(dim=1), w.square().sum(dim=1), g.square().sum(dim=1)
    counts = [spheres for spheres in range(rows, 0, -1) if rows % spheres == 0]
    cosines = []
    for spheres in counts:
        along, length, slope = (t.reshape(spheres, -1).sum(dim=1) for t in (products, lengths, slopes))
        influence = length.sqrt() * slope.sqrt()
        cosine = along.abs() / influence.clamp_min(1e-300)
        alive = slope > 1e-24 * slopes.sum()
        # a row of which one entry matters (the others pruned) has no gradient but that by ε
        telling = alive & (influence > INFLUENCE_THRESHOLD * size / largest)
        cosines.append((cosine * torch.where(telling.any(), telling, alive)).max())
    # one look at the device for all partitions
    values = torch.stack(cosines).tolist()
    return {s: value * (weight.numel() / s) ** 0.5 for s, value in zip(counts, values, strict=True)}
