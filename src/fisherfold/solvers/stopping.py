"""Stopping criteria that state their reason and can be joined.

A criterion looks at the state after an iteration and returns a sentence when the run should end,
else None. ``a | b`` stops when either does, ``a & b`` when both do.
"""

from __future__ import annotations

import itertools
import math
import numbers
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from fisherfold.solvers.state import State


class Criterion(ABC):
    """A reason to stop.

    Attributes:
        converged: whether meeting it means success rather than a spent budget.
    """

    converged: bool = True

    @abstractmethod
    def reason(self, state: State) -> str | None:
        """Why the run should end now."""

    def met(self, state: State) -> tuple[str, str] | None:
        """The status and the reason, if the run should end."""
        sentence = self.reason(state)
        return (
            None if sentence is None else ("converged" if self.converged else "stopped", sentence)
        )

    def __or__(self, other: Criterion) -> Criterion:
        return (
            _Joined((self, other), every=False) if isinstance(other, Criterion) else NotImplemented
        )

    def __and__(self, other: Criterion) -> Criterion:
        return (
            _Joined((self, other), every=True) if isinstance(other, Criterion) else NotImplemented
        )


@dataclass(frozen=True)
class _Joined(Criterion):
    """Several criteria, of which one, or all, must be met."""

    parts: tuple[Criterion, ...]
    every: bool

    @override
    def reason(self, state: State) -> str | None:
        return None if (found := self.met(state)) is None else found[1]

    @override
    def met(self, state: State) -> tuple[str, str] | None:
        found = [verdict for part in self.parts if (verdict := part.met(state))]
        if not found or (self.every and len(found) < len(self.parts)):
            return None
        # a budget that is spent in the iteration that converges takes nothing away from it
        status, sentence = next(
            (verdict for verdict in found if verdict[0] == "converged"), found[0]
        )
        return status, " and ".join(reason for _, reason in found) if self.every else sentence


class _Limits(Criterion):
    """A criterion whose fields are numbers, which a run reaches or not."""

    negative: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = (
                isinstance(value, numbers.Real)
                and not isinstance(value, bool)
                and not math.isnan(value)
            )
            if not number or (value < 0 and not self.negative):
                least = "" if self.negative else " ≥ 0"
                raise ValueError(
                    f"{name} of {type(self).__name__} must be a number{least}, got {value!r}"
                )


@dataclass(frozen=True)
class GradientNorm(_Limits):
    """Stop when the norm of the full gradient is at most ``tol``.

    Examples:
        >>> GradientNorm(1e-6) | MaxSeconds(60)
        _Joined(parts=(GradientNorm(tol=1e-06), MaxSeconds(seconds=60)), every=False)
    """

    tol: float

    @override
    def reason(self, state: State) -> str | None:
        if state.gradient_norm <= self.tol:
            return f"the gradient norm {state.gradient_norm:.2e} is at most {self.tol:.0e}"
        return None


@dataclass(frozen=True)
class SmallGradient(_Limits):
    """Stop when the full gradient is small whatever the units of the loss Ψ.

    What ``minimize`` does if not told else.

        ‖g‖ ≤ tol max(1, |Ψ|)    and    ‖g‖ ≤ rtol max(|Ψ₀|, ‖g₀‖²/Ψ₀)

    With Ψ₀ and g₀ at the start. The first alone would take any start for a solution where the loss
    is in small units. The second is not relative to ‖g₀‖ itself, so that a start at the solution
    counts as one: there the loss that is left is large beside g₀, or, where none is left, the
    curvature ‖g₀‖²/Ψ₀ is. A loss that is not above zero at the start can become negative: what is
    left of it says nothing of curvature, and ‖g₀‖ takes the place of that term.

    All this takes parameters to be about 1, as they are on spheres and frames. In Euclidean space
    they have units, so that the curvature κ along g is asked as well: a gradient above tol has to
    be at most tol √(κ|Ψ|), and one below it must not stand for a fall ‖g‖²/(2κ) of the loss by more
    than rtol max(1, |Ψ|).
    """

    tol: float = 1e-8
    rtol: float = 1e-6

    @override
    def reason(self, state: State) -> str | None:
        start = state.trace.rows[0]
        loss, norm = start["loss"], start["gradient_norm"]
        scale = max(loss, norm * norm / loss) if loss > 0 else max(-loss, norm) or math.inf
        level = min(self.tol * max(1.0, abs(state.loss)), self.rtol * scale)
        if state.gradient_norm <= level and self._is_small_in_units_of_the_parameters(state):
            return f"the gradient norm {state.gradient_norm:.2e} is at most {level:.1e}"
        return None

    def _is_small_in_units_of_the_parameters(self, state: State) -> bool:
        norm, size = state.gradient_norm, abs(state.loss)
        if norm == 0 or state.curvature is None:
            return True
        curvature = state.curvature()
        if norm > self.tol:
            return norm <= self.tol * math.sqrt(curvature) * math.sqrt(size)
        return curvature > 0 and norm / curvature * norm <= 2 * self.rtol * max(1.0, size)


@dataclass(frozen=True)
class LossBelow(_Limits):
    """Stop when the full loss is at most ``value``."""

    value: float
    negative = True

    @override
    def reason(self, state: State) -> str | None:
        return (
            f"the loss {state.loss:.6g} is at most {self.value:.6g}"
            if state.loss <= self.value
            else None
        )


@dataclass(frozen=True)
class Stagnation(_Limits):
    """Stop when the full loss fell by less than ``rtol`` of its size over the last ``window`` evaluations.

    Rejected steps, which leave the loss as it was, do not count.
    """

    rtol: float = 1e-9
    window: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.window, numbers.Integral) and self.window >= 1):
            raise ValueError(
                f"window of Stagnation must be a whole number ≥ 1, got {self.window!r}"
            )

    @override
    def reason(self, state: State) -> str | None:
        taken = (row for row in reversed(state.trace.rows) if row.get("accepted", 1.0))
        losses = list(
            itertools.islice(
                (row["loss"] for row in taken if row["loss"] == row["loss"]), self.window + 1
            )
        )
        if len(losses) <= self.window:
            return None
        fall = losses[-1] - losses[0]
        if fall <= self.rtol * max(abs(losses[0]), 1e-300):
            return f"the loss fell by only {fall:.1e} over {self.window} evaluations"
        return None


@dataclass(frozen=True)
class MaxSeconds(_Limits):
    """Stop when the solver has run for this long."""

    seconds: float
    converged = False

    @override
    def reason(self, state: State) -> str | None:
        if state.seconds >= self.seconds:
            return f"{state.seconds:.1f} s are spent, {self.seconds:g} s were allowed"
        return None


@dataclass(frozen=True)
class MaxSamples(_Limits):
    """Stop when this many sample gradients have been evaluated."""

    samples: int
    converged = False

    @override
    def reason(self, state: State) -> str | None:
        if state.samples >= self.samples:
            return f"{state.samples} sample gradients are spent, {self.samples} were allowed"
        return None
