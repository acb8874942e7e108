"""Many small regressions.

What a shared subspace is worth, against fitting each alone and all together.

    python examples/many_regressions.py many_regressions.png

Eighty tasks have the same ten features and coefficients that differ in two directions only. With
few rows per task ``SubspaceRegressor`` needs a fraction of the rows that separate fits need.
"""

from __future__ import annotations

import sys

import numpy as np
from matplotlib.figure import Figure
from sklearn.linear_model import Ridge, RidgeCV

from fisherfold import SubspaceRegressor


def main() -> Figure:
    """Fit with more and more rows per task and draw the error on fresh rows."""
    rng = np.random.default_rng(0)
    n_tasks = 80
    n_features = 10
    weights = rng.normal(size=n_features) + rng.normal(size=(n_tasks, 2)) @ rng.normal(
        size=(2, n_features)
    )

    def rows(per_task: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        task = np.repeat(np.arange(n_tasks), per_task)
        X = rng.normal(size=(len(task), n_features))
        return X, (X * weights[task]).sum(axis=1) + rng.normal(size=len(task)), task

    fresh, fresh_y, fresh_task = rows(50)
    sizes = (3, 5, 8, 12, 20, 40)
    errors: dict[str, list[float]] = {
        "shared subspace (fisherfold)": [],
        "each task alone": [],
        "all together": [],
    }
    for size in sizes:
        X, y, task = rows(size)
        shared = SubspaceRegressor(rank=2).fit(X, y, task=task).predict(fresh, task=fresh_task)
        alone = np.empty_like(fresh_y)
        for t in range(n_tasks):
            ridge = RidgeCV(np.logspace(-2, 2, 9)).fit(X[task == t], y[task == t])
            alone[fresh_task == t] = ridge.predict(fresh[fresh_task == t])
        together = Ridge().fit(X, y).predict(fresh)
        for name, guess in zip(errors, (shared, alone, together), strict=True):
            errors[name].append(float(np.mean((guess - fresh_y) ** 2)))
    for name, values in errors.items():
        print(f"{name:30}" + "  ".join(f"{value:6.2f}" for value in values))

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    panel = figure.subplots()
    for (name, values), style in zip(errors.items(), ("o-", "s--", "^:"), strict=True):
        panel.loglog(sizes, values, style, label=name)
    panel.axhline(1, color="grey", lw=0.8)
    panel.set_xticks(sizes, map(str, sizes))
    panel.set_xticks([], minor=True)
    panel.set(xlabel="rows per task", ylabel="squared error on fresh rows (grey: the noise)")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "many_regressions.png", dpi=100)
