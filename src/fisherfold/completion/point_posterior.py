"""The former name of ``point.fit_point``, until the estimator calls it."""

from __future__ import annotations

from typing import Any

from fisherfold.completion.point import fit_point
from fisherfold.completion.posterior import CompletionPosterior
from fisherfold.completion.ratings import Ratings


def point_posterior(
    ratings: Ratings, rank: int, *, saved: Any = None, return_on_interrupt: bool = False, **options: Any
) -> tuple[CompletionPosterior, bool, float]:
    """Call ``fit_point``.

    Args:
        ratings: the ratings.
        rank: the rank.
        saved: unused.
        return_on_interrupt: unused.
        **options: those of ``fit_point``.

    Returns:
        The posterior, False, and the global offset.
    """
    posterior, level = fit_point(ratings, rank, **options)
    return posterior, False, level
