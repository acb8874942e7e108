"""Ratings with holes: predictions with error bars, and what to watch next.

    python examples/ratings.py ratings.png

Three hundred people have rated a third or less of a hundred films. ``MatrixCompletion`` fills the
table and says how sure it is of every entry.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure

from fisherfold import MatrixCompletion


def main() -> Figure:
    """Fit, recommend, and draw the error bars against what was held out."""
    rng = np.random.default_rng(0)
    table = 3 + rng.normal(size=(300, 3)) @ rng.normal(size=(3, 100)) / 2
    seen = rng.random(table.shape) < np.geomspace(0.03, 0.35, 300)[:, None]
    pairs = np.argwhere(seen)
    ratings = table[seen] + 0.3 * rng.normal(size=len(pairs))

    model = MatrixCompletion(rank=5).fit(pairs, ratings)
    best = model.recommend(299, k=3)
    print(
        "for person 299:", ", ".join(f"film {film} ({score:.2f})" for _, film, score in best.rows())
    )

    fresh = np.argwhere(~seen)
    mean, std = model.predict(fresh, return_std=True)
    target = table[~seen] + 0.3 * rng.normal(size=len(fresh))
    inside = np.abs(target - mean) < 1.645 * std
    rmse = np.sqrt(np.mean((target - mean) ** 2))
    print(f"held out: RMSE {rmse:.3f}, in their 90 % interval {100 * inside.mean():.1f} %")

    counts = seen.sum(axis=1)[fresh[:, 0]]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    some = rng.choice(len(fresh), 60, replace=False)
    some = some[np.argsort(mean[some])]
    left.errorbar(
        range(60), mean[some], 1.645 * std[some], fmt=".", capsize=2, label="prediction, 90 %"
    )
    left.plot(range(60), target[some], "x", color="#d55e00", label="held out")
    left.set(xlabel="sixty unseen pairs, sorted", ylabel="rating")
    left.legend(frameon=False)
    edges = [1, 5, 10, 15, 20, 30, 45]
    groups = [(counts >= low) & (counts < high) for low, high in pairwise(edges)]
    middle = [(low + high) / 2 for low, high in pairwise(edges)]
    right.plot(middle, [std[g].mean() for g in groups], "o-", label="predicted standard deviation")
    right.plot(
        middle,
        [np.sqrt(np.mean((target - mean)[g] ** 2)) for g in groups],
        "s--",
        label="error that was made",
    )
    right.axhline(0.3, color="grey", lw=0.8)
    right.set(
        xlabel="ratings that the person has given (grey: the noise)",
        ylabel="rating",
        ylim=(0, None),
    )
    right.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "ratings.png", dpi=100)
