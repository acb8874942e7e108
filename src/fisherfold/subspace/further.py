"""Fits of related regressions whose subspace has stopped before its place, and when to go on with them.

A round of ``fit_marginal`` tries two steps of RNGD. Where both are rejected, round after round, all else settles about
a subspace that is not stationary. EM moves it on. But a higher likelihood is not always a better model: with few rows
for what all tasks share, W = [m, U], it is reached by fitting the noise. So the fit goes on only while that raises the
evidence, with W integrated out by Laplace's method,

    -log p(y) = -Σ_t log p(y_t | W) + ½ log det(I + R F R),

as in ``inference.subspace_noise``, with the prior of the noise where tasks have their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fisherfold.subspace.information import shared_information, shared_prior
from fisherfold.subspace.marginal import SubspacePrior, posterior
from fisherfold.subspace.marginal_fit import MarginalFit, fit_marginal, noise_penalty, refused, update_frame
from fisherfold.subspace.tasks import TaskStatistics

# The evidence is looked at after every so many rounds.
_STRETCH = 10


def fit_further(
    statistics: TaskStatistics,
    fit: MarginalFit,
    noise: str,
    *,
    max_rounds: int = 300,
    tol: float = 1e-7,
    callback: Callable[[dict[str, float]], object] | None = None,
) -> MarginalFit:
    """Go on with a fit that has settled where the subspace is not stationary, if that makes a better model.

    Args:
        statistics: the rows.
        fit: from ``fit_marginal``.
        noise: ``task`` or ``shared``.
        max_rounds: the most rounds, those of the fit included.
        tol: as in ``fit_marginal``.
        callback: called with every row of the trace; a true value stops.

    Returns:
        The fit after as many rounds as raise the evidence. It is the given one where that has not settled or its
        subspace is stationary, and where W is too large to be integrated out.
    """
    value = evidence(statistics, fit.prior, noise) if fit.converged and stalled(statistics, fit.prior) else None
    done, best, further = len(fit.trace), fit, replace(fit, trace=[], converged=False)
    numbered = None if callback is None else lambda row: callback(_later(row, done))
    while value is not None and not further.converged and done + len(further.trace) < max_rounds:
        stop = min(len(further.trace) + _STRETCH, max_rounds - done)
        further = fit_marginal(
            statistics, rank=fit.prior.frame.shape[1], noise=noise, max_rounds=stop, tol=tol, prior=further.prior,
            trace=further.trace, callback=numbered, expected=True,
        )  # fmt: skip
        reached = evidence(statistics, further.prior, noise)
        if reached is None or not reached < value:
            break
        value, best = reached, replace(further, trace=fit.trace + [_later(row, done) for row in further.trace])
        if len(further.trace) < stop:
            break  # settled, or the callback asked to stop
    return best


def stalled(statistics: TaskStatistics, prior: SubspacePrior) -> bool:
    """Whether no step of a round is accepted although there is a gradient.

    Args:
        statistics: the rows.
        prior: where a fit has ended.

    Returns:
        True if rounds leave the subspace where it is.
    """
    return refused(prior, *update_frame(statistics, prior))


def evidence(statistics: TaskStatistics, prior: SubspacePrior, noise: str) -> float | None:
    """-log p(y) with W integrated out, and with the prior of the noise.

    Args:
        statistics: the rows.
        prior: what was learnt.
        noise: ``task`` or ``shared``.

    Returns:
        The number, less is better, or None where W is too large.
    """
    known = shared_prior(statistics, prior)
    if known is None:
        return None
    found, tasks = posterior(statistics, prior), statistics.all_tasks
    factor = known.factor(tasks.total(shared_information(statistics, prior, found)))
    fitted = tasks.add(found.losses) + noise_penalty(prior.noise, noise, tasks)
    return fitted + float(factor.diagonal().log().sum())


def _later(row: dict[str, float], rounds: int) -> dict[str, float]:
    return row | {"round": row["round"] + rounds}
