"""How many factors a table supports, by the errors of quick fits on held-out ratings.

Ranks 10, 20, 40, ... are fitted to all ratings but a few, each for some passes from where the last
one stands (``raise_rank``). The search ends where doubling the rank lowers the held-out error too
little, or is expected to: gains fall by about the same factor from one doubling to the next. The
fit that follows is that of the rank found, on all ratings, as if it had been given.

The evidence lower bound does not do for this: the mean-field posterior pays for every factor, and
its bound is largest at rank 5 of MovieLens-100K and 20 of MovieLens-1M, where held-out errors fall
beyond rank 40 (docs/decisions.md). A rank that is too large does little harm but takes time, since
the learnt prior switches off what the data do not support.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.completion.inference.posterior import CompletionPosterior
from fisherfold.completion.inference.start import raise_rank, start_posterior
from fisherfold.completion.inference.variational import first_rank, fit_variational
from fisherfold.completion.ratings import Ratings, Triplets

# where the search begins, and the rank where there is none: of small tables, over several
# processes, with a given ridge
USUAL_RANK = 10
_LARGEST = 160
# factors for each rating of an average row or column, at most
_FACTORS_EACH = 2.0
# what is held out: a share of the ratings within these numbers; smaller tables are not searched
_SHARE = 0.05
_LEAST_HELD = 200
_MOST_HELD = 50_000
_LEAST_RATINGS = 5 * _LEAST_HELD
# doubling the rank is to lower the held-out error by this share of it; half of it is enough to be
# taken once it was tried
_GAIN = 4e-3
# the passes of the first rank, of each further one, and their tolerance
_FIRST_PASSES = 4
_PASSES = 3
_TOLERANCE = 3e-4

Held = tuple[Tensor, Tensor, Tensor, Tensor]


def find_rank(ratings: Ratings, *, set_effects: bool = True, **model: Any) -> int:
    """The rank to fit; keywords are those of ``start_posterior``."""
    most = math.ceil(_FACTORS_EACH * ratings.n_ratings / sum(ratings.shape))
    limit = min(*ratings.shape, _LARGEST, most)
    usual = min(USUAL_RANK, *ratings.shape)
    searchable = ratings.group.size == 1 and model.get("ridge") is None
    if not searchable or ratings.n_ratings < _LEAST_RATINGS or limit <= USUAL_RANK:
        return usual
    part, held = without_some(ratings, seed=model.get("seed", 0))
    posterior = start_posterior(part, first_rank(part, USUAL_RANK), **model)
    chosen = posterior.rank
    errors: list[float] = []
    while True:
        posterior = fit_variational(
            part,
            posterior.rank,
            max_iter=_PASSES if errors else _FIRST_PASSES,
            tol=_TOLERANCE,
            set_effects=set_effects,
            init=posterior,
            **model,
        )
        error = _error(posterior, held)
        if not errors or error < (1 - _GAIN / 2) * min(errors):
            chosen = posterior.rank
        errors.append(error)
        if posterior.rank == limit or not _worthwhile(errors):
            return max(chosen, usual)
        rank = min(limit, 2 * posterior.rank)
        posterior = raise_rank(posterior, part, rank, seed=model.get("seed", 0))


def _worthwhile(errors: list[float]) -> bool:
    """Whether another doubling is likely to gain enough."""
    if errors[-1] <= 0:
        return False
    gains = [math.log(before / after) for before, after in pairwise(errors)]
    if not gains:
        return True
    expected = gains[-1]
    if len(gains) > 1 and gains[-2] > 0:
        expected *= min(1.0, gains[-1] / gains[-2])
    return expected > _GAIN


def without_some(ratings: Ratings, *, seed: int = 0) -> tuple[Ratings, Held]:
    """The ratings but a few, and these: rows, columns, values, weights."""
    by_row = ratings.by_row
    count = min(max(round(_SHARE * ratings.n_ratings), _LEAST_HELD), _MOST_HELD)
    chosen = np.random.default_rng(seed).choice(ratings.n_ratings, count, replace=False)
    held = np.zeros(ratings.n_ratings, dtype=bool)
    held[chosen] = True
    out = torch.from_numpy(held).to(ratings.device)
    weights = by_row.weights
    if weights is None:
        weights = torch.ones_like(by_row.values())
    whole = by_row.groups().long(), by_row.indices().long(), by_row.values(), weights
    i, j, x, w = (entries[~out].cpu().numpy() for entries in whole)
    entries = Triplets(i, j, x, None if by_row.weights is None else w)
    axes = ratings.row_axis, ratings.column_axis
    part = Ratings.over(axes, entries, dtype=ratings.dtype, device=ratings.device)
    rows, columns, values, importance = (entries[out] for entries in whole)
    return part, (rows, columns, values, importance)


def _error(posterior: CompletionPosterior, held: Held) -> float:
    """The root mean square error on held-out ratings."""
    rows, columns, values, weights = held
    squares = (posterior.predict(rows, columns)[0] - values).square()
    return float(((squares * weights).sum() / weights.sum()).sqrt())
