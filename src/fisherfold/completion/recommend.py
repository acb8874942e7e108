"""The best columns of many rows, similar members, and the model as arrays.

    score(i, j) = b_i + c_j + ⟨u_i, v_j⟩,    or its upper bound, or a draw of it from the posterior

Rows are scored in blocks, one matrix product each; nothing of the size of rows x columns is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.completion.entries import Codes, Floats
from fisherfold.completion.inference.packed import triangle, unpack
from fisherfold.completion.model import CompletionModel
from fisherfold.threads import threads

BY = ("mean", "upper", "sample")
UPPER = 1.645  # standard deviations: nineteen of twenty expected values lie below
_BLOCK = 2**19  # scores at once: they stay in the cache


def best_columns(
    model: CompletionModel,
    rows: Codes,
    k: int,
    *,
    candidates: Codes | None = None,
    exclude_seen: bool = True,
    by: str = "mean",
    seed: int = 0,
) -> tuple[Codes, Codes, Floats]:
    """The columns with the largest scores for each row."""
    columns = np.arange(len(model.column_ids)) if candidates is None else candidates
    k, at = min(k, len(columns)), model.tensor(columns)
    generator = torch.Generator().manual_seed(seed)
    row_side, side = model.posterior.rows, model.posterior.columns
    if candidates is None and by == "mean":
        weights, levels = model.column_table
    else:
        v, v_covariance = side.at(at, "mean"), side.at(at, "covariance")
        if by == "sample":
            v = _draw(v, v_covariance, generator)
        weights, levels = v[:, :-1].T.contiguous(), v[:, -1].contiguous()
    place_of = np.full(len(model.column_ids), -1)
    place_of[columns] = np.arange(len(columns))
    blocks = (
        np.array_split(np.arange(len(rows)), max(1, -(-len(rows) * len(columns) // _BLOCK)))
        if len(rows)
        else []
    )
    drawn = row_side.at(model.tensor(rows), "mean")
    if by == "sample":
        drawn = _draw(drawn, row_side.at(model.tensor(rows), "covariance"), generator)
    here = local()  # a table of scores for each thread: fresh pages for every block would cost more

    def best(part: Codes) -> tuple[Codes, Codes, Floats]:
        if not hasattr(here, "scores"):
            here.scores = weights.new_empty(len(blocks[0]), len(columns))
        u = drawn[part[0] : part[-1] + 1]
        scores = torch.addmm(levels, u[:, :-1], weights, out=here.scores[: len(part)])
        if by == "upper":
            left, right = _spread_features(
                u, row_side.at(model.tensor(rows[part]), "covariance"), v, v_covariance
            )
            scores += UPPER * (left @ right.T).clamp_(min=0).sqrt_()
        if exclude_seen:
            seen_rows, seen_columns = model.seen_by(rows[part])
            place = place_of[seen_columns]
            inside = place >= 0
            scores[model.tensor(seen_rows[inside]), model.tensor(place[inside])] = -math.inf
        top, where = scores.topk(k, dim=1)
        good = torch.isfinite(top)
        value = (top + u[:, -1:])[good].double().cpu().numpy() * model.scale + model.center
        owner = torch.arange(len(part), device=top.device)[:, None].expand_as(top)[good]
        return part[0] + owner.cpu().numpy(), columns[where[good].cpu().numpy()], value

    workers = torch.get_num_threads() if model.device.type == "cpu" else 1
    with threads(1):  # one block per thread; threads within a block would wait for each other
        if workers > 1 and len(blocks) > workers:
            with ThreadPoolExecutor(workers) as pool:
                found = list(pool.map(best, blocks))
        else:
            found = list(map(best, blocks))
    return _joined(found)


def _joined(found: Sequence[tuple[npt.NDArray[Any], ...]]) -> tuple[Codes, Codes, Floats]:
    nothing = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)
    i, j, values = (np.concatenate(parts) for parts in zip(nothing, *found, strict=True))
    return i, j, values


def _draw(mean: Tensor, covariance: Tensor, generator: torch.Generator) -> Tensor:
    """One draw of each member from its posterior; an offset that is held at zero has no variance."""
    square = unpack(covariance).double()
    jitter = 1e-10 * square.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30)
    square = square + jitter[:, None, None] * torch.eye(
        square.shape[1], dtype=square.dtype, device=square.device
    )
    normal = torch.randn(len(mean), mean.shape[1], 1, dtype=torch.float64, generator=generator).to(
        mean.device
    )
    return mean + (torch.linalg.cholesky(square) @ normal)[:, :, 0].to(mean)


def _spread_features(u: Tensor, rows: Tensor, v: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Two tables whose inner products are variances of b + c + ⟨u, v⟩: (ũũᵀ, R) and (C, ṽṽᵀ + C_vv), packed."""
    i, j = triangle(u.shape[1], u.device)
    twice = torch.where(i == j, 1.0, 2.0).to(u)
    x, y = (torch.cat([side[:, :-1], torch.ones_like(side[:, :1])], dim=1) for side in (u, v))
    outer = y[:, i] * y[:, j]
    n_factors = u.shape[1] * (u.shape[1] - 1) // 2  # the packed block of the factors comes first
    outer[:, :n_factors] += columns[:, :n_factors]
    return torch.cat([x[:, i] * x[:, j] * twice, rows * twice], dim=1), torch.cat(
        [columns, outer], dim=1
    )


def most_similar(
    model: CompletionModel, members: Codes, k: int, *, side: int = 1
) -> tuple[Codes, Codes, Floats]:
    """The members of one side that are rated most alike.

    Two columns are alike if their predicted values, apart from level, are correlated over the rows of the table.
    """
    table = model.directions(side)
    k, found = min(k, len(table) - 1), []
    size = max(1, _BLOCK // max(len(table), 1))
    for start in range(0, len(members), size):
        block = model.tensor(members[start : start + size])
        scores = table[block] @ table.T
        scores[torch.arange(len(block)), block] = -math.inf
        best, where = scores.topk(k, dim=1)
        owner = torch.arange(start, start + len(block))[:, None].expand_as(best)
        found.append(
            tuple(part.reshape(-1).cpu().numpy() for part in (owner, where, best.double()))
        )
    return _joined(found)


def factors(model: CompletionModel, side: int) -> tuple[Floats, Floats, Floats]:
    """The factors, offsets and covariances of one side in units of the values.

    prediction = offset_ + row offset + column offset + row factors · column factors
    """
    part = (model.posterior.rows, model.posterior.columns)[side]
    unit = np.full(part.mean.shape[1], model.scale**0.5)
    unit[-1] = model.scale
    mean = part.mean.double().cpu().numpy() * unit
    covariance = unpack(part.covariance).double().cpu().numpy() * (unit[:, None] * unit)
    return mean[:, :-1], mean[:, -1], covariance


def inner_product_vectors(model: CompletionModel) -> tuple[Floats, Floats]:
    """Vectors whose inner products are the predictions: (u_i, 1, g + b_i) and (v_j, c_j, 1)."""
    (u, b, _), (v, c, _) = factors(model, 0), factors(model, 1)
    rows = np.column_stack([u, np.ones(len(u)), b + model.center])
    return rows.astype(np.float32), np.column_stack([v, c, np.ones(len(v))]).astype(np.float32)
