"""What the methods share: their contract, the draws of batches and the full evaluation."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from fisherfold.manifolds.base import Point, Tangent, combine, is_finite, leaves, scale
from fisherfold.plain import counted
from fisherfold.problems.base import Problem
from fisherfold.solvers.state import State

BatchSize: TypeAlias = "int | Callable[[int], int] | None"
Schedule: TypeAlias = "float | Callable[[int], float]"

# of line searches: the length of the first trial step, and the most evaluations
FIRST_STEP, MAX_TRIALS = 1.0, 25


class Method(ABC):
    """An algorithm on a problem: a starting state and a step.

    Attributes:
        name: how ``minimize`` calls it.
        exact: whether ``step`` leaves the loss and gradient norm over all samples in the state.
    """

    name: ClassVar[str]
    exact: bool = True

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.manifold = problem.manifold

    @abstractmethod
    def start(self, state: State) -> None:
        """Fill in a fresh state that holds the starting point."""

    @abstractmethod
    def step(self, state: State) -> None:
        """Make one iteration."""

    def retreat(self, state: State) -> None:
        """Go back to the best point after a step to one whose full loss is not finite.

        A method shortens its steps.
        """
        state.x = state.best

    def is_over(self, state: State) -> bool:
        """Whether no step can be made from the iterate.

        Its gradient is 0, or not finite, which is a failure.
        """
        if not math.isfinite(state.gradient_norm):
            state.failure = ("non_finite", "the gradient at the iterate is not finite")
        return state.gradient_norm == 0 or state.failure is not None

    def reject(self, state: State, status: str, sentence: str, most: int) -> None:
        """Count a step that is not taken; so many in a row end the run."""
        state.numbers["rejections"] += 1
        if state.numbers["rejections"] >= most:
            state.failure = (status, f"{sentence} ({counted(most, 'try', 'tries')} in a row)")

    def inner(self, x: Point, u: Tangent, v: Tangent) -> float:
        """The metric as a number."""
        return float(
            self.manifold._inner(x, u, v)
        )  # the hook: vectors made by a solver need no checks

    def norm(self, x: Point, v: Tangent) -> float:
        """The length of a tangent vector as a number."""
        return math.sqrt(self.inner(x, v, v))

    def value(self, x: Point, batch: Tensor | None = None) -> float:
        """The loss as a number, without what else it may be differentiated in."""
        loss = self.problem.loss(x, batch)
        return float(loss.detach() if isinstance(loss, Tensor) else loss)

    def evaluate(self, state: State) -> Tangent:
        """Put the loss and gradient norm over all samples into the state."""
        loss, gradient = self.problem.loss_and_gradient(state.x)
        state.loss, state.gradient_norm = float(loss), self.norm(state.x, gradient)
        return gradient

    def curvature(self, state: State) -> float:
        """The curvature κ of the loss along its gradient, from gradients ahead, the last where κ puts the minimum."""
        # Over a step that is too short the gradient changes by rounding only; that says no more
        # than how far to look.
        x, gradient = state.x, self.problem.gradient(state.x)
        state.samples += self.problem.n_samples
        norm, size = self.norm(x, gradient), math.hypot(*(float(leaf.norm()) for leaf in leaves(x)))
        if not 0 < norm < math.inf:
            return math.inf
        eps, length = torch.finfo(leaves(x)[0].dtype).eps, 1e-2 * max(1.0, size)
        found = self._secant(state, gradient, norm, length)
        for _ in range(3):
            ahead = norm / max(found, eps * norm / length)
            if ahead <= 2 * length or math.isinf(
                further := self._secant(state, gradient, norm, ahead)
            ):
                break
            found, length = further, ahead
        return found

    def _secant(self, state: State, gradient: Tangent, norm: float, length: float) -> float:
        x = state.x
        y = self.manifold.retract(x, scale(-length / norm, gradient))
        if not is_finite(y):
            return math.inf
        state.samples += self.problem.n_samples
        change = combine(
            1.0, self.problem.gradient(y), -1.0, self.manifold.transport(x, y, gradient)
        )
        found = self.norm(y, change) / length
        return found if math.isfinite(found) else math.inf

    def fall(self, x: Point, y: Point, move: Tangent, here: Tangent, there: Tangent) -> float:
        """How far the loss falls in a step, from the slopes at both ends, to third order."""
        # Near a minimum losses differ by less than their rounding (``Problem.loss_rounding``);
        # gradients still tell.
        ahead = self.inner(y, there, self.manifold.transport(x, y, move))
        return -0.5 * (self.inner(x, here, move) + ahead)


def positive(name: str, value: float, *, zero: bool = False) -> float:
    """Check a number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be a number {'≥' if zero else '>'} 0, got {value}")
    return float(value)


def whole_number(name: str, value: int) -> int:
    """Check a whole number."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    return value


def at_least_one(name: str, value: int) -> int:
    """Check a count."""
    if not whole_number(name, value) >= 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def check_kind(kind: str | None, problem: Problem) -> str:
    """The kind of Fisher information, the problem's first if not given."""
    kind = problem.fisher_kinds[0] if kind is None else kind
    if kind not in problem.fisher_kinds:
        raise ValueError(f"fisher must be one of {list(problem.fisher_kinds)}, got {kind!r}")
    return kind


def at(name: str, schedule: Schedule, k: int) -> float:
    """The value of a constant, which was checked before, or of a schedule, which is checked here."""
    if not callable(schedule):
        return schedule
    value = schedule(k)
    return positive(f"{name}({k})", value.item() if isinstance(value, Tensor) else value, zero=True)


def check_batch_size(batch_size: int | None, n_samples: int, name: str = "batch_size") -> int:
    """The batch size, all samples if not given."""
    size = n_samples if batch_size is None else whole_number(name, batch_size)
    if not 1 <= size <= n_samples:
        raise ValueError(f"{name} must be between 1 and n_samples={n_samples}, got {batch_size}")
    return size


class Draws:
    """The batches of one epoch after another, of a tenth of the samples each if no size is given."""

    def __init__(
        self, n_samples: int, batch_size: int | None, sampling: str | None, stream: Tensor | None
    ) -> None:
        if sampling is not None and sampling not in ("shuffle", "replacement"):
            raise ValueError(f"sampling must be 'shuffle' or 'replacement', got {sampling!r}")
        self.n_samples, self.sampling = n_samples, sampling
        self.stream = None if stream is None else torch.as_tensor(stream)
        self.batch_size = (
            max(1, n_samples // 10)
            if batch_size is None
            else check_batch_size(batch_size, n_samples)
        )

    def epoch(self, state: State) -> Iterator[Tensor]:
        """The batches of the epoch that the state is about to make."""
        device = leaves(state.x)[0].device
        if self.stream is not None:
            if state.iteration >= len(self.stream):
                held = counted(len(self.stream), "epoch")
                raise ValueError(f"stream holds {held}, epoch {state.iteration + 1} was asked for")
            order = self.stream[state.iteration]
        elif self.sampling == "replacement":
            order = torch.randint(
                self.n_samples, (self.n_samples,), generator=state.generator, device="cpu"
            )
        else:
            order = torch.randperm(self.n_samples, generator=state.generator, device="cpu")
        yield from torch.split(order.to(device), self.batch_size)


class Stochastic(Method):
    """A method of epochs of batches, whose step is quartered where an epoch leaves the finite numbers.

    Args:
        problem: the problem.
        batch_size: samples per step; one tenth of the samples if not given.
        sampling: ``shuffle`` (every sample once per epoch; so it is if not given) or
            ``replacement``.
        stream: recorded sample indices, shape (epochs, draws), in place of ``sampling``.
        max_rejections: so many spoilt epochs end the run.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        batch_size: int | None = None,
        sampling: str | None = None,
        stream: Tensor | None = None,
        max_rejections: int = 10,
    ) -> None:
        super().__init__(problem)
        self.draws = Draws(problem.n_samples, batch_size, sampling, stream)
        self.max_rejections = at_least_one("max_rejections", max_rejections)

    def start(self, state: State) -> None:
        """Fill in a fresh state that holds the starting point."""
        state.numbers |= {"shrink": 1.0, "rejections": 0}

    def shorten(self, state: State, step: float) -> None:
        """Count a spoilt epoch."""
        state.numbers["shrink"] /= 4
        state.numbers["rejections"] += 1
        state.record = {"accepted": 0.0, "step": step}
        if state.numbers["rejections"] >= self.max_rejections:
            state.failure = (
                "non_finite",
                f"a step of {step:.1e} leads to values that are not finite",
            )
