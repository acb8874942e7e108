"""Which ratings of a row moved one of its predictions, and by how much.

Given the columns, the posterior mean of a row is linear in its ratings. With a_j = (v_j, 1) of a rated column, m the
prior mean of (u, b) and V their posterior covariance,

    ū - m = V Σ_j g_j,     g_j = τ α w_j β_j (x_j E[a_j] - E[c_j a_j] - E[a_j a_jᵀ] m)

so that a rating moves the score of column k by ā_kᵀ V g_j: how far it lies from what was expected of it, times what it
tells of that column. The rest of the score is the prior part: offsets, features, and the mere set of rated columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fisherfold.completion.entries import Codes, Floats
from fisherfold.completion.inference.gram import moments
from fisherfold.completion.inference.packed import unpack
from fisherfold.completion.model import COLUMNS, ROWS, CompletionModel
from fisherfold.completion.ratings import Triplets
from fisherfold.completion.scoring import Members, drift


@dataclass(frozen=True)
class Explanation:
    """The parts of a prediction, in units of the values; shares and prior part sum to it.

    Attributes:
        columns: the rated columns, by number.
        values: the ratings.
        shares: by how much each moved the prediction.
        prior: what is left without their values.
        prediction: the expected score, before it is clipped.
    """

    columns: Codes
    values: Floats
    shares: Floats
    prior: float
    prediction: float


def explain(
    model: CompletionModel,
    row: int,
    column: int,
    *,
    fit: CompletionModel | None = None,
    features: Tensor | None = None,
) -> Explanation:
    """Take a prediction apart; of a row that was not in the fit, ``fit`` is the model of that."""
    if model.categories is not None or model.inference != "variational":
        raise ValueError(
            "explain needs likelihood='gaussian' and inference='variational': only then is a "
            "prediction a sum over ratings"
        )
    own, fit = model.given_by(row), fit or model
    side = fit.sides[ROWS]
    if fit is model and side.features is not None:
        features = side.features.table[row : row + 1]
    expected = side.prior_mean_given(model.tensor(own.columns), features).double()
    pair = model.pairs(np.array([row]), np.array([column]))
    target = pair.columns.mean[0].double().clone()
    target[-1] = 1  # (v, 1)
    covariance = unpack(pair.rows.covariance)[0].double()
    pull = fit.posterior.noise_precision * _innovations(model, row, own, expected)
    shares = (pull @ (covariance @ target)).cpu().numpy() * model.scale
    prediction = float(pair.scores()[0])
    return Explanation(own.columns, own.values, shares, prediction - shares.sum(), prediction)


def _innovations(model: CompletionModel, row: int, own: Triplets, expected: Tensor) -> Tensor:
    """What each rating of a row says beside what was expected of it, the g_j / τ."""
    columns = model.members(COLUMNS, own.columns)
    second = unpack(moments(columns.mean.double(), columns.covariance.double()))
    offset = second.shape[1] - 2  # of (v, c, 1)
    free = [*range(offset), offset + 1]
    gram = second[:, free][:, :, free]
    x = torch.from_numpy((own.values - model.center) / model.scale).to(model.device)
    if own.times is not None:
        rows = Members(model.sides[ROWS], torch.full_like(columns.codes, row))
        times = torch.from_numpy(own.times).to(model.device)
        for shift, _ in drift(model.posterior, rows, columns, times, False):
            x = x - shift
    weight = model.sides[ROWS].weight[row] * columns.side.weight[columns.codes].double()
    given = own.amounts if own.weights is None else own.weights
    if given is not None:
        weight = weight * torch.from_numpy(given).to(model.device)
    found = x[:, None] * gram[:, -1] - second[:, offset][:, free] - gram @ expected
    return weight[:, None] * found
