"""The one outer loop: start or resume, step, record, stop, and return the best point.

Every method runs in it, so that stopping, callbacks, the trace, checkpoints and the treatment of
values that are not finite are the same for all.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fisherfold.distributed import Group
from fisherfold.files import check_place, sound
from fisherfold.manifolds.base import Point, leaves, reorder_like, tree_map
from fisherfold.plain import counted
from fisherfold.problems.base import Problem
from fisherfold.progress import track
from fisherfold.solvers.ending import is_judged, judge, leave_saddle
from fisherfold.solvers.identity import identity_of
from fisherfold.solvers.lbfgs import LBFGS
from fisherfold.solvers.method import Method, whole_number
from fisherfold.solvers.rcg import RCG, RGD
from fisherfold.solvers.result import Result
from fisherfold.solvers.rngd import RNGD
from fisherfold.solvers.rsgd import RSGD
from fisherfold.solvers.rsvrg import RNGDVR, RSVRG
from fisherfold.solvers.state import State
from fisherfold.solvers.stopping import Criterion, SmallGradient
from fisherfold.solvers.trust_region import TrustRegion

METHODS: dict[str, type[Method]] = {
    m.name: m for m in (RNGD, RNGDVR, RSGD, RSVRG, RCG, RGD, TrustRegion, LBFGS)
}


def minimize(
    problem: Problem,
    x0: Point,
    method: str = "auto",
    *,
    max_iter: int = 100,
    stop: Criterion | None = None,
    callback: Callable[[State], object] | None = None,
    seed: int = 0,
    evaluate_every: int = 1,
    verbose: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 10,
    resume: bool = False,
    tag: str = "",
    escape: bool = False,
    **options: Any,
) -> Result:
    """Minimise a loss over its manifold.

    Args:
        problem: the problem.
        x0: the starting point.
        method: ``rngd`` (Algorithm 1, or its fixed-step form with ``step=``), ``rngd-vr``
            (variance-reduced), ``rsgd``, ``rsvrg``, ``rcg`` or ``rgd`` (line search), ``trust-region``
            (with the Hessian, or a Fisher information), ``lbfgs``. ``auto`` is ``rngd`` where the
            problem has the Fisher information of a likelihood, ``trust-region`` for a loss with a
            Hessian, and ``lbfgs`` for what has neither.
        max_iter: the most iterations; one iteration of ``rngd-vr``, ``rsgd`` and ``rsvrg`` is one
            epoch.
        stop: a criterion from ``fisherfold.solvers.stopping``, or several joined by ``|`` and
            ``&``; ``SmallGradient`` if not given: for losses of about 1 a gradient norm of 1e-8
            (float64) or 1e-4 (float32).
        callback: called with the state after every iteration; a true value, or a sentence, stops
            the run, over several processes that of any of them.
        seed: fixes all randomness.
        evaluate_every: how often a stochastic method evaluates the loss over all samples (not
            counted as solver time).
        verbose: print a line per iteration to standard error.
        checkpoint: a file to keep the state in; over several processes the first one alone reads
            and writes it.
        checkpoint_every: iterations between two checkpoints; one is also written at the end and on
            an interrupt.
        resume: go on from the checkpoint if the file exists; it must be of this problem, start,
            seed and method. A run that found no further step tries again only with other options
            for the method.
        tag: kept in the checkpoint, such as a digest of the data; a run goes on only from one with
            its own tag.
        escape: leave saddles along a direction of negative curvature, and go on.
        **options: for the method; see its class in ``fisherfold.solvers``.

    Returns:
        The best point, why the run ended, and the trace.

    Raises:
        ValueError: if an argument is out of range or the starting point is not on the manifold.
        KeyboardInterrupt: after a checkpoint was written, if the user interrupts.
    """
    _check_parts(problem, stop, callback, seed)
    _check_numbers(
        max_iter=(max_iter, 0),
        evaluate_every=(evaluate_every, 1),
        checkpoint_every=(checkpoint_every, 1),
    )
    _check_files(checkpoint, resume, problem.group)
    _check_start(problem, x0)
    x0 = reorder_like(x0, problem.manifold.point_shape)
    method = choose_method(problem, options) if method == "auto" else method
    if method not in tuple(METHODS):
        raise ValueError(f"method must be 'auto' or one of {sorted(METHODS)}, got {method!r}")
    solver = _construct(METHODS[method], problem, options)
    identity = {} if checkpoint is None else identity_of(problem, x0, seed)
    state = _begin(solver, x0, seed, checkpoint if resume else None, tag, identity)
    state.curvature = partial(solver.curvature, state)
    settings = str(sorted(options.items()))
    if state.options != settings:  # they may find a step where the last ones found none
        state.options, state.failure = settings, None
    stop = stop or (
        SmallGradient() if leaves(x0)[0].dtype == torch.float64 else SmallGradient(1e-4, 1e-3)
    )

    def keep() -> None:
        with problem.group.together():
            if checkpoint is not None and problem.group.is_first:
                state.save(checkpoint, method=method, tag=tag)

    before = state.copy() if checkpoint is not None else None
    own, problem.generator = problem.generator, state.generator
    try:
        if started := not state.trace.rows:
            _start(solver, state)
        before = None
        verdict = _agreed(problem.group, _verdict(state, stop, max_iter))
        if started and verdict is not None:
            keep()
        with track(
            f"minimize ({method})", at_most=max_iter, verbose=verbose and problem.group.is_first
        ) as line:
            while (verdict := _judged(solver, state, verdict, x0, escape=escape)) is None:
                before = state.copy() if checkpoint is not None else None
                _advance(solver, state, evaluate_every, max_iter)
                before = None
                line.update(state.iteration, state.trace.rows[-1])
                verdict = _verdict(state, stop, max_iter)
                if callback is not None and (answer := callback(state)) and verdict is None:
                    verdict = (
                        "stopped",
                        answer if isinstance(answer, str) else "the callback asked to stop",
                    )
                verdict = _agreed(problem.group, verdict)
                if verdict is not None:
                    _conclude(solver, state)
                if verdict is not None or state.iteration % checkpoint_every == 0:
                    keep()
    except KeyboardInterrupt:
        if checkpoint is not None and problem.group.is_first:
            # in the middle of a step the state is neither here nor there: keep the last whole one
            (before or state).save(checkpoint, method=method, tag=tag)
        raise
    finally:
        problem.generator = own
    status, message = verdict
    # a point that met the criterion is the best one unless another was lower by more than rounding
    met = status == "converged" and state.loss <= state.best_loss + problem.loss_rounding(
        state.x, state.best_loss
    )
    x, value = (state.x, state.loss) if met else (state.best, state.best_loss)
    return Result(
        x, value, status, message, state.trace, state.iteration, last=state.x, problem=problem
    )


def choose_method(problem: Problem, options: dict[str, Any]) -> str:
    """The method of ``auto``: one that uses what the problem knows of its curvature."""
    informed = type(problem).fisher is not Problem.fisher
    likelihood = informed and problem.fisher_kinds[0] not in {"empirical", "observed"}
    # a batch, a step or a kind of Fisher information is meant for rngd
    if likelihood or set(options) & {"fisher", "batch_size", "step"}:
        return "rngd"
    return "trust-region" if type(problem).hessian is not Problem.hessian else "lbfgs"


def _check_numbers(**counts: tuple[int, int]) -> None:
    for name, (value, least) in counts.items():
        whole_number(name, value)
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_parts(problem: Problem, stop: Criterion | None, callback: object, seed: int) -> None:
    if not isinstance(problem, Problem):
        raise TypeError(
            "problem must be a fisherfold.Problem, such as NLLProblem, got "
            f"{type(problem).__name__}"
        )
    if stop is not None and not isinstance(stop, Criterion):
        raise TypeError(f"stop must be a criterion such as GradientNorm(1e-6), got {stop!r}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be a function of the state, got {callback!r}")
    whole_number("seed", seed)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must lie between -2**63 and 2**64 - 1, got {seed}")


def _check_files(checkpoint: str | os.PathLike[str] | None, resume: bool, group: Group) -> None:
    if resume and checkpoint is None:
        raise ValueError("resume=True needs a checkpoint file, got checkpoint=None")
    if not isinstance(checkpoint, (str, os.PathLike, type(None))):
        raise TypeError(f"checkpoint must be a path or None, got {checkpoint!r}")
    with group.together():
        if checkpoint is not None and group.is_first:
            check_place(checkpoint, "checkpoint")


def _check_start(problem: Problem, x0: Point) -> None:
    problem.manifold.check_point(x0, name="x0")
    dtypes = {leaf.dtype.to_real() for leaf in leaves(x0)}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise ValueError(
            f"x0 must be float32 or float64, one for all factors, got {sorted(map(str, dtypes))}"
        )
    if any(leaf.requires_grad for leaf in leaves(x0)):
        raise ValueError("x0 must not require grad; pass x0.detach()")
    batched = problem.manifold.inner(x0, x0, x0).ndim > 0
    if batched:
        raise ValueError("x0 must be a single point, got one with batch dimensions")


def _construct(method: type[Method], problem: Problem, options: dict[str, Any]) -> Method:
    try:
        return method(problem, **options)
    except TypeError as error:
        raise TypeError(f"method {method.name!r}: {str(error).split('__init__() ')[-1]}") from None


def _begin(
    solver: Method,
    x0: Point,
    seed: int,
    saved: str | os.PathLike[str] | None,
    tag: str,
    identity: dict[str, Any],
) -> State:
    group = solver.problem.group
    if saved is not None:
        resumed = State.load(
            saved, method=solver.name, like=x0, tag=tag, identity=identity, group=group
        )
        if resumed is not None:
            with group.together(), sound(saved, "checkpoint"):
                solver.problem.manifold.check_point(resumed.x, name="its x")
            return resumed
    state = State(x=tree_map(torch.clone, x0), generator=torch.Generator().manual_seed(int(seed)))
    state.best = state.x
    state.identity = identity
    return state


def _start(solver: Method, state: State) -> None:
    began = time.perf_counter()
    solver.start(state)
    state.seconds = time.perf_counter() - began
    if not solver.exact:
        solver.evaluate(state)
    _record(solver.problem, state)
    if math.isfinite(state.loss):
        solver.problem.check_representatives(state.x, state.loss)
    else:
        state.failure = ("non_finite", f"the loss at the starting point is {state.loss}")


def _advance(solver: Method, state: State, evaluate_every: int, max_iter: int) -> None:
    state.record = {}
    began, here = time.perf_counter(), state.x
    solver.step(state)
    state.x = tree_map(_settled, state.x)
    if any(a is not b for a, b in zip(leaves(state.x), leaves(here), strict=True)):
        state.before = here
    state.vectors = {name: tree_map(_settled, tree) for name, tree in state.vectors.items()}
    state.seconds += time.perf_counter() - began
    state.iteration += 1
    if not solver.exact:
        if state.iteration % evaluate_every == 0 or state.iteration == max_iter or state.failure:
            solver.evaluate(state)
            if not math.isfinite(state.loss):
                solver.retreat(state)
                solver.evaluate(state)
        else:
            state.loss = state.gradient_norm = math.nan
    _record(solver.problem, state)


def _settled(leaf: Tensor) -> Tensor:
    """In one memory layout, whatever made it, so that a run resumed from a file keeps its bits.

    Without its history.
    """
    # the same tensor where nothing is to be done: what a problem has kept for it stays valid
    return leaf.detach().contiguous() if leaf.requires_grad or not leaf.is_contiguous() else leaf


def _judged(
    solver: Method, state: State, verdict: tuple[str, str] | None, x0: Point, *, escape: bool
) -> tuple[str, str] | None:
    """The verdict, unless the run has ended at a saddle or on the way to infinity.

    None where it goes on.
    """
    problem = solver.problem
    if verdict is None or verdict[0] not in {"converged", "stalled"} or not is_judged(problem):
        return verdict
    if (found := judge(problem, state, x0)) is None:
        return verdict
    status, reason, direction = found
    if escape and direction is not None and leave_saddle(problem, state, direction):
        state.failure = None
        state.numbers, state.vectors = {}, {}
        solver.start(state)
        return None
    return status, reason


def _conclude(solver: Method, state: State) -> None:
    """A run that a budget or a callback ends between two evaluations.

    Its last iterate may be the best one.
    """
    if not solver.exact and math.isnan(state.loss):
        solver.evaluate(state)
        _record(solver.problem, state)
        del state.trace.rows[-2]


def _record(problem: Problem, state: State) -> None:
    row = {
        "iteration": state.iteration,
        "samples": state.samples,
        "products": state.products,
        "seconds": state.seconds,
        "loss": state.loss,
        "gradient_norm": state.gradient_norm,
    }
    row |= state.record
    metrics = {name: float(value) for name, value in problem.metrics(state.x).items()}
    # criteria read the loss and the acceptance of a step in the trace
    if taken := sorted({*row, "accepted"} & set(metrics)):
        raise ValueError(
            f"metrics of the problem must have names of their own, got {taken}, columns of the "
            "trace"
        )
    state.trace.rows.append(row | metrics)
    if state.loss < state.best_loss:
        state.best, state.best_loss = state.x, state.loss


def _verdict(state: State, stop: Criterion, max_iter: int) -> tuple[str, str] | None:
    if state.failure is not None:
        return state.failure
    met = stop.met(state)
    state.trace.rows[-1]["samples"] = state.samples  # a criterion may have asked for gradients
    if met is not None:
        return met
    made = counted(state.iteration, "iteration is made", "iterations are made")
    # a run that is resumed may have made more already
    made += f", max_iter is {max_iter}" if state.iteration > max_iter else ""
    return ("max_iter", f"{made}; {_advice(state)}") if state.iteration >= max_iter else None


def _advice(state: State) -> str:
    """What to try after a run that has used up its iterations."""
    rows = [row for row in state.trace.rows if row["gradient_norm"] == row["gradient_norm"]]
    last, lately = rows[-1], len(rows) // 4
    norm = f"the gradient norm is {last['gradient_norm']:.1e}"
    if lately == 0 or last["gradient_norm"] <= 0.9 * min(
        row["gradient_norm"] for row in rows[:-lately]
    ):
        return f"{norm} and falls: raise max_iter, or start again from result.last"
    if "batch_loss" in last:
        return f"{norm}, the noise of the batches: take larger ones, or batch_size as a function that grows"
    if not ("rho" in last or "trials" in last):
        return f"{norm} and has ceased to fall: take smaller steps, or method='rngd'"
    # gradients may rise on the way through a valley, in which the loss of these methods falls all
    # the same
    if rows[-1 - lately]["loss"] - last["loss"] > 1e-4 * (rows[0]["loss"] - last["loss"]):
        return f"{norm} and the loss still falls: raise max_iter, or start again from result.last"
    return f"{norm} and has ceased to fall: try another start, or method='trust-region'"


def _agreed(group: Group, verdict: tuple[str, str] | None) -> tuple[str, str] | None:
    """One verdict on all processes.

    Clocks and callbacks may differ, and who goes on alone would wait for ever.
    """
    if group.size == 1 or not bool(
        group.largest(torch.tensor(verdict is not None, dtype=torch.int64))
    ):
        return verdict
    return next(filter(None, group.gather_objects(verdict)))
