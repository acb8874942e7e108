"""Importance weights and streams on MovieLens-100K: errors, intervals, and thirty batches.

Each line is a fit to the training part of official fold 2 (u2) with weights that say nothing of
the noise. Shown are the held-out RMSE, the share of held-out ratings (of weight 1) within 90 %
intervals that are not clipped, and the noise that was learnt. Then thirty
batches of ``partial_fit`` in random order against one fit, for each likelihood, with weights and
with times.

Against: the fit without weights, and a refit
Takes: a minute
Page: docs/benchmarks/completion.md
"""

from __future__ import annotations

import warnings
from argparse import ArgumentParser, Namespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fisherfold import MatrixCompletion, datasets

SMOKE = "--batches 3 --rank 2"
DAY = 86400.0


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--rank", type=int, default=10)
    parser.add_argument("--fold", type=int, default=2)


def main(given: Namespace) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = datasets.where("movielens100k")
    if folder is None:
        raise SystemExit("movielens100k is not here: fisherfold datasets fetch movielens100k")
    data = np.load(folder / "movielens100k.npz")
    pairs = np.stack([data["user_id"], data["item_id"]], axis=1).astype(np.int64)
    values = data["rating"].astype(np.float64)
    times = data["timestamp"].astype(np.float64)
    held = data["test_fold"] == given.fold
    console = Console()
    console.print(_weighted(given, pairs, values, times, held))
    console.print(_streams(given, pairs, values, times, held))


def _weights(times: np.ndarray) -> dict[str, np.ndarray | None]:
    rng = np.random.default_rng(0)
    half = rng.random(len(times)) < 0.5
    age = (times.max() - times) / DAY
    return {
        "none": None,
        "half at 0.1": np.where(half, 0.1, 1.0),
        "half at 0.01": np.where(half, 0.01, 1.0),
        "half left out": np.where(half, 0.0, 1.0),
        "all at 0.1": np.full(len(times), 0.1),
        "log-normal, 0.3": np.exp(0.3 * rng.normal(size=len(times))),
        "log-normal, 0.5": np.exp(0.5 * rng.normal(size=len(times))),
        "log-normal, 1": np.exp(rng.normal(size=len(times))),
        "decay over 365 days": np.exp(-age / 365),
        "decay over 120 days": np.exp(-age / 120),
    }


def _weighted(
    given: Namespace, pairs: Any, values: np.ndarray, times: np.ndarray, held: np.ndarray
) -> Table:
    table = Table(title=f"MovieLens-100K, u{given.fold}, rank {given.rank}: weights")
    for name in ("weights", "RMSE", "90 % intervals hold", "noise"):
        table.add_column(name)
    for name, weights in _weights(times).items():
        kept = None if weights is None else weights[~held]
        model = MatrixCompletion(given.rank, clip=False)
        model.fit(pairs[~held], values[~held], sample_weight=kept)
        low, high = model.predict_interval(pairs[held])
        inside = np.mean((low <= values[held]) & (values[held] <= high))
        error = _error(np.clip(model.predict(pairs[held]), 1, 5), values[held])
        table.add_row(name, f"{error:.4f}", f"{inside:.3f}", f"{model.noise_:.3f}")
    return table


def _streams(
    given: Namespace, pairs: Any, values: np.ndarray, times: np.ndarray, held: np.ndarray
) -> Table:
    table = Table(title=f"MovieLens-100K, u{given.fold}: {given.batches} batches")
    for name in ("kind", "stream RMSE", "refit RMSE"):
        table.add_column(name)
    order = np.random.default_rng(0).permutation(np.flatnonzero(~held))
    decay = np.exp(-(times.max() - times) / DAY / 200)
    kinds: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
        "gaussian": ({}, {}),
        "ordered": ({"likelihood": "ordered"}, {}),
        "binary (more than 3 stars)": ({"likelihood": "binary"}, {}),
        "weights (decay)": ({}, {"sample_weight": decay}),
        "times": ({}, {"time": times}),
    }
    for name, (how, extra) in kinds.items():
        y = (values > 3).astype(np.float64) if name.startswith("binary") else values
        asked = {"time": times[held]} if name == "times" else {}
        stream = MatrixCompletion(given.rank, **how)
        for part in np.array_split(order, given.batches):
            stream.partial_fit(pairs[part], y[part], **{k: v[part] for k, v in extra.items()})
        whole = MatrixCompletion(given.rank, **how)
        whole.fit(pairs[order], y[order], **{k: v[order] for k, v in extra.items()})
        errors = [_error(m.predict(pairs[held], **asked), y[held]) for m in (stream, whole)]
        table.add_row(name, *(f"{error:.4f}" for error in errors))
    return table


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)))
